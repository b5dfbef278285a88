"""Root in a guest does its worst, on each driver: it ends or slows its own sandbox, and nobody else notices.

Not here: what it may see (test_guest_view), frames one by one (tests/unit/guest), bounds that a create asks for
(test_bounds). A guest's user space cannot load a broken interrupt table (no module, no kexec, no /dev/kmem), so the
triple fault here is the kernel's own way to reboot; its devices' registers it can reach, once their drivers let go.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from llm4agents import limits
from tests.support import PATIENCE, Node, eventually

from .guests import DRIVERS, VIEWS, VSOCK, create, root

pytestmark = pytest.mark.vm

ANSWER_S = 15.0 * PATIENCE
"""For a neighbour's call, on a slow machine of two processors."""
FLOOD_S = int(2 * min(PATIENCE, 3))
"""There are a dozen of them: a slow machine has the neighbour asked for longer, and not ever longer."""
TRIES_S = int(2 * PATIENCE)
"""For as many tries as a test wants to see."""
SERVER_GROWTH_BYTES_MAX = 64 << 20
REBOOT = "perl -e 'syscall(169, 0xfee1dead, 672274793, {}, 0)'"

ENDS = {
    "panic": "echo c > /proc/sysrq-trigger",
    "reset": "echo b > /proc/sysrq-trigger",
    # A kernel that does not take the word goes on, and the test fails: else it would be another reset.
    "triple fault": (
        "cd /sys/kernel/reboot && echo triple > type && grep -qx triple type && echo b > /proc/sysrq-trigger"
    ),
    "reboot": REBOOT.format("0x01234567"),
    # The agent is PID 1: without it there is no guest.
    "agent's end": (
        'perl -e \'open M, "+<", "/proc/1/mem"; open P, "/proc/1/maps"; while (<P>) { /^(\\w+)-(\\w+) r-xp/ or next; '
        'sysseek M, hex $1, 0; syswrite M, "\\xf4" x (hex($2) - hex($1)) }\'; kill -HUP 1'
    ),
}
MAY_END = {
    "power off": REBOOT.format("0x4321fedc"),
    "halt": REBOOT.format("0xcdef0123"),
    "keyboard controller": r"printf '\376' | dd of=/dev/port bs=1 seek=100",
    "reset register": r"printf '\006' | dd of=/dev/port bs=1 seek=3321",
}
"""Where a machine has no such thing it goes on, or stands still, until it is ended."""


class Arena:
    """A node with a sandbox that is watched while others misbehave."""

    def __init__(self, node: Node, driver: str) -> None:
        self.node, self.driver = node, driver
        self.neighbour = self.create()
        self.answers()
        self.bytes, self.fds = node.rss(), self.descriptors()

    def create(self) -> str:
        return create(self.node, self.driver)

    def descriptors(self) -> int:
        assert self.node.process is not None
        return len(os.listdir(f"/proc/{self.node.process.pid}/fd"))

    def answers(self) -> None:
        """The neighbour does, in time, and the server has not grown."""
        began = time.monotonic()
        assert self.node.exec(self.neighbour, "echo here")["stdout"] == "here\n"
        assert time.monotonic() - began < ANSWER_S
        if hasattr(self, "bytes"):
            assert self.node.rss() - self.bytes < SERVER_GROWTH_BYTES_MAX
            assert self.descriptors() < self.fds + 64

    def later(self, sandbox: str, script: str) -> None:
        """What ends the machine it runs in must not be waited for."""
        self.node.exec(sandbox, f"({{ sleep 0.2; {script}; }} </dev/null >/dev/null 2>&1 &)", user="root")

    def gone(self, sandbox: str) -> bool:
        """Nothing of an ended sandbox is left on the host."""
        return sandbox not in self.node.machines() and not self.node.traces(sandbox)

    def survived(self, sandbox: str, timeout_s: float = 60) -> bool:
        """Whether it answers again; else it has ended. Anything between fails the test."""

        def known() -> str | None:
            if self.node.get(sandbox)["state"] in ("failed", "killed"):
                return "ended"
            try:
                done = self.node.exec(sandbox, "echo here", timeout_s=5 * PATIENCE)
            except (httpx.HTTPError, AssertionError):
                return None
            return "answers" if done["stdout"] == "here\n" else None

        return bool(eventually(known, timeout_s) == "answers")


