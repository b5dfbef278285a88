"""One stream of a session: its credit in both directions, what has arrived, how it ended.

Not here: the socket and other streams (`channel`), what verbs mean (`verbs`). The `on_*` methods are the
guest's moves, checked; a move the protocol does not allow raises ProtocolError and the session ends. What can
pile up here is bounded by the credit we gave, and small pieces are joined so that bookkeeping is not a
multiple of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from llm4agents.errors import (
    CapacityError,
    ConflictError,
    ConnectionLostError,
    GuestError,
    InvalidRequestError,
    LLM4AgentsError,
    PathNotFoundError,
    ProtocolError,
)
from llm4agents.guest import maps
from llm4agents.guest.frames import FrameType
from llm4agents.limits import FRAME_PAYLOAD_BYTES_MAX, STREAM_CREDIT_BYTES, STREAM_WINDOW_BYTES_MAX

if TYPE_CHECKING:
    from llm4agents.guest.channel import Session

_JOIN_BYTES_MAX = 16_384
_INVALID_CODES = frozenset(
    {"invalid", "exec_failed", "is_directory", "not_directory", "no_user", "unknown_verb"}
)


class Signal:
    """Wakes everyone who waits now; whoever wakes looks again at what it waited for."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def fire(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)


def agent_error(payload: bytes, subject: str | None) -> LLM4AgentsError:
    """The error an ERROR frame stands for; `subject` is the path or program the call was about."""
    fields = maps.unpack(payload, "ERROR")
    code = fields.text("code", 64, default="io")
    errno = fields.integer("errno", 0, 4095, default=0) or None
    message = fields.text("message", default=code) or code
    text = message if subject is None or subject in message else f"{subject}: {message}"
    details: dict[str, Any] = {"errno": errno, "code": code, "path": subject}
    kind: type[LLM4AgentsError] = GuestError
    if code == "not_found":
        kind = PathNotFoundError
    elif code in _INVALID_CODES:
        kind = InvalidRequestError
    elif code == "too_many_streams":
        kind = CapacityError
    elif code == "ended":
        kind = ConflictError
    error = kind(text)
    error.details = details
    if isinstance(error, OSError):
        error.errno = errno
    return error


