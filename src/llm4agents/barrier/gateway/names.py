"""A sandbox's names and the synthetic addresses they were given: for ever, in a file of appended lines.

Line n of `names/ID` is the name of the n-th address of `limits.SYNTHETIC_NET`. A name is written before its address is
told, so that a gateway that starts anew knows every address a guest could have kept; an address never changes owner.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
from pathlib import Path

from llm4agents import limits

NET = ipaddress.IPv4Network(limits.SYNTHETIC_NET)
_FIRST = int(NET.network_address) + 1
_SIZE = NET.num_addresses - 2


class NamesFull(Exception):
    """This sandbox has as many names as one can have."""


def is_synthetic(address: str) -> bool:
    try:
        return ipaddress.IPv4Address(address) in NET
    except ValueError:
        return False


class Names:
    """`parent`: the file of the sandbox this one is a fork of; taken over if there is none of its own yet."""

    def __init__(self, path: Path, parent: Path | None = None) -> None:
        self._path = path
        if parent is not None and not path.exists():
            with contextlib.suppress(FileNotFoundError):
                part = path.with_name(f".{path.name}.part")
                shutil.copyfile(parent, part)
                part.replace(path)
        self._fd: int | None = None
        raw = b""
        with contextlib.suppress(FileNotFoundError):
            raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) != len(raw):
            os.truncate(path, len(whole))  # a line cut short was never told to anyone
        self._names = whole.decode("ascii", "replace").split("\n")[:-1][:_SIZE]
        self._index = {name: index for index, name in enumerate(self._names)}

    def __len__(self) -> int:
        return len(self._names)

    def address(self, name: str) -> str:
        """The name's address, given to it now if it has none. Raises NamesFull, OSError."""
        index = self._index.get(name)
        if index is None:
            if len(self._names) >= min(limits.SYNTHETIC_NAMES_MAX, _SIZE):
                raise NamesFull
            self._append(name)
            index = self._index[name] = len(self._names)
            self._names.append(name)
        return str(ipaddress.IPv4Address(_FIRST + index))

    def name(self, address: str) -> str | None:
        """Whose address it is; None: nobody's, or it is none of ours."""
        try:
            index = int(ipaddress.IPv4Address(address)) - _FIRST
        except ValueError:
            return None
        return self._names[index] if 0 <= index < len(self._names) else None

    def _append(self, name: str) -> None:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        line = name.encode("ascii") + b"\n"
        before = os.fstat(self._fd).st_size
        if os.write(self._fd, line) != len(line):
            os.ftruncate(self._fd, before)
            raise OSError(28, "no space for another name")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
