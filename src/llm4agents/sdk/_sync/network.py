# Generated from _async/network.py by scripts/unasync.py: change that file, then run the script.
"""`sandbox.network`: what a sandbox may reach."""

from __future__ import annotations

from typing import Any

from llm4agents.sdk import results
from llm4agents.sdk._sync.transport import Transport


class Network:
    """What one sandbox may reach, and why something is allowed or not. `sandbox.update_network` changes it."""

    def __init__(self, transport: Transport, sandbox: str) -> None:
        self._transport, self._sandbox = transport, sandbox
        self._path = f"/v1/sandboxes/{sandbox}/network"

    def get(self) -> results.NetworkInfo:
        """What was asked for, whether there is a way out at all, and what keeps it from being as asked."""
        return results.network_info(self._transport.json("GET", self._path, sandbox=self._sandbox))

    def why(self, url: str) -> dict[str, Any]:
        """Whether `url` (or `host:port`) is allowed now: `allowed`, `rule`, `reason`, `via` (`splice`, `raw`,
        `intercept` or None) and `steps`, every rule looked at as `{rule, matched, why}`."""
        return self._transport.json("POST", f"{self._path}/why", {"url": url}, sandbox=self._sandbox)
