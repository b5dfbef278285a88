"""A client of registries (the distribution API, version 2): documents and blobs, each checked against its digest.

Not for what is in them. Credentials go to the registry and to the token server it names; what a redirect leads to
elsewhere is asked without any. How connections are made is `dialing`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

import httpcore

from llm4agents import __version__, limits
from llm4agents.errors import (
    ForbiddenError,
    HostSetupError,
    InvalidRequestError,
    LLM4AgentsError,
    NotFoundError,
)
from llm4agents.images.oci.dialing import Pools, RefusedError, Url, tls
from llm4agents.images.oci.image import Auth, Registries
from llm4agents.images.oci.manifest import ACCEPT, Descriptor, refuse
from llm4agents.images.oci.reference import Remote
from llm4agents.images.process import room

_CHALLENGE = re.compile(r'([a-zA-Z_-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_BUSY = (429, 500, 502, 503, 504)
_MOVED = (301, 302, 303, 307, 308)
_SAID_BYTES_MAX = 65_536
_PIECE_BYTES = 1_048_576
_TOKEN_S = 60.0
"""How long a token is good when its server does not say: what the specification has for that case."""
_BROKEN = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError)


@dataclass(slots=True)
class _Answer:
    """`body` to be read, or left unread, while the connection is held."""

    status: int
    headers: dict[str, str]
    body: AsyncIterator[bytes]


class _Again(Exception):
    """That try came to nothing and another may not; `after_s` is what the registry asks for."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


