"""The files that volumes are: sparse, raw, one ext4 in each. Made, copied, made longer, removed; read by no one here.

What is in one a guest has written, so nothing of the host's looks into it: mke2fs makes it, and from then on kernels of
guests are the only ones that mount it, replay its journal, or let it grow into a file that has become longer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import Final

from llm4agents.errors import ConflictError, HostSetupError
from llm4agents.images import disk, process
from llm4agents.images.cache import fsync
from llm4agents.images.process import room

MIB: Final = 1 << 20
OWNER: Final = 1_000
"""Of the root directory: the guest's ordinary user."""
_BLOCK: Final = 4_096
_INODE_PART: Final = 256 / 16_384
"""Of a file that is tables of inodes: one of 256 bytes for every 16 KiB."""
_GROWN_BYTES_MAX: Final = 1 << 41
"""How large the tables of a new one allow it to become."""


def file_bytes(size_bytes: int) -> int:
    """Bytes of the file in which `size_bytes` can be written at least: those, the journal, the tables of inodes and
    blocks, and what the kernel keeps for itself. Pure; it grows with `size_bytes`, is whole MiB, and no later version
    may say less (`Files.cut`)."""
    reserved = min(16 * MIB, size_bytes // 32)
    whole = (size_bytes + journal_bytes(size_bytes) + reserved + 4 * MIB) / (1 - _INODE_PART - 0.0005)
    return -(-int(whole) // MIB) * MIB


def journal_bytes(size_bytes: int) -> int:
    return min(64 * MIB, max(4 * MIB, size_bytes // 32 // MIB * MIB))


class Files:
    """The volumes of one state directory, by id."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, volume: str) -> Path:
        return self.root / f"{volume}.raw"

    async def make(self, volume: str, size_bytes: int) -> None:
        """An empty one, which appears whole. Raises HostSetupError, CapacityError, ConflictError."""
        tmp = self._new(volume)
        argv = ["mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-b", str(_BLOCK), "-I", "256", "-i", "16384"]
        # As a sandbox's own disk, but that it can grow while it is mounted: that needs room for more groups.
        argv += ["-O", "^metadata_csum,^64bit,resize_inode", "-J", f"size={journal_bytes(size_bytes) // MIB}"]
        grown = f"resize={_GROWN_BYTES_MAX // _BLOCK}"
        argv += ["-E", f"lazy_journal_init=1,discard,root_owner={OWNER}:{OWNER},{grown}"]
        try:
            with room(self.root), tmp.open("xb") as file:
                tmp.chmod(0o600)
                file.truncate(file_bytes(size_bytes))
            await process.run([*argv, str(tmp)], cwd=self.root, needed_bytes=file_bytes(size_bytes) // 64)
            self.appear(tmp, volume)
        finally:
            tmp.unlink(missing_ok=True)

    def copy(self, source: str, volume: str, size_bytes: int) -> Path:
        """A copy of one that nothing writes to, for `size_bytes` of it, which is not there before `appear`; `remove`
        takes it back. Blocks. Raises CapacityError, ConflictError."""
        tmp = self._new(volume)
        disk.copy_sparse(self.path(source), tmp)
        _extend(tmp, file_bytes(size_bytes), sync=False)
        return tmp

    def appear(self, tmp: Path, volume: str) -> None:
        """Durable, and then there. Blocks."""
        fsync(tmp)
        tmp.rename(self.path(volume))
        fsync(self.root)

    def grow(self, volume: str, size_bytes: int) -> None:
        """Make room in the file of one that nothing has open; what is in it follows when a guest next mounts it."""
        _extend(self.path(volume), file_bytes(size_bytes))

    def cut(self, volume: str, size_bytes: int) -> None:
        """Take from the file what is longer than a volume of that size. A monitor that was taken over writes past the
        end, and the next guest would have a larger disk than was asked for. Nothing while a machine has it."""
        with contextlib.suppress(ConflictError, OSError):
            if self.path(volume).stat().st_size > file_bytes(size_bytes):
                _extend(self.path(volume), file_bytes(size_bytes), cut=True)

    def remove(self, volume: str) -> None:
        """Idempotent, and durable."""
        for path in (self.path(volume), *self.root.glob(f".{volume}.*")):
            path.unlink(missing_ok=True)
        if self.root.is_dir():
            fsync(self.root)

    def sweep(self, wanted: set[str]) -> list[str]:
        """Remove what belongs to no volume of `wanted`, and what was half made; names."""
        gone = []
        for path in self.root.iterdir() if self.root.is_dir() else []:
            if path.suffix != ".raw" or path.name.startswith(".") or path.stem not in wanted:
                path.unlink(missing_ok=True)
                gone.append(path.name)
        return gone

    def bytes(self, volume: str) -> int:
        """Of the disk a guest gets. Raises HostSetupError when it is not there."""
        try:
            return self.path(volume).stat().st_size
        except OSError as error:
            raise HostSetupError(
                f"the volume {self.path(volume)} cannot be had: {error.strerror}",
                hint="its row is there, its file is not: was it removed by hand?",
            ) from error

    def allocated_bytes(self, volume: str) -> int:
        """What it takes on the host now; 0 when it is not there."""
        try:
            return self.path(volume).stat().st_blocks * 512
        except OSError:
            return 0

    def _new(self, volume: str) -> Path:
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.path(volume).exists():
            raise ConflictError(f"{self.path(volume)} exists")
        return self.root / f".{volume}.{secrets.token_hex(4)}.tmp"


def _extend(path: Path, size: int, *, sync: bool = True, cut: bool = False) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        # Every VMM that writes to it has a lock on it (`vmm.base.Disk.lasts`): whoever says otherwise is wrong.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_size < size or cut:
            os.ftruncate(fd, size)
            if sync:
                os.fsync(fd)
    except BlockingIOError:
        raise ConflictError(f"{path.name} is in use by a virtual machine") from None
    finally:
        os.close(fd)
