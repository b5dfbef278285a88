"""An internet of the tests' own: two network namespaces, every address of the world, and a record of what arrives.

    server under test ── namespace "host" ──veth── namespace "world": any address answers (`origins`), names resolve
                                                    as the test wants, and every packet is seen (`Witness`)

The server and all it starts run in "host" (`Lab.enter` is the prefix of its command), whose files resolv.conf and
hosts are the lab's. So "nothing arrived" is read off the wire and the listeners, and the same request arrives when
policy allows it. Not for tests that need the real internet.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import selectors
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from tests.barrier.authority import Authority
from tests.barrier.origins import Origins
from tests.barrier.world import HOST, HOST6, NAMES, WORLD, WORLD6, Arrival, Mark, Packet, Query, dissect
from tests.support import eventually

T = TypeVar("T")

_DNS_TYPES = {
    1: "A",
    5: "CNAME",
    12: "PTR",
    15: "MX",
    16: "TXT",
    28: "AAAA",
    33: "SRV",
    65: "HTTPS",
    255: "ANY",
}
_SETTLED = b"\x88\xb5"
"""The EtherType of the lab's own frames (for experiments: IEEE 802)."""
# Everything but those TCP packets of the host itself that open nothing: a gigabyte streamed through is no news to the
# witness. tcpdump -dd 'not (src host HOST and tcp and tcp[13]&2=0 or src host HOST6 and ip6[6]=6 and ip6[53]&2=0)'
_FILTER = (
    (0x28, 0, 0, 12), (0x15, 0, 9, 0x800), (0x20, 0, 0, 26), (0x15, 0, 23, 0xc6336402), (0x30, 0, 0, 23), (0x15,
    0, 21, 6), (0x28, 0, 0, 20), (0x45, 19, 0, 0x1fff), (0xb1, 0, 0, 14), (0x50, 0, 0, 27), (0x45, 16, 15, 2),
    (0x15, 15, 0, 0x806), (0x15, 14, 0, 0x8035), (0x15, 0, 13, 0x86dd), (0x20, 0, 0, 22), (0x15, 0, 11,
    0x20010db8), (0x20, 0, 0, 26), (0x15, 0, 9, 0x10000), (0x20, 0, 0, 30), (0x15, 0, 7, 0), (0x20, 0, 0, 34),
    (0x15, 0, 5, 2), (0x30, 0, 0, 20), (0x15, 0, 3, 6), (0x30, 0, 0, 67), (0x45, 1, 0, 2), (0x6, 0, 0, 0), (0x6,
    0, 0, 0x40000),
)  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


