"""One S3 server for all tests of stores."""

from collections.abc import Iterator

import pytest

from .servers import start_moto, stop


@pytest.fixture(scope="session")
def moto_port() -> Iterator[int]:
    """One S3 server for all tests; ended by its own process id."""
    server, port = start_moto()
    try:
        yield port
    finally:
        stop(server)
