"""What agents see of results, and which paths of this machine they may name."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from llm4agents.errors import ConnectionLostError, InvalidRequestError
from llm4agents.sdk.results import ExecResult, Execution, ExecutionError, Result
from llm4agents.tools import content, host_paths

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\nx").decode()


def _said(blocks: list[Any]) -> list[str]:
    return [block.text if block.type == "text" else block.mime_type for block in blocks]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"text/plain": "42"}, ["42"]),
        ({"text/plain": "<Figure size 640x480>", "image/png": PNG}, ["image/png"]),
        ({"text/plain": "   a\n0  1", "text/html": "<table>"}, ["   a\n0  1"]),
        ({"text/plain": "<IPython.core.display.HTML object>", "text/html": "<b>x</b>"}, ["<b>x</b>"]),
        ({"text/plain": "<x.Y object at 0x7f00>"}, ["<x.Y object at 0x7f00>"]),
        ({"text/markdown": "*x*", "text/plain": "<IPython.core.display.Markdown object>"}, ["*x*"]),
        ({"application/json": {"a": 1}}, ['{"a": 1}']),
        ({}, []),
    ],
)
def test_results(data: dict[str, Any], said: list[str]) -> None:
    assert _said(content.result(Result(data))) == said


def test_executions_and_commands() -> None:
    failed = Execution(stdout="a", stderr="b", error=ExecutionError("E", "v", "trace"), status="error")
    assert _said(content.execution(failed)) == ["a", "[stderr]\nb", "[error]\ntrace"]
    assert _said(content.execution(Execution())) == ["[done, no output]"]
    assert _said(content.command(ExecResult(0))) == ["[exit code 0]"]
    assert _said(content.command(ExecResult(0, stdout_bytes=b"x"))) == ["x"]
    assert _said(content.command(ExecResult(None, signal=9, stdout_bytes=b"x"))) == [
        "x",
        "[killed by signal 9]",
    ]


def test_what_is_too_much_is_cut_and_says_so() -> None:
    cut = content.cut("a" * 100_000 + "end")
    assert len(cut) < 61_000
    assert cut.endswith("end")
    assert "left out" in cut
    (block,) = [content.image(b"x" * 4_000_000, "image/png")]
    assert block.type == "text"


def test_an_error_says_what_to_do_and_whether_it_may_have_run() -> None:
    assert content.problem(InvalidRequestError("bad", hint="do this")) == "bad (do this)"
    assert content.problem(ConnectionLostError("gone")).endswith("[it may have run, wholly or in part]")


def test_paths_of_the_host(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "up").symlink_to(tmp_path)
    (root / "fine").symlink_to(root / "sub")
    for name in ("", "a", "sub/a", "sub/../a", str(root / "b"), "fine/x"):
        assert root in (host_paths.inside(root, name), *host_paths.inside(root, name).parents)
    for name in ("..", "../rooted", "up/x", "/etc/passwd", str(tmp_path)):
        with pytest.raises(InvalidRequestError, match="not below"):
            host_paths.inside(root, name)
    host_paths.check_tree(root, root / "sub")
    with pytest.raises(InvalidRequestError):
        host_paths.check_tree(root, root)
