"""A machine on a link: what its guest sends arrives at the planted sockets, and nothing of it outlives the machine."""

import asyncio
import contextlib
import dataclasses
import os
import shlex
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from llm4agents.barrier.link.links import Link
from llm4agents.guest.verbs import Agent
from llm4agents.images import disk
from llm4agents.vmm import shim
from llm4agents.vmm.base import Machine
from tests.barrier import guestside
from tests.barrier.guestside import Log, Pool, Watched, original
from tests.support import eventually

from .lab import PATIENCE, Frozen, Lab, in_lab, run, stand_still, talk, wake

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(
        os.geteuid() != 0, reason="needs root; the link process of ordinary users: tests/barrier"
    ),
]
ELSEWHERE = "203.0.113.9"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with guestside.pool() as pool:
        yield pool


@pytest.fixture
def link(pool: Pool) -> Iterator[Link]:
    link = pool.take()
    try:
        yield link
    finally:
        link.close()


async def bash(agent: Agent, script: str) -> tuple[int | None, str]:
    return await run(agent, f"exec timeout 20 bash -c {shlex.quote(script)}")


async def accepted(tcp: int) -> socket.socket:
    listening = socket.socket(fileno=os.dup(tcp))
    with listening:
        connection, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(listening), 20)
    connection.setblocking(False)
    return connection


async def reaches(agent: Agent, tcp: int, address: str, port: int) -> None:
    """A connection of the guest arrives, with where it was meant for, and is answered."""
    loop = asyncio.get_running_loop()
    call = asyncio.create_task(bash(agent, f"exec 3<>/dev/tcp/{address}/{port}; echo up >&3; cat <&3"))
    with await accepted(tcp) as connection:
        assert original(connection) == (address, port)
        assert await loop.sock_recv(connection, 99) == b"up\n"
        await loop.sock_sendall(connection, b"down\n")
    assert await call == (0, "down")


async def linked(lab: Lab, link: Link) -> tuple[Machine, Agent]:
    machine = await lab.restore(link=link)
    await machine.resume()
    return machine, await wake(machine, network=True)


def test_what_a_clone_sends_arrives_at_the_planted_sockets(frozen: Frozen, link: Link) -> None:
    async def test(lab: Lab) -> None:
        _, agent = await linked(lab, link)
        loop = asyncio.get_running_loop()
        log = Log(link.planted.packets)
        await reaches(agent, link.planted.tcp, ELSEWHERE, 443)
        await reaches(agent, link.planted.tcp, "10.1.2.3", 53)
        # An answer from another address than the one asked would not be taken.
        ask = asyncio.create_task(bash(agent, "exec 3<>/dev/udp/8.8.8.8/53; echo query >&3; head -n 1 <&3"))
        with socket.socket(fileno=os.dup(link.planted.udp)) as planted:
            query, peer = await asyncio.wait_for(loop.sock_recvfrom(planted, 99), 20)
            assert query == b"query\n"
            await loop.sock_sendto(planted, b"answer\n", peer)
        assert await ask == (0, "answer")
        assert not log.read()
        # Refused with an answer: the second write fails.
        status, said = await bash(
            agent, f"exec 3<>/dev/udp/{ELSEWHERE}/443; echo quic >&3; sleep 0.2; echo quic >&3"
        )
        assert status == 1 and "No route to host" in said
        logged = log.wait("denied")
        assert (logged.destination, logged.payload[9]) == (ELSEWHERE, 17)
        log.close()

    in_lab(frozen, test)


def test_clones_of_one_template_have_one_address_and_nothing_in_common(
    frozen: Frozen, pool: Pool, link: Link
) -> None:
    other = pool.take()

    async def test(lab: Lab) -> None:
        (_, first), (_, second) = await linked(lab, link), await linked(lab, other)
        addresses = [await run(agent, "cat /sys/class/net/eth0/address") for agent in (first, second)]
        assert addresses[0] == addresses[1]
        await reaches(second, other.planted.tcp, ELSEWHERE, 80)
        await reaches(first, link.planted.tcp, ELSEWHERE, 80)

    try:
        in_lab(frozen, test)
    finally:
        other.close()


