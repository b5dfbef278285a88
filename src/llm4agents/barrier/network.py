"""What a user asks of the network (`network=`), as JSON and as values, and what the host's package tools are set up
to use. Pure. Judging is policy.py's; the grammar of a rule line is rules.py's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from llm4agents import limits
from llm4agents.barrier import addresses, rules
from llm4agents.barrier.addresses import Address
from llm4agents.barrier.rules import Host, Ports, Rule, fail
from llm4agents.errors import InvalidRequestError

Profile = Literal["none", "packages", "public"]
PROFILES: tuple[str, ...] = get_args(Profile)
Form = Literal["bearer", "header", "basic", "query", "placeholder", "sigv4"]
FORMS: tuple[str, ...] = get_args(Form)
_SECRET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_OWN_SECRET = re.compile(
    r"index:[A-Za-z0-9_.:\[\]-]{1,300}"
)  # of packages.py: made on the host, never by a user
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_HOP_HEADERS = {
    "host",
    "content-length",
    "content-type",
    "transfer-encoding",
    "connection",
    "upgrade",
    "te",
    "trailer",
    "keep-alive",
    "proxy-connection",
    "expect",
    "accept-encoding",
}
# What each form needs and may have, beside what all have.
_FORM_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bearer": ((), ()),
    "header": (("header",), ("prefix",)),
    "basic": (("username",), ()),
    "query": (("parameter",), ()),
    "placeholder": (("placeholder",), ()),
    "sigv4": ((), ("region", "service")),
}
_COMMON = ("secret", "host", "port", "scheme", "methods", "path", "as")


@dataclass(frozen=True, slots=True)
class Binding:
    """A secret's name, where its value may be put in, and how. Has no value of a secret."""

    secret: str
    host: Host
    form: Form
    port: int = 443
    scheme: Literal["https", "http"] = "https"
    methods: tuple[str, ...] | None = None
    path: str | None = None
    header: str | None = None
    prefix: str | None = None
    username: str | None = None
    parameter: str | None = None
    placeholder: str | None = None
    region: str | None = None
    service: str | None = None

    @classmethod
    def from_json(cls, value: object, what: str = "credential", *, own: bool = False) -> Binding:
        """From an object, or the short form `NAME=bearer@HOST[:PORT][/PATH]`. `own`: names of the host's own making
        (`index:…`) are allowed. Raises InvalidRequestError."""
        if isinstance(value, str):
            value = _short(value, what)
        if not isinstance(value, Mapping):
            fail(what, "it is neither an object nor text", "NAME=bearer@HOST/PATH, or {secret, host, as, …}")
        form = value.get("as")
        if not isinstance(form, str) or form not in FORMS:
            fail(what, f"as={form!r}", f"expected one of {', '.join(FORMS)}")
        needed, optional = _FORM_KEYS[form]
        unknown = [str(k) for k in value if k not in (*_COMMON, *needed, *optional)]
        if unknown:
            known = ", ".join((*_COMMON, *needed, *optional))
            fail(what, f"{', '.join(unknown)!r} is no part of a {form} credential", f"known are {known}")
        secret = value.get("secret")
        if not isinstance(secret, str) or not (
            _SECRET.fullmatch(secret) or (own and _OWN_SECRET.fullmatch(secret))
        ):
            fail(what, f"secret={secret!r} is no secret's name", "letters, digits and _.-, at most 128")
        host = _host_of(value.get("host"), what)
        scheme = value.get("scheme", "https")
        if scheme not in ("https", "http"):
            fail(what, f"scheme={scheme!r}", "https, or http to send the secret in the clear")
        port = value.get("port", 443 if scheme == "https" else 80)
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
            fail(what, f"port={port!r}", "a number from 1 to 65535")
        methods = value.get("methods")
        if methods is not None and (
            not isinstance(methods, Sequence)
            or isinstance(methods, str)
            or not methods
            or len(methods) > 32
            or not all(isinstance(m, str) and re.fullmatch(r"[A-Z][A-Z-]{0,31}", m) for m in methods)
        ):
            fail(what, f"methods={methods!r}", 'a list such as ["GET", "POST"], or null for all')
        path = value.get("path")
        if path is not None:
            path = _path_of(path, what)
        texts: dict[str, str | None] = {}
        for key in (*needed, *optional):
            text = value.get(key)
            if text is None and key in needed:
                fail(what, f"a {form} credential needs `{key}`", f"add {key}")
            if text is not None and (
                not isinstance(text, str) or len(text) > 256 or not text.isprintable() or not text.isascii()
            ):
                fail(what, f"{key}={text!r}", "at most 256 printable ASCII characters")
            texts[key] = text
        if form == "header" and (
            not _TOKEN.fullmatch(texts["header"] or "") or (texts["header"] or "").lower() in _HOP_HEADERS
        ):
            fail(what, f"header={texts['header']!r} cannot carry a credential", "a header such as X-Api-Key")
        if form == "basic" and ":" in (texts["username"] or ""):
            fail(what, "a user name of Basic has no colon", "the secret is the password alone")
        if form == "placeholder" and not re.fullmatch(r"[A-Za-z0-9_.~-]{8,256}", texts["placeholder"] or ""):
            fail(
                what,
                f"placeholder={texts['placeholder']!r}",
                "8 to 256 letters, digits and _.~-, found nowhere else by chance",
            )
        return cls(
            secret,
            host,
            cast(Form, form),
            port,
            scheme,
            None if methods is None else tuple(dict.fromkeys(methods)),
            path,
            **texts,
        )

    def to_json(self) -> dict[str, Any]:
        extra = {key: getattr(self, key) for keys in _FORM_KEYS[self.form] for key in keys}
        return {
            "secret": self.secret,
            "host": str(self.host),
            "port": self.port,
            **({"scheme": self.scheme} if self.scheme != "https" else {}),
            "methods": None if self.methods is None else list(self.methods),
            "path": None if self.path is None else rules.path_text(self.path),
            "as": self.form,
            **{key: text for key, text in extra.items() if text is not None},
        }


