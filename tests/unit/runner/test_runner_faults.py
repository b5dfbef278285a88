"""Interrupts, timeouts, dead interpreters, unread output, what cells leave behind, and fresh randomness."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.runner.runner_process import WAIT_S, Cell, Runner


def test_an_interrupt_ends_the_cell_and_keeps_its_variables(runner: Runner) -> None:
    runner.ok("kept = 5")
    for code in (
        "while True: pass",
        "import time; time.sleep(1000)",
        "import subprocess; subprocess.run(['sleep', '1000'])",
    ):
        cell = runner.start("print('go')\n" + code).until("go")
        assert runner.op("interrupt").status == "ok"
        assert cell.wait().status == "interrupted" and cell.error["name"] == "KeyboardInterrupt"
        assert runner.ok("kept").value == "5"


def test_an_interrupt_between_cells_does_nothing(runner: Runner) -> None:
    assert runner.op("interrupt").status == "ok"
    assert runner.op("interrupt", "unknown").status == "ok"
    runner.ok("1")


def test_a_client_that_hangs_up_interrupts(runner: Runner) -> None:
    cell = runner.start(
        "ended = None\ntry:\n    print('go')\n    while True: x = 1\nfinally:\n    ended = True"
    ).until("go")
    cell.close()
    assert runner.ok("ended").value == "True"


def test_a_client_that_only_half_closes_does_not(runner: Runner) -> None:
    cell = Cell(
        runner.path,
        {"op": "run", "code": "print('go')\nimport os\nfor _ in range(1000): os.sched_yield()\n'whole'"},
    )
    cell.socket.shutdown(socket.SHUT_WR)
    assert cell.wait().value == "'whole'"


def test_a_timeout_ends_the_cell(runner: Runner) -> None:
    cell = runner.run("kept = 6\nwhile True: pass", timeout_s=0.1)
    assert (cell.status, cell.error["name"]) == ("timed_out", "TimeoutError")
    assert runner.ok("kept", timeout_s=60).value == "6"


def test_a_cell_that_swallows_its_timeout_is_killed(runner: Runner) -> None:
    cell = runner.run(
        "while True:\n    try:\n        for _ in iter(int, 1): pass\n    except KeyboardInterrupt: print('no')",
        timeout_s=0.1,
    )
    assert (cell.status, cell.error["name"]) == ("timed_out", "InterpreterDied")
    assert "no\n" in cell.stdout
    assert runner.run("kept").error["name"] == "NameError"


def test_a_cell_stuck_in_c_code_is_killed(runner: Runner) -> None:
    cell = runner.run("sum(range(10**15))", timeout_s=0.1)
    assert (cell.status, cell.error["name"]) == ("timed_out", "InterpreterDied")


def test_restart_ends_what_runs_and_forgets(runner: Runner) -> None:
    runner.ok("kept = 7")
    cell = runner.start(
        "while True:\n    try:\n        print('go')\n        for _ in iter(int, 1): pass\n"
        "    except KeyboardInterrupt: pass"
    ).until("go")
    assert runner.op("restart").status == "ok"
    assert cell.wait().status == "died" and "was restarted" in cell.error["value"]
    assert runner.run("kept").error["name"] == "NameError"
    assert runner.op("restart").status == "ok"  # an idle one
    assert runner.ok("1").events[-1]["execution_count"] == 1


@pytest.mark.parametrize("code,how", [
    ("import os; os._exit(3)", "exited with code 3"),
    ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "perhaps for want of memory"),
    ("import os; print('last words'); os.abort()", "SIGABRT"),
])  # fmt: skip
def test_a_dead_interpreter_is_an_error_and_the_next_cell_gets_a_new_one(
    runner: Runner, code: str, how: str
) -> None:
    runner.ok("kept = 1")
    cell = runner.run(code)
    assert cell.status == "died" and cell.error["name"] == "InterpreterDied" and how in cell.error["value"]
    assert ("last words" in code) == ("last words" in cell.stdout)
    assert runner.run("kept").error["name"] == "NameError"


def test_a_cell_that_waits_survives_the_death_of_the_one_before(runner: Runner) -> None:
    first = runner.start(
        "print('go')\nopen('gate2').read()\nimport os; os._exit(0)", cwd=_fifo(runner, "gate2")
    ).until("go")
    waiting = [runner.start(f"{n}") for n in range(3)]
    assert runner.op("ping").status == "ok"  # accepted after the three, so they are in line
    (runner.directory / "gate2").open("w").close()
    assert first.wait().status == "died"
    assert [cell.wait().value for cell in waiting] == ["0", "1", "2"]


def _fifo(runner: Runner, name: str) -> str:
    os.mkfifo(runner.directory / name)
    return str(runner.directory)


def test_other_contexts_run_while_one_is_busy(runner: Runner) -> None:
    cell = runner.start("print('go')\nwhile True: pass").until("go")
    assert runner.ok("1+1", context="other").value == "2"
    busy = runner.start("print('go')\nwhile True: pass", context="other").until("go")
    runner.op("interrupt")
    assert cell.wait().status == "interrupted"
    assert runner.ok("3").value == "3"
    runner.op("interrupt", "other")
    assert busy.wait().status == "interrupted"


@pytest.mark.parametrize(
    "code",
    [
        "while True: print('x' * 1000)",
        "import os\nos.system('yes')",
        "display('x' * 900_000)\nwhile True: display('x' * 900_000)",
    ],
)
def test_unread_output_holds_up_only_its_cell_and_can_be_ended(runner: Runner, code: str) -> None:
    cell = runner.start(code)
    cell.next()
    assert runner.ok("1+1", context="other").value == "2"
    assert runner.op("interrupt").status == "ok"
    assert cell.wait().status in ("interrupted", "ok")  # os.system returns when its child got the ^C
    assert runner.ok("1").value == "1"


def test_unread_output_of_a_client_that_leaves(runner: Runner) -> None:
    runner.start("while True: print('x' * 1000)").close()
    assert runner.ok("1").value == "1"
    runner.start("import os; os.system('yes');").close()
    assert runner.ok("1").value == "1"


def test_200_mb_arrive_whole(runner: Runner) -> None:
    cell = runner.start("line = 'x' * 999_999\nfor _ in range(200): print(line)")
    size = 0
    while (event := cell.next())["type"] != "end":
        size += len(event["text"])
        cell.events.clear()
    assert size == 200_000_000


def test_threads_left_behind_may_print_later(runner: Runner) -> None:
    runner.ok(
        "import threading, os\ngo = threading.Event(); done = threading.Event()\n"
        "def late():\n    go.wait()\n    for _ in range(100_000): print('late')\n    done.set()\n"
        "threading.Thread(target=late, daemon=True).start()"
    )
    cell = runner.ok("go.set(); done.wait(60)")
    assert cell.status == "ok" and "late" in cell.stdout
    runner.ok(
        "go.clear(); done.clear(); threading.Thread(target=late, daemon=True).start()\n"
        "threading.Timer(0, go.set).start()"
    )
    assert runner.ok("done.wait(60)").value == "True"
    runner.ok(
        "def many():\n    for _ in range(3000): print('many')\n"
        "threads = [threading.Thread(target=many) for _ in range(4)]\nfor t in threads: t.start()"
    )
    assert "Exception" not in runner.ok("many()\nfor t in threads: t.join()").stderr


def test_a_background_process_may_print_later(runner: Runner) -> None:
    directory = _fifo(runner, "gate3")
    runner.ok(
        "import subprocess\np = subprocess.Popen('cat gate3; echo late; echo x > gate4', shell=True)",
        cwd=directory,
    )
    os.mkfifo(runner.directory / "gate4")
    (runner.directory / "gate3").open("w").close()
    (runner.directory / "gate4").read_text()
    assert "late\n" in runner.ok("p.wait()").stdout


def test_a_background_process_survives_its_interpreter(runner: Runner) -> None:
    directory = _fifo(runner, "gate5")
    runner.ok(
        "import subprocess\nsubprocess.Popen('cat gate5; echo alive; echo x > gate6', shell=True);",
        cwd=directory,
    )
    os.mkfifo(runner.directory / "gate6")
    assert runner.run("import os; os._exit(1)").status == "died"
    (runner.directory / "gate5").open("w").close()
    (runner.directory / "gate6").read_text()
    assert "alive\n" in runner.ok("1").stdout


def test_the_control_socket_answers_when_the_default_worker_is_stopped(runner: Runner) -> None:
    pid = int(runner.ok("import os; os.getpid()").value)
    os.kill(pid, signal.SIGSTOP)
    assert runner.op("restart", control=True).status == "ok"
    assert int(runner.ok("import os; os.getpid()").value) != pid


def test_a_worker_holds_nobodys_connection(runner: Runner) -> None:
    """Not even the one whose request made the zygote fork it: hosts would never see their end."""
    runner.ok("1", context="holds nothing")
    code = "import os, glob\n[os.readlink(p) for p in glob.glob('/proc/self/fd/*') if os.path.islink(p)]"
    cell = runner.ok(code, context="holds nothing")
    # control, both ends of the stash, the running cell's connection; the listeners are the default worker's
    assert cell.value.count("socket:") == 4


def test_clients_that_say_nothing_hold_up_nobody(runner: Runner) -> None:
    silent = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    for each in silent:
        each.connect(runner.path + ".control")
    assert runner.op("ping", control=True).status == "ok"
    for each in silent:
        each.close()
    with socket.socket(socket.AF_UNIX) as hostile:
        hostile.settimeout(WAIT_S)
        hostile.connect(runner.path)
        hostile.sendall(struct.pack("<I", 2**31) + b"x")
        assert hostile.recv(1) == b""
    runner.ok("1")


DRAWS = """
import random, uuid, tempfile, ssl, secrets, os, json
def draw():
    return [random.random(), str(uuid.uuid4()), str(uuid.uuid1())[14:], next(tempfile._get_candidate_names()),
            ssl.RAND_bytes(8).hex(), secrets.token_hex(8)]
