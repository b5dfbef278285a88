"""What routes share: the engine, and facts of this server. One per process, in `app.state`."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qsl

import structlog
from starlette.requests import HTTPConnection, Request

from llm4agents import protected
from llm4agents.api.proxy.address import Names
from llm4agents.api.proxy.admission import Signer
from llm4agents.api.proxy.visitors import Visitors
from llm4agents.config import Settings
from llm4agents.engine import names as template_names
from llm4agents.engine import traffic
from llm4agents.engine.engine import Engine
from llm4agents.engine.health import Health
from llm4agents.engine.live import Live
from llm4agents.engine.principal import Principal
from llm4agents.engine.tracing import Tracing
from llm4agents.errors import (
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    ProtectedPathError,
    SandboxNotFoundError,
)

log = structlog.get_logger()

HOME = "/home/user"
_ID = re.compile(r"sbx_[a-z0-9]{20}")


@dataclass(slots=True)
class Context:
    settings: Settings
    engine: Engine
    tracing: Tracing | None = None
    started_at: float = field(default_factory=time.time)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    keep: bool = False
    """What a stop does with the sandboxes that live."""
    drain: bool = False
    """Whether calls under way are waited for, and (`hurry`) no longer."""
    hurry: bool = False
    active: int = 0
    """Requests under way."""
    last_request_s: float = field(default_factory=time.monotonic)
    health: Health = field(init=False)
    names: Names = field(init=False)
    """What this server and the ports of its sandboxes are called."""
    listening: tuple[str, str, int] | None = None
    """Scheme, host and port of the TCP listener, once it listens."""

    visitors: Visitors = field(default_factory=Visitors)
    """Who is in ports of sandboxes."""
    _signer: Signer | None = field(default=None, init=False)

    @property
    def signer(self) -> Signer:
        """What ports are opened with. Raises HostSetupError when the node's key cannot be read or made."""
        if self._signer is None:
            self._signer = Signer(traffic.key(self.settings.state))
        return self._signer

    def __post_init__(self) -> None:
        self.names = Names.of(self.settings)
        self.health = Health(self.engine)


CALLER: ContextVar[Principal | None] = ContextVar("caller", default=None)
"""Who is being answered, for what must be said without a request at hand (`answers.problem`)."""


def of(request: HTTPConnection) -> Context:
    return cast(Context, request.app.state.context)


def principal(request: HTTPConnection) -> Principal:
    """Who calls: as `api.access.gate` found out. Raises AuthenticationError for what came past it."""
    found = request.scope.get("state", {}).get("principal")
    if not isinstance(found, Principal):
        raise AuthenticationError("this call came through no gate")
    return found


def template(request: HTTPConnection, name: str) -> str:
    """The ref (`engine.names`) of what the caller calls `name`; who sees all may also give a ref.

    Raises TemplateNotFoundError, InvalidRequestError.
    """
    caller = principal(request)
    if caller.sees_all and "@" in name and template_names.valid(name):
        return name
    return template_names.new(name, caller.project)


def check_network(request: HTTPConnection, network: Any) -> None:
    """Raises ForbiddenError for rules that open what is the host's own, unless who calls runs it (`engine.reach`)."""
    if network is not None and not principal(request).sees_all:
        of(request).engine.reach.check(network)


def check_volumes(request: HTTPConnection, wanted: bool) -> None:
    """What is on a volume is for who has the scope `volumes`, also by way of a sandbox that has it attached.

    Raises ForbiddenError.
    """
    if wanted and not principal(request).may("volumes"):
        raise ForbiddenError("attaching a volume needs a key with the scope volumes too", needs=["volumes"])


def check_id(sandbox: str) -> str:
    if not _ID.fullmatch(sandbox):
        raise SandboxNotFoundError(f"{sandbox[:80]!r} is not a sandbox's id", hint="llm4agents ls shows them")
    return sandbox


async def access(request: HTTPConnection, sandbox: str) -> Live:
    """The running sandbox, resumed first if it is paused and may be."""
    return await of(request).engine.access(check_id(sandbox))


def _defaults(request: HTTPConnection | None) -> Mapping[str, Any]:
    """`user` and `workdir` of the sandbox that a request is about, where its template says them."""
    sandbox = None if request is None else request.path_params.get("sandbox")
    row = None if request is None or sandbox is None else of(request).engine.find(str(sandbox))
    return (row and row.defaults) or {}


def guest_path(path: str, request: HTTPConnection | None = None) -> str:
    """An absolute path in the guest of the sandbox that `request` is about; what is relative is taken from the
    working directory that its template says, else from the user's home."""
    if "\0" in path:
        raise InvalidRequestError("a path has no NUL in it")
    if path.startswith("/"):
        return path
    defaults = _defaults(request)
    if path == "~" or path.startswith("~/"):
        return ("/root" if defaults.get("user") in ("root", "0") else HOME) + path[1:]
    return f"{(defaults.get('workdir') or HOME).rstrip('/')}/{path}"


def directory(path: str | None, request: HTTPConnection) -> str | None:
    """Where a command runs: as it says, else the working directory of the template; None: at home."""
    if path is not None:
        return guest_path(path, request)
    found = _defaults(request).get("workdir")
    return None if found is None else str(found)


def query_path(request: Request) -> str:
    """`path` of the query, whatever bytes it has: names in a guest need not be UTF-8."""
    query = request.scope["query_string"].decode("ascii", "surrogateescape")
    return guest_path(dict(parse_qsl(query, errors="surrogateescape")).get("path", ""), request)


def protected_paths(request: HTTPConnection) -> tuple[str, ...]:
    return of(request).settings.protected_paths


def check_protected(request: HTTPConnection, sandbox: str, path: str, what: str) -> None:
    """Raises ProtectedPathError for a path that the operator says leaves no sandbox."""
    if protected.match(path, protected_paths(request), defaults=False) is not None:
        log.warning("protected_path_refused", sandbox=sandbox, path=path, what=what)
        raise ProtectedPathError(
            f"{path} is protected: {protected.OPERATOR}",
            hint="there is no way around the operator's list",
            path=path,
        )


def protected_headers(request: HTTPConnection) -> dict[str, str]:
    """What a client must not write on its machine either, whatever it is called here."""
    patterns = protected_paths(request)
    return {"x-protected-paths": json.dumps(patterns)} if patterns else {}


def user_of(user: str | None, request: HTTPConnection | None = None) -> str | int:
    """A user of the guest by name, or by number if it is one; who names none is who its template says, or `user`."""
    if user is None or user == "":
        user = str(_defaults(request).get("user") or "user")
    return int(user) if user.isdecimal() and len(user) < 10 else user
