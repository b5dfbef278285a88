"""The interceptor: its control ops, the flows the gateway hands over, and what goes back to the gateway.

Runs in an environment of its own (`environment`), as a uid of its own. The CA's key and the secrets' values are in this
process's memory and nowhere else; it is not dumpable and has no core (`worker_side.harden`).
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import os
import socket
import time
from collections import Counter, deque
from typing import Any

from mitmproxy.version import VERSION

from llm4agents import limits
from llm4agents.barrier import resolvers, sockets, wire
from llm4agents.barrier.dial import Dialler
from llm4agents.barrier.intercept import http1, messages
from llm4agents.barrier.intercept.box import Box
from llm4agents.barrier.intercept.certificates import Authority, Origins, rehearse
from llm4agents.barrier.intercept.connection import Connection, broken
from llm4agents.barrier.policy import Policy, Target
from llm4agents.barrier.worker_side import Refused, Side
from llm4agents.errors import InvalidRequestError

TICK_S = 1.0
_CODECS = ("ascii", "latin-1", "utf-8", "utf-8-sig", "idna", "punycode", "unicode-escape")


class Gateway:
    """The socket to the gateway: flows come in, records go out; what it does not take in time is summed up."""

    def __init__(self, interceptor: Interceptor, sock: socket.socket) -> None:
        sock.setblocking(False)
        wire.enlarge(sock)
        self._interceptor, self._sock = interceptor, sock
        self._out: deque[bytes] = deque()
        self._dropped: Counter[str | None] = Counter()
        """Records of each sandbox that were not taken in time."""
        self._writing = False
        asyncio.get_running_loop().add_reader(sock, self._read)

    @property
    def alive(self) -> bool:
        return self._sock.fileno() >= 0

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._sock)
            loop.remove_writer(self._sock)
            self._sock.close()

    def tell(self, message: dict[str, Any]) -> None:
        if self._sock.fileno() < 0:
            return
        if len(self._out) >= limits.INTERCEPT_AUDIT_QUEUED_MAX and "record" in message:
            self._dropped[message["record"].get("sandbox")] += 1
            return  # (the end of a connection is always told: somebody counts them)
        with contextlib.suppress(wire.WireError):
            self._out.append(wire.encode(message))
        self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._out:
            try:
                self._sock.send(self._out[0])
            except BlockingIOError:
                if not self._writing:
                    self._writing = True
                    loop.add_writer(self._sock, self._flush)
                return
            except OSError:
                self.close()
                return
            self._out.popleft()
            if self._dropped and len(self._out) < limits.INTERCEPT_AUDIT_QUEUED_MAX // 2:
                dropped, self._dropped = self._dropped, Counter()
                for sandbox, lost in dropped.items():
                    record = {"at": round(time.time(), 3), "sandbox": sandbox, "kind": "gateway", "verdict": "allow",
                              "repeated": lost,
                              "reason": "records of requests that were not taken in time"}  # fmt: skip
                    self._out.append(wire.encode({"event": "audit", "record": record}))
        if self._writing:
            self._writing = False
            loop.remove_writer(self._sock)

    def _read(self) -> None:
        for _ in range(32):
            try:
                message, fds = wire.receive(self._sock)
            except BlockingIOError:
                return
            except wire.WireError:
                self.close()
                return
            if "flow" not in message or len(fds) != 1:
                wire.close(fds)
                continue
            self._interceptor.begin(self, message, socket.socket(fileno=fds[0]))


class Interceptor:
    """Everything this process knows. Belongs to one event loop."""

    def __init__(self, origins: Origins) -> None:
        self.origins = origins
        self.authority: Authority | None = None
        self.dialler = Dialler(os.environ)
        self.boxes: dict[str, Box] = {}
        self.gateway: Gateway | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.totals = {"flows": 0, "cut": 0, "bytes_in": 0, "bytes_out": 0}

    # -- control ------------------------------------------------------------------------------------------

    def ops(self) -> dict[str, Any]:
        return {
            "ca": self._ca,
            "join": self._join,
            "policy": self._policy,
            "secrets": self._secrets,
            "leave": self._leave,
            "accept": self._accept,
            "stats": self._stats,
        }

    async def _ca(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        wire.close(fds)
        try:
            self.authority = Authority(message["certificate"], message["key"])
        except Exception as error:  # its words may quote the key
            raise Refused(f"the CA cannot be used ({type(error).__name__})") from None
        return {}

    async def _join(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        wire.close(fds)
        ident, policy = str(message["sandbox"]), _policy(message)
        box = self.boxes.get(ident)
        if box is None:
            self.boxes[ident] = Box(ident, policy, message.get("secrets") or {}, self._write)
            return {"cut": 0}
        box.know(message.get("secrets") or {}, add=False)
        return {"cut": box.obey(policy)}

    async def _policy(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        wire.close(fds)
        box = self._box(message)
        flows = len(box.connections)
        cut = box.obey(_policy(message))
        self.totals["cut"] += cut
        return {"flows": flows, "cut": cut}

    async def _secrets(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        wire.close(fds)
        self._box(message).know(message.get("secrets") or {}, add=bool(message.get("add")))
        return {}

    async def _leave(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        wire.close(fds)
        box = self.boxes.pop(str(message.get("sandbox")), None)
        cut = 0
        if box is not None:
            cut = len(box.connections)
            box.end(changed=bool(message.get("changed")))
        return {"cut": cut}

    async def _accept(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if len(fds) != 1:
            wire.close(fds)
            raise Refused("accept takes one descriptor")
        if self.gateway is not None:
            self.gateway.close()
        self.gateway = Gateway(self, socket.socket(fileno=fds[0]))
        return {}

    async def _stats(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        wire.close(fds)
        pages = int(open("/proc/self/statm").read().split()[1])  # noqa: SIM115, PTH123, ASYNC230
        return {
            "sandboxes": len(self.boxes),
            "flows": sum(len(box.connections) for box in self.boxes.values()),
            "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            "totals": self.totals,
            "mitmproxy": VERSION,
            "ca_certificates": self.origins.certificates,
        }

    def _box(self, message: dict[str, Any]) -> Box:
        box = self.boxes.get(str(message.get("sandbox")))
        if box is None:
            raise Refused(f"no sandbox {message.get('sandbox')!r} here: join it first")
        return box

    def served(self) -> list[str]:
        """Whom this process stays for: without a gateway nobody can come, and ends of sandboxes are not told here."""
        return list(self.boxes) if self.gateway is not None and self.gateway.alive else []

    # -- flows --------------------------------------------------------------------------------------------

    def begin(self, gateway: Gateway, message: dict[str, Any], client: socket.socket) -> None:
        """A connection of a guest, nothing of which has been read."""
        task = asyncio.create_task(self._serve(gateway, message, client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, gateway: Gateway, message: dict[str, Any], client: socket.socket) -> None:
        flow = str(message["flow"])
        sent = received = 0
        denied = dict[str, str]()
        try:
            box = self.boxes.get(str(message.get("sandbox")))
            encrypted = bool(message.get("tls"))
            if box is None or flow in box.connections or (encrypted and self.authority is None):
                sockets.reset(client)
                return
            name = message.get("name")
            asked = Target(name, None if name else message["address"], int(message["port"]))
            sockets.no_delay(client)
            connection = await Connection.open(self, box, client, flow=flow, asked=asked, encrypted=encrypted)
            box.connections[flow] = connection
            if self.boxes.get(box.id) is not box:  # it left meanwhile, and its end did not find this one
                connection.cut("the sandbox has ended")
            self.totals["flows"] += 1
            try:
                await connection.run()
            finally:
                sent, received = connection.sent, connection.received
                denied = connection.denied()
                box.connections.pop(flow, None)
        except Exception as error:
            broken(error)
            client.close()
        finally:
            self.totals["bytes_in"] += sent
            self.totals["bytes_out"] += received
            gateway.tell({"event": "ended", "flow": flow, "bytes_in": sent, "bytes_out": received} | denied)

    def _write(self, record: dict[str, Any]) -> None:
        if self.gateway is not None:
            self.gateway.tell({"event": "audit", "record": record})

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for box in self.boxes.values():
                for connection in list(box.connections.values()):
                    connection.expire(now)


def _policy(message: dict[str, Any]) -> Policy:
    try:
        return Policy.from_json(message["policy"])
    except (InvalidRequestError, KeyError, TypeError) as error:
        raise Refused(f"the policy cannot be read: {error}") from None


class _Quiet(logging.Handler):
    """mitmproxy's and asyncio's words may quote traffic: only that something broke is kept, and where."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            broken(record.exc_info[1])


async def _run(interceptor: Interceptor) -> None:
    side = Side(interceptor.ops(), sandboxes=interceptor.served)
    ticking = asyncio.create_task(interceptor.tick())
    try:
        await side.run()
    finally:
        ticking.cancel()
        for box in interceptor.boxes.values():
            box.end()


def main() -> None:
    logging.basicConfig(level=logging.ERROR, handlers=[_Quiet()], force=True)
    http1.install()
    messages.install()
    # Read and imported while we still may: afterwards we are somebody else.
    origins = Origins(os.environ)
    rehearse()
    resolvers.known()
    for name in _CODECS:
        codecs.lookup(name)

    async def go() -> None:
        await _run(Interceptor(origins))

    asyncio.run(go())
