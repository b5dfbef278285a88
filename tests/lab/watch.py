"""How a run in the laboratory is watched: when it is given up, why, and whether it is tried again.

Pure, but for `symptoms`, which reads what this host's kernel and disk tell of the laboratory's machine. Not here: the
run itself (`laboratory`), the pieces of the suite (`course`).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["silent", "gone", "stalled", "late"]
"""Why a run was given up. silent: the laboratory's own agent did not answer. gone: its machine has ended.

stalled: the agent did answer, and the run said nothing. late: it said enough, for too long.
"""
CONSOLE_LINES = 12


@dataclass(frozen=True)
class Patience:
    """Seconds until a run is given up."""

    silence_s: float = 120.0
    """Without one answer of the agent. In a laboratory at work on a busy host it answers within a few seconds."""
    stall_s: float = 300.0
    """With answers, and without a word of the run. A test in there takes a minute when the host is busy, two when it is
    eight times too busy."""
    whole_s: float = 1_200.0
    """For all of it."""


PATIENCE = Patience()


@dataclass(frozen=True)
class Trouble:
    verdict: Verdict
    words: str
    """What was seen, in lines."""

    def __str__(self) -> str:
        return f"[the laboratory: {self.verdict}] {self.words}"


class Pulse:
    """Of one run: when it last answered, when it last said something. Times are seconds of one clock."""

    def __init__(self, patience: Patience, now: float) -> None:
        self.patience = patience
        self.began = self.answered = self.moved = now

    def beat(self, now: float, *, said: bool) -> None:
        """The agent has answered; `said`: the run had something new to say."""
        self.answered = now
        if said:
            self.moved = now

    def verdict(self, now: float) -> Verdict | None:
        """None: wait on. Only a laboratory that has just answered is asked about its run: else nobody knows."""
        if self.answered != now:
            return "silent" if now - self.answered >= self.patience.silence_s else None
        if now - self.began >= self.patience.whole_s:
            return "late"
        return "stalled" if now - self.moved >= self.patience.stall_s else None


def again(trouble: Trouble | None, tries: int, left_s: float, wants_s: float) -> bool:
    """Whether what had this trouble at its try number `tries` is tried once more, in a new laboratory.

    Once, and for a silence alone: that is no answer of a guest's kernel, which emulated hardware may owe us, and says
    nothing of what was tested. A machine that has ended was ended by somebody. `left_s` of the time for everything.
    """
    return trouble is not None and trouble.verdict == "silent" and tries == 1 and left_s >= wants_s


def symptoms(pid: int | None, serial: Path, span_s: float = 2.0) -> str:
    """Of a machine that does not answer: is its VMM there, does it work or wait, what came over its console last."""
    try:
        console = serial.read_text(errors="replace").splitlines()[-CONSOLE_LINES:]
    except OSError as error:
        console = [str(error)]
    return f"{_processor(pid, span_s)}; its console's last lines:\n  " + "\n  ".join(console)


def _processor(pid: int | None, span_s: float) -> str:
    if pid is None:
        return "its VMM is no more"
    try:
        first, _ = _stat(pid)
        time.sleep(span_s)
        second, state = _stat(pid)
    except OSError:
        return f"its VMM {pid} has ended"
    load = os.getloadavg()[0]
    return (
        f"its VMM {pid} (state {state}) used {second - first:.1f} s of a processor in {span_s:g} s,"
        f" {second:.0f} s in all (load of this host: {load:.1f} on {os.cpu_count()} processors)"
    )


def _stat(pid: int) -> tuple[float, str]:
    """(seconds of a processor so far, state)"""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0]
