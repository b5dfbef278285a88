"""What clones of one template share, and what they must not: random numbers, names, time, memory, disks.

Not here: what a clone costs (tests/bench), the driver's side of it (tests/contract).
"""

from __future__ import annotations

import ast
import asyncio
import os
import secrets
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm4agents import limits
from llm4agents.engine import contact
from llm4agents.errors import PathNotFoundError
from llm4agents.guest.verbs import Agent, Service
from llm4agents.images import disk
from llm4agents.vmm.base import Disk, Driver, MachineSpec, Placement
from tests.contract.lab import DRIVERS, RAW, Frozen
from tests.support import Node
from tests.vm.test_images import parts

pytestmark = pytest.mark.vm

Pair = tuple[str, str]
CLOCK_ERROR_MS_MAX = 100


def pair(node: Node, template: str) -> Iterator[Pair]:
    made = node.create(template), node.create(template)
    yield made
    for sandbox in made:
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")


@pytest.fixture(scope="module")
def twins(shared_node: Node) -> Iterator[Pair]:
    """Two clones of base."""
    yield from pair(shared_node, "base")


@pytest.fixture(scope="module")
def interpreters(shared_node: Node) -> Iterator[Pair]:
    """Two clones of python."""
    yield from pair(shared_node, "python")


def said(node: Node, sandbox: str, command: str, **more: Any) -> str:
    done = node.exec(sandbox, command, **more)
    assert done["exit_code"] == 0, done
    return str(done["stdout"]).strip()


def value(node: Node, sandbox: str, code: str) -> str:
    done = node.code(sandbox, code)
    assert done["status"] == "ok", done
    return str(done["results"][-1]["data"]["text/plain"])


@pytest.mark.parametrize(
    "command",
    [
        "head -c 32 /dev/urandom | od -An -tx1",
        "mktemp -u",
        "hostname",
        "cat /proc/sys/kernel/hostname",
        "cat /etc/hostname",
        "grep 127.0.1.1 /etc/hosts",
        "cat /etc/machine-id",
        "cat /run/llm4agents/boot-id",
        "cat /proc/sys/kernel/random/boot_id",
        "cat /proc/sys/kernel/random/uuid",
    ],
)
def test_a_clone_has_its_own(shared_node: Node, twins: Pair, command: str) -> None:
    first, second = (said(shared_node, sandbox, command) for sandbox in twins)
    assert first and second and first != second


def test_a_clone_is_named_after_its_sandbox(shared_node: Node, twins: Pair) -> None:
    sandbox = twins[0]
    name = sandbox.replace("_", "-")
    assert said(shared_node, sandbox, "hostname; cat /etc/hostname") == f"{name}\n{name}"
    assert said(shared_node, sandbox, "getent hosts $(hostname)").startswith("127.0.1.1")
    boot_id = shared_node.get(sandbox)["boot_id"]
    ids = said(shared_node, sandbox, "cat /run/llm4agents/boot-id /proc/sys/kernel/random/boot_id")
    # In the kernel's own form, without which journald does not start.
    assert ids.split() == [str(uuid.UUID(boot_id))] * 2


DRAWS = """
import os, random, secrets, ssl, tempfile, uuid
import numpy, numpy.random
{
    'urandom': os.urandom(16), 'getrandom': os.getrandom(16), 'random': random.random(),
    'bytes': random.randbytes(8), 'system': random.SystemRandom().random(),
    'numpy': numpy.random.random(3).tolist(), 'permutation': numpy.random.permutation(1000)[:50].tolist(),
    'generator': numpy.random.default_rng().random(), 'uuid1': str(uuid.uuid1())[14:], 'uuid4': uuid.uuid4().hex,
    'secrets': secrets.token_hex(16), 'ssl': ssl.RAND_bytes(16), 'tempfile': next(tempfile._get_candidate_names()),
}
"""


def test_an_interpreter_draws_its_own_numbers(shared_node: Node, interpreters: Pair) -> None:
    first, second = (ast.literal_eval(value(shared_node, sandbox, DRAWS)) for sandbox in interpreters)
    assert first.keys() == second.keys()
    assert not [source for source in first if first[source] == second[source]]


