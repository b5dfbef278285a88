"""`protect=`: paths of a template that a sandbox has read-only, from an image of their own.

The image is made once for a template and its paths, from a clone of it that does nothing else and whose processes stay
frozen, and is kept in the cache. A sandbox gets it as a disk (`vol0`), the guest's agent mounts it over the paths
before any process runs (agent/src/protect.rs). No machine writes to the image: what a guest's root writes to that disk
goes into an overlay, or a copy, of its own that is thrown away at each start.

Not here: what is mounted how (the agent), what an image is (`images.erofs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import posixpath
import secrets
import shutil
import stat
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from llm4agents import limits
from llm4agents.engine import contact, parts, tops
from llm4agents.engine.admission import Admission
from llm4agents.engine.parts import Variant
from llm4agents.errors import CapacityError, GuestError, InvalidRequestError, PathNotFoundError
from llm4agents.guest import trees
from llm4agents.guest.results import Entry
from llm4agents.guest.verbs import Agent
from llm4agents.images.cache import Cache, digest_of
from llm4agents.images.erofs import Image, Inode
from llm4agents.images.process import in_thread
from llm4agents.images.progress import Progress, silent
from llm4agents.store import SandboxRow
from llm4agents.vmm.base import Disk, Placement, Snapshot
from llm4agents.vmm.choice import Drivers

SLOT: Final = "vol0"
FORMAT: Final = 1
PRIVATE: Final = "protect"
_IMAGE, _EMPTY, _ABOUT = "image.erofs", "empty.qcow2", "protect.json"
_LINKS_MAX = 40
_NOT = ("/", "/proc", "/sys", "/dev", "/run", "/run/llm4agents")
"""Not of a template's disk, or what the guest's agent needs to write to."""


@dataclass(frozen=True, slots=True)
class Covered:
    """`target`, where the guest has it, and what of the image lies there."""

    source: str
    target: str
    directory: bool


@dataclass(frozen=True, slots=True)
class Protection:
    """An image in the cache, and what the agent does with it.

    `pins`: directories that must not be renamed, outermost first.
    """

    path: Path
    bytes: int
    covered: tuple[Covered, ...]
    pins: tuple[str, ...]

    def request(self) -> dict[str, Any]:
        """As `post_restore` has it."""
        paths = [{"source": c.source, "target": c.target, "directory": c.directory} for c in self.covered]
        return {"slot": SLOT, "bytes": self.bytes, "paths": paths, "pins": list(self.pins)}

    async def disk(self, top: Path) -> Disk:
        """The disk of a machine about to start: a private one of the form of its `top`, beside that.

        Raises CapacityError.
        """
        private = top.with_name(PRIVATE + top.suffix)
        private.unlink(missing_ok=True)
        await tops.of(top).over(self.path / _IMAGE, self.path / _EMPTY, private)
        return parts.writable(SLOT, private, (self.path / _IMAGE,))


def wanted(paths: Iterable[str]) -> tuple[str, ...]:
    """What a create asks for: absolute, each once, without what lies below another. Pure.

    Raises InvalidRequestError.
    """
    plain = set()
    for path in paths:
        names = path.split("/")
        if not path.startswith("/") or "\0" in path or ".." in names or len(os.fsencode(path)) > 1_024:
            raise InvalidRequestError(
                f"protect={path[:200]!r}: an absolute path of the template, without `..`, is wanted"
            )
        plain.add(posixpath.normpath("/" + path.strip("/")))
    for path in sorted(plain):
        if path in _NOT or path.startswith(("/proc/", "/sys/", "/dev/")):
            raise InvalidRequestError(
                f"protect={path!r} is not possible: it is not of the template's disk, or all of it",
                hint="name the files or directories that matter",
            )
    if len(plain) > limits.PROTECT_PATHS_MAX:
        raise InvalidRequestError(
            f"protect= takes at most {limits.PROTECT_PATHS_MAX} paths", hint="name a directory"
        )
    return outermost(plain)


def outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Sorted, without those that lie below another. Pure."""
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not any(path.startswith(above + "/") for above in kept):
            kept.append(path)
    return tuple(kept)


