"""Whether this host can do the main job, asked without a server: it must work where none can start.

The one place where the SDK reaches past HTTP (a stated exception in tests/unit/test_layering.py).
"""

from __future__ import annotations

from typing import Any

from llm4agents.config import settings
from llm4agents.sdk import _wire


def report() -> dict[str, Any]:
    """The report of interfaces.md: `ok`, `accelerator`, `checks`, `packages_missing`… Takes seconds at most.

    With LLM4AGENTS_URL set it is the remote server's report. Raises UnsupportedPlatformError elsewhere.
    """
    ours = settings()
    _wire.check_platform(ours.url)
    if ours.url is not None:
        from llm4agents.sdk._sync.client import Client

        with Client() as client:
            return client.doctor()
    import llm4agents.engine.doctor as doctor

    found: dict[str, Any] = doctor.report(ours)
    return found
