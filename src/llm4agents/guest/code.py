"""Client of the interpreters in a guest: run a cell, get its events as they come.

Python's and Node's speak the same protocol over a socket of their own. Not here: the interpreters themselves
(images/data), bash (`shell`), keeping what a cell printed (the engine's caps). The
interpreter is code's plaything, so what it says is as hostile as a frame: messages are capped before they
are read, and parsed only when they are not a bomb. An event that is not taken holds up the cell and nothing
else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from llm4agents.errors import (
    ConflictError,
    ConnectionLostError,
    GuestError,
    InvalidRequestError,
    LLM4AgentsError,
    PathNotFoundError,
    ProtocolError,
    TimedOutError,
)
from llm4agents.guest.handles import GuestSocket
from llm4agents.guest.maps import wire_env, wire_path
from llm4agents.guest.verbs import Agent
from llm4agents.limits import (
    CODE_BYTES_MAX,
    CODE_INTERRUPT_GRACE_S,
    CODE_MESSAGE_BYTES_MAX,
    STREAM_CREDIT_BYTES,
    VERB_TIMEOUT_S,
)

Status = Literal["ok", "error", "interrupted", "died", "timed_out"]
_STATUSES: Final = ("ok", "error", "interrupted", "died", "timed_out")
_LENGTH: Final = struct.Struct("<I")
_TRUSTED_BYTES: Final = 262_144
"""Below this a message cannot hold enough structure to matter."""
_STRUCTURE_MAX: Final = 200_000
_DEPTH_MAX: Final = 200
"""Of lists and objects in each other: who reads or writes it after us has as few calls as Python has."""
_OWN_TIMEOUT_GRACE_S: Final = 7.0
"""How long past `timeout_s` the interpreter has to end the cell (it interrupts, and kills 5 s later)."""
_BACKLOG_LOOK_S: Final = 0.25
_BACKLOG_WAIT_S: Final = 60.0
_MIMES_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Where an interpreter listens: `socket` takes cells, `socket.control` commands, whatever the cells do."""

    name: str
    socket: str
    template: str
    """The template that has it."""


PYTHON: Final = Interpreter("Python", "/run/llm4agents/python.sock", "python")
NODE: Final = Interpreter("Node", "/run/llm4agents/node.sock", "node")


@dataclass(frozen=True, slots=True)
class Output:
    """Text the cell wrote to `stream`."""

    stream: Literal["stdout", "stderr"]
    text: str

    def to_json(self) -> dict[str, Any]:
        return {"type": self.stream, "text": self.text}


@dataclass(frozen=True, slots=True)
class Result:
    """A rich value by MIME type (images and PDF in base64). `main`: it is the last expression's value."""

    main: bool
    data: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"type": "result", "main": self.main, "data": self.data}


@dataclass(frozen=True, slots=True)
class Raised:
    """The exception that ended the cell, or `InterpreterDied`."""

    name: str
    value: str
    traceback: str

    def to_json(self) -> dict[str, Any]:
        return {"type": "error", "name": self.name, "value": self.value, "traceback": self.traceback}


@dataclass(frozen=True, slots=True)
class End:
    """The last event of a cell."""

    status: Status
    execution_count: int

    def to_json(self) -> dict[str, Any]:
        return {"type": "end", "status": self.status, "execution_count": self.execution_count}


Event = Output | Result | Raised | End


def _wrong(what: str) -> ProtocolError:
    return ProtocolError(
        f"the guest's interpreter sent {what}",
        hint="restart the context, or the sandbox if that fails",
    )


def _text(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise _wrong(f"a message without a sane {name!r}")
    return value


def _sound(value: Any) -> Any:
    """The value with lone surrogates replaced, which no encoder after us would take."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_sound(item) for item in value]
    if isinstance(value, dict):
        return {_sound(key): _sound(item) for key, item in value.items()}
    return value


def parse(body: bytes) -> dict[str, Any]:
    """A message's object. ProtocolError for what is none, or would take far more memory than its bytes."""
    if len(body) > _TRUSTED_BYTES:
        # What lies outside strings, found in linear time whatever the bytes are.
        plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        if plain.count(b'"') > 4 * _STRUCTURE_MAX:
            raise _wrong("a message of too many parts")
        bare = b"".join(plain.split(b'"')[::2])
        if sum(bare.count(char) for char in (b"[", b"{", b",")) > _STRUCTURE_MAX:
            raise _wrong("a message of too many parts")
    try:
        # NaN and the infinities are not JSON, and nobody after us could say them.
        message = json.loads(body, parse_constant=lambda _: None)
        if b"\\u" in body:
            message = _sound(message)
    except (ValueError, RecursionError):
        raise _wrong("what is not JSON") from None
    if not isinstance(message, dict):
        raise _wrong("a message that is no object")
    if body.count(b"[") + body.count(b"{") > _DEPTH_MAX and _is_deep(message):
        raise _wrong("a message of too many levels")
    return message


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEPTH_MAX):
        inner = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def event(message: dict[str, Any]) -> Event | None:
    """The event a message stands for; None for one of a later version. ProtocolError for a broken one."""
    match message.get("type"):
        case "stdout" | "stderr" as stream:
            return Output(cast(Literal["stdout", "stderr"], stream), _text(message, "text"))
        case "result":
            data = message.get("data")
            if not isinstance(data, dict) or len(data) > _MIMES_MAX:
                raise _wrong("a result without sane data")
            for mime, value in data.items():
                if len(mime) > 100 or not (isinstance(value, str) or mime == "application/json"):
                    raise _wrong(f"a result with insane {mime[:100]!r}")
            return Result(message.get("main") is True, data)
        case "error":
            return Raised(_text(message, "name"), _text(message, "value"), _text(message, "traceback"))
        case "end":
            status, count = message.get("status"), message.get("execution_count", 0)
            if status not in _STATUSES or type(count) is not int:
                raise _wrong("an end without a sane status")
            return End(cast(Status, status), count)
        case _:
            return None


