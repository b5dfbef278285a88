"""Pixels of a PNG, for tests that look at a screenshot: 8 bits a channel, RGB or RGBA, not interlaced."""

from __future__ import annotations

import struct
import zlib


def pixels(data: bytes) -> list[list[tuple[int, int, int]]]:
    """Rows of (red, green, blue)."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed = 8, b""
    width = height = channels = 0
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        at += 12 + length
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            assert depth == 8 and colour in (2, 6) and not interlaced
            channels = 3 if colour == 2 else 4
        elif kind == b"IDAT":
            packed += body
    raw, stride = zlib.decompress(packed), width * channels
    above, rows = bytearray(stride), []
    for row in range(height):
        start = row * (stride + 1)
        line = _unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), above, channels)
        rows.append([(line[x], line[x + 1], line[x + 2]) for x in range(0, stride, channels)])
        above = line
    return rows


def _unfiltered(kind: int, line: bytearray, above: bytearray, step: int) -> bytearray:
    for x in range(len(line)):
        left = line[x - step] if x >= step else 0
        corner = above[x - step] if x >= step else 0
        if kind == 1:
            add = left
        elif kind == 2:
            add = above[x]
        elif kind == 3:
            add = (left + above[x]) // 2
        elif kind == 4:
            guess = left + above[x] - corner
            add = min((left, above[x], corner), key=lambda one: abs(guess - one))
        else:
            return line
        line[x] = (line[x] + add) & 255
    return line
