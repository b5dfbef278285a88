"""The ELF comes out of a bzImage made here, in every compression Debian has used, and out of nothing else."""

from __future__ import annotations

import bz2
import ctypes
import gzip
import lzma
import struct

import pytest

from llm4agents.errors import HostSetupError
from llm4agents.images.vmlinux import extract

ELF = b"\x7fELF\x02\x01" + bytes(range(256)) * 700 + bytes(9_000_000)


def lz4_legacy(data: bytes) -> bytes:
    library = ctypes.CDLL("liblz4.so.1")
    out = b"\x02\x21\x4c\x18"
    for start in range(0, len(data), 8_388_608):
        block = data[start : start + 8_388_608]
        buffer = ctypes.create_string_buffer(library.LZ4_compressBound(len(block)))
        size = library.LZ4_compress_default(block, buffer, len(block), len(buffer))
        out += struct.pack("<I", size) + buffer.raw[:size]
    return out


def zstd(data: bytes) -> bytes:
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_compress.restype = ctypes.c_size_t
    library.ZSTD_compress.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_int,
    ]
    buffer = ctypes.create_string_buffer(len(data) + 1_000_000)
    size = library.ZSTD_compress(buffer, len(buffer), data, len(data), 3)
    return buffer.raw[:size]


def bzimage(
    payload: bytes, size: int | None, *, sectors: int = 39, offset: int = 700, version: int = 0x20F
) -> bytes:
    if size is not None:
        payload += struct.pack("<I", size)
    image = bytearray((sectors + 1) * 512)
    image[0x1F1] = sectors
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", image, 0x206, version)
    struct.pack_into("<II", image, 0x248, offset, len(payload))
    return bytes(image) + bytes(offset) + payload + b"what follows"


@pytest.mark.parametrize(
    "pack", [lz4_legacy, zstd, lambda d: lzma.compress(d, check=lzma.CHECK_CRC32), bz2.compress]
)
def test_what_was_packed_comes_out(pack) -> None:
    try:
        payload = pack(ELF)
    except OSError:
        pytest.skip("this host lacks the library")
    assert extract(bzimage(payload, len(ELF))) == ELF


def test_gzip_has_its_size_already() -> None:
    assert extract(bzimage(gzip.compress(ELF), None)) == ELF


def test_an_elf_is_taken_as_it_is() -> None:
    assert extract(ELF) == ELF


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (b"MZ" + bytes(2000), "not a bzImage"),
        (b"", "not a bzImage"),
        (bzimage(gzip.compress(ELF), None, version=0x204), "too old"),
        (bzimage(gzip.compress(ELF), None)[:-5000], "cut short"),
        (bzimage(b"????" + bytes(100), 1000), "compression is unknown"),
        (bzimage(lzma.compress(ELF), len(ELF) + 1), "size it says"),
        (bzimage(gzip.compress(ELF)[:-8], len(ELF)), "unpacked"),
        (bzimage(gzip.compress(ELF), 0xFFFFFFFF), "unpacks to"),
        (bzimage(gzip.compress(bytes(5000)), None), "ELF"),
        (bzimage(b"\x02\x21\x4c\x18" + struct.pack("<I", 1 << 30) + bytes(64), 4096), "unpacked"),
        (bzimage(b"\x02\x21\x4c\x18" + struct.pack("<I", 8) + b"\xff" * 8, 4096), "unpacked"),
        (bzimage(b"\x28\xb5\x2f\xfd" + bytes(64), 4096), "unpacked"),
        (bzimage(b"\xfd7zXZ\0" + bytes(64), 4096), "unpacked"),
    ],
)
def test_anything_else_is_refused_in_words(image: bytes, says: str) -> None:
    with pytest.raises(HostSetupError, match=says):
        extract(image)