class Protecting:
    """The images of one cache."""

    def __init__(self, cache: Cache, drivers: Drivers, admission: Admission, machines: Path) -> None:
        """`machines`: where machines' run directories are."""
        self._cache, self._drivers, self._admission, self._machines = cache, drivers, admission, machines
        self._root = cache.root / "protect"

    async def of(self, row: SandboxRow, variant: Variant, snapshot: Snapshot) -> Protection | None:
        """What a sandbox asked for at its create; None when that was nothing."""
        return await self.ensure(variant, snapshot, row.protect) if row.protect else None

    async def ensure(
        self, variant: Variant, snapshot: Snapshot, paths: Sequence[str], progress: Progress = silent
    ) -> Protection:
        """The image of those paths (as `wanted` gives them), made if it is not there.

        Raises PathNotFoundError or InvalidRequestError for a path that cannot be protected, CapacityError, BootError.
        """
        key = self._key(variant, paths)
        found = _load(self._root / key)
        if found is not None:
            return found
        async with self._cache.lock(f"protect-{key}", progress):
            found = _load(self._root / key)
            if found is None:
                progress("protect", f"an image of {', '.join(paths)[:80]}", None)
                await self._build(variant, snapshot, paths, self._root / key)
                found = _load(self._root / key)
        assert found is not None
        return found

    @staticmethod
    def _key(variant: Variant, paths: Sequence[str]) -> str:
        return digest_of({"format": FORMAT, "template": variant.key, "paths": list(paths)})[:32]

    async def _build(self, variant: Variant, snapshot: Snapshot, paths: Sequence[str], dest: Path) -> None:
        ident = f"build-{secrets.token_hex(6)}"
        run_dir = self._machines / ident
        async with self._cache.workdir() as tmp:
            built = tmp / "protect"
            built.mkdir(mode=0o755)
            form = tops.of(variant.disk_format)
            top = tmp / form.first
            await form.over(variant.upper, variant.empty, top)
            run_dir.mkdir(parents=True, mode=0o700)
            machine = None
            try:
                async with self._admission.building(ident, variant.memory_mib):
                    placement = Placement(ident, run_dir, time.time() + limits.BUILD_TIMEOUT_S)
                    try:
                        driver = self._drivers.of(variant.vmm)
                        machine = await driver.restore(snapshot, placement, variant.disks(top))
                        await machine.resume()
                        agent = await contact.greet(machine, timeout=limits.RESTORE_TIMEOUT_S)
                        with (tmp / "spool").open("w+b") as spool:
                            image, covered, pins = await _collect(agent, paths, spool)
                            await agent.session.close()
                            size = await in_thread(lambda _: _write(image, built / _IMAGE))
                    finally:
                        if machine is not None:
                            await asyncio.shield(machine.stop())
            finally:
                shutil.rmtree(run_dir, ignore_errors=True)
            (built / _IMAGE).chmod(0o444)
            await form.finish(built / _IMAGE, built / _EMPTY, named=dest / _IMAGE)
            about = {
                "format": FORMAT,
                "template": variant.name,
                "key": variant.key,
                "bytes": size,
                "covered": [[c.source, c.target, c.directory] for c in covered],
                "pins": pins,
            }
            (built / _ABOUT).write_text(json.dumps(about, indent=1))
            await in_thread(lambda _: self._cache.publish(built, dest))

    def prune(self, rows: Iterable[SandboxRow], *, everything: bool) -> list[str]:
        """Remove images whose template is gone, or (`everything`) that no sandbox of `rows` has; their paths."""
        used = {
            digest_of({"format": FORMAT, "template": row.template_key, "paths": list(row.protect)})[:32]
            for row in rows
            if row.protect
        }
        gone = []
        for path in sorted(self._root.iterdir()) if self._root.is_dir() else []:
            if path.name in used:
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                about = json.loads((path / _ABOUT).read_text())
                template = self._cache.templates / str(about["template"]) / "keys" / str(about["key"])
                if template.is_dir() and not everything:
                    continue
            shutil.rmtree(path, ignore_errors=True)
            gone.append(str(path))
        return gone


def _load(path: Path) -> Protection | None:
    try:
        about = json.loads((path / _ABOUT).read_text())
        if about["format"] != FORMAT or (path / _IMAGE).stat().st_size != about["bytes"]:
            return None
        covered = tuple(Covered(str(entry[0]), str(entry[1]), bool(entry[2])) for entry in about["covered"])
        return Protection(path, int(about["bytes"]), covered, tuple(map(str, about["pins"])))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _write(image: Image, path: Path) -> int:
    with path.open("w+b") as out:
        return image.write(out)


