"""What of ours goes over Debian's files in a root file system, as one tar. Not for how it gets there.

Written straight into a tar, so that owners and modes are what they should be whoever builds, and nothing of a
wheel is ever a file on the host.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path

from llm4agents import limits
from llm4agents.errors import HostSetupError
from llm4agents.images import npm, trust
from llm4agents.images.debian import Source
from llm4agents.images.process import Cancel
from llm4agents.images.reseed import shared_object
from llm4agents.images.spec import NODE_DIRECTORY, RUNNER_DIRECTORY, NpmPackage, TemplateSpec
from llm4agents.images.wheels import WheelFile, WheelInfo, unpack

EPOCH = 1_735_689_600
"""Every file's time, 2025-01-01: equal inputs make equal images, and zip refuses what is older than 1980."""
DATA = Path(__file__).parent / "data"

RESOLV_CONF = f"""# Names are answered by this sandbox's network policy, which is kept on the host: a name that
# is not allowed does not exist. `llm4agents net why ID URL` says why, `llm4agents net set ID ...` changes it.
nameserver {limits.GATEWAY_ADDRESS}
"""
_APT_CONF = 'APT::Install-Recommends "0";\nAPT::Sandbox::User "root";\n'


def runner_files(directory: Path = DATA / "runner") -> dict[str, bytes]:
    """The interpreter's files by path below RUNNER_DIRECTORY."""
    paths = [
        path for path in sorted(directory.rglob("*")) if path.is_file() and "__pycache__" not in path.parts
    ]
    if not any(path.suffix == ".py" for path in paths):
        raise HostSetupError("this installation has no interpreter runner", hint="install llm4agents again")
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def node_files(directory: Path = DATA / "node") -> dict[str, bytes]:
    """The files of Node's runner by path below NODE_DIRECTORY."""
    found = {path.name: path.read_bytes() for path in sorted(directory.glob("*.js"))}
    if not found:
        raise HostSetupError("this installation has no runner for Node", hint="install llm4agents again")
    return {**found, "reseed.node": shared_object()}


def sources_list(sources: Iterable[Source]) -> str:
    """The guest's apt sources: the host's, without whatever password their addresses hold."""
    return "".join(re.sub(r"//[^/@ ]*@", "//", source.line()) + "\n" for source in sources)


class Overlay:
    """A tar under construction; parents come before children, a path comes once."""

    def __init__(self, path: Path) -> None:
        self._tar = tarfile.open(path, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 (closed by close)
        self._directories: set[str] = set()
        self._files: dict[str, bytes] = {}  # by path: a digest, compilers are large

    def add(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """One file of root's. The same file again is left out; a different one of that path is refused."""
        if not path.startswith("/") or ".." in path.split("/"):
            raise HostSetupError(f"{path} is not a path in the guest")
        digest = hashlib.sha256(data).digest()
        if path in self._files or path in self._directories:
            if self._files.get(path) != digest:
                raise HostSetupError(f"two packages bring a different {path}")
            return
        self._files[path] = digest
        self._parents(path)
        info = tarfile.TarInfo(path.lstrip("/"))
        info.size, info.mode, info.mtime = len(data), mode, EPOCH
        self._tar.addfile(info, io.BytesIO(data))

    def _parents(self, path: str) -> None:
        parts = path.strip("/").split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            directory = "/" + "/".join(parts[:depth])
            if directory in self._files:
                raise HostSetupError(f"two packages disagree whether {directory} is a directory")
            # Only what Debian does not make itself: its directories keep their own modes.
            if directory not in self._directories and depth > 2:
                info = tarfile.TarInfo(directory.lstrip("/"))
                info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, EPOCH
                self._tar.addfile(info)
            self._directories.add(directory)

    def close(self) -> None:
        self._tar.close()


def write_overlay(
    path: Path,
    spec: TemplateSpec,
    *,
    python: str,
    sources: list[Source],
    wheels: list[Path],
    archives: dict[NpmPackage, Path],
    certificates: dict[str, bytes],
    browsers: dict[str, bytes],
    cancel: Cancel,
) -> list[WheelInfo]:
    """Write the tar for `spec`; returns what the wheels are. HostSetupError for one that is not in order."""
    infos: list[WheelInfo] = []
    overlay = Overlay(path)
    try:
        overlay.add("/etc/hostname", b"sandbox\n")
        overlay.add(
            "/etc/hosts", b"127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n"
        )
        overlay.add("/etc/resolv.conf", RESOLV_CONF.encode())
        overlay.add("/etc/apt/sources.list", sources_list(sources).encode())
        overlay.add("/etc/apt/apt.conf.d/90llm4agents", _APT_CONF.encode())
        for name, data in certificates.items():
            overlay.add(f"{trust.DIRECTORY}/{name}", data)
        for path_in_guest, data in browsers.items():
            overlay.add(path_in_guest, data)
        for file in spec.files:
            overlay.add(file.path, file.content.encode(), file.mode)
        if spec.runner:
            for name, data in runner_files().items():
                overlay.add(f"{RUNNER_DIRECTORY}/{name}", data)
        if spec.node:
            for name, data in node_files().items():
                overlay.add(f"{NODE_DIRECTORY}/{name}", data)
        for wheel in wheels:
            for item in unpack(wheel, python, spec.drop, cancel, spec.moves):
                if isinstance(item, WheelFile):
                    overlay.add(item.path, item.data, item.mode)
                else:
                    infos.append(item)
        for package, archive in archives.items():
            for path_in_guest, data, mode in npm.files(package, archive):
                overlay.add(path_in_guest, data, mode)
    finally:
        overlay.close()
    return infos
