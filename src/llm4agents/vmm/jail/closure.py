"""The root a VMM sees: its program, what its ELF asks for, what it reads by name, empty places to bind onto. No more.

Copied once per content into the cache, owned by us and read-only, and used by every VMM of that program: the shim
makes it the VMM's root. Every file lies where it lies on the host, so a command line means the same in it. Not here:
which files a VMM reads by name (its driver knows), how the root is entered (`shim/src/mounts.rs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llm4agents import limits
from llm4agents.errors import HostSetupError

_LAYOUT = 1
"""Changes when this code would make another directory of the same files."""
_NEEDED = re.compile(r"^\s+(?:(\S+) => )?(/\S+|not found)(?: \(0x[0-9a-f]+\))?$", re.MULTILINE)
_PT_INTERP = 3
_LIST_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Closure:
    path: Path
    digest: str


async def closure(
    program: str,
    cache_dir: Path,
    *,
    modules: Sequence[Path] = (),
    files: Sequence[Path] = (),
    places: Sequence[str] = (),
) -> Closure:
    """The directory with `program` (absolute), made in `cache_dir/jail` if it is not there yet.

    `modules`: shared objects it loads by name. `files`: what it reads by name. `places`: absolute paths that are
    empty files in it (one that ends in `/`: an empty directory), to bind devices or files onto; `/proc` and `/dev` are
    empty directories. Many may ask at once.
    Raises HostSetupError when the program or a library is missing, or the cache is somebody else's.
    """
    sources = {name: name for name in (program, *map(str, (*modules, *files)))}
    for name in (program, *map(str, modules)):
        for found in await _libraries(name):
            sources.setdefault(found, found)
    return await asyncio.to_thread(_made, cache_dir / "jail", sources, sorted(places))


# -- what a program needs ---------------------------------------------------------------------------------


def interpreter(elf: bytes) -> str | None:
    """The loader that the first bytes of an ELF file name; None when it needs none. Pure.

    Raises ValueError when it is no ELF file for 64 bits, or its headers are not within what was given.
    """
    if elf[:6] != b"\x7fELF\x02\x01" or len(elf) < 64:
        raise ValueError("it is no 64-bit ELF program")
    (table,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    for number in range(count):
        at = table + number * size
        if at + 56 > len(elf):
            raise ValueError("its program headers are not at its beginning")
        (kind,) = struct.unpack_from("<I", elf, at)
        offset, length = struct.unpack_from("<Q16xQ", elf, at + 8)
        if kind == _PT_INTERP:
            return elf[offset : offset + length].rstrip(b"\0").decode()
    return None


def needed(listing: str) -> list[str]:
    """The files in what a loader says for `--list`. Pure. Raises ValueError naming a library that is missing."""
    found = []
    for match in _NEEDED.finditer(listing):
        if match[2] == "not found":
            raise ValueError(f"it needs {match[1]}, which is not installed")
        found.append(match[2])
    return found


async def _libraries(program: str) -> list[str]:
    """The loader of `program` and every library it would load, as it finds them on this host."""
    try:
        loader = await asyncio.to_thread(_loader, Path(program))
        if loader is None and program.endswith(".so"):
            loader = _loader(Path("/proc/self/exe"))  # a shared object names none
        if loader is None:
            return []
        # The loader itself knows its search paths, caches and run paths best; it executes nothing of what it lists.
        process = await asyncio.create_subprocess_exec(
            loader,
            "--list",
            program,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"LC_ALL": "C"},
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), _LIST_TIMEOUT_S)
        except TimeoutError:
            raise ValueError(f"{loader} did not list its libraries") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise ValueError(err.decode(errors="replace").strip()[-300:] or "its libraries cannot be listed")
        return [loader, *needed(out.decode(errors="replace"))]
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise HostSetupError(
            f"{program} cannot be put into a root of its own: {why}",
            hint="install it from your distribution's package, and name the program itself and no script",
        ) from error


def _loader(program: Path) -> str | None:
    with program.open("rb") as file:
        return interpreter(file.read(65536))


# -- the directory ----------------------------------------------------------------------------------------


def key(identities: Mapping[str, Sequence[int]], places: Iterable[str]) -> str:
    """The name of the directory with these files (path in it: size, time, inode of its source). Pure."""
    parts = [_LAYOUT, sorted((name, *numbers) for name, numbers in identities.items()), sorted(places)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _made(directory: Path, sources: Mapping[str, str], places: Sequence[str]) -> Closure:
    try:
        identities = {}
        for inside, source in sources.items():
            found = Path(source).stat()
            identities[inside] = (found.st_size, found.st_mtime_ns, found.st_ino)
        digest = key(identities, places)
        path = directory / digest
        if not path.exists():
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            _forget(directory)
            _build(path, sources, places)
        touch(path)
        found = path.lstat()
    except OSError as error:
        raise HostSetupError(
            f"the root for virtual machine monitors cannot be made in {directory}: {error.strerror}",
            hint="LLM4AGENTS_CACHE names a directory that can be written",
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise HostSetupError(f"{path} is not ours alone: remove it, or set LLM4AGENTS_CACHE to another place")
    return Closure(path, digest)


def touch(path: Path) -> None:
    """It is in use: what nobody has used for long is removed when another is made."""
    with contextlib.suppress(
        OSError
    ):  # of the file system or of somebody else: then it is not removed by us, either
        os.utime(path)


def _forget(directory: Path) -> None:
    """Remove roots of programs that were replaced long ago, and what a killed build has left. Live VMMs have theirs
    mounted and need no name of it any more."""
    now = time.time()
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            kept_s = limits.CLOSURE_BUILD_S if path.name.startswith(".") else limits.CLOSURE_KEPT_S
            if now - path.lstat().st_mtime > kept_s:
                _remove(path)


def _remove(path: Path) -> None:
    _set_modes(path, 0o755)
    shutil.rmtree(path, ignore_errors=True)


def _build(path: Path, sources: Mapping[str, str], places: Sequence[str]) -> None:
    """Make `path` whole or not at all; who is second finds it there."""
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        room = 0
        for inside, source in sources.items():
            target = _inside(work, inside)
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o555 if Path(source).stat().st_mode & 0o111 else 0o444)
            room += target.stat().st_size
            if room > limits.CLOSURE_BYTES_MAX:
                raise HostSetupError(
                    f"{path} would hold more than {limits.CLOSURE_BYTES_MAX >> 20} MiB: no such program needs that"
                )
        for name in ("/proc", "/dev"):
            _inside(work, name).mkdir(exist_ok=True)
        for name in places:
            place = _inside(work, name)
            if name.endswith("/"):
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch(exist_ok=True)
            place.chmod(0o444)
        _set_modes(work, 0o555)
        try:
            work.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        if work.exists():
            _remove(work)


def _set_modes(root: Path, mode: int) -> None:
    """Of `root` and every directory below it."""
    for directory, _, _ in os.walk(root):
        Path(directory).chmod(mode)


def _inside(root: Path, name: str) -> Path:
    """`name`, absolute, below `root`; `..` in it is what it is by its text."""
    plain = PurePosixPath(os.path.normpath(name))
    return root / plain.relative_to("/")
