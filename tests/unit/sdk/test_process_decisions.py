"""What the client decides about processes, as tables: bodies, messages, patterns."""

from __future__ import annotations

import base64

import pytest

from llm4agents.errors import ConflictError, InvalidRequestError, ProgramFailedError, ProtocolError
from llm4agents.sdk import _process, results


def body(cmd: object = "true", **more: object) -> dict[str, object]:
    wanted: dict[str, object] = dict.fromkeys(("id", "tag", "env", "cwd", "user", "tty", "term", "timeout"))
    wanted.update({"stdin": False, "keep_bytes": None, "full": "drop", **more})
    return _process.start_body(cmd, **wanted)  # type: ignore[arg-type]


def test_what_a_start_says() -> None:
    assert body() == {"command": "true", "timeout_s": 0, "full": "drop"}
    assert body(["a", "b"], id="x", stdin=True, tty=(3, 4), term="t", timeout=5) == {
        "argv": ["a", "b"],
        "id": "x",
        "stdin": True,
        "tty": {"rows": 3, "cols": 4, "term": "t"},
        "timeout_s": 5,
        "full": "drop",
    }
    assert body(stdin="hé")["stdin"] == base64.b64encode("hé".encode()).decode()
    with pytest.raises(InvalidRequestError):
        body("")


def test_ids_that_are_none() -> None:
    assert _process.path_of("sbx_1", "proc_1") == "/v1/sandboxes/sbx_1/processes/proc_1"
    for id in ("", "a/b", "..", "x" * 65, "a?b"):
        with pytest.raises(InvalidRequestError):
            _process.path_of("sbx_1", id)


def test_messages_of_a_live_view() -> None:
    output = _process.piece(b"\x02" + (7).to_bytes(8, "little") + b"said")
    assert (output.channel, output.offset, output.data) == ("stderr", 7, b"said")
    for broken in (b"", b"\x01" + bytes(8), b"\x03" + bytes(9)):
        with pytest.raises(ProtocolError):
            _process.piece(broken)
    assert _process.told('{"exit": {"exit_code": 3}}') == ("exit", {"exit_code": 3})
    with pytest.raises(ConflictError, match="taken"):
        _process.told('{"error": {"status": 409, "code": "conflict", "detail": "taken"}}')
    for nonsense in ("", "[]", "{}", "1"):
        with pytest.raises(ProtocolError):
            _process.told(nonsense)


@pytest.mark.parametrize(
    ("pieces", "line"),
    [
        ([("stdout", b"up\nlisten"), ("stdout", b"ing on 80\nmore\n")], "listening on 80"),
        ([("stdout", b"listening"), ("stderr", b"noise"), ("stdout", b" on 80")], "listening on 80"),
        ([("stdout", b"listening"), ("stderr", b" on 80")], None),
        ([("stdout", b"listening \xe2\x82"), ("stdout", b"\xac on 80\r\n")], None),
        ([("stdout", b"> listening on 80 >")], "> listening on 80 >"),
        ([("stdout", b"x" * 3_000_000), ("stdout", b"\nlistening on 80")], "listening on 80"),
    ],
)
def test_a_pattern_in_lines_that_come_in_pieces(pieces: list[tuple[str, bytes]], line: str | None) -> None:
    search, found = _process.Search(r"listening on \d+"), None
    for channel, data in pieces:
        found = found or search.feed(results.Output(channel, data))  # type: ignore[arg-type]
    assert found == line


def test_how_a_process_ended() -> None:
    ended = results.process_info({"id": "p", "pid": 3, "exit_code": 2, "started_at": 0.0, "new": 1})
    assert (ended.ok, ended.running, ended.started_at is not None) == (False, False, True)
    with pytest.raises(ProgramFailedError, match="exited with 2"):
        ended.check()
    assert results.process_info({"id": "p", "pid": 3, "running": True}).check().running
