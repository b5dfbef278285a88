"""A server that keeps the HTTP contract of docs/design/interfaces.md without VMs: for tests of its clients.

Run as the real one is: settings from the environment, flock of `$STATE/lock`, `$RUN/server.sock`. A
"sandbox" is a directory; commands and code run on the host as us. Knobs, for faults:
CONTRACT_VERSION (what it says it is), CONTRACT_FAIL (a problem it cannot start for), CONTRACT_STARTS (a
file that gets a line per start). Answers are chopped into pieces of 7 bytes where they are streamed.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import fcntl
import io
import json
import os
import shutil
import signal
import sys
import tarfile
import traceback
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import uvicorn

from llm4agents import __version__, config, errors

SETTINGS = config.load(os.environ)
VERSION = os.environ.get("CONTRACT_VERSION", __version__)
SANDBOXES: dict[str, dict[str, Any]] = {}
SPACES: dict[tuple[str, str], dict[str, Any]] = {}
SERVER: list[uvicorn.Server] = []
TRAILER = b'LLM4AGENTS-TAR {"skipped": 1, "unreadable": 2, "first_unreadable": "/x"}\n'


def directory(id: str) -> Path:
    return SETTINGS.state / "sandboxes" / id


def sandbox(id: str) -> dict[str, Any]:
    if id not in SANDBOXES:
        raise errors.SandboxNotFoundError(f"no sandbox {id}")
    return SANDBOXES[id]


def local(id: str, path: str) -> Path:
    assert path.startswith("/"), f"the wire has absolute paths, not {path!r}"
    if path == "/no/such":
        raise errors.PathNotFoundError(f"{path}: no such file", path=path)
    return directory(id) / path.lstrip("/")


def entry(id: str, path: Path) -> dict[str, Any]:
    name = "/" + str(path.relative_to(directory(id)))
    if not path.exists():
        raise errors.PathNotFoundError(f"{name}: no such file", path=name)
    found = path.stat()
    kind = "directory" if path.is_dir() else "file"
    shown = {
        "name": path.name,
        "path": name,
        "kind": kind,
        "size": found.st_size,
        "mode": found.st_mode & 0o7777,
    }
    return {
        **shown,
        "uid": 1000,
        "gid": 1000,
        "user": "user",
        "group": "user",
        "mtime": found.st_mtime,
        "new": 1,
    }


def run_cell(space: dict[str, Any], code: str) -> list[dict[str, Any]]:
    """The events of a cell, run here and now."""
    out, events, value = io.StringIO(), [], None
    try:
        with contextlib.redirect_stdout(out):
            tree = ast.parse(code)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<cell>", "exec"), space)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), space)
        status = "ok"
    except Exception as error:
        status = "error"
        trace = traceback.format_exc()
        events.append(
            {"type": "error", "name": type(error).__name__, "value": str(error), "traceback": trace}
        )
    if value is not None:
        data = (
            value
            if isinstance(value, dict) and all("/" in str(k) for k in value)
            else {"text/plain": repr(value)}
        )
        events.append({"type": "result", "main": True, "data": data})
    if out.getvalue():
        events.insert(0, {"type": "stdout", "text": out.getvalue()})
    return [*events, {"type": "end", "status": status, "execution_count": 1}]


class Call:
    """One request: what came and the two ways to answer."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self.method, self.path = scope["method"], scope["path"]
        self.params = dict(parse_qsl(scope["query_string"].decode()))
        self.headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self._receive, self._send = receive, send

    async def body(self) -> bytes:
        parts = []
        while True:
            message = await self._receive()
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)

    async def json(self) -> dict[str, Any]:
        raw = await self.body()
        return json.loads(raw) if raw else {}

    async def answer(self, body: Any, status: int = 200) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": raw})

    async def lines(self, events: list[dict[str, Any]]) -> None:
        headers = [(b"content-type", b"application/x-ndjson")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        raw = b"".join(json.dumps(event, ensure_ascii=False).encode() + b"\n" for event in events)
        for at in range(0, len(raw), 7):
            await self._send({"type": "http.response.body", "body": raw[at : at + 7], "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    call = Call(scope, receive, send)
    try:
        await route(call)
    except errors.LLM4AgentsError as error:
        await call.answer(errors.to_wire(error), error.http_status)


async def route(call: Call) -> None:
    parts = call.path.strip("/").split("/")[1:]
    match [call.method, *parts]:
        case ["GET", "server"]:
            await call.answer(
                {
                    "version": VERSION,
                    "api": 1,
                    "pid": os.getpid(),
                    "accelerator": "tcg",
                    "why_not_kvm": "a test",
                }
            )
        case ["POST", "server", "stop"]:
            await call.json()
            await call.answer({}, 202)
            SERVER[0].should_exit = True
        case ["POST", "sandboxes"]:
            await create(call)
        case ["GET", "sandboxes"]:
            every = list(SANDBOXES.values())
            first = next((n for n, s in enumerate(every) if s["id"] == call.params.get("after")), -1) + 1
            page = every[first : first + 2]
            more = page[-1]["id"] if page and first + 2 < len(every) else None
            await call.answer({"data": page, "next": more})
        case ["GET", "sandboxes", id]:
            await call.answer(sandbox(id))
        case ["DELETE", "sandboxes", id]:
            sandbox(id).update(state="killed", reason="asked for")
            shutil.rmtree(directory(id), ignore_errors=True)
            await call.answer(sandbox(id))
        case ["POST", "sandboxes", id, "timeout"]:
            sandbox(id)["idle_timeout_s"] = (await call.json())["timeout_s"]
            await call.answer(sandbox(id))
        case ["POST", "sandboxes", id, "exec"]:
            await execute(call, id)
        case ["POST", "sandboxes", id, "code"]:
            await code(call, id)
        case [_, "sandboxes", id, "files", *rest]:
            await files(call, id, rest)
        case ["GET", "templates"]:
            await call.answer({"data": [{"name": "python", "built": True, "bytes": 1_500_000}]})
        case ["POST", "templates", name, "build"]:
            await call.lines(
                [{"type": "progress", "step": "boot"}, {"type": "template", "name": name, "bytes": 9}]
            )
        case ["GET", "du"]:
            await call.answer({"data": [{"name": "blobs", "path": "/x", "bytes": 2048}], "total_bytes": 2048})
        case ["GET", "odd"]:
            await call.answer(b"not json", 200)
        case _:
            await call.answer({"detail": "Not Found"}, 404)


async def create(call: Call) -> None:
    body = await call.json()
    known = {"template", "timeout_s", "life_s", "env", "memory_mib", "vcpus", "metadata"}
    unknown = body.keys() - known - {"on_timeout", "auto_resume", "keep_s", "network"}
    if unknown:
        raise errors.InvalidRequestError(f"unknown fields {sorted(unknown)}")
    if body["template"] not in ("python", "base"):
        raise errors.TemplateNotFoundError(f"no template {body['template']}")
    id = "sbx_c" + uuid.uuid4().hex[:19]
    made = {
        "id": id,
        "state": "running",
        "accelerator": "tcg",
        "created_at": "2026-01-02T03:04:05Z",
        "vcpus": 1,
    }
    SANDBOXES[id] = {
        **made,
        "template": body["template"],
        "metadata": body.get("metadata", {}),
        "env": body.get("env"),
    }
    (directory(id) / "home" / "user").mkdir(parents=True)
    progress = [{"type": "progress", "step": "clone", "detail": "", "fraction": 0.5}]
    if body.get("metadata", {}).get("fail"):
        problem = errors.to_wire(errors.BootError("it did not boot"))
        await call.lines([*progress, {**problem, "type": "error"}])
    else:
        await call.lines([*progress, {"type": "sandbox", **SANDBOXES[id]}])


async def execute(call: Call, id: str) -> None:
    body = await call.json()
    sandbox(id)
    argv = body.get("argv") or ["/bin/sh", "-c", body["command"]]
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        cwd=directory(id) / "home" / "user", env={**os.environ, **(body.get("env") or {})},
        start_new_session=True,
    )  # fmt: skip
    timed_out, out, err = False, b"", b""
    try:
        given = base64.b64decode(body.get("stdin") or "")
        out, err = await asyncio.wait_for(process.communicate(given), body["timeout_s"] or None)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        timed_out = True
    code = process.returncode or 0
    end: dict[str, Any] = {"exit_code": None if code < 0 else code, "signal": -code if code < 0 else None}
    end |= {"timed_out": timed_out, "duration_ms": 1.5}
    if body["stream"]:
        said = [("stdout", out[at : at + 3]) for at in range(0, len(out), 3)] + (
            [("stderr", err)] if err else []
        )
        pieces = [{"type": name, "data_b64": base64.b64encode(data).decode()} for name, data in said]
        await call.lines([{"type": "started", "pid": process.pid}, *pieces, {"type": "exit", **end}])
        return
    for name, data in (("stdout", out), ("stderr", err)):
        end[name] = data.decode("utf-8", "replace")
        if end[name].encode() != data:
            end[f"{name}_b64"] = base64.b64encode(data).decode()
    await call.answer(end)


async def code(call: Call, id: str) -> None:
    body = await call.json()
    sandbox(id)
    if body["code"] == "die":
        os._exit(9)
    if body["code"] == "cut":
        await call.lines([{"type": "stdout", "text": "begun"}])
        return
    space = SPACES.setdefault((id, body["context"]), {"__name__": "__main__"})
    events = run_cell(space, body["code"])
    if body["stream"]:
        await call.lines(events)
        return
    answer: dict[str, Any] = {"results": [], "stdout": "", "stderr": "", "error": None, **events[-1]}
    for event in events[:-1]:
        if event["type"] == "stdout":
            answer["stdout"] += event["text"]
        elif event["type"] == "result":
            answer["results"].append(event)
        else:
            answer["error"] = event
    await call.answer(answer)


async def files(call: Call, id: str, rest: list[str]) -> None:
    sandbox(id)
    match [call.method, *rest]:
        case ["GET"]:
            path = local(id, call.params["path"])
            entry(id, path)
            data = path.read_bytes()[int(call.params.get("offset", 0)) :]
            await call.answer(data[: int(call.params["length"])] if "length" in call.params else data)
        case ["PUT"]:
            path, data = local(id, call.params["path"]), await call.body()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(int(call.params.get("mode", 0o644)))
            await call.answer({"path": call.params["path"], "size": len(data)})
        case ["GET", "stat"]:
            await call.answer(entry(id, local(id, call.params["path"])))
        case ["GET", "list"]:
            top, deep = local(id, call.params["path"]), int(call.params["depth"])
            found = sorted(top.rglob("*")) if deep > 1 else sorted(top.iterdir())
            await call.answer({"entries": [entry(id, path) for path in found], "truncated": False})
        case ["GET", "tar"]:
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
                for path in sorted(local(id, call.params["path"]).rglob("*")):
                    if path.name != call.params.get("exclude"):
                        archive.add(path, path.relative_to(local(id, call.params["path"])), recursive=False)
            await call.answer(
                packed.getvalue() + TRAILER if "unreadable" in call.params["path"] else packed.getvalue()
            )
        case ["PUT", "tar"]:
            with tarfile.open(fileobj=io.BytesIO(await call.body())) as archive:
                archive.extractall(local(id, call.params["path"]), filter="fully_trusted")
                await call.answer(
                    {"path": call.params["path"], "entries": len(archive.getnames()), "bytes": 0}
                )
        case ["POST", "mkdir"]:
            body = await call.json()
            local(id, body["path"]).mkdir(parents=body["parents"], exist_ok=body["exist_ok"])
            await call.answer({})
        case ["POST", "move"]:
            body = await call.json()
            local(id, body["from"]).rename(local(id, body["to"]))
            await call.answer({})
        case ["POST", "remove"]:
            body = await call.json()
            path = local(id, body["path"])
            entry(id, path)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            await call.answer({})


def main() -> None:
    if fault := os.environ.get("CONTRACT_FAIL"):
        sys.stderr.write("looking around\n")
        if fault != "silent":
            error = errors.VersionMismatchError("the store is of version 9.9", hint="upgrade llm4agents")
            sys.stderr.write(f"LLM4AGENTS-START-FAILED {json.dumps(errors.to_wire(error))}\n")
        sys.exit(1)
    lock = os.open(SETTINGS.state / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.stderr.write(f"LLM4AGENTS-START-FAILED {json.dumps(errors.to_wire(errors.ConflictError()))}\n")
        sys.exit(3)
    if starts := os.environ.get("CONTRACT_STARTS"):
        with open(starts, "a") as file:
            file.write(f"{os.getpid()}\n")
    settings = uvicorn.Config(
        app, uds=str(SETTINGS.socket_path), log_level="warning", timeout_keep_alive=75, lifespan="off"
    )
    SERVER.append(uvicorn.Server(settings))
    SERVER[0].run()


if __name__ == "__main__":
    main()