@dataclass(frozen=True, slots=True)
class Rewrite:
    """`name` is led to another name, or to an address; to the same port unless `port` says another."""

    name: str
    to_name: str | None
    to_address: Address | None
    port: int | None = None

    @classmethod
    def parse(cls, text: object, what: str = "rewrite") -> Rewrite:
        """`NAME -> NAME|ADDRESS[:port]`. Raises InvalidRequestError."""
        shape = "NAME -> NAME|ADDRESS[:PORT], such as api.example.com -> staging.example.com"
        if not isinstance(text, str):
            fail(what, "it is no text", shape)
        if len(text) > limits.NETWORK_RULE_CHARACTERS_MAX:
            fail(what, f"{len(text)} characters long", shape)
        left, arrow, right = text.partition("->")
        if not arrow:
            fail(f"{what} {text!r}", "there is no ->", shape)
        try:
            name = addresses.name(left.strip())
        except ValueError as error:
            fail(f"{what} {text!r}", f"{left.strip()!r} is no host name: {error}", shape)
        host, ports, path = _target_of(right.strip(), f"{what} {text!r}", shape)
        if path is not None or host.kind not in ("name", "net"):
            fail(f"{what} {text!r}", "it leads to one name or address, without a path", shape)
        if host.net is not None and host.net.prefixlen != host.net.max_prefixlen:
            fail(f"{what} {text!r}", "it leads to one address, not to a network", shape)
        if ports is not None and (len(ports) != 1 or ports[0][0] != ports[0][1]):
            fail(f"{what} {text!r}", "it leads to one port", shape)
        return cls(
            name,
            host.text if host.net is None else None,
            None if host.net is None else host.net.network_address,
            None if ports is None else ports[0][0],
        )

    def __str__(self) -> str:
        address = self.to_address
        to = self.to_name or (
            f"[{address}]" if address is not None and address.version == 6 else str(address)
        )
        return f"{self.name} -> {to}{'' if self.port is None else f':{self.port}'}"