@pytest.fixture(scope="module", params=DRIVERS)
def arena(request: pytest.FixtureRequest, shared_nodes: Callable[..., Node]) -> Arena:
    return Arena(shared_nodes(LLM4AGENTS_VMM=request.param).start(), str(request.param))


@pytest.fixture
def victim(arena: Arena) -> Iterator[str]:
    """A sandbox of the test's own, which is ended afterwards and then leaves nothing."""
    sandbox = arena.create()
    try:
        yield sandbox
    finally:
        arena.node.http.delete(f"/v1/sandboxes/{sandbox}")
    eventually(lambda: arena.gone(sandbox))
    arena.answers()


def test_one_that_ends_itself_ends_alone_and_leaves_nothing(arena: Arena) -> None:
    node = arena.node
    boxes = {how: arena.create() for how in ENDS}
    for how, script in ENDS.items():
        arena.later(boxes[how], script)
        arena.answers()
    for how, sandbox in boxes.items():
        row = node.ended(sandbox, 30)
        assert row["state"] == "failed", (how, row)
        eventually(lambda sandbox=sandbox: arena.gone(sandbox))  # type: ignore[misc]
    arena.answers()


def test_one_that_switches_itself_off_or_stands_still_can_be_ended(arena: Arena) -> None:
    node = arena.node
    boxes = {how: arena.create() for how in MAY_END}
    for how, script in MAY_END.items():
        arena.later(boxes[how], f"{script}; echo > /run/acted")

    def acted(sandbox: str) -> bool:
        """It has ended, stands still, or goes on."""
        if node.get(sandbox)["state"] in ("failed", "killed"):
            return True
        try:
            found = node.http.post(
                f"/v1/sandboxes/{sandbox}/exec", json={"command": "test -e /run/acted"}, timeout=2 * PATIENCE
            )
        except httpx.TimeoutException:
            return True
        return found.status_code != 200 or bool(found.json()["exit_code"] == 0)

    for sandbox in boxes.values():
        eventually(lambda sandbox=sandbox: acted(sandbox))  # type: ignore[misc]
    arena.answers()
    for sandbox in boxes.values():
        node.http.delete(f"/v1/sandboxes/{sandbox}")
    for sandbox in boxes.values():
        eventually(lambda sandbox=sandbox: arena.gone(sandbox))  # type: ignore[misc]


FLOODS = {
    "memory": "head -c 4G /dev/zero | tail",
    "memory files": "head -c 4G /dev/zero > /dev/shm/big",
    "processes": "bomb() { bomb | bomb & }; bomb; sleep 60",
    "entropy": "for f in random urandom hwrng; do cat /dev/$f > /dev/null & done; wait",
    "console": "yes $(head -c 900 /dev/zero | tr '\\0' x) > /dev/console",
    "kernel log": "echo 8 > /proc/sys/kernel/printk; while :; do echo '<0>flood' > /dev/kmsg; done",
    "disk": "cat /dev/urandom > /big",
    "files": "mkdir /many; cd /many; seq 1000000 | xargs touch",
    "packets": (
        # Whole frames of nonsense, connections to everywhere, datagrams and names.
        "perl -MSocket -e '"
        'socket(R, 17, 3, 768) or die; my $to = pack("SnlSCCa8", 17, 0x800, IF, 0, 0, 6, "\\xff" x 6); '
        'while (1) { send(R, join("", map { chr int rand 256 } 1 .. 14 + rand 1400), 0, $to) }\' & '
        "perl -MSocket -e '"
        "while (1) { socket(S, 2, 1 | 2048, 0); "
        'connect(S, sockaddr_in(1 + rand 65535, pack("C4", 198, 18 + rand 2, rand 256, rand 256))) }\' & '
        "perl -MSocket -e '"
        'my $name = "\\x12\\x34\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\7" . "x" x 7 . "\\0\\0\\1\\0\\1"; socket(U, 2, 2, 0); '
        'while (1) { send(U, $name, 0, sockaddr_in(rand() < .5 ? 53 : rand 65535, inet_aton("GATEWAY"))) }\' & '
        "wait"
    ),
}


