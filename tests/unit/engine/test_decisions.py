"""The engine's pure decisions: deadlines, admission, shapes, ids, how an end is told."""

from __future__ import annotations

import re

import pytest

from llm4agents.engine import contact, creation, deadlines, parts
from llm4agents.errors import InvalidRequestError
from llm4agents.vmm.base import Exit


def due(**changes: float | None) -> tuple[float, str]:
    given: dict[str, float | None] = {
        "life_ends_wall_s": 10_000.0,
        "idle_timeout_s": 300.0,
        "idle_since_s": 100.0,
        "boottime_s": 150.0,
        "wall_s": 9_000.0,
    }
    return deadlines.next_deadline(**{**given, **changes})  # type: ignore[arg-type]


def test_the_nearer_deadline_counts() -> None:
    assert due() == (250.0, deadlines.IDLE)
    assert due(wall_s=9_900.0) == (100.0, deadlines.LIFE)
    assert due(idle_since_s=None) == (1_000.0, deadlines.LIFE), "a call holds it open"
    assert due(boottime_s=400.0) == (0.0, deadlines.IDLE)


def test_a_stepped_wall_clock_moves_no_idle_time() -> None:
    assert due(wall_s=2_000.0)[0] == due()[0]


def test_an_adopted_sandbox_has_been_idle_since_its_deadline_says() -> None:
    given = {"life_ends_wall_s": 10_000.0, "idle_timeout_s": 300.0, "boottime_s": 500.0, "wall_s": 9_000.0}
    assert deadlines.idle_since(**given, kept_wall_s=9_100.0) == 300.0  # 200 s ago: 100 of 300 are left
    assert deadlines.idle_since(**given, kept_wall_s=8_990.0) == 190.0  # its time is up
    assert deadlines.idle_since(**given, kept_wall_s=10_000.0) == 500.0  # it was in use
    assert deadlines.idle_since(**given, kept_wall_s=None) == 500.0
    assert deadlines.idle_since(**given, kept_wall_s=9_900.0) == 500.0, "never in the future"


@pytest.mark.parametrize(
    ("vcpus", "memory_mib", "words"),
    [
        (0, 1024, "1 to 2"),
        (3, 1024, "this host has 2 cores"),
        (1, 128, "256 to 16384"),
        (1, 99_999_999, "256 to 16384"),
        (1, 1000, "steps of 128"),
        (1, -1024, "256 to 16384"),
    ],
)
def test_impossible_shapes_are_told_the_range(vcpus: int, memory_mib: int, words: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parts.check_shape(vcpus, memory_mib, cores=2)
    assert words in str(refused.value)


def test_possible_shapes_pass() -> None:
    for vcpus, memory_mib in ((1, 256), (2, 16_384), (1, 384)):
        parts.check_shape(vcpus, memory_mib, cores=2)


def test_ids_are_as_documented_and_never_the_same() -> None:
    made = {creation.new_id() for _ in range(1000)}
    assert len(made) == 1000
    assert all(re.fullmatch(r"sbx_[a-z0-9]{20}", one) for one in made)
    assert all(re.fullmatch(r"[a-z0-9-]{1,63}", creation.host_name(one)) for one in made)


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (
            Exit(0, None, "exited", "…\n[ 3.2] Kernel panic - not syncing: sysrq\n"),
            "panicked (not syncing: sysrq)",
        ),
        (Exit(None, 9, "exited", ""), "killed by signal 9"),
        (Exit(0, None, "exited", ""), "powered off"),
        (Exit(1, None, "exited", ""), "exited with 1"),
        (Exit(None, 9, "deadline", ""), "deadline"),
        (Exit(None, 9, "stopped", ""), "stopped"),
        (Exit(None, None, "lost", ""), "without a trace"),
    ],
)
def test_every_end_has_words(ended: Exit, words: str) -> None:
    assert words in contact.exit_words(ended)