class Registry:
    """One repository of one registry, for as long as it is entered."""

    def __init__(
        self,
        remote: Remote,
        registries: Registries,
        auth: Auth | None = None,
        certificates: bytes | None = None,
    ) -> None:
        """`certificates` (PEM): whose word is taken beside the authorities this host trusts."""
        self._remote = remote
        self._auth = auth
        self._base = Url.parse(f"{'http' if remote.plain else 'https'}://{remote.endpoint}/")
        known = {f"{self._base.host}:{self._base.port}"} if remote.known else set()
        self._pools = Pools(tls(certificates), known, registries.refuse)
        self._header: str | None = None
        self._until = float("inf")
        self._authorising = asyncio.Lock()
        if auth is not None and auth.token:
            self._header = f"Bearer {auth.token}"

    async def __aenter__(self) -> Registry:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pools.close()

    async def document(self, which: str) -> tuple[bytes, str, str]:
        """A manifest or index by tag or digest: its bytes, what the registry calls it, its digest.

        Raises NotFoundError, InvalidRequestError, ForbiddenError, HostSetupError (it cannot be reached).
        """

        async def once() -> tuple[bytes, str, str]:
            url = self._url(f"manifests/{which}")
            async with self._get(url, {"accept": ACCEPT}) as answer:
                body = await _whole(answer.body, limits.OCI_DOCUMENT_BYTES_MAX, "manifest")
                return body, answer.headers.get("content-type", "").partition(";")[0].strip(), _digest(body)

        body, kind, digest = await self._tried(once)
        if which.startswith("sha256:") and which != digest:
            refuse(f"what the registry has under {which} is {digest}", "somebody has changed it on the way")
        return body, kind, digest

    async def small(self, blob: Descriptor) -> bytes:
        """A blob that is a document, in memory."""

        async def once() -> bytes:
            async with self._get(self._url(f"blobs/{blob.digest}"), {}) as answer:
                return await _whole(answer.body, blob.size, "configuration")

        body: bytes = await self._tried(once)
        if _digest(body) != blob.digest:
            refuse(f"what the registry has under {blob.digest} is {_digest(body)}")
        return body

    async def fetch(self, blob: Descriptor, path: Path, got: Callable[[int], None] = lambda n: None) -> None:
        """Write a blob to the new file `path`; it has the size and the digest it is to have, or this raises.

        A connection that breaks off is taken up where it was. `got` hears how many bytes more are there.
        """
        with path.open("xb", buffering=0) as file:
            state = _Partial(file, blob, got)
            await self._tried(lambda: self._more(state), progress=lambda: state.size)
        if state.hash.hexdigest() != blob.hex:
            refuse(f"what the registry has under {blob.digest} is sha256:{state.hash.hexdigest()}")

    async def _more(self, state: _Partial) -> None:
        asked = {"range": f"bytes={state.size}-"} if state.size else {}
        async with self._get(self._url(f"blobs/{state.blob.digest}"), asked) as answer:
            begins = re.match(r"bytes (\d+)-", answer.headers.get("content-range", ""))
            if state.size and not (answer.status == 206 and begins and int(begins[1]) == state.size):
                state.restart()
            pending = bytearray()
            try:
                async for piece in answer.body:
                    pending += piece
                    if state.size + len(pending) > state.blob.size:
                        refuse(
                            f"{state.blob.digest} is longer than the {state.blob.size:,} bytes it is to have"
                        )
                    if len(pending) >= _PIECE_BYTES:
                        await asyncio.to_thread(state.add, bytes(pending))
                        pending.clear()
            except _BROKEN:
                await asyncio.to_thread(state.add, bytes(pending))
                raise
            await asyncio.to_thread(state.add, bytes(pending))
        if state.size < state.blob.size:
            raise _Again(f"it ended after {state.size:,} of {state.blob.size:,} bytes")

    def _url(self, what: str) -> Url:
        return self._base.join(f"/v2/{self._remote.repository}/{what}")

    # -- one request, with what it takes

    async def _tried(self, once: Callable[[], Any], progress: Callable[[], int] = lambda: 0) -> Any:
        """What `once` comes to; again after what may pass, as often as it gets further and a few times more."""
        tries, before = 0, progress()
        while True:
            try:
                return await once()
            except RefusedError as error:
                raise InvalidRequestError(
                    f"{self._remote.host} is not asked: {error}",
                    hint="the operator of this node can name it in LLM4AGENTS_REGISTRIES",
                ) from None
            except (*_BROKEN, _Again) as error:
                tries = 0 if progress() > before else tries + 1
                before = progress()
                if tries >= limits.OCI_TRIES or _pointless(error):
                    raise HostSetupError(
                        f"the registry {self._remote.host} could not be used: {error or type(error).__name__}",
                        hint="is its name right, does it speak TLS, is there a proxy (HTTPS_PROXY)?",
                    ) from error
                asked = error.after_s if isinstance(error, _Again) else 0.0
                await asyncio.sleep(min(max(asked, 0.2 * 2**tries), limits.OCI_WAIT_S_MAX))

    @contextlib.asynccontextmanager
    async def _get(self, url: Url, headers: dict[str, str]) -> AsyncIterator[_Answer]:
        """The answer of 200 or 206, authorised if it must be, wherever redirects lead."""
        for fresh in (False, True):
            if time.monotonic() > self._until:
                self._header = None
            sent = self._header
            async with self._followed(url, headers) as answer:
                if answer.status == 401 and not fresh:
                    challenge = answer.headers.get("www-authenticate", "")
                elif answer.status in (200, 206):
                    if answer.headers.get("content-encoding", "identity") != "identity":
                        refuse_answer("compresses what was asked for as it is")
                    yield answer
                    return
                else:
                    await self._failed(answer)
            async with self._authorising:
                if self._header == sent:
                    await self._authorise(challenge)

    @contextlib.asynccontextmanager
    async def _followed(self, url: Url, headers: dict[str, str]) -> AsyncIterator[_Answer]:
        """The answer that a chain of redirects ends in."""
        for _ in range(limits.OCI_REDIRECTS_MAX + 1):
            wanted = {"user-agent": f"llm4agents/{__version__}", "accept-encoding": "identity", **headers}
            if self._header is not None and url.origin == self._base.origin:
                wanted["authorization"] = self._header
            async with self._pools.get(url, wanted) as (status, found, body):
                if status not in _MOVED:
                    yield _Answer(status, found, body)
                    return
                there = Url.parse(found.get("location", ""), url)
            if url.scheme == "https" and there.scheme != "https":
                refuse_answer("redirects to where there is no TLS", str(there))
            url = there
        refuse_answer(f"redirects more than {limits.OCI_REDIRECTS_MAX} times")

    async def _failed(self, answer: _Answer) -> NoReturn:
        said = await _said(answer)
        if answer.status in _BUSY:
            raise _Again(f"it answers {answer.status}: {said}", _seconds(answer.headers.get("retry-after")))
        words = (
            f"the registry {self._remote.host} answers {answer.status} for {self._remote.repository}: {said}"
        )
        if answer.status in (401, 403):
            hint = (
                "are the credentials right, and may they pull it?"
                if self._auth
                else "does it want credentials (auth)?"
            )
            raise ForbiddenError(words, hint=hint)
        if answer.status == 416:
            refuse("a blob of it is shorter in the registry than it is to be")
        if answer.status == 404:
            raise NotFoundError(f"there is no {self._remote}: {said}", hint="is its name and tag right?")
        raise HostSetupError(words)

    # -- who we are

    async def _authorise(self, challenge: str) -> None:
        """What the registry asks for in its `WWW-Authenticate`."""
        scheme, _, rest = challenge.strip().partition(" ")
        if scheme.lower() == "basic":
            if self._auth is None or self._auth.token:
                raise ForbiddenError(
                    f"the registry {self._remote.host} wants a name and a password", hint="give them as auth"
                )
            self._header, self._until = _basic(self._auth), float("inf")
            return
        if scheme.lower() != "bearer":
            raise ForbiddenError(
                f"the registry {self._remote.host} asks for credentials of a kind that is not known here "
                f"({scheme[:40] or 'none named'})"
            )
        fields = {m[1].lower(): m[2] if m[2] is not None else m[3] for m in _CHALLENGE.finditer(rest)}
        await self._token(fields)

    async def _token(self, fields: dict[str, str]) -> None:
        realm = Url.parse(fields.get("realm", ""))
        if realm.scheme != "https" and not self._remote.plain:
            refuse_answer("sends us to a token server without TLS", str(realm))
        query = {"scope": fields.get("scope") or f"repository:{self._remote.repository}:pull"}
        if "service" in fields:
            query["service"] = fields["service"]
        headers = {"accept": "application/json", "user-agent": f"llm4agents/{__version__}"}
        if self._auth is not None and not self._auth.token:
            headers["authorization"] = _basic(self._auth)
        async with self._pools.get(realm.with_query(query), headers) as (status, found, body):
            answer = _Answer(status, found, body)
            if status != 200:
                if status in (400, 401, 403):
                    raise ForbiddenError(
                        f"the token server of {self._remote.host} answers {status}: {await _said(answer)}",
                        hint="are the credentials right, and may they pull it?",
                    )
                raise _Again(f"its token server answers {status}")
            data = await _whole(body, _SAID_BYTES_MAX, "token")
        try:
            said = json.loads(data)
            token = said.get("token") or said["access_token"]
            seconds = float(said.get("expires_in") or _TOKEN_S)
        except (ValueError, KeyError, TypeError, AttributeError):
            refuse_answer("has a token server that gives no token")
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            refuse_answer("has a token server that gives no token")
        self._header, self._until = f"Bearer {token}", time.monotonic() + max(5.0, seconds - 10.0)