@pytest.fixture(scope="module")
def flooded(arena: Arena) -> Iterator[list[str]]:
    """The sandbox that the floods share: another one when it has ended by one."""
    boxes = [arena.create()]
    yield boxes
    arena.node.http.delete(f"/v1/sandboxes/{boxes[-1]}")
    eventually(lambda: arena.gone(boxes[-1]))


@pytest.mark.parametrize("what", FLOODS)
def test_floods(arena: Arena, flooded: list[str], what: str) -> None:
    node, sandbox = arena.node, flooded[-1]
    script = (
        FLOODS[what]
        .replace("IF", "$(cat /sys/class/net/eth0/ifindex)")
        .replace("GATEWAY", limits.GATEWAY_ADDRESS)
    )
    quoted = script.replace("'", "'\\''")
    node.exec(
        sandbox, f"(timeout -s KILL {FLOOD_S} sh -c '{quoted}' </dev/null >/dev/null 2>&1 &)", user="root"
    )
    end = time.monotonic() + FLOOD_S
    while time.monotonic() < end:
        arena.answers()
    if not arena.survived(sandbox):
        eventually(lambda: arena.gone(sandbox))
        flooded.append(arena.create())
        return
    root(node, sandbox, "rm -rf /big /many /dev/shm/big; true")
    logs = [path.stat().st_size for path in (node.run / "vm" / sandbox).glob("serial.log*")]
    assert sum(logs) <= limits.SERIAL_LOG_BYTES_MAX


CHANNEL_GARBAGE = r"""
# The agent's own end of the channel, taken from it: rubbish, then frames that claim to be long, at full rate.
my $pidfd = syscall(434, 1, 0); die "pidfd: $!" if $pidfd < 0;
my @ends;
for my $link (glob "/proc/1/fd/*") {
    my $target = readlink $link or next;
    next unless $target =~ m{^/dev/vport|^socket:};
    my ($number) = $link =~ /(\d+)$/;
    my $fd = syscall(438, $pidfd, $number + 0, 0);
    push @ends, $fd if $fd >= 0;
}
die "no channel" unless @ends;
my $rubbish = join "", map { chr int rand 256 } 1 .. 32768;
my $end = time + $ARGV[0];
while (time < $end) {
    for my $fd (@ends) {
        syscall(1, $fd, $rubbish, length $rubbish);
        my $frame = pack("VVVCCv", 65536, int rand 2 ** 32, 1, 5, 1, int rand 65536) . $rubbish;
        syscall(1, $fd, $frame, length $frame);
    }
}
"""

VSOCK_FLOOD = r"""
# Connections to every port of the host, and to the agent from within: each must be refused.
my $end = time + $ARGV[0]; my ($port, $tried, $made) = (0, 0, 0);
sub try {
    socket(my $s, 40, 1, 0) or die "vsock: $!"; setsockopt($s, 40, 6, pack("qq", 0, 200_000)) or die "timeout: $!";
    $tried++; $made++ if connect($s, pack("SSLLC4", 40, 0, $_[1], $_[0], 0, 0, 0, 0));
}
try($_, 1024) for (1, 3);
while (time < $end) { $port = $port % 70000 + 1; try(2, $port) }
print "made $made of $tried\n";
"""

