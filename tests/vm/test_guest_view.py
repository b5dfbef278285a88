"""What root sees from inside a sandbox, on each driver: what is meant to be there, and what is listed of the host.

What of it there is to know is in `guests.View` and in SECURITY.md. Not here: what a guest can do (test_hostile_guest).
"""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llm4agents import limits
from tests.support import PATIENCE, Node

from .guests import DRIVERS, ENTROPY, SLOTS, VIEWS, View, create, root, sections

pytestmark = pytest.mark.vm

AT_ONCE_MS = 5_000 * PATIENCE
"""A refusal that came without waiting for anything, on a slow machine."""

LOOK = {
    "virtio": "cat /sys/bus/virtio/devices/*/device",
    "disks": "cd /sys/block; for d in *; do echo $d $(cat $d/ro) $(cat $d/serial); done",
    "ports": "cat /sys/class/virtio-ports/*/name",
    "pci": "for d in /sys/bus/pci/devices/*; do echo $(cat $d/vendor):$(cat $d/device); done",
    "acpi": "cat /sys/bus/acpi/devices/*/hid",
    "dmi": "cat /sys/class/dmi/id/* /sys/firmware/dmi/tables/*",
    "nics": "ls /sys/class/net; cat /sys/class/net/eth0/address",
    "routes": "tail -n +2 /proc/net/route | cut -f1-3",
    "ipv6": "cat /proc/net/if_inet6",
    "clocks": "cat /sys/class/rtc/*/name",
    "cpu": "grep -m1 flags /proc/cpuinfo",
    "kvm": "ls /dev/kvm",
    "generator": "cat /sys/class/misc/hw_random/rng_current; head -c 64 /dev/hwrng | wc -c",
    "modules": "cut -d' ' -f1 /proc/modules",
    "release": "uname -r",
    "uptime": "cut -d. -f1 /proc/uptime",
    "everything": (
        "cat /proc/cmdline /proc/mounts /proc/partitions /proc/iomem /proc/ioports /proc/cpuinfo /proc/version; "
        "dmesg; env; cat /proc/1/environ /proc/1/cmdline /proc/1/mountinfo; "
        "cat /etc/hostname /etc/hosts /etc/machine-id /etc/resolv.conf; "
        "cat /proc/sys/kernel/random/boot_id /proc/sys/kernel/hostname; cat /proc/net/arp /proc/net/fib_trie; "
        "cat /sys/firmware/acpi/tables/* | tr -c '[:print:]' '\\n'; "
        "find /sys/devices -name serial -exec cat {} +; true"
    ),
}


