"""The process of one capture: reads a packet socket, writes pcap files in its own directory.

It outlives the server and ends its capture with the VM (the pidfd it was given). Requests: `start {sandbox, bytes_max,
fresh}` + fds (packet socket, pidfd), `stats`. Standard library only. It parses no packet.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from typing import Any

from llm4agents.barrier import wire
from llm4agents.barrier.capture.pcap import CURRENT, OLDER, SNAP_BYTES, Writer
from llm4agents.barrier.worker_side import DIRECTORY, Answer, Refused, Side

FLUSH_S = 0.1
BATCH = 256
BUFFER_BYTES = 8 * 1_048_576
_SO_TIMESTAMPNS = 35
_SOL_PACKET, _PACKET_STATISTICS = 263, 6


class Capture:
    """A capture under way. Belongs to one event loop."""

    def __init__(self, sandbox: str, sock: socket.socket, pidfd: int, writer: Writer) -> None:
        self.sandbox, self.packets, self._dropped = sandbox, 0, 0
        self._sock, self._pidfd, self._writer = sock, pidfd, writer
        self._flushing: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        loop = asyncio.get_running_loop()
        loop.add_reader(sock, self._read)
        loop.add_reader(pidfd, self.close)

    @property
    def over(self) -> bool:
        return self._pidfd < 0

    def dropped(self) -> int:
        """What neither kernel nor disk had room for."""
        if not self.over:
            with contextlib.suppress(OSError):
                said = self._sock.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
                self._dropped += struct.unpack("II", said)[1]  # since it was last asked
        return self._dropped + self._writer.lost

    def _read(self) -> None:
        for _ in range(BATCH):
            try:
                packet, ancillary, _, _ = self._sock.recvmsg(SNAP_BYTES, 64, socket.MSG_TRUNC)
            except BlockingIOError:
                break
            except OSError:  # the tap is down: its machine has ended
                break
            at_ns = time.time_ns()
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS) and len(data) >= 16:
                    seconds, nanoseconds = struct.unpack_from("qq", data)
                    at_ns = seconds * 10**9 + nanoseconds
            self._writer.add(at_ns, packet, len(packet))
            self.packets += 1
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        self._writer.flush()

    def close(self) -> None:
        """Idempotent. What has arrived is written."""
        if self.over:
            return
        self._read()
        self._dropped = self.dropped() - self._writer.lost
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        loop.remove_reader(self._pidfd)
        self.flush()
        self._sock.close()
        os.close(self._pidfd)
        self._pidfd = -1


class Process:
    """What this process can be asked."""

    def __init__(self) -> None:
        self.capture: Capture | None = None

    async def start(self, message: dict[str, Any], fds: list[int]) -> Answer:
        if len(fds) != 2:
            wire.close(fds)
            raise Refused("start takes a packet socket and a pidfd")
        sock, pidfd = socket.socket(fileno=fds[0]), fds[1]
        self.close()
        if message.get("fresh"):
            for name in (CURRENT, OLDER):
                (DIRECTORY / name).unlink(missing_ok=True)
        writer = Writer(DIRECTORY, int(message["bytes_max"]))
        self.capture = Capture(str(message["sandbox"]), sock, pidfd, writer)
        return {}

    async def stats(self, message: dict[str, Any], fds: list[int]) -> Answer:
        wire.close(fds)
        if self.capture is None:
            return {"capturing": False}
        self.capture.flush()
        state = {"packets": self.capture.packets, "dropped": self.capture.dropped()}
        return {"capturing": not self.capture.over, **state}

    def sandboxes(self) -> list[str]:
        return [self.capture.sandbox] if self.capture is not None and not self.capture.over else []

    def close(self) -> None:
        if self.capture is not None:
            self.capture.close()


async def main() -> None:
    process = Process()
    try:
        await Side({"start": process.start, "stats": process.stats}, sandboxes=process.sandboxes).run()
    finally:
        process.close()


if __name__ == "__main__":
    asyncio.run(main())
