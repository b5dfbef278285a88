"""Workers of the barrier: real processes, started, adopted, replaced, ended."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from llm4agents.barrier import workers
from llm4agents.barrier.workers import Spec, User, Worker, WorkerLost, WorkerRefused
from llm4agents.errors import HostSetupError
from llm4agents.vmm import uids

ECHO = Spec("echo", str(Path(__file__).with_name("echo_worker.py")))


def user(key: str) -> User:
    lease = uids.lease(key)
    return User(lease.uid, lease.uid, lease.fd)


class Made:
    def __init__(self, home: Path) -> None:
        self.run, self.state = home / "r", home / "s"
        for path in (self.run, self.state):
            path.mkdir()
        self.workers: list[Worker] = []
        self.ups: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def __call__(self, spec: Spec = ECHO, version: str = "1", **more: Any) -> Worker:
        async def on_up(answer: dict[str, Any]) -> None:
            self.ups.append(answer)

        made = Worker(
            spec,
            run=self.run,
            state=self.state,
            version=version,
            on_up=on_up,
            on_event=lambda event, fds: self.events.append(event),
            **more,
        )
        self.workers.append(made)
        return made


def lab(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test on an event loop, with a `Made` whose workers are ended after it."""

    async def within(made: Made, arguments: dict[str, Any]) -> None:
        try:
            await test(made, **arguments)
        finally:
            for worker in made.workers:
                await worker.close(keep=False)
        assert not workers.running(made.run)

    def run(tmp_path_factory: pytest.TempPathFactory, **arguments: Any) -> None:
        asyncio.run(within(Made(tmp_path_factory.mktemp("w")), arguments))

    wanted = [*inspect.signature(test).parameters.values()][1:]
    home = inspect.Parameter("tmp_path_factory", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [home, *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in wanted)]
    )
    return run


async def until(check: Callable[[], Any], timeout_s: float = 20) -> Any:
    async with asyncio.timeout(timeout_s):
        while not (found := check()):
            await asyncio.sleep(0.01)
    return found


async def ask(worker: Worker, op: str, **more: Any) -> dict[str, Any]:
    answer, fds = await worker.request({"op": op, **more})
    assert not fds
    return answer


@lab
async def test_answers_with_descriptors_in_order_and_tells(make: Made) -> None:
    worker = make()
    await worker.start()
    with open("/dev/null") as one, open("/dev/zero") as two:
        answer, fds = await worker.request({"op": "echo", "say": "hi"}, [one.fileno(), two.fileno()])
    assert answer["said"] == "hi"
    assert [os.readlink(f"/proc/self/fd/{fd}") for fd in fds] == ["/dev/null", "/dev/zero"]
    for fd in fds:
        os.close(fd)
    answers = await asyncio.gather(*(ask(worker, "echo", say=n) for n in range(200)))
    assert [answer["said"] for answer in answers] == list(range(200))
    await ask(worker, "tell", count=3)
    await until(lambda: len(make.events) == 3)
    assert [event["number"] for event in make.events] == [0, 1, 2]
    with pytest.raises(WorkerRefused, match="because"):
        await ask(worker, "refuse")
    with pytest.raises(WorkerRefused, match="a bug"):
        await ask(worker, "fail")
    with pytest.raises(WorkerRefused, match="no 'nonsense'"):
        await ask(worker, "nonsense")
    with pytest.raises(WorkerRefused, match="at most"):
        await ask(worker, "echo", say="x" * 200_000)
    assert (await ask(worker, "echo", say="still there"))["said"] == "still there"
    assert json.loads(worker.log_path.read_text().splitlines()[0])["event"] == "started"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a uid to become")
