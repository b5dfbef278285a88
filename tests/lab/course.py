"""A suite in the laboratory, piece by piece: what fails or hangs costs its piece, and not what comes after it.

A piece under which the laboratory itself fell silent is run once more, in a new one, and says so with a warning. One
that was given up for any other reason has failed; the next piece then has a new laboratory too. Not here: when a run is
given up (`watch`), which pieces there are (`suite`).
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Generic, Self, TypeVar

from .laboratory import Report
from .watch import PATIENCE, Patience, Trouble, again

L = TypeVar("L")
Piece = tuple[str, ...]
WHOLE_S = 2_400.0
"""For all pieces, with second tries; what runs then has at most a silence more."""
LEAST_S = 120.0
"""With less than this left no piece is begun: a pytest in there takes 20 seconds to say its first word."""


class LaboratoryWarning(UserWarning):
    """A laboratory was given up and its piece is run once more."""


class Course(Generic[L]):
    """The pieces that were asked for, each run when it is first asked for, one after the other in one laboratory."""

    def __init__(
        self,
        enter: Callable[[], AbstractContextManager[L]],
        run: Callable[[L, Piece, Patience], Report],
        *,
        patience: Patience = PATIENCE,
        whole_s: float = WHOLE_S,
    ) -> None:
        self._enter, self._run_in, self.patience = enter, run, patience
        self._until = time.monotonic() + whole_s
        self._stack = ExitStack()
        self._laboratory: L | None = None
        self.reports: dict[Piece, Report] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def laboratory(self) -> L:
        """The one there is, or a new one."""
        if self._laboratory is None:
            self._laboratory = self._stack.enter_context(self._enter())
        return self._laboratory

    def _leave(self) -> None:
        self._laboratory = None
        self._stack.close()

    def report(self, piece: Piece) -> Report:
        if piece not in self.reports:
            self.reports[piece] = self._run(piece)
        return self.reports[piece]

    def _run(self, piece: Piece) -> Report:
        for tries in itertools.count(1):
            if (left_s := self._until - time.monotonic()) < LEAST_S:
                return Report(
                    None, trouble=Trouble("late", f"not begun: of the time for all {left_s:.0f} s are left")
                )
            patience = replace(self.patience, whole_s=min(self.patience.whole_s, left_s))
            report = self._run_in(self.laboratory(), piece, patience)
            if report.trouble is None:
                return report
            self._leave()
            if not again(report.trouble, tries, self._until - time.monotonic(), LEAST_S):
                return report
            words = f"{' '.join(piece)}: run once more in a new laboratory, after {report.trouble}"
            warnings.warn(
                f"{words}\nits run had said: {report.output[-1_500:]}", LaboratoryWarning, stacklevel=2
            )
        raise AssertionError("not reached")


def piece_of(pieces: Sequence[Piece], file: str, asked: frozenset[str]) -> Piece:
    """Of the piece with `file` what was asked for: who runs one file waits for no other."""
    whole = next(piece for piece in pieces if file in piece)
    return tuple(name for name in whole if name in asked)