draw();
"""


def test_copies_that_are_given_the_signal_draw_differently(runner: Runner) -> None:
    """A fork that hides itself from CPython's own fork hooks is what a clone of the machine looks like."""
    runner.ok(DRAWS + "handler = __import__('signal').getsignal(10 + 2)", context="draws")
    # libc's fork, not os.fork: no after-fork hook runs, so without the signal both halves are equal.
    code = (
        "import ctypes, os, signal\nr, w = os.pipe()\npid = ctypes.PyDLL(None).fork()\n"
        "if {signal}: os.kill(os.getpid(), signal.SIGUSR2)\n"
        "mine = draw()\n"
        "if not pid:\n    os.write(w, json.dumps(mine).encode()); os._exit(0)\n"
        "os.waitpid(pid, 0)\ntheirs = json.loads(os.read(r, 65536))\n"
        "print(json.dumps([a == b for a, b in zip(mine, theirs)]))"
    )
    assert json.loads(runner.ok(code.format(signal=True), context="draws").stdout) == [False] * 6
    assert (
        json.loads(runner.ok(code.format(signal=False), context="draws").stdout)[0] is True
    )  # the test can see


def test_the_zygote_passes_the_signal_on(runner: Runner) -> None:
    runner.ok("import random\nrandom.seed(1)\nexpected = random.random()\nrandom.seed(1)", context="pass")
    os.kill(runner.process.pid, signal.SIGUSR2)
    runner.op("ping", control=True)
    assert runner.ok("random.random() == expected", context="pass").value == "False"


