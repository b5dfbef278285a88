# Generated from _async/jobs.py by scripts/unasync.py: change that file, then run the script.
"""Jobs of a sandbox: commands that are started now, at a time or again and again, and left."""

from __future__ import annotations

import base64
import builtins
import time
from collections.abc import Mapping, Sequence
from datetime import datetime

from llm4agents.errors import ConflictError, TimedOutError
from llm4agents.sdk import _jobs, _wire
from llm4agents.sdk._sync.transport import Transport

_POLL_S = 20.0
"""How long the server holds one question whose answer is not there yet."""


class Jobs:
    """`sandbox.jobs`. A job goes on when the program that made it has ended, and survives servers and pauses."""

    def __init__(self, transport: Transport, sandbox: str) -> None:
        self._transport, self._sandbox = transport, sandbox
        self._path = f"/v1/sandboxes/{sandbox}/jobs"

    def start(
        self,
        cmd: str | Sequence[str] | None = None,
        *,
        code: str | None = None,
        at: datetime | float | str | None = None,
        every: float | None = None,
        on_exit: _jobs.OnExit = "none",
        webhook: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> Job:
        """A command (a string in a shell, a sequence as it is), or `code`, a Python program of its own.

        Runs now, or `at` (a datetime with a zone, RFC 3339, unix seconds), and again each `every` seconds (60 at
        least). A run holds the sandbox open; one that is due wakes a paused sandbox; those that were missed are made
        up for by one. `on_exit`: what happens to the sandbox after each run. `timeout`: seconds until a run is
        killed. `webhook`: a URL that is sent each run's result, signed with `.webhook_secret`. Raises ConflictError
        when the sandbox has ended, CapacityError when it has 64 jobs.
        """
        body = _jobs.body_of(
            cmd,
            code=code,
            at=at,
            every=every,
            on_exit=on_exit,
            webhook=webhook,
            env=env,
            cwd=cwd,
            user=user,
            timeout=timeout,
        )
        made = self._transport.json("POST", self._path, body, sandbox=self._sandbox)
        return Job(self._transport, _jobs.info_of(made), made.get("webhook_secret"))

    def list(self, state: str | None = None) -> builtins.list[Job]:
        """Newest first; `state`: only those that are waiting, running, ended or cancelled."""
        params = {"state": state, "limit": 1000}
        answer = self._transport.json("GET", self._path, params=params, sandbox=self._sandbox)
        return [Job(self._transport, _jobs.info_of(item)) for item in answer.get("data") or ()]

    def get(self, id: str) -> Job:
        """Raises NotFoundError."""
        path = f"{self._path}/{_wire.segment(id)}"
        return Job(self._transport, _jobs.info_of(self._transport.json("GET", path, sandbox=self._sandbox)))

    def cancel(self, id: str) -> _jobs.JobInfo:
        """No more runs, and the one under way is killed."""
        path = f"{self._path}/{_wire.segment(id)}"
        return _jobs.info_of(self._transport.json("DELETE", path, sandbox=self._sandbox))


class Job:
    """A job; `last_info` is what the server said of it when it was last asked."""

    def __init__(self, transport: Transport, info: _jobs.JobInfo, secret: str | None = None) -> None:
        self._transport, self.last_info = transport, info
        self._path = f"/v1/sandboxes/{info.sandbox}/jobs/{info.id}"
        self.webhook_secret = secret
        """What the webhook's messages are signed with; known only to who made the job."""

    @property
    def id(self) -> str:
        """`job_` and 16 of [a-z0-9]."""
        return self.last_info.id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.last_info.state}>"

    def info(self) -> _jobs.JobInfo:
        self.last_info = _jobs.info_of(
            self._transport.json("GET", self._path, sandbox=self.last_info.sandbox)
        )
        return self.last_info

    def runs(self, limit: int = 100) -> list[_jobs.JobRun]:
        """Newest first."""
        answer = self._transport.json(
            "GET", f"{self._path}/runs", params={"limit": limit}, sandbox=self.last_info.sandbox
        )
        return [_jobs.run_of(item) for item in answer.get("data") or ()]

    def wait(self, timeout: float | None = None) -> _jobs.JobRun:
        """The end of the first run that had not ended by `last_info`; of a job that is over, of its last.

        Raises TimedOutError, ConflictError when it was cancelled before it ran.
        """
        end = None if timeout is None else time.monotonic() + timeout
        found = self.last_info
        wanted = found.runs + 1 if found.state == "waiting" else max(1, found.runs)
        while True:
            last, over = found.last, found.state in ("ended", "cancelled")
            if last is not None and last.state in _jobs.RUN_OVER and (over or last.sequence >= wanted):
                return last
            if over and last is None:
                raise ConflictError(f"{self.id} was {found.state} before it ran")
            left = _POLL_S if end is None else end - time.monotonic()
            if left <= 0:
                raise TimedOutError(f"{self.id} has not ended within {timeout:g} s", hint="it goes on")
            params = {"run": wanted, "wait_s": round(min(_POLL_S, left), 3)}
            body = self._transport.json("GET", self._path, params=params, sandbox=self.last_info.sandbox)
            self.last_info = found = _jobs.info_of(body)

    def output(self, run: int | None = None) -> bytes:
        """What the newest run (or run number `run`) has said: all that is kept while it runs (which wakes a paused
        sandbox), the last 64 KiB when it has ended."""
        pieces, offset = [], 0
        while True:
            params = {"run": run, "from": offset}
            answer = self._transport.json(
                "GET", f"{self._path}/output", params=params, sandbox=self.last_info.sandbox
            )
            piece = base64.b64decode(answer.get("data_b64") or "")
            pieces.append(piece)
            offset = int(answer["offset"])
            if not piece or not answer.get("more"):
                return b"".join(pieces)

    def run_now(self) -> _jobs.JobInfo:
        """Have it run at once beside its rhythm. Raises ConflictError when it is not waiting."""
        body = self._transport.json("POST", f"{self._path}/run", sandbox=self.last_info.sandbox)
        self.last_info = _jobs.info_of(body)
        return self.last_info

    def cancel(self) -> _jobs.JobInfo:
        """No more runs, and the one under way is killed."""
        body = self._transport.json("DELETE", self._path, sandbox=self.last_info.sandbox)
        self.last_info = _jobs.info_of(body)
        return self.last_info
