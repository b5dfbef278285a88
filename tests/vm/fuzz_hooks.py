"""What schemathesis is told about this API (`test_fuzz` runs it): which sandbox is there, and what must not take long.

Loaded by schemathesis's own process, by `SCHEMATHESIS_HOOKS`.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import schemathesis

VOLUME = os.environ.get("FUZZ_VOLUME", "")
SANDBOX = os.environ.get("FUZZ_SANDBOX", "")
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
    query = case.query or {}
    for name in ("wait_s", "timeout_s"):
        if _number(query.get(name)) is not None:
            query[name] = min(0.05, float(query[name]))
    if query.get("follow") in (True, "true"):
        query["follow"] = "false"  # such an answer has no end
    body = case.body
    if isinstance(body, dict):
        if _number(body.get("wait_s")) is not None and body["wait_s"] <= 3_600:
            body["wait_s"] = 0
        if called == "sandboxes_create" and body.get("template", "python") in ("python", "base"):
            body["template"] = "base"  # one that is built, in the shape that it is built in
            for name, usual in (("memory_mib", 256), ("vcpus", 1), ("nested", False)):
                if isinstance(body.get(name, usual), int | None):
                    body[name] = usual


def _number(value: Any) -> float | None:
    try:
        found = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError):
        return None
    return found if found >= 0 else None