class _Connection:
    """One op to the interpreter and the messages that come back."""

    def __init__(self, socket: GuestSocket) -> None:
        self._socket = socket
        self._held = bytearray()

    @classmethod
    async def send(
        cls,
        agent: Agent,
        at: Interpreter,
        op: Mapping[str, Any],
        *,
        control: bool = False,
        timeout: float = VERB_TIMEOUT_S,
    ) -> _Connection:
        path = f"{at.socket}.control" if control else at.socket
        body = json.dumps(op).encode()
        message = _LENGTH.pack(len(body)) + body
        first, rest = message[:STREAM_CREDIT_BYTES], message[STREAM_CREDIT_BYTES:]
        try:
            socket = await agent.connect(unix=path, first=first, timeout=timeout)
        except PathNotFoundError:
            raise ConflictError(
                f"this sandbox has no {at.name} interpreter",
                hint=f"create it from the template {at.template!r}",
            ) from None
        except GuestError as error:
            if error.details.get("code") == "refused":
                raise ConnectionLostError(
                    f"the sandbox's {at.name} interpreter is not running any more",
                    hint="create a new sandbox",
                ) from None
            raise
        try:
            if rest:
                await asyncio.wait_for(socket.write(rest), timeout)
        except TimeoutError as error:
            socket.close()
            if isinstance(error, LLM4AgentsError):
                raise
            raise TimedOutError(f"the {at.name} interpreter took nothing from us for {timeout:g} s") from None
        except BaseException:
            socket.close()
            raise
        return cls(socket)

    async def message(self) -> dict[str, Any] | None:
        """The next message, or None when the interpreter has closed the connection."""
        while True:
            if len(self._held) >= _LENGTH.size:
                size = _LENGTH.unpack_from(self._held)[0]
                if size > CODE_MESSAGE_BYTES_MAX:
                    raise _wrong(f"a message of {size} bytes")
                end = _LENGTH.size + size
                if len(self._held) >= end:
                    body = bytes(memoryview(self._held)[_LENGTH.size : end])
                    del self._held[:end]
                    return parse(body)
            chunk = await self._socket.read()
            if not chunk:
                return None
            self._held += chunk

    async def end(self) -> None:
        """Read until the cell has ended, dropping the rest."""
        while (message := await self.message()) is not None and message.get("type") != "end":
            pass

    def has_arrived(self) -> bool:
        return bool(self._held) or self._socket.has_arrived()

    def close(self) -> None:
        self._socket.close()


def check_size(code: str) -> None:
    """Raises InvalidRequestError for code beyond CODE_BYTES_MAX."""
    size = len(code.encode("utf-8", "surrogatepass"))
    if size > CODE_BYTES_MAX:
        raise InvalidRequestError(
            f"the code is {size} bytes, and {CODE_BYTES_MAX} is the most",
            hint="write it to a file and import it",
        )


async def run(
    agent: Agent,
    code: str,
    *,
    context: str = "default",
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    timeout_s: float | None = None,
    at: Interpreter = PYTHON,
    more: Mapping[str, Any] | None = None,
) -> AsyncGenerator[Event, None]:
    """Run a cell; yields its events as they come, the last one an End. Close it (`aclosing`) to interrupt.

    A cell that outlives `timeout_s` is interrupted, its worker replaced if that does not end it, and ends
    with status `timed_out`. Raises TimedOutError when not even that brings an End, ConflictError when the
    sandbox has no such interpreter, InvalidRequestError for code beyond CODE_BYTES_MAX. `more` goes into the
    request as it is.
    """
    check_size(code)
    op: dict[str, Any] = {"op": "run", "context": context, "code": code, "timeout_s": timeout_s}
    op.update(more or {})
    op["env"] = dict(env or {})
    wire_env(env)
    if cwd is not None:
        wire_path(cwd)
        op["cwd"] = cwd
    connection = await _Connection.send(agent, at, op)
    cell = _Cell(agent, connection, context, at)
    keeper = None if timeout_s is None else asyncio.create_task(cell.enforce(timeout_s))
    try:
        while not cell.ended:
            yield await cell.next()
    finally:
        if keeper is not None:
            keeper.cancel()
        try:
            if not cell.ended and not agent.session.closed.done():
                # A task of its own, so that a second cancellation does not leave the cell running.
                await asyncio.shield(asyncio.create_task(cell.stop()))
        finally:
            if cell.ended:
                connection.close()


