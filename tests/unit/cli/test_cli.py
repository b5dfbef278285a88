"""The command line as its users have it: arguments in, text and exit codes out."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from llm4agents import __version__
from llm4agents.api.server import lock
from llm4agents.cli import app, output
from llm4agents.cli.observe import _figures
from llm4agents.errors import SandboxDiedError
from tests.support import eventually


def test_version_and_help(cli: Any) -> None:
    assert cli("--version").stdout == f"llm4agents {__version__}\n"
    for args in (["--help"], ["run", "-h"], ["template", "--help"], ["server", "stop", "--help"]):
        done = cli(*args)
        assert (done.returncode, done.stderr) == (0, "")
        assert "Usage: llm4agents" in done.stdout


def test_the_table_says_what_the_commands_say() -> None:
    for name, (module, function, line) in app.COMMANDS.items():
        doc = getattr(import_module(f"llm4agents.cli.{module}"), function).__doc__
        assert doc.strip().splitlines()[0] == line, name


def test_the_reference_has_every_command() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/command-line.md").read_text()
    told = dict(re.findall(r"^\| `([a-z]+(?: [a-z]+)?)[^`]*` \| (.*) \|$", page, re.MULTILINE))
    known = {
        name: getattr(import_module(f"llm4agents.cli.{m}"), f) for name, (m, f, _) in app.COMMANDS.items()
    }
    for group, (module, functions, _) in app.GROUPS.items():
        for function in functions:
            found = getattr(import_module(f"llm4agents.cli.{module}"), function)
            known[f"{group} {function.rstrip('_')}"] = found
    assert told == {name: " ".join(f.__doc__.split("\n\n")[0].split()) for name, f in known.items()}


def test_what_is_known_of_a_node_or_is_not() -> None:
    row = {"id": "sbx_a", "template": "base", "state": "running", "cpu_s": 1.0, "pss_bytes": 1 << 20}
    row |= {"memory_mib": 256, "calls": 0, "idle_s": 2.0, "created_at": 100.0}
    head, rows = _figures({"node": None, "data": [row], "at": 110.0}, {"data": [row], "at": 108.0})
    assert head == "1 running" and rows[0][0] == "sbx_a"
    assert _figures({"node": None, "data": [], "at": 1.0}, None) == ("no sandboxes", [])


def test_no_line_of_a_group_s_help_is_cut(cli: Any) -> None:
    for group in app.GROUPS:
        said = cli(group, "-h", COLUMNS="80").stdout.partition("Commands:")[2]
        assert said and not [line for line in said.splitlines() if line.endswith("...")], group


def test_a_rule_without_its_quotes(cli: Any) -> None:
    done = cli("net", "set", "sbx_x", "allow", "api.example.com")
    assert done.returncode == 2 and "in quotes: 'allow api.example.com'" in done.stderr


def test_help_imports_nothing_heavy(cli: Any) -> None:
    code = "import sys; sys.argv = ['l4a', '--help']\nfrom llm4agents.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += "heavy = {'rich', 'httpcore', 'httpx', 'pydantic', 'asyncio', 'ssl'}\n"
    code += "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_completion_knows_commands_and_options(cli: Any) -> None:
    def complete(words: str, at: int) -> list[str]:
        more = {"_LLM4AGENTS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        return list(cli(**more).stdout.split())

    assert complete("llm4agents te", 1) == ["template"]
    assert "--require-kvm" in complete("llm4agents run --re", 2)


@pytest.mark.parametrize(
    "args",
    [
        ["nope"],
        ["run"],
        ["run", "x.py", "-c", "1"],
        ["run", "/no/such/file.py"],
        ["run", "-c", "1", "--env", "novalue"],
        ["run", "-c", "1", "--timeout", "soon"],
        ["run", "-c", "1", "--timeout", "-1"],
        ["create", "--timeout", "0"],
        ["exec", "sbx_x"],
        ["kill"],
        ["kill", "--all", "sbx_x"],
        ["cp", "a", "b"],
        ["cp", "sbx_a:x", "sbx_b:y"],
        ["template", "import", "/no/such"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_two_and_no_traceback(cli: Any, server: Any, args: list[str]) -> None:
    done = cli(*args)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()
    assert done.stdout == ""


def test_no_server_is_three_in_two_lines(cli: Any) -> None:
    done = cli("ls")
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 2
    assert "hint: start it with: llm4agents server start" in done.stderr
    assert cli("server", "status", "--json").returncode == 3
    assert cli("server", "stop").stderr == "no server runs\n"
    bad = cli("ls", LLM4AGENTS_AUTOSTART="maybe")
    assert bad.returncode == 2
    assert "LLM4AGENTS_AUTOSTART" in bad.stderr


def test_run_prints_output_and_value(cli: Any, server: Any) -> None:
    done = cli("run", "-c", "print('a'); 6*7")
    assert (done.returncode, done.stdout) == (0, "a\n42\n")
    assert "note: sandboxes run in software emulation: a test" in done.stderr
    assert cli("run", "-c", "print('a', end='')").stdout == "a\n"
    assert cli("ls", "--json").stdout == '{\n  "sandboxes": []\n}\n'


def test_run_of_a_file_and_of_stdin(cli: Any, server: Any, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("1 + 1")
    assert cli("run", str(tmp_path / "x.py")).stdout == "2\n"
    assert cli("run", "-", stdin="1 + 2").stdout == "3\n"


def test_run_of_code_that_fails_is_one(cli: Any, server: Any) -> None:
    done = cli("run", "-c", "print('before'); 1/0")
    assert (done.returncode, done.stdout) == (1, "before\n")
    assert "ZeroDivisionError" in done.stderr


def test_run_saves_figures_and_files(cli: Any, server: Any, tmp_path: Path) -> None:
    code = "{'image/png': 'iVBORw==', 'text/plain': '<Figure>'}"
    assert "--out DIR saves" in cli("run", "-c", code).stderr
    done = cli("run", "-c", code, "--out", str(tmp_path / "o"), "--file", __file__)
    assert done.returncode == 0
    assert (tmp_path / "o" / "chart-1.png").read_bytes() == b"\x89PNG"
    found = json.loads(cli("run", "--json", "-c", code, "--out", str(tmp_path / "p")).stdout)
    assert found["saved"] == [str(tmp_path / "p" / "chart-1.png")]
    assert found["status"] == "ok"


def test_run_can_require_kvm(cli: Any, server: Any) -> None:
    done = cli("run", "--require-kvm", "-c", "1")
    assert done.returncode == 3
    assert "KVM is required" in done.stderr


def test_a_sandbox_from_create_to_kill(cli: Any, server: Any, tmp_path: Path) -> None:
    id = cli("create", "--metadata", "a=b").stdout.strip()
    short = id[4:12]
    assert cli("run", "--in", short, "-c", "x = 5").returncode == 0
    assert cli("run", "--in", id, "-c", "x").stdout == "5\n"
    assert id in cli("ps").stdout
    assert json.loads(cli("ls", "--json").stdout)["sandboxes"][0]["metadata"] == {"a": "b"}

    passed = cli("exec", short, "--", "sh", "-c", "cat; echo no >&2; exit 7", stdin="given")
    assert (passed.returncode, passed.stdout, passed.stderr) == (7, "given", "no\n")
    assert cli("exec", short, "ls", "-a").stdout.startswith(".")
    assert cli("exec", short, "echo a | tr a b").stdout == "b\n"
    assert json.loads(cli("exec", "--json", short, "exit 2").stdout)["exit_code"] == 2
    assert cli("exec", "--timeout", "0.2", short, "sleep 60").returncode == 124

    (tmp_path / "f").write_text("data")
    assert cli("cp", str(tmp_path / "f"), f"{short}:").returncode == 0
    assert cli("cp", f"{id}:f", str(tmp_path / "g")).returncode == 0
    assert (tmp_path / "g").read_text() == "data"
    assert cli("cp", f"{id}:/no/such", str(tmp_path / "h")).returncode == 3

    assert cli("kill", short).stdout == f"{id}\n"
    assert id not in cli("ls").stdout
    assert "killed" in cli("ls", "--all").stdout
    assert cli("exec", id, "true").returncode == 3
    assert cli("kill", "zzz").returncode == 3


def test_kill_all_and_prefixes_that_mean_many(cli: Any, server: Any) -> None:
    ids = {cli("create").stdout.strip() for _ in range(2)}
    many = cli("exec", "c", "true")
    assert many.returncode == 2
    assert "give more of the id" in many.stderr
    assert set(cli("kill", "--all").stdout.split()) == ids


def test_an_empty_id_is_not_the_only_sandbox_there_is(cli: Any, server: Any) -> None:
    id = cli("create").stdout.strip()
    for empty in ("", "sbx_"):
        done = cli("kill", empty)
        assert (done.returncode, done.stdout) == (2, "")
        assert "is no sandbox's id" in done.stderr
    assert id in cli("ls").stdout


def test_closed_streams_are_no_traceback(environment: dict[str, str], server: Any) -> None:
    for streams in (">&-", "2>&-", "<&- >&- 2>&-"):
        line = f'"{sys.executable}" -m llm4agents ls {streams}'
        done = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_lost_server_is_four(cli: Any, server: Any) -> None:
    id = cli("create").stdout.strip()
    done = cli("run", "--in", id, "-c", "die")
    assert done.returncode == 4
    assert "Traceback" not in done.stderr


def test_ctrl_c_kills_the_sandbox_of_a_run(
    cli: Any, server: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    command = f"import subprocess; subprocess.run(['sh', '-c', 'echo > {started}; sleep 1'])"
    run = [sys.executable, "-m", "llm4agents", "run", "-c", command]
    process = subprocess.Popen(run, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    started.read_text()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert json.loads(cli("ls", "--json").stdout)["sandboxes"] == []


def test_templates_and_disk(cli: Any, server: Any) -> None:
    assert "python  yes" in cli("template", "ls").stdout
    built = cli("template", "build", "base")
    assert (built.returncode, built.stderr) == (0, "… boot\nbase is built (9 B)\n")
    assert "2.0 KiB" in cli("du").stdout
    assert json.loads(cli("du", "--json").stdout)["total_bytes"] == 2048


def test_server_status_and_stop(cli: Any, server: Any) -> None:
    assert json.loads(cli("server", "status", "--json").stdout)["pid"] == server.pid
    assert cli("server", "stop").stderr == "stopped\n"
    assert server.wait(10) == 0


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get")
def test_the_apt_line() -> None:
    from llm4agents.cli.host import apt_command

    assert apt_command(["qemu-system-x86"])[-5:] == [
        "apt-get",
        "install",
        "-y",
        "--no-install-recommends",
        "qemu-system-x86",
    ]


def test_a_server_that_cannot_start_says_so_in_words_to_who_ran_it(cli: Any, tmp_path: Path) -> None:
    open_to_all = cli("server", "run", "--listen", "0.0.0.0:7400")
    assert open_to_all.returncode != 0
    assert open_to_all.stderr.splitlines()[-2].startswith("error: ")
    assert open_to_all.stderr.splitlines()[-1].startswith("hint: ") and "--tls-" in open_to_all.stderr
    held = lock(tmp_path / "s", "state")
    try:
        second = cli("server", "run")
    finally:
        os.close(held)
    assert second.returncode == 3
    assert [line.partition(":")[0] for line in second.stderr.splitlines()] == ["error", "hint"]
    assert str(os.getpid()) in second.stderr and "llm4agents server stop" in second.stderr


def test_a_server_that_runs_already_and_does_not_listen_is_said_to(cli: Any) -> None:
    try:
        assert cli("server", "start").stderr == ""
        again = cli("server", "start", "--json", LLM4AGENTS_LISTEN="127.0.0.1:7400")
        assert again.stderr.startswith("warning: ") and "server stop --keep" in again.stderr
        assert json.loads(again.stdout)["listen"] is None
    finally:
        cli("server", "stop")


def test_counts_are_whole_where_they_are() -> None:
    assert [output.count(value) for value in (0.0, 16384, 0.5, None)] == ["0", "16384", "0.50", "-"]


def test_a_guests_words_move_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("ID", "REASON"), [("sbx_a", "its kernel panicked (\x1b]52;c;eA==\x07)")])
    code = output.report(SandboxDiedError("ended: \x1b[2Jx\r\x9b31m", hint="a\nb"))
    shown = capsys.readouterr()
    assert (shown.out + shown.err).replace("\n", "").isprintable()
    assert shown.err == "error: ended: [2Jx31m\nhint: a\nb\n"
    assert code == output.UNKNOWN


def test_a_wait_is_told_once_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    with output.waiting("a machine starts", 60) as came:
        came()
    with output.waiting("a machine starts", 60):
        pass
    assert capsys.readouterr().err == ""
    with output.waiting("a machine starts", 0):
        said = list[str]()
        eventually(lambda: said.append(capsys.readouterr().err) or "".join(said))  # type: ignore[func-returns-value]
    assert "".join(said) == "… a machine starts\n"


def test_nothing_in_json_moves_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Its encoder leaves C1 controls and marks of direction as they are; lone surrogates could not be printed."""
    said = {"name": "\x9b31m\u202egpj.exe\x7f\x1b[2J\udc9b ü"}
    output.emit(said)
    shown = capsys.readouterr().out
    assert json.loads(shown) == said and "ü" in shown
    assert shown.replace("\n", "").isprintable()
