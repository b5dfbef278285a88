# Generated from _async/sandbox.py by scripts/unasync.py: change that file, then run the script.
"""`Sandbox`, generated from `_sync/sandbox.py`: one microVM and what can be done with it.

Not here: what runs in it (`running`), its files, processes, jobs and so on (modules of their names).
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from llm4agents import limits
from llm4agents.errors import (
    ConflictError,
    HostSetupError,
    InvalidRequestError,
    LLM4AgentsError,
    SandboxDiedError,
    SandboxNotFoundError,
)
from llm4agents.sdk import _volumes, _wire, results
from llm4agents.sdk._runtime import begin, call
from llm4agents.sdk._sync.contexts import Contexts
from llm4agents.sdk._sync.files import Files
from llm4agents.sdk._sync.jobs import Jobs
from llm4agents.sdk._sync.network import Network
from llm4agents.sdk._sync.ports import Ports
from llm4agents.sdk._sync.processes import Processes
from llm4agents.sdk._sync.running import Running
from llm4agents.sdk._sync.transport import Transport, transport
from llm4agents.sdk._sync.volumes import SandboxVolumes

if TYPE_CHECKING:
    from types import TracebackType

_CREATED = frozenset({"sandbox"})
_COLD_S, _FORK_S, _SNAPSHOT_S = 180.0, 300.0, 600.0
"""How long an answer may take: a boot, 64 clones, a template's worth of memory and disk."""

OnProgress = Callable[[str, str, "float | None"], Any]
"""Called with (step, detail, fraction done or None) while a template is built."""


