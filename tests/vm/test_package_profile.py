"""Profile `packages` in a real guest: its tools are told what this host's use, and no password.

That installs work through it is tests/barrier's; what the host's tools say is asked of the same code in the test.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from llm4agents.barrier.packages import Discovery
from tests.support import Node

pytestmark = pytest.mark.vm


def _told(node: Node, sandbox: str) -> tuple[dict[str, str], dict[str, str]]:
    script = "import json,os,sys;print(json.dumps([dict(os.environ),{p:open(p).read() for p in sys.argv[1:] if os.path.exists(p)}]))"
    answer = node.http.post(
        f"/v1/sandboxes/{sandbox}/exec",
        json={"argv": ["python3", "-c", script, "/etc/llm4agents/npmrc", "/etc/apt/sources.list"]},
    ).json()
    env, files = json.loads(answer["stdout"])
    return env, files
