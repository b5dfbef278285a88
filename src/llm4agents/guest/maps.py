"""The msgpack maps of the protocol: packing ours, reading theirs without believing them. Pure.

A guest's map is at most one frame, but a few bytes of msgpack can claim much: lengths are capped before
anything is allocated, keys are not interned (they would stay for good), every field is asked for by type
and range through `Fields`, and whatever does not fit is a ProtocolError.

Names in a guest need not be UTF-8. Here they are `str` with surrogate escapes, as os.fsdecode gives; on the
wire they are `str` where they can be and `bin` where they cannot.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgpack

from llm4agents.errors import InvalidRequestError, ProtocolError
from llm4agents.limits import CONTROL_BYTES_MAX, PATH_BYTES_MAX, VOLUME_SLOTS

ITEMS_MAX: Final = 256
"""Entries of one array or map. Small, because nesting multiplies what a header makes us allocate."""
MESSAGE_CHARS_MAX: Final = 1_000
UNPACK_LIMITS: Final[dict[str, Any]] = {
    "raw": False,
    "strict_map_key": True,
    "max_str_len": CONTROL_BYTES_MAX,
    "max_bin_len": CONTROL_BYTES_MAX,
    "max_array_len": ITEMS_MAX,
    "max_map_len": ITEMS_MAX,
    "max_ext_len": 0,
}

Text = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def _pairs(pairs: list[tuple[object, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise ValueError("a key is not text")
        found[key] = value
    return found


UNPACK_LIMITS["object_pairs_hook"] = _pairs


def unpack(payload: bytes, what: str) -> Fields:
    """The map a guest sent; `what` names it in errors. Raises ProtocolError for anything but one sane map."""
    try:
        body = msgpack.unpackb(payload, **UNPACK_LIMITS)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the guest's {what} is not a sane map ({type(error).__name__})") from None
    return Fields(body, what)


def pack(body: Mapping[str, object]) -> bytes:
    """One of our maps. Raises InvalidRequestError when it does not fit a frame."""
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    if len(packed) > CONTROL_BYTES_MAX:
        raise InvalidRequestError(
            f"the arguments are {len(packed)} bytes, and {CONTROL_BYTES_MAX} is the most",
            hint="pass large data in a file or over stdin",
        )
    return packed


def wire_text(value: Text, what: str = "argument") -> str | bytes:
    """A path, argument or variable as it goes on the wire. Raises InvalidRequestError for a NUL in it."""
    plain = os.fspath(value)
    try:
        raw = plain.encode("utf-8", "surrogateescape") if isinstance(plain, str) else plain
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{what} holds a lone surrogate: {plain!r:.200}") from None
    if b"\0" in raw:
        raise InvalidRequestError(f"{what} holds a NUL byte: {raw[:80]!r}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def wire_path(value: Text) -> str | bytes:
    """An absolute path of the guest as it goes on the wire."""
    path = wire_text(value, "path")
    raw = path.encode() if isinstance(path, str) else path
    if not raw.startswith(b"/"):
        raise InvalidRequestError(f"path {str(value)[:200]!r} is not absolute", hint="paths start with /")
    if len(raw) > PATH_BYTES_MAX:
        raise InvalidRequestError(f"the path is {len(raw)} bytes long, and {PATH_BYTES_MAX} is the most")
    return path


def wire_env(env: Mapping[str, str] | None) -> dict[str | bytes, str | bytes]:
    """Environment variables as they go on the wire."""
    found: dict[str | bytes, str | bytes] = {}
    for name, value in (env or {}).items():
        key = wire_text(name, "environment variable name")
        if not key or (b"=" in key if isinstance(key, bytes) else "=" in key):
            raise InvalidRequestError(f"{name!r} cannot be the name of an environment variable")
        found[key] = wire_text(value, f"environment variable {name}")
    return found


def printable(text: str, chars_max: int = MESSAGE_CHARS_MAX) -> str:
    """A guest's words, safe to put in an error or on a terminal."""
    cut = text[:chars_max]
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in cut)


class Fields:
    """A map from a guest, read field by field; each method raises ProtocolError when the field is not so.

    A missing field takes `default`; without one it must be there.
    """

    def __init__(self, body: object, what: str) -> None:
        self._what = what
        if not isinstance(body, dict):
            raise ProtocolError(f"the guest's {what} is not a map")
        self._body: dict[str, object] = body

    def _wrong(self, name: str, wanted: str) -> ProtocolError:
        return ProtocolError(f"the guest's {self._what} has no sane {name!r} ({wanted} expected)")

    def integer(self, name: str, low: int = 0, high: int = 2**63 - 1, *, default: int | None = None) -> int:
        value = self._body.get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, f"an integer from {low} to {high}")
        return value

    def maybe_integer(self, name: str, low: int = 0, high: int = 2**63 - 1) -> int | None:
        return None if self._body.get(name) is None else self.integer(name, low, high)

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self._body.get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            raise self._wrong(name, "a number")
        return float(value)  # type: ignore[arg-type]

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        value = self._body.get(name, default)
        if type(value) is not bool:
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, chars_max: int = MESSAGE_CHARS_MAX, *, default: str | None = None) -> str:
        """Words for people and names of our own: cut to `chars_max`, unprintable characters replaced."""
        value = self._body.get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "text")
        return printable(value, chars_max)

    def name(self, name: str) -> str:
        """A file's name or path or the like, kept byte for byte (surrogate escapes)."""
        value = self._body.get(name)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "surrogateescape")
        if not isinstance(value, str) or len(value) > PATH_BYTES_MAX or "\0" in value:
            raise self._wrong(name, "a name")
        return value

    def raw(self, name: str, bytes_max: int) -> bytes:
        """Bytes of a file's content, which travel as text when they are UTF-8."""
        value = self._body.get(name)
        if isinstance(value, str):
            value = value.encode("utf-8", "surrogatepass")
        if not isinstance(value, bytes) or len(value) > bytes_max:
            raise self._wrong(name, f"at most {bytes_max} bytes")
        return value

    def maybe_name(self, name: str) -> str | None:
        return None if self._body.get(name) is None else self.name(name)

    def names(self, name: str) -> tuple[str, ...]:
        """A list of words kept byte for byte, as `name` does."""
        value = self._body.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str | bytes) for item in value):
            raise self._wrong(name, "a list of names")
        return tuple(
            item if isinstance(item, str) else item.decode("utf-8", "surrogateescape") for item in value
        )

    def maps(self, name: str) -> list[Fields]:
        value = self._body.get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list of maps")
        return [Fields(item, name) for item in value]

    def maybe_maps(self, name: str, most: int) -> list[Fields]:
        if self._body.get(name) is None:
            return []
        return self.maps(name)[:most]

    def texts(self, name: str, chars_max: int = 64) -> tuple[str, ...]:
        value = self._body.get(name, ())
        if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of text")
        return tuple(printable(item, chars_max) for item in value)


def unmounted(fields: Fields) -> tuple[dict[str, str], tuple[str, ...]]:
    """Of `post_restore`'s answer: the volumes that could not be mounted, by id, and why; the slots whose former
    volume is still in use in the guest."""
    found = fields.maybe_maps("volumes", VOLUME_SLOTS)
    failed = {entry.text("id", 64): entry.text("error") for entry in found}
    return failed, fields.texts("busy")[:VOLUME_SLOTS]
