"""What becomes of a laboratory that stands still or ends, and of a hang in it: on small sandboxes, real signals."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from llm4agents import Sandbox
from tests.support import Node, sdk_of

from .course import Course, LaboratoryWarning, Piece
from .laboratory import Lab, Report
from .watch import Patience

pytestmark = pytest.mark.vm

PATIENCE = Patience(silence_s=2, stall_s=4, whole_s=300)
WAITS = "echo began; while :; do sleep 1; done"
GOES_ON = "echo began; echo done"
STALLS = "trap 'echo here it was; exit 3' ABRT; echo test_that_hangs; while :; do sleep 1; done"


def test_one_silence_costs_a_second_try_and_a_hang_its_piece(nodes: Callable[..., Node]) -> None:
    node = nodes().start()
    entered: list[str] = []
    tries: list[tuple[str, str]] = []

    @contextmanager
    def enter() -> Iterator[Lab]:
        with Sandbox("base", memory_mib=256) as sandbox:
            entered.append(sandbox.id)
            yield Lab(sandbox, {}, node)

    def run(lab: Lab, piece: Piece, patience: Patience) -> Report:
        name, *acts = piece
        act = acts[sum(1 for tried, _ in tries if tried == name)]
        tries.append((name, act))
        script = {"stalls": STALLS, "goes on": GOES_ON}.get(act, WAITS)
        process = lab.sandbox.processes.start(["sh", "-c", script], user="root")

        def say(text: str) -> None:
            if text == "began\n" and act in ("stands still", "dies"):
                number = signal.SIGSTOP if act == "stands still" else signal.SIGKILL
                os.kill(node.vmm(lab.sandbox.id), number)

        return lab.follow(process, patience, say=say)

    with sdk_of(node), Course(enter, run, patience=PATIENCE) as course, warnings.catch_warnings():
        warnings.simplefilter("error", LaboratoryWarning)
        done = course.report(("first", "goes on"))
        assert (done.exit_code, done.output, done.trouble) == (0, "began\ndone\n", None)

        stalled = course.report(("second", "stalls"))
        assert stalled.trouble is not None and stalled.trouble.verdict == "stalled"
        assert "test_that_hangs" in stalled.trouble.words and stalled.output.endswith("here it was\n")

        died = course.report(("third", "dies"))
        assert died.trouble is not None and died.trouble.verdict == "gone" and "failed" in died.trouble.words

        warnings.simplefilter("always", LaboratoryWarning)
        with pytest.warns(LaboratoryWarning, match=r"fourth .*silent(.|\n)*\(state T\) used 0.0 s") as told:
            mended = course.report(("fourth", "stands still", "goes on"))
        assert len(told) == 1 and str(told[0].message).endswith("its run had said: began\n")
        assert (mended.exit_code, mended.trouble) == (0, None)
        assert course.report(("fourth", "stands still", "goes on")) is mended, "each runs once"
    # A new one after each trouble, and only then.
    assert len(entered) == len(set(entered)) == 4
    assert [act for _, act in tries] == ["goes on", "stalls", "dies", "stands still", "goes on"]
    assert node.machines() == {}
