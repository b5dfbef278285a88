"""Makes the network namespace of one sandbox: tap, addresses, rules, planted sockets. Runs in a child of its own.

A namespace lives by its descriptors: nothing here stays. The tap is *persistent*: its close is nothing to who held it
(a VMM that dies), and it goes with its namespace, which the kernel takes down in the background, many at a time.
Otherwise each close would take the kernel's network lock for some 35 ms, in which no other network could be made.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path
from typing import NoReturn

from llm4agents import limits
from llm4agents.barrier.link import nft
from llm4agents.barrier.link.problems import LinkProblem, Step, System, explain

NAMES = ("tap", "tcp", "udp", "packets", "netns")
"""What `make` returns, in this order."""
TUN = "/dev/net/tun"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CLONE_NEWUSER, _CLONE_NEWNET = 0x1000_0000, 0x4000_0000
_PR_SET_DUMPABLE = 4
_NS_GET_USERNS = 0xB701
_TUNSETIFF, _TUNSETPERSIST = 0x4004_54CA, 0x4004_54CB
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFHWADDR, _SIOCSARP = 0x8922, 0x8924, 0x8955
_ARPHRD_ETHER, _ATF_COM, _ATF_PERM = 1, 0x02, 0x04
_NETLINK_NETFILTER, _NFNL_SUBSYS_ULOG = 12, 4
_ETH_P_ALL = 0x0003

SYSCTLS = {
    # Dropped by the rules anyhow; off, the tap does not speak it of its own.
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
    "net/ipv4/ip_forward": "0",
    # Refusals are answered: one every 10 ms, where the kernel's default is one a second.
    "net/ipv4/icmp_ratelimit": "10",
    "net/ipv4/tcp_max_syn_backlog": "1024",
    # What a guest leaves behind is soon forgotten: entries cost the host memory.
    "net/netfilter/nf_conntrack_tcp_timeout_syn_sent": "20",
    "net/netfilter/nf_conntrack_tcp_timeout_syn_recv": "20",
    "net/netfilter/nf_conntrack_tcp_timeout_time_wait": "5",
    "net/netfilter/nf_conntrack_tcp_timeout_close": "2",
    "net/netfilter/nf_conntrack_udp_timeout": "10",
    "net/netfilter/nf_conntrack_udp_timeout_stream": "20",
}
"""Of the namespace; each is a wish, since /proc/sys may be read-only (containers)."""

_libc = ctypes.CDLL(None, use_errno=True)
_in_user_namespace = False
"""Root only there: what is denied is denied to the user."""


def make() -> list[int]:
    """A new namespace, entered by this process: descriptors in the order of NAMES. Raises LinkProblem."""
    enter_new()
    tap = _tap()
    _settle()
    packets = _packets()
    _rules()
    _up()
    tcp, udp = _planted()
    netns = _opened("/proc/self/ns/net")
    return [tap, tcp, udp, packets, netns]


def packet_socket(netns: int) -> int:
    """A socket that sees every frame on the tap of that namespace, in both directions. Raises LinkProblem."""
    if os.geteuid() != 0:
        # Its user namespace may be that of another link process of this user, who is its owner.
        user = fcntl.ioctl(netns, _NS_GET_USERNS)
        _check("user namespace", _libc.setns(user, _CLONE_NEWUSER))
        os.close(user)
    _check("network namespace", _libc.setns(netns, _CLONE_NEWNET))
    try:
        sock = socket.socket(
            socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 0
        )
        sock.bind((nft.TAP, _ETH_P_ALL))
        return sock.detach()
    except OSError as error:
        _fail("sockets", error)


def enter_new() -> None:
    """Into a network namespace of our own, as an ordinary user in a user namespace of our own too."""
    if os.geteuid() == 0:
        _check("network namespace", _libc.unshare(_CLONE_NEWNET))
        return
    global _in_user_namespace
    uid, gid = os.geteuid(), os.getegid()
    _check("user namespace", _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET))
    _in_user_namespace = True
    # A process that is not dumpable does not own its own files in /proc.
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        _fail("user namespace", error)


def system() -> System:
    """What `explain` wants to know."""

    def sysctl(name: str) -> str:
        with contextlib.suppress(OSError):
            return Path("/proc/sys", name).read_text().strip()
        return ""

    return System(
        root=os.geteuid() == 0 and not _in_user_namespace,
        clone_sysctl=sysctl("kernel/unprivileged_userns_clone"),
        apparmor_sysctl=sysctl("kernel/apparmor_restrict_unprivileged_userns"),
        namespaces_max=sysctl("user/max_user_namespaces"),
    )


def _tap() -> int:
    tun = _opened(TUN, os.O_RDWR | os.O_NONBLOCK, step="tun")
    # Without vnet_hdr: a clone's NIC is its template's, whose backend (a hub port) had none.
    request = struct.pack("16sH22x", nft.TAP.encode(), _IFF_TAP | _IFF_NO_PI)
    try:
        fcntl.ioctl(tun, _TUNSETIFF, request)
        fcntl.ioctl(tun, _TUNSETPERSIST, 1)
        with _control() as control:
            mac = bytes.fromhex(limits.GATEWAY_MAC.replace(":", ""))
            _set(control, _SIOCSIFHWADDR, struct.pack("H6s", _ARPHRD_ETHER, mac))
            _set(control, _SIOCSIFMTU, struct.pack("i", limits.LINK_MTU_BYTES))
            _set(control, _SIOCSIFADDR, _inet(limits.GATEWAY_ADDRESS))
            mask = (0xFFFF_FFFF << (32 - limits.LINK_PREFIX)) & 0xFFFF_FFFF
            _set(control, _SIOCSIFNETMASK, _inet(socket.inet_ntoa(struct.pack("!I", mask))))
    except OSError as error:
        _fail("tap", error)
    return tun


def _settle() -> None:
    for name, value in SYSCTLS.items():
        with contextlib.suppress(OSError):
            # Not Path.write_text, which would make a file where there is none.
            fd = os.open(f"/proc/sys/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, value.encode())
            finally:
                os.close(fd)


def _rules() -> None:
    binary = shutil.which("nft", path=_PATH)
    if binary is None:
        raise LinkProblem(explain("nft", errno.ENOENT, system()))
    try:
        done = subprocess.run(
            [binary, "-f", "-"],
            input=nft.ruleset().encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={"PATH": _PATH, "LANG": "C"},
            timeout=limits.LINK_MAKE_TIMEOUT_S / 2,
        )
    except OSError as error:
        _fail("nft", error)
    except subprocess.TimeoutExpired:
        raise LinkProblem(explain("nft", 0, system(), "nft did not end in time")) from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if "Error" in line]
        raise LinkProblem(
            explain("nft", 0, system(), (lines or [f"nft ended with {done.returncode}"])[0][:300])
        )


def _up() -> None:
    """After the rules. The guest's hardware address is told and not asked for, so that ARP changes nothing."""
    try:
        with _control() as control:
            _set(control, _SIOCSIFFLAGS, struct.pack("h", 0x1))
            mac = bytes.fromhex(limits.GUEST_MAC.replace(":", ""))
            hardware = struct.pack("H6s8x", _ARPHRD_ETHER, mac)
            entry = _inet(limits.GUEST_ADDRESS) + hardware + struct.pack("i", _ATF_COM | _ATF_PERM)
            fcntl.ioctl(control, _SIOCSARP, entry + struct.pack("16x16s", nft.TAP.encode()))
    except OSError as error:
        _fail("tap", error)