def within(namespace: Path, make: Callable[[], T]) -> T:
    """`make()` in a network namespace: sockets it makes stay there, and no thread of ours does."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            with namespace.open() as handle:
                if _libc.setns(handle.fileno(), 0x4000_0000):
                    raise OSError(ctypes.get_errno(), f"setns {namespace}")
            answer.set_result(make())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answer.result()


def run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
    return done.stdout


class Lab:
    """Entered, it exists; left, nothing of it does (asserted). Needs root."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.names: dict[str, list[str] | Callable[[], list[str]]] = dict(NAMES)
        """Of the world's resolver; a function is asked each time (rebinding). Others do not exist."""
        self.arrivals: list[Arrival] = []
        self.queries: list[Query] = []
        self.packets: deque[Packet] = deque(maxlen=100_000)
        self.seen = 0
        self.lock = threading.Lock()
        tag = f"l4a-lab-{os.getpid()}"
        self.host, self.world = Path(f"/run/netns/{tag}-h"), Path(f"/run/netns/{tag}-w")
        self._threads: list[threading.Thread] = []
        self._sockets: set[socket.socket] = set()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()

    # -- life

    def __enter__(self) -> Lab:
        try:
            self._lay()
            self.authority = Authority(self.home)
            self.trusted = self.authority.context(self.home, [*NAMES, "*.example.com"])
            self.trusted_h2 = self.authority.context(self.home, ["h2.example.com"], alpn="h2")
            self.untrusted = Authority(self.home, "elsewhere").context(self.home, ["untrusted.example.com"])
            self._selector.register(self._wake, selectors.EVENT_READ, None)
            within(self.world, self._listen)
            self.origins = Origins(self)
            within(self.world, self.origins.listen)
            within(self.host, self.origins.listen_on_host)
            self._start(self._loop)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lay(self) -> None:
        host, world = self.host.name, self.world.name
        run("ip", "netns", "add", host)
        run("ip", "netns", "add", world)
        run("ip", "-n", host, "link", "add", "up0", "type", "veth", "peer", "name", "down0", "netns", world)
        for name, device, four, six in ((host, "up0", HOST, HOST6), (world, "down0", WORLD, WORLD6)):
            run("ip", "-n", name, "addr", "add", f"{four}/24", "dev", device)
            run("ip", "-n", name, "addr", "add", f"{six}/64", "dev", device, "nodad")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", device, "up")
        run("ip", "-n", host, "route", "add", "default", "via", WORLD)
        run("ip", "-n", host, "-6", "route", "add", "default", "via", WORLD6)
        # Also what a host's routes would not lead to the world: that a packet goes nowhere must be policy's work.
        run("ip", "-n", host, "route", "add", "169.254.0.0/16", "via", WORLD, "dev", "up0")
        # Every address is the world's: what listens on all addresses is all origins there are.
        run("ip", "-n", world, "route", "add", "local", "0.0.0.0/0", "dev", "lo", "table", "main")
        run("ip", "-n", world, "-6", "route", "add", "local", "::/0", "dev", "lo", "table", "main")
        (self.home / "resolv.conf").write_text(f"nameserver {WORLD}\noptions timeout:1 attempts:1\n")
        (self.home / "hosts").write_text("127.0.0.1 localhost\n")
        (self.home / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")

    def close(self) -> None:
        self._closing = True
        self._waker.send(b"x")
        with self.lock:
            sockets = list(self._sockets)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._waker.close()
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for namespace in (self.host, self.world):
            if namespace.exists():
                run("ip", "netns", "del", namespace.name)
        assert not self.host.exists() and not self.world.exists()
        assert not left, f"the lab's host still had processes: {left}"
        assert not alive, f"threads of origins did not end: {alive}"

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        thread.start()

    # -- the server under test

    def enter(self) -> list[str]:
        """What a command's argv begins with so that it runs on the lab's host; its pid stays its own."""
        binds = "".join(
            f"mount --bind {self.home / name} /etc/{name} && "
            for name in ("resolv.conf", "hosts", "nsswitch.conf")
        )
        return [
            "nsenter", f"--net={self.host}", "unshare", "--mount", "--propagation", "private",
            "/bin/sh", "-c", f'{binds}exec "$@"', "sh",
        ]  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """Of a server in the lab: it trusts the lab's authority and no other, and has no proxy."""
        empty = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
        return {
            **dict.fromkeys(
                ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"), str(self.authority.certificate)
            ),
            "SSL_CERT_DIR": str(self.home / "no-certificates"),
            **dict.fromkeys(empty, ""),
            **{name.lower(): "" for name in empty},
        }

    def processes(self) -> dict[int, str]:
        """Those that run in the lab's host namespace, by pid: their command lines."""
        if not self.host.exists():
            return {}
        inode, found = self.host.stat().st_ino, {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "ns" / "net").stat().st_ino == inode:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def rss(self, module: str) -> dict[int, int]:
        """Bytes of memory of each of the lab's processes whose command line names `module`."""
        found = {}
        for pid, command in self.processes().items():
            with contextlib.suppress(OSError):
                if module in command:
                    status = Path(f"/proc/{pid}/status").read_text()
                    found[pid] = int(status.split("VmRSS:")[1].split()[0]) * 1024
        return found

    # -- positive controls: what the host itself sends does arrive

    def dial(self, address: str, port: int, data: bytes = b"", *, answer: bool = True) -> bytes:
        """TCP from the host, as no guest could: what is answered to `data`."""

        def make() -> bytes:
            with socket.create_connection((address, port), 5) as sock:
                sock.sendall(data)
                return sock.recv(65_536) if answer else b""

        return within(self.host, make)

    def send(self, address: str, port: int, data: bytes) -> None:
        """UDP from the host."""

        def make() -> None:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.sendto(data, (address, port))

        within(self.host, make)

    def send_frame(self, frame: bytes) -> None:
        """Any frame, out of the host's uplink, addressed to the world's."""

        def make() -> None:
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
                sock.bind(("up0", 0))
                sock.send(self.world_mac + frame[6:])

        within(self.host, make)

    # -- what arrived

    def mark(self) -> Mark:
        with self.lock:
            return Mark(len(self.arrivals), self.seen, len(self.queries))

    def settle(self) -> None:
        """Returns when the witness has seen all that had left the host by now."""
        nonce = os.urandom(16)
        self.send_frame(bytes(12) + _SETTLED + nonce)
        eventually(lambda: any(packet.payload[:16] == nonce for packet in list(self.packets)[-200:]))

    def arrived(self, since: Mark, **what: Any) -> list[Arrival]:
        """At listeners since then, with those attributes."""
        with self.lock:
            found = self.arrivals[since.arrivals :]
        return [one for one in found if all(getattr(one, name) == value for name, value in what.items())]

    def asked(self, since: Mark) -> list[Query]:
        """Of the world's resolvers since then, by whomever."""
        with self.lock:
            return self.queries[since.queries :]

    def left(self, since: Mark, *allowed: str) -> list[Packet]:
        """Packets that left the host since then, but for those to `allowed` addresses.

        The host's own neighbour discovery is none of the guest's; queries to the resolver are listed unless allowed.
        """
        with self.lock:
            number = min(self.seen - since.packets, len(self.packets))
            found = list(self.packets)[len(self.packets) - number :] if number else []
        return [
            packet for packet in found if packet.destination not in allowed and not self._own_chatter(packet)
        ]

    def _own_chatter(self, packet: Packet) -> bool:
        if packet.protocol == "arp":
            return packet.source == HOST
        if packet.raw[12:14] == _SETTLED:
            return True
        if packet.protocol == 58 and packet.payload[:1] in (b"\x85", b"\x87", b"\x88", b"\x8f"):
            return packet.raw[6:12] == self.host_mac
        return (
            packet.protocol == 0 and packet.raw[6:12] == self.host_mac
        )  # MLD reports have hop-by-hop options

    # -- the wire and the resolvers

    def _listen(self) -> None:
        self.world_mac = self._mac("down0")
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        program = b"".join(struct.pack("HBBI", *step) for step in _FILTER)
        buffer = ctypes.create_string_buffer(program)
        wire.setsockopt(1, 26, struct.pack("HxxxxxxP", len(_FILTER), ctypes.addressof(buffer)))
        wire.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)  # SO_RCVBUFFORCE: floods are witnessed too
        wire.bind(("down0", 3))
        self._watch(wire, self._on_packet)
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.setsockopt(socket.SOL_IP, 8, 1)  # IP_PKTINFO: answers come from the address that was asked
        udp.bind(("", 53))
        self._watch(udp, self._on_query)

    def _mac(self, device: str) -> bytes:
        words = run("ip", "-n", self.host.name, "link", "show", "up0").split()
        self.host_mac = bytes.fromhex(words[words.index("link/ether") + 1].replace(":", ""))
        words = run("ip", "-n", self.world.name, "link", "show", device).split()
        return bytes.fromhex(words[words.index("link/ether") + 1].replace(":", ""))

    def _watch(self, sock: socket.socket, ready: Callable[[socket.socket], None]) -> None:
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, ready)

    def accept(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        """Each connection of `listener` is served in a thread of its own, and ends with the lab."""

        def ready(listener: socket.socket) -> None:
            with contextlib.suppress(BlockingIOError):
                while True:
                    sock, _ = listener.accept()
                    with self.lock:
                        self._sockets.add(sock)
                    self._start(self._serve, sock, serve)

        self._watch(listener, ready)

    def _serve(self, sock: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        try:
            sock.settimeout(120)
            with contextlib.suppress(OSError, ValueError):  # peers leave as they like
                serve(sock)
        finally:
            with self.lock:
                self._sockets.discard(sock)
            sock.close()

    def _loop(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if key.data is not None and not self._closing:
                    key.data(key.fileobj)

    def _on_packet(self, wire: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                raw, (_, _, kind, *_) = wire.recvfrom(65_536)
                if kind == socket.PACKET_OUTGOING:
                    continue
                with self.lock:
                    self.packets.append(dissect(raw))
                    self.seen += 1

    def _on_query(self, udp: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                raw, ancillary, _, peer = udp.recvmsg(65_536, 64)
                info = next(data for level, kind, data in ancillary if (level, kind) == (socket.SOL_IP, 8))
                answer = self.answer(raw, "udp", socket.inet_ntoa(info[8:12]))
                if answer:
                    # From the address that was asked: ipi_spec_dst.
                    source = struct.pack("I", 0) + info[8:12] + bytes(4)
                    with contextlib.suppress(OSError):
                        udp.sendmsg([answer], [(socket.SOL_IP, 8, source)], 0, peer)

    def answer(self, raw: bytes, over: str, to: str) -> bytes:
        """The answer of a resolver of the world to a query; what it was is recorded."""
        try:
            labels, at = [], 12
            while raw[at]:
                labels.append(raw[at + 1 : at + 1 + raw[at]].decode("latin-1"))
                at += 1 + raw[at]
            kind = int.from_bytes(raw[at + 1 : at + 3], "big")
        except IndexError:
            return b""
        name = ".".join(labels).lower()
        with self.lock:
            self.queries.append(Query(name, _DNS_TYPES.get(kind, str(kind)), over, to))
            found = self.names.get(name)
            addresses = found() if callable(found) else found
        if addresses is None and name.endswith(".evil.example.net"):
            addresses = ["93.184.216.67"]
        records = []
        for address in addresses or []:
            number = ipaddress.ip_address(address)
            if kind == (28 if number.version == 6 else 1):
                records.append(
                    b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, 0, len(number.packed)) + number.packed
                )
        code = 0 if addresses is not None else 3
        head = raw[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, len(records), 0, 0)
        return head + raw[12 : at + 5] + b"".join(records)


@contextlib.contextmanager
def laboratory() -> Iterator[Lab]:
    """A lab in a directory of its own, which the barrier's unprivileged processes can read."""
    with tempfile.TemporaryDirectory(prefix=f"lab-{os.getpid()}-") as home:
        Path(home).chmod(0o755)
        with Lab(Path(home)) as lab:
            yield lab