@dataclass(frozen=True, slots=True)
class Network:
    """A `network=` that can be read. `credentials` are names of secrets and where they go, never values."""

    profile: Profile = "none"
    rules: tuple[Rule, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    credentials: tuple[Binding, ...] = ()

    @classmethod
    def from_json(cls, value: object) -> Network:
        """From a profile's name, a list of rule lines, an object, or None (the default).

        Raises InvalidRequestError naming the rule, the column and what was expected.
        """
        if value is None:
            return cls()
        if isinstance(value, str):
            return cls(profile=_profile(value))
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            value = {"rules": value}
        if not isinstance(value, Mapping):
            fail(
                "network",
                f"a value of type {type(value).__name__}",
                "a profile's name, a list of rules, or an object",
            )
        try:
            size = len(json.dumps(value))
        except (TypeError, ValueError, RecursionError):
            fail("network", "it is not JSON", "a profile's name, a list of rules, or an object")
        if size > limits.NETWORK_BYTES_MAX:
            fail("network", f"{size} bytes of JSON", f"at most {limits.NETWORK_BYTES_MAX}")
        known = ("profile", "rules", "rewrite", "credentials")
        unknown = [str(key) for key in value if key not in known]
        if unknown:
            fail("network", f"unknown key {unknown[0]!r}", f"known are {', '.join(known)}")
        lines = _list(value.get("rules"), "rules", limits.NETWORK_RULES_MAX)
        found = []
        for at, line in enumerate(lines, 1):
            if not isinstance(line, str):
                fail(f"rule {at}", f"{line!r} is no text", "a line such as allow example.com", line=at)
            if line in PROFILES:
                fail(
                    f"rule {at}",
                    f"{line!r} is a profile and no rule",
                    f'network="{line}", or with rules {{"profile": "{line}", "rules": […]}}',
                    line=at,
                )
            found.append(rules.parse(line, f"rule {at}", line=at))
        rewrites: dict[str, Rewrite] = {}
        for at, text in enumerate(_list(value.get("rewrite"), "rewrite", limits.NETWORK_REWRITES_MAX), 1):
            rewrite = Rewrite.parse(text, f"rewrite {at}")
            if rewrite.name in rewrites:
                fail(f"rewrite {at}", f"{rewrite.name} is rewritten twice", "one rewrite for each name")
            rewrites[rewrite.name] = rewrite
        credentials = _list(value.get("credentials"), "credentials", limits.NETWORK_CREDENTIALS_MAX)
        return cls(
            _profile(value.get("profile") or "none"),
            tuple(found),
            tuple(rewrites.values()),
            tuple(Binding.from_json(one, f"credential {at}") for at, one in enumerate(credentials, 1)),
        )

    @classmethod
    def from_words(
        cls, net: Sequence[str] = (), rewrite: Sequence[str] = (), credential: Sequence[str] = ()
    ) -> Network:
        """From the command line: each of `net` is a profile's name or a rule. Raises InvalidRequestError."""
        profiles = [word for word in net if word in PROFILES]
        if len(set(profiles)) > 1:
            fail("--net", f"{' and '.join(dict.fromkeys(profiles))} together", "one profile")
        lines = [word for word in net if word not in PROFILES]
        for line in lines:
            if " " not in line.strip():
                _profile(line)
        return cls.from_json(
            {
                "profile": profiles[0] if profiles else "none",
                "rules": lines,
                "rewrite": list(rewrite),
                "credentials": list(credential),
            }
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads again; every key is there."""
        return {
            "profile": self.profile,
            "rules": [str(rule) for rule in self.rules],
            "rewrite": [str(rewrite) for rewrite in self.rewrites],
            "credentials": [binding.to_json() for binding in self.credentials],
        }

    def warnings(self) -> tuple[str, ...]:
        """Sentences about what is allowed and probably wider than meant."""
        found = []
        for rule in self.rules:
            host = rule.host
            if not rule.allow:
                continue
            if host.kind == "any":
                found.append(f"`{rule}`: any name, also those of whoever wants data out")
            elif host.kind == "wildcard" and "." not in host.text:
                found.append(f"`{rule}`: everything under .{host.text}; anyone can register a name there")
            elif host.kind == "wildcard":
                found.append(f"`{rule}`: names under {host.text} tell its name servers what is looked up")
        for binding in self.credentials:
            if binding.scheme == "http":
                found.append(f"credential {binding.secret}: sent in the clear to {binding.host}")
            for rewrite in self.rewrites:
                if str(binding.host) == rewrite.name and (place := _bound_elsewhere(binding, rewrite)):
                    found.append(
                        f"credential {binding.secret}: `{rewrite}` leads its requests away, and it is not put in "
                        f"there; bind it to {place} if it should be"
                    )
        return tuple(found)


@dataclass(frozen=True, slots=True)
class PackageHost:
    """A host that a package tool of this host uses. `paths`: patterns, empty for every path; `post`: patterns of
    paths that clients need POST for; what is not listed is GET and HEAD."""

    host: str
    port: int
    scheme: Literal["https", "http"]
    tool: str
    paths: tuple[str, ...] = ()
    post: tuple[str, ...] = ()

    def rules(self) -> tuple[Rule, ...]:
        """As the rules it comes to."""
        host, _, _ = _target_of(
            f"[{self.host}]" if ":" in self.host else self.host,
            f"host of {self.tool}",
            "a host name or an address",
        )
        protocol: rules.Protocol = "tls" if self.scheme == "https" else "http"
        ports: Ports = ((self.port, self.port),)
        reading = [
            Rule(True, host, ("GET", "HEAD"), protocol, ports, path) for path in (self.paths or (None,))
        ]
        return (*reading, *(Rule(True, host, ("POST",), protocol, ports, path) for path in self.post))


@dataclass(frozen=True, slots=True)
class Packages:
    """What this host's apt, pip, npm, cargo and go are set up to use. Has no credential's value.

    `environment` and `files` make a guest's tools use the same; `skipped`: tool to the reason it is not here, wholly
    or in part; `rewrites`: names by which a guest reaches what the host has on its own loopback.
    """

    hosts: tuple[PackageHost, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    credentials: tuple[Binding, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    rewrites: tuple[Rewrite, ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Packages:
        """Raises InvalidRequestError for what `to_json` did not make."""
        try:
            return cls(
                tuple(
                    PackageHost(
                        h["host"],
                        h["port"],
                        h["scheme"],
                        h["tool"],
                        tuple(h.get("paths", ())),
                        tuple(h.get("post", ())),
                    )
                    for h in value["hosts"]
                ),
                dict(value.get("environment", {})),
                dict(value.get("files", {})),
                tuple(Binding.from_json(one, own=True) for one in value.get("credentials", ())),
                dict(value.get("skipped", {})),
                tuple(Rewrite.parse(one) for one in value.get("rewrites", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequestError(f"packages: {type(error).__name__}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        return {
            "hosts": [
                {
                    "host": h.host,
                    "port": h.port,
                    "scheme": h.scheme,
                    "tool": h.tool,
                    "paths": list(h.paths),
                    "post": list(h.post),
                }
                for h in self.hosts
            ],
            "environment": dict(self.environment),
            "files": dict(self.files),
            "credentials": [binding.to_json() for binding in self.credentials],
            "skipped": dict(self.skipped),
            "rewrites": [str(rewrite) for rewrite in self.rewrites],
        }


def _bound_elsewhere(binding: Binding, rewrite: Rewrite) -> str | None:
    """Where a credential of a name that is led elsewhere would have to be bound; None when it is put in there too:
    at an address, over TLS, whose certificate says that it is the name."""
    port = rewrite.port or binding.port
    if rewrite.to_name is not None:
        return f"{rewrite.to_name}:{port}"
    if binding.scheme == "http":
        return f"{rewrite.to_address}:{port}"
    return None if binding.port == port else f"{binding.host}:{port}"


def _profile(value: object) -> Profile:
    if value not in PROFILES:
        way_out = f"expected {', '.join(PROFILES)}, or a list of rules"
        if isinstance(value, str) and value.split(" ")[0] in ("allow", "deny"):
            way_out = "a rule goes into a list: network=[…]"
        elif isinstance(value, str) and value.strip().lower() in PROFILES:
            way_out = f"expected {value.strip().lower()}"
        elif isinstance(value, str) and "." in value.strip(".") and " " not in value:
            way_out = f"to allow a host: a rule, such as 'allow {value[:100].rpartition('://')[2]}'"
        fail("network", f"{str(value)[:100]!r} is no profile", way_out)
    return cast(Profile, value)


def _list(value: object, key: str, most: int) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        fail("network", f"{key} is no list", f"{key}: […]")
    if len(value) > most:
        fail("network", f"{len(value)} {key}", f"at most {most}")
    return value


def _target_of(text: str, what: str, expected: str) -> tuple[Host, Ports | None, str | None]:
    try:
        if "://" in text:
            raise InvalidRequestError(
                "a scheme is not written here", hint="the host alone, [:PORT] and [/PATH]"
            )
        if not text or not text.isprintable() or " " in text:
            raise InvalidRequestError("a blank in it" if text else "there is no host")
        found = rules.target(text)
    except InvalidRequestError as error:
        fail(what, f"{text!r}: {error.message}", error.hint or expected)
    return found


def _host_of(value: object, what: str) -> Host:
    if not isinstance(value, str) or len(value) > 300:
        fail(what, f"host={value!r}", "a name, *.domain or an address")
    host, ports, path = _target_of(value, what, "a name, *.domain or an address")
    if ports is not None or path is not None:
        fail(what, f"host={value!r}", "a host alone; `port` and `path` are keys of their own")
    if host.kind == "any" or (host.kind == "wildcard" and "." not in host.text):
        fail(what, f"a secret for {host} would go to anyone", "the host that the secret is for")
    if host.net is not None and host.net.prefixlen != host.net.max_prefixlen:
        fail(what, "a secret for a whole network", "the one host that the secret is for")
    return host


def _path_of(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.startswith("/") or " " in value or len(value) > 900:
        fail(what, f"path={value!r}", "a path such as /repos/*")
    _, _, path = _target_of("x" + value, what, "a path such as /repos/*")
    assert path is not None
    return path


_SHORT = re.compile(r"(?P<form>[a-z0-9]+)(?::(?P<argument>[^/]*?|[^/@]*/[^/@]*))?@(?P<target>[^@/]+(?:/.*)?)")


def _short(text: str, what: str) -> dict[str, Any]:
    shape = (
        "NAME=bearer@HOST[:PORT][/PATH], or basic:USER@, header:NAME@, query:NAME@, placeholder:TEXT@, sigv4@"
    )
    secret, equals, rest = text.partition("=")
    match = _SHORT.fullmatch(rest)
    # The text is not in the message: someone may have written the value where its name belongs.
    if (
        not equals
        or len(text) > limits.NETWORK_RULE_CHARACTERS_MAX
        or match is None
        or match["form"] not in FORMS
    ):
        fail(what, "it cannot be read", f"expected {shape}")
    form, argument = match["form"], match["argument"]
    host, ports, path = _target_of(match["target"], what, shape)
    found: dict[str, Any] = {"secret": secret, "host": str(host), "as": form, "path": path}
    if ports is not None:
        if len(ports) != 1 or ports[0][0] != ports[0][1]:
            fail(what, "one port", shape)
        found["port"] = ports[0][0]
    if form == "sigv4" and argument:
        service, _, region = argument.partition("/")
        found |= {key: text for key, text in (("service", service), ("region", region)) if text}
    elif form in ("basic", "header", "query", "placeholder"):
        if not argument:
            fail(what, f"{form} needs something after a colon", shape)
        found[_FORM_KEYS[form][0][0]] = argument
    elif argument:
        fail(what, f"{form} takes nothing after a colon", shape)
    return found
