"""The directories of one machine's jail on the host: made before the jailer runs, removed when the VMM has ended.

A VMM that was broken out of owns what is in there: nothing here follows a link it may have put in place of a file.
Not here: what the jailer does with them (`jailer`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from llm4agents import limits
from llm4agents.errors import HostSetupError, VmmError
from llm4agents.vmm import clearing
from llm4agents.vmm.firecracker.jailer import Layout

_OF: Final = "of"
"""In a jail that is not in its machine's run_dir: a link whose text is that directory."""


def base_of(run_dir: Path, state: Path) -> Path:
    """Where the jail of the machine in `run_dir` is: below `state`, or in there where devices and programs may not be
    used in the former. Raises HostSetupError when they may in neither.

    Not in `run_dir` first: a jail is a mount in the VMM's namespace, which would keep the directories above it alive
    for the kernel, and so the shim from seeing that its `run_dir` is gone.
    """
    if _usable(state):
        return state / "jails" / hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:16]
    if not _usable(run_dir):
        raise HostSetupError(
            f"neither {run_dir} nor {state} may hold devices and programs (mounted nodev or noexec)",
            hint="LLM4AGENTS_STATE on a file system that is mounted without them",
        )
    return run_dir / "jail"


def _usable(directory: Path) -> bool:
    while not directory.exists():
        directory = directory.parent
    flags = os.statvfs(directory).f_flag
    # ST_NODEV and ST_NOEXEC, which Python names only where libc does.
    return not flags & (0x4 | 0x8)


def make(layout: Layout, run_dir: Path, targets: Iterable[str], empty: Iterable[str], uid: int) -> None:
    """Make the jail: `targets` are files that others are bound over, `empty` volumes of no one's that `uid` owns."""
    remove(layout.base)
    layout.base.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    layout.root.mkdir(parents=True, mode=0o700)
    if layout.base.parent != run_dir:
        (layout.base / _OF).symlink_to(run_dir)
    directory = os.open(layout.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for name in targets:
            os.close(os.open(name, flags, 0o600, dir_fd=directory))
        for name in empty:
            fd = os.open(name, flags, 0o600, dir_fd=directory)
            try:
                os.ftruncate(fd, limits.VOLUME_SLOT_BYTES)
                os.fchown(fd, uid, uid)
            finally:
                os.close(fd)
    finally:
        os.close(directory)


def remove(base: Path) -> None:
    """Idempotent; does not raise."""
    clearing.remove(base)


def sweep(state: Path) -> None:
    """Remove the jails below `state` whose machine's directory is gone: a server died before it could."""
    with contextlib.suppress(OSError):
        for base in (state / "jails").iterdir():
            with contextlib.suppress(OSError):
                if not (base / _OF).exists():
                    remove(base)


def take(layout: Layout, name: str, bytes_max: int) -> bytes:
    """What the VMM has written to the file `name`, which is removed. Raises VmmError when it is no such file."""
    path = layout.inside(name)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise VmmError(f"Firecracker wrote no {name}: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or not 0 < found.st_size <= bytes_max:
            raise VmmError(f"what Firecracker wrote as {name} is no file of at most {bytes_max} bytes")
        with open(fd, "rb", closefd=False) as file:
            body = file.read(bytes_max)
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
    return body


def put(layout: Layout, name: str, body: bytes, uid: int) -> None:
    """Give the VMM a file of its own."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(layout.inside(name), flags, 0o400)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(body)
        os.fchown(fd, uid, uid)
    finally:
        os.close(fd)