class Sandbox(Running):
    """A microVM of its own, cloned from a template's frozen machine.

    As a context manager it is killed at the end. Defaults: template `python`, 1 vCPU, 1 GiB of memory,
    5 GiB of disk, ended after 300 s without a call (`timeout`) and 24 h in any case (`life`), both in
    seconds. Nothing can be reached from it (`network="none"`) unless you say what.
    """

    def __init__(
        self,
        template: str = limits.DEFAULT_TEMPLATE,
        *,
        timeout: float = limits.IDLE_TIMEOUT_S,
        life: float = limits.LIFE_S_MAX,
        env: Mapping[str, str] | None = None,
        memory_mib: int | None = None,
        vcpus: int | None = None,
        disk_mib: int | None = None,
        pids: int | None = None,
        output_rate: int | None = None,
        wait: float | None = None,
        metadata: Mapping[str, str] | None = None,
        network: _wire.Network | None = None,
        on_timeout: Literal["kill", "pause"] = "kill",
        auto_resume: bool = True,
        keep: float = limits.KEEP_S,
        protect: Sequence[str] = (),
        volumes: Mapping[str, _volumes.Wanted] | None = None,
        require_kvm: bool = False,
        vmm: str | None = None,
        nested: bool = False,
        traffic: Mapping[str, bool] | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Says what is wanted; `Sandbox(...)` creates it at once, `AsyncSandbox(...)` at `async with`.

        `env` is there for every command and cell. `on_timeout="pause"` puts it to disk when its time is up
        instead of ending it; the next call resumes it (`auto_resume`), and it is kept for `keep` seconds.
        `disk_mib` bounds what of the disk can be in use, `pids` the processes and threads, `output_rate` the bytes
        a second that are read of each command's output. `network` is what it may reach: a profile ("none", "packages",
        "public"), a list of rules (["allow api.github.com"]) or an object (docs/howto/network.md). `protect` are paths
        of the template (files or directories; relative ones are taken from /home/user) that nobody but the guest's root
        can change: PathNotFoundError when the template has no such path. `volumes` are disks that outlive it, by the
        path they are at: `{"/data": volume_or_name, "/ref": ("name", "ro")}` (docs/howto/use-volumes.md);
        ConflictError when another sandbox has one. On a node that is full the create waits for
        room for `wait` seconds (0: CapacityError at once). `require_kvm` refuses software emulation (HostSetupError).
        `vmm` names the virtual machine monitor ("firecracker", "cloud-hypervisor", "qemu"; None: the server's choice),
        `nested` gives its guest a `/dev/kvm` that works: HostSetupError where that cannot be had.
        `traffic={"public": True}` lets anybody reach its ports through the server (docs/howto/ports.md).
        Raises InvalidRequestError, TemplateNotFoundError, CapacityError, BootError, ServerUnavailableError;
        nothing is left running by any of them.
        """
        self._info: results.SandboxInfo | None = None
        self._held = self._paused = False
        self._progress, self._require_kvm = on_progress, require_kvm
        self._wanted = _wire.create_body(
            template,
            timeout=timeout,
            life=life,
            env=env,
            memory_mib=memory_mib,
            vcpus=vcpus,
            disk_mib=disk_mib,
            pids=pids,
            output_rate=output_rate,
            wait=wait,
            metadata=metadata,
            network=network,
            on_timeout=on_timeout,
            auto_resume=auto_resume,
            keep=keep,
            protect=protect,
            volumes=volumes,
            vmm=vmm,
            nested=nested,
            traffic=traffic,
        )
        self._transport: Transport = transport()
        begin(self._open)

    @classmethod
    def create(
        cls,
        template: str = limits.DEFAULT_TEMPLATE,
        *,
        timeout: float = limits.IDLE_TIMEOUT_S,
        life: float = limits.LIFE_S_MAX,
        env: Mapping[str, str] | None = None,
        memory_mib: int | None = None,
        vcpus: int | None = None,
        disk_mib: int | None = None,
        pids: int | None = None,
        output_rate: int | None = None,
        wait: float | None = None,
        metadata: Mapping[str, str] | None = None,
        network: _wire.Network | None = None,
        on_timeout: Literal["kill", "pause"] = "kill",
        auto_resume: bool = True,
        keep: float = limits.KEEP_S,
        protect: Sequence[str] = (),
        volumes: Mapping[str, _volumes.Wanted] | None = None,
        require_kvm: bool = False,
        vmm: str | None = None,
        nested: bool = False,
        traffic: Mapping[str, bool] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Sandbox:
        """A new sandbox; arguments and errors as of the class."""
        made = cls(
            template,
            timeout=timeout,
            life=life,
            env=env,
            memory_mib=memory_mib,
            vcpus=vcpus,
            disk_mib=disk_mib,
            pids=pids,
            output_rate=output_rate,
            wait=wait,
            metadata=metadata,
            network=network,
            on_timeout=on_timeout,
            auto_resume=auto_resume,
            keep=keep,
            protect=protect,
            volumes=volumes,
            require_kvm=require_kvm,
            vmm=vmm,
            nested=nested,
            traffic=traffic,
            on_progress=on_progress,
        )
        made._open()
        return made

    @classmethod
    def connect(cls, id: str) -> Sandbox:
        """A handle on a sandbox that exists. Raises SandboxNotFoundError, ConflictError when it has ended."""
        way = transport()
        with way:
            info = _get(way, id)
            if info.state in ("killed", "failed"):
                raise ConflictError(
                    f"sandbox {info.id} has ended: {info.reason or info.state}",
                    hint="create a new one",
                    sandbox=info.id,
                )
            made = cls.__new__(cls)
            made._transport, made._info = way, None
            made._held = made._paused = False
            made._bind(info)
            return made

    @classmethod
    def list(
        cls,
        *,
        state: str | None = None,
        metadata: Mapping[str, str] | None = None,
        limit: int | None = None,
    ) -> list[results.SandboxInfo]:
        """The sandboxes of this server, newest state of each; `metadata`: only those that carry all of it."""
        found: list[results.SandboxInfo] = []
        after: str | None = None
        with transport() as way:
            while limit is None or len(found) < limit:
                params = {
                    "state": state,
                    "limit": None if limit is None else limit - len(found),
                    "after": after,
                }
                params.update({f"metadata.{name}": value for name, value in (metadata or {}).items()})
                page = way.json("GET", "/v1/sandboxes", params=params)
                found.extend(results.sandbox_info(item) for item in page.get("data") or ())
                after = page.get("next")
                if not after:
                    break
        return found

    def _open(self) -> None:
        """Creates what the constructor described, once."""
        if self._info is not None:
            return
        with self._transport as way:
            server = way.server()
            if self._require_kvm and server.get("accelerator") == "tcg":
                raise _no_kvm(server)
            body = self._create(way)
            info = results.sandbox_info(body)
            self._bind(info)
            if info.accelerator == "tcg":
                if self._require_kvm:
                    self.kill()
                    raise _no_kvm(server)
                _warn_emulated(server)

    def _create(self, way: Transport) -> dict[str, Any]:
        """The server's Sandbox. Streamed even without a callback: a build outlasts any timeout."""
        stream = way.events("/v1/sandboxes", self._wanted, ends=_CREATED, wait_s=None)
        with stream as events:
            for event in events:
                if event.get("type") == "sandbox":
                    return event
                if event.get("type") == "progress":
                    call(
                        self._progress,
                        str(event.get("step")),
                        str(event.get("detail") or ""),
                        event.get("fraction"),
                    )
        raise AssertionError("not reached: the stream ends with a sandbox or raises")

    def _bind(self, info: results.SandboxInfo) -> None:
        self._info = info
        self._path = f"/v1/sandboxes/{info.id}"
        self.files = Files(self._transport, info.id)
        self.processes = Processes(self._transport, info.id)
        self.contexts = Contexts(self._transport, info.id)
        self.jobs = Jobs(self._transport, info.id)
        self.ports = Ports(self._transport, info.id)
        self.network = Network(self._transport, info.id)
        self.volumes = SandboxVolumes(self._transport, info.id)
        self._transport.retain()
        self._held = True

    @property
    def id(self) -> str:
        """`sbx_` and 20 of [a-z0-9]."""
        if self._info is None:
            raise InvalidRequestError(
                "this sandbox is not created yet",
                hint="use Sandbox(...)",
            )
        return self._info.id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._info.id if self._info else '(not created)'}>"

    def __enter__(self) -> Sandbox:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._paused:  # who pauses it wants it back
            self.close()
            return
        # The error of the body is the one to see; what does not exist any more need not be killed.
        with contextlib.suppress(SandboxNotFoundError if kind is None else LLM4AgentsError):
            self.kill()

    def info(self) -> results.SandboxInfo:
        """State, deadline and shape, as the server knows them now."""
        self._info = _get(self._transport, self.id)
        return self._info

    def kill(self) -> results.SandboxInfo:
        """Ends the sandbox; its memory and files are gone. Killing one that has ended is fine."""
        try:
            body = self._transport.json("DELETE", f"/v1/sandboxes/{self.id}", sandbox=self.id)
        except (ConflictError, SandboxDiedError):
            return self.info()
        finally:
            self.close()
        return results.sandbox_info(body)

    def close(self) -> None:
        """Lets go of the handle and leaves the sandbox to its timeouts; `connect(id)` finds it again."""
        if self._held:
            self._held = False
            self._transport.release()

    def pause(self) -> results.SandboxInfo:
        """Puts it to disk: processes, interpreter, open files come back with `resume` or the next call.

        Calls under way end with SandboxPausedError. A `with` block that it was paused in does not kill it.
        Raises CapacityError when the server's disk has no room, QuotaError when the project's has none for its memory:
        then it runs on.
        """
        body = self._transport.json("POST", f"{self._path}/pause", {}, sandbox=self.id)
        self._paused = True
        self._info = results.sandbox_info(body)
        return self._info

    def resume(self, *, cold: bool = False, timeout: float | None = None) -> results.SandboxInfo:
        """Lets it run on where it was; `timeout` (seconds) sets a new one. One that runs stays as it is.

        Raises VersionMismatchError or CorruptSnapshotError when its memory cannot be used any more (another
        QEMU, a damaged file); `cold=True` boots its disk: files are kept, processes are not.
        """
        body = _wire.without_none({"cold": cold, "timeout_s": timeout})
        wait_s = _COLD_S if cold else _wire.wait_s(None)
        answer = self._transport.json("POST", f"{self._path}/resume", body, wait_s=wait_s, sandbox=self.id)
        self._paused = False
        self._info = results.sandbox_info(answer)
        return self._info

    def fork(
        self,
        count: int = 1,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
        volumes: _volumes.LeaveVolumes = "refuse",
    ) -> builtins.list[Sandbox]:
        """`count` (1 to 64) sandboxes that are what this one is now, running or paused; it goes on.

        Each has memory, processes and files of its own from then on, and other random numbers. All are made,
        or none. `metadata` is added to this one's. A volume that it writes to cannot be in two: ConflictError, unless
        they are to be without (`volumes="leave"`). Those that it reads they read too.
        """
        body = _wire.without_none(
            {"count": count, "timeout_s": timeout, "metadata": None if metadata is None else dict(metadata)}
        )
        body |= {"volumes": volumes} if volumes != "refuse" else {}
        answer = self._transport.json("POST", f"{self._path}/fork", body, wait_s=_FORK_S, sandbox=self.id)
        return [self._twin(results.sandbox_info(item)) for item in answer["data"]]

    def _twin(self, info: results.SandboxInfo) -> Sandbox:
        made = type(self).__new__(type(self))
        made._transport = transport()
        made._info, made._held, made._paused = None, False, False
        made._bind(info)
        return made

    def snapshot(
        self, name: str, *, description: str = "", volumes: _volumes.LeaveVolumes = "refuse"
    ) -> dict[str, Any]:
        """Makes the template `name` of it as it is now, which `Sandbox(name)` then clones; it goes on.

        The environment given at create is not in it, and no volume. Raises ConflictError when there is such a template,
        or it writes to a volume and `volumes="leave"` is not said.
        """
        body = {"name": name, "description": description}
        body |= {"volumes": volumes} if volumes != "refuse" else {}
        return self._transport.json(
            "POST", f"{self._path}/snapshot", body, wait_s=_SNAPSHOT_S, sandbox=self.id
        )

    def update_network(self, network: _wire.Network) -> results.NetworkInfo:
        """Give it another network; connections that the new one does not allow are over when this returns (`cut`).

        Raises InvalidRequestError (names the line), HostSetupError (there can be no network on that host),
        ConflictError (this sandbox was started without a link: pause and resume it).
        """
        body = {"network": _wire.network_of(network)}
        answer = self._transport.json("PUT", f"{self._path}/network", body, sandbox=self.id)
        return results.network_info(answer)

    def set_timeout(
        self,
        timeout: float | None = None,
        *,
        on_timeout: Literal["kill", "pause"] | None = None,
        keep: float | None = None,
        auto_resume: bool | None = None,
    ) -> results.SandboxInfo:
        """From now on its time is up after `timeout` seconds without a call; then `on_timeout` happens.

        `keep`: seconds that it is kept when paused. What is left out stays as it is.
        """
        if timeout is not None and not _wire.seconds("timeout", timeout):
            raise InvalidRequestError(
                f"timeout={timeout!r}: a sandbox must end some time", hint="give seconds > 0"
            )
        wanted = {"timeout_s": timeout, "on_timeout": on_timeout, "keep_s": keep, "auto_resume": auto_resume}
        body = self._transport.json(
            "POST", f"{self._path}/timeout", _wire.without_none(wanted), sandbox=self.id
        )
        self._info = results.sandbox_info(body)
        return self._info

    def traffic(self, *, public: bool | None = None, rotate: bool = False) -> results.Traffic:
        """Who may reach its ports through the server. `public` changes that; `rotate` ends the token and every signed
        URL that was given out, and whatever they had let in."""
        body = _wire.without_none({"public": public, "rotate": rotate or None})
        method, sent = ("POST", body) if body else ("GET", None)
        answer = self._transport.json(method, f"{self._path}/traffic", sent, sandbox=self.id)
        return results.Traffic(bool(answer["public"]), str(answer["token"]), answer.get("domain"))

    def metrics(self) -> dict[str, Any]:
        """CPU (ms), memory and disk (bytes), processes, as the guest counts them."""
        return self._transport.json("GET", f"/v1/sandboxes/{self.id}/metrics", sandbox=self.id)

    def isolation(self) -> results.Isolation:
        """How its VMM is confined on the host, and what of the promise does not hold. ConflictError: it is paused."""
        body = self._transport.json("GET", f"/v1/sandboxes/{self.id}/isolation", sandbox=self.id)
        return results.isolation(body)

    def events(self) -> dict[str, Any]:
        """The sandbox's state events, oldest first, as the server recorded them."""
        return self._transport.json("GET", f"/v1/sandboxes/{self.id}/events", sandbox=self.id)


def _get(way: Transport, id: str) -> results.SandboxInfo:
    if not id or not id.replace("_", "").isalnum():
        raise InvalidRequestError(
            f"{id!r} is not a sandbox id", hint="ids look like sbx_0123456789abcdefghij"
        )
    return results.sandbox_info(way.json("GET", f"/v1/sandboxes/{id}", sandbox=id))


def _no_kvm(server: Mapping[str, Any]) -> HostSetupError:
    why = server.get("why_not_kvm") or "no reason given"
    return HostSetupError(
        f"KVM is required and cannot be used here: {why}",
        hint="leave require_kvm out to run in software emulation",
    )


def _warn_emulated(server: Mapping[str, Any]) -> None:
    """Once per process: without KVM it works, and is slower. Said of the caller's line, not of ours."""
    if _wire.warned:
        return
    _wire.warned = True
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("llm4agents."):
        level, frame = level + 1, frame.f_back
    warnings.warn(_wire.emulation_note(server), results.EmulationWarning, stacklevel=level)