def test_a_clone_without_a_link_is_told_at_once(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine = await lab.restore()
        await machine.resume()
        agent = await wake(machine, network=False)
        began = time.monotonic()
        for attempt in (f"exec 3<>/dev/tcp/{ELSEWHERE}/80", f"echo > /dev/udp/{ELSEWHERE}/53"):
            status, said = await bash(agent, attempt)
            assert status == 1 and "Network is unreachable" in said
        assert time.monotonic() - began < 5 * PATIENCE
        assert not (machine.record.run_dir / shim.LINK_SOCKET).exists()
        assert await shim.fetch(machine.record.run_dir) == {}
        # Loopback, IPv6 too, is the guest's own.
        assert (await bash(agent, "exec 3<>/dev/tcp/::1/9"))[1].endswith("Connection refused")

    in_lab(frozen, test)


def test_the_nic_goes_down_and_up_again(frozen: Frozen, link: Link) -> None:
    async def test(lab: Lab) -> None:
        _, agent = await linked(lab, link)
        await agent.network(False)
        assert "unreachable" in (await bash(agent, f"exec 3<>/dev/tcp/{ELSEWHERE}/80"))[1]
        for _ in range(2):
            await agent.network(True)
        await reaches(agent, link.planted.tcp, ELSEWHERE, 80)
        # A guest's root may break what is its own: it wakes up all the same.
        assert (
            await run(
                agent,
                "echo $(basename $(readlink /sys/class/net/eth0/device)) > /sys/bus/virtio/drivers/virtio_net/unbind;"
                " ls /sys/class/net",
            )
        )[1] == "lo"
        with pytest.raises(Exception, match="no eth0"):
            await agent.network(True)
        await agent.post_restore(
            entropy=bytes(64),
            unix_ns=time.time_ns(),
            hostname="x",
            machine_id="0" * 32,
            boot_id="b",
            network=True,
        )

    in_lab(frozen, test)


def test_a_boot_may_have_a_link_too(frozen: Frozen, link: Link) -> None:
    async def test(lab: Lab) -> None:
        upper = lab.home / "upper.raw"
        await disk.make_upper(upper, 1 << 30)
        root = next(part for part in frozen.spec.disks if part.slot == "root")
        other = dataclasses.replace(frozen.spec.disks[1], path=upper)
        spec = dataclasses.replace(frozen.spec, disks=(root, other))
        machine = await lab.driver.boot(spec, lab.placement(link=link))
        lab.machines.append(machine)
        agent = await talk(machine)
        await reaches(agent, link.planted.tcp, ELSEWHERE, 80)

    in_lab(frozen, test)


def test_a_paused_guest_wakes_on_another_link_and_old_connections_are_reset(
    frozen: Frozen, pool: Pool, link: Link
) -> None:
    other = pool.take()

    async def test(lab: Lab) -> None:
        machine, agent = await linked(lab, link)
        script = f"exec 3<>/dev/tcp/{ELSEWHERE}/80; echo up >&3; sleep 1; echo more >&3; cat <&3 2>/root/said"
        await run(agent, f"setsid bash -c {shlex.quote(script)} >/dev/null 2>&1 & ")
        with await accepted(link.planted.tcp) as connection:
            assert await asyncio.get_running_loop().sock_recv(connection, 9) == b"up\n"
            await stand_still(machine, agent)
            checkpoint = await machine.checkpoint(lab.home / "pause", base=frozen.snapshot)
            snapshot = await checkpoint.durable(sync=False)
        overlay = lab.home / "upper1.top"
        await machine.stop()
        again = await lab.restore(overlay=overlay, diff=snapshot, link=other)
        await again.resume()
        agent = await wake(again, network=True)
        await reaches(agent, other.planted.tcp, ELSEWHERE, 80)
        with contextlib.closing(Log(other.planted.packets)) as log:
            log.wait("stray", timeout_s=20)
        said = "until [ -s /root/said ]; do sleep 0.1; done; cat /root/said"
        assert "Connection reset" in (await bash(agent, said))[1]

    try:
        in_lab(frozen, test)
    finally:
        other.close()


def test_a_later_server_gets_the_planted_sockets_again(frozen: Frozen, pool: Pool) -> None:
    link = pool.take()

    async def test(lab: Lab) -> None:
        machine, agent = await linked(lab, link)
        link.close()  # as a server that died would
        await agent.session.close()
        await machine.detach()
        adopted = await lab.driver.adopt(machine.record)
        assert adopted is not None
        lab.machines[:] = [adopted]
        agent = await talk(adopted, dirty=True)
        had = await shim.fetch(machine.record.run_dir)
        try:
            assert list(had) == ["tcp", "udp", "packets", "netns"]
            await reaches(agent, had["tcp"], ELSEWHERE, 80)
        finally:
            for fd in had.values():
                os.close(fd)

    in_lab(frozen, test)


@pytest.mark.parametrize("end", ["stop", "vmm killed", "keeper killed"])
def test_nothing_of_a_link_outlives_its_machine(frozen: Frozen, pool: Pool, end: str) -> None:
    link = pool.take()
    watched = Watched(link.planted.netns)

    async def test(lab: Lab) -> None:
        machine, _ = await linked(lab, link)
        link.close()
        await asyncio.sleep(0)
        assert not watched.gone()
        if end == "vmm killed":
            os.kill(machine.record.vmm_pid, signal.SIGKILL)
        elif end == "keeper killed":
            os.kill(machine.record.shim_pid, signal.SIGKILL)
        else:
            await machine.stop()
        await asyncio.wait_for(machine.wait(), 10)
        assert not (machine.record.run_dir / shim.LINK_SOCKET).exists()

    with contextlib.closing(watched):
        in_lab(frozen, test)
        eventually(watched.gone, 15)
