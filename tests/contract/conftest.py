"""One frozen machine per driver; every test of the suite runs on each."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .lab import DRIVERS, Frozen, freeze


@pytest.fixture(scope="module", params=sorted(DRIVERS))
def frozen(request: pytest.FixtureRequest) -> Iterator[Frozen]:
    # Not under pytest's own directory: `kill -9` tests must find it whatever the user's umask is.
    home = Path(tempfile.mkdtemp(prefix=f"l4a-contract-{os.getpid()}-"))
    try:
        yield asyncio.run(freeze(request.param, home))
    finally:
        shutil.rmtree(home, ignore_errors=True)
