"""The command line against the real server and real microVMs, as processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llm4agents import config

pytestmark = pytest.mark.vm
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """State and sockets of this file's own; templates from the cache of whoever runs this."""
    home = Path(tempfile.mkdtemp(prefix=f"l4a-cli-{os.getpid()}-"))
    env = {name: value for name, value in os.environ.items() if not name.startswith("LLM4AGENTS_")}
    env.update(
        LLM4AGENTS_CACHE=str(config.settings().cache),
        LLM4AGENTS_CA=str(config.settings().ca_directory),  # with another it would build templates of its own
        LLM4AGENTS_STATE=str(home / "s"),
        LLM4AGENTS_RUN=str(home / "r"),
        HOME=str(home),
    )
    yield env
    subprocess.run([sys.executable, "-m", "llm4agents", "server", "stop"], env=env, check=True, timeout=60)
    # What a test imports would be what `base` means from now on, whatever changes in this checkout.
    for pin in config.settings().cache.glob("templates/*/pinned-*"):
        pin.unlink()
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def cli(environment: dict[str, str]) -> Run:
    def run(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llm4agents", *args]
        given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, **given)  # type: ignore[call-overload,no-any-return]

    return run


def test_run_prints_42(cli: Run) -> None:
    done = cli("run", "-c", "print(6*7)")
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_run_with_a_file_in_and_a_chart_and_files_out(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a,b\n1,2\n3,4\n")
    (tmp_path / "x.py").write_text(
        "import pandas as pd, matplotlib.pyplot as plt\n"
        "df = pd.read_csv('d.csv')\nprint(len(df))\n"
        "df.plot(); plt.show()\n"
        "open('/home/user/out/said.txt', 'w').write('yes')\nint(df.b.sum())\n"
    )
    out = tmp_path / "out"
    done = cli("run", str(tmp_path / "x.py"), "--file", str(tmp_path / "d.csv"), "--out", str(out))
    assert (done.returncode, done.stdout) == (0, "2\n6\n"), done.stderr
    assert (out / "chart-1.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "said.txt").read_text() == "yes"


def test_run_of_code_that_fails(cli: Run) -> None:
    done = cli("run", "-", stdin="print('before')\n1/0")
    assert (done.returncode, done.stdout) == (1, "before\n")
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


def test_run_leaves_nothing(cli: Run) -> None:
    assert json.loads(cli("ls", "--json").stdout) == {"sandboxes": []}


def test_a_sandbox_by_hand(cli: Run, tmp_path: Path) -> None:
    id = cli("create", "-t", "base", "--metadata", "by=hand").stdout.strip()
    short = id[4:14]
    done = cli("exec", short, "--", "sh", "-c", "cat; echo err >&2; exit 9", stdin="given")
    assert (done.returncode, done.stdout, done.stderr) == (9, "given", "err\n")
    assert cli("exec", "-u", "root", short, "id -u").stdout == "0\n"
    assert cli("exec", short, "no-such", "command").returncode == 127
    assert cli("exec", "--timeout", "1", short, "sleep 60").returncode == 124
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_bytes(bytes(range(256)) * 4_000)
    assert cli("cp", str(tmp_path / "tree"), f"{short}:").returncode == 0
    assert cli("cp", f"{id}:tree", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back" / "f").read_bytes() == (tmp_path / "tree" / "f").read_bytes()
    assert cli("cp", f"{id}:/no/such", str(tmp_path)).returncode == 3
    assert id in cli("ls").stdout
    assert cli("kill", short).returncode == 0
    assert cli("exec", id, "true").returncode == 3
    assert "killed" in cli("ls", "--all").stdout


def test_state_stays_with_in(cli: Run) -> None:
    id = cli("create").stdout.strip()
    assert cli("run", "--in", id, "-c", "x = 41").returncode == 0
    assert cli("run", "--in", id, "-c", "x + 1").stdout == "42\n"
    assert cli("kill", "--all").stdout.strip() == id


def test_ctrl_c_interrupts_and_kills(cli: Run, environment: dict[str, str]) -> None:
    code = "print('begun', flush=True)\nwhile True: pass"
    process = subprocess.Popen(
        [sys.executable, "-m", "llm4agents", "run", "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert json.loads(cli("ls", "--json").stdout) == {"sandboxes": []}


def test_what_is_said_of_this_host(cli: Run) -> None:
    done = cli("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    assert report["accelerator"] in ("kvm", "tcg")
    assert cli("server", "status").returncode == 0
    assert {item["name"] for item in json.loads(cli("template", "ls", "--json").stdout)["templates"]} >= {
        "base",
        "python",
    }
    assert json.loads(cli("du", "--json").stdout)["total_bytes"] > 0
    assert cli("create", "-t", "nope").returncode == 3
    assert cli("create", "--memory-mib", "7").returncode == 2


def test_a_template_travels_in_one_file(cli: Run, tmp_path: Path) -> None:
    file = tmp_path / "base.l4a"
    assert cli("template", "build", "base").returncode == 0
    exported = cli("template", "export", "base", str(file))
    assert exported.returncode == 0, exported.stderr
    assert file.stat().st_size > 1_000_000
    taken = cli("template", "import", str(file))
    assert taken.returncode == 0, taken.stderr
    (tmp_path / "broken").write_bytes(file.read_bytes()[:500_000])
    broken = cli("template", "import", str(tmp_path / "broken"))
    assert broken.returncode in (2, 3)
    assert "Traceback" not in broken.stderr


def test_doctor_without_qemu(environment: dict[str, str]) -> None:
    env = {**environment, "LLM4AGENTS_QEMU": "/no/such/qemu"}
    done = subprocess.run(
        [sys.executable, "-m", "llm4agents", "doctor"], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "cannot run sandboxes" in done.stdout
