"""The lifecycle, exhaustively: every state with every event and action."""

from __future__ import annotations

from itertools import product

import pytest

from llm4agents.engine.lifecycle import ACTIONS, EVENTS, STATES, TERMINAL, State, can, next_state, why_not

MOVES = {
    ("creating", "started"): "running",
    ("running", "pause"): "pausing",
    ("pausing", "paused"): "paused",
    ("paused", "resume"): "resuming",
    ("resuming", "resumed"): "running",
    ("pausing", "pause_failed"): "running",
    ("resuming", "resume_failed"): "paused",
    **{(s, "kill"): "killed" for s in STATES if s not in TERMINAL},
    **{(s, "fail"): "failed" for s in STATES if s not in TERMINAL},
}


@pytest.mark.parametrize(("state", "event"), list(product(STATES, EVENTS)))
def test_every_transition(state: State, event: str) -> None:
    assert next_state(state, event) == MOVES.get((state, event))  # type: ignore[arg-type]


def test_nothing_leaves_an_end() -> None:
    assert all(next_state(state, event) is None for state in TERMINAL for event in EVENTS)


def test_every_state_is_reached_and_can_end() -> None:
    reached, todo = set(), ["creating"]
    while todo:
        state = todo.pop()
        reached.add(state)
        todo += [after for (before, _), after in MOVES.items() if before == state and after not in reached]
    assert reached == set(STATES)


@pytest.mark.parametrize(("state", "action"), list(product(STATES, ACTIONS)))
def test_every_permission(state: State, action: str) -> None:
    allowed = {
        "use": state == "running",
        "pause": state == "running",
        "resume": state == "paused",
        "extend": state in ("running", "pausing", "paused", "resuming"),
        "kill": True,
        "fork": state in ("running", "paused"),
        "snapshot": state in ("running", "paused"),
    }[action]
    assert can(state, action) == allowed  # type: ignore[arg-type]
    assert state in why_not(state, action)  # type: ignore[arg-type]
