"""The gate before the application: who calls, whether he may, and whether what he names is his.

`guarded(app, context, via=…)` is made once for each listener, and the listener says what it is: only what comes in over
the unix socket's own can be the operator. Nothing of a request says so, and the application refuses whatever has not
come through a gate. Ports of sandboxes have their own rule (`api.access.ports`): here it is only found out who asks.

What changes something, and what is refused, is written to the audit here too.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from dataclasses import dataclass
from typing import Literal

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from llm4agents import limits
from llm4agents.api.access import once, owners
from llm4agents.api.access.answer import Answer
from llm4agents.api.access.crowd import Crowd
from llm4agents.api.access.ending import until_ended
from llm4agents.api.access.table import OPEN, QUIET, Matched, Table
from llm4agents.api.answers import problem
from llm4agents.api.context import CALLER, Context
from llm4agents.api.proxy import address
from llm4agents.api.proxy.admission import TOKEN_FORM, is_key
from llm4agents.engine import clock, invites, keys
from llm4agents.engine.audit import Entry
from llm4agents.engine.principal import NOBODY, Principal
from llm4agents.errors import (
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    LLM4AgentsError,
    MethodNotAllowedError,
    NotFoundError,
)

Via = Literal["unix", "tcp"]
Admitted = Literal["route", "port"]
KEY_HINT = "send Authorization: Bearer KEY, or X-API-KEY; LLM4AGENTS_API_KEY for the SDK and the command line"
TARGET_CHARACTERS_MAX = 500
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_A_SECRET = re.compile(r"(l4a_)[a-z0-9]{8}_[0-9a-f]+|(l4i_)[0-9a-f]{8,}|(l4at_)[A-Za-z0-9_-]{8,}")
_MISPLACED = {
    keys.PREFIX: ("an API key", "revoke it: paths are in logs; a key goes into a header"),
    invites.PREFIX: (
        "an invite's code",
        "paths are in logs; llm4agents invite ls shows its id, which revokes it",
    ),
    TOKEN_FORM: ("a traffic token", "rotate it: paths are in logs; it goes into X-Traffic-Token"),
}
_READS = ("GET", "HEAD", "OPTIONS")
_TABLE = Table()


def guarded(app: ASGIApp, context: Context, *, via: Via) -> ASGIApp:
    """`app` as a listener serves it. `unix`: the server's own socket, mode 0600, whose callers are the operator."""
    return Gate(app, context, via)


@dataclass(slots=True)
class _Call:
    """One request, as far as is known of it."""

    scope: Scope
    method: str
    principal: Principal
    port: bool = False
    matched: Matched | None = None

    @property
    def pattern(self) -> str:
        return "unknown" if self.matched is None else self.matched.pattern


