"""Layers as they are kept (tar, gzip, zstd) made into plain tars, with bounds and a digest. Works on open files."""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from llm4agents import limits
from llm4agents.errors import CapacityError, HostSetupError
from llm4agents.images.oci.manifest import refuse

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_PIECE_BYTES = 1_048_576
_SKIPPABLE = tuple(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16))


class _Buffer(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("size", ctypes.c_size_t), ("done", ctypes.c_size_t))


def library() -> ctypes.CDLL:
    """libzstd, loaded. Raises HostSetupError when there is none."""
    try:
        found = ctypes.CDLL("libzstd.so.1")
    except OSError as error:
        raise HostSetupError(
            "the image has layers of zstd, and libzstd.so.1 is missing",
            hint="as root: apt-get install libzstd1",
            packages=["libzstd1"],
        ) from error
    found.ZSTD_createDStream.restype = ctypes.c_void_p
    found.ZSTD_freeDStream.argtypes = [ctypes.c_void_p]
    found.ZSTD_decompressStream.restype = ctypes.c_size_t
    found.ZSTD_decompressStream.argtypes = [
        ctypes.c_void_p,
        ctypes.POINTER(_Buffer),
        ctypes.POINTER(_Buffer),
    ]
    found.ZSTD_isError.argtypes = [ctypes.c_size_t]
    return found


def kind(file: BinaryIO) -> str:
    """`gzip`, `zstd` or `tar`, by what the file begins with: media types are not always true."""
    file.seek(0)
    magic = file.read(4)
    if magic.startswith(_GZIP):
        return "gzip"
    return "zstd" if magic == _ZSTD or magic in _SKIPPABLE else "tar"


def unpack(source: BinaryIO, out: BinaryIO, left: int, layer: str) -> tuple[int, str]:
    """Write the tar that `source` is to `out`; its size and SHA-256 (hex).

    Raises CapacityError past `left` bytes, InvalidRequestError for what unpacks to far more than it is, or is broken.
    """
    digest, size = hashlib.sha256(), 0
    for piece in pieces(source, layer):
        size += len(piece)
        if size > left:
            raise CapacityError(
                f"{layer} and those below it unpack to more than {limits.OCI_UNPACKED_BYTES_MAX >> 30} GiB"
            )
        if size > limits.OCI_RATIO_FREE_BYTES and size > limits.OCI_RATIO_MAX * max(source.tell(), 1):
            refuse(f"{layer} unpacks to more than {limits.OCI_RATIO_MAX} times what it is: a bomb")
        digest.update(piece)
        out.write(piece)
    out.flush()
    return size, digest.hexdigest()


def pieces(source: BinaryIO, layer: str) -> Iterator[bytes]:
    """The plain tar, in pieces of about a MiB."""
    how = kind(source)
    source.seek(0)
    if how == "gzip":
        yield from _gunzip(source, layer)
    elif how == "zstd":
        yield from _unzstd(source, layer)
    else:
        while piece := source.read(_PIECE_BYTES):
            yield piece


def _gunzip(source: BinaryIO, layer: str) -> Iterator[bytes]:
    """One member after another, as gzip itself has it."""
    rest = b""
    while True:
        rest = rest or source.read(_PIECE_BYTES // 4)
        if not rest or not rest.strip(b"\0"):
            if not rest:
                return
            rest = b""
            continue  # padding after the last
        stream = zlib.decompressobj(31)
        while not stream.eof:
            try:
                piece = stream.decompress(rest, _PIECE_BYTES)
            except zlib.error as error:
                refuse(f"{layer} is broken gzip: {error}")
            rest = stream.unconsumed_tail
            if piece:
                yield piece
            if not rest and not stream.eof:
                rest = source.read(_PIECE_BYTES // 4)
                if not rest:
                    if piece:
                        continue  # what it still holds
                    refuse(f"{layer} is gzip that is cut short")
        rest = stream.unused_data


def _unzstd(source: BinaryIO, layer: str) -> Iterator[bytes]:
    zstd = library()
    stream = zstd.ZSTD_createDStream()
    out = ctypes.create_string_buffer(_PIECE_BYTES)
    try:
        hint = 0
        while data := source.read(_PIECE_BYTES // 4):
            held = ctypes.create_string_buffer(data, len(data))
            given = _Buffer(ctypes.addressof(held), len(data), 0)
            while True:
                made = _Buffer(ctypes.addressof(out), _PIECE_BYTES, 0)
                hint = zstd.ZSTD_decompressStream(stream, ctypes.byref(made), ctypes.byref(given))
                if zstd.ZSTD_isError(hint):
                    refuse(f"{layer} is broken zstd")
                if made.done:
                    yield out.raw[: made.done]
                if given.done == given.size and made.done < made.size:
                    break
        if hint:
            refuse(f"{layer} is zstd that is cut short")
    finally:
        zstd.ZSTD_freeDStream(stream)
