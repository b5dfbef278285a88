"""Which scope each route needs. Pure. A route that is not here is refused; a test walks all routes of the application.

Any one of the words is enough; `node` is enough for everything. What a sandbox's guest is asked for (its files, its
processes), and what wakes it up, needs `sandboxes`, also where it is a GET: `read` is for what the server knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

OPEN: Final = "open"
"""Needs no key."""

QUIET: Final = frozenset(
    {"/v1/sandboxes/{sandbox}/network/why", "/v1/sandboxes/{sandbox}/files/search", "/mcp"}
)
"""What is asked with a body and changes nothing by itself: no row of the audit."""

_READ, _USE = "read sandboxes", "sandboxes"
_SANDBOX = "/v1/sandboxes/{sandbox}"
_VOLUME = "/v1/volumes/{volume}"

TABLE: Final[Mapping[str, Mapping[str, str]]] = {
    "/openapi.json": {"GET": OPEN, "HEAD": OPEN},
    "/health": {"GET": OPEN, "HEAD": OPEN},
    "/v1/register": {"POST": OPEN},
    # who calls
    "/v1/whoami": {"GET": "read sandboxes templates volumes secrets project"},
    "/v1/keys": {"GET": "project", "POST": "project"},
    "/v1/keys/{key}": {"GET": "project", "DELETE": "project"},
    "/v1/projects": {"GET": "node", "POST": "node"},
    "/v1/projects/{project}": {"GET": "node", "PATCH": "node"},
    "/v1/invites": {"GET": "node", "POST": "node"},
    "/v1/invites/{invite}": {"DELETE": "node"},
    "/v1/audit": {"GET": "read project"},
    "/mcp": {"GET": _USE, "POST": _USE, "DELETE": _USE},
    # the node
    "/v1/server": {"GET": "read sandboxes templates volumes secrets project"},
    "/v1/server/stop": {"POST": "node"},
    "/v1/server/backup": {"POST": "node"},
    "/v1/doctor": {"GET": "node"},
    "/v1/du": {"GET": "node"},
    "/v1/prune": {"POST": "node"},
    "/v1/pool": {"GET": "node", "PUT": "node"},
    "/v1/top": {"GET": _READ},
    "/metrics": {"GET": "node"},
    "/v1/events": {"GET": _READ},
    "/v1/usage": {"GET": _READ},
    # templates
    "/v1/templates": {"GET": "read sandboxes templates", "POST": "templates"},
    "/v1/templates/import": {"POST": "node"},
    "/v1/templates/files/{digest}": {"GET": "templates", "PUT": "templates"},
    "/v1/templates/{name}": {"GET": "read sandboxes templates", "DELETE": "templates"},
    "/v1/templates/{name}/build": {"GET": "read templates", "POST": "templates", "DELETE": "templates"},
    "/v1/templates/{name}/export": {"POST": "node"},
    # secrets
    "/v1/secrets": {"GET": "read secrets"},
    "/v1/secrets/{name}": {"PUT": "secrets", "DELETE": "secrets"},
    # volumes
    "/v1/volumes": {"GET": "read volumes", "POST": "volumes"},
    _VOLUME: {"GET": "read volumes", "DELETE": "volumes"},
    f"{_VOLUME}/snapshot": {"POST": "volumes"},
    f"{_VOLUME}/clone": {"POST": "volumes"},
    f"{_VOLUME}/resize": {"POST": "volumes"},
    f"{_VOLUME}/files": {"GET": "volumes"},
    f"{_VOLUME}/files/stat": {"GET": "volumes"},
    f"{_VOLUME}/files/list": {"GET": "volumes"},
    f"{_VOLUME}/files/tar": {"GET": "volumes"},
    # sandboxes
    "/v1/sandboxes": {"GET": _READ, "POST": _USE},
    _SANDBOX: {"GET": _READ, "DELETE": _USE},
    f"{_SANDBOX}/events": {"GET": _READ},
    f"{_SANDBOX}/logs": {"GET": _READ},
    f"{_SANDBOX}/metrics": {"GET": _USE},
    f"{_SANDBOX}/isolation": {"GET": _READ},
    f"{_SANDBOX}/pause": {"POST": _USE},
    f"{_SANDBOX}/resume": {"POST": _USE},
    f"{_SANDBOX}/fork": {"POST": _USE},
    f"{_SANDBOX}/snapshot": {"POST": "templates"},
    f"{_SANDBOX}/timeout": {"POST": _USE},
    f"{_SANDBOX}/traffic": {"GET": _USE, "POST": _USE},
    f"{_SANDBOX}/traffic/urls": {"POST": _USE},
    f"{_SANDBOX}/volumes": {"POST": _USE},
    f"{_SANDBOX}/volumes/detach": {"POST": _USE},
    f"{_SANDBOX}/network": {"GET": _READ, "PUT": _USE},
    f"{_SANDBOX}/network/why": {"POST": _READ},
    f"{_SANDBOX}/network/log": {"GET": _READ},
    f"{_SANDBOX}/network/capture": {"GET": _READ, "POST": _USE, "DELETE": _USE},
    f"{_SANDBOX}/exec": {"POST": _USE},
    f"{_SANDBOX}/code": {"POST": _USE},
    f"{_SANDBOX}/code/interrupt": {"POST": _USE},
    f"{_SANDBOX}/code/restart": {"POST": _USE},
    f"{_SANDBOX}/contexts": {"GET": _USE, "POST": _USE},
    f"{_SANDBOX}/contexts/{{ident}}": {"DELETE": _USE},
    f"{_SANDBOX}/processes": {"GET": _USE, "POST": _USE},
    f"{_SANDBOX}/processes/{{process}}": {"GET": _USE, "DELETE": _USE},
    f"{_SANDBOX}/processes/{{process}}/output": {"GET": _USE},
    f"{_SANDBOX}/processes/{{process}}/stdin": {"POST": _USE},
    f"{_SANDBOX}/processes/{{process}}/signal": {"POST": _USE},
    f"{_SANDBOX}/processes/{{process}}/resize": {"POST": _USE},
    f"{_SANDBOX}/processes/{{process}}/attach": {"WS": _USE},
    f"{_SANDBOX}/ports": {"GET": _USE},
    f"{_SANDBOX}/ports/{{port}}/wait": {"GET": _USE},
    f"{_SANDBOX}/files": {"GET": _USE, "PUT": _USE},
    f"{_SANDBOX}/files/stat": {"GET": _USE},
    f"{_SANDBOX}/files/list": {"GET": _USE},
    f"{_SANDBOX}/files/mkdir": {"POST": _USE},
    f"{_SANDBOX}/files/move": {"POST": _USE},
    f"{_SANDBOX}/files/remove": {"POST": _USE},
    f"{_SANDBOX}/files/tar": {"GET": _USE, "PUT": _USE},
    f"{_SANDBOX}/files/attributes": {"POST": _USE},
    f"{_SANDBOX}/files/link": {"POST": _USE},
    f"{_SANDBOX}/files/search": {"POST": _USE},
    f"{_SANDBOX}/files/watch": {"GET": _USE},
    # jobs
    "/v1/jobs": {"GET": _READ},
    f"{_SANDBOX}/jobs": {"GET": _READ, "POST": _USE},
    f"{_SANDBOX}/jobs/{{job}}": {"GET": _READ, "DELETE": _USE},
    f"{_SANDBOX}/jobs/{{job}}/run": {"POST": _USE},
    f"{_SANDBOX}/jobs/{{job}}/runs": {"GET": _READ},
    f"{_SANDBOX}/jobs/{{job}}/output": {"GET": _USE},
}
"""Pattern of a route → method (`WS`: a WebSocket) → scopes. `{name:path}` at the end takes the rest of the path."""


@dataclass(frozen=True, slots=True)
class Matched:
    """`pattern` is the table's, `needs` None when it has no such method."""

    pattern: str
    params: Mapping[str, str]
    needs: str | None
    methods: tuple[str, ...] = ()
    """What the pattern has, for HTTP."""