@pytest.fixture(scope="module", params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def view(driver: str) -> View:
    return VIEWS[driver]


@pytest.fixture(scope="module")
def node(driver: str, shared_nodes: Callable[..., Node]) -> Node:
    return shared_nodes(LLM4AGENTS_VMM=driver).start()


@pytest.fixture(scope="module")
def inside(node: Node, driver: str) -> Iterator[str]:
    """A clone of base; tests leave it as they found it."""
    sandbox = create(node, driver)
    yield sandbox
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")


@pytest.fixture(scope="module")
def seen(node: Node, inside: str) -> dict[str, str]:
    return sections(node, inside, LOOK)


def test_one_nic_that_leads_to_the_barrier(seen: dict[str, str]) -> None:
    assert seen["nics"].split() == ["eth0", "lo", limits.GUEST_MAC]
    routes = seen["routes"].splitlines()
    gateway = f"{int.from_bytes(socket.inet_aton(limits.GATEWAY_ADDRESS), 'little'):08X}"
    assert f"eth0\t00000000\t{gateway}" in routes and len(routes) == 2, routes
    assert "eth0" not in seen["ipv6"], "no IPv6"


def test_only_the_devices_there_should_be(seen: dict[str, str], view: View) -> None:
    disks = [line.split() for line in seen["disks"].splitlines()]
    assert [disk[:2] for disk in disks] == [
        [f"vd{letter}", str(int(slot == "root"))] for letter, slot in zip("abcdefghij", SLOTS, strict=False)
    ]
    for slot, (_, _, *serial) in zip(SLOTS, disks, strict=True):
        if view.serial is None:
            assert serial == [slot]
        else:
            assert len(serial) == 1 and view.serial.fullmatch(serial[0]), serial
    assert sorted(int(kind, 16) for kind in seen["virtio"].split()) == sorted(view.virtio)
    assert tuple(line for line in seen["ports"].splitlines() if "No such file" not in line) == view.ports
    assert frozenset(re.findall(r"^0x\w{4}:0x\w{4}$", seen["pci"], re.M)) == view.pci
    found = {hid for hid in seen["acpi"].split() if not hid.startswith(("LNXSY", "ACPI00"))}
    assert found == view.acpi
    assert ("No such file" not in seen["dmi"].splitlines()[0]) == view.dmi
    assert bool(seen["clocks"] and "No such" not in seen["clocks"]) == view.clock


def test_the_entropy_device_gives_bytes(seen: dict[str, str], view: View) -> None:
    read = seen["generator"].splitlines()
    if ENTROPY in view.virtio:
        assert read == ["virtio_rng.0", "64"]
    else:
        assert "virtio_rng" not in seen["generator"] and read[-1] == "0"


def test_only_the_modules_of_these_devices_are_loaded(seen: dict[str, str], view: View) -> None:
    loaded = set(seen["modules"].split())
    for kind, module in ((3, "virtio_console"), (4, "virtio_rng"), (5, "virtio_balloon"), (19, "vsock")):
        assert kind in view.virtio or module not in loaded, loaded
    assert not loaded & {"kvm", "kvm_amd", "kvm_intel", "tun", "vhost", "vsock_loopback"}
    assert bool(view.pci) == ("virtio_pci" in loaded)


def test_no_virtualisation_inside(seen: dict[str, str]) -> None:
    flags = seen["cpu"].split()
    assert "hypervisor" in flags
    assert not {"svm", "vmx"} & set(flags)
    assert "No such file or directory" in seen["kvm"]


def test_nothing_of_the_host_shows(node: Node, seen: dict[str, str]) -> None:
    everything = seen["everything"]
    assert (
        "console=ttyS0" in everything and "Linux version" in everything and "overlay / overlay" in everything
    )
    # What the guest has of its own is no leak, though a host that is such a guest itself has it too.
    own = {
        limits.GUEST_MAC,
        limits.GUEST_ADDRESS,
        limits.GATEWAY_ADDRESS,
        limits.GATEWAY_ADDRESS.rpartition(".")[0] + ".3",  # the broadcast address of that network
        seen["release"],
        "00:00:00:00:00:00",
    }
    paths = {str(node.home), str(node.cache), str(node.run), os.path.expanduser("~/.")}
    shown = [secret for secret in (paths | identity()) - own if secret in everything]
    assert not shown
    for name in {socket.gethostname(), socket.getfqdn()} - {"localhost", "debian", "sandbox"}:
        assert not re.search(rf"\b{re.escape(name)}\b", everything), name
    # Time since its template was booted, which stood still while it was frozen, and nothing of the host's.
    assert int(seen["uptime"]) < 600 * PATIENCE


def identity() -> set[str]:
    """What is this host's alone: versions, ids, addresses, serial numbers."""
    found = {platform.release()}
    for pattern in (
        "/etc/machine-id",
        "/proc/sys/kernel/random/boot_id",
        "/sys/class/net/*/address",
        "/sys/class/dmi/id/*_serial",
        "/sys/class/dmi/id/*_uuid",
        "/sys/class/dmi/id/*_asset_tag",
        "/sys/block/*/serial",
        "/sys/block/*/device/serial",
        "/sys/block/*/wwid",
    ):
        for path in Path("/").glob(pattern[1:]):
            try:
                found.add(path.read_text().strip())
            except OSError:
                continue
    for line in Path("/proc/net/fib_trie").read_text().splitlines():
        if "|-- " in line:
            found.add(line.rpartition(" ")[2])
    dull = re.compile(r"(127|0|255)\.[\d.]+|[\d.]+\.(0|255)|.{0,5}|none|default.*|not .*|to be .*", re.I)
    return {value for value in found if not dull.fullmatch(value) and value not in SLOTS}


def test_the_base_disk_refuses_writes(node: Node, inside: str) -> None:
    script = (
        "before=$(head -c 4096 /dev/vda | md5sum)\n"
        "write() { dd if=/dev/urandom of=/dev/vda bs=4096 count=1 conv=fsync,notrunc; }\n"
        "write && exit 1\n"
        "blockdev --setrw /dev/vda; write && exit 2\n"
        "mount -o remount,rw /lower 2>/dev/null && exit 3\n"
        "blockdev --flushbufs /dev/vda; echo 3 > /proc/sys/vm/drop_caches\n"
        'test "$before" = "$(head -c 4096 /dev/vda | md5sum)"'
    )
    root(node, inside, script)


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
def test_networking_fails_at_once(node: Node, inside: str, attempt: str) -> None:
    done = node.exec(inside, attempt)
    assert done["exit_code"] not in (0, None)
    assert done["duration_ms"] < AT_ONCE_MS


def test_no_interface_but_lo_where_there_is_no_barrier(driver: str, nodes: Callable[..., Node]) -> None:
    node = nodes(LLM4AGENTS_BARRIER="off", LLM4AGENTS_VMM=driver).start()
    sandbox = create(node, driver)
    assert root(node, sandbox, "tail -n +2 /proc/net/route") == ""
    done = node.exec(sandbox, "exec 3<>/dev/tcp/1.1.1.1/80")
    assert done["exit_code"] != 0 and "unreachable" in done["stderr"].lower(), done
