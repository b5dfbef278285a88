"""What lives as long as a stream: a process, a file being read, a connection; and the deadline of a wait.

Not here: how they are opened (`verbs`). Each is a context manager; leaving it cancels what has not ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Final, Self

from llm4agents.errors import (
    ConflictError,
    GuestError,
    InvalidRequestError,
    LLM4AgentsError,
    ProtocolError,
    TimedOutError,
)
from llm4agents.guest.results import ExitStatus, FileInfo
from llm4agents.guest.stream import Stream
from llm4agents.limits import EXEC_GRACE_S, STALL_TIMEOUT_S, VERB_TIMEOUT_S

STDOUT: Final = 1
STDERR: Final = 2


@contextlib.asynccontextmanager
async def within(
    stream: Stream, seconds: float | None, what: str, *, lives_on: bool = False
) -> AsyncIterator[None]:
    """Run a wait on `stream` with a deadline; whatever goes wrong in it, the stream is cancelled.

    `lives_on`: it is only let go of, since to cancel it would kill a process that is not this call's.
    """
    leave = stream.detach if lives_on else stream.cancel
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        leave()
        if isinstance(error, LLM4AgentsError):
            raise
        raise TimedOutError(f"{what}: nothing came from the guest within {seconds:g} s") from None
    except ProtocolError as error:
        stream.break_session(error)
        raise
    except BaseException:
        leave()
        raise


async def send_whole(stream: Stream, data: bytes) -> None:
    """All of a process's stdin, and its end; the process may end first."""
    with contextlib.suppress(LLM4AgentsError):
        await stream.send(data)
        await stream.send_eof()


async def send_signal(stream: Stream, number: int) -> None:
    """To the process group of a stream. Raises InvalidRequestError for what is no signal."""
    if not 1 <= number <= 64:
        raise InvalidRequestError(f"{number} is not a signal", hint="1 to 64")
    await stream.send_signal(number)


class _OnStream:
    """What lives as long as a stream; leaving it as a context manager cancels what has not ended."""

    def __init__(self, stream: Stream, what: str) -> None:
        self._stream = stream
        self._what = what

    def cancel(self) -> None:
        """End it in the guest, without waiting; what has arrived is dropped. Idempotent."""
        self._stream.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Process(_OnStream):
    """A process in the guest. Iterate for (STDOUT | STDERR, bytes) as they come; then `wait`.

    Output that is not taken holds up the process (and nothing else) once 256 KiB of it wait. `wait` drops
    output that nobody is iterating over.
    """

    def __init__(self, stream: Stream, what: str, pid: int, timeout_s: float | None, has_stdin: bool) -> None:
        super().__init__(stream, what)
        self.pid = pid
        self._has_stdin = has_stdin
        self._loop = asyncio.get_running_loop()
        self._deadline = None if timeout_s is None else self._loop.time() + timeout_s
        self._iterating = self._waiting = 0
        self._feeder: asyncio.Task[None] | None = None
        self.is_service = False

    def _patience(self) -> float | None:
        """How long to wait for the agent now: it enforces the timeout, we only doubt it."""
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time()) + EXEC_GRACE_S

    def __aiter__(self) -> AsyncGenerator[tuple[int, bytes], None]:
        return self._output()

    async def _output(self) -> AsyncGenerator[tuple[int, bytes], None]:
        self._iterating += 1
        try:
            while True:
                if self._stream.pending():
                    item = await self._stream.receive()
                else:
                    async with within(self._stream, self._patience(), self._what):
                        item = await self._stream.receive()
                if item is None:
                    return
                yield item
        finally:
            self._iterating -= 1
            if self._waiting and not self._iterating:
                self._stream.discard()

    async def write_stdin(self, data: bytes) -> None:
        """Waits while the process does not read. Raises ConflictError when it has ended or has no stdin."""
        if not self._has_stdin:
            raise ConflictError("the process was started without stdin", hint="pass stdin=True to exec")
        await self._stream.send(data)

    async def close_stdin(self) -> None:
        if self._has_stdin:
            await self._stream.send_eof()

    def feed(self, data: bytes) -> None:
        """Write `data` to stdin and close it, beside whatever else is done; a process may end first."""
        self._feeder = asyncio.create_task(send_whole(self._stream, data))

    async def signal(self, number: int) -> None:
        """Send a signal to the whole process group. Raises ConflictError when the process has ended."""
        await send_signal(self._stream, number)

    def cancel(self) -> None:
        """Kill the whole process group, without waiting; output that has not been taken is dropped."""
        if self._feeder is not None:
            self._feeder.cancel()
        super().cancel()

    async def wait(self) -> ExitStatus:
        """How the process ended. Raises TimedOutError when the agent is silent past the exec's own timeout.

        Can be called again, and by several tasks; when one of them is cancelled, so is the process. After
        `cancel` it tells of SIGKILL.
        """
        if not self._iterating:
            self._stream.discard()
        self._waiting += 1
        try:
            while True:
                patience = EXEC_GRACE_S if self._stream.cancelled else self._patience()
                if await self._ended_within(patience):
                    break
            async with within(self._stream, EXEC_GRACE_S, self._what):
                end = await self._stream.end()
                return ExitStatus(0, None) if self.is_service else ExitStatus.read(end)
        except GuestError as error:
            if error.details.get("code") == "cancelled":
                return ExitStatus(None, 9)
            raise
        finally:
            self._waiting -= 1

    async def _ended_within(self, patience: float | None) -> bool:
        """Wait for END or ERROR; False when output is still being taken, which is no silence of the agent."""
        try:
            async with asyncio.timeout(patience):
                await self._stream.ended()
        except TimeoutError:
            if self._iterating and self._stream.has_arrived():
                return False
            self._stream.cancel()
            raise TimedOutError(
                f"{self._what}: the agent did not say how it ended {EXEC_GRACE_S:g} s past its timeout"
            ) from None
        except BaseException:
            self._stream.cancel()
            raise
        return True


