"""Images on this machine's disk: OCI layouts (a directory or a tar), and the archives of `docker save`. Blocking I/O.

Their blobs are checked against their digests as a registry's are. A path is its operator's to name; what is below it is
opened without following links.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from llm4agents import limits
from llm4agents.errors import InvalidRequestError, PathNotFoundError
from llm4agents.images.oci import manifest
from llm4agents.images.oci.manifest import Descriptor, Manifest, refuse
from llm4agents.images.oci.reference import Local
from llm4agents.images.process import Cancel, room

_NAME = "org.opencontainers.image.ref.name"
_PIECE_BYTES = 1_048_576
_LINKS_MAX = 8


class _Files(Protocol):
    """Files by their path in an image on disk."""

    def open(self, name: str) -> contextlib.AbstractContextManager[tuple[BinaryIO, int]]:
        """The file, at the beginning of its content, and how long that is. KeyError: there is none."""


class _Directory:
    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        *parents, last = name.split("/")
        try:
            at = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for parent in parents:
                    below = os.open(
                        parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at
                    )
                    os.close(at)
                    at = below
                fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
            finally:
                os.close(at)
        except OSError as error:
            raise KeyError(name) from error
        with os.fdopen(fd, "rb") as file:
            yield file, os.fstat(fd).st_size


class _Header(tarfile.TarInfo):
    """What a stranger's archive says of a member before tarfile believes it: it reads names as long as they claim."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        found = super().frombuf(buf, encoding, errors)
        if found.size < 0 or (
            found.type not in tarfile.REGULAR_TYPES and found.size > limits.OCI_HEADER_BYTES_MAX
        ):
            raise tarfile.ReadError("a header of no sane size")
        return found


_BROKEN = (tarfile.TarError, OSError, ValueError, IndexError, OverflowError, RecursionError)


class _Archive:
    def __init__(self, path: Path) -> None:
        try:
            self._tar = tarfile.open(path, "r:", tarinfo=_Header)  # noqa: SIM115 (closed by close)
        except _BROKEN as error:
            raise InvalidRequestError(
                f"{path} cannot be read as a tar: {error}", hint="is it compressed? unpack it first (gunzip)"
            ) from error
        self._members: dict[str, tarfile.TarInfo] = {}
        try:
            for count, member in enumerate(self._tar):
                if count > limits.OCI_INDEX_ENTRIES_MAX * 8:
                    refuse(f"{path} has too many files")
                self._members[posixpath.normpath(member.name)] = member
        except _BROKEN as error:
            self._tar.close()
            refuse(f"{path} is a broken tar: {error}")

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        for _ in range(_LINKS_MAX):
            member = self._members[posixpath.normpath(name)]
            if not member.issym():
                break
            # Old `docker save`s have a layer once, and links to it.
            name = posixpath.join(posixpath.dirname(member.name), member.linkname)
        if not member.isreg():
            raise KeyError(name)
        file = self._tar.fileobj
        assert file is not None
        file.seek(member.offset_data)
        yield file, member.size  # type: ignore[misc]

    def close(self) -> None:
        self._tar.close()


