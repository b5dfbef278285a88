"""The writable upper disk of a template and the overlays its clones get. Formats are always explicit."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

from llm4agents.errors import ConflictError
from llm4agents.images import process
from llm4agents.images.cache import fsync
from llm4agents.images.process import room

_UUID = "4c344167-656e-7401-8000-000000000002"
# No metadata checksums and no 64-bit block numbers: both cost work at each write, 5 GiB need neither. Without
# checksums of groups there is no lazy initialisation either, so no thread of the guest's fills inode tables in;
# with `discard` mke2fs leaves them as the holes they are.
_FEATURES = "^metadata_csum,^64bit,^resize_inode,sparse_super2"
_EXTENDED = f"lazy_journal_init=1,discard,root_owner=0:0,hash_seed={_UUID}"
JOURNAL_MIB = 16


async def make_upper(path: Path, size_bytes: int) -> None:
    """An empty ext4 of `size_bytes` in a sparse file, `upper/` and `work/` in it for overlayfs.

    `path` must not exist; it appears whole. Raises ConflictError, HostSetupError, CapacityError.
    """
    _check(path, there=False)
    tmp = path.with_name(f".{path.name}.{os.getpid()}")
    seed = path.with_name(f".{path.name}.{os.getpid()}.d")
    try:
        with room(path.parent):
            for name in ("upper", "work"):
                (seed / name).mkdir(parents=True, mode=0o755)
            with tmp.open("xb") as file:
                file.truncate(size_bytes)
        argv = ["mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-b", "4096", "-I", "256", "-i", "16384"]
        argv += ["-U", _UUID, "-L", "upper", "-J", f"size={JOURNAL_MIB}", "-O", _FEATURES, "-E", _EXTENDED]
        await process.run([*argv, "-d", str(seed), str(tmp)], cwd=path.parent, needed_bytes=64_000_000)
        fsync(tmp)
        tmp.rename(path)
        fsync(path.parent)
    finally:
        tmp.unlink(missing_ok=True)
        shutil.rmtree(seed, ignore_errors=True)


async def make_overlay(backing: Path, path: Path, *, named: Path | None = None) -> None:
    """An empty qcow2 over the raw `backing`, named absolutely, so that a copy of it works anywhere.

    `named` is where `backing` will be when the overlay is used, if it is to be moved there first.
    """
    backing = _check(backing, there=True)
    tmp = path.with_name(f".{path.name}.{os.getpid()}")
    # Small clusters would cost metadata, large ones copy much for a small write; subclusters give both.
    options = "extended_l2=on,cluster_size=128k,lazy_refcounts=on"
    argv = [
        "qemu-img",
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        str(named or backing),
        "-u",
        "-o",
        options,
    ]
    try:
        await process.run(
            [*argv, str(tmp), str(backing.stat().st_size)], cwd=path.parent, needed_bytes=1_000_000
        )
        fsync(tmp)
        tmp.rename(path)
    finally:
        tmp.unlink(missing_ok=True)


def clone_overlay(empty: Path, path: Path) -> None:
    """A sandbox's own overlay: a plain copy of the empty one (about 200 KiB; qemu-img would cost 9 ms).

    Raises ConflictError when `path` exists, CapacityError.
    """
    try:
        with room(path.parent), empty.open("rb") as source, path.open("xb") as target:
            shutil.copyfileobj(source, target)
    except FileExistsError as error:
        raise ConflictError(f"{path} exists") from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise


_FICLONE = 0x4004_9409
_COPY_BYTES = 8 << 20


def copy_sparse(source: Path, path: Path, *, durable: bool = False) -> None:
    """`path`, a private copy (0600) of a file that is mostly holes: by reference where the file system can do that,
    else its data and no more. Milliseconds for 5 GiB with a few MiB in them. Blocks.

    `source` must not be written to meanwhile. Raises ConflictError when `path` exists, CapacityError.
    """
    try:
        target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise ConflictError(f"{path} exists") from error
    try:
        with room(path.parent), source.open("rb") as file:
            try:
                fcntl.ioctl(target, _FICLONE, file.fileno())
            except OSError:  # in as many ways as there are file systems
                _copy_data(file.fileno(), target)
            if durable:
                os.fsync(target)
                fsync(path.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(target)


def _copy_data(source: int, target: int) -> None:
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    in_kernel, at = True, 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
            end = os.lseek(source, at, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        while at < end:
            some = min(_COPY_BYTES, end - at)
            copied = 0
            if in_kernel:
                try:
                    copied = os.copy_file_range(source, target, some, at, at)
                except OSError as error:
                    if error.errno in (errno.ENOSPC, errno.EDQUOT):
                        raise
                in_kernel = copied > 0
            if not copied:
                block = os.pread(source, some, at)
                if not block:
                    raise OSError(errno.EIO, "the file became shorter while it was copied")
                copied = len(block)
                # A file system that knows no holes says that all is data.
                if block.count(0) != copied:
                    rest = memoryview(block)
                    while rest:
                        rest = rest[os.pwrite(target, rest, at + copied - len(rest)) :]
            at += copied


def _check(path: Path, *, there: bool) -> Path:
    if path.exists() != there:
        raise ConflictError(f"{path} {'is not there' if there else 'exists'}")
    return path.resolve()
