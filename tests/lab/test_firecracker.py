"""Our suites on real Firecracker, inside the laboratory: one test here for each file there, and the proof of what ran.

What fails in there fails here with its text. Nothing is passed over where Firecracker can be had, from PATH or from
the package index; only an index that does not answer skips this file. The files run in pieces (`course`); a laboratory
that fell silent is a warning of this run, and a failure when it happens to the same piece twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .binaries import Unreachable
from .course import Course, Piece, piece_of
from .laboratory import Lab, Report, laboratory, to_stderr
from .parts import ROOT
from .suite import FILES, PASSED_OVER, PIECES, arguments
from .watch import Patience

pytestmark = [pytest.mark.vm, pytest.mark.root]


def run(lab: Lab, piece: Piece, patience: Patience) -> Report:
    return lab.run(arguments(piece), say=to_stderr, patience=patience)


@pytest.fixture(scope="module")
def course() -> Iterator[Course[Lab]]:
    with Course(lambda: laboratory(say=to_stderr), run) as made:
        try:
            made.laboratory()
        except Unreachable as error:
            pytest.skip(f"Firecracker is not on PATH and the package index does not answer: {error}")
        yield made


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> frozenset[str]:
    """The files of this run: all, unless somebody picked some."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    found = {item.callspec.params.get("file") for item in items if hasattr(item, "callspec")}
    return frozenset(file for file in FILES if file in found)


def said(report: Report) -> str:
    return f"{report.trouble or ''}\n{report.output[-6_000:]}"


@pytest.mark.parametrize("file", FILES)
def test_holds_on_firecracker(course: Course[Lab], asked: frozenset[str], file: str) -> None:
    report = course.report(piece_of(PIECES, file, asked))
    assert not report.failures(file), report.failures(file)
    assert report.trouble is None, said(report)
    ran = report.of(file)
    assert any(test.when == "call" for test in ran), f"nothing of {file} ran:\n{said(report)}"
    over = [
        test for test in ran if test.outcome == "skipped" and not any(why in test.text for why in PASSED_OVER)
    ]
    assert not over, "\n".join(f"{test.id} was skipped: {test.text}" for test in over)
    assert report.exit_code == 0 or any(report.failures(other) for other in FILES), said(report)


def test_what_ran_is_the_firecracker_that_was_meant(course: Course[Lab]) -> None:
    """By the executables of the live processes, not by what was installed."""
    if not course.reports:
        course.report(PIECES[0])
    lab = course.laboratory()
    wanted = lab.vmms["firecracker"].sha256
    own = {binary.sha256 for binary in lab.vmms.values()}
    for piece, report in course.reports.items():
        if report.trouble is None:
            assert wanted in report.vmms and set(report.vmms) <= own, (
                f"{piece}: {report.vmms}, not {wanted} alone"
            )
            assert report.vmms[wanted]["version"].startswith("Firecracker v")
            assert report.vmms[wanted]["processes"] >= len(piece)


def test_every_file_of_the_suite_is_there() -> None:
    assert [file for file in FILES if not Path(ROOT / file).is_file()] == []
