"""The server's side of captures: which there are, each with a worker of its own.

That a sandbox is captured is written down (`capture-ID.json` beside the workers' directories): the capture goes on
after a pause, and under the next server. What was captured stays until it is captured anew or the sandbox is forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import structlog

from llm4agents import limits
from llm4agents.barrier import wire
from llm4agents.barrier.capture import pcap
from llm4agents.barrier.workers import OnUp, Spec, Worker, WorkerError
from llm4agents.errors import CapacityError, InvalidRequestError, LLM4AgentsError, NotFoundError
from llm4agents.fair import Held, surplus

log = structlog.get_logger()
PREFIX = "capture-"


class Captures:
    """Belongs to one event loop.

    `sockets(sandbox)` gives its link's descriptors and `pidfd` (the callee's copies are closed here), None when it does
    not run; `packet_socket(netns)` one that sees its packets; `ended(sandbox)` whether it never runs again.
    """

    def __init__(
        self,
        state: Path,
        worker: Callable[[Spec, OnUp], Worker],
        sockets: Callable[[str], Awaitable[dict[str, int] | None]],
        packet_socket: Callable[[int], Awaitable[int]],
        ended: Callable[[str], bool],
    ) -> None:
        self._root = state / "barrier"
        self._make, self._sockets, self._packet_socket = worker, sockets, packet_socket
        self._ended = ended
        self._workers: dict[str, Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        """Workers that are being ended: waited for at the end, and not given up."""

    # -- what is asked for ----------------------------------------------------------------------------------

    async def start(
        self, sandbox: str, bytes_max: int | None = None, *, owner: str = "", running: bool = True
    ) -> None:
        """Capture from now on, in at most so many bytes of disk; with `running` False from its resume on. One that is
        captured already goes on as it is. What an earlier capture of it has written is gone. `owner`: whose share of
        all captures it is of.

        Raises InvalidRequestError, CapacityError, HostSetupError.
        """
        most = limits.CAPTURE_BYTES_DEFAULT if bytes_max is None else bytes_max
        if not limits.CAPTURE_BYTES_MIN <= most <= limits.CAPTURE_BYTES_MAX:
            raise InvalidRequestError(
                f"bytes_max={bytes_max}: {limits.CAPTURE_BYTES_MIN:,} to {limits.CAPTURE_BYTES_MAX:,} are possible"
            )
        if self._wanted(sandbox) is not None:
            if running and sandbox not in self._workers:  # it could not be resumed: once more
                await self._run(sandbox)
            return
        self._make_room(sandbox, owner)
        self._clear(sandbox)
        self._write(sandbox, {"bytes_max": most, "since": time.time(), "wanted": True, "owner": owner})
        if not running:
            return
        try:
            await self._run(sandbox)
        except BaseException:
            await self.stop(sandbox)
            raise

    async def stop(self, sandbox: str) -> None:
        """No more from now on; what was captured stays. Idempotent."""
        about = self._about(sandbox)
        if about is not None:
            self._write(sandbox, {**about, "wanted": False})
        if (worker := self._workers.pop(sandbox, None)) is not None:
            await worker.close(keep=False)

    async def state(self, sandbox: str) -> dict[str, Any] | None:
        """`{bytes, since, bytes_max, running}` and, of one under way, `packets, dropped`; None when there is none."""
        about = self._about(sandbox)
        if about is None:
            return None
        found: dict[str, Any] = {"running": False}
        worker = self._workers.get(sandbox)
        if worker is not None and worker.up:
            with contextlib.suppress(WorkerError):
                said, fds = await worker.request({"op": "stats"})
                wire.close(fds)
                found = {"running": bool(said.get("capturing"))}
                found |= {name: said[name] for name in ("packets", "dropped") if name in said}
        size = 0
        for name in (pcap.CURRENT, pcap.OLDER):
            with contextlib.suppress(OSError):
                size += (self._directory(sandbox) / name).stat().st_size
        return {"bytes": size, "since": about["since"], "bytes_max": about["bytes_max"], **found}

    def pieces(self, sandbox: str) -> Iterator[bytes]:
        """What was captured so far as one pcap file; blocks. Raises NotFoundError at once when there is none."""
        if self._about(sandbox) is None:
            raise NotFoundError(
                f"nothing of {sandbox} was captured", hint=f"llm4agents net capture {sandbox} begins"
            )
        return self._pieces(sandbox)

    def _pieces(self, sandbox: str) -> Iterator[bytes]:
        empty = True
        for piece in pcap.whole(self._directory(sandbox)):
            empty = False
            yield piece
        if empty:
            yield pcap.HEADER

    # -- what happens to sandboxes --------------------------------------------------------------------------

    def entered(self, sandbox: str) -> None:
        """It runs from now on, for the first time or again."""
        if self._wanted(sandbox) is None or sandbox in self._workers:
            return

        async def run() -> None:
            try:
                await self._run(sandbox)
            except (LLM4AgentsError, WorkerError) as error:
                log.warning("capture_not_resumed", sandbox=sandbox, error=str(error))

        self._spawn(run())

    def left(self, sandbox: str) -> None:
        """It has paused or ended: so has its capture by itself, and its process is not needed."""
        if (worker := self._workers.pop(sandbox, None)) is not None:
            self._spawn(worker.close(keep=False), self._ending)

    def sweep(self, known: Callable[[str], bool]) -> None:
        """Remove what was captured of sandboxes nobody knows any more."""
        for path in self._root.glob(f"{PREFIX}*.json") if self._root.is_dir() else []:
            if not known(sandbox := path.stem.removeprefix(PREFIX)):
                self._clear(sandbox)

    async def close(self, *, keep: bool) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._ending, return_exceptions=True)
        await asyncio.gather(*(worker.close(keep=keep) for worker in self._workers.values()))
        self._workers.clear()

    # -- how ------------------------------------------------------------------------------------------------

    async def _run(self, sandbox: str) -> None:
        fresh = not (self._directory(sandbox) / pcap.CURRENT).exists()

        async def up(answer: dict[str, Any]) -> None:
            if sandbox not in (answer.get("sandboxes") or ()):  # else it has gone on without us
                await self._begin(sandbox, worker, fresh)

        worker = self._make(Spec(f"{PREFIX}{sandbox}", "llm4agents.barrier.capture"), up)
        self._workers[sandbox] = worker
        await worker.start()

    async def _begin(self, sandbox: str, worker: Worker, fresh: bool) -> None:
        about, sockets = self._wanted(sandbox), await self._sockets(sandbox)
        if about is None or sockets is None:
            wire.close(list((sockets or {}).values()))
            return  # it has ended meanwhile
        held = list(sockets.values())
        try:
            held.append(await self._packet_socket(sockets["netns"]))
            message = {"op": "start", "sandbox": sandbox, "bytes_max": about["bytes_max"], "fresh": fresh}
            _, fds = await worker.request(message, [held[-1], sockets["pidfd"]])
            wire.close(fds)
        finally:
            wire.close(held)

    def _make_room(self, sandbox: str, owner: str) -> None:
        """For one more of `owner`: of those that have ended the owner's own go first, then those of who has most.
        Raises CapacityError, and then nothing is gone."""
        held = []
        for path in self._root.glob(f"{PREFIX}*.json"):
            about = self._about(ident := path.stem.removeprefix(PREFIX)) or {}
            if ident != sandbox:
                wanted = about.get("wanted", False) and not self._ended(ident)
                held.append(Held(about.get("owner", ""), path.stat().st_mtime, ident, fixed=wanted))
        most = limits.CAPTURES_PER_PROJECT_MAX
        own = [one for one in held if one.owner == owner]
        gone = surplus(own, most - 1)
        if len(own) - len(gone) >= most:
            raise CapacityError(
                f"{most} sandboxes of the project are captured already", hint="net capture ID --stop ends one"
            )
        held = [one for one in held if one.item not in gone]
        gone += (more := surplus(held, limits.CAPTURES_KEPT_MAX - 1))
        if len(held) - len(more) >= limits.CAPTURES_KEPT_MAX:
            raise CapacityError(
                f"{limits.CAPTURES_KEPT_MAX} sandboxes of the server are captured already",
                hint="try again later, or ask whoever runs the server",
            )
        if shutil.disk_usage(self._root.parent).free < limits.DISK_FREE_BYTES_MIN:
            raise CapacityError("there is no room for a capture: the host's disk is full", hint="free space")
        for ident in gone:
            self._clear(ident)

    def _directory(self, sandbox: str) -> Path:
        return self._root / f"{PREFIX}{sandbox}"

    def _file(self, sandbox: str) -> Path:
        return self._root / f"{PREFIX}{sandbox}.json"

    def _about(self, sandbox: str) -> dict[str, Any] | None:
        try:
            body = json.loads(self._file(sandbox).read_text())
            return {
                "bytes_max": int(body["bytes_max"]),
                "since": float(body["since"]),
                "wanted": bool(body["wanted"]),
                "owner": str(body.get("owner") or ""),
            }
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _wanted(self, sandbox: str) -> dict[str, Any] | None:
        about = self._about(sandbox)
        return about if about is not None and about["wanted"] else None

    def _write(self, sandbox: str, about: dict[str, Any]) -> None:
        path = self._file(sandbox)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        try:
            with os.fdopen(
                os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w"
            ) as file:
                json.dump(about, file)
            part.replace(path)
        except OSError as error:
            raise CapacityError(
                f"a capture cannot be written down: {error.strerror}", hint="free space"
            ) from error

    def _clear(self, sandbox: str) -> None:
        shutil.rmtree(self._directory(sandbox), ignore_errors=True)
        self._file(sandbox).unlink(missing_ok=True)
        (self._root / f"{PREFIX}{sandbox}.log").unlink(missing_ok=True)

    def _spawn(self, work: Any, to: set[asyncio.Task[None]] | None = None) -> None:
        tasks = self._tasks if to is None else to
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