class Stream:
    """A stream opened by `Session.stream`. Errors of the agent and the session's end raise from it."""

    def __init__(
        self, session: Session, ident: int, *, channels: frozenset[int], window: int, subject: str | None
    ) -> None:
        self.id = ident
        self.window = window
        self._session = session
        self._channels = channels
        """Channels the agent may send DATA on, less those it has sent EOF for."""
        self._subject = subject
        self._may_arrive = window
        self._may_send = STREAM_CREDIT_BYTES
        self._taken = 0
        self._inbox: deque[tuple[int, bytes | bytearray]] = deque()
        self._had_channels = bool(channels)
        self._discarding = False
        self._reply: bytes | None = None
        self._end: bytes | None = None
        self._error: LLM4AgentsError | None = None
        self.cancelled = False
        self._arrived, self._credited, self._moved = Signal(), Signal(), Signal()

    # What the guest does.

    def on_reply(self, payload: bytes) -> None:
        if self._reply is not None:
            raise ProtocolError("the guest answered a call twice")
        self._reply = payload
        self._moved.fire()

    def on_data(self, channel: int, payload: bytes) -> None:
        if channel not in self._channels or self._reply is None:
            raise ProtocolError(f"the guest sent data where none is due (channel {channel})")
        size = len(payload)
        if size > self._may_arrive:
            raise ProtocolError("the guest sent more than its credit")
        if not size:
            return
        self._may_arrive -= size
        if self._discarding or self.cancelled:
            self._give_back(size)
            return
        if self._inbox:
            last_channel, last = self._inbox[-1]
            if last_channel == channel and len(last) + size <= _JOIN_BYTES_MAX:
                if isinstance(last, bytes):
                    last = bytearray(last)
                    self._inbox[-1] = (channel, last)
                last += payload
                return
        self._inbox.append((channel, payload))
        self._arrived.fire()

    def on_eof(self, channel: int) -> None:
        if channel not in self._channels or self._reply is None:
            raise ProtocolError(f"the guest ended a channel that is not open (channel {channel})")
        self._channels -= {channel}
        self._arrived.fire()

    def on_credit(self, payload: bytes) -> None:
        count = int.from_bytes(payload, "little")
        if len(payload) != 4 or not count or self._may_send + count > STREAM_WINDOW_BYTES_MAX:
            raise ProtocolError("the guest gave credit beyond every window")
        self._may_send += count
        self._credited.fire()

    def on_end(self, payload: bytes) -> None:
        if self._reply is None:
            raise ProtocolError("the guest ended a call it never answered")
        self._end = payload
        self._wake()

    def on_error(self, payload: bytes) -> None:
        self.fail(agent_error(payload, self._subject))

    def fail(self, error: LLM4AgentsError) -> None:
        """Nothing more will come, because of `error`."""
        if self._end is None and self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        for signal in (self._arrived, self._credited, self._moved):
            signal.fire()

    # What the host does.

    @property
    def done(self) -> bool:
        """Whether the stream is closed (END, ERROR or the session's end)."""
        return self._end is not None or self._error is not None

    def _raise_error(self) -> None:
        if self._error is not None:
            # A copy each: one exception raised in several tasks collects the tracebacks of all.
            error = type(self._error)(self._error.message, hint=self._error.hint)
            error.details = self._error.details
            if isinstance(error, OSError):
                error.errno = self._error.details.get("errno")
            raise error

    async def reply(self) -> maps.Fields:
        """The verb's answer."""
        while self._reply is None:
            self._raise_error()
            await self._moved.wait()
        return maps.unpack(self._reply, "REPLY")

    async def end(self) -> maps.Fields:
        """The stream's final result. Comes only when what arrives is taken or discarded."""
        while self._end is None:
            self._raise_error()
            await self._moved.wait()
        return maps.unpack(self._end, "END")

    async def ended(self) -> None:
        """Wait until the stream is closed, however that came about."""
        while not self.done:
            await self._moved.wait()

    def has_arrived(self) -> bool:
        """Whether bytes wait to be received."""
        return bool(self._inbox)

    def break_session(self, error: ProtocolError) -> None:
        """The guest's answer made no sense: that ends its session."""
        self._session.fail(error)

    def pending(self) -> bool:
        """Whether `receive` would return without waiting."""
        return bool(self._inbox) or self._finished() or self._error is not None

    def _finished(self) -> bool:
        return self._end is not None or self.cancelled or (self._had_channels and not self._channels)

    async def receive(self) -> tuple[int, bytes] | None:
        """The next (channel, bytes), or None when every channel has ended."""
        while not self._inbox:
            if self._finished():
                return None
            self._raise_error()
            await self._arrived.wait()
        channel, chunk = self._inbox.popleft()
        self._give_back(len(chunk))
        return channel, bytes(chunk)

    def discard(self) -> None:
        """Drop what has arrived and will arrive, so that the agent is never held up."""
        self._discarding = True
        while self._inbox:
            self._give_back(len(self._inbox.popleft()[1]))

    def _give_back(self, size: int) -> None:
        self._taken += size
        if self._taken * 4 >= self.window and not self.done and not self.cancelled:
            self._may_arrive += self._taken
            self._session.give_credit(self.id, self._taken)
            self._taken = 0

    async def send(self, data: bytes | memoryview, channel: int = 0) -> None:
        """Send bytes as credit and the session's queue allow. `data` must not change afterwards."""
        view = memoryview(data)
        while view.nbytes:
            await self._session.room()
            self._check_sendable()
            if not self._may_send:
                await self._credited.wait()
                continue
            size = min(view.nbytes, self._may_send, FRAME_PAYLOAD_BYTES_MAX)
            self._may_send -= size
            self._session.put(self.id, FrameType.DATA, channel, view[:size])
            view = view[size:]

    async def send_eof(self, channel: int = 0) -> None:
        await self._session.room()
        if not self.done and not self.cancelled:
            self._session.put(self.id, FrameType.EOF, channel)

    async def send_signal(self, number: int) -> None:
        await self._session.room()
        self._check_sendable()
        self._session.put(self.id, FrameType.SIGNAL, 0, bytes([number]))

    async def send_resize(self, rows: int, columns: int) -> None:
        await self._session.room()
        self._check_sendable()
        size = rows.to_bytes(2, "little") + columns.to_bytes(2, "little")
        self._session.put(self.id, FrameType.RESIZE, 0, size)

    def _check_sendable(self) -> None:
        self._raise_error()
        if self._end is not None or self.cancelled:
            raise ConflictError("the other end takes nothing more: it has ended")

    def cancel(self) -> None:
        """End what the stream does, without waiting. What has arrived is dropped. Idempotent."""
        self._leave(FrameType.CANCEL)

    def detach(self) -> None:
        """Let go of a managed process, which lives on. What has arrived is dropped. Idempotent."""
        self._leave(FrameType.DETACH)

    def _leave(self, how: FrameType) -> None:
        if self.done or self.cancelled:
            self._inbox.clear()
            return
        self.cancelled = True
        self._inbox.clear()
        self._session.leave_stream(self.id, how)
        self._wake()


def lost(error: LLM4AgentsError | None) -> LLM4AgentsError:
    """What an open stream fails with when its session has ended because of `error` (None: closed here)."""
    if error is None:
        return ConnectionLostError("the connection to the guest was closed while the call was running")
    return error
