"""What root sees from inside a sandbox: only what is meant to be there, nothing of the host, bounds that hold."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Callable, Iterator

import pytest

from llm4agents import limits
from llm4agents.vmm.qemu import command
from tests.support import Node

pytestmark = pytest.mark.vm

AT_ONCE_MS = 5_000
"""A refusal that came without waiting for anything, on a slow machine."""


@pytest.fixture(scope="module")
def inside(shared_node: Node) -> Iterator[str]:
    """A clone of base; tests leave it as they found it."""
    sandbox = shared_node.create("base")
    yield sandbox
    shared_node.call("DELETE", f"/v1/sandboxes/{sandbox}")


@pytest.fixture(scope="module")
def interpreter(shared_node: Node) -> Iterator[str]:
    sandbox = shared_node.create("python")
    yield sandbox
    shared_node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def root(node: Node, sandbox: str, script: str) -> str:
    done = node.exec(sandbox, script, user="root")
    assert done["exit_code"] == 0, done
    return str(done["stdout"]).strip()


def test_one_nic_that_leads_to_the_barrier(shared_node: Node, inside: str) -> None:
    assert root(shared_node, inside, "ls /sys/class/net").split() == ["eth0", "lo"]
    assert root(shared_node, inside, "cat /sys/class/net/eth0/address") == limits.GUEST_MAC
    routes = root(shared_node, inside, "tail -n +2 /proc/net/route | cut -f1-3").splitlines()
    gateway = f"{int.from_bytes(socket.inet_aton(limits.GATEWAY_ADDRESS), 'little'):08X}"
    assert f"eth0\t00000000\t{gateway}" in routes and len(routes) == 2, routes
    assert root(shared_node, inside, "grep -c eth0 /proc/net/if_inet6 || true") == "0", "no IPv6"


def test_no_interface_but_lo_where_there_is_no_barrier(nodes: Callable[..., Node]) -> None:
    node = nodes(LLM4AGENTS_BARRIER="off").start()
    sandbox = node.create("base")
    assert root(node, sandbox, "tail -n +2 /proc/net/route") == ""
    done = node.exec(sandbox, "exec 3<>/dev/tcp/1.1.1.1/80")
    assert done["exit_code"] != 0 and "unreachable" in done["stderr"].lower(), done


def test_only_the_devices_there_should_be(shared_node: Node, inside: str) -> None:
    disks = root(
        shared_node, inside, "cd /sys/block; for d in *; do echo $d $(cat $d/serial) $(cat $d/ro); done"
    )
    expected = [
        f"vd{letter} {slot} {int(slot == 'root')}"
        for letter, slot in zip("abcdefg", command.SLOTS, strict=False)
    ]
    assert disks.splitlines() == expected
    assert root(shared_node, inside, "cat /sys/class/virtio-ports/*/name") == command.AGENT_PORT
    kinds = root(shared_node, inside, "cat /sys/bus/virtio/devices/*/device").split()
    block, console, nic = "0x0002", "0x0003", "0x0001"
    assert sorted(kinds) == sorted([block] * len(command.SLOTS) + [console, nic])
    assert root(shared_node, inside, "ls /sys/bus/pci/devices 2>/dev/null | wc -l") == "0"


def test_the_base_disk_refuses_writes(shared_node: Node, inside: str) -> None:
    script = (
        "before=$(head -c 4096 /dev/vda | md5sum)\n"
        "write() { dd if=/dev/urandom of=/dev/vda bs=4096 count=1 conv=fsync,notrunc; }\n"
        "write && exit 1\n"
        "blockdev --setrw /dev/vda; write && exit 2\n"
        "mount -o remount,rw /lower 2>/dev/null && exit 3\n"
        "blockdev --flushbufs /dev/vda; echo 3 > /proc/sys/vm/drop_caches\n"
        'test "$before" = "$(head -c 4096 /dev/vda | md5sum)"'
    )
    root(shared_node, inside, script)


def test_no_virtualisation_inside(shared_node: Node, inside: str) -> None:
    flags = root(shared_node, inside, "grep -m1 flags /proc/cpuinfo").split()
    assert "hypervisor" in flags
    assert not {"svm", "vmx"} & set(flags)
    assert root(shared_node, inside, "ls /dev/kvm 2>&1 || true").endswith("No such file or directory")


def test_nothing_of_the_host_shows(shared_node: Node, inside: str) -> None:
    look = (
        "cat /proc/cmdline /proc/mounts /proc/partitions /proc/iomem /proc/1/environ; dmesg; env; "
        "cat /proc/1/cmdline /proc/1/mountinfo; cat /sys/firmware/acpi/tables/* | tr -cd '[:print:]\\n'; "
        "find /sys/devices -name serial -exec cat {} +; true"
    )
    seen = root(shared_node, inside, look)
    assert "console=ttyS0" in seen and "Linux version" in seen and "overlay / overlay" in seen
    secrets = [
        str(shared_node.home),
        str(shared_node.cache),
        str(shared_node.run),
        os.path.expanduser("~/."),
        platform.release(),
    ]
    assert not [secret for secret in secrets if secret in seen]
    for name in {socket.gethostname(), socket.getfqdn()} - {"localhost", "debian"}:
        assert not re.search(rf"\b{re.escape(name)}\b", seen), name


@pytest.mark.parametrize(
    "attempt",
    [
        "curl -sSf http://1.1.1.1/",
        "curl -sS https://example.com/",
        "getent hosts example.com",
        r"exec 3<>/dev/tcp/169.254.169.254/80; printf 'GET / HTTP/1.0\r\n\r\n' >&3; grep '200 OK' <&3",
        "exec 3>/dev/udp/8.8.8.8/9; echo >&3; sleep 0.3; echo >&3",
        "git ls-remote https://example.com/x.git",
    ],
)
def test_networking_fails_at_once(shared_node: Node, inside: str, attempt: str) -> None:
    done = shared_node.exec(inside, attempt)
    assert done["exit_code"] not in (0, None)
    assert done["duration_ms"] < AT_ONCE_MS


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.getaddrinfo('example.com', 80)",
        "import requests; requests.get('https://example.com')",
        "import urllib.request; urllib.request.urlopen('http://example.com')",
    ],
)
def test_networking_in_a_cell_says_why(shared_node: Node, interpreter: str, code: str) -> None:
    done = shared_node.code(interpreter, code)
    assert done["status"] == "error"
    assert "this sandbox has no network" in done["error"]["traceback"]
    assert done["duration_ms"] < AT_ONCE_MS


def test_a_servers_own_loopback_works(shared_node: Node, interpreter: str) -> None:
    code = (
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\nclient.sendall(b'x')\nserver.accept()[0].recv(1)"
    )
    assert shared_node.code(interpreter, code)["results"][-1]["data"]["text/plain"] == "b'x'"


def test_a_full_disk_is_the_sandboxs_own_trouble(shared_node: Node) -> None:
    sandbox = shared_node.create("base")
    try:
        done = shared_node.exec(
            sandbox,
            "fallocate -l 6G big; rm -f big; fallocate -l 4G most && df -B1 --output=size / | tail -1",
        )
        assert "No space left on device" in done["stderr"]
        assert 4.5e9 < int(done["stdout"]) <= 5 << 30
        # The rest of it in smaller and smaller pieces, then a write.
        fill = (
            "size=$((1 << 29)); n=0; while [ $size -ge 4096 ]; do "
            "fallocate -l $size f$((n += 1)) 2>/dev/null || { rm -f f$n; size=$((size / 2)); }; done; "
            "head -c 20M /dev/zero > rest; echo full"
        )
        done = shared_node.exec(sandbox, fill)
        assert "No space left on device" in done["stderr"]
        assert done["stdout"] == "full\n"
        answer = shared_node.http.put(
            f"/v1/sandboxes/{sandbox}/files", params={"path": "/home/user/x"}, content=b"x" * 1_000_000
        )
        assert answer.status_code >= 400 and "space" in answer.text
        assert shared_node.exec(sandbox, "rm -f most f* rest && echo on > x && cat x")["stdout"] == "on\n"
    finally:
        shared_node.call("DELETE", f"/v1/sandboxes/{sandbox}")
