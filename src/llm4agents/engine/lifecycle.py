"""The states of a sandbox, what may follow what, and what may be asked of each. Pure: no I/O, no time.

    creating → running → pausing → paused → resuming → running
    a pause that fails → running, a resume that fails → paused
    anything that has not ended → killed (someone or some deadline wanted it) | failed (nobody did)

Not here: performing a transition (`supervisor`) or recording it (`store`).
"""

from __future__ import annotations

from typing import Final, Literal

State = Literal["creating", "running", "pausing", "paused", "resuming", "killed", "failed"]
Event = Literal[
    "started", "pause", "paused", "pause_failed", "resume", "resumed", "resume_failed", "kill", "fail"
]
Action = Literal["use", "extend", "kill", "pause", "resume", "fork", "snapshot"]

STATES: Final[tuple[State, ...]] = (
    "creating",
    "running",
    "pausing",
    "paused",
    "resuming",
    "killed",
    "failed",
)
EVENTS: Final[tuple[Event, ...]] = (
    "started",
    "pause",
    "paused",
    "pause_failed",
    "resume",
    "resumed",
    "resume_failed",
    "kill",
    "fail",
)
ACTIONS: Final[tuple[Action, ...]] = ("use", "extend", "kill", "pause", "resume", "fork", "snapshot")
TERMINAL: Final[frozenset[State]] = frozenset(("killed", "failed"))

_NEXT: Final[dict[tuple[State, Event], State]] = {
    ("creating", "started"): "running",
    ("running", "pause"): "pausing",
    ("pausing", "paused"): "paused",
    ("pausing", "pause_failed"): "running",
    ("paused", "resume"): "resuming",
    ("resuming", "resumed"): "running",
    ("resuming", "resume_failed"): "paused",
}

_MAY: Final[dict[Action, frozenset[State]]] = {
    "use": frozenset(("running",)),
    "extend": frozenset(("running", "pausing", "paused", "resuming")),
    "kill": frozenset(("creating", "running", "pausing", "paused", "resuming", "killed", "failed")),
    "pause": frozenset(("running",)),
    "resume": frozenset(("paused",)),
    "fork": frozenset(("running", "paused")),
    "snapshot": frozenset(("running", "paused")),
}

ADOPTABLE: Final[frozenset[State]] = frozenset(("running", "pausing", "resuming"))
"""A state whose machine, if it lives, a new server can take over: a pause that was not finished is undone, a resume
that had begun to run is finished. In `creating` nobody has been told of it yet."""


def next_state(state: State, event: Event) -> State | None:
    """The state after `event`, or None when it cannot happen in `state`."""
    if event in ("kill", "fail"):
        return None if state in TERMINAL else ("killed" if event == "kill" else "failed")
    return _NEXT.get((state, event))


def can(state: State, action: Action) -> bool:
    """Whether a caller may ask for `action` now. Killing what has ended is allowed and does nothing."""
    return state in _MAY[action]


def why_not(state: State, action: Action) -> str:
    """The reason for a refusal, in words that end a sentence beginning with the sandbox's id."""
    doing = {
        "use": "run anything",
        "extend": "be extended",
        "pause": "be paused",
        "resume": "be resumed",
        "kill": "be killed",
        "fork": "be forked",
        "snapshot": "be made a template of",
    }
    return f"is {state} and cannot {doing[action]}"
