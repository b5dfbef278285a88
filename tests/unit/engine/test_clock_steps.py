"""A host clock that is stepped, with injected clocks: nobody steps the real one under other people's machines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from llm4agents.engine import clock, deadlines, keeping
from llm4agents.store import SandboxRow

DAY = 86_400.0


class Clocks:
    """The engine's two clocks. `pass_s` is time, `step` is somebody with `date -s`."""

    def __init__(self) -> None:
        self.boottime, self.wall = 5_000.0, 1_800_000_000.0

    def pass_s(self, seconds: float) -> None:
        self.boottime += seconds
        self.wall += seconds

    def step(self, seconds: float) -> None:
        self.wall += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    made = Clocks()
    monkeypatch.setattr(clock, "boottime_s", lambda: made.boottime)
    monkeypatch.setattr(clock, "wall_s", lambda: made.wall)
    yield made


def idle_left(clocks: Clocks, since: float) -> float:
    left, which = deadlines.next_deadline(
        life_ends_wall_s=clocks.wall + 30 * DAY,
        idle_timeout_s=300,
        idle_since_s=since,
        boottime_s=clock.boottime_s(),
        wall_s=clock.wall_s(),
    )
    assert which == deadlines.IDLE
    return left


@pytest.mark.parametrize("step", [-400 * DAY, -3600.0, 3600.0, 29 * DAY])
def test_a_step_moves_no_idle_timeout(clocks: Clocks, step: float) -> None:
    since = clocks.boottime
    clocks.pass_s(100)
    clocks.step(step)
    assert idle_left(clocks, since) == pytest.approx(200)
    clocks.pass_s(200)
    assert idle_left(clocks, since) == pytest.approx(0)


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_an_adopted_sandbox_is_never_idle_since_later_than_now(clocks: Clocks, step: float) -> None:
    """The keeper's deadline is wall time: a step between two servers moves it, but only within its timeout's bounds."""
    kept = clocks.wall + 300
    clocks.step(step)
    since = deadlines.idle_since(
        life_ends_wall_s=clocks.wall + DAY,
        idle_timeout_s=300,
        kept_wall_s=kept,
        boottime_s=clocks.boottime,
        wall_s=clocks.wall,
    )
    assert since <= clocks.boottime, "never more than the whole timeout is left"


def paused(ident: str, at: float | None, keep_s: float) -> SandboxRow:
    row = SandboxRow(ident, "base", "paused", 0.0, 0.0, 300.0, 1, 256, 5)
    row.paused_at, row.keep_s = at, keep_s
    return row


class Rows:
    def __init__(self, *rows: SandboxRow) -> None:
        self.rows = rows

    def paused(self) -> list[SandboxRow]:
        return [row for row in self.rows if row.state == "paused"]


def test_the_keeper_of_pauses_goes_by_the_wall_clock_and_looks_again(clocks: Clocks) -> None:
    """`keep` is a promise in days: a clock set back keeps longer, one set forward ends what is over by it."""
    ended: list[str] = []
    first, second = paused("sbx_a", clocks.wall, 600), paused("sbx_b", clocks.wall, 7 * DAY)

    async def expire(sandbox: str) -> None:
        ended.append(sandbox)
        next(row for row in (first, second) if row.id == sandbox).state = "killed"

    async def main() -> None:
        keeper = keeping.Keeper(Rows(first, second), expire)  # type: ignore[arg-type]

        async def look() -> list[str]:
            keeper.look()
            for _ in range(5):
                await asyncio.sleep(0)
            return ended

        assert await look() == []
        clocks.step(-DAY)
        clocks.pass_s(601)
        assert await look() == [], "set back: kept longer, never shorter than was promised"
        clocks.step(DAY)
        assert await look() == ["sbx_a"]
        assert await look() == ["sbx_a"], "once"
        clocks.step(8 * DAY)
        assert await look() == ["sbx_a", "sbx_b"]
        keeper.stop()

    asyncio.run(main())
    assert keeping.LOOK_AGAIN_S <= 3600, "a step is noticed within the hour"
