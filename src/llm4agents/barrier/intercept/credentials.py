"""Credentials put into a request after it has left the guest, and what must be struck from its answer because of them.

Pure over what it is given: bindings (of the policy, already found to fit the request), values, the request's head.
Values are in no exception's words and in no repr.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol
from urllib.parse import quote, unquote_plus

from llm4agents import limits
from llm4agents.barrier.intercept import heads, sigv4, striking
from llm4agents.barrier.intercept.placeholders import Placeholder, Unfit

Fields = list[tuple[bytes, bytes]]
Value = str | Mapping[str, str]


class Binding(Protocol):
    """The part of `network.Binding` that is looked at here."""

    @property
    def secret(self) -> str: ...
    @property
    def form(self) -> str: ...
    @property
    def header(self) -> str | None: ...
    @property
    def prefix(self) -> str | None: ...
    @property
    def username(self) -> str | None: ...
    @property
    def parameter(self) -> str | None: ...
    @property
    def placeholder(self) -> str | None: ...
    @property
    def region(self) -> str | None: ...
    @property
    def service(self) -> str | None: ...


class Withheld(Exception):
    """The request cannot get its credential and is refused with `status` and these words."""

    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(reason)


@dataclass(slots=True)
class Outgoing:
    """A request's head, and its body when it was waited for."""

    method: str
    target: bytes
    fields: Fields
    body: bytes | None = None


@dataclass(slots=True)
class Carried:
    """What a request was given."""

    names: list[str] = field(default_factory=list)
    forms: set[bytes] = field(default_factory=set)
    signatures: set[bytes] = field(default_factory=set)
    """Struck from the answer to this request alone: every request has another."""


