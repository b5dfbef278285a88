"""The link process as an ordinary user: it works in a user namespace, and says what to do where it cannot."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="prepares the system for an ordinary user: needs root"
)


def run(case: str, directory: Path) -> dict[str, Any]:
    argv = [sys.executable, "-m", "tests.barrier.unprivileged", case, str(directory)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_ordinary_users_link_keeps_every_promise(tmp_path: Path) -> None:
    assert run("works", tmp_path) == {
        "uid": 65534,
        "syn_ack": ["203.0.113.9", 0x12],
        "query": "query",
        "answer_from": "8.8.8.8",
        "refused": [3, 13],
        "logged": ["denied", "source"],
        "captured": "seen",
    }


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("closed", "chmod 0666 /dev/net/tun"),
        ("no device", "modprobe tun"),
        ("chroot", "pivot_root"),
    ],
)
def test_where_it_cannot_it_says_what_to_do(case: str, words: str, tmp_path: Path) -> None:
    assert words in run(case, tmp_path)["problem"]
