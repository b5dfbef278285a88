"""tests/lab/watch.py: when a run in the laboratory is given up, for what, and whether it is tried again."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from tests.lab.course import piece_of
from tests.lab.suite import FILES, PIECES
from tests.lab.watch import Patience, Pulse, Trouble, again, symptoms
from tests.support import eventually

PATIENCE = Patience(silence_s=10, stall_s=30, whole_s=100)


def pulse(*beats: tuple[float, bool]) -> Pulse:
    made = Pulse(PATIENCE, 0)
    for at, said in beats:
        made.beat(at, said=said)
    return made


def test_one_that_answers_and_says_something_goes_on_until_its_time_is_over() -> None:
    made = pulse(*((at, True) for at in range(1, 100)))
    assert made.verdict(99) is None
    made.beat(100, said=True)
    assert made.verdict(100) == "late"


def test_one_that_does_not_answer_is_silent_and_never_stalled_or_late() -> None:
    made = pulse((25, True), (29, False))
    assert made.verdict(38.9) is None
    assert [made.verdict(at) for at in (39, 60, 1_000)] == ["silent"] * 3
    assert Pulse(PATIENCE, 0).verdict(10) == "silent", "also from the beginning"


def test_one_that_answers_and_says_nothing_is_stalled() -> None:
    made = pulse((5, True), (20, False), (34.9, False))
    assert made.verdict(34.9) is None
    made.beat(35, said=False)
    assert made.verdict(35) == "stalled"
    made.beat(36, said=True)
    assert made.verdict(36) is None


def test_a_silence_is_tried_again_once_and_while_there_is_time() -> None:
    silent = Trouble("silent", "")
    assert again(silent, 1, 500, 120)
    assert not again(silent, 2, 500, 120)
    assert not again(silent, 1, 119, 120)


def test_nothing_else_is_tried_again() -> None:
    for trouble in (None, Trouble("gone", ""), Trouble("stalled", ""), Trouble("late", "")):
        assert not again(trouble, 1, 500, 120)


def test_the_symptoms_say_whether_it_works_waits_or_is_gone(tmp_path: Path) -> None:
    serial = tmp_path / "serial.log"
    serial.write_text("".join(f"line {number}\n" for number in range(40)))
    busy = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    try:
        eventually(lambda: "(state R) used 0.0 s" not in symptoms(busy.pid, serial, 0.3))
        seen = symptoms(busy.pid, serial, 0)
        assert f"VMM {busy.pid} (state R)" in seen and "line 39" in seen and "line 20" not in seen
        busy.send_signal(signal.SIGSTOP)
        eventually(lambda: "(state T) used 0.0 s" in symptoms(busy.pid, serial, 0.05))
    finally:
        busy.kill()
        busy.wait()
    assert f"VMM {busy.pid} has ended" in symptoms(busy.pid, tmp_path / "none", 0)
    assert "No such file" in symptoms(os.getpid(), tmp_path / "none", 0)
    assert "is no more" in symptoms(None, serial, 0)


def test_the_pieces_are_the_files_each_once_and_of_a_piece_only_what_was_asked_for() -> None:
    assert len(set(FILES)) == len(FILES)
    first = PIECES[0]
    assert piece_of(PIECES, first[0], frozenset(FILES)) == first
    assert piece_of(PIECES, first[1], frozenset({first[1], FILES[-1]})) == (first[1],)