@pytest.fixture
def warmed(tmp_path: Path) -> Iterator[Runner]:
    warm = tmp_path / "warm.py"
    warm.write_text("# %% one\nimport fractions\nleft = 1\n# %% two\n1/0\n")
    made = Runner(tmp_path, "--warm", str(warm), "--preload", "json,no_such_module")
    yield made
    made.stop()


def test_warm_up_leaves_modules_and_no_variables(warmed: Runner) -> None:
    assert warmed.ready == {"problems": ["warm-up cell: ZeroDivisionError: division by zero"]}
    assert "no_such_module" in warmed.log
    cell = warmed.ok("import sys\n'fractions' in sys.modules, 'left' in globals()")
    assert cell.value == "(True, False)" and cell.events[-1]["execution_count"] == 1


def test_idle_processes_do_not_wake(warmed: Runner) -> None:
    pid = int(warmed.ok("import os; os.getpid()").value)

    def switches(of: int) -> int:
        """How often it has gone to sleep, once it sleeps."""
        while True:
            status = Path(f"/proc/{of}/status").read_text()
            if "State:\tS" in status:
                found = [line for line in status.splitlines() if line.startswith("voluntary")]
                return int(found[0].split()[1])
            os.sched_yield()

    before = [switches(each) for each in (pid, warmed.process.pid)]
    for _ in range(20):
        warmed.op("ping", control=True)  # the worker has nothing to do with these
    assert switches(pid) == before[0]
    for _ in range(3):
        warmed.ok("print(6*7)")
    asleep = [
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Threads")
    ]
    assert asleep == ["Threads:\t1"]
