"""The grammar of rule lines, and what one rule says of a host, a port, a method and a path. Pure; judges nothing:
the order of rules and what follows from it are policy.py's.

    allow|deny [METHODS] [PROTOCOL] HOST[:PORT][/PATH] [rate=N[KMG]iB/s] [bytes=N[KMG]iB]
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_network
from typing import Any, Literal, NoReturn
from urllib.parse import quote

from llm4agents import limits
from llm4agents.barrier import addresses
from llm4agents.barrier.addresses import Address, Net
from llm4agents.errors import InvalidRequestError

Protocol = Literal["http", "tls", "tcp"]
PROTOCOLS: tuple[Protocol, ...] = ("tls", "http", "tcp")
_WORDS: dict[str, Protocol] = {"http": "http", "https": "tls", "tcp": "tcp"}
Ports = tuple[tuple[int, int], ...]
WEB: Ports = ((80, 80), (443, 443))
EVERY: Ports = ((1, 65535),)


@dataclass(frozen=True, slots=True)
class Host:
    """`text`: a name, the domain of `*.domain`, "*", or a network; `net` is set for the last."""

    kind: Literal["name", "wildcard", "any", "net"]
    text: str
    net: Net | None = None

    def matches_name(self, name: str) -> bool:
        """`name`: lower-case A-labels, as `addresses.name` gives them."""
        if self.kind == "name":
            return name == self.text
        if self.kind == "wildcard":
            return name.endswith("." + self.text) and len(name) > len(self.text) + 1
        return self.kind == "any"

    def matches_address(self, address: Address) -> bool:
        return self.net is not None and addresses.holds(self.net, address)

    def overlaps(self, other: Host) -> bool:
        """Whether something could be meant by both."""
        if "any" in (self.kind, other.kind):
            return True
        if self.net is not None and other.net is not None:
            return self.net.overlaps(other.net)
        if self.net is not None or other.net is not None:
            return False
        if self.kind == "name":
            return other.matches_name(self.text)
        if other.kind == "name":
            return self.matches_name(other.text)
        return f".{self.text}".endswith(f".{other.text}") or f".{other.text}".endswith(f".{self.text}")

    def __str__(self) -> str:
        if self.kind == "wildcard":
            return f"*.{self.text}"
        return f"[{self.text}]" if self.net is not None and self.net.version == 6 else self.text


@dataclass(frozen=True, slots=True)
class Rule:
    """One line. `ports`: None where the line has none (80 and 443 of an allow, every port of a deny)."""

    allow: bool
    host: Host
    methods: tuple[str, ...] | None = None
    protocol: Protocol | None = None
    ports: Ports | None = None
    path: str | None = None
    rate_bytes_per_s: int | None = None
    bytes_max: int | None = None

    @property
    def on_requests(self) -> bool:
        """Whether it takes a request (and so the interceptor) to know."""
        return self.methods is not None or self.path is not None

    def spans(self) -> Ports:
        if self.ports is not None:
            return self.ports
        if not self.allow:
            return EVERY
        return {None: WEB, "http": WEB[:1], "tls": WEB[1:], "tcp": EVERY}[self.protocol]

    def has_port(self, port: int) -> bool:
        return any(low <= port <= high for low, high in self.spans())

    def speaks(self, protocol: Protocol, port: int) -> bool:
        """Whether it is about connections of that protocol to that port (which it has).

        What is not HTTP and not TLS may be either in a disguise the gateway does not know, so a deny of one of them,
        or of a part of it, is about raw bytes too; an allow is not.
        """
        if not self.allow:
            return self.protocol is None or protocol == self.protocol or protocol == "tcp" != self.protocol
        if self.protocol is not None:
            return self.protocol in (protocol, "tcp")
        return protocol != "tcp" or (not self.on_requests and port not in (80, 443))

    def __str__(self) -> str:
        words = ["allow" if self.allow else "deny"]
        if self.methods is not None:
            words.append(",".join(self.methods))
        if self.protocol is not None:
            words.append({"tls": "https"}.get(self.protocol, self.protocol))
        ports = "" if self.ports is None else ":" + _ports_text(self.ports)
        words.append(f"{self.host}{ports}{path_text(self.path or '')}")
        if self.rate_bytes_per_s is not None:
            words.append(f"rate={size_text(self.rate_bytes_per_s)}/s")
        if self.bytes_max is not None:
            words.append(f"bytes={size_text(self.bytes_max)}")
        return " ".join(words)


def _ports_text(ports: Ports) -> str:
    if ports == EVERY:
        return "*"
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ports)


def path_text(path: str) -> str:
    """A rule's path as it is written in a line."""
    return quote(path, safe="/*!$&'()+,=:@~._-")


