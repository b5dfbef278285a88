"""Calls that are sent again under the same idempotency key: the first answer is kept and given again.

Kept are answers of calls that did something, or may have. One that did nothing (`outcome` not_started) may be tried
again with its key, which is what a client does when the node was full. They lie sealed in the store: an answer may have
what is told only once.
Not here: what of a request makes it the same, and how an answer is read and sent (`api.access.once`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

from llm4agents import limits
from llm4agents.engine import clock
from llm4agents.engine.secrets import Secrets
from llm4agents.errors import CapacityError, ConflictError, HostSetupError
from llm4agents.store import Store
from llm4agents.store import idempotency as rows


class Repeats:
    """One per engine."""

    def __init__(self, store: Store, secrets: Secrets) -> None:
        self._store, self._secrets = store, secrets
        self._under_way: set[tuple[str, str]] = set()
        self._since_trim = 0
        self._trimmed_at = -math.inf

    def begin(self, project: str, key: str, request: bytes) -> tuple[int, bytes] | None:
        """None: it is to be done now, and then `end`, `forget` or `leave` follows. Else status and answer as kept.

        Raises ConflictError: it is under way; or was another request; or nobody knows how it ended.
        """
        now = clock.wall_s()
        if (project, key) not in self._under_way:
            self._trim(now)
        since = now - limits.IDEMPOTENCY_KEPT_S
        found = rows.begin(self._store, project, key, request, now, since=since)
        if found is None:
            self._under_way.add((project, key))
            return None
        if found.request != request:
            raise ConflictError(
                "this idempotency key was sent with another request",
                hint="a new request has a key of its own",
            )
        if (project, key) in self._under_way:
            raise ConflictError(
                "the request with this idempotency key is under way", hint="ask again", retry_after_s=1
            )
        if found.status is not None and found.answer is None:
            raise ConflictError(
                f"the request with this idempotency key was done (status {found.status}); "
                "its answer was too large to keep, or could not be sealed"
            )
        if found.status is None or found.answer is None:
            raise ConflictError(
                "the request with this idempotency key was begun, and how it ended is not known",
                hint="look whether it was done; then send it with a new key",
            )
        try:
            return found.status, self._secrets.unseal(_sealed_as(project, key), found.answer)
        except HostSetupError as error:
            raise ConflictError(
                f"the request with this idempotency key was done (status {found.status}); its answer cannot be read: "
                f"{error.message}"
            ) from None

    def end(self, project: str, key: str, status: int, answer: bytes | None) -> None:
        """Keep the answer; None: it is too large, and that it was done is all that is remembered."""
        sealed = None
        if answer is not None:
            with contextlib.suppress(HostSetupError):  # the key is lost: never in plain
                sealed = self._secrets.seal(_sealed_as(project, key), answer)
        self._write(lambda: rows.end(self._store, project, key, status, sealed))
        self._under_way.discard((project, key))

    def forget(self, project: str, key: str) -> None:
        """Nothing was done: who sends it again has it done."""
        self._write(lambda: rows.forget(self._store, project, key))
        self._under_way.discard((project, key))

    def leave(self, project: str, key: str) -> None:
        """It was broken off, and nobody knows what was done."""
        self._under_way.discard((project, key))

    @staticmethod
    def _write(act: Callable[[], None]) -> None:
        try:
            act()
        except CapacityError:
            return  # a full disk: then it is not known how it ended, which is what a repeat is told

    def _trim(self, now: float) -> None:
        self._since_trim += 1
        quiet = (
            now - self._trimmed_at >= limits.IDEMPOTENCY_KEPT_S / 24
        )  # few calls: what is old goes nevertheless
        if quiet or self._since_trim >= limits.IDEMPOTENCY_ROWS_MAX // 10:
            self._since_trim, self._trimmed_at = 0, now
            before = now - limits.IDEMPOTENCY_KEPT_S
            rows.trim(
                self._store,
                before=before,
                keep=limits.IDEMPOTENCY_ROWS_MAX,
                bytes_max=limits.IDEMPOTENCY_BYTES_MAX,
            )


def _sealed_as(project: str, key: str) -> str:
    """No other call's answer can be put in its place."""
    return f"answer/{project}/{key}"
