"""Fixtures for every kind of test: nodes (`tests.support`), and proof that they leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from llm4agents.barrier import workers
from llm4agents.config import settings
from llm4agents.vmm import shim
from tests.support import Node, copied_cache, eventually


def _nodes() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []
    cache = settings().cache

    def make(
        *, cache: Path = cache, state: Path | None = None, within: Sequence[str] = (), **env: str
    ) -> Node:
        home = Path(tempfile.mkdtemp(prefix=f"l4a-{os.getpid()}-"))
        node = Node(home, cache, within=within, **env)
        if state is not None:
            node.state = state
            node.env["LLM4AGENTS_STATE"] = str(state)
        made.append(node)
        return node

    try:
        yield make
        for node in made:
            if node.process is None and (node.processes() or node.workers()):
                node.start()
            node.stop()
            with contextlib.suppress(AssertionError):  # the next line says what is left
                eventually(lambda node=node: not node.leftovers() or node.process, 15)  # type: ignore[misc]
            assert not node.leftovers(), f"{node.leftovers()}\n{node.log()[-3000:]}"
            assert not node.half_made()
    finally:
        for node in made:
            node.http.close()
            for pid in [*(pid for pid, _ in node.processes()), *node.workers().values()]:
                os.kill(pid, signal.SIGKILL)
            if node.process is not None and node.process.poll() is None:
                node.process.kill()
                node.process.wait()
            shutil.rmtree(node.home, ignore_errors=True)


@pytest.fixture(scope="module")
def shared_nodes() -> Iterator[Callable[..., Node]]:
    """`nodes` for a whole file."""
    yield from _nodes()


@pytest.fixture
def nodes() -> Iterator[Callable[..., Node]]:
    """Makes nodes (not started) that are stopped at the end; then nothing of them may be left."""
    yield from _nodes()


@pytest.fixture
def node(nodes: Callable[..., Node]) -> Node:
    """A started node of this test's own."""
    return nodes().start()


@pytest.fixture
def own_cache(nodes: Callable[..., Node]) -> Iterator[Path]:
    """A cache of this test's own with the templates `base` alone, to be spoilt: other tests use the real one."""
    before = nodes().start()
    before.call("DELETE", f"/v1/sandboxes/{before.create()}")  # so that there is one to copy
    before.stop()
    with copied_cache("blobs", "index", "probe", "build/bin", "templates/base") as place:
        yield place


@pytest.fixture(scope="module")
def shared_node() -> Iterator[Node]:
    """A started node for a whole file: for tests that leave it as they found it."""
    for make in _nodes():
        yield make().start()


@pytest.fixture(scope="module", autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a file of VM tests: no process and no directory below what this run of the tests has made."""
    yield
    if not any(mark.name == "vm" for mark in request.node.iter_markers()):
        return
    mine = f"-{os.getpid()}-"

    places = [path for path in Path(tempfile.gettempdir()).glob("l4a-*") if mine in path.name]
    assert not [found for place in places for found in shim.running(place / "r" / "vm").items()]
    assert not [found for place in places for found in workers.running(place / "r").items()]
    assert not places
