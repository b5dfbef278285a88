# Generated from _async/network.py by scripts/unasync.py: change that file, then run the script.
"""`sandbox.network`: what a sandbox may reach."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from llm4agents.errors import InvalidRequestError, LLM4AgentsError
from llm4agents.sdk import _wire, results
from llm4agents.sdk._landing import Guard
from llm4agents.sdk._runtime import blocking
from llm4agents.sdk._sync.transport import Transport

Verdict = Literal["allow", "deny"]


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

    def log(
        self,
        *,
        follow: bool = False,
        verdict: Verdict | None = None,
        kind: str | None = None,
        limit: int = 1_000,
        after: float | None = None,
    ) -> Iterator[dict[str, Any]]:
        """The audit: a record for each connection, request, name asked for and packet refused, oldest first.

        Records are dicts: `at` (unix seconds), `kind` (dns, connection, request, packet, policy, gateway), `verdict`,
        `rule`, `reason`, `name`, `address`, `port`, `protocol`, `method`, `path`, `status`, `bytes_in`, `bytes_out` (as
        the guest counts), `duration_ms`, `credentials` (names of secrets), `repeated`; what is not known is not there.
        `kind` may be several, with commas; `after` unix seconds; `limit` newest ones, 10,000 at most. With `follow` it
        goes on until the sandbox has ended.
        """
        params = {"verdict": verdict, "kind": kind, "limit": limit, "after": after}
        path = f"{self._path}/log"
        if not follow:
            answer = self._transport.json("GET", path, params=params, sandbox=self._sandbox)
            for record in answer.get("data") or ():
                yield dict(record)
            return
        lines = _wire.LineDecoder()
        stream = self._transport.stream(
            "GET", path, params={**params, "follow": True}, wait_s=None, sandbox=self._sandbox
        )
        with stream:
            for piece in stream:
                for record in lines.feed(piece):
                    if _wire.is_problem(record):
                        raise LLM4AgentsError(str(record.get("detail")))
                    yield record

    def capture(self, bytes_max: int | None = None) -> dict[str, Any]:
        """Captures every packet from now on, on the host, in at most `bytes_max` bytes of disk (64 MiB; the oldest go).

        It goes on over pauses and a server's death, until `stop_capture` or the sandbox's end. Returns `running`,
        `bytes`, `since` (unix seconds), `bytes_max`, and of one under way `packets` and `dropped`.
        """
        body = _wire.without_none({"bytes_max": bytes_max})
        return self._transport.json("POST", f"{self._path}/capture", body, sandbox=self._sandbox)

    def stop_capture(self) -> dict[str, Any]:
        """Ends it; what was captured can still be had, until another begins. As `capture` returns it; {} if there
        never was one."""
        return self._transport.json("DELETE", f"{self._path}/capture", sandbox=self._sandbox)

    def download_capture(self, local: str | os.PathLike[str] | None = None) -> Path:
        """Writes what was captured so far to a pcap file of this machine (default: `ID.pcap` here), for tcpdump or
        Wireshark. Returns its path. NotFoundError when nothing was ever captured."""
        target = Path(local) if local is not None else Path(f"{self._sandbox}.pcap")
        if target.is_dir():
            target = target / f"{self._sandbox}.pcap"
        Guard(target).check()
        stream = self._transport.stream("GET", f"{self._path}/capture", sandbox=self._sandbox)
        with stream:
            try:
                with target.open("wb") as out:
                    for piece in stream:
                        blocking(out.write, piece)
            except OSError as error:
                if isinstance(error, LLM4AgentsError):
                    raise
                raise InvalidRequestError(f"{target} cannot be written: {error.strerror}") from error
        return target
