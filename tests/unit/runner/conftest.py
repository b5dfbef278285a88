"""The runner that a module's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.runner.runner_process import Runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """One zygote for a module's tests; they share its contexts, as the cells of an agent do."""
    made = Runner(tmp_path_factory.mktemp("r"))
    yield made
    made.stop()
    assert "Traceback" not in made.log, made.log