def size_text(size: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return f"{size}B"


class _Refused(Exception):
    """`offset` into the line, None for the whole of it."""

    def __init__(self, problem: str, expected: str, word: str = "", offset: int | None = None) -> None:
        self.problem, self.expected, self.word, self.offset = problem, expected, word, offset


def fail(what: str, problem: str, expected: str, **details: Any) -> NoReturn:
    raise InvalidRequestError(f"{what}: {problem}", hint=expected, **details)


_SHAPE = "allow|deny [METHODS] [http|https|tcp] HOST[:PORT][/PATH] [rate=10MiB/s] [bytes=1GiB]"
_METHOD = re.compile(r"[A-Z][A-Z-]{0,31}")
_USUAL = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_SIZE = re.compile(r"([1-9][0-9]{0,11})(B|KiB|MiB|GiB)")


def parse(text: str, what: str = "rule", **details: Any) -> Rule:
    """One line as a rule. Raises InvalidRequestError that says which word, from which column, and what was expected;
    `what` begins the sentence, `details` goes into its details."""
    if len(text) > limits.NETWORK_RULE_CHARACTERS_MAX:
        fail(
            what,
            f"{len(text)} characters long",
            f"at most {limits.NETWORK_RULE_CHARACTERS_MAX} are read",
            **details,
        )
    try:
        return _parse(text)
    except _Refused as refused:
        column = 1 if refused.offset is None else refused.offset + 1
        fail(
            f"{what} {text!r}, column {column}",
            refused.problem,
            f"expected {refused.expected}",
            column=column,
            word=refused.word,
            **details,
        )


def target(text: str) -> tuple[Host, Ports | None, str | None]:
    """HOST[:PORT][/PATH] alone. Raises InvalidRequestError."""
    try:
        return parse_target(text)
    except _Refused as refused:
        raise InvalidRequestError(refused.problem, hint=f"expected {refused.expected}") from None


def _parse(line: str) -> Rule:
    words = [(match.group(), match.start()) for match in re.finditer(r"[^ \t]+", line)]
    bad = next((i for i, c in enumerate(line) if c != "\t" and (not c.isprintable())), None)
    if bad is not None:
        raise _Refused("a character that is not printable", "one line of text", line[bad], bad)
    if not words:
        raise _Refused("it is empty", _SHAPE)
    verb, at = words.pop(0)
    if verb not in ("allow", "deny"):
        raise _Refused(f"{verb!r} is neither allow nor deny", _SHAPE, verb, at)
    methods: tuple[str, ...] | None = None
    protocol: Protocol | None = None
    end = at + len(verb)
    while words:
        word, at = words[0]
        if _is_methods(word) and methods is None and protocol is None:
            methods = tuple(dict.fromkeys(word.split(",")))
            if "CONNECT" in methods or "TRACE" in methods:
                raise _Refused("CONNECT and TRACE never pass", "other methods, such as GET,HEAD", word, at)
        elif word in _WORDS and protocol is None and len(words) > 1 and "=" not in words[1][0]:
            protocol = _WORDS[word]
        elif len(words) > 1 and protocol is None and _nearly_methods(word):
            problem = "is no list of methods" if methods is None else "was not expected after methods"
            raise _Refused(
                f"{word!r} {problem}", "capitals, and commas without blanks, such as GET,HEAD", word, at
            )
        else:
            break
        end = at + len(word)
        words.pop(0)
    if not words or words[0][0].startswith(("rate=", "bytes=")):
        raise _Refused("there is no host", "HOST[:PORT][/PATH] here", "", end)
    target, place = words.pop(0)
    host, ports, path = parse_target(target, place)
    rate = size = None
    for word, at in words:
        key, _, value = word.partition("=")
        if key == "rate" and rate is None:
            if not value.endswith("/s"):
                raise _Refused(f"{word!r} is no rate", "rate=N[KMG]iB/s, such as rate=10MiB/s", word, at)
            rate = _size(value.removesuffix("/s"), "rate=N[KMG]iB/s, such as rate=10MiB/s", word, at)
        elif key == "bytes" and size is None:
            size = _size(value, "bytes=N[KMG]iB, such as bytes=1GiB", word, at)
        else:
            raise _Refused(
                f"{word!r} was not expected after the host {target!r}",
                "rate=… or bytes=…, each once"
                + ("" if "." in target else "; before a host stand only METHODS, and http, https or tcp"),
                word,
                at,
            )
    allow = verb == "allow"
    if not allow and (rate is not None or size is not None):
        raise _Refused(
            "a deny has no limits", "rate= and bytes= on allow rules only", words[0][0], words[0][1]
        )
    if protocol == "tcp":
        if methods is not None or path is not None:
            raise _Refused("tcp has neither methods nor paths", "http or https, or no path", target, place)
        if allow and ports is None:
            raise _Refused("tcp needs a port", f"{target}:22, or {target}:* for every port", target, place)
    if allow and host.net is not None:
        kind = addresses.classify(host.net[0])
        if kind in addresses.NEVER and host.net.prefixlen >= 4:
            raise _Refused(
                f"{host} is {kind.value}: nothing can be connected to there", "another address", target, place
            )
    return Rule(allow, host, methods, protocol, ports, path, rate, size)


def _is_methods(word: str) -> bool:
    return all(_METHOD.fullmatch(part) for part in word.split(","))


def _nearly_methods(word: str) -> bool:
    """Whether a word that is not the last is meant as methods, and written as none."""
    return all(part.upper() in _USUAL for part in word.strip(",").split(","))


def _size(text: str, expected: str, word: str, at: int) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise _Refused(f"{word!r} is no such size", expected, word, at)
    power = ("B", "KiB", "MiB", "GiB").index(match[2])
    return int(match[1]) << 10 * power


def parse_target(text: str, at: int = 0) -> tuple[Host, Ports | None, str | None]:
    """HOST[:PORT][/PATH]; `at`: its place in its line. Raises _Refused."""
    if "://" in text:
        scheme, _, rest = text.partition("://")
        raise _Refused(f"{scheme}:// is not written here", f"{scheme} {rest}", text, at)
    host_text, rest, net = text, "", None
    if text.startswith("["):
        host_text, bracket, rest = text[1:].partition("]")
        if not bracket:
            raise _Refused("the [ is not closed", "[ADDRESS] or [ADDRESS/BITS]", text, at)
        if re.match(r"/\d{1,3}(?=$|[:/])", rest):
            bits = re.match(r"/\d+", rest)
            assert bits is not None
            host_text, rest = host_text + bits.group(), rest[bits.end() :]
        net = _net(host_text, text, at)
        if net is None or net.version != 6:
            raise _Refused(f"{host_text!r} is no IPv6 address", "[ADDRESS] or [ADDRESS/BITS]", text, at)
    elif text.count(":") > 1 and addresses.parse(text.partition("/")[0]) is not None:
        address, slash, tail = text.partition("/")
        bits = re.match(r"\d{1,3}(?=$|/)", tail)
        host_text = address + (slash + bits.group() if bits else "")
        rest = tail[bits.end() :] if bits else slash + tail
        net = _net(host_text, text, at)
    else:
        match = re.match(r"[^:/]*", text)
        assert match is not None
        host_text, rest = match.group(), text[match.end() :]
        bits = re.match(r"/\d{1,3}(?=$|[:/])", rest)
        if bits and addresses.parse(host_text) is not None:
            host_text, rest = host_text + bits.group(), rest[bits.end() :]
        net = _net(host_text, text, at)
    ports: Ports | None = None
    if rest.startswith(":"):
        match = re.match(r"[^/]*", rest[1:])
        assert match is not None
        ports = _ports(match.group(), text, at + len(text) - len(rest) + 1)
        rest = rest[1 + match.end() :]
    path = None
    if rest:
        if not rest.startswith("/"):
            raise _Refused(
                f"{rest!r} was not expected after the host", "a :PORT, a /PATH or a blank", text, at
            )
        path = _path(rest, text, at + len(text) - len(rest))
    if net is not None:
        single = net.prefixlen == net.max_prefixlen
        return Host("net", str(net.network_address if single else net), net), ports, path
    return _name(host_text, text, at), ports, path


def _net(text: str, word: str, at: int) -> Net | None:
    address, _, bits = text.partition("/")
    if addresses.parse(address) is None:
        return None
    try:
        return ip_network(text)
    except ValueError:
        pass
    try:
        meant = ip_network(text, strict=False)
    except ValueError:
        raise _Refused(
            f"/{bits} is no prefix length of {address}", "a CIDR such as 10.0.0.0/8", word, at
        ) from None
    raise _Refused(
        f"{text} has bits set behind its prefix",
        f"{meant}, or {address} alone, or with a port before a path: {address}:443/{bits}",
        word,
        at,
    )


def _name(text: str, word: str, at: int) -> Host:
    if text == "*":
        return Host("any", "*")
    domain = text.removeprefix("*.")
    if "*" in domain or not domain:
        raise _Refused(
            f"{text!r} is no host" if text else "there is no host",
            "a name, *.domain, * or an address; a * stands only at the beginning, before a dot",
            word,
            at,
        )
    try:
        name = addresses.name(domain)
    except ValueError as error:
        raise _Refused(
            f"{domain!r} is no host name: {error}", "a name, *.domain, * or an address", word, at
        ) from None
    return Host("wildcard" if text.startswith("*.") else "name", name)


def _ports(text: str, word: str, at: int) -> Ports:
    if text == "*":
        return EVERY
    match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text)
    if match is not None:
        low, high = int(match[1]), int(match[2] or match[1])
        if 1 <= low <= high <= 65535:
            return ((low, high),)
    raise _Refused(
        f"{text!r} is no port", "a number from 1 to 65535, a range such as 8000-8080, or *", word, at
    )