class _Partial:
    """A blob as far as it is there."""

    def __init__(self, file: IO[bytes], blob: Descriptor, got: Callable[[int], None]) -> None:
        self.blob, self.size, self.hash = blob, 0, hashlib.sha256()
        self._file, self._got = file, got

    def add(self, piece: bytes) -> None:
        with room(Path(self._file.name).parent, self.blob.size):
            rest = memoryview(piece)
            while rest:
                rest = rest[self._file.write(rest) :]
        self.hash.update(piece)
        self.size += len(piece)
        self._got(len(piece))

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._got(-self.size)
        self.size, self.hash = 0, hashlib.sha256()


def refuse_answer(why: str, detail: str = "") -> NoReturn:
    raise HostSetupError(f"the registry {why}" + (f" ({detail[:200]})" if detail else ""))


def _pointless(error: Exception) -> bool:
    """Whether another try would end the same way: no such name, nobody there, a certificate that is not believed."""
    words = str(error)
    return isinstance(error, httpcore.ConnectError) and any(
        word in words
        for word in ("CERTIFICATE_VERIFY", "WRONG_VERSION", "RECORD_LAYER", "attempts failed", "resolved")
    )


def _basic(auth: Auth) -> str:
    return "Basic " + base64.b64encode(f"{auth.username}:{auth.password}".encode()).decode()


def _digest(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def _seconds(text: str | None) -> float:
    return float(text) if text and text.isdecimal() and len(text) < 8 else 0.0


async def _whole(body: AsyncIterator[bytes], most: int, what: str) -> bytes:
    found = bytearray()
    async for piece in body:
        found += piece
        if len(found) > most:
            refuse(f"its {what} is longer than {most:,} bytes")
    return bytes(found)


async def _said(answer: _Answer) -> str:
    """The reason a registry gives, in one line."""
    try:
        text = await _whole(answer.body, _SAID_BYTES_MAX, "error")
    except (*_BROKEN, LLM4AgentsError):
        return "no reason"
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError, AttributeError):
        first = json.loads(text)["errors"][0]
        text = f"{first.get('code')}: {first.get('message')}".encode()
    line = " ".join(text.decode("utf-8", "replace").split())
    return re.sub(r"[^\x20-\x7e]", "?", line)[:200] or "no reason"
