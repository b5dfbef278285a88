# Generated from _async/secrets.py by scripts/unasync.py: change that file, then run the script.
"""Secrets of the host: put into requests after these have left a sandbox, and in no sandbox ever."""

from __future__ import annotations

import builtins

from llm4agents.sdk import _secrets, _wire
from llm4agents.sdk._sync.transport import Transport, transport


class Secrets:
    """The server's secrets. They can be set, listed by name and removed; no call reads a value. As a context manager
    it lets go of its connections at the end.

    A sandbox uses one through a binding: `network={"rules": [...], "credentials": [{"secret": "GITHUB", "host":
    "api.example.com", "as": "bearer"}]}`.
    """

    def __init__(self) -> None:
        self._transport: Transport = transport()

    def __enter__(self) -> Secrets:
        self._transport.retain()
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.release()

    def set(self, name: str, value: _secrets.SecretValue) -> _secrets.SecretInfo:
        """Make the secret, or give it a new value, which requests carry from this call's return on.

        `name`: 1 to 64 of letters, digits, `.`, `_`, `-`. `value`: text of at most 16 KiB, or AWS credentials. Raises
        InvalidRequestError (it repeats nothing of the value), CapacityError, HostSetupError (the vault's key is lost).
        """
        path = f"/v1/secrets/{_wire.segment(name)}"
        return _secrets.info_of(self._transport.json("PUT", path, {"value": _secrets.plain(value)}))

    def list(self) -> builtins.list[_secrets.SecretInfo]:
        """By name."""
        answer = self._transport.json("GET", "/v1/secrets")
        return [_secrets.info_of(item) for item in answer.get("data") or ()]

    def remove(self, name: str) -> builtins.list[str]:
        """Forget it; the ids of the sandboxes that have a binding of it, whose requests that need it are refused now.

        Raises NotFoundError.
        """
        answer = self._transport.json("DELETE", f"/v1/secrets/{_wire.segment(name)}")
        return [str(sandbox) for sandbox in answer.get("used_by") or ()]