def _path(text: str, word: str, at: int) -> str:
    expected = "a path such as /repos/*, without query; * stands for anything"
    if "?" in text or "#" in text:
        raise _Refused("rules look at paths without their queries", expected, word, at)
    if re.search(r"%2[aA]", text):
        raise _Refused(
            "a * that is meant is not to be told from one that stands for anything", expected, word, at
        )
    readings = read_path(text)
    if len(readings) != 1 or readings[0] is None:
        raise _Refused(f"{text!r} can be read in more than one way", expected, word, at)
    return readings[0]


# Paths

_PLAIN = re.compile(r"/(?:[A-Za-z0-9_~!$&'()*+,=:@-][A-Za-z0-9_~!$&'()*+,=:@.-]*(?:/(?![/.])|$))*")
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")


@lru_cache(maxsize=32)  # asked once for each rule and binding with a path, of the same request
def read_path(path: str) -> tuple[str | None, ...]:
    """Every way a server may read the path of a request target (its query is left out); most have one.

    Servers differ on escapes, `..`, `//`, `\\` and `;`: an allow must match all readings, a deny bites with any. A
    reading of None is none that can be told (control characters, broken escapes, bytes that are no UTF-8).
    """
    path = path.partition("?")[0]
    if _PLAIN.fullmatch(path):
        return (path,)
    if not path.startswith("/") or "#" in path or len(path) > limits.PATH_READ_CHARACTERS_MAX:
        return (None,)
    found: dict[str | None, None] = {}
    kept = _decoded(path, keep_slashes=True)
    found[kept] = None
    step: str | None = path
    for depth in range(4):
        further = None if step is None else _decoded(step, lenient=depth > 0)
        if further == step:
            break  # its percent signs are some
        step = further
        found[step] = None
        if step is None or "%" not in step:
            break
    else:
        found[None] = None  # escapes in escapes in escapes: nobody means that
    for reading in list(found):
        if reading is not None:
            for other in _readings(reading):
                found[other] = None
    return tuple(found)


