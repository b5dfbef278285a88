"""A template variant as one file, to be passed on: `export` and `import_`.

A gzip stream of a plain tar: first `bundle.json` (format, name, key, and for every file its length, SHA-256 and
which parts of it are not zero), then exactly those files in that order, sparse ones with their holes left out.
A bundle comes from strangers: the reader takes nothing but what the manifest has announced and what digests
confirm, understands no tar feature but plain files, and publishes all of it or nothing. A digest says that a
bundle is whole, not who made it: a template is as trusted as where it came from.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import secrets
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from llm4agents.errors import ConflictError, InvalidRequestError, NotFoundError, VersionMismatchError
from llm4agents.images import disk
from llm4agents.images.cache import Cache, fsync
from llm4agents.images.process import Cancel, check_room, in_thread, room
from llm4agents.images.progress import Progress, silent

FORMAT = 1
MANIFEST = "bundle.json"
TEMPLATE, UPPER, EMPTY = "template.json", "upper.raw", "upper.qcow2.empty"
MANIFEST_BYTES_MAX = 33_554_432
TEMPLATE_BYTES_MAX = 16_777_216
FILES_MAX = 64
FILE_BYTES_MAX = 68_719_476_736
STORED_BYTES_MAX = 8_589_934_591  # what a plain tar header can say
BLOCK = 65_536
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ZERO = bytes(BLOCK)


@dataclass(frozen=True, slots=True)
class Item:
    """One file of a bundle. `path` is `blobs/DIGEST` or `variant/…`; `sha256` is of what is stored, in order."""

    path: str
    bytes: int
    sha256: str
    extents: tuple[tuple[int, int], ...]
    """(offset, length) of what is stored; the rest of the file is zero."""
    mode: int

    @property
    def stored(self) -> int:
        return sum(length for _, length in self.extents)


@dataclass(frozen=True, slots=True)
class Imported:
    name: str
    key: str
    path: Path
    template: dict[str, Any]
    """The body of `template.json`."""


Check = Callable[[dict[str, Any], dict[str, Any]], None]
"""Called with the bodies of template.json and of the snapshot's manifest before anything is published; raises
VersionMismatchError when this host cannot run such a machine."""


# --- export


async def export(variant_dir: Path, file: Path, cache: Cache, progress: Progress = silent) -> int:
    """Write the variant and the blobs it names to `file` (appears whole; replaces one); returns its size in bytes.

    Raises NotFoundError, CapacityError, InvalidRequestError (`file` can't be written there).
    """
    return await in_thread(lambda cancel: _export(variant_dir, file, cache, progress, cancel))


def _export(variant_dir: Path, file: Path, cache: Cache, progress: Progress, cancel: Cancel) -> int:
    try:
        template_text = (variant_dir / TEMPLATE).read_text()
        template = json.loads(template_text)
    except (OSError, ValueError) as error:
        raise NotFoundError(f"there is no whole template in {variant_dir}") from error
    sources: list[tuple[str, Path]] = []
    for digest in sorted(set(_DIGEST.findall(template_text))):
        if (blob := cache.blob(digest)) is not None:
            sources.append((f"blobs/{digest}", blob))
    for path in sorted(p for p in variant_dir.rglob("*") if p.is_file() and p.name != EMPTY):
        sources.append((f"variant/{path.relative_to(variant_dir).as_posix()}", path))
    items = []
    for number, (name, path) in enumerate(sources):
        progress("export", f"reading {name}", number / len(sources) / 2)
        items.append(_describe(name, path, cancel))
    manifest = {
        "format": FORMAT,
        "name": template["name"],
        "key": template["key"],
        "files": [
            {"path": i.path, "bytes": i.bytes, "sha256": i.sha256, "extents": i.extents, "mode": i.mode}
            for i in items
        ],
    }
    tmp = file.with_name(f".{file.name}.{secrets.token_hex(6)}")
    try:
        with room(file.parent, sum(item.stored for item in items)):
            with (
                tmp.open("xb") as raw,
                gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=1, mtime=0) as out,
            ):
                _write_member(out, MANIFEST, [json.dumps(manifest, separators=(",", ":")).encode()])
                for number, (item, (_, path)) in enumerate(zip(items, sources, strict=True)):
                    progress("export", f"packing {item.path}", 0.5 + number / len(items) / 2)
                    _write_member(out, item.path, _stored(path, item.extents, cancel), item.stored)
                out.write(bytes(1024))
            fsync(tmp)
            tmp.replace(file)
            return file.stat().st_size
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            tmp.unlink()


def _describe(name: str, path: Path, cancel: Cancel) -> Item:
    digest = hashlib.sha256()
    size = path.stat().st_size
    whole = name.startswith("blobs/")  # their digest is their name, so they are stored as they are
    extents: list[tuple[int, int]] = []
    with path.open("rb") as file:
        for offset in _blocks([(0, size)] if whole else _data(file.fileno(), size)):
            cancel.check()
            block = os.pread(file.fileno(), min(BLOCK, size - offset), offset)
            if not whole and block == _ZERO[: len(block)]:
                continue
            digest.update(block)
            if extents and sum(extents[-1]) == offset:
                extents[-1] = (extents[-1][0], extents[-1][1] + len(block))
            else:
                extents.append((offset, len(block)))
    return Item(
        name, size, digest.hexdigest(), tuple(extents), 0o444 if whole else path.stat().st_mode & 0o666
    )


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of what the file system says is not a hole."""
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        position = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, position


def _blocks(ranges: Any) -> Iterator[int]:
    """Offsets of the blocks that the ranges touch, each once, in order."""
    following = 0
    for start, end in ranges:
        first = max(following, start - start % BLOCK)
        for offset in range(first, end, BLOCK):
            yield offset
            following = offset + BLOCK


def _stored(path: Path, extents: tuple[tuple[int, int], ...], cancel: Cancel) -> Iterator[bytes]:
    with path.open("rb") as file:
        for offset, length in extents:
            file.seek(offset)
            while length:
                cancel.check()
                data = file.read(min(length, 1_048_576))
                if not data:
                    raise ConflictError(f"{path} became shorter while it was exported")
                length -= len(data)
                yield data


def _write_member(out: gzip.GzipFile, name: str, chunks: Any, size: int | None = None) -> None:
    info = tarfile.TarInfo(name)
    info.size = sum(map(len, chunks)) if size is None else size
    info.mode = 0o644
    out.write(info.tobuf(tarfile.USTAR_FORMAT))
    for chunk in chunks:
        out.write(chunk)
    out.write(bytes(-info.size % 512))


# --- import


async def import_(
    file: Path, cache: Cache, progress: Progress = silent, *, check: Check = lambda template, snapshot: None
) -> Imported:
    """Read a bundle into the cache and publish its variant, whole or not at all. One that is there already stays.

    Raises NotFoundError (no such file), InvalidRequestError (not a bundle, damaged, or out to do harm),
    VersionMismatchError (another format, or refused by `check`), CapacityError, HostSetupError.
    """
    async with cache.workdir() as tmp:
        variant = tmp / "variant"
        variant.mkdir(mode=0o755)
        name, key, template = await in_thread(lambda cancel: _read(file, cache, tmp, progress, check, cancel))
        dest = cache.templates / name / "keys" / key
        if (variant / UPPER).exists() and template.get("disk_format") != "raw":
            # Made anew and not taken along: it names the disk under it by its absolute path.
            await disk.make_overlay(variant / UPPER, variant / EMPTY, named=dest / UPPER)
        async with cache.lock(f"template-{key}", progress):
            await in_thread(lambda _: cache.publish(variant, dest))
    progress("import", f"{name} is here", 1.0)
    return Imported(name, key, dest, template)


def _read(
    file: Path, cache: Cache, tmp: Path, progress: Progress, check: Check, cancel: Cancel
) -> tuple[str, str, dict[str, Any]]:
    with _opened(file) as raw, gzip.GzipFile(fileobj=raw, mode="rb") as stream:
        try:
            name, key, items = parse_manifest(_read_member(stream, MANIFEST, MANIFEST_BYTES_MAX))
            check_room(cache.root, sum(item.stored for item in items))
            with room(cache.root, sum(item.stored for item in items)):
                for number, item in enumerate(items):
                    progress("import", f"unpacking {item.path}", number / len(items))
                    _unpack(stream, item, tmp, cancel)
            if stream.read(1024) != bytes(1024) or stream.read(1):
                raise _bad("it goes on where it should end")
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise _bad(f"it is damaged or cut short ({error})") from error
    template = _template(tmp / "variant", name, key, {i.path for i in items})
    check(template, _snapshot_manifest(tmp / "variant"))
    for item in items:
        if item.path.startswith("blobs/"):
            cache.ingest(tmp / item.sha256, cancel)
    return name, key, template


def _opened(file: Path) -> IO[bytes]:
    """To be read. What is no plain file is not: to open a pipe that nobody writes to has no end."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotFoundError(f"{file} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidRequestError(f"{file} is not a file", hint="llm4agents template export writes one")
    return os.fdopen(fd, "rb")


def _bad(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"not a usable template bundle: {why}", hint="export it again, or get another copy"
    )


def parse_manifest(data: bytes) -> tuple[str, str, list[Item]]:
    """Name, key and files of a `bundle.json`. Pure. Raises InvalidRequestError, VersionMismatchError."""
    try:
        body = json.loads(data)
        if body["format"] != FORMAT:
            raise VersionMismatchError(
                f"the bundle has format {body['format']!r}, this version reads {FORMAT}",
                hint="use the version of llm4agents that exported it, or a newer one",
            )
        name, key, files = body["name"], body["key"], body["files"]
        if not _NAME.fullmatch(name) or not _KEY.fullmatch(key) or not 0 < len(files) <= FILES_MAX:
            raise _bad("its manifest has an impossible name, key or number of files")
        items = [_item(entry) for entry in files]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise _bad("its manifest cannot be read") from error
    paths = [item.path for item in items]
    if len(set(paths)) != len(paths):
        raise _bad("a file is there twice")
    if any(f"{other}/".startswith(f"{path}/") for path in paths for other in paths if other != path):
        raise _bad("a file is also a directory")
    return name, key, items


def _item(entry: dict[str, Any]) -> Item:
    path, size, digest, mode = entry["path"], entry["bytes"], entry["sha256"], entry["mode"]
    extents = tuple((offset, length) for offset, length in entry["extents"])
    parts = path.split("/")
    if not 2 <= len(parts) <= 4 or not all(_PART.fullmatch(part) for part in parts):
        raise _bad(f"a file at {path!r}")
    blob = parts[0] == "blobs"
    if blob != (len(parts) == 2 and parts[1] == digest) or parts[0] not in ("blobs", "variant"):
        raise _bad(f"a file at {path!r}")
    if parts[-1] == EMPTY or not _DIGEST.fullmatch(digest) or mode not in (0o444, 0o644, 0o600, 0o400):
        raise _bad(f"{path}: impossible")
    if type(size) is not int or not 0 <= size <= FILE_BYTES_MAX:
        raise _bad(f"{path}: an impossible size")
    end = 0
    for offset, length in extents:
        if type(offset) is not int or type(length) is not int or offset < end or length <= 0:
            raise _bad(f"{path}: impossible parts")
        end = offset + length
    item = Item(path, size, digest, extents, mode)
    if end > size or item.stored > STORED_BYTES_MAX or (blob and item.stored != size):
        raise _bad(f"{path}: parts beyond its end")
    return item


def _exactly(stream: gzip.GzipFile, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError("end of file")
    return data


def _read_header(stream: gzip.GzipFile, name: str) -> int:
    """The size in the header of the next member, which must be the plain file `name`.

    Not by tarfile: its reader also follows links, long names and extended headers, none of which we write.
    """
    header = _exactly(stream, 512)
    try:
        stated = int(header[148:156].rstrip(b" \0"), 8)
        size = int(header[124:136].rstrip(b" \0"), 8)
    except ValueError as error:
        raise _bad("a header that cannot be read") from error
    real = sum(header[:148]) + 8 * 32 + sum(header[156:])
    found = b"/".join(part for part in (header[345:500].rstrip(b"\0"), header[:100].rstrip(b"\0")) if part)
    if stated != real or header[156:157] != b"0" or found != name.encode():
        raise _bad(f"not {name} where it should be")
    return size


def _read_member(stream: gzip.GzipFile, name: str, bytes_max: int) -> bytes:
    size = _read_header(stream, name)
    if size > bytes_max:
        raise _bad(f"{name} is too large")
    data = _exactly(stream, size)
    _exactly(stream, -size % 512)
    return data


def _unpack(stream: gzip.GzipFile, item: Item, tmp: Path, cancel: Cancel) -> None:
    if _read_header(stream, item.path) != item.stored:
        raise _bad(f"{item.path} is not as long as announced")
    dest = tmp / item.sha256 if item.path.startswith("blobs/") else tmp / item.path
    dest.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with dest.open("xb") as out:
        for offset, length in item.extents:
            out.seek(offset)
            while length:
                cancel.check()
                data = _exactly(stream, min(length, 1_048_576))
                digest.update(data)
                out.write(data)
                length -= len(data)
        out.truncate(item.bytes)
    _exactly(stream, -item.stored % 512)
    if digest.hexdigest() != item.sha256:
        raise _bad(f"{item.path} is not what its digest says")
    dest.chmod(item.mode)


def _template(variant: Path, name: str, key: str, paths: set[str]) -> dict[str, Any]:
    """The body of template.json, which must be of this name and key and name every blob that came along."""
    try:
        if (variant / TEMPLATE).stat().st_size > TEMPLATE_BYTES_MAX:
            raise ValueError("too large")
        text = (variant / TEMPLATE).read_text()
        body = json.loads(text)
        if body["name"] != name or body["key"] != key:
            raise ValueError("another template's")
        needed = {f"blobs/{digest}" for digest in body.get("blobs", [])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _bad(f"its template.json: {error}") from error
    came = {path for path in paths if path.startswith("blobs/")}
    if not needed <= came or any(path.removeprefix("blobs/") not in text for path in came):
        raise _bad("the files that came are not those its template needs")
    return dict(body)


def _snapshot_manifest(variant: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        body = json.loads((variant / "snapshot" / "manifest.json").read_text())
        if isinstance(body, dict):
            return body
    return {}
