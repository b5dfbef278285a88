"""Pure decisions of the client: request bodies, paths, deadlines, stream decoding, how errors are named.

No I/O, no clock, no httpcore: everything here can be tested as a table.
"""

from __future__ import annotations

import base64
import codecs
import json
import math
import platform
import re
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from llm4agents import limits
from llm4agents.errors import (
    InvalidRequestError,
    LLM4AgentsError,
    ProtocolError,
    UnsupportedPlatformError,
    from_wire,
)
from llm4agents.sdk import _volumes, results

HOME = "/home/user"
ANSWER_SLACK_S = 30.0
"""How long after a call's own deadline the client still waits for the server to say so."""
DEFAULT_WAIT_S = 120.0
"""For calls that have no deadline of their own."""
Network = str | Sequence[str] | Mapping[str, Any]
"""A profile's name, rule lines, or an object (docs/howto/network.md)."""
LINE_BYTES_MAX = 64 * 1_048_576
"""An NDJSON line above this is not one of ours (a result may hold a large figure)."""

_HINTS = {
    "sandbox_not_found": "llm4agents ls shows what exists; create a new one",
    "sandbox_died": "its files and variables are gone; create a new sandbox",
    "conflict": "llm4agents ls shows its state; create a new sandbox if it was killed",
    "timed_out": "raise timeout=, or 0 for none",
    "connection_lost": "it may have run; look at its effects before running it again",
    "path_not_found": "files.list() of the directory shows what is there",
    "capacity": "kill sandboxes that are not needed: llm4agents ls, llm4agents kill",
    "template_not_found": "llm4agents template ls shows what there is",
    "boot_failed": "llm4agents doctor checks this host",
    "host_setup": "llm4agents doctor says what is missing, llm4agents setup installs it",
}


def unreachable_hint(url: str, error: Exception) -> str:
    """What to do about a remote server that could not be connected to: by name, TLS and address."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        if "ostname mismatch" in text or "address mismatch" in text:
            return "name the server in LLM4AGENTS_URL as its certificate does"
        return "its CA is not trusted here: LLM4AGENTS_CA_FILE=ca.pem (on the server: llm4agents server ca --pem)"
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        return "what answers there has no TLS: is it http:// in LLM4AGENTS_URL?"
    if host.endswith(".localhost") and "connection refused" not in text.lower():
        port = "" if parts.port is None else f":{parts.port}"
        return f"names below localhost are not known on every host: LLM4AGENTS_URL={parts.scheme}://localhost{port}"
    return "check LLM4AGENTS_URL and that the server runs"


def check_platform(url: str | None) -> None:
    """Raises UnsupportedPlatformError where no local server can run and no remote one is named."""
    if url is None and not (sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")):
        raise UnsupportedPlatformError(
            f"sandboxes run on Linux x86-64, and this is {sys.platform} {platform.machine()}: "
            "from here the package is a client of a remote server",
            hint="set LLM4AGENTS_URL (and LLM4AGENTS_API_KEY) to a server's address",
        )


_ONCE = re.compile(r"/v1/(sandboxes(/[^/]+/(fork|snapshot|jobs))?|volumes(/[^/]+/(snapshot|clone))?)")


def once(method: str, path: str) -> list[tuple[str, str]]:
    """The header by which a remote server does a call once, however often a connection breaks under it."""
    if method != "POST" or not _ONCE.fullmatch(path):
        return []
    return [("idempotency-key", secrets.token_hex(16))]


def path_of(path: str) -> str:
    """The absolute path on the wire: what is relative, or starts with `~/`, is taken from /home/user."""
    text = str(path)
    if not text or "\0" in text:
        raise InvalidRequestError(f"{text!r} is not a path", hint="give the path of a file in the sandbox")
    if len(text.encode("utf-8", "surrogateescape")) > limits.PATH_BYTES_MAX:
        raise InvalidRequestError(f"the path is longer than {limits.PATH_BYTES_MAX} bytes: {text[:60]}…")
    if text == "~" or text.startswith("~/"):
        text = HOME + text[1:]
    return text if text.startswith("/") else f"{HOME}/{text}"


def seconds(name: str, value: float | None, *, most: float | None = None) -> float | None:
    """A duration as the wire has it. 0 and None alike mean none, and travel as 0."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InvalidRequestError(f"{name}={value!r} is not a number of seconds", hint="0 means no limit")
    if most is not None and value > most:
        raise InvalidRequestError(f"{name}={value!r} is more than {most:g} seconds")
    return value


