"""What schemathesis is told about this API (`test_fuzz` runs it): which sandbox is there, and what must not take long.

Loaded by schemathesis's own process, by `SCHEMATHESIS_HOOKS`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from typing import Any

import schemathesis

from llm4agents.limits import POOL_MAX

VOLUME = os.environ.get("FUZZ_VOLUME", "")
SANDBOX = os.environ.get("FUZZ_SANDBOX", "")
FILES = os.environ.get("FUZZ_FILES", "")
"""A directory that files of the node are read from and written to."""
_READ = ("garbage", "empty", "fifo", "srv", "none", "backup")
"""What of it is read: no bundle, which takes seconds."""
_KEY, _calls = re.compile(r"[A-Za-z0-9_-]{1,255}"), itertools.count()
_KEEP = re.compile(r"(timeout|pause|resume|fork|snapshot|volumes|volumes/detach|isolation)?")
"""What would end or stop it, or takes seconds each time: asked of one that is not there."""


@schemathesis.deserializer("application/x-ndjson")
def lines(ctx: Any, response: Any) -> list[Any]:
    return [json.loads(line) for line in response.content.splitlines()]


@schemathesis.serializer("application/x-tar", "application/octet-stream")
def raw(ctx: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    path, called = case.path_parameters or {}, case.operation.definition.raw["operationId"]
    if SANDBOX and re.fullmatch(r"sbx_[a-z0-9]{20}", str(path.get("sandbox"))):
        rest = case.operation.path.partition("{sandbox}")[2].strip("/")
        if not _KEEP.fullmatch(rest) or called == "sandboxes_get":
            path["sandbox"] = SANDBOX
    elsewhere = called == "volumes_delete" or "/files" in case.operation.path  # a machine for each
    if VOLUME and not elsewhere and re.fullmatch(r"vol_[a-z0-9]{20}", str(path.get("volume"))):
        path["volume"] = VOLUME
    headers = case.headers or {}
    if _KEY.fullmatch(once := str(headers.get("Idempotency-Key", ""))):
        # Else most of what is sent has the key of another request, and is refused without a look at it.
        headers["Idempotency-Key"] = f"{once[:200]}-{next(_calls)}"
    if called == "templates_remove" and path.get("name") in ("base", "t-fuzz"):
        path["name"] = "t-none"
    query = case.query or {}
    for name in ("wait_s", "timeout_s"):
        if _number(query.get(name)) is not None:
            query[name] = min(0.05, float(query[name]))
    if called == "files_watch" and query.get("path"):
        # Of what is there the changes have no end.
        query["path"] = f"/none/{query['path']}".replace("..", "__")
    if called == "ports_wait" and "timeout_s" not in query:
        case.query = {**query, "timeout_s": 0.05}
    if query.get("follow") in (True, "true"):
        query["follow"] = "false"  # such an answer has no end
    body = case.body
    if isinstance(body, dict):
        if _number(body.get("wait_s")) is not None and body["wait_s"] <= 3_600:
            body["wait_s"] = 0
        if called == "sandboxes_create" and body.get("template", "python") in ("python", "base"):
            body["template"] = "base"  # one that is built, in the shape that it is built in
            _small(body)
        _of_the_node(called, path, body)


def _of_the_node(called: str, path: dict[str, Any], body: dict[str, Any]) -> None:
    """Nothing outside of FILES is written or read, no machine is booted, and the server goes on."""
    file = body.get("file")
    if isinstance(file, str) and file.startswith("/"):
        inside = file.replace("..", "__").rpartition("/")[2]
        if called == "templates_import":
            inside = _READ[next(_calls) % len(_READ)]
        body["file"] = f"{FILES}/none/{inside}" if called == "templates_export" else f"{FILES}/{inside}"
    if called in ("templates_build", "templates_export") and len(str(path.get("name"))) <= 8:
        path["name"] = "base"  # which is there: others of ours would be built for minutes
    if called == "templates_build":
        _small(body)
        if body.get("force") is True:
            body["force"] = False
    recipe = body.get("recipe")
    if called == "templates_create" and isinstance(recipe, dict) and isinstance(recipe.get("from"), dict):
        recipe["from"] = {"template": "none-such"}
    if called == "node_prune" and body.get("all") is True:
        body["all"] = False
    if called == "server_stop" and isinstance(body.get("keep", False), bool):
        body["keep"] = "no boolean"
    if called == "pool_set" and isinstance(body.get("data"), list):
        for one in body["data"]:
            if isinstance(one, dict) and 0 < (_number(one.get("wanted")) or 0) <= POOL_MAX:
                one["wanted"] = 0


def _small(body: dict[str, Any]) -> None:
    """The shape that is built."""
    for name, usual in (("memory_mib", 256), ("vcpus", 1), ("nested", False)):
        if isinstance(body.get(name, usual), int | None):
            body[name] = usual


def _number(value: Any) -> float | None:
    try:
        found = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError):
        return None
    return found if found >= 0 else None