def test_a_program_started_in_a_clone_draws_its_own_numbers(shared_node: Node, interpreters: Pair) -> None:
    command = "python3 -c 'import random, uuid; print(random.random(), uuid.uuid4(), hash(\"x\"))'"
    drawn = [said(shared_node, sandbox, command).split() for sandbox in interpreters]
    assert not set(drawn[0]) & set(drawn[1])


def clock_error_ms(look: Any) -> float:
    """How far a guest's clock is from ours beyond what the way there and back explains; the best of some looks."""
    errors = []
    for _ in range(5):
        began = time.time_ns()
        guest = int(look())
        ended = time.time_ns()
        errors.append(abs(guest - (began + ended) / 2) - (ended - began) / 2)
    return min(errors) / 1e6


def test_a_clone_has_the_right_time(shared_node: Node, twins: Pair) -> None:
    for sandbox in twins:
        assert clock_error_ms(lambda: said(shared_node, sandbox, "date +%s%N")) < CLOCK_ERROR_MS_MAX  # noqa: B023


def test_an_interpreter_has_the_right_time(shared_node: Node, interpreters: Pair) -> None:
    for sandbox in interpreters:
        look = "import time; time.time_ns()"
        assert clock_error_ms(lambda: value(shared_node, sandbox, look)) < CLOCK_ERROR_MS_MAX  # noqa: B023


def test_memory_and_disks_are_private(shared_node: Node, twins: Pair) -> None:
    first, second = twins
    mark = secrets.token_hex(8)
    files = "/home/user/mark /dev/shm/mark /tmp/mark /usr/local/mark"
    said(shared_node, first, f"echo {mark} | tee {files} && sync", user="root")
    said(shared_node, first, "rm /etc/os-release && echo changed > /etc/debian_version", user="root")
    third = shared_node.create("base")
    try:
        for sandbox in (second, third):
            assert said(shared_node, sandbox, f"cat {files} 2>/dev/null | wc -l") == "0"
            assert "Debian" in said(shared_node, sandbox, "cat /etc/os-release")
            assert "changed" not in said(shared_node, sandbox, "cat /etc/debian_version")
    finally:
        shared_node.call("DELETE", f"/v1/sandboxes/{third}")
    assert said(shared_node, first, f"cat {files}").split() == [mark] * 4


def test_variables_are_private(shared_node: Node, interpreters: Pair) -> None:
    first, second = interpreters
    value(shared_node, first, "private = 41\nprivate")
    assert value(shared_node, second, "'private' in globals()") == "False"
    assert value(shared_node, first, "private + 1") == "42"


def test_three_in_parallel(shared_node: Node) -> None:
    def life(number: int) -> tuple[str, str]:
        sandbox = shared_node.create("python", env={"NUMBER": str(number)})
        try:
            said(shared_node, sandbox, "echo $NUMBER > number")
            return sandbox, value(shared_node, sandbox, "import os\nint(open('number').read()) * 6")
        finally:
            shared_node.call("DELETE", f"/v1/sandboxes/{sandbox}")

    with ThreadPoolExecutor(3) as pool:
        lives = list(pool.map(life, (1, 2, 7)))
    assert [answer for _, answer in lives] == ["6", "12", "42"]
    assert len({sandbox for sandbox, _ in lives}) == 3


def test_environment_given_at_create(shared_node: Node) -> None:
    sandbox = shared_node.create("python", env={"GIVEN": "at create", "TZ": "Asia/Tokyo"})
    try:
        assert said(shared_node, sandbox, "echo $GIVEN") == "at create"
        assert said(shared_node, sandbox, "echo $GIVEN", user="root") == "at create"
        assert said(shared_node, sandbox, "echo $GIVEN", env={"GIVEN": "later"}) == "later"
        assert value(shared_node, sandbox, "import os; os.environ['GIVEN']") == "'at create'"
        inner = "import subprocess; subprocess.check_output('echo $GIVEN', shell=True, text=True)"
        assert value(shared_node, sandbox, inner) == r"'at create\n'"
    finally:
        shared_node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def test_code_runs_as_user_and_as_root_on_request(shared_node: Node, twins: Pair, interpreters: Pair) -> None:
    look = "id -u; id -un; echo $HOME; pwd"
    assert said(shared_node, twins[0], look).split() == ["1000", "user", "/home/user", "/home/user"]
    assert said(shared_node, twins[0], look, user="root").split() == ["0", "root", "/root", "/root"]
    assert value(shared_node, interpreters[0], "import os; os.getuid(), os.getgid()") == "(1000, 1000)"