def _planted() -> tuple[int, int]:
    flags = socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    try:
        tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM | flags)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind((limits.GATEWAY_ADDRESS, limits.TCP_REDIRECT_PORT))
        tcp.listen(limits.LINK_BACKLOG)
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | flags)
        udp.bind((limits.GATEWAY_ADDRESS, limits.DNS_REDIRECT_PORT))
    except OSError as error:
        _fail("sockets", error)
    return tcp.detach(), udp.detach()


def _packets() -> int:
    """A socket that gets what the rules log: bound to the group, the beginning of each packet, in batches of 100 ms."""

    def attribute(kind: int, data: bytes) -> bytes:
        size = 4 + len(data)
        return struct.pack("HH", size, kind) + data + bytes(-size % 4)

    def config(*attributes: bytes) -> bytes:
        body = struct.pack("!BBH", socket.AF_UNSPEC, 0, limits.PACKET_LOG_GROUP) + b"".join(attributes)
        kind = _NFNL_SUBSYS_ULOG << 8 | 1  # NFULNL_MSG_CONFIG
        return struct.pack("IHHII", 16 + len(body), kind, 0x1 | 0x4, 0, 0) + body  # NLM_F_REQUEST | NLM_F_ACK

    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
        sock.bind((0, 0))
        for message in (
            config(attribute(1, struct.pack("B", 1))),  # NFULA_CFG_CMD: bind
            config(
                attribute(
                    2, struct.pack("!IBx", limits.PACKET_LOG_BYTES, 2) + b""
                ),  # NFULA_CFG_MODE: copy packets
                attribute(4, struct.pack("!I", 10)),  # NFULA_CFG_TIMEOUT, in hundredths of a second
                attribute(6, struct.pack("!H", 1)),  # NFULA_CFG_FLAGS: number them
            ),
        ):
            sock.send(message)
            answer = sock.recv(4096)
            number = -int(struct.unpack_from("i", answer, 16)[0])
            if number:
                raise OSError(number, os.strerror(number))
        sock.setblocking(False)
        return sock.detach()
    except OSError as error:
        _fail("packet log", error)


def _control() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)


def _set(control: socket.socket, request: int, value: bytes) -> None:
    fcntl.ioctl(control, request, struct.pack("16s24s", nft.TAP.encode(), value))


def _inet(address: str) -> bytes:
    """A struct sockaddr_in."""
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def _opened(path: str, flags: int = os.O_RDONLY, *, step: Step = "network namespace") -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        _fail(step, error)


def _check(step: Step, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        _fail(step, OSError(number, os.strerror(number)))


def _fail(step: Step, error: OSError) -> NoReturn:
    raise LinkProblem(explain(step, error.errno or 0, system(), str(error))) from error
