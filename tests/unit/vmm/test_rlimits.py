"""A limit set on a process that runs already."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator

import pytest

from llm4agents.vmm import rlimits


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def test_the_size_of_files_of_another_process_is_bounded(sleeper: int) -> None:
    rlimits.limit_files(sleeper, 1 << 20)
    assert resource.prlimit(sleeper, resource.RLIMIT_FSIZE) == (1 << 20, 1 << 20)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1 << 20


def test_one_that_is_gone_is_said_to_be() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError):
        rlimits.limit_files(process.pid, 1 << 20)
