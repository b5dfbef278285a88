"""What can be asked of a guest's agent, one method a verb.

Not here: frames, credit, sessions (`channel`, `stream`); the Python interpreter (`code`). Every call has a
deadline, and a call that is cancelled or fails in the middle cancels what it started in the guest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llm4agents.errors import (
    GuestError,
    InvalidRequestError,
    LLM4AgentsError,
    ProtocolError,
    TimedOutError,
)
from llm4agents.guest import maps
from llm4agents.guest.channel import Session
from llm4agents.guest.handles import STDERR, STDOUT, ByteStream, GuestSocket, Process, within
from llm4agents.guest.maps import Fields, Text
from llm4agents.guest.processes import ManagedVerbs, exec_arguments
from llm4agents.guest.results import Entry, EntryReader, FileInfo, Listing, Metrics
from llm4agents.guest.stream import Stream
from llm4agents.limits import (
    FRAME_PAYLOAD_BYTES_MAX,
    STALL_TIMEOUT_S,
    STREAM_CREDIT_BYTES,
    STREAM_WINDOW_BYTES_MAX,
    VERB_TIMEOUT_S,
)

_BODY = frozenset({0})
_OUTPUT = frozenset({STDOUT, STDERR})
User = str | int | None


_PIECE_BYTES = 1_048_576
_T = TypeVar("_T")


def show(path: Text) -> str:
    """A path as errors have it."""
    return maps.printable(path if isinstance(path, str) else str(path), 300)


async def pieces(chunks: AsyncIterable[bytes] | bytes) -> AsyncIterator[bytes | memoryview]:
    """The same bytes in pieces that neither waste frames nor wait for long."""
    if isinstance(chunks, bytes):
        whole = memoryview(chunks)
        for at in range(0, len(whole), _PIECE_BYTES):
            yield whole[at : at + _PIECE_BYTES]
        return
    small = bytearray()
    async for chunk in chunks:
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise InvalidRequestError(f"what is written to a file must be bytes, not {type(chunk).__name__}")
        if small or len(chunk) < FRAME_PAYLOAD_BYTES_MAX:
            small += chunk
            if len(small) < FRAME_PAYLOAD_BYTES_MAX:
                continue
            chunk, small = bytes(small), bytearray()
        async for piece in pieces(bytes(chunk)):
            yield piece
    if small:
        yield bytes(small)


@dataclass(frozen=True, slots=True)
class Service:
    """Makes an exec a service: it outlives host sessions. `restore_signal` is sent to it after a restore."""

    name: str
    restore_signal: int | None = None


class Agent(ManagedVerbs):
    """The agent of one guest, over an open session.

    `user` names whose rights a call has (name or uid; None: whatever the agent itself runs as). Paths are
    absolute, `str`, `bytes` or path-like; a `str` may carry surrogate escapes for names that are not UTF-8.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    async def _open(
        self,
        verb: str,
        arguments: Mapping[str, object],
        *,
        timeout: float,
        subject: str | None = None,
        channels: frozenset[int] = frozenset(),
        window: int = STREAM_CREDIT_BYTES,
        first: bytes = b"",
        lives_on: bool = False,
    ) -> tuple[Stream, Fields]:
        what = verb if subject is None else f"{verb} {subject}"
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(timeout):
                stream = await self.session.stream(
                    verb, arguments, channels=channels, window=window, subject=subject
                )
                if first:
                    await stream.send(first)
        except TimeoutError as error:
            if isinstance(error, LLM4AgentsError):
                raise
            raise TimedOutError(f"{what}: the guest took nothing from us for {timeout:g} s") from None
        async with within(stream, max(0.0, timeout - (loop.time() - started)), what, lives_on=lives_on):
            return stream, await stream.reply()

    async def _call(
        self, verb: str, arguments: Mapping[str, object], *, timeout: float, subject: str | None = None
    ) -> Fields:
        """A verb that only answers."""
        stream, reply = await self._open(verb, arguments, timeout=timeout, subject=subject)
        async with within(stream, timeout, verb):
            await stream.end()
        return reply

    def _read(self, read: Callable[[Fields], _T], fields: Fields) -> _T:
        """Read an answer; one that makes no sense ends the session."""
        try:
            return read(fields)
        except ProtocolError as error:
            self.session.fail(error)
            raise

    # Processes.

    async def exec(
        self,
        argv: Sequence[Text],
        *,
        env: Mapping[str, str] | None = None,
        env_clear: bool = False,
        cwd: Text | None = None,
        user: User = "user",
        stdin: bool | bytes = False,
        timeout_s: float | None = None,
        service: Service | None = None,
        init: bool = False,
        inside: bool = True,
        timeout: float = VERB_TIMEOUT_S,
    ) -> Process:
        """Start a program; returns when its execve has succeeded.

        `stdin`: bytes to feed it, True for `write_stdin`, False for /dev/null. `timeout_s`: how long it may
        run before its group is killed; `timeout`: how long it may take to start. `init` (root's alone): it is process 1
        of a PID namespace, with a /proc, /sys and cgroup tree of its own, as systemd wants it. `inside` False: not in
        the namespaces of an init that runs. Raises
        InvalidRequestError (code `exec_failed`) when it cannot be started.
        """
        if init:
            self.session.need("init", "starting an init")
        arguments = exec_arguments(argv, env, env_clear, cwd, user, timeout_s)
        subject = show(argv[0])
        stream, reply = await self._open(
            "exec",
            {
                **arguments,
                "stdin": stdin is not False,
                "service": service and {"name": service.name, "restore_signal": service.restore_signal},
                **({"init": True} if init else {}),
                **({} if inside else {"inside": False}),
            },
            timeout=timeout,
            subject=subject,
            channels=frozenset() if service else _OUTPUT,
        )
        async with within(stream, timeout, f"exec {subject}"):
            process = Process(
                stream, f"exec {subject}", reply.integer("pid", 1, 2**31), timeout_s, stdin is not False
            )
            if service is not None:
                process.is_service = True
                await stream.end()
        if isinstance(stdin, bytes):
            process.feed(stdin)
        return process

    # Files.

    async def read(
        self,
        path: Text,
        *,
        offset: int = 0,
        length: int | None = None,
        user: User = "user",
        timeout: float = VERB_TIMEOUT_S,
    ) -> ByteStream:
        """Open a file for reading from `offset`, `length` bytes or to its end."""
        if offset < 0 or (length is not None and length < 0):
            raise InvalidRequestError("offset and length cannot be negative")
        stream, reply = await self._open(
            "read",
            {"path": maps.wire_path(path), "offset": offset, "length": length, "user": user},
            timeout=timeout,
            subject=show(path),
            channels=_BODY,
            window=STREAM_WINDOW_BYTES_MAX,
        )
        what = f"read {show(path)}"
        async with within(stream, timeout, what):
            return ByteStream(stream, what, FileInfo.read(reply), length)

    async def write(
        self,
        path: Text,
        chunks: AsyncIterable[bytes] | bytes,
        *,
        mode: int | None = 0o644,
        user: User = "user",
        parents: bool = True,
        size: int | None = None,
        timeout: float = VERB_TIMEOUT_S,
    ) -> int:
        """Write a file whole or not at all; returns its bytes. `mode` None keeps that of the file replaced.

        `timeout` is for opening; after that, no progress for STALL_TIMEOUT_S is the end.
        """
        what = f"write {show(path)}"
        arguments = {"path": maps.wire_path(path), "mode": mode, "user": user, "parents": parents}
        stream, _ = await self._open(
            "write", {**arguments, "size": size}, timeout=timeout, subject=show(path)
        )
        sent = 0
        try:
            async for chunk in pieces(chunks):
                async with within(stream, STALL_TIMEOUT_S, what):
                    await stream.send(chunk)
                sent += len(chunk)
            async with within(stream, STALL_TIMEOUT_S, what):
                await stream.send_eof()
                end = await stream.end()
                if end.integer("bytes") != sent:
                    raise ProtocolError("the guest wrote another number of bytes than it was sent")
        except BaseException:
            stream.cancel()
            raise
        return sent

    async def stat(
        self, path: Text, *, follow: bool = True, user: User = "user", timeout: float = VERB_TIMEOUT_S
    ) -> Entry:
        arguments = {"path": maps.wire_path(path), "follow": follow, "user": user}
        reply = await self._call("stat", arguments, timeout=timeout, subject=show(path))
        return self._read(Entry.read, reply)

    async def list(
        self, path: Text, *, depth: int = 1, user: User = "user", timeout: float = STALL_TIMEOUT_S
    ) -> Listing:
        """What is in a directory, `depth` levels deep; at most LIST_ENTRIES_MAX entries."""
        if depth < 1:
            raise InvalidRequestError("depth is at least 1")
        what = f"list {show(path)}"
        stream, _ = await self._open(
            "list",
            {"path": maps.wire_path(path), "depth": depth, "user": user},
            timeout=timeout,
            subject=show(path),
            channels=_BODY,
        )
        reader = EntryReader()
        async with within(stream, timeout, what):
            while not reader.full and (item := await stream.receive()) is not None:
                reader.feed(item[1])
            if reader.full:
                stream.cancel()
                return Listing(reader.entries, True)
            end = await stream.end()
            reader.finish(end.integer("entries"))
            return Listing(reader.entries, end.flag("truncated", default=False))

    async def mkdir(
        self,
        path: Text,
        *,
        parents: bool = True,
        mode: int = 0o755,
        exist_ok: bool = True,
        user: User = "user",
        timeout: float = VERB_TIMEOUT_S,
    ) -> None:
        options = {"parents": parents, "mode": mode, "exist_ok": exist_ok, "user": user}
        await self._call(
            "mkdir", {"path": maps.wire_path(path), **options}, timeout=timeout, subject=show(path)
        )

    async def move(
        self,
        source: Text,
        target: Text,
        *,
        overwrite: bool = True,
        user: User = "user",
        timeout: float = VERB_TIMEOUT_S,
    ) -> None:
        paths = {"from": maps.wire_path(source), "to": maps.wire_path(target)}
        subject = f"{show(source)} → {show(target)}"
        await self._call(
            "move", {**paths, "overwrite": overwrite, "user": user}, timeout=timeout, subject=subject
        )

    async def remove(
        self,
        path: Text,
        *,
        recursive: bool = False,
        missing_ok: bool = False,
        user: User = "user",
        timeout: float = VERB_TIMEOUT_S,
    ) -> None:
        options = {"recursive": recursive, "missing_ok": missing_ok, "user": user}
        await self._call(
            "remove", {"path": maps.wire_path(path), **options}, timeout=timeout, subject=show(path)
        )

    # Connections.

    async def connect(
        self,
        port: int | None = None,
        *,
        host: str = "127.0.0.1",
        unix: Text | None = None,
        first: bytes = b"",
        timeout: float = VERB_TIMEOUT_S,
    ) -> GuestSocket:
        """Connect to a TCP port or unix socket in the guest. GuestError (`refused`) when none listens.

        `first` goes out with the request, which saves a round trip; at most the credit a stream begins with.
        """
        if len(first) > STREAM_CREDIT_BYTES:
            raise InvalidRequestError(
                f"first is more than {STREAM_CREDIT_BYTES} bytes", hint="write the rest"
            )
        if (port is None) == (unix is None):
            raise InvalidRequestError("connect takes either a port or a unix socket's path")
        if unix is not None:
            arguments: dict[str, object] = {"unix": maps.wire_path(unix)}
            subject = show(unix)
        else:
            if not 1 <= (port or 0) <= 65_535:
                raise InvalidRequestError(f"{port} is not a TCP port")
            arguments, subject = {"host": host, "port": port}, f"{host}:{port}"
        stream, _ = await self._open(
            "connect", arguments, timeout=timeout, subject=subject, channels=_BODY, first=first
        )
        return GuestSocket(stream, f"connect {subject}")

    # The machine.

    async def ping(self, *, timeout: float = VERB_TIMEOUT_S) -> None:
        await self._call("ping", {}, timeout=timeout)

    async def metrics(self, *, timeout: float = VERB_TIMEOUT_S) -> Metrics:
        return self._read(Metrics.read, await self._call("metrics", {}, timeout=timeout))

    async def freeze(
        self,
        *,
        sync: bool = True,
        drop_caches: bool = False,
        fs: bool = False,
        timeout: float = STALL_TIMEOUT_S,
    ) -> None:
        """Freeze every process but the agent. Returns when the guest's kernel says that they are.

        `fs`: and then the file systems on disks, so that each disk alone is whole. `thaw` and `post_restore` thaw them.
        Raises VersionMismatchError when the agent is too old for `fs`, GuestError when it could not be done (then the
        processes are frozen and the file systems are not).
        """
        wanted = {"sync": sync, "drop_caches": drop_caches}
        if fs:
            self.session.need("fsfreeze", "freezing file systems")
            wanted["fs"] = True
        reply = await self._call("freeze", wanted, timeout=timeout)
        if not self._read(lambda fields: fields.flag("frozen"), reply):
            raise GuestError("the guest's processes could not be frozen", code="io")

    async def thaw(self, *, timeout: float = VERB_TIMEOUT_S) -> None:
        await self._call("thaw", {}, timeout=timeout)

    async def post_restore(
        self,
        *,
        entropy: bytes,
        unix_ns: int,
        hostname: str,
        machine_id: str,
        boot_id: str,
        env: Mapping[str, str] | None = None,
        network: bool | None = None,
        thaw: bool = True,
        protect: Mapping[str, object] | None = None,
        volumes: Sequence[Mapping[str, object]] | None = None,
        timeout: float = VERB_TIMEOUT_S,
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """Make a clone a machine of its own; the first call after every resume. 64 bytes of `entropy`.

        `network`: whether its NIC is to be up, None to leave it; an older agent has no NIC and ignores it.
        `protect` (docs/design/protocol.md): paths to cover before anything runs; VersionMismatchError when the agent is
        too old for it. `volumes`: all that are to be mounted from now on, None to leave those that are. The
        answer: which of them could not be, by id, and why; and the slots whose former volume is still in use in there.
        """
        if len(entropy) != 64:
            raise InvalidRequestError("post_restore takes 64 bytes of entropy")
        identity = {"hostname": hostname, "machine_id": machine_id, "boot_id": boot_id}
        arguments = {
            "entropy": entropy,
            "unix_ns": unix_ns,
            **identity,
            "env": maps.wire_env(env),
            "thaw": thaw,
            **({} if network is None else {"network": network}),
        }
        if protect is not None:
            self.session.need("protect", "protecting paths")
            arguments["protect"] = dict(protect)
        if volumes or (volumes is not None and "volumes" in self.session.hello.capabilities):
            self.session.need("volumes", "mounting volumes")
            arguments["volumes"] = [dict(volume) for volume in volumes]
        reply = await self._call("post_restore", arguments, timeout=timeout)
        return self._read(maps.unmounted, reply)

    async def set_time(self, unix_ns: int, *, timeout: float = VERB_TIMEOUT_S) -> None:
        await self._call("set_time", {"unix_ns": unix_ns}, timeout=timeout)

    async def network(self, up: bool, *, timeout: float = VERB_TIMEOUT_S) -> None:
        """Bring the guest's NIC up, with the addresses every sandbox has, or down. Raises GuestError (code
        `not_found`) when there is none, VersionMismatchError for an agent from before networks."""
        await self._call("network", {"up": up}, timeout=timeout)

    async def set_env(self, env: Mapping[str, str], *, timeout: float = VERB_TIMEOUT_S) -> None:
        """Replace the default environment of later execs."""
        await self._call("set_env", {"env": maps.wire_env(env)}, timeout=timeout)

    async def poweroff(self, *, timeout: float = VERB_TIMEOUT_S) -> None:
        """Returns when the agent has agreed; the machine's end is the driver's to see."""
        stream, _ = await self._open("poweroff", {}, timeout=timeout)
        stream.cancel()
