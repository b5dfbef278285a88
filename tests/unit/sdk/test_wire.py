"""The pure decisions of the client, as tables."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llm4agents
from llm4agents import errors
from llm4agents.sdk import _wire, results

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("given", "wire"),
    [
        ("a", "/home/user/a"),
        ("~/a", "/home/user/a"),
        ("~", "/home/user"),
        ("/a/../b", "/a/../b"),
        ("~x", "/home/user/~x"),
    ],
)
def test_paths(given: str, wire: str) -> None:
    assert _wire.path_of(given) == wire


@pytest.mark.parametrize("bad", ["", "a\0b", "x" * 5000])
def test_what_is_no_path(bad: str) -> None:
    with pytest.raises(errors.InvalidRequestError):
        _wire.path_of(bad)


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), True, "3"])
def test_what_is_no_duration(bad: Any) -> None:
    with pytest.raises(errors.InvalidRequestError):
        _wire.seconds("timeout", bad)


def test_none_and_zero_mean_no_limit() -> None:
    assert _wire.seconds("timeout", None) == _wire.seconds("timeout", 0) == 0
    assert _wire.wait_s(0) is None
    assert _wire.wait_s(10) == 40


def test_exec_body() -> None:
    nothing: dict[str, Any] = {"env": None, "cwd": None, "user": None, "timeout": 5, "stream": False}
    assert _wire.exec_body("ls", stdin=None, **nothing) == {"command": "ls", "timeout_s": 5, "stream": False}
    assert _wire.exec_body(["a", "b"], stdin="x", **nothing)["stdin"] == "eA=="
    for empty in ("", "  ", [], [""]):
        with pytest.raises(errors.InvalidRequestError):
            _wire.exec_body(empty, stdin=None, **nothing)


@given(st.lists(st.dictionaries(st.text(), st.text())), st.integers(1, 40))
def test_lines_survive_any_cut(objects: list[dict[str, str]], size: int) -> None:
    raw = b"".join(json.dumps(item).encode() + b"\n" for item in objects)
    decoder = _wire.LineDecoder()
    found = [item for at in range(0, len(raw), size) for item in decoder.feed(raw[at : at + size])]
    assert found == objects
    assert not decoder.pending


@pytest.mark.parametrize("line", [b"nonsense\n", b"[1]\n", b"\xff\n"])
def test_lines_that_are_none_of_ours(line: bytes) -> None:
    with pytest.raises(errors.ProtocolError):
        _wire.LineDecoder().feed(line)


def test_a_collector_bounds_what_it_keeps() -> None:
    collector = _wire.Collector(4)
    assert collector.feed("aé".encode()[:2]) == "a"
    assert collector.feed("é".encode()[1:] + b"bcd") == "ébcd"
    assert (collector.bytes(), collector.truncated) == ("aéb".encode(), True)


@pytest.mark.parametrize("cls", errors.all_errors().values(), ids=lambda cls: cls.__name__)
def test_every_error_survives_the_wire(cls: type[errors.LLM4AgentsError]) -> None:
    sent = cls("words", hint="do this")
    sent.details = {"message": "odd", "path": "/x"}
    got = _wire.error_of(cls.http_status, json.dumps(errors.to_wire(sent)).encode(), sandbox="sbx_1")
    assert type(got) is cls
    assert str(got) == "sandbox sbx_1: words (do this)"
    assert got.details == {"sandbox": "sbx_1", "message": "odd", "path": "/x"}
    assert hasattr(llm4agents, cls.__name__)


@pytest.mark.parametrize(
    ("status", "body", "cls"),
    [
        (404, b'{"detail": "Not Found"}', errors.InvalidRequestError),
        (422, b'{"detail": [{"loc": ["body"]}]}', errors.InvalidRequestError),
        (502, b"<html>", errors.UnknownOutcomeError),
        (500, b"", errors.UnknownOutcomeError),
    ],
)
def test_answers_of_others_are_errors_too(status: int, body: bytes, cls: type) -> None:
    assert type(_wire.error_of(status, body)) is cls


@pytest.mark.parametrize(
    ("older", "newer"),
    [("0.1.0", "0.1.1"), ("0.9", "0.10"), ("0.1.0.dev1", "0.1.0"), ("0.1.0rc1", "0.1.0"), ("", "0.1")],
)
def test_versions_sort(older: str, newer: str) -> None:
    assert _wire.release_of(older) < _wire.release_of(newer)


def test_an_answer_that_is_not_ours_is_one_line_and_says_where_to_look() -> None:
    said = str(_wire.error_of(404, b"<!DOCTYPE HTML>\n<html>\n  Not here\n"))
    assert said.startswith("HTTP 404: <!DOCTYPE HTML> <html> Not here (") and "LLM4AGENTS_URL" in said


def test_prefixes_of_ids() -> None:
    ids = ["sbx_aab", "sbx_aac", "sbx_aa"]
    assert _wire.unique_prefix("sbx_aa", ids) == ["sbx_aa"]
    assert _wire.unique_prefix("aab", ids) == ["sbx_aab"]
    assert len(_wire.unique_prefix("a", ids)) == 3
    assert _wire.unique_prefix("x", ids) == []
    assert _wire.unique_prefix("", ids[:1]) == _wire.unique_prefix("sbx_", ids[:1]) == []
    assert _wire.unique_prefix("s", ids[:1]) == []


@pytest.mark.parametrize("status", ["timed_out", "interrupted", "died"])
def test_a_cell_that_did_not_end_well_always_has_an_error(status: str) -> None:
    done = results.execution({"status": status})
    assert done.error is not None
    with pytest.raises(errors.ProgramFailedError):
        done.check()


def test_times_are_understood() -> None:
    parsed = results.parse_time("2026-01-02T03:04:05Z")
    assert parsed is not None
    assert results.parse_time(parsed.timestamp()) == parsed
    for far in (1e300, 1e18, -1e18):  # `touch -d @…` of a guest
        moment = results.parse_time(far)
        assert moment is not None
        assert moment.year in (1, 9999)
        assert moment.astimezone(timezone(timedelta(hours=14 if far > 0 else -14))) == moment


def test_names_are_imported_when_used() -> None:
    heavy = "{'httpcore', 'rich', 'pydantic', 'asyncio', 'llm4agents'}"
    code = f"import sys, llm4agents; print(sorted(m for m in sys.modules if m.split('.')[0] in {heavy}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "['llm4agents']"
    for name in llm4agents.__all__:
        assert getattr(llm4agents, name) is not None
    with pytest.raises(AttributeError):
        _ = llm4agents.nothing


def test_the_synchronous_client_is_up_to_date() -> None:
    check = subprocess.run(
        [sys.executable, str(ROOT / "scripts/unasync.py"), "--check"], capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr


def test_unasync_notices_what_is_stale(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "unasync.py"
    script.write_bytes((ROOT / "scripts/unasync.py").read_bytes())
    source = tmp_path / "src/llm4agents/sdk/_async"
    source.mkdir(parents=True)
    (source / "x.py").write_text("async def f(a: AsyncSandbox) -> None:\n    await a.aclose()\n")
    run = [sys.executable, str(script)]
    assert subprocess.run([*run, "--check"], capture_output=True).returncode == 1
    assert subprocess.run(run, capture_output=True).returncode == 0
    made = (tmp_path / "src/llm4agents/sdk/_sync/x.py").read_text()
    assert made.endswith("def f(a: Sandbox) -> None:\n    a.close()\n")
    assert subprocess.run([*run, "--check"], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("url", "said", "hint"),
    [
        ("https://sbx.localhost:7400", "[Errno -2] Name or service not known", "https://localhost:7400"),
        ("https://sbx.localhost", "[Errno 111] Connection refused", "the server runs"),
        ("https://a.example", "CERTIFICATE_VERIFY_FAILED: unable to get local issuer", "LLM4AGENTS_CA_FILE"),
        ("https://a.example", "CERTIFICATE_VERIFY_FAILED: Hostname mismatch", "as its certificate does"),
        ("https://127.0.0.1:1", "[SSL: WRONG_VERSION_NUMBER] wrong version number", "no TLS"),
        ("https://a.example", "[Errno -2] Name or service not known", "check LLM4AGENTS_URL"),
    ],
)
def test_who_reaches_no_server_is_told_what_to_do(url: str, said: str, hint: str) -> None:
    assert hint in _wire.unreachable_hint(url, OSError(said))