@lab
async def test_is_nobody_with_nothing_but_its_directory(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    worker = make(user=user)
    await worker.start()
    who = await ask(worker, "who")
    assert who["uid"] == who["gid"] >= uids.UID_BASE
    assert who["groups"] == [] and int(who["caps"], 16) == 0 and who["no_new_privs"] == "1"
    assert who["session"] == worker.pid
    assert "AWS_SECRET_ACCESS_KEY" not in who["env"] and "HTTPS_PROXY" not in who["env"]
    # Beside the ones it is given: its event loop's, and the connection. Nothing of the server's.
    assert not [name for name in who["fds"].values() if not name.startswith(("socket:", "anon_inode:"))]
    assert len(who["fds"]) <= 4, who["fds"]
    assert worker.directory.stat().st_uid == who["uid"]
    assert (worker.directory / "mine").stat().st_uid == who["uid"]
    # The uid is its own while it lives, though the one who leased it has let go.
    again = uids.lease(f"barrier {worker.directory}")
    os.close(again.fd)
    assert again.uid != who["uid"]
    # One of another uid finds what it left there its own.
    await worker.close(keep=False)
    taken = uids.lease(f"barrier {worker.directory}")
    while taken.uid != who["uid"]:  # a process that ends lets its descriptors go a moment after it is gone
        os.close(taken.fd)
        await asyncio.sleep(0.01)
        taken = uids.lease(f"barrier {worker.directory}")
    try:
        second = make(user=user)
        await second.start()
        assert (await ask(second, "who"))["uid"] != who["uid"]
    finally:
        os.close(taken.fd)


@lab
async def test_those_that_dial_get_the_way_out(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    worker = make(Spec("echo", ECHO.module, dials=True))
    await worker.start()
    assert "HTTPS_PROXY" in (await ask(worker, "who"))["env"]


@lab
async def test_a_killed_one_is_replaced_and_told_again(make: Made) -> None:
    worker = make()
    await worker.start()
    first = worker.pid
    assert first is not None
    hanging = asyncio.create_task(ask(worker, "hang"))
    await asyncio.sleep(0)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        await hanging
    await until(lambda: worker.up and len(make.ups) == 2)
    assert worker.pid != first
    assert (await ask(worker, "echo", say="again"))["said"] == "again"


@lab
async def test_one_that_hangs_is_replaced(make: Made) -> None:
    worker = make()
    await worker.start()
    first = worker.pid
    with pytest.raises(WorkerLost, match="did not answer"):
        await worker.request({"op": "hang"}, timeout=0.2)
    await until(lambda: worker.up and worker.pid != first)


@lab
async def test_the_next_server_adopts_one_that_lives(make: Made) -> None:
    first = make()
    await first.start()
    await ask(first, "join", sandbox="sbx_a")
    await first.close(keep=True)
    second = make()
    await second.start()
    assert second.pid == first.pid
    assert make.ups[-1]["sandboxes"] == ["sbx_a"]


@lab
async def test_one_of_another_version_is_replaced(make: Made) -> None:
    first = make()
    await first.start()
    await ask(first, "join", sandbox="sbx_a")
    await first.close(keep=True)
    second = make(version="2")
    await second.start()
    assert second.pid != first.pid
    assert make.ups[-1] == {"ok": True, "version": "2", "pid": second.pid, "sandboxes": []}
    assert len(workers.running(make.run)) == 1


@lab
async def test_leaves_without_server_and_sandboxes_only(make: Made) -> None:
    spec = Spec("echo", ECHO.module, env={"LEAVE_AFTER_S": "0.3"})
    first = make(spec)
    await first.start()
    await asyncio.sleep(0.5)  # longer than it would wait
    assert first.up
    await ask(first, "join", sandbox="sbx_a")
    await first.close(keep=True)
    await asyncio.sleep(0.5)  # again: that it stays is what is seen
    assert workers.running(make.run)
    second = make(spec)
    await second.start()
    assert second.pid == first.pid
    await ask(second, "leave", sandbox="sbx_a")
    await second.close(keep=True)
    await until(lambda: not workers.running(make.run))


@lab
async def test_what_cannot_start_says_so_and_where(make: Made) -> None:
    worker = make(Spec("broken", "llm4agents.barrier.there_is_no_such_thing"))
    with pytest.raises(HostSetupError, match="broken does not start") as caught:
        await worker.start()
    assert str(worker.log_path) in str(caught.value)
    assert "there_is_no_such_thing" in worker.log_path.read_text()
    with pytest.raises(WorkerLost):
        await worker.request({"op": "hello"})


def test_a_log_keeps_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm4agents.limits.WORKER_LOG_BYTES_MAX", 1000)
    path = tmp_path / "log"
    path.write_text("a" * 1000 + "end")
    workers.trim(path)
    assert path.stat().st_size == 250 and path.read_text().endswith("end")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user")
@lab
async def test_another_user_who_looks_like_one_holds_nothing_up(make: Made) -> None:
    """A list of processes is anybody's to write in: a decoy is neither waited for nor ended."""
    worker = make(user=user)
    decoy = await asyncio.create_subprocess_exec(
        "sh", "-c", "read x # /barrier/boot.py", "module", str(worker.socket_path), stdin=-1,
        user=65_534, group=65_534, extra_groups=[],
    )  # fmt: skip
    try:
        assert decoy.pid in workers.running(make.run)
        await worker.start()
        first = worker.pid
        assert first is not None and first != decoy.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: worker.up and worker.pid != first)
        await worker.close(keep=False)
        assert decoy.returncode is None and decoy.pid in workers.running(make.run)
    finally:
        decoy.kill()
        await decoy.wait()
