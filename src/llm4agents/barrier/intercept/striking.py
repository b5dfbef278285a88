"""Secrets struck out of what comes back: every byte of every form becomes `*`, also where a form is split over chunks.

Pure. Same length on purpose: lengths of bodies and frames stay true. What it is for is the origin that echoes a request
(an error page, a debugging endpoint); one that means to betray its own credential can encode it in ways nobody lists.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

SHORT_BYTES = 6
"""Encoded forms shorter than this are left alone: they would strike ordinary text."""
START_BYTES = 8
_LEFT = ("", "/", "!'()*", ";,/?:@&=+$!*'()#", "/:@!$&'()*+,;=")
"""What is left as it is in addresses: by most, Python, JavaScript (of a part, of a whole), in paths."""
_IN_SCRIPTS = ("<>&", "<>&'=", "<>&'\"", "<>&'\"+`")
"""What JSON has as \\uXXXX where it is made safe for pages: by Go and Ruby, Gson, PHP, .NET."""
_IN_PAGES = tuple(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", **more}
    for more in (
        {},
        {'"': "&quot;"},
        {'"': "&quot;", "'": "&#x27;"},
        {'"': "&quot;", "'": "&#39;"},
        {'"': "&quot;", "'": "&#039;"},
        {'"': "&#34;", "'": "&#39;"},
        {'"': "&#34;", "'": "&#39;", "+": "&#43;"},
        {'"': "&quot;", "'": "&#x27;", "`": "&#x60;", "=": "&#x3D;"},
        {'"': "&quot;", "'": "&#39;", "`": "&#x60;", "=": "&#x3D;", "/": "&#x2F;"},
    )
)
"""HTML, by the usual libraries and templates."""


def forms(secret: str, users: Iterable[str] = ()) -> set[bytes]:
    """The ways `secret` can be written down: as it is, base64 (of it, of `user:secret`, as a part of something longer),
    percent-encoded, escaped in JSON and HTML, each as the usual programs do it."""
    raw = secret.encode()
    if not raw:
        return set()
    derived: set[bytes] = set()
    for text in (
        *(quote(secret, safe=safe) for safe in _LEFT),
        quote_plus(secret),
        quote_plus(secret, safe="*"),
    ):
        derived |= {text.encode(), re.sub(r"%..", lambda match: match[0].lower(), text).encode()}
    for text in (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]):
        derived |= {text.encode(), text.replace("/", "\\/").encode()}
        for escaped in _IN_SCRIPTS:
            # Before the rest: `\\"` and `\\u0022` are both a quotation mark.
            plain = text.replace('\\"', '"') if '"' in escaped else text
            for form in ("\\u%04x", "\\u%04X"):
                derived.add("".join(form % ord(c) if c in escaped else c for c in plain).encode())
    for escapes in _IN_PAGES:
        derived.add("".join(escapes.get(c, c) for c in secret).encode())
    for whole in (raw, *(f"{user}:{secret}".encode() for user in users)):
        derived |= _base64(whole)
    # As a part of something longer: three ways to lie across the groups of three bytes; what neighbours decide is
    # left off.
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + raw).rstrip(b"=")
        inner = encoded[(0, 2, 3)[before] : len(encoded) - (1 if (before + len(raw)) % 3 else 0)]
        derived |= {inner, inner.translate(bytes.maketrans(b"+/", b"-_"))}
    return {raw} | {form for form in derived if len(form) >= SHORT_BYTES}


def _base64(raw: bytes) -> set[bytes]:
    found = set()
    for text in (base64.b64encode(raw), base64.urlsafe_b64encode(raw)):
        found |= {text, text.rstrip(b"="), quote(text.decode(), safe="").encode()}
    return found


class Patterns:
    """Forms compiled; many streams can use one."""

    def __init__(self, wanted: Iterable[bytes]) -> None:
        self.forms = tuple(sorted({form for form in wanted if form}, key=lambda form: (-len(form), form)))
        # What contains another form needs no search of its own.
        self._least = [form for form in self.forms if not any(f != form and f in form for f in self.forms)]
        starts = sorted({form[:START_BYTES] for form in self.forms})
        self._starts = re.compile(b"|".join(map(re.escape, starts)))
        self._reach = max(map(len, self.forms), default=1) - 1

    def __bool__(self) -> bool:
        return bool(self.forms)

    def strike(self, data: bytes) -> bytes:
        """Of something whole. Overlapping forms are struck together."""
        if not any(form in data for form in self._least):
            return data
        out = bytearray(data)
        for form in self.forms:
            at = data.find(form)
            while at >= 0:
                out[at : at + len(form)] = b"*" * len(form)
                at = data.find(form, at + 1)
        return bytes(out)

    def tail(self, data: bytes) -> int:
        """How many bytes at the end of `data` may be the beginning of a form."""
        if not self.forms:
            return 0
        at, size = max(0, len(data) - self._reach), len(data)
        while (match := self._starts.search(data, at)) is not None:
            rest = data[match.start() :]
            if any(len(rest) < len(form) and form.startswith(rest) for form in self.forms):
                return len(rest)
            at = match.start() + 1
        for at in range(max(0, size - START_BYTES + 1), size):
            if any(len(form) > size - at and form.startswith(data[at:]) for form in self.forms):
                return size - at
        return 0


class Striker:
    """One stream. Holds back no more than what may be the beginning of a form, so that events are not held up."""

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns
        self._held = b""  # as it came, since a form may begin inside another one
        self._shown = b""  # the same, as it would be sent

    def feed(self, data: bytes) -> bytes:
        data = self._held + data
        shown = self._again(self._patterns.strike(data))
        cut = len(data) - self._patterns.tail(data)
        self._held, self._shown = data[cut:], shown[cut:]
        return shown[:cut]

    def end(self) -> bytes:
        shown, self._held, self._shown = self._shown, b"", b""
        return shown

    def _again(self, shown: bytes) -> bytes:
        """What was struck already stays so."""
        if self._held == self._shown:
            return shown
        out = bytearray(shown)
        for at, (was, now) in enumerate(zip(self._held, self._shown, strict=True)):
            if was != now:
                out[at] = now
        return bytes(out)