class ByteStream(_OnStream):
    """A file being read: iterate for its bytes. `info` is what the file was when it was opened."""

    def __init__(self, stream: Stream, what: str, info: FileInfo, length: int | None) -> None:
        super().__init__(stream, what)
        self.info = info
        self._length = length
        self._count = 0

    def __aiter__(self) -> AsyncGenerator[bytes, None]:
        return self._chunks()

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                if self._stream.pending():
                    item = await self._stream.receive()
                else:
                    async with within(self._stream, STALL_TIMEOUT_S, self._what):
                        item = await self._stream.receive()
                if item is None:
                    break
                self._count += len(item[1])
                if self._length is not None and self._count > self._length:
                    error = ProtocolError("the guest sent more of a file than was asked for")
                    self._stream.break_session(error)
                    raise error
                yield item[1]
            async with within(self._stream, VERB_TIMEOUT_S, self._what):
                end = await self._stream.end()
                if end.integer("bytes") != self._count:
                    raise ProtocolError("the guest sent another number of bytes than it says it did")
        finally:
            self._stream.cancel()

    async def read(self, bytes_max: int) -> bytes:
        """All of it. Raises InvalidRequestError (and stops reading) when it is more than `bytes_max`."""
        chunks: list[bytes] = []
        async with contextlib.aclosing(self._chunks()) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                if self._count > bytes_max:
                    raise InvalidRequestError(
                        f"{self._what}: more than {bytes_max} bytes",
                        hint="read it as a stream, or a part of it",
                    )
        return b"".join(chunks)


class GuestSocket(_OnStream):
    """A connection inside the guest."""

    async def read(self) -> bytes:
        """The next bytes; empty when the other end has closed its side. Waits as long as it takes."""
        item = await self._stream.receive()
        return b"" if item is None else item[1]

    def has_arrived(self) -> bool:
        """Whether bytes wait to be read."""
        return self._stream.has_arrived()

    def has_moved(self) -> bool:
        """Whether bytes wait to be read, or the other end has closed its side or is gone."""
        return self._stream.pending()

    async def write(self, data: bytes) -> None:
        """Waits while the other end does not read."""
        await self._stream.send(data)

    async def close_write(self) -> None:
        """Tell the other end that nothing more comes."""
        await self._stream.send_eof()

    def close(self) -> None:
        """Close both sides at once. Idempotent."""
        self._stream.cancel()
