"""What the laboratory is made of, from this host's cache and checkout: its digest, and archives of it for the guest.

Two halves. The slow one is baked into the template (packages, kernel, root file systems, VMM); the quick one, our
own source and binaries, is uploaded at each run, so that a changed line costs a clone and no new laboratory.
Not here: the sandbox (`laboratory`), what happens in it (`inside`).
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import py_compile
import re
import subprocess
import sysconfig
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from llm4agents import binaries as ours
from llm4agents.barrier.ca import Authority
from llm4agents.config import settings
from llm4agents.images import process, spec
from llm4agents.images.cache import Cache
from llm4agents.images.kernel import Kernel, build_kernel
from llm4agents.images.rootfs import Rootfs, build_rootfs

from .binaries import NAMES, Binary, find

ROOT = Path(__file__).resolve().parents[2]
FORMAT = 2
"""To be changed with what `laboratory` and this module bake in, when an older laboratory would not do."""
HOME = "/lab"
"""In the guest: `bin`, `site` (packages), `cache`, `parts.json`; and of each run `tree`, `own`, `out`."""
TEMPLATES = ("base",)
"""Whose root file systems are in it (`suite.NEED_PYTHON` says why not more)."""
DEBS = ("nftables", "e2fsprogs", "qemu-utils", "iproute2", "mount")
"""What a host of ours has and the guest lacks."""
_LEFT_OUT = (
    "mypy",
    "mypyc",
    "ruff",
    "pip",
    "setuptools",
    "pkg_resources",
    "numpy",
    "pandas",
    "vega_datasets",
)
"""Packages of the host's that no test needs in there, or that the guest's template brings; the largest ones."""


@dataclass(frozen=True)
class Ingredients:
    kernel: Kernel
    rootfs: dict[str, Rootfs]
    vmms: dict[str, Binary]
    site: Path

    @property
    def digest(self) -> str:
        """Of all that is baked in (20 hex digits), not of the machine around it: what cannot be loaded is made anew."""
        body = {
            "format": FORMAT,
            "kernel": self.kernel.digest,
            "rootfs": {name: made.digest for name, made in self.rootfs.items()},
            "vmms": {name: binary.sha256 for name, binary in self.vmms.items()},
            "packages": sorted(path.name for path in self.site.glob("*.dist-info")),
            "debs": DEBS,
        }
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:20]


def collect() -> Ingredients:
    """From the cache, where they are; built where they are not. Raises `binaries.Unreachable`, HostSetupError."""
    vmms = find(settings().cache / "lab")
    cache = Cache(settings().cache)

    async def images() -> tuple[Kernel, dict[str, Rootfs]]:
        async with cache.building():
            kernel = await build_kernel(cache)
            authority = Authority.open(settings().ca_directory).certificate_pem
            made = {
                name: await build_rootfs(spec.get(name), cache, authority=authority) for name in TEMPLATES
            }
        return kernel, made

    kernel, rootfs = asyncio.run(images())
    return Ingredients(kernel, rootfs, vmms, Path(sysconfig.get_path("purelib")))


def parts_json(made: Ingredients) -> bytes:
    """What `inside.seed` writes into the guest's cache: the answers to what it would otherwise build."""
    kernel = made.kernel
    body: dict[str, Any] = {
        "kernel": {
            "release": kernel.release,
            "package": kernel.package,
            "version": kernel.version,
            "vmlinux": kernel.digest,
            "modules": [[name, path.name] for name, path in kernel.modules],
            "nested": [[name, path.name] for name, path in kernel.nested],
        },
        "rootfs": {
            name: {"digest": image.digest, "contents": [asdict(item) for item in image.contents]}
            for name, image in made.rootfs.items()
        },
    }
    return json.dumps(body).encode()


# --- archives


def _member(archive: tarfile.TarFile, name: str, path: Path, mode: int = 0o644) -> None:
    info = archive.gettarinfo(path, name)
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = mode
    with path.open("rb") as file:
        archive.addfile(info, file)


