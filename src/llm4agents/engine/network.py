"""The network of sandboxes: what was asked for becomes a policy, a link and a place in the barrier.

A machine gets its link before it starts; it joins once it runs, and leaves when it has ended or paused. Creates do not
wait for a join: what the guest dials meanwhile waits in the link's own queue. Nothing here is decided about a packet
(`barrier.policy`), and no process of the barrier is known here but the `Barrier`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import tempfile
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from llm4agents import __version__, limits
from llm4agents.barrier import addresses, audit_read
from llm4agents.barrier.addresses import Address
from llm4agents.barrier.barrier import Barrier, Link, Parts, Wish, no_link
from llm4agents.barrier.capture.captures import Captures
from llm4agents.barrier.intercept import environment
from llm4agents.barrier.judging import Floor
from llm4agents.barrier.link.links import SPEC as LINK
from llm4agents.barrier.network import Network
from llm4agents.barrier.packages import Discovery
from llm4agents.barrier.policy import Policy
from llm4agents.barrier.why import parse_question
from llm4agents.barrier.workers import User, Worker, WorkerError
from llm4agents.config import Settings
from llm4agents.engine.node import Places
from llm4agents.engine.principal import DEFAULT
from llm4agents.engine.secrets import Secrets
from llm4agents.engine.templates import Templates
from llm4agents.errors import (
    ConflictError,
    HostSetupError,
    InvalidRequestError,
    LLM4AgentsError,
    PathNotFoundError,
)
from llm4agents.guest.verbs import Agent
from llm4agents.images.progress import Progress, silent
from llm4agents.store import SandboxRow, Store
from llm4agents.store.store import TERMINAL
from llm4agents.vmm import procfs, shim, uids
from llm4agents.vmm.base import MachineRecord

log = structlog.get_logger()

_FLOOR_HINT = "until it can be read no sandbox is made; llm4agents doctor reads it too"
AUDIT_KINDS, Wanted = audit_read.KINDS, audit_read.Wanted
NONE: dict[str, Any] = Network().to_json()
POLICIES_KEPT = 256
RESOLVE_TIMEOUT_S = 2.0
TRIM_S = 60.0
APT_SOURCES = "/etc/apt/sources.list"
OWN_SECRET = "index:"  # noqa: S105 (a prefix of names)
"""Begins the names of secrets that this host's own package tools have (`barrier.packages`)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A network that was asked for, found right."""

    network: dict[str, Any]
    """Every key is there: what is stored, and answered."""
    wish: Wish
    environment: Mapping[str, str] = field(default_factory=dict)
    """What a guest's package tools need to find this host's registries."""
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs_link(self) -> bool:
        return self.network != NONE


