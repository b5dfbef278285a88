"""A link made by an ordinary user, in a process of its own: `-m tests.barrier.unprivileged CASE DIRECTORY`, as root.

Prints one JSON object. It becomes an ordinary user itself, after it has made what such a user needs of the system:
a root that is no chroot, and a /dev/net/tun he may open (CASE `works`), or has made one of them missing.
DIRECTORY is empty.
"""

import ctypes
import json
import os
import socket
import stat
import subprocess
import sys

from llm4agents.barrier.link import build
from llm4agents.barrier.link.__main__ import in_child
from llm4agents.barrier.link.links import Link, Planted
from llm4agents.barrier.link.problems import LinkProblem
from llm4agents.barrier.worker_side import harden

from .guestside import Log, frame, frames, ip, tcp, udp

USER = 65_534
ELSEWHERE = "203.0.113.9"
_libc = ctypes.CDLL(None, use_errno=True)


def prepare(case: str, root: str) -> None:
    """A mount namespace whose root is really its root (but for `chroot`), with a /dev/net of our own."""
    assert _libc.unshare(0x0002_0000) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    if case != "chroot":
        subprocess.run(["mount", "--rbind", "/", root], check=True)
        os.chdir(root)
        assert _libc.syscall(155, b".", b".") == 0  # pivot_root: the old root lies over the new
        subprocess.run(["umount", "-l", "."], check=True)
        os.chdir("/")
        subprocess.run(["mount", "-t", "tmpfs", "none", "/dev/net"], check=True)
        if case != "no device":
            os.mknod("/dev/net/tun", 0o600 | stat.S_IFCHR, os.makedev(10, 200))
            os.chmod("/dev/net/tun", 0o600 if case == "closed" else 0o666)
    else:
        subprocess.run(["mount", "--rbind", "/", root], check=True)
        os.chroot(root)


def become_user() -> None:
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    harden()  # as a worker: not dumpable, no new privileges


def look() -> dict[str, object]:
    """What works of it, seen with frames by hand."""
    tap, *planted = in_child(build.make)
    link = Link(tap, Planted(*planted))
    log = Log(link.planted.packets)
    os.write(tap, frame(ip(tcp(ELSEWHERE, 443), 6, ELSEWHERE)))
    syn_ack = next(got for got in frames(tap) if got[12:14] == b"\x08\x00")
    os.write(tap, frame(ip(udp(b"query", 53), 17, "8.8.8.8")))
    with socket.socket(fileno=os.dup(link.planted.udp)) as sock:
        sock.setblocking(True)
        sock.settimeout(5)
        query, peer = sock.recvfrom(99)
        sock.sendto(b"answer", peer)
    answer = next(got for got in frames(tap) if got[23] == 17)
    os.write(tap, frame(ip(udp(b"quic", 443), 17, ELSEWHERE)))
    refused = next(got for got in frames(tap) if got[23] == 1)
    os.write(tap, frame(ip(udp(b"x", 53), 17, ELSEWHERE, source="10.0.0.1")))
    # From another process of this user's: in a user namespace that is not this one's.
    (capture,) = in_child(lambda: [build.packet_socket(link.planted.netns)])
    with socket.socket(fileno=capture) as sniffer:
        os.write(tap, frame(ip(udp(b"seen", 53), 17, ELSEWHERE)))
        sniffer.settimeout(5)
        while not (seen := sniffer.recv(9999)).endswith(b"seen"):
            pass
    found = {
        "uid": os.getuid(),
        "syn_ack": [socket.inet_ntoa(syn_ack[26:30]), syn_ack[47]],
        "query": query.decode(),
        "answer_from": socket.inet_ntoa(answer[26:30]),
        "refused": [refused[34], refused[35]],
        "logged": [log.wait("denied").prefix, log.wait("source").prefix],
        "captured": seen[-4:].decode(),
    }
    log.close()
    link.close()
    return found


def main() -> None:
    case, root = sys.argv[1:]
    prepare(case, root)
    become_user()
    try:
        found = look()
    except LinkProblem as problem:
        found = {"problem": str(problem)}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
