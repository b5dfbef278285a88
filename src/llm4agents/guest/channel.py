"""A session with one guest's agent over a byte stream: greeting, streams, credit, quiesce, end.

Not here: bytes to frames (`frames`), one stream's rules (`stream`), verbs (`verbs`). The socket is read by
the event loop's own callbacks and written in gathered writes; nothing is sent but through one bounded queue.
Everything a guest can make us keep is bounded by what we opened and the credit we gave. Anything it sends out
of rule ends this session, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol

from llm4agents.errors import (
    CapacityError,
    ConflictError,
    ConnectionLostError,
    LLM4AgentsError,
    ProtocolError,
    TimedOutError,
    VersionMismatchError,
)
from llm4agents.guest import frames, maps
from llm4agents.guest.frames import FrameType
from llm4agents.guest.stream import Signal, Stream, lost
from llm4agents.limits import (
    HELLO_RETRY_S,
    HELLO_TIMEOUT_S,
    OUT_BYTES_MAX,
    RECV_BYTES_MAX,
    STREAM_CREDIT_BYTES,
    STREAM_WINDOW_BYTES_MAX,
    STREAMS_PER_SESSION_MAX,
    UNPAID_FRAMES_PER_S_MAX,
    VERB_TIMEOUT_S,
    WINDOW_TOTAL_BYTES_MAX,
)

_JOIN_BYTES_MAX: Final = 4_096
_IOV_MAX: Final = 192
_NO_CHANNELS: Final[frozenset[int]] = frozenset()
_DATA, _EOF, _CREDIT = int(FrameType.DATA), int(FrameType.EOF), int(FrameType.CREDIT)

_FILE_VERBS = frozenset({"read", "write", "stat", "list", "mkdir", "move", "remove"})
_MACHINE_VERBS = frozenset(
    {"metrics", "set_time", "freeze", "thaw", "post_restore", "set_env", "poweroff", "ping"}
)
_CAPABILITIES: Final = {
    **dict.fromkeys(("attach", "processes", "signal", "forget", "ports", "limits"), "managed"),
    **dict.fromkeys(("tar_out", "tar_in", "set_attributes", "link", "watch", "search"), "files2"),
    "network": "network",
}
"""The verbs of version 1 that came after it, and what an agent that has them says in its HELLO_ACK."""
_V1_VERBS = _FILE_VERBS | _MACHINE_VERBS | {"exec", "connect"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one version of the protocol has. A new version is one more entry of DIALECTS; the oldest goes."""

    version: int
    verbs: frozenset[str]


DIALECTS: Final[dict[int, Dialect]] = {1: Dialect(version=1, verbs=_V1_VERBS)}
"""The newest version and the one before it: paused memory holds agents as old as the pause."""


