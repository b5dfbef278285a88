"""What is not about one sandbox: the server, templates, disk use. Mostly for the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm4agents.sdk import _wire
from llm4agents.sdk._async.access import AsyncAccess
from llm4agents.sdk._async.transport import AsyncTransport, transport
from llm4agents.sdk._runtime import async_call

_BUILT = frozenset({"template"})


class AsyncClient(AsyncAccess):
    """A server's administration. As a context manager it lets go of its connections at the end."""

    def __init__(self) -> None:
        self._transport: AsyncTransport = transport()

    async def __aenter__(self) -> AsyncClient:
        self._transport.retain()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._transport.release()

    async def server(self) -> dict[str, Any]:
        """GET /v1/server: version, pid, accelerator, sandboxes. Starts the local server if need be."""
        await self._transport.server()
        return await self._transport.json("GET", "/v1/server")

    async def templates(self) -> list[dict[str, Any]]:
        answer = await self._transport.json("GET", "/v1/templates")
        return list(answer.get("data") or ())

    async def build_template(
        self,
        name: str,
        *,
        vcpus: int | None = None,
        memory_mib: int | None = None,
        vmm: str | None = None,
        nested: bool = False,
        force: bool = False,
        on_progress: Callable[[str, str, float | None], Any] | None = None,
    ) -> dict[str, Any]:
        """Builds a template, or finds it built. Raises TemplateNotFoundError, HostSetupError, BootError."""
        body = _wire.without_none({"vcpus": vcpus, "memory_mib": memory_mib, "vmm": vmm})
        body |= {"force": True} if force else {}
        body |= {"nested": True} if nested else {}
        path = f"/v1/templates/{_wire.segment(name)}/build"
        async with await self._transport.events(path, body, ends=_BUILT, wait_s=None) as events:
            async for event in events:
                if event.get("type") == "template":
                    return event
                if event.get("type") == "progress":
                    await async_call(
                        on_progress,
                        str(event.get("step")),
                        str(event.get("detail") or ""),
                        event.get("fraction"),
                    )
        raise AssertionError("not reached: the stream ends with a template or raises")

    async def remove_template(self, name: str) -> dict[str, Any]:
        return await self._transport.json("DELETE", f"/v1/templates/{_wire.segment(name)}")

    async def export_template(self, name: str, file: Path) -> dict[str, Any]:
        """Writes the built template into one file of the server's machine (over the socket: this one)."""
        path = f"/v1/templates/{_wire.segment(name)}/export"
        return await self._transport.json("POST", path, {"file": str(_wire.local(file))}, wait_s=None)

    async def import_template(self, file: Path) -> dict[str, Any]:
        """Takes in what `export_template` wrote. VersionMismatchError: made by another kind of machine."""
        body = {"file": str(_wire.local(file))}
        return await self._transport.json("POST", "/v1/templates/import", body, wait_s=None)

    async def pool(self) -> dict[str, Any]:
        """GET /v1/pool: `data`, what is kept ready of each template and shape; `capacity`, the node's memory."""
        return await self._transport.json("GET", "/v1/pool")

    async def set_pool(
        self, template: str, wanted: int, *, vcpus: int | None = None, memory_mib: int | None = None
    ) -> dict[str, Any]:
        """Keep `wanted` machines of a template ready from now on; 0 ends those that are. Answers as `pool`."""
        one = {"template": template, "wanted": wanted, "vcpus": vcpus, "memory_mib": memory_mib}
        return await self._transport.json("PUT", "/v1/pool", {"data": [_wire.without_none(one)]})

    async def du(self) -> dict[str, Any]:
        """What lies on disk for it, by kind, in bytes."""
        return await self._transport.json("GET", "/v1/du", wait_s=None)

    async def prune(self, *, all: bool = False) -> dict[str, Any]:
        """Removes what nothing needs; with `all` also built templates that no sandbox uses."""
        return await self._transport.json("POST", "/v1/prune", {"all": all}, wait_s=None)

    async def doctor(self) -> dict[str, Any]:
        """GET /v1/doctor: the server's own view. `llm4agents.sdk.doctor.report` needs no server."""
        return await self._transport.json("GET", "/v1/doctor", wait_s=None)