# -- a process that draws without pause

DRAWER = """
open(F, '>', '/run/llm4agents/draws') or die;
while (1) { $b = "\\0" x 8; syscall(318, $b, 8, 0) == 8 or die; syswrite(F, unpack('H*', $b) . "\\n") }
"""
LINE_BYTES = 17
ENOUGH = 200


async def drawn_bytes(agent: Agent) -> int:
    try:
        return (await agent.stat("/run/llm4agents/draws")).size
    except PathNotFoundError:
        return 0


async def until_drawn(agent: Agent, count: int) -> None:
    async with asyncio.timeout(60):
        while await drawn_bytes(agent) < count * LINE_BYTES:
            await agent.ping()


async def draw_in_a_clone(driver: Driver, frozen: Frozen, home: Path) -> list[bytes]:
    """What the drawer draws in a clone of `frozen` once it is thawed."""
    home.mkdir(mode=0o700)
    place = Placement(f"drawer-{home.name}-{os.getpid()}", home, time.time() + 600)
    machine = await driver.restore(frozen.snapshot, place, frozen.disks(frozen.fresh(home / "upper.top")))
    try:
        await machine.resume()
        agent = await contact.greet(machine, timeout=limits.RESTORE_TIMEOUT_S)
        before = await drawn_bytes(agent)
        await agent.post_restore(
            entropy=os.urandom(64),
            unix_ns=time.time_ns(),
            hostname=home.name,
            machine_id=secrets.token_hex(16),
            boot_id=secrets.token_hex(16),
        )
        # The first may have been drawn, and not yet written, before the freeze.
        skipped = before // LINE_BYTES + 1
        await until_drawn(agent, skipped + ENOUGH)
        async with await agent.read("/run/llm4agents/draws", offset=skipped * LINE_BYTES) as stream:
            drawn = b"".join([bytes(piece) async for piece in stream])
        await agent.session.close()
        return drawn.split(b"\n")[:-1]
    finally:
        await machine.stop()


async def draw_in_two_clones(name: str, home: Path) -> tuple[list[bytes], list[bytes]]:
    driver = DRIVERS[name]()
    try:
        shape, rootfs = await parts("base")
        await disk.make_upper(home / "upper.raw", limits.DISK_GIB << 30)
        disks = (Disk("root", rootfs.path, "raw", True), Disk("upper", home / "upper.raw", "raw", False))
        spec: MachineSpec = replace(shape, disks=disks)
        (home / "boot").mkdir(mode=0o700)
        place = Placement(f"drawer-{os.getpid()}", home / "boot", time.time() + 600)
        machine = await driver.boot(spec, place)
        try:
            agent = await contact.greet(machine, timeout=limits.BOOT_TIMEOUT_S)
            argv = ["perl", "-e", DRAWER]
            await agent.exec(argv, service=Service("drawer"))
            await until_drawn(agent, ENOUGH)
            await agent.freeze()
            await agent.session.quiesce()
            await machine.pause()
            await machine.snapshot(home / "snapshot")
            await agent.session.close()
        finally:
            await machine.stop()
        if name not in RAW:
            await disk.make_overlay(home / "upper.raw", home / "empty.qcow2")
        frozen = Frozen(name, home, spec)
        first = await draw_in_a_clone(driver, frozen, home / "first")
        return first, await draw_in_a_clone(driver, frozen, home / "second")
    finally:
        await driver.close()


@pytest.mark.parametrize("name", sorted(DRIVERS))
def test_a_process_that_draws_while_it_is_frozen_draws_nothing_twice(name: str) -> None:
    home = Path(tempfile.mkdtemp(prefix=f"l4a-draw-{os.getpid()}-"))
    try:
        first, second = asyncio.run(draw_in_two_clones(name, home))
    finally:
        shutil.rmtree(home)
    assert len(first) >= ENOUGH and len(second) >= ENOUGH
    assert len(set(first)) == len(first)
    assert not set(first) & set(second)
