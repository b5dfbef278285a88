"""A VMM's cgroup where there is cgroup v2 for sure: in a guest of our own, with the same shim and the same code."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import llm4agents
from llm4agents import Sandbox, binaries
from tests.support import Node, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]


@pytest.fixture(scope="module")
def box(shared_node: Node) -> Iterator[Sandbox]:
    with sdk_of(shared_node), Sandbox("python") as sandbox:
        yield sandbox


def parcel() -> bytes:
    """The source that a shim is started with, the shim, and the script."""
    out = io.BytesIO()
    package = Path(llm4agents.__file__).parent
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path in (*package.glob("*.py"), *package.glob("vmm/*.py"), *package.glob("vmm/jail/*.py")):
            tar.add(path, f"w/llm4agents/{path.relative_to(package)}")
        tar.add(binaries.path(binaries.SHIM), f"w/{binaries.SHIM}")
        tar.add(Path(__file__).with_name("cgroup_guest.py"), "w/cgroup_guest.py")
    return out.getvalue()


def test_memory_and_processes_end_at_the_bound_and_the_cgroup_goes(box: Sandbox) -> None:
    box.files.write("/tmp/w.tar", parcel())
    # Root's: a root that anybody else can write is refused.
    run = "mkdir -p /root/h && cd /root && tar xf /tmp/w.tar --no-same-owner && PYTHONPATH=w LLM4AGENTS_BIN_DIR=w"
    done = box.exec(f"{run} python3 w/cgroup_guest.py /root/h", user="root", timeout=240)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"memory", "pids", "cpu"} <= set(found["controllers"])
    # Root's, where none is named and none was delegated.
    assert found["default"] == "/sys/fs/cgroup/llm4agents"
    # All of it is killed, not the one process that was over.
    assert found["hog"] == {"code": None, "signal": 9, "said": "", "left": False}
    assert (found["many"]["code"] or 0) > 0
    assert "survived" not in found["many"]["said"]
    assert "fork" in found["many"]["said"]
    assert not found["many"]["left"]
    files = found["files"]
    assert files["memory.max"] == str(200 << 20)
    assert files.get("memory.swap.max", "0") == "0"
    assert (files["pids.max"], files["cpu.max"]) == ("32", "50000 100000")
    assert files["cgroup.procs"] == str(found["pid"])
    # The isolation report reads what was written, and doctor knows where a server will write.
    version, shared, limits = found["reported"]
    assert (version, shared) == (2, False)
    assert {name: limits[name] for name in ("memory.max", "pids.max", "cpu.max")} == {
        name: files[name] for name in ("memory.max", "pids.max", "cpu.max")
    }
    assert found["foreseen"] == [True, True]
    # Its cgroup is the root of what it sees of them.
    assert found["seen_inside"] == "0::/"
    assert found["jail"]["cgroup"] == "1"
    assert set(found["lacking"]) <= {"memory.swap.max", "io.max"}
    assert (found["swept_alive"], found["swept_dead"], found["left"]) == (0, 1, [])
    # The guest is none the worse.
    assert box.exec("echo on").stdout == "on\n"
