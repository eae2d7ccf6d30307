"""The servers as fixtures: one of each for a session, started by the first test that asks."""

from collections.abc import Generator, Iterator

import pytest

from . import servers
from .proxy import Proxy, proxies
from .servers import Cloud, Server, clouds, use


def _held(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    yield from _held(servers.start_moto())


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[Server]:
    yield from _held(servers.start_seaweedfs())


@pytest.fixture(scope="session")
def azurite() -> Iterator[Server]:
    yield from _held(servers.start_azurite())


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    yield from _held(servers.start_redis())


@pytest.fixture(
    params=[
        "moto",
        "google",
        pytest.param("seaweedfs", marks=pytest.mark.services),
        pytest.param("azurite", marks=pytest.mark.services),
    ]
)
def cloud(request: pytest.FixtureRequest) -> Cloud:
    """Every kind of bucket in turn."""
    behind = {"google": "moto"}.get(request.param, request.param)
    return clouds()[request.param](request.getfixturevalue(behind))


@pytest.fixture
def proxy(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the cloud; the environment leads through it."""
    with Proxy(cloud.server.port, dialects=cloud.dialects) as between:
        use(monkeypatch, cloud.environment(between.port))
        yield between


@pytest.fixture
def url(cloud: Cloud, proxy: Proxy) -> str:
    """An empty place in a bucket, reached through the proxy."""
    return cloud.new_url()


def pytest_runtest_setup() -> None:
    for server in servers.running:
        server.mark()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a test that failed, show what the servers logged meanwhile, and every fault."""
    report = yield
    if report.failed:
        report.sections += [
            (f"log of {server.name}", news) for server in servers.running if (news := server.news())
        ]
        report.sections += [
            (f"proxy before port {proxy.behind}", proxy.story()) for proxy in proxies
        ]
    return report


@pytest.fixture(scope="session")
def moto_port(moto: Server) -> int:
    return moto.port