class Socket(Protocol):
    """A connected stream: a socket, or anything that owns the descriptor of one (a driver's channel)."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Hello:
    """What the agent said of itself. `streams_max` is already capped by our own limit."""

    version: int
    agent: str
    boot_id: str
    capabilities: tuple[str, ...]
    streams_max: int


class Session:
    """One greeting's worth of conversation with an agent. Made by `open`; owns the socket from then on.

    `closed` is done when the session has ended: its result is None after `close()`, else the error that
    ended it (ConnectionLostError, ProtocolError). It never raises.
    """

    hello: Hello
    dialect: Dialect

    def __init__(self, sock: Socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner = sock
        self._sock = sock if isinstance(sock, socket.socket) else socket.socket(fileno=os.dup(sock.fileno()))
        self._sock.setblocking(False)
        self._tag = 0
        self._trailer = b""
        self._decoder: frames.Decoder | None = None
        self._ack: asyncio.Future[maps.Fields] = self._loop.create_future()
        self._greeted = False
        self.closed: asyncio.Future[LLM4AgentsError | None] = self._loop.create_future()
        self._streams: dict[int, Stream] = {}
        self._last_stream = 0
        self._windows = 0
        self._out: deque[bytes | memoryview] = deque()
        self._out_bytes = 0
        self._flush_due = self._writer_armed = False
        self._due_credit: dict[int, int] = {}
        self._due_cancel: list[tuple[int, FrameType]] = []
        self._turn = asyncio.Lock()
        self._drained, self._quieted = Signal(), Signal()
        self._quiescing = self._quiesced = self._parted = False
        self._answers_due = 0
        self._unpaid, self._unpaid_since = 0, 0.0

    # Opening and ending.

    @classmethod
    async def open(
        cls, sock: Socket, *, dirty: bool = False, timeout: float = HELLO_TIMEOUT_S, host: str = "llm4agents"
    ) -> Session:
        """Greet the agent at the other end of `sock` and wait for its answer, at most `timeout` seconds.

        `dirty`: a host before us may have died in mid-frame (adoption). Takes over `sock` and closes it when
        this fails. Raises TimedOutError, ConnectionLostError, ProtocolError, VersionMismatchError.
        """
        session = cls(sock)
        try:
            async with asyncio.timeout(timeout):
                await session._greet(dirty, host)
        except TimeoutError:
            error = TimedOutError(
                f"the guest's agent did not answer a greeting within {timeout:g} s",
                hint="the sandbox's serial log says how far the guest came",
            )
            session.fail(error)
            raise error from None
        except BaseException:
            await session.close()
            raise
        return session

    async def _greet(self, dirty: bool, host: str) -> None:
        if dirty:
            self._push(frames.PAD)
        self._loop.add_reader(self._sock.fileno(), self._readable)
        hello = maps.pack({"versions": sorted(DIALECTS), "host": host})
        while not self._ack.done():
            nonce = secrets.token_bytes(frames.NONCE_BYTES)
            if frames.session_tag(nonce) == 0:
                continue
            self._tag = frames.session_tag(nonce)
            self._trailer = frames.TRAILER.pack(self._tag)
            if self._decoder is None:
                self._decoder = frames.Decoder(nonce)
            else:
                self._decoder.expect(nonce)
            self._push(frames.preamble(nonce))
            self.put(0, FrameType.HELLO, 0, hello)
            either: set[asyncio.Future[Any]] = {self._ack, self.closed}
            await asyncio.wait(either, timeout=HELLO_RETRY_S, return_when=asyncio.FIRST_COMPLETED)
            if self.closed.done():
                raise lost(self.closed.result())
        self._accept(self._ack.result())

    def _accept(self, ack: maps.Fields) -> None:
        version = ack.integer("version", 0, 2**31)
        agent = ack.text("agent", 64, default="unknown")
        dialect = DIALECTS.get(version)
        if dialect is None:
            raise VersionMismatchError(
                f"the guest's agent ({agent}) speaks no protocol version of ours ({sorted(DIALECTS)})",
                hint="build the template again, or open the sandbox with the release that paused it",
            )
        self.dialect = dialect
        self.hello = Hello(
            version=version,
            agent=agent,
            boot_id=ack.text("boot_id", 128, default=""),
            capabilities=ack.texts("capabilities"),
            streams_max=min(
                ack.integer("streams_max", 1, 2**31, default=STREAMS_PER_SESSION_MAX), STREAMS_PER_SESSION_MAX
            ),
        )
        self._greeted = True

    async def close(self) -> None:
        """End the session from our side; streams still open fail with ConnectionLostError. Idempotent."""
        self._finish(None)

    def fail(self, error: LLM4AgentsError) -> None:
        """End the session because of `error`. The first one stays."""
        self._finish(error)

    def _finish(self, error: LLM4AgentsError | None) -> None:
        if self.closed.done():
            return
        self.closed.set_result(error)
        self._let_go()
        self._out.clear()
        self._due_credit.clear()
        self._due_cancel.clear()
        self._decoder = None
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(lost(error))
        self._drained.fire()
        self._quieted.fire()

    def _let_go(self) -> None:
        descriptor = self._sock.fileno()
        if descriptor >= 0:
            self._loop.remove_reader(descriptor)
            self._loop.remove_writer(descriptor)
        self._sock.close()
        if self._owner is not self._sock:
            self._owner.close()

    def _check_open(self) -> None:
        if self.closed.done():
            why = lost(self.closed.result())
            raise type(why)(why.message, hint=why.hint)

    # Streams.

    async def stream(
        self,
        verb: str,
        arguments: Mapping[str, object],
        *,
        channels: frozenset[int] = _NO_CHANNELS,
        window: int = STREAM_CREDIT_BYTES,
        subject: str | None = None,
    ) -> Stream:
        """Open a stream with `verb`. `channels`: where the agent may send data; `window`: its credit.

        Raises CapacityError when too many are open, VersionMismatchError when the agent is too old for the
        verb, InvalidRequestError when the arguments do not fit a frame.
        """
        if (capability := _CAPABILITIES.get(verb)) is not None:
            self.need(capability, verb)
        elif verb not in self.dialect.verbs:
            raise VersionMismatchError(
                f"the guest's agent speaks protocol {self.dialect.version}, which has no {verb!r}",
                hint="build the template again",
            )
        payload = maps.pack({"verb": verb, **arguments})
        await self.room()
        if len(self._streams) >= self.hello.streams_max or self._last_stream >= 2**32 - 1:
            raise CapacityError(
                f"{len(self._streams)} calls are open in this sandbox, the most there can be",
                hint="let some end first",
            )
        self._last_stream += 1
        extra = min(window, STREAM_WINDOW_BYTES_MAX) - STREAM_CREDIT_BYTES
        if extra < 0 or self._windows + extra > WINDOW_TOTAL_BYTES_MAX:
            extra = 0
        stream = Stream(
            self, self._last_stream, channels=channels, window=STREAM_CREDIT_BYTES + extra, subject=subject
        )
        self._streams[stream.id] = stream
        self._windows += extra
        self.put(stream.id, FrameType.OPEN, 0, payload)
        if extra:
            self.put(stream.id, FrameType.CREDIT, 0, extra.to_bytes(4, "little"))
        return stream

    def need(self, capability: str, what: str) -> None:
        """Raises VersionMismatchError when the agent, older than `what`, lacks what it takes."""
        if capability not in self.hello.capabilities:
            raise VersionMismatchError(
                f"the guest's agent ({self.hello.agent}) is too old for {what!r}",
                hint="a sandbox of a template that was built anew has it",
            )

    def give_credit(self, ident: int, count: int) -> None:
        """Let the agent send `count` more on a stream; goes out with the next write."""
        self._due_credit[ident] = self._due_credit.get(ident, 0) + count
        self._flush_soon()

    def leave_stream(self, ident: int, how: FrameType) -> None:
        """Tell the agent to end a stream, by CANCEL or DETACH. Frames of it that are under way are still accepted."""
        self._due_credit.pop(ident, None)
        if ident in self._streams:
            self._due_cancel.append((ident, how))
            self._flush_soon()

    # Quiesce.

    async def quiesce(self, timeout: float = VERB_TIMEOUT_S) -> None:
        """Silence the channel before the machine is stopped: when this returns nothing is in flight.

        Calls that are running wait; calls that are made wait too, until `unquiesce` or the end. Raises
        TimedOutError when the agent does not answer (then `unquiesce` or `close`).
        """
        self._check_open()
        if self._quiescing:
            raise ConflictError("the channel is already quiet")
        self._collect_due()
        self._quiescing = True
        self._answers_due += 1
        self.put(0, FrameType.QUIESCE)
        try:
            async with asyncio.timeout(timeout):
                while not self._quiesced:
                    await self._quieted.wait()
                    self._check_open()
        except TimeoutError:
            raise TimedOutError(f"the guest's agent did not fall silent within {timeout:g} s") from None

    def reconnect(self, sock: Socket) -> None:
        """Go on over another connection to the same agent, when the one of a quiet session has ended.

        So where the VMM's snapshots reset connections. Owns `sock` from then on; `unquiesce` is next. Raises
        ConflictError when the session is not quiet, what ended it when it has (`sock` is then closed).
        """
        try:
            self._check_open()
            if not self._quiesced:
                raise ConflictError("only a quiet channel goes on over another connection")
            new = sock if isinstance(sock, socket.socket) else socket.socket(fileno=os.dup(sock.fileno()))
        except BaseException:
            sock.close()
            raise
        new.setblocking(False)
        self._let_go()
        self._owner, self._sock = sock, new
        self._parted = self._writer_armed = False
        self._loop.add_reader(new.fileno(), self._readable)

    async def unquiesce(self) -> None:
        """Let the channel speak again: the machine runs on and this host kept its end, or has another."""
        if self._parted:
            self.fail(ConnectionLostError("the guest's channel ended while the guest stood still"))
        self._check_open()
        if not self._quiescing:
            return
        self._quiescing = self._quiesced = False
        self.put(0, FrameType.UNQUIESCE)
        self._drained.fire()

    # Sending.

    async def room(self) -> None:
        """Wait until there is room in the queue; first come, first served. Raises what ended the session."""
        if not self._turn.locked() and self._out_bytes < OUT_BYTES_MAX and not self._quiescing:
            self._check_open()
            return
        async with self._turn:
            while (self._out_bytes >= OUT_BYTES_MAX or self._quiescing) and not self.closed.done():
                await self._drained.wait()
            self._check_open()

    def put(self, stream: int, kind: int, flags: int = 0, payload: bytes | memoryview = b"") -> None:
        """Queue a frame. Callers have waited for `room`, or send something of which few can exist."""
        header = frames.encode_header(self._tag, stream, kind, flags, len(payload))
        if len(payload) <= _JOIN_BYTES_MAX:
            self._push(b"".join((header, payload, self._trailer)))
        else:
            for part in (header, payload, self._trailer):
                self._push(part)

    def _push(self, part: bytes | memoryview) -> None:
        if self.closed.done():
            return
        self._out.append(part)
        self._out_bytes += len(part)
        self._flush_soon()

    def _flush_soon(self) -> None:
        # Not at once: what is queued in this turn of the loop leaves in one write.
        if not self._flush_due and not self._writer_armed and not self.closed.done():
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _collect_due(self) -> None:
        if self._quiescing or not (self._due_credit or self._due_cancel):
            return
        credit, self._due_credit = self._due_credit, {}
        cancel, self._due_cancel = self._due_cancel, []
        for ident, count in credit.items():
            if ident in self._streams:
                self.put(ident, FrameType.CREDIT, 0, count.to_bytes(4, "little"))
        for ident, how in cancel:
            if ident in self._streams:
                self.put(ident, how)

    def _flush(self) -> None:
        self._flush_due = False
        if self.closed.done():
            return
        # Credit and cancels are made into frames only when the guest reads, so that one that does not cannot
        # make them pile up.
        if self._out_bytes < OUT_BYTES_MAX:
            self._flush_due = True
            self._collect_due()
            self._flush_due = False
        try:
            while self._out:
                sent = self._sock.sendmsg(list(islice(self._out, _IOV_MAX)))
                self._out_bytes -= sent
                self._drop_sent(sent)
        except (BlockingIOError, InterruptedError):
            if not self._writer_armed:
                self._writer_armed = True
                self._loop.add_writer(self._sock.fileno(), self._flush)
        except OSError as error:
            self.fail(ConnectionLostError(f"the guest's channel broke: {error.strerror}"))
            return
        else:
            if self._writer_armed:
                self._writer_armed = False
                self._loop.remove_writer(self._sock.fileno())
            if self._due_credit or self._due_cancel:
                self._flush_soon_if_speaking()
        if self._out_bytes < OUT_BYTES_MAX:
            self._drained.fire()

    def _flush_soon_if_speaking(self) -> None:
        if not self._quiescing:
            self._flush_soon()

    def _drop_sent(self, sent: int) -> None:
        out = self._out
        while sent:
            size = len(out[0])
            if size > sent:
                out[0] = memoryview(out[0])[sent:]
                return
            out.popleft()
            sent -= size

    # Receiving.

    def _readable(self) -> None:
        decoder = self._decoder
        if decoder is None:
            return
        try:
            count = self._sock.recv_into(decoder.room(), RECV_BYTES_MAX)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            if not self._part():
                self.fail(ConnectionLostError(f"the guest's channel broke: {error.strerror}"))
            return
        if not count:
            if not self._part():
                self.fail(
                    ConnectionLostError("the guest's channel ended: the virtual machine is gone or rebooting")
                )
            return
        try:
            for frame in decoder.advance(count):
                self._on_frame(frame)
                if self.closed.done():
                    return
            if decoder.error is not None:
                raise decoder.error
        except LLM4AgentsError as error:
            self.fail(error)
        except Exception as error:
            self.fail(ProtocolError(f"a frame of the guest could not be handled ({type(error).__name__})"))
            self._loop.call_exception_handler({"message": "guest frame handler failed", "exception": error})

    def _part(self) -> bool:
        """The connection has ended. True when nothing was on its way, so that the session can go on over another."""
        if self._quiesced:
            self._parted = True
            self._loop.remove_reader(self._sock.fileno())
        return self._quiesced

    def _on_frame(self, frame: frames.Frame) -> None:
        ident, kind, flags, payload = frame
        if self._quiesced:
            raise ProtocolError("the guest spoke after it had fallen silent")
        if kind == _DATA:
            stream = self._stream_of(ident)
            if not payload:
                self._count_unpaid()
            stream.on_data(flags, payload)
        elif kind == _EOF:
            if payload:
                raise ProtocolError("the guest sent an EOF with a payload")
            self._stream_of(ident).on_eof(flags)
        elif flags:
            raise ProtocolError(f"the guest set unknown flags ({flags}) on a frame of type {kind}")
        elif kind == _CREDIT:
            self._stream_of(ident).on_credit(payload)
        elif kind == FrameType.REPLY:
            self._stream_of(ident).on_reply(payload)
        elif kind == FrameType.END:
            self._stream_of(ident).on_end(payload)
            self._forget(ident)
        elif kind == FrameType.ERROR:
            self._stream_of(ident).on_error(payload)
            self._forget(ident)
        else:
            self._on_control(ident, kind, payload)

    def _on_control(self, ident: int, kind: int, payload: bytes) -> None:
        if ident or kind not in (FrameType.HELLO_ACK, FrameType.EVENT, FrameType.QUIESCED):
            raise ProtocolError(f"the guest sent a frame of type {kind} on stream {ident}")
        if kind == FrameType.HELLO_ACK:
            if self._ack.done():
                raise ProtocolError("the guest greeted twice")
            self._ack.set_result(maps.unpack(payload, "HELLO_ACK"))
        elif kind == FrameType.EVENT:
            self._count_unpaid()
            maps.unpack(payload, "EVENT").text("event", 64)  # None is known to version 1.
        else:
            if payload or not self._answers_due:
                raise ProtocolError("the guest fell silent unasked")
            self._answers_due -= 1
            # An answer to a QUIESCE that was since taken back is late, not wrong.
            if self._quiescing and not self._answers_due:
                self._quiesced = True
                self._quieted.fire()

    def _stream_of(self, ident: int) -> Stream:
        stream = self._streams.get(ident)
        if stream is None:
            raise ProtocolError("the guest spoke on a stream that is not open")
        return stream

    def _forget(self, ident: int) -> None:
        stream = self._streams.pop(ident)
        self._windows -= stream.window - STREAM_CREDIT_BYTES
        self._due_credit.pop(ident, None)

    def _count_unpaid(self) -> None:
        now = self._loop.time()
        if now - self._unpaid_since >= 1:
            self._unpaid, self._unpaid_since = 0, now
        self._unpaid += 1
        if self._unpaid > UNPAID_FRAMES_PER_S_MAX:
            raise ProtocolError("the guest floods the channel with frames that carry nothing")
