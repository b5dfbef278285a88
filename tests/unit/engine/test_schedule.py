"""When jobs are due and webhooks are tried again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm4agents.engine import schedule
from llm4agents.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("at", "unix"),
    [
        (5, 5.0),
        (1.5, 1.5),
        ("1970-01-01T00:00:10Z", 10.0),
        ("1970-01-01T02:00:10+02:00", 10.0),
        ("1970-01-01 00:00:10.5+00:00", 10.5),
    ],
)
def test_moments(at: object, unix: float) -> None:
    assert schedule.moment(at) == unix


@pytest.mark.parametrize(
    "at",
    [
        "soon",
        "9999-12-31T23:59:59-23:59",
        "1970-01-01T00:00:10",
        -1,
        True,
        None,
        float("nan"),
        float("inf"),
        [],
    ],
)
def test_what_is_no_moment_says_so(at: object) -> None:
    with pytest.raises(InvalidRequestError, match="RFC 3339"):
        schedule.moment(at)


def test_the_first_run_is_now_or_at_its_time() -> None:
    assert schedule.first(None, None, 100.0) == 100.0
    assert schedule.first(50.0, None, 100.0) == 100.0
    assert schedule.first(150.0, 60.0, 100.0) == 150.0


@pytest.mark.parametrize("every", [0, 59.9, -60, 1e12])
def test_a_rhythm_has_bounds(every: float) -> None:
    with pytest.raises(InvalidRequestError, match="every_s"):
        schedule.first(None, every, 0.0)


def test_a_moment_in_milliseconds_is_noticed() -> None:
    with pytest.raises(InvalidRequestError, match="milliseconds"):
        schedule.first(1_900_000_000_000, None, 1_800_000_000)


@pytest.mark.parametrize(
    ("due", "now", "then"),
    [(0, 0, 60), (0, 59, 60), (0, 60, 120), (0, 61, 120), (0, 6000, 6060), (30, 10_000, 10_050)],
)
def test_missed_beats_are_not_made_up_for(due: float, now: float, then: float) -> None:
    assert schedule.following(due, 60.0, now) == then


@given(st.floats(0, 4e9), st.floats(schedule.EVERY_S_MIN, schedule.EVERY_S_MAX), st.floats(0, 4e9))
def test_the_next_beat_is_ahead_and_within_one_rhythm(due: float, every: float, now: float) -> None:
    now = max(due, now)
    following = schedule.following(due, every, now)
    assert following is not None
    assert now < following <= now + every * 1.001 + 1


def test_one_run_is_one_run() -> None:
    assert schedule.following(5.0, None, 5.0) is None


def test_a_webhook_is_tried_over_hours_and_then_given_up() -> None:
    now, tries = 0.0, 1
    while (later := schedule.retry_at(tries, now)) is not None:
        assert later > now
        now, tries = later, tries + 1
    assert 10 * 3600 < now < 12 * 3600
    assert tries == len(schedule.RETRY_S) + 1


def test_a_timer_sleeps_to_the_first_and_never_long() -> None:
    assert schedule.sleep_s([], 100.0, 30.0) == 30.0
    assert schedule.sleep_s([110.0, 105.0], 100.0, 30.0) == 5.0
    assert schedule.sleep_s([50.0], 100.0, 30.0) == 0.0
