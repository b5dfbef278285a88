"""What the benchmarks share: percentiles, the closing line, a native Python with the template's packages."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llm4agents.config import settings


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: always a value that was seen."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, round(percent / 100 * len(ordered) + 0.5) - 1))]


def summary(values: Sequence[float], *, digits: int = 1) -> dict[str, float]:
    return {
        "p50": round(percentile(values, 50), digits),
        "p95": round(percentile(values, 95), digits),
        "n": len(values),
    }


def finish(result: dict[str, object]) -> None:
    """The one JSON object every benchmark ends in."""
    print(json.dumps(result))


def native_python() -> Path:
    """A Python on this host with the packages of the `python` template, made once in the cache.

    For comparing guest and host; the package versions are the template's own lock file.
    """
    root = Path(__file__).resolve().parents[2]
    lock = root / "src" / "llm4agents" / "images" / "data" / "python.lock"
    key = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:16]
    venv = settings().cache / "build" / f"bench-venv-{key}"
    python = venv / "bin" / "python"
    if not (venv / ".whole").exists():
        print("preparing a native Python with the template's packages", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "--require-hashes", "--only-binary", ":all:", "-r", lock], check=True)
        (venv / ".whole").touch()
    # Some machines pin OpenBLAS to an old kernel for old builds; a current numpy is measured as it is.
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        os.environ.pop(name, None)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    return python