class Layout:
    """An image on disk, for as long as it is entered."""

    def __init__(self, local: Local) -> None:
        """Raises PathNotFoundError, InvalidRequestError."""
        path = Path(local.path)
        if not path.exists():
            raise PathNotFoundError(f"there is no {path} on the server's disk")
        if path.is_dir() != (local.kind == "oci"):
            raise InvalidRequestError(
                f"{path} is {'a directory' if path.is_dir() else 'a file'}",
                hint="oci:DIRECTORY, oci-archive:FILE or docker-archive:FILE",
            )
        self._local = local
        self._files: _Directory | _Archive = _Directory(path) if local.kind == "oci" else _Archive(path)
        self._layers: dict[str, str] = {}
        """Of a `docker save`: where each of its layers is, by the digest it is said to have."""

    def __enter__(self) -> Layout:
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._files, _Archive):
            self._files.close()

    def resolve(self, platform: str) -> tuple[Manifest, bytes]:
        """The manifest for that platform, and the configuration's bytes."""
        if self._local.kind == "docker-archive":
            return self._saved()
        index = manifest.document(self._read("index.json"), "index")
        entries = index.get("manifests")
        if not isinstance(entries, list):
            refuse("its index lists no manifests")
        entries = [entry for entry in entries if isinstance(entry, dict)]
        names = {str((entry.get("annotations") or {}).get(_NAME)): entry for entry in entries}
        if self._local.tag is not None:
            if self._local.tag not in names:
                refuse(f"{self._local.path} has no {self._local.tag!r}; it has {', '.join(sorted(names))}")
            entries = [names[self._local.tag]]
        if not entries:
            refuse(f"{self._local.path} has no image in it")
        found, kind = self._entry(entries, platform)
        for _ in range(4):
            data = self._blob(found)
            body = manifest.document(data, "manifest")
            if not manifest.is_index(body, kind):
                made = manifest.manifest(body, found.digest)
                return made, self._blob(made.config)
            found = manifest.choose(body, platform)
            kind = found.kind
        return refuse("its indexes lead to indexes without end")

    def _entry(self, entries: list[dict[str, Any]], platform: str) -> tuple[Descriptor, str]:
        if len(entries) > 1 and not all("platform" in entry for entry in entries):
            refuse(f"{self._local.path} has {len(entries)} images", f"say which: {self._local}:TAG")
        if len(entries) > 1:
            found = manifest.choose({"manifests": entries}, platform)
        else:
            found = manifest.descriptor(entries[0], "manifest", limits.OCI_DOCUMENT_BYTES_MAX)
        return found, found.kind

    def _saved(self) -> tuple[Manifest, bytes]:
        try:
            listed = json.loads(self._read("manifest.json"))
            images = [image for image in listed if isinstance(image, dict)]
            if self._local.tag is not None:
                tag = self._local.tag
                images = [i for i in images if any(str(t).endswith(tag) for t in i.get("RepoTags") or [])]
            if len(images) != 1:
                refuse(f"{self._local.path} has {len(images)} such images", "say which by :TAG")
            config = self._read(str(images[0]["Config"]))
            names = [str(name) for name in images[0]["Layers"]]
            diffs = [str(diff) for diff in manifest.document(config, "configuration")["rootfs"]["diff_ids"]]
        except (ValueError, KeyError, TypeError):
            refuse(f"{self._local.path} is no archive of docker save")
        if len(names) != len(diffs) or len(set(diffs)) > limits.OCI_LAYERS_MAX:
            refuse(f"{self._local.path} has {len(names)} layers and tells of {len(diffs)}")
        digest = hashlib.sha256(config).hexdigest()
        layers = []
        for name, diff in zip(names, diffs, strict=True):
            with self._open(name) as (_, size):
                layers.append({"mediaType": manifest.TAR, "digest": diff, "size": size})
            self._layers[diff.removeprefix("sha256:")] = name
        body = {"config": {"digest": f"sha256:{digest}", "size": len(config)}, "layers": layers}
        # It has no manifest of the kind that has a digest; its configuration names all there is.
        return manifest.manifest(body, f"sha256:{digest}"), config

    def fetch(self, blob: Descriptor, path: Path, got: Callable[[int], None], cancel: Cancel) -> None:
        """Copy a blob to the new file `path`; it has the size and the digest it is to have, or this raises."""
        name = self._layers.get(blob.hex, f"blobs/sha256/{blob.hex}")
        digest = hashlib.sha256()
        with self._open(name) as (file, size), room(path.parent, size), path.open("xb") as out:
            if size != blob.size:
                refuse(f"{name} has {size:,} bytes instead of {blob.size:,}")
            while size:
                cancel.check()
                piece = file.read(min(size, _PIECE_BYTES))
                if not piece:
                    refuse(f"{name} is cut short")
                digest.update(piece)
                out.write(piece)
                size -= len(piece)
                got(len(piece))
        if digest.hexdigest() != blob.hex:
            refuse(f"{name} is sha256:{digest.hexdigest()}, which is not what it is to be")

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        try:
            with self._files.open(name) as found:
                yield found
        except KeyError:
            refuse(f"{self._local.path} has no {name}")

    def _blob(self, blob: Descriptor) -> bytes:
        data = self._read(f"blobs/sha256/{blob.hex}")
        if len(data) != blob.size or hashlib.sha256(data).hexdigest() != blob.hex:
            refuse(f"{self._local.path}: blobs/sha256/{blob.hex} is not what it is to be")
        return data

    def _read(self, name: str) -> bytes:
        with self._open(name) as (file, size):
            if size > limits.OCI_DOCUMENT_BYTES_MAX:
                refuse(f"{name} is {size:,} bytes long")
            return file.read(size)
