"""The gate before the application: who calls, whether he may, and whether what he names is his.

`guarded(app, context, via=…)` is made once for each listener, and the listener says what it is: only what comes in over
the unix socket's own can be the operator. Nothing of a request says so, and the application refuses whatever has not
come through a gate. Ports of sandboxes have their own rule (`api.proxy`): here it is only found out who asks for them.
"""

from __future__ import annotations

import contextlib
from typing import Literal

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from llm4agents.api.access.table import OPEN, Matched, Table
from llm4agents.api.answers import problem
from llm4agents.api.context import Context
from llm4agents.api.proxy import address
from llm4agents.api.proxy.admission import is_key
from llm4agents.engine import keys
from llm4agents.engine.principal import Principal
from llm4agents.errors import (
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    LLM4AgentsError,
    NotFoundError,
    SandboxNotFoundError,
)

Via = Literal["unix", "tcp"]
Admitted = Literal["route", "port"]
_HINT = "send Authorization: Bearer KEY, or X-API-KEY; LLM4AGENTS_API_KEY for the SDK and the command line"
_TABLE = Table()


def guarded(app: ASGIApp, context: Context, *, via: Via) -> ASGIApp:
    """`app` as a listener serves it. `unix`: the server's own socket, mode 0600, whose callers are the operator."""
    return Gate(app, context, via)


class Gate:
    """ASGI middleware; one for each listener."""

    def __init__(self, app: ASGIApp, context: Context, via: Via) -> None:
        self.app, self.context, self._unix = app, context, via == "unix"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        try:
            principal, admitted = self._admit(scope)
        except LLM4AgentsError as error:
            await _refuse(problem(error, self.context), error, scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), "principal": principal, "admitted": admitted}
        await self.app(scope, receive, send)

    def _admit(self, scope: Scope) -> tuple[Principal, Admitted]:
        """Who calls, if he may, and what that admits him to.

        Raises AuthenticationError, ForbiddenError, NotFoundError, InvalidRequestError.
        """
        if address.of(scope, self.context.names) is not None:
            return self._visitor(scope), "port"
        method, path = _method(scope), scope["path"]
        matched = _TABLE.find(method, path)
        if matched is not None and matched.needs == OPEN:
            return self._maybe(scope), "route"
        principal = self._known(scope)
        if matched is None:
            # Whether or not the application has it: what the table does not know is for nobody.
            raise NotFoundError(f"there is no {path[:1_000]} here")
        if matched.needs is None:
            raise InvalidRequestError(f"{method} {path[:1_000]}: Method Not Allowed")
        words = matched.needs.split()
        if not any(map(principal.may, words)):
            raise ForbiddenError(f"this needs a key with the scope {' or '.join(words)}", needs=words)
        if not principal.sees_all:
            self._theirs(matched, principal)
        return principal, "route"

    def _known(self, scope: Scope) -> Principal:
        if self._unix:
            return Principal.operator()
        text = key_of(scope)
        if text is None:
            raise AuthenticationError("this server wants an API key", hint=_HINT)
        return keys.principal_of(self.context.engine.keys.known(text), _origin(scope))

    def _maybe(self, scope: Scope) -> Principal:
        """Who calls, where nobody may too. Raises AuthenticationError for a key that is not good."""
        if self._unix or key_of(scope) is not None:
            return self._known(scope)
        return Principal.nobody(_origin(scope))

    def _visitor(self, scope: Scope) -> Principal:
        """Who asks for a port, where a key that is not good is as none: the port's rule may let him in all the same."""
        if self._unix:
            return Principal.operator()
        for name, value in scope["headers"]:
            if is_key(name, value):  # any other is for the guest
                text = value.decode("latin-1").strip().rpartition(" ")[2]
                with contextlib.suppress(AuthenticationError, ForbiddenError):
                    return keys.principal_of(self.context.engine.keys.known(text), _origin(scope))
        return Principal.nobody(_origin(scope))

    def _theirs(self, matched: Matched, principal: Principal) -> None:
        """Raises for what is another project's exactly what it does for what never was."""
        ident = matched.params.get("sandbox")
        if ident is not None:
            row = self.context.engine.find(ident)
            if row is not None and not principal.sees(row.project):
                raise SandboxNotFoundError(f"there is no sandbox {ident}", hint="llm4agents ls shows them")


def key_of(scope: Scope) -> str | None:
    """The API key of a request, good or not. A bearer token of another form is not ours: a port's guest may want it."""
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            return str(value.decode("latin-1").strip())
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return str(value[7:].decode("latin-1").strip())
    return None


async def _refuse(
    refusal: Response, error: LLM4AgentsError, scope: Scope, receive: Receive, send: Send
) -> None:
    if isinstance(error, AuthenticationError):
        refusal.headers["www-authenticate"] = "Bearer"
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(refusal)
    else:
        await refusal(scope, receive, send)


def _method(scope: Scope) -> str:
    return "WS" if scope["type"] == "websocket" else str(scope["method"])


def _origin(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "unknown"