class Networks:
    """One per engine. `start`, `close`; belongs to one event loop."""

    def __init__(
        self, settings: Settings, store: Store, places: Places, secrets: Secrets, templates: Templates
    ) -> None:
        self._settings, self._store, self._places = settings, store, places
        self._secrets, self._templates = secrets, templates
        self._policies: dict[str, Asked] = {}
        self._floor: tuple[int, Floor] | None = None
        self._discovery = Discovery(settings.cache)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._machines: dict[str, tuple[MachineRecord, str]] = {}
        """Of builds, with their projects: they run behind the barrier and are no sandboxes."""
        self._trim_at = 0.0
        self.barrier = Barrier(
            settings,
            Parts(self._sockets, self._values, self._authority, self._interpreter),
            version=__version__,
            user=_user,
        )
        self.captures = Captures(
            settings.state, self.barrier.worker, self._sockets, self.barrier.packet_socket, self._ended
        )
        secrets.on_change.append(self._rotated)

    # -- its life -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Look what this host can do, take over what lives, and forget names nobody has any more."""
        self.barrier.start()
        self.sweep()

    async def close(self, *, keep: bool) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.captures.close(keep=keep)
        await self.barrier.close(keep=keep)
        self.sweep()

    def sweep(self) -> None:
        """Remove what there is of sandboxes nobody knows any more, and old audits past their bound."""
        alive = {row.id for row in self._store.alive()} | self._machines.keys()
        for directory, wanted in ((self.names, alive.__contains__), (self.audit, self._known)):
            for path in directory.iterdir() if directory.is_dir() else []:
                if not wanted(path.name.partition(".")[0]):
                    path.unlink(missing_ok=True)
        self.captures.sweep(self._known)
        trim_audits(self.audit, alive)

    def _trim(self) -> None:
        """Now and then, as sandboxes end."""
        now = asyncio.get_running_loop().time()
        if now >= self._trim_at:
            self._trim_at = now + TRIM_S
            alive = {row.id for row in self._store.alive()}
            self._spawn(asyncio.to_thread(trim_audits, self.audit, alive))

    def _known(self, sandbox: str) -> bool:
        return sandbox in self._machines or self._store.get(sandbox) is not None

    def _ended(self, sandbox: str) -> bool:
        row = self._store.get(sandbox)
        return sandbox not in self._machines and (row is None or row.state in TERMINAL)

    @property
    def names(self) -> Path:
        """The gateway's directory of names, one file for each sandbox."""
        return self._settings.state / "barrier" / "gateway" / "names"

    @property
    def audit(self) -> Path:
        """The gateway's directory of audits: `ID.jsonl` and the one before it."""
        return self._settings.state / "barrier" / "gateway" / "audit"

    # -- what was asked for -------------------------------------------------------------------------------

    async def asked(self, value: Any, progress: Progress = silent, project: str = DEFAULT) -> Asked:
        """A `network=` (None: the server's default) read, compiled and possible here, with a project's secrets.

        Raises InvalidRequestError (names the line), HostSetupError (no link can be made here, or no interceptor).
        """
        network = self.default() if value is None else Network.from_json(value)
        asked = await self._compiled(network, progress)
        if asked.needs_link and (problem := await self.barrier.available()) is not None:
            raise no_link(problem)
        self._secrets.check((name for name in asked.wish.secrets if not _own(name)), project)
        if asked.wish.intercepts:
            await environment.ensure(self._settings.cache, progress)
            await asyncio.to_thread(self._templates.authority)
        return asked

    async def furnish(self, sandbox: str, agent: Agent, asked: Asked) -> None:
        """Write the files in which a guest's package tools look for this host's registries."""
        for path, text in asked.files.items():
            try:
                if path == APT_SOURCES and not await _same_release(agent, text):
                    continue
                await agent.write(path, text.encode(), user="root")
            except LLM4AgentsError as error:
                log.warning("not_furnished", sandbox=sandbox, path=path, error=error.message)

    def default(self) -> Network:
        """`LLM4AGENTS_NETWORK`. Raises InvalidRequestError naming it."""
        return read_default(self._settings.network)

    async def _compiled(self, network: Network, progress: Progress = silent) -> Asked:
        body = network.to_json()
        floor = self.floor()
        key = json.dumps(body, sort_keys=True)
        if network.profile != "packages" and (kept := self._policies.get(key)) is not None:
            return kept
        found = None
        if network.profile == "packages":
            found = (await self._discovery.get(lambda what: progress("packages", what, None))).packages
        policy = Policy.compile(network, floor=floor, packages=found)
        wish = Wish(policy.to_json(), _intercepts(policy), policy.secrets)
        asked = Asked(body, wish, found.environment if found else {}, found.files if found else {})
        if len(self._policies) >= POLICIES_KEPT:
            self._policies.clear()
        self._policies[key] = asked
        return asked

    def floor(self) -> Floor:
        """The operator's, read anew when its file has changed. Raises HostSetupError: then nothing is allowed."""
        path = self._settings.network_floor
        if path is None:
            return Floor()
        try:
            changed = path.stat().st_mtime_ns
        except OSError:
            changed = 0
        if self._floor is None or self._floor[0] != changed:
            self._floor = (changed, read_floor(path))
            self._policies.clear()
        return self._floor[1]

    # -- links --------------------------------------------------------------------------------------------

    async def link(self, *, needed: bool = False) -> Link | None:
        """A link for a machine about to start; the caller's to close. None where none can be made.

        Raises HostSetupError when there must be one.
        """
        if (problem := await self.barrier.available()) is not None:
            if needed:
                raise no_link(problem)
            return None
        try:
            return await self.barrier.link()
        except LLM4AgentsError as error:
            if needed:
                raise
            log.warning("no_link", error=error.message)
            return None

    async def link_of(self, row: SandboxRow) -> Link | None:
        """One for a sandbox that is to run again, as its network needs."""
        return await self.link(needed=_needs(row))

    def linked(self, sandbox: str) -> bool:
        """Whether its machine runs with a link."""
        return (self._places.run(sandbox) / shim.LINK_SOCKET).exists()

    # -- sandboxes that run, and those that do not --------------------------------------------------------

    def entered(self, row: SandboxRow) -> None:
        """It runs from now on: it joins, in the background."""
        if self.linked(row.id) and self._settings.barrier != "off":
            self._spawn(self._join(row))
            self.captures.entered(row.id)

    def left(self, sandbox: str, *, forget: bool) -> None:
        """It has paused, or (`forget`) ended."""
        self.barrier.leave(sandbox, forget=forget)
        self.captures.left(sandbox)
        if forget:
            self._trim()

    async def _join(self, row: SandboxRow) -> None:
        tries = 0
        while True:
            try:
                asked = await self._compiled(_network_of(row))
                break
            except (
                LLM4AgentsError
            ) as error:  # this host's own package tools, or the floor: until then it is shut
                log.warning("network_not_compiled", sandbox=row.id, error=error.message)
                tries += 1
                await asyncio.sleep(min(60.0, 2.0**tries))
                if not self.linked(row.id):
                    return
        with contextlib.suppress(LLM4AgentsError):  # logged there, and tried again
            await self.barrier.join(row.id, asked.wish, names_from=self._names_from(row))

    def _names_from(self, row: SandboxRow) -> str | None:
        return row.parent if row.parent and not (self.names / row.id).exists() else None

    async def update(self, row: SandboxRow, asked: Asked) -> int:
        """Change the network of a sandbox, running or paused; how many flows were cut.

        Raises ConflictError when its machine has no link, VersionMismatchError when its guest would have to trust
        this node's CA and does not, UnknownOutcomeError when a part of the barrier has not heard of it.
        """
        if asked.wish.intercepts:
            self._templates.check_ca(row.template, row.template_key)
        running, linked = row.state == "running", self.linked(row.id)
        if running and asked.needs_link and not linked:
            raise ConflictError(
                f"{row.id} was started without a link",
                hint="pause and resume it: then it has one, and the network can be set",
            )
        self._store.change(row, network=asked.network)
        if not (running and linked) or self._settings.barrier == "off":
            return 0
        if not self.barrier.has(row.id):
            await self.barrier.join(row.id, asked.wish, names_from=self._names_from(row))
            return 0
        return await self.barrier.update(row.id, asked.wish)

    async def why(self, row: SandboxRow, question: str) -> dict[str, Any]:
        """Whether a URL or `host:port` is allowed, by which rule, what was looked at. Raises InvalidRequestError."""
        policy = Policy.from_json((await self._compiled(_network_of(row))).wish.policy)
        target, _ = parse_question(question)
        led = policy.rewrite(target)
        if led.name is None or not policy.connect(led).allowed:
            return policy.why(question, (), own_addresses())
        resolved = await _resolved(led.name)
        answer = policy.why(question, resolved, own_addresses())
        if not resolved:
            words = f"this host's resolver knows no address of {led.name} now"
            answer["steps"].append({"rule": "address", "matched": "maybe", "why": words})
        return answer

    async def describe(self, row: SandboxRow) -> dict[str, Any]:
        """`{network, link, problem, warnings, capture}`: as asked, whether there is a way out, why it is not what it
        should be, and what of it is probably wider than meant."""
        return {
            "network": row.network or NONE,
            "link": row.state == "running" and self.linked(row.id),
            "problem": await self._problem(row),
            "warnings": list(_network_of(row).warnings()),
            "capture": await self.captures.state(row.id),
        }

    # -- machines that are no sandboxes -------------------------------------------------------------------

    async def enter_machine(self, ident: str, record: MachineRecord, asked: Asked, project: str) -> None:
        """A machine of a project's build joins. Returns once it is let out. Raises as the barrier does."""
        self._machines[ident] = record, project
        await self.barrier.join(ident, asked.wish)

    def leave_machine(self, ident: str) -> None:
        """It ends. Its audit stays until the next sweep. Idempotent."""
        if self._machines.pop(ident, None) is not None:
            self.barrier.leave(ident, forget=True)

    async def denied(self, ident: str, limit: int = 8) -> list[str]:
        """The names or addresses that a machine of a build was refused last."""
        wanted = Wanted(verdict="deny")
        found = await asyncio.to_thread(audit_read.read, self.audit, ident, wanted, 8 * limit)
        names = (one.get("name") or one.get("address") for one in found)
        return [str(name) for name in dict.fromkeys(names) if name][-limit:]

    # -- what is told of it -------------------------------------------------------------------------------

    async def log(self, row: SandboxRow, wanted: audit_read.Wanted, limit: int) -> list[dict[str, Any]]:
        """The newest `limit` records of its audit that are wanted, oldest first; also of one that has ended."""
        return await asyncio.to_thread(audit_read.read, self.audit, row.id, wanted, limit)

    def follow(
        self, row: SandboxRow, wanted: audit_read.Wanted, limit: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The same, and then what comes, until the sandbox has ended."""

        def over() -> bool:
            found = self._store.get(row.id)
            return found is None or found.state in TERMINAL

        return audit_read.follow(self.audit, row.id, wanted, limit, over)

    async def capture(self, row: SandboxRow, bytes_max: int | None) -> None:
        """Capture its packets from now on (a paused one's from its resume on).

        Raises InvalidRequestError, CapacityError, HostSetupError, ConflictError when its machine has no link.
        """
        if row.state in TERMINAL:
            raise ConflictError(f"{row.id} has ended", hint="net capture -o still gives what was captured")
        running = row.state == "running"
        if running and not self.linked(row.id):
            raise ConflictError(
                f"{row.id} has no link to capture: {await self._problem(row)}",
                hint="pause and resume it, once llm4agents doctor is content",
            )
        await self.captures.start(row.id, bytes_max, owner=row.project, running=running)

    async def _problem(self, row: SandboxRow) -> str | None:
        if row.state != "running":
            return None
        if not self.linked(row.id):
            return await self.barrier.available() or "its machine was started without a link"
        return self.barrier.problem(row.id)

    # -- what the barrier asks for ------------------------------------------------------------------------

    async def _sockets(self, sandbox: str) -> dict[str, int] | None:
        if sandbox in self._machines:
            record = self._machines[sandbox][0]
        else:
            row = self._store.get(sandbox)
            if row is None or row.record is None:
                return None
            record = MachineRecord.from_json(row.record)
        try:
            pidfd = os.pidfd_open(record.vmm_pid)
        except OSError:
            return None
        found = await shim.fetch(record.run_dir)
        if not found or not procfs.alive(record.vmm_pid, record.vmm_start_ticks):
            for fd in (pidfd, *found.values()):
                os.close(fd)
            return None
        return {**found, "pidfd": pidfd}

    async def _rotated(self, project: str, name: str) -> None:
        await self.barrier.rotated(name, lambda sandbox: self._project_of(sandbox) == project)

    def _project_of(self, sandbox: str) -> str | None:
        if sandbox in self._machines:
            return self._machines[sandbox][1]
        row = self._store.get(sandbox)
        return None if row is None else row.project

    async def _values(self, sandbox: str, names: Iterable[str]) -> dict[str, Any]:
        names, project = tuple(names), self._project_of(sandbox)
        values: dict[str, Any] = {}
        if project is not None:
            values |= self._secrets.resolve((name for name in names if not _own(name)), project)
        if any(map(_own, names)):
            own = (await self._discovery.get()).secrets  # kept since the policy was made
            values |= {name: own[name] for name in names if name in own}
        return values

    def _authority(self) -> tuple[str, str]:
        authority = self._templates.authority()
        return authority.certificate_pem.decode(), authority.key_pem().decode()

    async def _interpreter(self) -> Path:
        return await environment.ensure(self._settings.cache)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("network_task_failed", exc_info=error)


async def checks(settings: Settings) -> list[tuple[str, bool, str, str]]:
    """For `doctor`, without a server: (name, whether it is well, what is found, what to do)."""
    found = []
    if settings.barrier == "off":
        found.append(("link", False, "LLM4AGENTS_BARRIER=off", "unset it: no sandbox can have a network"))
    else:
        problem = await link_problem(settings)
        words = "namespaces, taps and nft work" if problem is None else problem
        found.append(("link", problem is None, words, "without it only sandboxes without a network run"))
    built = environment.python(settings.cache)
    words = (
        "not built yet: the first network that needs it builds it" if built is None else str(built.parents[1])
    )
    found.append(("interceptor", built is not None, words, "scripts/bootstrap builds it ahead"))
    try:
        words = read_default(settings.network).profile
        given = "LLM4AGENTS_NETWORK" if settings.network.strip()[:1] in ("[", "{") else words
        found.append(("network default", True, given, ""))
    except InvalidRequestError as error:
        found.append(("network default", False, error.message, error.hint or ""))
    floor = settings.network_floor
    try:
        rules = Floor() if floor is None else read_floor(floor)
        words = f"{len(rules.rules)} rules in {floor}" if floor is not None else "none set"
        found.append(("network floor", True, words, ""))
    except HostSetupError as error:
        found.append(("network floor", False, error.message, "until it can be read no network is allowed"))
    return found


async def link_problem(settings: Settings) -> str | None:
    """Why no link can be made on this host; None when one was."""
    with tempfile.TemporaryDirectory(prefix="l4a-link-") as scratch:
        place = Path(scratch)
        worker = Worker(LINK, run=place, state=place, version=__version__, quiet=True)
        try:
            await worker.start()
            answer, _ = await worker.request({"op": "check"})
            return None if answer.get("problem") is None else str(answer["problem"])
        except (WorkerError, LLM4AgentsError) as error:
            return error.message if isinstance(error, LLM4AgentsError) else str(error)
        finally:
            await worker.close(keep=False)


def read_default(text: str) -> Network:
    """What LLM4AGENTS_NETWORK says. Raises InvalidRequestError naming it."""
    text = text.strip()
    try:
        return Network.from_json(json.loads(text) if text[:1] in ("[", "{") else text)
    except (InvalidRequestError, ValueError) as error:
        words = error.message if isinstance(error, InvalidRequestError) else f"no JSON: {error}"
        hint = (
            error.hint
            if isinstance(error, InvalidRequestError)
            else "a profile, or rules or an object as JSON"
        )
        raise InvalidRequestError(f"LLM4AGENTS_NETWORK: {words}", hint=hint) from None


def read_floor(path: Path) -> Floor:
    """Raises HostSetupError naming the line."""
    try:
        return Floor.load(path.read_text())
    except OSError as error:
        raise HostSetupError(
            f"LLM4AGENTS_NETWORK_FLOOR: {path} cannot be read: {error.strerror}", hint=_FLOOR_HINT
        ) from error
    except (InvalidRequestError, UnicodeDecodeError) as error:
        words = error.message if isinstance(error, InvalidRequestError) else "it is not UTF-8"
        raise HostSetupError(f"LLM4AGENTS_NETWORK_FLOOR: {path}: {words}", hint=_FLOOR_HINT) from error


def trim_audits(directory: Path, alive: Collection[str], bytes_max: int = limits.AUDITS_BYTES_MAX) -> None:
    """Remove the oldest audits of those that are not `alive`, until the rest of theirs fits. Blocking I/O."""
    ended = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.partition(".")[0] not in alive:
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    ended.append((found.st_mtime_ns, found.st_size, entry.path))
    total = sum(size for _, size, _ in ended)
    for _, size, path in sorted(ended):
        if total <= bytes_max:
            break
        with contextlib.suppress(OSError):
            Path(path).unlink()
            total -= size


async def _resolved(name: str) -> list[str]:
    """What this host resolves a name to; nothing when it cannot, or takes too long about it."""
    with contextlib.suppress(OSError, UnicodeError, TimeoutError):
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(one[4][0]) for one in found))
    return []


def refused_address(address: str) -> str | None:
    """Why an address that a caller's words lead to (an image's registry) is not dialled from this host; None: it is."""
    found = addresses.parse(address)
    kind = None if found is None else addresses.classify(found, own_addresses())
    return None if kind is addresses.Kind.PUBLIC else f"it is {kind or 'no address'}"


def own_addresses() -> frozenset[Address]:
    """The addresses of this host."""
    texts = []
    for path in (Path("/proc/net/fib_trie"), Path("/proc/net/if_inet6")):
        try:
            texts.append(path.read_text())
        except OSError:
            texts.append("")
    return addresses.own_addresses(*texts)


def _user(key: str) -> User:
    lease = uids.lease(key)
    return User(lease.uid, lease.uid, lease.fd)


def _intercepts(policy: Policy) -> bool:
    """Whether there is a connection that it looks into."""
    network = policy.network
    if network == Network():
        return False
    looked_into = any(rule.on_requests for rule in (*network.rules, *policy.floor.rules))
    return looked_into or bool(policy.bindings) or policy.packages is not None


def _network_of(row: SandboxRow) -> Network:
    return Network.from_json(row.network)


async def _same_release(agent: Agent, sources: str) -> bool:
    """Whether a guest is of the Debian that this host's apt sources are for: others' packages would not fit."""
    try:
        stream = await agent.read("/etc/os-release", length=4_096, user="root")
        text = b"".join([bytes(piece) async for piece in stream]).decode(errors="replace")
    except PathNotFoundError:
        return False
    codename = re.search(r'(?m)^VERSION_CODENAME="?([a-z]+)"?$', text)
    return codename is not None and re.search(rf"\s{codename[1]}\s", sources) is not None


def _own(secret: str) -> bool:
    return secret.startswith(OWN_SECRET)


def _needs(row: SandboxRow) -> bool:
    return (row.network or NONE) != NONE