REGISTERS = r"""
# The NIC without its driver: random words to the registers of virtio-mmio, so rings that lie anywhere, and kicks.
# /dev/mem goes by pages, so what shares that page (on QEMU: the disks, the channel) loses its driver too, and the
# console hears how it went. FIONREAD stores the rest of a file as one 32-bit word wherever it is told to.
syscall(151, 3);
my ($nic) = grep { open(my $d, "<", "$_/device") && <$d> =~ /^0x0001/ } glob "/sys/bus/virtio/devices/*";
my ($name) = readlink($nic) =~ m{([^/]+)/[^/]+$};
my %base; open my $io, "<", "/proc/iomem";
while (<$io>) { $base{$2} = hex $1 if /^ *([0-9a-f]+)-[0-9a-f]+ : (LNRO0005:\S+)/ }
open my $mem, "+<", "/dev/mem"; open my $f, "+>", "/dev/shm/word"; open my $said, ">", "/dev/kmsg";
sub say { syswrite $said, "<0>l4a: @_\n" }
truncate $f, 0; syscall(16, fileno $f, 0x541b, 0);
for my $one (grep { ($base{$_} ^ $base{$name}) < 4096 } keys %base) {
    open my $u, ">", "/sys/bus/platform/drivers/virtio-mmio/unbind"; syswrite $u, $one;
}
my $at = syscall(9, 0, 4096, 3, 1, fileno $mem, $base{$name} & ~4095);
say("mmap: $!") if $at == -1;
$at += $base{$name} & 4095;
sub put { my ($register, $word) = @_; truncate $f, $word; syscall(16, fileno $f, 0x541b, $at + $register) }
srand 4; my $end = time + $ARGV[0]; my $n = 0;
while (time < $end) {
    put(0x70, 0);
    put(0x70, $_) for (1, 3); put(0x24, $_), put(0x20, int rand 2 ** 32) for (1, 0); put(0x70, 11);
    for my $queue (0 .. 2) {
        put(0x30, $queue); put(0x38, 2 ** int rand 9);
        put($_, rand() < .5 ? int(rand 2 ** 32) & ~4095 : int rand 2 ** 28) for (0x80, 0x90, 0xa0, 0x28, 0x40);
        put($_, rand() < .5 ? 0 : int rand 2 ** 32) for (0x84, 0x94, 0xa4);
        put(0x44, 1);
    }
    put(0x70, 15); put(0x50, int rand 3) for 1 .. 8;
    put(4 * int rand 64, int rand 2 ** 32) for 1 .. 8;
    $n++;
}
say("rounds $n");
"""


def put(node: Node, sandbox: str, program: str, seconds: int = FLOOD_S) -> str:
    """Have the program in the guest; the command that runs it for so long."""
    where = {"path": "/root/x.pl", "user": "root"}
    answer = node.http.put(f"/v1/sandboxes/{sandbox}/files", params=where, content=program.encode())
    assert answer.status_code < 300, answer.text
    return f"perl /root/x.pl {seconds}"


def test_rubbish_on_the_channel_ends_that_sandbox(arena: Arena, victim: str) -> None:
    arena.later(victim, put(arena.node, victim, CHANNEL_GARBAGE))
    end = time.monotonic() + FLOOD_S
    while time.monotonic() < end:
        arena.answers()
    row = arena.node.ended(victim)
    assert row["state"] == "failed" and "protocol error" in row["reason"], row


def test_the_host_is_not_reached_over_vsock(arena: Arena, victim: str) -> None:
    if VSOCK not in VIEWS[arena.driver].virtio:
        done = arena.node.exec(victim, "perl -e 'socket(S, 40, 1, 0) or print $!'", user="root")
        assert "not supported" in done["stdout"]
        return
    said = root(arena.node, victim, put(arena.node, victim, VSOCK_FLOOD, TRIES_S)).split()
    assert said[:3] == ["made", "0", "of"] and int(said[3]) > 10, said
    assert arena.survived(victim)


def test_rings_that_lie_anywhere(arena: Arena, victim: str) -> None:
    arena.later(victim, put(arena.node, victim, REGISTERS, TRIES_S))

    def told() -> str | None:
        """What its console heard; "ended" when it has no machine any more."""
        arena.answers()
        log = arena.node.run / "vm" / victim / "serial.log"
        said = re.search(r"l4a: (.*)", log.read_text(errors="replace")) if log.exists() else None
        return said[1] if said else None if victim in arena.node.machines() else "ended"

    said = eventually(told, 30)
    assert said == "ended" or (said.startswith("rounds ") and int(said.split()[1]) > 50)


def test_a_full_disk_is_the_sandboxs_own_trouble(arena: Arena, victim: str) -> None:
    node = arena.node
    done = node.exec(
        victim,
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
    done = node.exec(victim, fill)
    assert "No space left on device" in done["stderr"]
    assert done["stdout"] == "full\n"
    answer = node.http.put(
        f"/v1/sandboxes/{victim}/files", params={"path": "/home/user/x"}, content=b"x" * 1_000_000
    )
    assert answer.status_code >= 400 and "space" in answer.text
    assert node.exec(victim, "rm -f most f* rest && echo on > x && cat x")["stdout"] == "on\n"
