"""A word the guest may know, replaced by the secret it may not: in headers, paths, queries and small bodies. Pure.

Each place has its own way of writing a value down, and the secret is written that way: percent-encoded in an address
or a form, escaped in JSON, as it is in a header.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from urllib.parse import quote, quote_plus


class Unfit(ValueError):
    """The value cannot be written where the placeholder stands."""


class Placeholder:
    def __init__(self, word: str, value: str) -> None:
        self._value = value
        self._any = pattern(word)
        self._plain = re.compile(re.escape(word.encode()))

    def __repr__(self) -> str:
        return "Placeholder(***)"

    def in_address(self, target: bytes) -> tuple[bytes, bool]:
        """In a path and query."""
        return self._swap(self._any, quote(self._value, safe="").encode(), target)

    def in_header(self, name: bytes, value: bytes) -> tuple[bytes, bool]:
        """In a header's value; also inside `Basic`, where a client has encoded it. Raises Unfit."""
        if name.lower() in (b"authorization", b"proxy-authorization") and value[:6].lower() == b"basic ":
            try:
                inner = base64.b64decode(value[6:].strip(), validate=True)
            except (binascii.Error, ValueError):
                return value, False
            changed, did = self._swap(self._plain, self._value.encode(), inner)
            return (b"Basic " + base64.b64encode(changed), True) if did else (value, False)
        changed, did = self._swap(self._plain, self._value.encode(), value)
        if not did:  # a cookie or an address in a header may have it percent-encoded
            changed, did = self._swap(self._any, quote(self._value, safe="").encode(), value)
        if did and re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", changed):
            raise Unfit("the secret has characters that no header can hold")
        return changed, did

    def in_body(self, kind: bytes, body: bytes) -> tuple[bytes, bool]:
        """In a body of that Content-Type."""
        media = kind.split(b";")[0].strip().lower()
        if media == b"application/x-www-form-urlencoded":
            return self._swap(self._any, quote_plus(self._value).encode(), body)
        if media == b"application/json" or media.endswith(b"+json"):
            return self._swap(self._plain, json.dumps(self._value)[1:-1].encode(), body)
        return self._swap(self._plain, self._value.encode(), body)

    @staticmethod
    def _swap(what: re.Pattern[bytes], by: bytes, where: bytes) -> tuple[bytes, bool]:
        changed, times = what.subn(lambda _: by, where)
        return changed, times > 0


def pattern(word: str) -> re.Pattern[bytes]:
    """The word, any of whose characters may be percent-encoded, with either case of digits."""
    return re.compile(b"".join(_either(byte) for byte in word.encode()))


def _either(byte: int) -> bytes:
    return b"(?:" + re.escape(bytes([byte])) + b"|%" + b"".join(
        f"[{digit.upper()}{digit.lower()}]".encode() if digit.isalpha() else digit.encode() for digit in f"{byte:02x}"
    ) + b")"  # fmt: skip
