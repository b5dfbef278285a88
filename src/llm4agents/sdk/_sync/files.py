# Generated from _async/files.py by scripts/unasync.py: change that file, then run the script.
"""`sandbox.files`: the files of a sandbox, and copies between them and this machine's.

Paths in the sandbox that are not absolute are taken from /home/user. Calls act as `user` (default: the
ordinary user `user`). Errors: PathNotFoundError, GuestError (`details["errno"]`), SandboxNotFoundError…
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, overload

from llm4agents.errors import InvalidRequestError, LLM4AgentsError, PathNotFoundError
from llm4agents.sdk import _wire, results
from llm4agents.sdk._landing import Downloaded, Guard
from llm4agents.sdk._runtime import blocking, call, chunks
from llm4agents.sdk._sync.trees import CHUNK_BYTES, Progress, Trees

if TYPE_CHECKING:
    from llm4agents.sdk._sync.transport import ByteStream, Transport

Data = str | bytes | bytearray | memoryview | IO[bytes] | Iterable[bytes]


class Files(Trees):
    """The files of one sandbox."""

    def __init__(self, transport: Transport, sandbox: str) -> None:
        self._transport, self._sandbox = transport, sandbox
        self._path = f"/v1/sandboxes/{sandbox}/files"

    def _json(self, method: str, verb: str, body: Any = None, params: Any = None) -> dict[str, Any]:
        return self._transport.json(
            method, f"{self._path}/{verb}", body, params=params, sandbox=self._sandbox
        )

    @overload
    def read(
        self,
        path: str,
        format: Literal["text"] = ...,
        *,
        offset: int = ...,
        length: int | None = ...,
        user: str | None = ...,
    ) -> str: ...
    @overload
    def read(
        self,
        path: str,
        format: Literal["bytes"],
        *,
        offset: int = ...,
        length: int | None = ...,
        user: str | None = ...,
    ) -> bytes: ...
    @overload
    def read(
        self,
        path: str,
        format: Literal["stream"],
        *,
        offset: int = ...,
        length: int | None = ...,
        user: str | None = ...,
    ) -> ByteStream: ...
    def read(
        self,
        path: str,
        format: Literal["text", "bytes", "stream"] = "text",
        *,
        offset: int = 0,
        length: int | None = None,
        user: str | None = None,
    ) -> str | bytes | ByteStream:
        """The file's content, from byte `offset`, at most `length` bytes.

        `text` is strict UTF-8 (InvalidRequestError for anything else); `stream` is an iterator of bytes
        to be used as a context manager, for files that should not be in memory whole.
        """
        if format not in ("text", "bytes", "stream"):
            raise InvalidRequestError(f"format={format!r}", hint="one of text, bytes, stream")
        where = _wire.path_of(path)
        params = {"path": where, "offset": offset or None, "length": length, "user": user}
        stream = self._transport.stream("GET", self._path, params=params, sandbox=self._sandbox)
        if format == "stream":
            return stream
        with stream:
            data = stream.read()
        if format == "bytes":
            return data
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise _wire.not_text(where, self._sandbox) from None

    def write(self, path: str, data: Data, *, mode: int | None = None, user: str | None = None) -> int:
        """Writes the whole file (parents are made; what was there is replaced at once at the end).

        `data`: text (UTF-8), bytes, a binary file object or an iterable of bytes. Returns the size in bytes.
        """
        if isinstance(data, str):
            data = data.encode("utf-8", "surrogateescape")
        elif not isinstance(data, bytes | bytearray | memoryview) and not any(
            hasattr(data, name) for name in ("read", "__iter__", "__iter__")
        ):
            raise InvalidRequestError(
                f"cannot write a {type(data).__name__}", hint="give str, bytes, a binary file"
            )
        size = memoryview(data).nbytes if isinstance(data, bytes | bytearray | memoryview) else None
        return self._put(path, data, size, mode=mode, user=user)

    def _put(
        self,
        path: str,
        data: Any,
        size: int | None,
        *,
        mode: int | None,
        user: str | None,
        progress: Progress | None = None,
    ) -> int:
        def pieces() -> Any:
            sent = 0
            for piece in chunks(data, CHUNK_BYTES):
                yield piece
                sent += len(piece)
                call(progress, sent, size)

        headers = [("content-type", "application/octet-stream")]
        if size is not None:
            headers.append(("content-length", str(size)))
        stream = self._transport.stream(
            "PUT",
            self._path,
            params={"path": _wire.path_of(path), "mode": mode, "user": user},
            content=pieces(),
            headers=headers,
            sandbox=self._sandbox,
        )
        with stream:
            answer = _wire.object_of(stream.read())
        return int(answer.get("size") or 0)

    def stat(self, path: str, *, follow: bool = True, user: str | None = None) -> results.FileInfo:
        """What `path` is; with `follow=False` a link itself, whose `target` is where it points."""
        params = {"path": _wire.path_of(path), "follow": None if follow else False, "user": user}
        return results.file_info(self._json("GET", "stat", params=params))

    def exists(self, path: str, *, user: str | None = None) -> bool:
        try:
            self.stat(path, user=user)
        except PathNotFoundError:
            return False
        return True

    def list(self, path: str = ".", *, depth: int = 1, user: str | None = None) -> list[results.FileInfo]:
        """The entries under a directory, `depth` levels deep; at most LIST_ENTRIES_MAX of them."""
        params = {"path": _wire.path_of(path), "depth": depth, "user": user}
        answer = self._json("GET", "list", params=params)
        if answer.get("truncated"):
            raise InvalidRequestError(
                f"sandbox {self._sandbox}: {path} has too many entries at depth {depth}",
                hint="list less deeply, or a directory below it",
            )
        return [results.file_info(entry) for entry in answer.get("entries") or ()]

    def mkdir(
        self, path: str, *, parents: bool = True, exist_ok: bool = True, user: str | None = None
    ) -> None:
        body = {"path": _wire.path_of(path), "parents": parents, "exist_ok": exist_ok, "user": user}
        self._json("POST", "mkdir", _wire.without_none(body))

    def move(self, source: str, target: str, *, overwrite: bool = True, user: str | None = None) -> None:
        body = {
            "from": _wire.path_of(source),
            "to": _wire.path_of(target),
            "overwrite": overwrite,
            "user": user,
        }
        self._json("POST", "move", _wire.without_none(body))

    def remove(
        self, path: str, *, recursive: bool = False, missing_ok: bool = False, user: str | None = None
    ) -> None:
        """Removes a file, or with `recursive` a directory with all that is in it."""
        body = {"path": _wire.path_of(path), "recursive": recursive, "missing_ok": missing_ok, "user": user}
        self._json("POST", "remove", _wire.without_none(body))

    def upload(
        self,
        local: str | os.PathLike[str],
        remote: str | None = None,
        *,
        user: str | None = None,
        on_progress: Progress | None = None,
    ) -> str:
        """Copies a file or directory of this machine into the sandbox.

        `remote` is the target's own name (default: the local name in /home/user); one that ends in `/`
        is the directory to put it in. Of a file the mode's execute bits are kept, of what is in a directory modes,
        times and links (which stay links). All belongs to `user`. Returns the path in the sandbox.
        """
        source = Path(local)
        name, is_dir = _look(source)
        target = name if remote is None else remote + name if remote.endswith("/") else remote
        target = _wire.path_of(target)
        if not is_dir:
            self._upload_file(source, target, user, on_progress)
            return target
        self._upload_tree(source, target, user, on_progress)
        return target

    def _upload_file(self, source: Path, target: str, user: str | None, progress: Progress | None) -> None:
        try:
            file = source.open("rb")
        except OSError as error:
            raise InvalidRequestError(
                f"{source} cannot be read: {error.strerror}", path=str(source)
            ) from error
        with file:
            found = os.fstat(file.fileno())
            mode = 0o755 if found.st_mode & 0o100 else None
            # Not st_size as Content-Length: a file that grows meanwhile would break the request.
            self._put(target, file, None, mode=mode, user=user, progress=_of(progress, found.st_size))

    def download(
        self,
        remote: str,
        local: str | os.PathLike[str] | None = None,
        *,
        exclude: Sequence[str] = (),
        allow_protected: bool = False,
        user: str | None = None,
        on_progress: Progress | None = None,
    ) -> Downloaded:
        """Copies a file or directory of the sandbox to this machine.

        `local` is the target's own name (default: the remote name here); an existing directory is the one
        to put it in. A file appears whole or not at all. Of a directory, `exclude` (globs) leaves out, and nothing is
        written outside the target: links that lead out of it are not made. GuestError, after all else has been
        copied, when `user` may not read some of it. Returns the path on this machine.

        What this machine would obey without being asked (shell start-up files, git's hooks and configuration, what
        editors and agents run: `llm4agents.protected`) is left out of a directory and is in the result's
        `.protected`; a file of that kind is a ProtectedPathError. `allow_protected` copies it all the same, but for
        what the server's operator protects.
        """
        source = _wire.path_of(remote)
        info = self.stat(source, user=user)
        target = Path(local) if local is not None else Path()
        if target.is_dir():
            target = target / (posixpath.basename(source.rstrip("/")) or self._sandbox)
        if info.is_dir:
            return self._download_tree(source, target, exclude, allow_protected, user, on_progress)
        self._download_file(source, target, allow_protected, info, user, on_progress)
        return Downloaded(target)

    def _download_file(
        self,
        source: str,
        target: Path,
        allow: bool,
        info: results.FileInfo,
        user: str | None,
        progress: Progress | None,
    ) -> None:
        Guard(target, allow=allow).check()
        # A device or a pipe is written to: put in its place, a file would take /dev/null from the whole host.
        special = target.exists() and not target.is_file()
        part = target if special else target.with_name(f".{target.name}.{os.urandom(4).hex()}.part")
        try:
            out = part.open("wb" if special else "xb")
        except OSError as error:
            raise InvalidRequestError(
                f"{target} cannot be written: {error.strerror}", path=str(target)
            ) from error
        try:
            with out:
                got = 0
                with self.read(source, "stream", user=user) as stream:
                    Guard(target, allow=allow, never=_wire.protected_by(stream.headers)).check()
                    for piece in stream:
                        blocking(out.write, piece)
                        got += len(piece)
                        call(progress, got, info.size)
            if special:
                return
            if info.mode & 0o100:
                part.chmod(part.stat().st_mode | 0o111 & ~_umask())
            try:
                part.replace(target)
            except OSError as error:
                raise InvalidRequestError(f"{target} cannot be written: {error.strerror}") from error
        except OSError as error:
            if isinstance(error, LLM4AgentsError):
                raise
            raise InvalidRequestError(f"{target} cannot be written: {error.strerror}") from error
        finally:
            if not special:
                with contextlib.suppress(FileNotFoundError):
                    part.unlink()


def _of(progress: Progress | None, size: int) -> Progress | None:
    return None if progress is None else lambda sent, _: progress(sent, size)


def _look(source: Path) -> tuple[str, bool]:
    """Name of a local file or directory, and whether it is a directory."""
    if not source.exists():
        raise InvalidRequestError(f"{source} does not exist on this machine", path=str(source))
    return source.resolve().name, source.is_dir()


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
