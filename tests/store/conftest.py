"""One S3 server for all tests of stores."""

import pytest

from services.servers import Server


@pytest.fixture(scope="session")
def moto_port(moto: Server) -> int:
    return moto.port
