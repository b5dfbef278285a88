"""A real registry on loopback, with and without a password, and a cache of each test's own."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm4agents.images.cache import Cache
from tests.support import eventually

NAME, PASSWORD = "reader", "pass-word"
_HASH = "$2b$04$0Wl0ScP3trH1VNnnQDXUSezaCS9R009tCqq5mC6uvEjnEoLoYYO86"
"""Of it, by bcrypt: the registry takes no other."""
TOOLS = ("docker-registry", "skopeo", "umoci")


class Server:
    """A docker-registry process."""

    def __init__(self, home: Path, *, private: bool) -> None:
        self.home = home
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        auth = ""
        if private:
            (home / "htpasswd").write_text(f"{NAME}:{_HASH}\n")
            auth = f"auth: {{htpasswd: {{realm: here, path: {home}/htpasswd}}}}\n"
        (home / "config.yml").write_text(
            f"version: 0.1\nlog: {{level: warn}}\nstorage: {{filesystem: {{rootdirectory: {home}/data}}}}\n"
            f"http: {{addr: '127.0.0.1:{self.port}', secret: x}}\n{auth}"
        )
        with (home / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["docker-registry", "serve", str(home / "config.yml")], stdout=log, stderr=log
            )
        eventually(self._listens, 30)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _listens(self) -> bool:
        assert self._process.poll() is None, (self.home / "log").read_text()
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def push(self, image: str, name: str, *options: str) -> str:
        """Copy an image there by skopeo; its reference."""
        command = ["skopeo", "copy", "-q", "--insecure-policy", "--dest-tls-verify=false", *options]
        subprocess.run([*command, image, f"docker://{self.host}/{name}"], check=True, capture_output=True)
        return f"{self.host}/{name}"

    def blob(self, digest: str) -> Path:
        """The file it keeps a blob in."""
        hexadecimal = digest.removeprefix("sha256:")
        return self.home / "data/docker/registry/v2/blobs/sha256" / hexadecimal[:2] / hexadecimal / "data"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def _server(tmp: pytest.TempPathFactory, private: bool) -> Iterator[Server]:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    server = Server(tmp.mktemp("registry"), private=private)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _server(tmp_path_factory, private=False)


@pytest.fixture(scope="session")
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _server(tmp_path_factory, private=True)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")