class Gate:
    """ASGI middleware; one for each listener."""

    def __init__(self, app: ASGIApp, context: Context, via: Via) -> None:
        self.app, self.context, self._unix = app, context, via == "unix"
        self._crowd = Crowd(limits.LISTEN_REQUESTS_MAX, limits.LISTEN_REQUESTS_CROWDED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        request = _request_id(scope)
        answer = Answer(send, request)
        method = "WS" if scope["type"] == "websocket" else str(scope["method"])
        call = _Call(scope, method, Principal.nobody(self._origin(scope)))
        with structlog.contextvars.bound_contextvars(request=request):
            caller = CALLER.set(call.principal)  # until it is known who it is
            try:
                await self._serve(call, receive, answer)
            finally:
                CALLER.reset(caller)
                self._record(call, request, answer, (time.perf_counter() - began) * 1_000)

    async def _serve(self, call: _Call, receive: Receive, answer: Answer) -> None:
        scope = call.scope
        try:
            self._admit(call)
            admitted: Admitted = "port" if call.port else "route"
            state = {"principal": call.principal, "admitted": admitted}
            scope["state"] = {**scope.get("state", {}), **state}
            CALLER.set(call.principal)
            key = None if call.port else once.key_of(scope, call.pattern)
            who = call.principal
            # Strangers have their addresses' share (the listener's); the operator has no bound but the listener's.
            free = self._unix or who.sees_all or who.actor == NOBODY
            with (
                contextlib.nullcontext() if free else self._crowd.inside(who.project),
                self._holding(who) as held,
            ):
                send: Send = answer
                if held is not None:
                    receive, send = until_ended(held, scope, receive, answer)
                if key is None:
                    await self.app(scope, receive, send)
                    return
                repeats = self.context.engine.repeats
                await once.serve(self.app, repeats, who.project, key, call.pattern, scope, receive, answer)
        except LLM4AgentsError as error:
            if answer.begun:
                raise
            await _refuse(error, self.context, scope, receive, answer)
        except ClientDisconnect:
            return

    def _holding(self, who: Principal) -> contextlib.AbstractContextManager[keys.Held | None]:
        if self._unix or who.actor == NOBODY:
            return contextlib.nullcontext()
        return self.context.engine.keys.holding(who.actor)

    # -- who, and whether he may ------------------------------------------------------------------------------

    def _admit(self, call: _Call) -> None:
        """Find out what is wanted and who calls.

        Raises AuthenticationError, ForbiddenError, NotFoundError, InvalidRequestError.
        """
        scope = call.scope
        call.port = address.of(scope, self.context.names) is not None
        if call.port:
            call.principal = self._visitor(scope, call.principal)
            return
        call.matched = matched = _TABLE.find(call.method, scope["path"])
        is_open = matched is not None and matched.needs == OPEN
        call.principal = principal = self._caller(scope, call.principal, needed=not is_open)
        if misplaced := _A_SECRET.search(scope["path"]):
            what, hint = _MISPLACED[misplaced[misplaced.lastindex or 0]]
            raise InvalidRequestError(f"there is {what} in the path", hint=hint)
        if is_open:
            return
        if matched is None:
            # Whether or not the application has it: what the table does not know is for nobody.
            raise NotFoundError(f"there is no {scope['path'][:1_000]} here")
        if matched.needs is None:
            raise MethodNotAllowedError(
                f"{scope['path'][:1_000]} has no method {call.method[:40]}", allow=list(matched.methods)
            )
        words = matched.needs.split()
        if not any(map(principal.may, words)):
            raise ForbiddenError(
                f"this needs a key with the scope {' or '.join(words)}",
                hint="on the server's host, without LLM4AGENTS_URL, you are the operator (key create --scope)",
                needs=words,
            )
        if not principal.sees_all:
            owners.check(self.context, matched.params, principal)

    def _caller(self, scope: Scope, nobody: Principal, *, needed: bool) -> Principal:
        """Raises AuthenticationError for a key that is not good, and (`needed`) for none."""
        return self._known(scope) if needed or self._unix or key_of(scope) is not None else nobody

    def _known(self, scope: Scope) -> Principal:
        if self._unix:
            return Principal.operator()
        text = key_of(scope)
        if text is None:
            raise AuthenticationError("this server wants an API key", hint=KEY_HINT)
        return keys.principal_of(self.context.engine.keys.known(text), self._origin(scope))

    def _origin(self, scope: Scope) -> str:
        client = scope.get("client")
        return "unix" if self._unix else str(client[0]) if client else "unknown"

    def _visitor(self, scope: Scope, nobody: Principal) -> Principal:
        """Who asks for a port, where a key that is not good is as none: the port's rule may let him in all the same."""
        if self._unix:
            return Principal.operator()
        for name, value in scope["headers"]:
            if is_key(name, value):  # any other is for the guest
                text = value.decode("latin-1").strip().rpartition(" ")[2]
                with contextlib.suppress(AuthenticationError, ForbiddenError):
                    return keys.principal_of(self.context.engine.keys.known(text), nobody.origin)
        return nobody

    # -- what is told of it -----------------------------------------------------------------------------------

    def _record(self, call: _Call, request: str, answer: Answer, duration_ms: float) -> None:
        state = call.scope.get("state", {})
        # A port's own answers are the guest's: `api.access.ports` says which refusals are ours.
        refused = (
            bool(state.get("refused")) if call.port and "admitted" in state else answer.status in (401, 403)
        )
        if "admitted" not in state:
            # It never came to where calls are counted.
            self.context.engine.metrics.call(
                f"{call.method} {call.pattern}", answer.status, duration_ms / 1_000
            )
        reads = call.port or call.method in _READS or call.matched is None or call.pattern in QUIET
        if not refused and reads:
            return
        # Cut after it is redacted: half a secret is none that is recognised.
        target = _A_SECRET.sub(lambda found: f"{found[found.lastindex or 0]}…", call.scope["path"])
        entry = Entry(
            at=clock.wall_s(),
            project=call.principal.project,
            actor=call.principal.actor,
            origin=call.principal.origin,
            request=request,
            action=f"{call.method} {'a port' if call.port else call.pattern}",
            target=target[:TARGET_CHARACTERS_MAX].encode("utf-8", "replace").decode(),
            status=answer.status,
            code=answer.code,
            duration_ms=round(duration_ms, 3),
        )
        audit = self.context.engine.audit
        (audit.add_strangers if refused and call.principal.actor == NOBODY else audit.add)(entry)


def key_of(scope: Scope) -> str | None:
    """The API key of a request, good or not."""
    found: list[str] = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            found.insert(0, value.decode("latin-1").strip())
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            found.append(value[7:].decode("latin-1").strip())
    return found[0] if found else None


async def _refuse(
    error: LLM4AgentsError, context: Context, scope: Scope, receive: Receive, send: Send
) -> None:
    refusal = problem(error, context)
    if isinstance(error, AuthenticationError):
        refusal.headers["www-authenticate"] = "Bearer"
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(refusal)
    else:
        await refusal(scope, receive, send)


def _request_id(scope: Scope) -> str:
    """What the client calls it, or a name of ours."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            said = str(value.decode())
            if not _A_SECRET.search(said):
                return said
    return f"req_{secrets.token_hex(8)}"