def _decoded(path: str, keep_slashes: bool = False, lenient: bool = False) -> str | None:
    """Percent-decoded once. `lenient`: as the second time, when what is no escape was a sign of its own, and does not
    keep those that decode twice from decoding the others."""
    raw = path.encode(errors="surrogateescape")
    if not lenient and re.search(rb"%(?![0-9A-Fa-f]{2})", raw):
        return None

    def one(match: re.Match[bytes]) -> bytes:
        byte = bytes([int(match[1], 16)])
        return match.group().upper() if keep_slashes and byte in b"/\\%" else byte

    try:
        text = _ESCAPE.sub(one, raw).decode(errors="surrogateescape" if lenient else "strict")
    except UnicodeDecodeError:
        return None
    return None if any(ord(c) < 32 or ord(c) == 127 for c in text) else text


def _readings(path: str) -> list[str]:
    """With dots and empty segments resolved, with `\\` as `/`, without `;parameters`."""
    found = []
    for backslash in (False, True):
        for parameters in (False, True):
            text = path.replace("\\", "/") if backslash else path
            if parameters:
                text = re.sub(r";[^/]*", "", text)
            found.append(_resolved(text))
            if "//" in text:
                found.append(_resolved(re.sub(r"/{2,}", "/", text)))
    return found


def _resolved(path: str) -> str:
    """RFC 3986, 5.2.4: dot segments removed; empty ones stay."""
    out: list[str] = []
    *heads, tail = path.split("/")[1:]
    for segment in heads:
        if segment == "..":
            if out:
                out.pop()
        elif segment != ".":
            out.append(segment)
    if tail == ".." and out:
        out.pop()
    return "/" + "".join(f"{segment}/" for segment in out) + ("" if tail in (".", "..") else tail)


def globs(pattern: str) -> Callable[[str], bool]:
    """A matcher of whole texts; `*` is anything, also nothing. Linear: no pattern makes a request slow."""
    head, *middles = pattern.split("*")
    if not middles:
        return lambda text: text == pattern
    *middles, tail = middles

    def matches(text: str) -> bool:
        if not text.startswith(head) or len(text) < len(head) + len(tail) or not text.endswith(tail):
            return False
        at, end = len(head), len(text) - len(tail)
        for middle in middles:
            at = text.find(middle, at, end)
            if at < 0:
                return False
            at += len(middle)
        return True

    return matches
