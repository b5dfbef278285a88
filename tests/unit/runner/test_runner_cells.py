"""What a cell's code sees and what comes back of it."""

from __future__ import annotations

import json

import pytest

from tests.unit.runner.runner_process import Cell, Runner


def test_state_is_kept_and_the_last_value_comes_back(runner: Runner) -> None:
    runner.ok("x = 20\ndef f(n):\n    return n + 1")
    assert runner.ok("f(x)").value == "21"
    assert runner.ok("_ + 1").value == "22"


@pytest.mark.parametrize(
    "code", ["5;", "x = 5\nx;", "(5);  # quiet", "x = 5", "None", "", "# nothing", "def f(): pass"]
)
def test_nothing_is_shown_for(runner: Runner, code: str) -> None:
    assert not runner.ok(code).results


@pytest.mark.parametrize("code", ["5", "x = 5\nx", "x = 1;5", "(\n5\n)", "';' and 5", "5  # ;"])
def test_the_value_is_shown_for(runner: Runner, code: str) -> None:
    assert runner.ok(code).value == "5"


def test_output_and_value_keep_their_order(runner: Runner) -> None:
    cell = runner.ok(
        "import sys\nprint('a')\nprint('b', file=sys.stderr)\nprint('c', end='')\nprint('d', file=sys.stderr)\n1"
    )
    shown = [(e["type"], e.get("text")) for e in cell.events]
    assert shown == [
        ("stdout", "a\n"), ("stderr", "b\n"), ("stdout", "c"), ("stderr", "d\n"), ("result", None), ("end", None),
    ]  # fmt: skip


def test_output_is_streamed_while_the_cell_runs(runner: Runner) -> None:
    cell = runner.start(
        "print('first')\nwith open('gate') as gate: gate.read()\nprint('second')", cwd=_gate(runner)
    )
    cell.until("first\n")
    (runner.directory / "gate").open("w").close()
    assert cell.wait().stdout == "first\nsecond\n"


def _gate(runner: Runner) -> str:
    import os

    gate = runner.directory / "gate"
    gate.unlink(missing_ok=True)
    os.mkfifo(gate)
    return str(runner.directory)


def test_a_childs_and_c_codes_output_comes_out_in_order(runner: Runner) -> None:
    cell = runner.ok(
        "import os, subprocess, ctypes\nprint('a')\nos.system('echo b; echo e >&2')\nprint('c')\n"
        "subprocess.run(['echo', 'd'])\nctypes.CDLL(None).write(1, b'f\\n', 2)\nprint('g');"
    )
    assert cell.stdout == "a\nb\nc\nd\nf\ng\n"
    assert cell.stderr == "e\n"


def test_much_output_of_a_child_is_whole(runner: Runner) -> None:
    cell = runner.ok("import os\nos.system('head -c 3000000 /dev/zero | tr \"\\\\0\" x');")
    assert cell.stdout == "x" * 3_000_000


def test_bytes_that_are_not_utf8_are_replaced(runner: Runner) -> None:
    cell = runner.ok(
        "import os, sys\nos.write(1, b'\\xff\\xfe ok\\n')\nsys.stdout.buffer.write(b'\\xe4\\n')\nprint('\\udcff\\x00é')"
    )
    assert cell.stdout == "\ufffd\ufffd ok\n\ufffd\n?\x00é\n"


def test_an_error_shows_the_cells_frames_and_lines_only(runner: Runner) -> None:
    runner.ok("import json\ndef deep(s):\n    return json.loads(s)")
    cell = runner.run("deep('{')")
    assert cell.status == "error" and cell.error["name"] == "JSONDecodeError"
    text = cell.error["traceback"]
    assert text.startswith("Traceback (most recent call last):\n") and "return json.loads(s)" in text
    assert "runner" not in text and text.count("  File ") == 3  # two of the cells, and where it was raised


def test_a_syntax_error_points_at_the_line(runner: Runner) -> None:
    cell = runner.run("a = 1\nb = = 2")
    assert cell.error["name"] == "SyntaxError" and "    b = = 2\n" in cell.error["traceback"]


def test_a_syntax_error_of_the_code_itself_does_not_run_it_twice(runner: Runner) -> None:
    runner.ok("calls = []")
    assert runner.run("[calls.append(1), compile('=', 'f', 'eval')]").error["name"] == "SyntaxError"
    assert runner.ok("len(calls)").value == "1"


@pytest.mark.parametrize("code,name", [
    ("import sys; sys.exit(4)", "SystemExit"), ("exit()", "SystemExit"), ("input('? ')", "RuntimeError"),
    ("def f(): f()\nf()", "RecursionError"), ("raise ExceptionGroup('g', [ValueError(1)])", "ExceptionGroup"),
    ("class E(Exception):\n  def __str__(self): 1/0\nraise E", "E"), ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("import sys\nsys.stdin.readline() or 1/0", "ZeroDivisionError"), ("%nonsense\n1", "SyntaxError"),
])  # fmt: skip
def test_what_ends_a_cell_is_an_error_and_the_interpreter_goes_on(
    runner: Runner, code: str, name: str
) -> None:
    runner.ok("kept = 1")
    cell = runner.run(code)
    assert (cell.status, cell.error["name"]) == ("error", name)
    assert runner.ok("kept").value == "1"


