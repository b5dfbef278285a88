"""Managed processes: they belong to the guest and not to a session, and can be attached to again and again.

Not here: the exec of one session (`verbs`, `handles.Process`), what a server makes of these (engine). A process's
output is one log; every byte of it, of either channel, has an offset from 0 on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Self

import msgpack

from llm4agents.errors import (
    ConflictError,
    GuestError,
    InvalidRequestError,
    LLM4AgentsError,
    NotFoundError,
    PathNotFoundError,
    ProtocolError,
    TimedOutError,
)
from llm4agents.guest import maps
from llm4agents.guest.handles import STDERR, STDOUT, send_signal, send_whole, within
from llm4agents.guest.maps import Fields, Text
from llm4agents.guest.results import ExitStatus
from llm4agents.guest.stream import Stream
from llm4agents.limits import (
    ARGV_BYTES_MAX,
    ENV_BYTES_MAX,
    EXEC_GRACE_S,
    PROCESS_LIST_BYTES_MAX,
    PROCESSES_MAX,
    STALL_TIMEOUT_S,
    STREAM_CREDIT_BYTES,
    VERB_TIMEOUT_S,
)

_OUTPUT = frozenset({STDOUT, STDERR})
_BODY = frozenset({0})
_NONE: Final[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Terminal:
    """Makes a process's streams a terminal of its own, of that size."""

    rows: int = 24
    cols: int = 80
    term: str = "xterm-256color"


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A managed process as the guest lists it. `start` and `offset`: where what can be read of its output begins, and
    how much it has said in all."""

    id: str
    pid: int
    tag: str | None
    argv: tuple[str, ...]
    cwd: str
    user: str
    tty: bool
    stdin: bool
    started_at: float
    running: bool
    exit_code: int | None
    signal: int | None
    timed_out: bool
    start: int
    offset: int
    attached: int

    @classmethod
    def read(cls, fields: Fields) -> ProcessInfo:
        return cls(
            id=fields.text("id", 64),
            pid=fields.integer("pid", 1, 2**31),
            tag=fields.maybe_name("tag"),
            argv=fields.names("argv"),
            cwd=fields.name("cwd"),
            user=fields.name("user"),
            tty=fields.flag("tty"),
            stdin=fields.flag("stdin", default=False),
            started_at=fields.number("started_at"),
            running=fields.flag("running"),
            exit_code=fields.maybe_integer("exit_code", -(2**31), 2**31),
            signal=fields.maybe_integer("signal", 0, 127),
            timed_out=fields.flag("timed_out", default=False),
            start=fields.integer("start"),
            offset=fields.integer("offset"),
            attached=fields.integer("attached", default=0),
        )


@dataclass(frozen=True, slots=True)
class Port:
    """A TCP port of the guest on which something listens."""

    port: int
    address: str
    inode: int


def exec_arguments(
    argv: Sequence[Text],
    env: Mapping[str, str] | None,
    env_clear: bool,
    cwd: Text | None,
    user: str | int | None,
    timeout_s: float | None,
) -> dict[str, object]:
    """What every exec says, checked. Raises InvalidRequestError."""
    if not argv:
        raise InvalidRequestError("argv is empty", hint="the first item is the program")
    words = [maps.wire_text(word, "argument") for word in argv]
    variables = maps.wire_env(env)
    if sum(len(word) + 5 for word in words) > ARGV_BYTES_MAX:
        raise InvalidRequestError(
            f"the arguments are more than {ARGV_BYTES_MAX} bytes", hint="pass large data over stdin"
        )
    if sum(len(name) + len(value) + 6 for name, value in variables.items()) > ENV_BYTES_MAX:
        raise InvalidRequestError(f"the environment is more than {ENV_BYTES_MAX} bytes")
    if timeout_s is not None and not 0 < timeout_s < 1e9:
        raise InvalidRequestError(f"timeout_s={timeout_s!r} is not a positive number of seconds")
    return {
        "argv": words,
        "env": variables,
        "env_clear": env_clear,
        "cwd": None if cwd is None else maps.wire_path(cwd),
        "user": user,
        "timeout_s": timeout_s,
    }


class Attached:
    """One who watches a managed process: a context manager whose end lets go of it, and the process lives on.

    Iterate for (offset, STDOUT | STDERR, bytes); output that is not taken holds up the process once what it keeps is
    unread. Errors of the channel raise from every method; the process is none the worse for them.
    """

    def __init__(
        self,
        stream: Stream,
        what: str,
        *,
        id: str,
        pid: int,
        offset: int = 0,
        gap: int = 0,
        tty: bool = False,
        output: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        self._stream, self._what, self._output = stream, what, output
        self.id, self.pid, self.tty = id, pid, tty
        self.offset = offset
        """Of the next byte that iterating gives."""
        self.gap = gap
        """Bytes between where reading was to begin and where it could."""
        self._loop = asyncio.get_running_loop()
        self._deadline = None if timeout_s is None else self._loop.time() + timeout_s + EXEC_GRACE_S
        self._feeder: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.detach()

    def __aiter__(self) -> AsyncGenerator[tuple[int, int, bytes], None]:
        return self._pieces()

    async def _pieces(self) -> AsyncGenerator[tuple[int, int, bytes], None]:
        while (item := await self._patiently()) is not None:
            channel, data = item
            at = self.offset
            self.offset += len(data)
            yield at, channel, data

    async def _patiently(self) -> tuple[int, bytes] | None:
        """The next piece; the agent enforces the process's timeout, we only doubt it."""
        if self._deadline is None or self._stream.pending():
            return await self._stream.receive()
        try:
            async with asyncio.timeout(max(EXEC_GRACE_S, self._deadline - self._loop.time())):
                return await self._stream.receive()
        except TimeoutError as error:
            if isinstance(error, LLM4AgentsError):
                raise
            self.kill()
            raise TimedOutError(f"{self._what}: the agent is silent past the timeout") from None

    def pending(self) -> bool:
        """Whether the next step of iterating would not wait."""
        return self._stream.pending()

    async def write(self, data: bytes) -> None:
        """To its stdin, or terminal. Waits while nobody reads it. ConflictError when it has ended."""
        await self._stream.send(data)

    async def close_stdin(self) -> None:
        """End its stdin for good; of a terminal, send it an end of input (Ctrl-D)."""
        await self._stream.send_eof()

    def feed(self, data: bytes) -> None:
        """Write `data` to stdin and close it, beside whatever else is done; a process may end first."""
        self._feeder = asyncio.create_task(send_whole(self._stream, data))

    async def signal(self, number: int) -> None:
        """To its whole process group. Raises ConflictError when it has ended."""
        await send_signal(self._stream, number)

    async def resize(self, rows: int, cols: int) -> None:
        """The size of its terminal; nothing without one."""
        if not (1 <= rows <= 10_000 and 1 <= cols <= 10_000):
            raise InvalidRequestError(f"{rows}x{cols} is no size of a terminal")
        await self._stream.send_resize(rows, cols)

    async def wait(self) -> ExitStatus:
        """How it ended. What has not been iterated over is dropped. `offset` is then the end of its output."""
        self._stream.discard()
        try:
            async with asyncio.timeout(
                None if self._deadline is None else max(EXEC_GRACE_S, self._deadline - self._loop.time())
            ):
                end = await self._stream.end()
        except TimeoutError as error:
            if isinstance(error, LLM4AgentsError):
                raise
            self.kill()
            raise TimedOutError(f"{self._what}: the agent is silent past the timeout") from None
        try:
            status = ExitStatus.read(end)
            self.offset = end.integer("offset")
        except ProtocolError as error:
            self._stream.break_session(error)
            raise
        return status

    def detach(self) -> None:
        """Let go of it, without waiting; what it is being fed still goes to it, whole. Idempotent."""
        if self._feeder is None or self._feeder.done():
            self._stream.detach()
            return
        self._stream.discard()
        self._feeder.add_done_callback(lambda _: self._stream.detach())

    async def settle(self) -> None:
        """After `detach`: until the agent has taken everything that was written before it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(VERB_TIMEOUT_S):
                await self._stream.ended()

    def kill(self) -> None:
        """SIGKILL to it and everything it has started, and let go of it, without waiting."""
        if self._feeder is not None:
            self._feeder.cancel()
        self._stream.cancel()


@contextlib.contextmanager
def _told(id: str) -> Iterator[None]:
    """Errors about a process in its own words."""
    try:
        yield
    except PathNotFoundError:
        raise NotFoundError(f"there is no process {id!r} in this sandbox", process=id) from None
    except GuestError as error:
        if error.details.get("code") != "exists":
            raise
        raise ConflictError(
            f"there is a process {id!r} already", hint="take another id", process=id
        ) from None


class ManagedVerbs:
    """The part of `verbs.Agent` that is about managed processes."""

    if TYPE_CHECKING:
        from llm4agents.guest.channel import Session

        session: Session

        async def _open(
            self,
            verb: str,
            arguments: Mapping[str, object],
            *,
            timeout: float,
            subject: str | None = None,
            channels: frozenset[int] = _NONE,
            window: int = STREAM_CREDIT_BYTES,
            first: bytes = b"",
            lives_on: bool = False,
        ) -> tuple[Stream, Fields]: ...

        async def _call(
            self, verb: str, arguments: Mapping[str, object], *, timeout: float, subject: str | None = None
        ) -> Fields: ...

    async def start(
        self,
        argv: Sequence[Text],
        *,
        id: str,
        tag: str | None = None,
        tty: Terminal | None = None,
        keep_bytes: int | None = None,
        full: Literal["drop", "block"] = "drop",
        env: Mapping[str, str] | None = None,
        env_clear: bool = False,
        cwd: Text | None = None,
        user: str | int | None = "user",
        stdin: bool | bytes = False,
        timeout_s: float | None = None,
        init: bool = False,
        timeout: float = VERB_TIMEOUT_S,
    ) -> Attached:
        """Start a managed process and attach to it; returns when its execve has succeeded.

        `timeout_s`: how long it may run before its group is killed, whoever watches; `timeout`: how long it may take
        to start; `init`: as of `exec`. Raises ConflictError when there is one of that `id`, else as `exec`.
        """
        self.session.need("managed", "managed processes")
        options: dict[str, object] = {"id": id, "tag": tag, "full": full, "stdin": stdin is not False}
        if init:
            self.session.need("init", "starting an init")
            options["init"] = True
        if keep_bytes is not None:
            options["keep"] = keep_bytes
        if tty is not None:
            options["tty"] = {"rows": tty.rows, "cols": tty.cols, "term": tty.term}
        subject = maps.printable(argv[0] if argv and isinstance(argv[0], str) else "", 300)
        arguments = {**exec_arguments(argv, env, env_clear, cwd, user, timeout_s), **options}
        with _told(id):
            stream, reply = await self._open(
                "exec", arguments, timeout=timeout, subject=subject, channels=_OUTPUT
            )
        what = f"exec {subject}"
        async with within(stream, timeout, what):
            pid = reply.integer("pid", 1, 2**31)
        attached = Attached(stream, what, id=id, pid=pid, tty=tty is not None, timeout_s=timeout_s)
        if isinstance(stdin, bytes):
            attached.feed(stdin)
        return attached

    async def attach(
        self,
        id: str,
        *,
        from_offset: int | None = None,
        stdin: bool = False,
        output: bool = True,
        timeout: float = VERB_TIMEOUT_S,
    ) -> Attached:
        """Watch a managed process from an offset of its output on (None: from now on). Raises NotFoundError.

        It may have ended: then there is what it has said, and how it ended.
        """
        if from_offset is not None and not 0 <= from_offset < 2**63:
            raise InvalidRequestError("an offset is not negative")
        arguments = {"id": id, "from": from_offset, "stdin": stdin, "output": output}
        with _told(id):
            stream, reply = await self._open(
                "attach",
                arguments,
                timeout=timeout,
                channels=_OUTPUT if output else _NONE,
                lives_on=True,  # who goes away before the answer is nobody who may kill it
            )
        what = f"process {id}"
        try:
            offset, gap = reply.integer("offset"), reply.integer("gap")
            if from_offset is not None and offset != from_offset + gap:
                raise ProtocolError("the guest's offsets do not add up")
            pid, tty = reply.integer("pid", 1, 2**31), reply.flag("tty")
        except ProtocolError as error:
            stream.break_session(error)
            raise
        return Attached(stream, what, id=id, pid=pid, offset=offset, gap=gap, tty=tty, output=output)

    async def processes(self, *, timeout: float = STALL_TIMEOUT_S) -> list[ProcessInfo]:
        """Every managed process that runs or has not been forgotten."""
        stream, _ = await self._open("processes", {}, timeout=timeout, channels=_BODY)
        packed = bytearray()
        async with within(stream, timeout, "processes"):
            while (item := await stream.receive()) is not None:
                packed += item[1]
                if len(packed) > PROCESS_LIST_BYTES_MAX:
                    raise ProtocolError("the guest's list of processes has no end")
            await stream.end()
            try:
                unpacker = msgpack.Unpacker(max_buffer_size=PROCESS_LIST_BYTES_MAX, **maps.UNPACK_LIMITS)
                unpacker.feed(packed)
                found = [ProcessInfo.read(Fields(body, "process")) for body in unpacker]
            except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
                raise ProtocolError(
                    f"the guest's list of processes is broken ({type(error).__name__})"
                ) from None
            if len(found) > PROCESSES_MAX:
                raise ProtocolError("the guest has more managed processes than there can be")
        return found

    async def signal(self, id: str, number: int, *, timeout: float = VERB_TIMEOUT_S) -> None:
        """To its process group. Raises NotFoundError, ConflictError when it has ended."""
        with _told(id):
            await self._call("signal", {"id": id, "signal": number}, timeout=timeout)

    async def forget(self, *ids: str, timeout: float = VERB_TIMEOUT_S) -> None:
        """Forget processes that have ended. NotFoundError, InvalidRequestError when one runs; the others are done."""
        with _told(ids[0]):
            await self._call("forget", {"ids": list(ids)}, timeout=timeout)

    async def ports(self, *, timeout: float = VERB_TIMEOUT_S) -> list[Port]:
        """TCP ports on which something in the guest listens, lowest first."""
        reply = await self._call("ports", {}, timeout=timeout)
        try:
            return [
                Port(port.integer("port", 1, 65_535), port.text("address", 64), port.integer("inode"))
                for port in reply.maps("ports")
            ]
        except ProtocolError as error:
            self.session.fail(error)
            raise

    async def limits(
        self,
        *,
        pids: int | None = None,
        output_bytes_per_s: int | None = None,
        memory_bytes: int | None = None,
        disk_bytes: int | None = None,
        timeout: float = VERB_TIMEOUT_S,
    ) -> None:
        """Bounds of all the guest's processes together (`pids`, `memory_bytes`; None leaves them), of what each one's
        output is read at (None: none), and of what may be in use of the disk (None leaves it)."""
        arguments = {"pids": pids, "output_bytes_per_s": output_bytes_per_s, "memory_bytes": memory_bytes}
        if disk_bytes is not None:
            arguments["disk_bytes"] = disk_bytes
        await self._call("limits", arguments, timeout=timeout)
