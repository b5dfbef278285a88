"""A client of a VMM's REST API: HTTP/1.1 with JSON over one kept connection to a unix socket.

Not here: what the requests mean (each driver's `api`). Not for anything but such a peer: a VMM is not trusted by its
host more than a guest is (a guest may have broken out into it), so heads and bodies are bounded, answers that make no
sense end the connection, nothing waits for ever, and a socket is reached without following a link in its place.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import re
import socket
import stat
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm4agents.errors import ConnectionLostError, VmmError

HEAD_BYTES_MAX = 16_384
BODY_BYTES_MAX = 1 << 20
FAULT_CHARACTERS_MAX = 2_000
REQUEST_TIMEOUT_S = 10.0
_READ_BYTES = 65_536
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: [^\r\n]*)?")


def connect(path: Path) -> socket.socket:
    """A connection to the unix socket `path`, non-blocking. OSError when there is none or nobody listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    fd = -1
    try:
        sock.setblocking(False)
        # Its directory is the VMM's own: what has that name may be a link to a socket of someone else. And through
        # the descriptor, because a socket's path has 107 bytes at most.
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise ConnectionRefusedError(f"{path.name} is no socket")
        sock.connect(f"/proc/self/fd/{fd}")
    except BaseException:
        sock.close()
        raise
    finally:
        if fd >= 0:
            os.close(fd)
    return sock


class UnixHttp:
    """One connection. Requests are answered in the order they were sent and may be sent ahead of answers."""

    def __init__(self, sock: socket.socket, who: str) -> None:
        """Takes the connected socket over; must be made in the event loop that is to serve it. `who`: for messages."""
        sock.setblocking(False)
        self._sock, self._who = sock, who
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[str, asyncio.Future[Any]]] = deque()
        self._out: deque[tuple[memoryview, Sequence[int]]] = deque()
        """What is left to send, and the descriptors that go with its first byte."""
        self._in = bytearray()
        self._head: tuple[int, int] | None = None
        """Status and length of the answer whose body is being read."""
        self.closed = False
        self._loop.add_reader(sock, self._readable)

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout: float = REQUEST_TIMEOUT_S,
        fds: Sequence[int] = (),
    ) -> Any:
        """The JSON of the answer, None when it has no body. `fds`: copies of these descriptors go with it.

        Raises VmmError with the VMM's words when it refuses, ConnectionLostError when it is gone, does not answer in
        `timeout` seconds or answers nonsense; then the connection is closed.
        """
        future = self.send(method, path, body, fds=fds)
        try:
            return await asyncio.wait_for(asyncio.shield(future), timeout)
        except TimeoutError:
            self.close(f"no answer to {method} {path} in {timeout:g} s")
            raise ConnectionLostError(
                f"{self._who} did not answer {method} {path} in {timeout:g} s"
            ) from None

    def send(
        self, method: str, path: str, body: Any = None, *, fds: Sequence[int] = ()
    ) -> asyncio.Future[Any]:
        """Send without waiting; the future holds the answer. `fds` stay open until it is there."""
        future: asyncio.Future[Any] = self._loop.create_future()
        # An answer nobody came back for is not an error of its own.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self.closed:
            future.set_exception(ConnectionLostError(f"the connection to {self._who} is closed"))
            return future
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        self._waiting.append((f"{method} {path}", future))
        self._out.append((memoryview(head.encode("ascii") + b"\r\n" + data), fds))
        self._flush()
        return future

    def close(self, why: str = "closed") -> None:
        """Drop the connection; whoever waits gets ConnectionLostError. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._in.clear()
        self._out.clear()
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(ConnectionLostError(f"the connection to {self._who} ended: {why}"))
        self._waiting.clear()

    def _flush(self) -> None:
        while self._out:
            data, fds = self._out[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data], rights)
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError as error:
                self.close(str(error.strerror))
                return
            if sent < len(data):
                self._out[0] = data[sent:], ()
            else:
                self._out.popleft()
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error.strerror))
            return
        if not data:
            self.close(f"{self._who} closed it")
            return
        self._in += data
        try:
            while not self.closed and self._take():
                pass
        except ValueError as error:
            self.close(f"it sent something that is not its protocol: {error}")

    def _take(self) -> bool:
        """One answer, if all of it is there. ValueError when it is none."""
        if self._head is None:
            end = self._in.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX + 4)
            if end < 0:
                if len(self._in) > HEAD_BYTES_MAX:
                    raise ValueError("a head beyond every bound")
                return False
            head = bytes(self._in[:end])
            del self._in[: end + 4]
            status, length = _parse(head)
            if status < 200:
                return True  # "100 Continue"
            if not self._waiting:
                raise ValueError("an answer nobody asked for")
            self._head = status, length
        status, length = self._head
        if len(self._in) < length:
            return False
        body = bytes(self._in[:length])
        del self._in[:length]
        self._head = None
        # One that cannot be read is still owed to who waits: `close` tells him.
        answer = _json(body) if status < 300 else None
        asked, future = self._waiting.popleft()
        if future.done():
            return True
        if status >= 300:
            future.set_exception(VmmError(f"{self._who} refused {asked}: {fault(body) or status}"))
        else:
            future.set_result(answer)
        return True


def _parse(head: bytes) -> tuple[int, int]:
    """Status and the body's length."""
    first, *lines = head.split(b"\r\n")
    found = _STATUS.fullmatch(first)
    if found is None:
        raise ValueError("no status line")
    status, length = int(found[1]), 0
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise ValueError("a header without a colon")
        match name.strip().lower(), value.strip().lower():
            case b"transfer-encoding", _:
                raise ValueError("a body of unknown length")
            case b"content-length", number:
                if not number.isdigit() or len(number) > 9 or int(number) > BODY_BYTES_MAX:
                    raise ValueError("a body beyond every bound")
                length = int(number)
            case _:
                pass
    return status, length if status != 204 else 0


def _json(body: bytes) -> Any:
    if not body.strip():
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError("a body that is not JSON") from error


def fault(body: bytes) -> str:
    """A refusal's words: Firecracker's `fault_message`, Cloud Hypervisor's causes, or the text as it is. Pure."""
    text = body.decode(errors="replace")
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = text
    if isinstance(said, dict):
        said = said.get("fault_message", text)
    if isinstance(said, list):
        said = ": ".join(str(part) for part in said)
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in str(said)).split())
    return words[:FAULT_CHARACTERS_MAX]
