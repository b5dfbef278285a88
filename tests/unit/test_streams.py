"""scripts/streams.py: no test is left out, none is lost in the output, and every part's end counts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.support import eventually

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import streams
sys.exit(streams.Run(json.loads(sys.argv[2]), int(sys.argv[3])).run())
"""


def start(commands: list[tuple[str, list[str]]], streams: int) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", CODE, str(ROOT / "scripts"), json.dumps(commands), str(streams)]
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


def test_the_parts_are_all_tests_there_are_each_once() -> None:
    code = "import json, sys; sys.path.insert(0, sys.argv[1]); import streams; print(json.dumps(streams.parts()))"
    said = subprocess.run(
        [sys.executable, "-c", code, ROOT / "scripts"], capture_output=True, text=True, check=True
    )
    parts = json.loads(said.stdout)
    names = [name for name, _ in parts]
    assert len(names) == len(set(names)) and names[:3] == ["tests/unit", "tests/lab", "tests/barrier/attacks"]
    files = []
    for _, given in parts:
        for path in (ROOT / name for name in given):
            files += [path] if path.is_file() else path.rglob("test_*.py")
    assert len(files) == len(set(files))
    assert set(files) == set((ROOT / "tests").rglob("test_*.py"))


def test_what_failed_anywhere_is_listed_at_the_end_and_all_output_is_there(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_not_here(): pytest.skip('no such host')\n"
    )
    (tmp_path / "test_two.py").write_text(
        "import pytest\n@pytest.fixture\ndef broken(): raise ValueError('set up')\ndef test_it(broken): pass\n"
    )
    pytest = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "-c", os.devnull]
    there = tmp_path / "fifo"
    os.mkfifo(there)
    commands = [
        ("first", [*pytest, f"--rootdir={tmp_path}", str(tmp_path / "test_one.py")]),
        ("second", [*pytest, f"--rootdir={tmp_path}", str(tmp_path / "test_two.py")]),
        # Two that wait for each other: they do run at the same time.
        ("asks", sh(f"echo a question > {there}")),
        ("answers", sh(f"cat {there}")),
        ("dies", sh("echo last words; kill -9 $$")),
        ("whole", sh("true")),
    ]
    run = start(commands, 2)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "assert 1 == 2" in said and "ValueError: set up" in said and "a question\n" in said
    assert said.index("== dies: ended by 9") < said.index("last words") < said.index("== parts")
    end = said[said.index("== short summary of all parts") :].splitlines()
    assert [re.split(r"[:\[ ]", line)[0] for line in end[1:-1]] == ["SKIPPED", "FAILED", "ERROR", "FAILED"]
    assert "test_one.py::test_bad" in end[2] and "test_two.py::test_it" in end[3] and "dies" in end[4]
    assert end[-1].startswith("== 1 failed, 1 error, 1 passed, 1 skipped; 3 of 6 parts failed, in ")


def test_all_passed_is_zero_and_a_failing_command_without_pytest_is_not() -> None:
    for script, code in (("exit 0", 0), ("exit 4", 1)):
        run = start([("one", sh("true")), ("other", sh(script))], 1)
        said, _ = run.communicate(timeout=30)
        assert run.returncode == code, said
        assert ("FAILED other: failed (4)" in said) == (code == 1)


def test_ctrl_c_is_told_to_all_that_run_and_nothing_more_starts(tmp_path: Path) -> None:
    wait = "trap 'echo cleaned; exit 2' INT; touch {0}; while :; do sleep 0.05; done"
    commands = [(name, sh(wait.format(tmp_path / name))) for name in ("a", "b", "c")]
    run = start(commands, 2)
    eventually(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists())
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=30)
    assert run.returncode == 1
    assert said.count("cleaned") == 2 and not (tmp_path / "c").exists()
    assert "FAILED c: not run" in said


def test_a_second_ctrl_c_ends_what_does_not_clean_up(tmp_path: Path) -> None:
    script = f"trap 'touch {tmp_path}/told' INT; touch {tmp_path}/up; while :; do sleep 0.05; done"
    run = start([("deaf", sh(script))], 1)
    eventually((tmp_path / "up").exists)
    run.send_signal(signal.SIGINT)
    eventually((tmp_path / "told").exists)
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=30)
    assert run.returncode == 1 and "deaf: ended by 15" in said


def test_how_many_at_a_time_is_a_number(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "streams.py"), str(tmp_path)]
    for wrong in ("0", "two", "-1", ""):
        said = subprocess.run(
            command, env={**os.environ, "TEST_STREAMS": wrong}, capture_output=True, text=True, check=False
        )
        assert said.returncode == 1 and "from 1 to 99" in said.stderr
