"""Files that hold keys: made whole or not at all, readable by their owner alone, refused when others can read them.

Not here: what the keys are for (`vault`, `ca`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from llm4agents.errors import HostSetupError

KEY_BYTES_MAX = 65_536


def read(path: Path, what: str) -> bytes | None:
    """The bytes of the key file `path`, None when there is none.

    Raises HostSetupError when it is a link or no file, when it is somebody else's, or when others can read it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostSetupError(
            f"{what} {path} cannot be read: {error.strerror}",
            hint="it must be a file, not a link, of this user",
        ) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise HostSetupError(f"{what} {path} is not a file", hint="move away what is in its place")
        if found.st_uid not in (os.geteuid(), 0):
            raise HostSetupError(
                f"{what} {path} is another user's (uid {found.st_uid})", hint="chown it to yours"
            )
        if found.st_mode & 0o077:
            raise HostSetupError(
                f"{what} {path} can be read by others (mode {stat.S_IMODE(found.st_mode):04o})",
                hint=f"chmod 600 {path}; if others may have read it, treat what it protects as known to them",
            )
        return os.read(fd, KEY_BYTES_MAX)
    finally:
        os.close(fd)


def make(path: Path, data: bytes, what: str) -> bool:
    """Write a new key file durably, mode 0600. False, and nothing is changed, when there is one already.

    Raises HostSetupError when it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(6)}"
        try:
            write(new, data)
            os.link(new, path)  # not a rename, which would replace another's key
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                new.unlink()
        sync(path.parent)
    except OSError as error:
        raise HostSetupError(
            f"{what} {path} cannot be written: {error.strerror}",
            hint="is its directory this user's, and not full?",
        ) from error
    return True


def write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file that is not there yet, durably; nobody else can read it at any moment."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(fd, mode)
        os.fsync(fd)


def sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