async def _collect(
    agent: Agent, paths: Sequence[str], spool: BinaryIO
) -> tuple[Image, list[Covered], list[str]]:
    """Read what lies at `paths` of a guest that stands still."""
    looks = [await _look(agent, path) for path in paths]
    targets = outermost(look.target for look in looks)
    if bad := [target for target in targets if target in _NOT]:
        raise InvalidRequestError(f"protect= leads to {bad[0]}, which cannot be protected")
    image, covered = Image(spool), []
    pins: set[str] = set()
    for number, target in enumerate(targets):
        look = next(look for look in looks if look.target == target)
        pins.update(look.pins)
        name, entry = str(number), look.entry
        begin = spool.seek(0, os.SEEK_END)
        inode = Inode(
            (entry.mode & 0o1777) | (stat.S_IFDIR if entry.kind == "directory" else stat.S_IFREG),
            entry.uid,
            entry.gid,
            round(entry.mtime * 1e9),
        )
        if entry.kind == "directory":
            stream = await trees.tar_out(agent, target, user="root")
            async with stream:
                await _spooled(aiter(stream), spool)
            if stream.packed is not None and stream.packed.unreadable:
                raise GuestError(
                    f"{stream.packed.first_unreadable} cannot be read to protect it", code="permission"
                )
            await in_thread(lambda _, name=name, inode=inode, begin=begin: image.add_tar(name, inode, begin))  # type: ignore[misc]
        else:
            file = await agent.read(target, user="root")
            async with file:
                await _spooled(aiter(file), spool)
            inode.at, inode.size = begin, spool.tell() - begin
            image.add(name, inode)
        covered.append(Covered(name, target, entry.kind == "directory"))
    return image, covered, sorted(pins, key=lambda pin: (pin.count("/"), pin))


async def _spooled(pieces: Any, spool: BinaryIO) -> None:
    async with contextlib.aclosing(pieces) as chunks:
        async for chunk in chunks:
            spool.write(chunk)
            if spool.tell() > 2 * limits.PROTECT_BYTES_MAX:
                raise CapacityError(
                    f"the protected paths hold more than {limits.PROTECT_BYTES_MAX >> 20} MiB",
                    hint="protect less of it",
                )


@dataclass(frozen=True, slots=True)
class _Look:
    """What a path is: where it leads, without links, and which directories above it others could rename."""

    target: str
    entry: Entry
    pins: tuple[str, ...]


async def _look(agent: Agent, path: str) -> _Look:
    todo = deque(name for name in path.split("/") if name)
    entries: list[Entry] = [await agent.stat("/", user="root")]  # of "/" and what is followed from there
    names: list[str] = []
    links = 0
    while todo:
        name = todo.popleft()
        if name == "..":
            if names:
                names.pop()
                entries.pop()
            continue
        if name == ".":
            continue
        here = "/" + "/".join([*names, name])
        try:
            entry = await agent.stat(here, follow=False, user="root")
        except PathNotFoundError as error:
            raise PathNotFoundError(
                f"protect={path!r}: the template has no {here}",
                hint="only what is in the template can be protected",
                path=here,
            ) from error
        if entry.kind == "symlink":
            links += 1
            if links > _LINKS_MAX or not entry.target:
                raise InvalidRequestError(f"protect={path!r} is behind too many links")
            if replaceable(entry, entries[-1]):
                raise InvalidRequestError(
                    f"protect={path!r}: {here} is a link that ordinary users can replace",
                    hint=f"protect what it leads to: {entry.target}",
                )
            if entry.target.startswith("/"):
                names, entries = [], entries[:1]
            todo.extendleft(reversed([part for part in entry.target.split("/") if part]))
            continue
        if (todo and entry.kind != "directory") or entry.kind == "other":
            raise InvalidRequestError(f"protect={path!r}: {here} is neither a file nor a directory")
        names.append(name)
        entries.append(entry)
    if not names:
        raise InvalidRequestError(f"protect={path!r} leads to the root directory")
    pins = [
        "/" + "/".join(names[:at]) for at in range(1, len(names)) if replaceable(entries[at], entries[at - 1])
    ]
    return _Look("/" + "/".join(names), entries[-1], tuple(pins))


def replaceable(entry: Entry, parent: Entry) -> bool:
    """Whether somebody other than root can rename or remove `entry` of the directory `parent`. Pure."""
    if parent.uid == 0 and not parent.mode & 0o022:
        return False
    sticky = bool(parent.mode & stat.S_ISVTX)
    return not (sticky and parent.uid == 0 and entry.uid == 0)