def test_main_is_a_real_module(runner: Runner) -> None:
    runner.ok(
        "import dataclasses, pickle, sys, inspect, multiprocessing\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int\n"
        "def square(p):\n    print('child')\n    return p.x ** 2\n"
    )
    assert runner.ok(
        "__name__, pickle.loads(pickle.dumps(Point(3))), vars(sys.modules['__main__'])['Point'] is Point"
    ).value == ("('__main__', Point(x=3), True)")
    assert "return p.x ** 2" in runner.ok("print(inspect.getsource(square))").stdout
    cell = runner.ok(
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n    print(pool.map(square, [Point(2), Point(3)]))"
    )
    assert cell.stdout.replace("child\n", "") == "[4, 9]\n" and cell.stdout.count("child\n") == 2


def test_a_forked_child_that_comes_back_from_the_cell_ends(runner: Runner) -> None:
    cell = runner.ok(
        "import os\npid = os.fork()\nif pid: status = os.waitpid(pid, 0)[1]\nelse: print('from the child')"
    )
    assert cell.stdout == "from the child\n" and runner.ok("status").value == "0"
    cell = runner.ok("pid = os.fork()\nif pid: status = os.waitpid(pid, 0)[1]\nelse: 1/0")
    assert "ZeroDivisionError" in cell.stderr and runner.ok("os.waitstatus_to_exitcode(status)").value == "1"


def test_top_level_await_shares_one_loop(runner: Runner) -> None:
    runner.ok("import asyncio\nq = asyncio.Queue()\nawait q.put(7)")
    assert runner.ok("await q.get()").value == "7"
    assert runner.ok("async def f():\n    return 8\nx = await f()\nx").value == "8"
    assert runner.ok("asyncio.run(f())").value == "8"


def test_future_imports_last(runner: Runner) -> None:
    runner.ok("from __future__ import annotations", context="future")
    assert (
        runner.ok("def f(x: Unknown): pass\nf.__annotations__", context="future").value == "{'x': 'Unknown'}"
    )


def test_environment_holds_for_the_cell_and_the_directory_stays(runner: Runner) -> None:
    (runner.directory / "sub").mkdir()
    cell = runner.ok(
        "import os; os.environ['A'], os.getcwd()", env={"A": "b"}, cwd=str(runner.directory / "sub")
    )
    assert cell.value == repr(("b", str(runner.directory / "sub")))
    assert runner.ok("'A' in os.environ, os.getcwd()").value == repr((False, str(runner.directory / "sub")))
    assert runner.run("1", cwd="/nowhere").error["name"] == "FileNotFoundError"


def test_modules_beside_the_code_are_importable_and_ours_are_not(runner: Runner) -> None:
    (runner.directory / "display.py").write_text("mine = 1")
    assert runner.ok("import os\nfrom display import mine\nmine", cwd=str(runner.directory)).value == "1"


def test_contexts_do_not_see_each_other_and_are_bounded(runner: Runner) -> None:
    runner.ok("only = 1", context="one")
    assert runner.run("only", context="two").error["name"] == "NameError"
    runner.ok("only", context="one")
    last = [runner.run("1", context=f"many{n}") for n in range(16)][-1]
    assert last.error["name"] == "TooManyContexts"


def test_no_network_is_said(runner: Runner) -> None:
    codes = (
        "import socket; raise socket.gaierror(-3, 'Temporary failure')",
        "import errno, urllib.error; raise urllib.error.URLError(OSError(errno.ENETUNREACH, 'x'))",
        "try:\n    raise OSError(errno.ENETUNREACH, 'x')\nexcept OSError as e:\n    raise RuntimeError('wrapped')",
        "raise ConnectionError(ConnectionError('pool', OSError(errno.ENETUNREACH, 'x')))",
    )
    for code in codes:
        assert "this sandbox has no network that leads there" in runner.run(code).error["traceback"]
    assert "no network" not in runner.run("raise ConnectionRefusedError(111, 'x')").error["traceback"]


def test_a_plain_cell_imports_no_ipython_and_nothing_of_the_runners_is_in_the_way(runner: Runner) -> None:
    cell = runner.ok(
        "import sys\n[m for m in sys.modules if m.split('.')[0] in ('IPython', 'asyncio', 'worker', 'streams')]",
        context="two",
    )
    assert cell.value == "[]"


def test_bad_requests_are_answered(runner: Runner) -> None:
    for request in ({"op": "what"}, {"op": "run", "context": 5}, {}):
        assert Cell(runner.path, request).wait().error["name"] == "BadRequest"
    assert runner.run(5).status == "error"  # type: ignore[arg-type]
    assert runner.op("ping").status == "ok"


def test_large_code_and_json(runner: Runner) -> None:
    assert runner.ok("x = '" + "y" * 3_000_000 + "'\nlen(x)").value == "3000000"
    assert json.loads(json.dumps(runner.ok("'é\\u2028'").value)) == repr("é\u2028")
    assert runner.ok("x = '" + "y" * 300_000 + "'\nlen(x)", context="one").value == "300000"