def wait_s(timeout: float | None) -> float | None:
    """How long the client waits for an answer to a call that may run for `timeout` seconds (0: for ever)."""
    return timeout + ANSWER_SLACK_S if timeout else None


def env_of(env: Mapping[str, str] | None) -> dict[str, str] | None:
    if env is None:
        return None
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidRequestError(f"env[{name!r}]: names and values are strings", hint="str() the value")
    return dict(env)


def without_none(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def create_body(
    template: str,
    *,
    timeout: float,
    life: float,
    env: Mapping[str, str] | None,
    memory_mib: int | None,
    vcpus: int | None,
    metadata: Mapping[str, str] | None,
    network: Network | None,
    disk_mib: int | None = None,
    pids: int | None = None,
    output_rate: int | None = None,
    wait: float | None = None,
    on_timeout: str | None = None,
    auto_resume: bool | None = None,
    keep: float | None = None,
    protect: Sequence[str] = (),
    volumes: Mapping[str, _volumes.Wanted] | None = None,
    vmm: str | None = None,
    nested: bool = False,
    traffic: Mapping[str, bool] | None = None,
) -> dict[str, Any]:
    """POST /v1/sandboxes. Ranges of memory and vCPUs are the server's to judge: it may be a newer one."""
    if not isinstance(template, str) or not template:
        raise InvalidRequestError(
            f"template={template!r} is not a name", hint='for example template="python"'
        )
    for name, value in (("timeout", timeout), ("life", life)):
        if not seconds(name, value):
            raise InvalidRequestError(
                f"{name}={value!r}: a sandbox must end some time", hint="give seconds > 0"
            )
    if isinstance(protect, str | bytes) or not all(isinstance(path, str) and path for path in protect):
        raise InvalidRequestError(f"protect={protect!r} is no list of paths", hint='for example ["tests"]')
    body = {
        "template": template,
        "timeout_s": timeout,
        "life_s": life,
        "env": env_of(env),
        "memory_mib": memory_mib,
        "vcpus": vcpus,
        "metadata": None if metadata is None else dict(metadata),
        "disk_mib": disk_mib,
        "pids": pids,
        "output_bytes_per_s": output_rate,
        "wait_s": wait or None,
        "on_timeout": on_timeout,
        "auto_resume": auto_resume,
        "keep_s": keep,
        "network": None if network is None else network_of(network),
        "protect": list(protect) or None,
        "volumes": _volumes.mounts(volumes),
        "vmm": vmm,
        "nested": nested or None,
        "traffic": None if traffic is None else traffic_of(traffic),
    }
    return without_none(body)


def traffic_of(traffic: Mapping[str, bool]) -> dict[str, bool]:
    if not isinstance(traffic, Mapping) or not all(isinstance(value, bool) for value in traffic.values()):
        raise InvalidRequestError(f"traffic={traffic!r}", hint='for example {"public": True}')
    return dict(traffic)


def network_of(network: Network) -> Any:
    """A `network=` as JSON: what it says is the server's to judge."""
    if isinstance(network, str):
        return network
    try:
        if isinstance(network, Mapping | Sequence):
            value = dict(network) if isinstance(network, Mapping) else list(network)
            json.dumps(value)
            return value
    except (TypeError, ValueError):
        pass
    raise InvalidRequestError(
        f"network={network!r} is no network",
        hint='a profile ("none", "packages", "public"), rules such as ["allow api.github.com"], or a dict of them',
    )


def exec_body(
    cmd: str | Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: str | None,
    user: str | None,
    stdin: str | bytes | None,
    timeout: float | None,
    stream: bool,
) -> dict[str, Any]:
    """POST …/exec: a string is a shell command, a sequence is argv. `stdin` travels in base64."""
    body: dict[str, Any] = {"timeout_s": seconds("timeout", timeout), "stream": stream}
    if isinstance(cmd, str):
        if not cmd.strip():
            raise InvalidRequestError("the command is empty")
        body["command"] = cmd
    else:
        argv = [str(part) for part in cmd]
        if not argv or not argv[0]:
            raise InvalidRequestError("argv is empty", hint='for example ["ls", "-l"]')
        body["argv"] = argv
    if stdin is not None:
        raw = stdin.encode("utf-8", "surrogateescape") if isinstance(stdin, str) else bytes(stdin)
        body["stdin"] = base64.b64encode(raw).decode("ascii")
    body.update(env=env_of(env), cwd=None if cwd is None else path_of(cwd), user=user)
    return without_none(body)


def code_body(
    code: str,
    *,
    context: str | results.CodeContext,
    language: str | None,
    env: Mapping[str, str] | None,
    timeout: float | None,
    stream: bool,
) -> dict[str, Any]:
    """POST …/code."""
    if not isinstance(code, str):
        raise InvalidRequestError(f"code is a string, not {type(code).__name__}")
    if len(code) > limits.CODE_BYTES_MAX:
        raise InvalidRequestError(
            f"the code is longer than {limits.CODE_BYTES_MAX} bytes", hint="write it to a file and import it"
        )
    body = {
        "code": code,
        "context": results.context_id(context),
        "language": language,
        "env": env_of(env),
        "timeout_s": seconds("timeout", timeout),
        "stream": stream,
    }
    return without_none(body)


def target(path: str, params: Mapping[str, Any] | None) -> str:
    """Path and query of a request. None in `params` is left out, a list is given item by item."""
    pairs = [
        f"{quote(name, safe='.')}={quote(os_text(item), safe='/')}"
        for name, value in (params or {}).items()
        for item in (value if isinstance(value, list) else [value])
        if item is not None
    ]
    return f"{path}?{'&'.join(pairs)}" if pairs else path


def os_text(value: object) -> bytes:
    """Text as bytes; names that are no UTF-8 (surrogate escapes) survive."""
    if isinstance(value, bool):
        return b"true" if value else b"false"
    return str(value).encode("utf-8", "surrogateescape")


class LineDecoder:
    """NDJSON from pieces of any size: `feed` gives the objects that are whole."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._bytes = 0

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        *whole, rest = data.split(b"\n")
        found = []
        for line in whole:
            full = b"".join([*self._parts, line])
            self._parts, self._bytes = [], 0
            if full.strip():
                found.append(_object(full))
        if rest:
            self._parts.append(rest)
            self._bytes += len(rest)
            if self._bytes > LINE_BYTES_MAX:
                raise ProtocolError(f"the server sent a line of more than {LINE_BYTES_MAX} bytes")
        return found

    @property
    def pending(self) -> bool:
        """Whether a line was begun and not ended: a stream that ends now was cut."""
        return bool(self._parts)


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ProtocolError(f"the server sent what is not a JSON object: {line[:80]!r}")
    return found


def is_problem(event: Mapping[str, Any]) -> bool:
    """Whether a line is an error of the server, not an exception of the cell."""
    return event.get("type") == "error" and "outcome" in event


class Collector:
    """Keeps the first `most` bytes of a channel, whole characters for callbacks, and whether more came."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: list[bytes] = []
        self._kept = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.truncated = False

    def feed(self, data: bytes) -> str:
        room = self._most - self._kept
        if len(data) > room:
            self.truncated = True
        if room > 0:
            self._parts.append(data[:room])
            self._kept += min(room, len(data))
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", True)

    def bytes(self) -> bytes:
        return b"".join(self._parts)


class ExecutionBuilder:
    """An Execution from the events of a streamed cell."""

    def __init__(self) -> None:
        self._text: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._kept = {"stdout": 0, "stderr": 0}
        self._results: list[results.Result] = []
        self._error: dict[str, Any] | None = None
        self._truncated = False

    def feed(self, event: dict[str, Any]) -> str | results.Result | None:
        """Takes one event; answers what a callback of its type is to be given."""
        kind = event.get("type")
        if kind in ("stdout", "stderr"):
            text = str(event.get("text") or "")
            room = limits.CODE_OUTPUT_BYTES_MAX - self._kept[kind]
            self._text[kind].append(text[:room] if room < len(text) else text)
            self._kept[kind] += min(room, len(text))
            self._truncated |= len(text) > room
            return text
        if kind == "result":
            value = results.result(event)
            self._results.append(value)
            return value
        if kind == "error":
            self._error = event
        return None

    def build(self, end: Mapping[str, Any]) -> results.Execution:
        built = results.execution({**end, "error": self._error, "stdout": "", "stderr": ""})
        return results.Execution(
            results=self._results,
            stdout="".join(self._text["stdout"]),
            stderr="".join(self._text["stderr"]),
            error=built.error,
            status=built.status,
            execution_count=built.execution_count,
            duration_ms=built.duration_ms,
            truncated=self._truncated or built.truncated,
        )


def error_of(status: int, body: bytes, *, sandbox: str | None = None) -> LLM4AgentsError:
    """The error of an answer above 399, with the sandbox's id and something to do in it."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        words = " ".join(body[:200].decode("utf-8", "replace").split())
        found = {
            "detail": f"HTTP {status}: {words or 'no body'}",
            "hint": "no server of ours says that: is LLM4AGENTS_URL right, or is it a proxy's answer?",
        }
    elif "code" not in found and not isinstance(found.get("detail"), str):
        found = {"detail": f"HTTP {status}: {json.dumps(found.get('detail', found))[:500]}"}
    return named(from_wire(found, status), sandbox)


def named(error: LLM4AgentsError, sandbox: str | None) -> LLM4AgentsError:
    """The same error, saying which sandbox and what to do, if it did not."""
    message, hint = error.message, error.hint or _HINTS.get(error.code)
    if sandbox is not None:
        error.details = {"sandbox": sandbox, **error.details}
        if sandbox not in message:
            message = f"{'volume' if sandbox.startswith('vol_') else 'sandbox'} {sandbox}: {message}"
    error.message, error.hint = message, hint
    error.args = (message if hint is None else f"{message} ({hint})",)
    return error


def not_text(path: str, sandbox: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"sandbox {sandbox}: {path} is not UTF-8 text", hint='read it with format="bytes"', path=path
    )


def release_of(version: str) -> tuple[tuple[int, ...], int]:
    """A version as something that sorts: its numbers, and pre-releases before the release."""
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)(.*)", version)
    if match is None:
        return (), 0
    numbers = tuple(int(part) for part in match.group(1).split("."))
    return numbers, 0 if re.match(r"[-_.]?(a|b|rc|dev|alpha|beta|pre)", match.group(2)) else 1


def unique_prefix(prefix: str, ids: Iterable[str]) -> list[str]:
    """The ids `prefix` may mean: itself when it is one, else all that begin with it (`sbx_` is optional).
    An empty one means none: it is a variable that was not set, not a wish to end the only sandbox there is."""
    known = list(ids)
    if prefix in known:
        return [prefix]
    bare = prefix.removeprefix("sbx_")
    return [name for name in known if bare and name.removeprefix("sbx_").startswith(bare)]


def local(file: Path) -> str:
    """A path of this machine as the server, whose cwd is `/`, understands it."""
    return str(file.absolute())


def segment(name: str) -> str:
    """A name as one segment of a path."""
    if not name or name in (".", ".."):
        raise InvalidRequestError(f"{name!r} is not a name")
    return quote(os_text(name), safe="")


def protected_by(headers: Mapping[str, str]) -> tuple[str, ...]:
    """The patterns of paths that the server's operator protects, as an answer with files has them."""
    try:
        said = json.loads(headers.get("x-protected-paths") or "[]")
        return tuple(pattern for pattern in said if isinstance(pattern, str))
    except (ValueError, TypeError):
        raise ProtocolError("the server said in no way we know what is protected") from None


def object_of(body: bytes) -> dict[str, Any]:
    """The JSON object an answer is."""
    return _object(body) if body.strip() else {}


warned = False
"""Whether this process has been told of the emulation, by either SDK."""


def emulation_note(server: Mapping[str, Any]) -> str:
    """What to tell once when sandboxes run without KVM."""
    note = server.get("slowdown_note")
    why = str(server.get("why_not_kvm") or "").strip().split("\n")[0].rstrip(".;")
    parts = ["sandboxes run in software emulation" + (f": {why}" if why else " (no KVM here)")]
    parts.append(
        str(note) if note else "code runs about 10 times slower than native; isolation is a VM's all the same"
    )
    return "; ".join(parts)