class _Node:
    __slots__ = ("by_word", "name", "param", "pattern", "rest")

    def __init__(self) -> None:
        self.by_word: dict[str, _Node] = {}
        self.param: _Node | None = None
        self.name = ""
        self.rest: tuple[str, str] | None = None
        self.pattern: str | None = None


class Table:
    """Finds the row of a path: what is written out goes before what is a parameter, as in the application."""

    def __init__(self, table: Mapping[str, Mapping[str, str]] = TABLE) -> None:
        self._table = table
        self._root = _Node()
        self._names: dict[str, tuple[str, ...]] = {}
        for pattern in table:
            self._add(pattern)

    def _add(self, pattern: str) -> None:
        node, names = self._root, []
        for word in pattern.split("/")[1:]:
            if word.startswith("{") and word.endswith(":path}"):
                names.append(word[1:-6])
                node.rest = (pattern, word[1:-6])
                self._names[pattern] = tuple(names)
                return
            if word.startswith("{"):
                names.append(word[1:-1])
                if node.param is None:
                    node.param = _Node()
                node = node.param
            else:
                node = node.by_word.setdefault(word, _Node())
        node.pattern = pattern
        self._names[pattern] = tuple(names)

    def find(self, method: str, path: str) -> Matched | None:
        """`path` as the application routes it: decoded, with its `/` first."""
        words = path.split("/")
        if words[0] != "":
            return None
        found = self._walk(self._root, words, 1, [])
        if found is None:
            return None
        pattern, values = found
        params = dict(zip(self._names[pattern], values, strict=True))
        by_method = self._table[pattern]
        methods = tuple(sorted(one for one in by_method if one not in ("WS", "*")))
        return Matched(pattern, params, by_method.get(method, by_method.get("*")), methods)

    def _walk(
        self, node: _Node, words: list[str], at: int, values: list[str]
    ) -> tuple[str, list[str]] | None:
        if at == len(words):
            return None if node.pattern is None else (node.pattern, values)
        word = words[at]
        if (by_word := node.by_word.get(word)) is not None:
            found = self._walk(by_word, words, at + 1, values)
            if found is not None:
                return found
        if node.param is not None and word:
            found = self._walk(node.param, words, at + 1, [*values, word])
            if found is not None:
                return found
        if node.rest is not None:
            return node.rest[0], [*values, "/".join(words[at:])]
        return None
