"""The other side of a link without a virtual machine: frames by hand, and a network stack that plays the guest.

A real namespace with the guest's addresses, its interface joined to the link's tap by a thread that copies frames.
Everything between is the kernel's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llm4agents import limits
from llm4agents.barrier.link.links import SPEC, Link, Links
from llm4agents.barrier.workers import Worker

T = TypeVar("T")
Socket = socket.socket
_libc = ctypes.CDLL(None, use_errno=True)
GUEST_MAC, GATEWAY_MAC = (
    bytes.fromhex(mac.replace(":", "")) for mac in (limits.GUEST_MAC, limits.GATEWAY_MAC)
)
SO_ORIGINAL_DST = 80


# -- the link process --


class Spawned:
    """A link process of the test's own, on an event loop of its own: for tests without one."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="l4a-link-")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        home = Path(self._home.name)
        self.worker = self.call(self._start(home))

    @staticmethod
    async def _start(home: Path) -> Worker:
        worker = Worker(SPEC, run=home, state=home, version="test")
        await worker.start()
        return worker

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self.call(self.worker.close(keep=False))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._home.cleanup()


class Pool:
    """`Links` for tests without an event loop."""

    def __init__(self, spawned: Spawned) -> None:
        self.spawned = spawned
        self.links = Links(spawned.worker, ready=0)

    def take(self) -> Link:
        return self.spawned.call(self.links.take())

    def packet_socket(self, netns: int) -> int:
        return self.spawned.call(self.links.packet_socket(netns))

    def check(self) -> str | None:
        return self.spawned.call(self.links.check())


@contextlib.contextmanager
def pool() -> Iterator[Pool]:
    spawned = Spawned()
    try:
        yield Pool(spawned)
    finally:
        spawned.close()


# -- the guest --


class Guest:
    """A stack with the guest's addresses on the other end of `link`'s tap. `run` calls a function in it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._thread = ThreadPoolExecutor(1)
        self._end_r, self._end_w = os.pipe()
        self._tap = self.run(self._enter)
        self._pump = threading.Thread(target=self._copy)
        self._pump.start()

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        return self._thread.submit(function, *arguments).result(60)

    def socket(self, *kind: int) -> Socket:
        sock = self.run(socket.socket, *kind)
        sock.settimeout(10)
        return sock

    def connect(self, address: str, port: int) -> Socket:
        sock = self.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.connect((address, port))
        except BaseException:
            sock.close()
            raise
        return sock

    def _enter(self) -> int:
        assert _libc.unshare(0x4000_0000) == 0
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tap, 0x4004_54CA, struct.pack("16sH22x", b"eth0", 0x1002))
        for command in (
            f"link set eth0 address {limits.GUEST_MAC}",
            f"addr add {limits.GUEST_ADDRESS}/{limits.LINK_PREFIX} dev eth0",
            "link set eth0 up",
            f"route add default via {limits.GATEWAY_ADDRESS}",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        return tap

    def _copy(self) -> None:
        while True:
            ready, _, _ = select.select([self._link.tap, self._tap, self._end_r], [], [])
            if self._end_r in ready:
                return
            for source, target in ((self._link.tap, self._tap), (self._tap, self._link.tap)):
                if source in ready:
                    with contextlib.suppress(BlockingIOError):
                        while True:
                            os.write(target, os.read(source, 65536))

    def close(self) -> None:
        os.write(self._end_w, b"x")
        self._pump.join()
        self._thread.shutdown()
        for fd in (self._tap, self._end_r, self._end_w):
            os.close(fd)


def original(connection: socket.socket) -> tuple[str, int]:
    """Where an accepted connection was meant for."""
    port, address = struct.unpack("!2xH4s8x", connection.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16))
    return socket.inet_ntoa(address), port


# -- frames --


def frame(
    payload: bytes,
    *,
    kind: int = 0x0800,
    source: bytes = GUEST_MAC,
    target: bytes = GATEWAY_MAC,
) -> bytes:
    return target + source + struct.pack("!H", kind) + payload


def checksum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ip(
    payload: bytes, protocol: int, target: str, *, source: str = limits.GUEST_ADDRESS, fragment: int = 0
) -> bytes:
    def header(sum_: int) -> bytes:
        return struct.pack(
            "!BBHHHBBH4s4s",
            0x45,
            0,
            20 + len(payload),
            1,
            fragment,
            64,
            protocol,
            sum_,
            socket.inet_aton(source),
            socket.inet_aton(target),
        )

    return header(checksum(header(0))) + payload


def udp(data: bytes, port: int, *, source_port: int = 4000) -> bytes:
    return struct.pack("!HHHH", source_port, port, 8 + len(data), 0) + data


def tcp(
    target: str,
    port: int,
    *,
    flags: int = 0x02,
    source: str = limits.GUEST_ADDRESS,
    source_port: int = 4000,
    data: bytes = b"",
) -> bytes:
    def segment(sum_: int) -> bytes:
        return struct.pack("!HHIIBBHHH", source_port, port, 7, 9, 0x50, flags, 65535, sum_, 0) + data

    pseudo = socket.inet_aton(source) + socket.inet_aton(target) + struct.pack("!BBH", 0, 6, 20 + len(data))
    return segment(checksum(pseudo + segment(0)))


def ping(data: bytes = b"exfiltrated") -> bytes:
    body = struct.pack("!BBHHH", 8, 0, 0, 7, 1) + data
    return body[:2] + struct.pack("!H", checksum(body)) + body[4:]


def arp(
    about: str,
    *,
    operation: int = 1,
    mac: bytes = GUEST_MAC,
    source: str = limits.GUEST_ADDRESS,
    source_mac: bytes = GUEST_MAC,
) -> bytes:
    body = struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation) + mac + socket.inet_aton(source)
    return frame(
        body + bytes(6) + socket.inet_aton(about), kind=0x0806, source=source_mac, target=b"\xff" * 6
    )


def frames(tap: int, timeout_s: float = 2.0) -> Iterator[bytes]:
    """What the host sends to the guest, until nothing has come for so long."""
    while select.select([tap], [], [], timeout_s)[0]:
        with contextlib.suppress(BlockingIOError):
            yield os.read(tap, 65536)


# -- the log --


@dataclass(frozen=True)
class Logged:
    prefix: str
    ethertype: int
    payload: bytes

    @property
    def destination(self) -> str:
        return socket.inet_ntoa(self.payload[16:20])


def parse(raw: bytes) -> Iterator[Logged]:
    """The NFLOG messages of one read."""
    while len(raw) >= 16:
        size, kind = struct.unpack_from("IH", raw)
        if kind == 4 << 8:
            attributes = dict(_attributes(raw[20:size]))
            yield Logged(
                attributes[10].rstrip(b"\0").decode(),
                struct.unpack_from("!H", attributes[1])[0],
                attributes.get(9, b""),
            )
        raw = raw[(size + 3) & ~3 :]


def _attributes(raw: bytes) -> Iterator[tuple[int, bytes]]:
    while len(raw) >= 4:
        size, kind = struct.unpack_from("HH", raw)
        yield kind & 0x7FFF, raw[4:size]
        raw = raw[(size + 3) & ~3 :]


class Log:
    """Everything a link's packet socket has said so far; waits for more."""

    def __init__(self, packets: int) -> None:
        self._sock = socket.socket(fileno=os.dup(packets))
        self.seen: list[Logged] = []

    def wait(self, prefix: str, *, after: int = 0, timeout_s: float = 5.0) -> Logged:
        """The first of that prefix from index `after` on. Fails when none comes."""
        while True:
            for logged in self.seen[after:]:
                if logged.prefix == prefix:
                    return logged
            assert select.select([self._sock], [], [], timeout_s)[0], f"no {prefix} among {self.seen}"
            self.read()

    def read(self) -> list[Logged]:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.seen += parse(self._sock.recv(1 << 18))
        return self.seen

    def close(self) -> None:
        self._sock.close()


