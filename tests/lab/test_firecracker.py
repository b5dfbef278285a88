"""Our suites on real Firecracker, inside the laboratory: one test here for each file there, and the proof of what ran.

What fails in there fails here with its text. Nothing is passed over where Firecracker can be had, from PATH or from
the package index; only an index that does not answer skips this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .binaries import Unreachable
from .laboratory import Lab, Report, laboratory, to_stderr
from .parts import ROOT
from .suite import FILES, PASSED_OVER, arguments

pytestmark = [pytest.mark.vm, pytest.mark.root]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    try:
        with laboratory(say=to_stderr) as made:
            yield made
    except Unreachable as error:
        pytest.skip(f"Firecracker is not on PATH and the package index does not answer: {error}")


@pytest.fixture(scope="module")
def report(lab: Lab, request: pytest.FixtureRequest) -> Report:
    """One run for all of the files that were asked for: starting pytest takes its time in there."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    asked = {item.callspec.params.get("file") for item in items if hasattr(item, "callspec")}
    return lab.run(
        arguments(file for file in FILES if file in asked or not asked & set(FILES)), say=to_stderr
    )


@pytest.mark.parametrize("file", FILES)
def test_holds_on_firecracker(report: Report, file: str) -> None:
    ran = report.of(file)
    assert any(test.when == "call" for test in ran), f"nothing of {file} ran:\n{report.output[-6_000:]}"
    assert not report.failures(file), report.failures(file)
    over = [
        test for test in ran if test.outcome == "skipped" and not any(why in test.text for why in PASSED_OVER)
    ]
    assert not over, "\n".join(f"{test.id} was skipped: {test.text}" for test in over)


def test_the_run_came_to_its_end(report: Report) -> None:
    assert report.exit_code == 0 or any(report.failures(file) for file in FILES), report.output[-6_000:]


def test_what_ran_is_the_firecracker_that_was_meant(lab: Lab, report: Report) -> None:
    """By the executables of the live processes, not by what was installed."""
    wanted = lab.vmms["firecracker"].sha256
    own = {lab.vmms["firecracker"].sha256, lab.vmms["jailer"].sha256}
    assert wanted in report.vmms and set(report.vmms) <= own, f"{report.vmms}, and not only {wanted}"
    assert report.vmms[wanted]["version"].startswith("Firecracker v")
    assert report.vmms[wanted]["processes"] > 10


def test_every_file_of_the_suite_is_there() -> None:
    assert [file for file in FILES if not Path(ROOT / file).is_file()] == []