class _Cell:
    """A cell that runs: its events, and the ways to end it early."""

    def __init__(self, agent: Agent, connection: _Connection, context: str, at: Interpreter) -> None:
        self._agent = agent
        self._connection = connection
        self._context = context
        self._at = at
        self._timed_out = False
        self._gave_up = False
        self.ended = False

    async def next(self) -> Event:
        while True:
            try:
                message = await self._connection.message()
            except (ProtocolError, ConnectionLostError):
                self.ended = self._agent.session.closed.done()
                raise
            if message is None:
                if self._gave_up:
                    self.ended = True
                    raise TimedOutError(
                        "the cell ended neither when interrupted nor when its worker was replaced"
                    )
                self.ended = True
                raise ConnectionLostError(
                    f"the sandbox's {self._at.name} interpreter went away while the cell ran",
                    hint="run the cell again",
                )
            found = event(message)
            if isinstance(found, End):
                self.ended = True
                if self._timed_out and found.status != "ok":
                    return End("timed_out", found.execution_count)
            if found is not None:
                return found

    async def enforce(self, timeout_s: float) -> None:
        """End the cell when its time is up and the interpreter has not ended it."""
        await asyncio.sleep(timeout_s + _OWN_TIMEOUT_GRACE_S)
        await self._caught_up()
        self._timed_out = True
        for op in (interrupt, restart):
            with contextlib.suppress(LLM4AgentsError):
                await op(self._agent, self._context, at=self._at, timeout=CODE_INTERRUPT_GRACE_S)
            await asyncio.sleep(CODE_INTERRUPT_GRACE_S)
        await self._caught_up()
        self._gave_up = True
        self._connection.close()

    async def _caught_up(self) -> None:
        """Wait while events have arrived and are not taken: the cell's end may be among them."""
        for _ in range(int(_BACKLOG_WAIT_S / _BACKLOG_LOOK_S)):
            if not self._connection.has_arrived():
                return
            await asyncio.sleep(_BACKLOG_LOOK_S)

    async def stop(self) -> None:
        """Nobody wants the rest: interrupt, and replace the worker if that does not end it."""
        try:
            for op in (interrupt, restart):
                with contextlib.suppress(LLM4AgentsError, TimeoutError):
                    async with asyncio.timeout(CODE_INTERRUPT_GRACE_S):
                        await op(self._agent, self._context, at=self._at, timeout=CODE_INTERRUPT_GRACE_S)
                        await self._connection.end()
                        return
        finally:
            self.ended = True
            self._connection.close()


async def _command(agent: Agent, at: Interpreter, op: Mapping[str, Any], timeout: float) -> None:
    """An op that only answers; done when the interpreter has answered or hung up."""
    try:
        async with asyncio.timeout(timeout):
            connection = await _Connection.send(agent, at, op, control=True, timeout=timeout)
            try:
                await connection.end()
            finally:
                connection.close()
    except TimeoutError as error:
        if isinstance(error, LLM4AgentsError):
            raise
        raise TimedOutError(
            f"the {at.name} interpreter did not answer {op['op']!r} within {timeout:g} s"
        ) from None


async def interrupt(
    agent: Agent, context: str = "default", *, at: Interpreter = PYTHON, timeout: float = VERB_TIMEOUT_S
) -> None:
    """Interrupt the cell that runs in `context`, if one does."""
    await _command(agent, at, {"op": "interrupt", "context": context}, timeout)


async def restart(
    agent: Agent, context: str = "default", *, at: Interpreter = PYTHON, timeout: float = VERB_TIMEOUT_S
) -> None:
    """Replace the worker of `context`; its variables are gone."""
    await _command(agent, at, {"op": "restart", "context": context}, timeout)


async def remove(
    agent: Agent, context: str, *, at: Interpreter = NODE, timeout: float = VERB_TIMEOUT_S
) -> None:
    """End the worker of `context` and forget it. Only Node's interpreter can."""
    await _command(agent, at, {"op": "remove", "context": context}, timeout)


async def ping(agent: Agent, *, at: Interpreter = PYTHON, timeout: float = VERB_TIMEOUT_S) -> None:
    """Returns when the interpreter answers: it has imported everything and takes cells."""
    await _command(agent, at, {"op": "ping"}, timeout)
