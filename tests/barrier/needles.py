"""Looking for values: in files and in the memory of processes, as they are and as they are commonly written down."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, quote_plus

_CHUNK = 1_048_576
_OVERLAP = 4_096


def forms(value: str) -> dict[str, bytes]:
    """`value`, its percent-encodings, and its base64 wherever in a longer text it begins (`user:value` for one)."""
    raw = value.encode()
    found = {
        "plain": raw,
        "percent": quote(value, safe="").encode(),
        "percent, slashes kept": quote(value).encode(),
        "form": quote_plus(value).encode(),
    }
    for before in range(3):
        text = base64.b64encode(b"\0" * before + raw)
        # What the bytes around it have a part in is left off at both ends.
        inner = text[4 if before else 0 :].rstrip(b"=")
        found[f"base64 at {before}"] = inner[: len(inner) - (len(raw) + before) % 3]
        found[f"base64url at {before}"] = found[f"base64 at {before}"].translate(
            bytes.maketrans(b"+/", b"-_")
        )
    assert all(len(form) >= 12 for form in found.values()), "too short: it would be found by chance"
    ways = dict.fromkeys(found.values())  # some are the same
    return {next(how for how, form in found.items() if form == way): way for way in ways}


def needles(values: Mapping[str, str]) -> dict[str, bytes]:
    return {f"{name}, {how}": form for name, value in values.items() for how, form in forms(value).items()}


def search(pieces: Iterable[bytes], wanted: Mapping[str, bytes]) -> set[str]:
    """The names of what is found. Pieces follow each other; a needle may lie across two."""
    found: set[str] = set()
    tail = b""
    for piece in pieces:
        if piece.count(0) == len(piece):  # most of a memory
            tail = b""
            continue
        data = tail + piece
        found |= {name for name, needle in wanted.items() if name not in found and needle in data}
        tail = data[-_OVERLAP:]
    return found


def in_file(path: Path, wanted: Mapping[str, bytes]) -> set[str]:
    """Of a file; its holes are skipped, since disks of machines are mostly holes."""

    def pieces() -> Iterator[bytes]:
        with path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            at = 0
            while at < end:
                try:
                    at = os.lseek(file.fileno(), at, os.SEEK_DATA)
                    until = os.lseek(file.fileno(), at, os.SEEK_HOLE)
                except OSError:
                    return  # nothing but a hole is left
                while at < until and (piece := os.pread(file.fileno(), min(_CHUNK, until - at), at)):
                    at += len(piece)
                    yield piece
                at = max(at, until)

    return search(pieces(), wanted)


def in_files(directory: Path, wanted: Mapping[str, bytes]) -> dict[str, set[str]]:
    """Of all files below: those that have something, by their path below `directory`."""
    found = {}
    for path in sorted(directory.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not path.is_symlink() and (names := in_file(path, wanted)):
                found[str(path.relative_to(directory))] = names
    return found


def in_memory(pid: int, wanted: Mapping[str, bytes]) -> tuple[set[str], int]:
    """What every readable page of a process has, and how many bytes were looked at. Needs root."""
    looked = 0

    def pieces() -> Iterator[bytes]:
        nonlocal looked
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                bounds, mode, *rest = line.split()
                if "r" not in mode or (rest and rest[-1] in ("[vvar]", "[vsyscall]", "[vvar_vclock]")):
                    continue
                at, end = (int(bound, 16) for bound in bounds.split("-"))
                while at < end:
                    try:
                        piece = os.pread(memory, min(_CHUNK, end - at), at)
                    except OSError:
                        at += _OVERLAP  # a page that cannot be read (a device's, past a file's end)
                        continue
                    if not piece:
                        break
                    at, looked = at + len(piece), looked + len(piece)
                    yield piece
        finally:
            os.close(memory)

    return search(pieces(), wanted), looked
