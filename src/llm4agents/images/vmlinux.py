"""Taking the uncompressed kernel (ELF vmlinux) out of a distribution's bzImage. Pure: bytes in, bytes out.

Direct boot of QEMU's microvm machine wants the ELF, and in emulation decompression by the guest itself would
cost seconds. The header's fields are those of the kernel's Documentation/arch/x86/boot.rst.
"""

from __future__ import annotations

import bz2
import ctypes
import lzma
import struct
import zlib
from collections.abc import Callable

from llm4agents.errors import HostSetupError

KERNEL_BYTES_MAX = 536_870_912
_PROTOCOL_MIN = 0x0208  # the first with payload_offset and payload_length


def extract(image: bytes) -> bytes:
    """The ELF inside `image`. Raises HostSetupError when it is not a bzImage or not one we can unpack."""
    if image[:4] == b"\x7fELF":
        return image
    if len(image) < 0x250 or image[0x202:0x206] != b"HdrS":
        raise HostSetupError("the kernel package's vmlinuz is not a bzImage")
    setup_sectors = image[0x1F1] or 4
    (version,) = struct.unpack_from("<H", image, 0x206)
    if version < _PROTOCOL_MIN:
        raise HostSetupError(f"the kernel's boot protocol {version >> 8}.{version & 255:02} is too old")
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = image[start : start + length]
    if len(payload) != length or length < 8:
        raise HostSetupError("the kernel package's vmlinuz is cut short")
    (size,) = struct.unpack_from("<I", payload, length - 4)
    if not 64 <= size <= KERNEL_BYTES_MAX:
        raise HostSetupError(f"the kernel says it unpacks to {size} bytes")
    elf = _decompress(payload, size)
    if len(elf) != size or elf[:5] != b"\x7fELF\x02":
        raise HostSetupError("the kernel did not unpack to a 64-bit ELF of the size it says")
    return elf


def _decompress(payload: bytes, size: int) -> bytes:
    formats: list[tuple[bytes, Callable[[bytes, int], bytes]]] = [
        (b"\x02\x21\x4c\x18", _lz4_legacy),
        (b"\x28\xb5\x2f\xfd", _zstd),
        (b"\x1f\x8b", lambda data, _: zlib.decompressobj(31).decompress(data, size)),
        (b"\xfd7zXZ\0", lambda data, _: lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(data, size)),
        (b"\x5d\0\0", lambda data, _: lzma.LZMADecompressor(lzma.FORMAT_ALONE).decompress(data, size)),
        (b"BZh", lambda data, _: bz2.BZ2Decompressor().decompress(data, size)),
    ]
    for magic, unpack in formats:
        if payload.startswith(magic):
            try:
                return unpack(payload, size)
            except (zlib.error, lzma.LZMAError, OSError, EOFError, struct.error) as error:
                raise HostSetupError(f"the kernel could not be unpacked: {error}") from error
    raise HostSetupError(f"the kernel's compression is unknown (it begins with {payload[:6].hex()})")


def _library(name: str, package: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise HostSetupError(
            f"{name} is missing", hint=f"as root: apt-get install {package}", packages=[package]
        ) from error


def _lz4_legacy(data: bytes, size: int) -> bytes:
    """Blocks of u32 length + LZ4 block, each at most 8 MiB unpacked; the kernel's size follows the last."""
    decompress = _library("liblz4.so.1", "liblz4-1").LZ4_decompress_safe
    out = bytearray()
    position = 4
    buffer = ctypes.create_string_buffer(8_388_608)
    while len(out) < size:
        (length,) = struct.unpack_from("<I", data, position)
        block = data[position + 4 : position + 4 + length]
        if len(block) != length:
            raise OSError("a block is cut short")
        got = decompress(block, buffer, length, len(buffer))
        if got <= 0 or len(out) + got > size:
            raise OSError("a block is broken")
        out += memoryview(buffer)[:got]
        position += 4 + length
    return bytes(out)


def _zstd(data: bytes, size: int) -> bytes:
    library = _library("libzstd.so.1", "libzstd1")
    decompress, find_end = library.ZSTD_decompress, library.ZSTD_findFrameCompressedSize
    for function in (decompress, find_end):
        function.restype = ctypes.c_size_t
    decompress.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    find_end.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.ZSTD_isError.argtypes = [ctypes.c_size_t]
    length = find_end(data, len(data))  # what follows the frame is the size, not another frame
    if library.ZSTD_isError(length):
        raise OSError("not a whole zstd frame")
    buffer = ctypes.create_string_buffer(size)
    got = decompress(buffer, size, data, length)
    if library.ZSTD_isError(got):
        raise OSError("a broken zstd frame")
    return buffer.raw[:got]