class Values:
    """The values of a sandbox's secrets, and the forms to strike, worked out once for each."""

    def __init__(
        self, values: Mapping[str, Value], past: Mapping[str, frozenset[bytes]] | None = None
    ) -> None:
        self._values = dict(values)
        self._past = dict(past or {})
        """Forms of values that were put in and are none any more: who was given one may still answer with it."""
        self._forms: dict[tuple[str, str | None], frozenset[bytes]] = {}

    def __repr__(self) -> str:
        return "Values(***)"

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def with_(self, more: Mapping[str, Value]) -> Values:
        return self.renewed({**self._values, **more})

    def renewed(self, values: Mapping[str, Value]) -> Values:
        """Others in their place."""
        past = dict(self._past)
        for (name, _), found in self._forms.items():
            if values.get(name) != self._values.get(name):
                past[name] = past.get(name, frozenset()) | found
        return Values(values, past)

    def known(self, name: str, user: str | None = None) -> frozenset[bytes]:
        """What to strike of a secret, of values that it had too; nothing of one that never had any."""
        now = self.forms(name, user) if name in self else frozenset()
        return now | self._past.get(name, frozenset())

    def text(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or not value:
            raise Withheld(
                502, f"the secret {name} has no value that can be sent like this: its owner must set one"
            )
        return value

    def keys(self, name: str) -> sigv4.Keys:
        value = self._values.get(name)
        if not isinstance(value, Mapping):
            raise Withheld(
                502, f"the secret {name} is no pair of AWS keys: its owner must set access_key_id and more"
            )
        try:
            return sigv4.Keys(
                value["access_key_id"], value["secret_access_key"], value.get("session_token") or None
            )
        except KeyError as error:
            raise Withheld(502, f"the secret {name} has no {error.args[0]}") from None

    def forms(self, name: str, user: str | None = None) -> frozenset[bytes]:
        found = self._forms.get((name, user))
        if found is None:
            value = self._values[name]
            texts = (
                [value]
                if isinstance(value, str)
                else [v for k, v in value.items() if k != "access_key_id" and v]
            )
            users = ("", *([user] if user else []))
            found = frozenset().union(*(striking.forms(text, users) for text in texts))
            self._forms[name, user] = found
        return found


def waits_for_body(bindings: Iterable[Binding], fields: Fields, length: int | None) -> bool:
    """Whether the body (of that length, None = unknown) is needed before the request can be sent. Raises Withheld."""
    for binding in bindings:
        if binding.form == "placeholder" and length and length <= limits.INTERCEPT_PLACEHOLDER_BODY_BYTES_MAX:
            return True
        if binding.form == "sigv4" and length != 0:
            service = binding.service or _service(fields)
            try:
                if sigv4.payload_hash(fields, service=service) is not None:
                    continue
            except sigv4.CannotSign as error:
                raise Withheld(501, str(error)) from None
            if length is None or length > limits.INTERCEPT_SIGNED_BODY_BYTES_MAX:
                raise Withheld(
                    413,
                    "a body without x-amz-content-sha256 is signed here, and so must have a known length of at most "
                    f"{limits.INTERCEPT_SIGNED_BODY_BYTES_MAX} bytes",
                )
            return True
    return False


def put_in(
    bindings: Sequence[Binding], values: Values, request: Outgoing, *, now: Callable[[], datetime]
) -> Carried:
    """Change `request`; what it carries now. Raises Withheld, and then nothing may be sent."""
    carried = Carried()
    # Signing comes last: it is over everything else.
    for binding in sorted(bindings, key=lambda binding: binding.form == "sigv4"):
        try:
            _one(binding, values, request, carried, now)
        except (Unfit, sigv4.CannotSign) as error:
            raise Withheld(502, f"the secret {binding.secret}: {error}") from None
    return carried


def _one(
    binding: Binding, values: Values, request: Outgoing, carried: Carried, now: Callable[[], datetime]
) -> None:
    form = binding.form
    if form == "sigv4":
        carried.signatures |= _sign(binding, values, request, now)
    elif form == "placeholder":
        if not _replace(Placeholder(binding.placeholder or "", values.text(binding.secret)), request):
            return
    elif form == "query":
        _set_parameter(request, binding.parameter or "", values.text(binding.secret))
    elif form == "basic":
        pair = f"{binding.username or ''}:{values.text(binding.secret)}".encode()
        _set(request, b"Authorization", b"Basic " + base64.b64encode(pair))
    elif form == "bearer":
        _set(request, b"Authorization", f"Bearer {values.text(binding.secret)}".encode())
    elif form == "header":
        _set(
            request,
            (binding.header or "").encode(),
            f"{binding.prefix or ''}{values.text(binding.secret)}".encode(),
        )
    else:
        raise Withheld(502, f"the credential's form {form} is not known here")
    carried.names.append(binding.secret)
    carried.forms |= values.forms(binding.secret, binding.username)


def _set(request: Outgoing, name: bytes, value: bytes) -> None:
    """Over whatever the guest had there."""
    if not heads.is_value(value):
        raise Unfit("its value has characters that no header can hold")
    lower = name.lower()
    request.fields = [(key, old) for key, old in request.fields if key.lower() != lower]
    request.fields.append((name, value))


def _set_parameter(request: Outgoing, name: str, value: str) -> None:
    path, _, query = request.target.decode("latin-1").partition("?")
    parts = [part for part in query.split("&") if part and unquote_plus(part.partition("=")[0]) != name]
    parts.append(f"{quote(name, safe='')}={quote(value, safe='')}")
    request.target = f"{path}?{'&'.join(parts)}".encode("latin-1")


def _replace(placeholder: Placeholder, request: Outgoing) -> bool:
    request.target, did = placeholder.in_address(request.target)
    fields: Fields = []
    for name, value in request.fields:
        if name.lower() != b"host":
            value, changed = placeholder.in_header(name, value)
            did = did or changed
        fields.append((name, value))
    if request.body:
        kind = next((value for name, value in fields if name.lower() == b"content-type"), b"")
        request.body, changed = placeholder.in_body(kind, request.body)
        if changed:
            did = True
            size = str(len(request.body)).encode()
            fields = [(n, size if n.lower() == b"content-length" else v) for n, v in fields]
    request.fields = fields
    return did


def _service(fields: Fields) -> str:
    scope = sigv4.scope_of(fields, b"")
    return scope.service if scope else ""


def _sign(binding: Binding, values: Values, request: Outgoing, now: Callable[[], datetime]) -> set[bytes]:
    keys = values.keys(binding.secret)
    path, _, query = request.target.decode("latin-1").partition("?")
    scope = sigv4.scope_of(request.fields, query.encode("latin-1"))
    region = binding.region or (scope.region if scope else None)
    service = binding.service or (scope.service if scope else None)
    if not region or not service:
        raise sigv4.CannotSign(
            "the request is not signed with version 4, so its region and service are unknown: "
            "have the client sign (with any keys), or name both in the binding (sigv4:SERVICE/REGION@HOST)"
        )
    payload = sigv4.payload_hash(request.fields, service=service)
    if payload is None:
        payload = hashlib.sha256(request.body or b"").hexdigest()
    query, fields = sigv4.sign(
        keys,
        method=request.method,
        path=path,
        query=query,
        fields=request.fields,
        payload=payload,
        region=region,
        service=service,
        signed=scope.signed if scope else frozenset(),
        now=now(),
    )
    request.fields = fields
    request.target = (f"{path}?{query}" if query else path).encode("latin-1")
    return {fields[-1][1].rpartition(b"Signature=")[2]}
