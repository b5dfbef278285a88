"""How much slower than native the guest is: arithmetic, pandas, process start, a pytest run.

Both sides run the same source with the same package versions (the template's lock file, in a venv of the
cache); times are taken inside the process that runs, so no channel or server is in them.
`factor` = guest / native.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from llm4agents import Sandbox
from tests.bench.common import finish, native_python, percentile

ARITHMETIC = """
def work(n):
    total = 0
    for i in range(n):
        total = (total * 31 + i) % 1000003
    return total
def once():
    work(200_000)
"""

PANDAS = """
import numpy as np, pandas as pd
rng = np.random.default_rng(7)
frame = pd.DataFrame({"key": rng.integers(0, 100, 100_000), "value": rng.random(100_000)})
def once():
    frame.groupby("key").value.agg(["mean", "std", "max"]).sort_values("mean")
    frame.merge(frame.head(1000), on="key", how="inner").value_x.sum()
"""

PROCESS = """
import subprocess
def once():
    for _ in range(10):
        subprocess.run(["/bin/true"], check=True)
"""

PYTEST = """
import subprocess, sys
def once():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", SUITE]
    subprocess.run(command, check=True, capture_output=True)
"""

TIMING = """
import json, time
once()
seconds = []
for _ in range(ROUNDS):
    t = time.perf_counter(); once(); seconds.append(time.perf_counter() - t)
print("SECONDS", json.dumps(seconds))
"""

SUITE = "".join(
    f"import pytest\n\n@pytest.mark.parametrize('n', range(20))\ndef test_{i}(n, tmp_path):\n"
    f"    (tmp_path / 'f').write_text(str(n))\n    assert int((tmp_path / 'f').read_text()) == n\n\n"
    for i in range(10)
)


def seconds(output: str) -> list[float]:
    line = next(line for line in output.splitlines() if line.startswith("SECONDS "))
    return [float(value) for value in json.loads(line.removeprefix("SECONDS "))]


def pure_packages(python: Path, into: Path) -> None:
    """pytest and what it imports, as plain directories that any Python 3.11+ can import."""
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", into, "pytest"],
        check=True,
    )


def main() -> None:
    rounds = 5
    python = native_python()
    tasks = {"arithmetic": ARITHMETIC, "pandas": PANDAS, "process_start": PROCESS, "pytest": PYTEST}
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as scratch, Sandbox.create("python", timeout=3600) as sandbox:
        packages, suite = Path(scratch, "packages"), Path(scratch, "test_suite.py")
        pure_packages(python, packages)
        suite.write_text(SUITE)
        sandbox.files.upload(packages, "packages")
        sandbox.files.write("test_suite.py", SUITE)
        for name, code in tasks.items():
            sides = {}
            for side in ("native", "guest"):
                where, target = (
                    (scratch, suite) if side == "native" else ("/home/user", "/home/user/test_suite.py")
                )
                head = (
                    f"import os, sys\nROUNDS = {rounds}\nSUITE = {str(target)!r}\n"
                    f"sys.path.insert(0, {where + '/packages'!r})\nos.environ['PYTHONPATH'] = {where + '/packages'!r}\n"
                )
                if side == "native":
                    run = subprocess.run(
                        [python, "-c", head + code + TIMING], check=True, capture_output=True, text=True
                    )
                    sides[side] = seconds(run.stdout)
                else:
                    execution = sandbox.run_code(head + code + TIMING, timeout=1800)
                    if execution.error is not None:
                        raise SystemExit(f"{name} failed in the guest: {execution.error.traceback}")
                    sides[side] = seconds(execution.stdout)
            native_s, guest_s = (percentile(sides[side], 50) for side in ("native", "guest"))
            result[name] = {
                "factor": round(guest_s / native_s, 1),
                "native_ms": round(native_s * 1000, 2),
                "guest_ms": round(guest_s * 1000, 2),
                "n": rounds,
            }
            print(name, result[name], file=sys.stderr)
    finish(result)


if __name__ == "__main__":
    main()
