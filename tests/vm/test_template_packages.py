"""Steps that install packages, by the guest's own tools through the profile `packages`: pip, apt and npm.

On this host's real network, as `tests/barrier/test_packages.py`; nothing here names a registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from llm4agents import Template, TemplateBuildError
from tests.support import Node, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.root]
NONE = "l4a-there-is-no-such-package"


@pytest.fixture
def node(nodes: Callable[..., Node]) -> Iterator[Node]:
    node = nodes().start()
    yield node
    node.http.delete("/v1/templates/t-packages")


def test_what_steps_install_is_there_for_everybody(node: Node) -> None:
    begun = Template().from_template("python").pip_install("iniconfig").apt_install("hello")
    with sdk_of(node):
        assert {step.status for step in begun.build("t-packages").steps} <= {"done", "cached"}
        with pytest.raises(TemplateBuildError) as failed:
            begun.pip_install(NONE).build("t-packages")
    said = str(failed.value)
    assert f"step 3 of 3 failed: pip {NONE}" in said and "No matching distribution" in said, said
    assert "build again" in str(failed.value.hint) and failed.value.details["op"] == "pip"
    sandbox = node.create("t-packages")
    try:
        answer = node.exec(sandbox, "hello && python3 -c 'import iniconfig'")
        assert answer["exit_code"] == 0, answer
        cell = node.code(sandbox, "import iniconfig; print(iniconfig.__name__)")
        assert cell["stdout"] == "iniconfig\n", cell
    finally:
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def test_what_npm_installs_is_there_for_everybody(node: Node) -> None:
    begun = Template().from_template("node").npm_install("left-pad")
    with sdk_of(node):
        begun.build("t-packages")
        with pytest.raises(TemplateBuildError) as failed:
            begun.npm_install(NONE).build("t-packages")
    said = str(failed.value)
    assert f"step 2 of 2 failed: npm {NONE}" in said and "404" in said, said
    sandbox = node.create("t-packages")
    try:
        answer = node.exec(sandbox, "cd /tmp && node -p 'require(\"left-pad\").name'")
        assert answer["stdout"] == "leftPad\n", answer
        module = "import pad from 'left-pad'; console.log(pad(7, 3, '0'))"
        answer = node.exec(sandbox, f'cd && echo "{module}" > pad.mjs && node pad.mjs')
        assert answer["stdout"] == "007\n", answer
        cell = node.code(sandbox, "require('left-pad')(7, 2, '0')")
        assert "07" in str(cell), cell
    finally:
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")
