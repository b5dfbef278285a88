"""Code contexts of a sandbox: states of their own for cells, each with its language and working directory."""

from __future__ import annotations

import builtins
from collections.abc import Mapping

from llm4agents.errors import InvalidRequestError
from llm4agents.sdk import _wire, results
from llm4agents.sdk._async.transport import AsyncTransport


class AsyncContexts:
    """`sandbox.contexts`. A context is what the cells given to it share: variables, imports, directory.

    Each language has one of the name `default`, which is there without being created.
    """

    def __init__(self, transport: AsyncTransport, sandbox: str) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self._path = f"/v1/sandboxes/{sandbox}/contexts"

    async def create(
        self, language: str | None = None, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> results.CodeContext:
        """A new context of `python`, `javascript`, `typescript` or `bash` (None: what the template is for).

        Its cells begin in `cwd` (default: the home directory) and see `env` beside the sandbox's own. Raises
        ConflictError when the template does not have the language, or there are 16 already.
        """
        body = {
            "language": language,
            "cwd": None if cwd is None else _wire.path_of(cwd),
            "env": _wire.env_of(env),
        }
        answer = await self._transport.json(
            "POST", self._path, _wire.without_none(body), sandbox=self._sandbox
        )
        return results.code_context(answer)

    async def list(self) -> builtins.list[results.CodeContext]:
        """Those that were created or used, and the default one of the template's language."""
        answer = await self._transport.json("GET", self._path, sandbox=self._sandbox)
        return [results.code_context(item) for item in answer.get("data") or ()]

    async def restart(self, context: str | results.CodeContext, *, language: str | None = None) -> None:
        """Gives it a fresh interpreter: variables are gone; files, language, `cwd` and `env` stay."""
        body = {"context": results.context_id(context), "language": language}
        path = f"/v1/sandboxes/{self._sandbox}/code/restart"
        await self._transport.json("POST", path, _wire.without_none(body), sandbox=self._sandbox)

    async def remove(self, context: str | results.CodeContext) -> None:
        """Ends it and what its cells left running. Raises NotFoundError; a `default` one cannot be removed."""
        ident = results.context_id(context)
        if not ident.replace("_", "").isalnum():
            raise InvalidRequestError(f"{ident!r} is not a context's id", hint="contexts.list() shows them")
        await self._transport.json("DELETE", f"{self._path}/{ident}", sandbox=self._sandbox)