# -- the end of a namespace --


class Watched:
    """Knows when the kernel has taken a namespace down. It holds nothing of it: the id ours gives it goes with it."""

    def __init__(self, netns: int) -> None:
        self._sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        self._sock.bind((0, 0))
        # RTM_NEWNSID: NETNSA_NSID (-1: any), NETNSA_FD. One that has an id already keeps it.
        body = struct.pack("B3x", 0) + struct.pack("HHi", 8, 1, -1) + struct.pack("HHI", 8, 3, netns)
        error = self._ask(88, 0x1 | 0x4, body)
        assert struct.unpack_from("i", error, 16)[0] in (0, -errno.EEXIST)
        answer = self._ask(90, 0x1, struct.pack("B3x", 0) + struct.pack("HHI", 8, 3, netns))
        (self.nsid,) = struct.unpack_from("i", answer, 16 + 4 + 4)

    def _ask(self, kind: int, flags: int, body: bytes) -> bytes:
        self._sock.send(struct.pack("IHHII", 16 + len(body), kind, flags, 1, 0) + body)
        return self._sock.recv(65536)

    def gone(self) -> bool:
        # RTM_GETNSID, NLM_F_DUMP: every id there is.
        self._sock.send(struct.pack("IHHIIB3x", 20, 90, 0x1 | 0x300, 1, 0, 0))
        found: set[int] = set()
        while True:
            raw = self._sock.recv(65536)
            while len(raw) >= 16:
                size, kind = struct.unpack_from("IH", raw)
                if kind == 3:  # NLMSG_DONE
                    return self.nsid not in found
                found.add(struct.unpack_from("i", raw, 16 + 4 + 4)[0])
                raw = raw[(size + 3) & ~3 :]

    def close(self) -> None:
        self._sock.close()