def _data(archive: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    archive.addfile(info, io.BytesIO(data))


def baked(archive: tarfile.TarFile, made: Ingredients) -> None:
    """The slow half."""
    for name in NAMES:
        _member(archive, f"bin/{name}", made.vmms[name].path, 0o755)
    _data(archive, "parts.json", parts_json(made))
    blobs = [made.kernel.vmlinux, *(path for _, path in (*made.kernel.modules, *made.kernel.nested))]
    blobs += [image.path for image in made.rootfs.values()]
    for blob in blobs:
        _member(archive, f"cache/blobs/sha256/{blob.name[:2]}/{blob.name}", blob, 0o444)
    for path in sorted(made.site.rglob("*")):
        relative = path.relative_to(made.site)
        if re.split("[-.]", relative.parts[0])[0] in _LEFT_OUT or "mypyc" in relative.parts[0]:
            continue
        if path.is_file() and "tests" not in relative.parts[:-1]:
            _member(archive, f"site/{relative}", path)


def source(archive: tarfile.TarFile) -> None:
    """The quick half: our source as it is in this checkout, compiled, and our binaries."""
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
            "src",
            "tests",
            "pyproject.toml",
        ],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    compiled = settings().cache / "lab" / "pyc"
    compiled.mkdir(parents=True, exist_ok=True)
    for name in sorted(filter(None, listed.split("\0"))):
        path = ROOT / name
        if not path.is_file():  # removed and not yet said to git
            continue
        _member(archive, f"tree/{name}", path)
        if name.endswith(".py") and name.startswith("src/") and "/data/" not in name:
            where = Path(name).parent / "__pycache__" / f"{Path(name).stem}.cpython-{_TAG}.pyc"
            _data(archive, f"tree/{where}", _byte_code(path, name, compiled))
    for name in (ours.AGENT, ours.SHIM):
        _member(archive, f"own/{name}", ours.path(name), 0o755)


_TAG = sysconfig.get_config_var("py_version_nodot")


def _byte_code(path: Path, name: str, compiled: Path) -> bytes:
    """Made here, where Python is ten times faster; valid by content, since times do not survive the way."""
    text = path.read_bytes()
    kept = compiled / f"{_TAG}-{hashlib.sha256(name.encode() + text).hexdigest()}"
    if not kept.exists():
        tmp = kept.with_name(f".{kept.name}.{os.getpid()}")
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(
            str(path), cfile=str(tmp), dfile=f"{HOME}/tree/{name}", doraise=True, invalidation_mode=mode
        )
        tmp.replace(kept)
    return kept.read_bytes()


@contextmanager
def stream(write: Callable[[tarfile.TarFile], None]) -> Iterator[IO[bytes]]:
    """The archive that `write` fills, to be read while it is made: nothing of it lies on disk."""
    read, sink = os.pipe()
    failed: list[BaseException] = []

    def fill() -> None:
        try:
            with os.fdopen(sink, "wb") as file, tarfile.open(fileobj=file, mode="w|") as archive:
                write(archive)
        except BrokenPipeError:
            pass  # the reader has given up and says why
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=fill)
    with os.fdopen(read, "rb") as file:
        thread.start()
        try:
            yield file
        finally:
            file.close()
            thread.join()
    if failed:
        raise failed[0]


# --- Debian packages for the guest


@contextmanager
def debian_packages(status: bytes) -> Iterator[list[Path]]:
    """DEBS and what they need beyond what `status` (the guest's /var/lib/dpkg/status) says is there."""
    with tempfile.TemporaryDirectory(prefix="l4a-lab-debs-") as name:
        tmp = Path(name)
        (tmp / "status").write_bytes(status)

        async def fetch() -> None:
            argv = ["apt-get", "install", "--print-uris", "-qq", "-y", "--no-install-recommends"]
            argv += ["-o", f"Dir::State::status={tmp / 'status'}", *DEBS]
            lines = (await process.run(argv, cwd=tmp)).decode().splitlines()
            wanted = [line.split()[1].split("_") for line in lines if line.startswith("'")]
            exact = [f"{package}={version.replace('%3a', ':')}" for package, version, *_ in wanted]
            await process.run(["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *exact], cwd=tmp)

        asyncio.run(fetch())
        yield sorted(tmp.glob("*.deb"))


_MERGED = re.compile(r"^(bin|sbin|lib|lib64)/")
_UNREAD = re.compile(r"^usr/share/(doc|man|info|locale|lintian|bash-completion)/")


def unpacked(archive: tarfile.TarFile, debs: Iterable[Path]) -> None:
    """The files of Debian packages, where they are installed. Their scripts are not run: the ones here need none."""
    for deb in debs:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE) as reading:
            assert reading.stdout is not None
            with tarfile.open(fileobj=reading.stdout, mode="r|") as content:
                for member in content:
                    # A guest's /bin and /lib are links into /usr.
                    member.name = _MERGED.sub(r"usr/\1/", member.name.removeprefix("./"))
                    if not member.isdir() and not _UNREAD.match(member.name):
                        archive.addfile(member, content.extractfile(member) if member.isfile() else None)
