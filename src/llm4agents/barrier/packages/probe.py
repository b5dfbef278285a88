"""Where an index's files are: asked of the index, with the host's certificates, proxies and logins.

Plain requests of the standard library in threads; redirects are followed and noted, and take no login along.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from typing import IO, Any
from urllib.parse import urljoin

from llm4agents import limits
from llm4agents.barrier.packages.index import Index, Place, directory, links, place, prefix_of

_SIMPLE = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_ABBREVIATED = "application/vnd.npm.install-v1+json"
_ERRORS = (OSError, http.client.HTTPException, ValueError)  # (urllib's and ssl's are OSErrors)


@dataclass(slots=True)
class Probed:
    """Directories that an index and its files are in, and what could not be found out."""

    places: list[Place] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, url: str, index: Place) -> None:
        """The directory of a file of the index; what is not of HTTP is left out."""
        with contextlib.suppress(ValueError):
            where, _ = place(url)
            found = Place(where.scheme, where.host, where.port, prefix_of(index, where))
            if found not in self.places:
                self.places.append(found)


class _Hops(urllib.request.HTTPRedirectHandler):
    def __init__(self) -> None:
        self.urls: list[str] = []

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message[str, str],
        newurl: str,
    ) -> urllib.request.Request | None:
        self.urls.append(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def authorities(paths: list[str]) -> ssl.SSLContext:
    """The system's, and those the tools are told to trust."""
    context = ssl.create_default_context()
    for path in paths:
        with contextlib.suppress(OSError):  # (one of another format: the tool's own affair)
            context.load_verify_locations(path)
    return context


class Prober:
    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context

    @contextlib.contextmanager
    def _open(
        self, url: str, index: Index, *, accept: str = "*/*", method: str = "GET"
    ) -> Iterator[tuple[Any, list[str]]]:
        hops = _Hops()
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=self._context), hops)
        request = urllib.request.Request(  # noqa: S310 (place() lets through HTTP only)
            url, method=method, headers={"Accept": accept, "User-Agent": "llm4agents"}
        )
        where, _ = place(url)
        if index.login is not None and (where.host, where.port) == (index.place.host, index.place.port):
            request.add_unredirected_header("Authorization", index.login.header())
        with opener.open(request, timeout=limits.PACKAGE_REQUEST_TIMEOUT_S) as answer:
            yield answer, hops.urls

    def _read(self, url: str, index: Index, accept: str = "*/*") -> tuple[bytes, str, list[str]]:
        """Body, its URL at the end, and where redirects led."""
        with self._open(url, index, accept=accept) as (answer, hops):
            body = answer.read(limits.PACKAGE_ANSWER_BYTES_MAX + 1)
            if len(body) > limits.PACKAGE_ANSWER_BYTES_MAX:
                raise ValueError("a longer answer than is read")
            return body, answer.geturl(), hops

    def _follow(self, url: str, index: Index, probed: Probed) -> None:
        """A file itself: it is not read, only where it is in the end."""
        try:
            with self._open(url, index) as (_, hops):
                for hop in hops:
                    probed.add(hop, index.place)
        except _ERRORS:
            return  # some stores answer no such question; the file's own host is known already

    def probe(self, index: Index) -> Probed:
        """Blocking; at most a few requests."""
        probed = Probed(
            [Place(index.place.scheme, index.place.host, index.place.port, directory(index.place.path))]
        )
        try:
            getattr(self, f"_{index.kind}")(index, probed)
        except _ERRORS as error:
            probed.problems.append(f"{index.tool}: {index.place.host}: {_said(error)}")
        return probed

    def _simple(self, index: Index, probed: Probed) -> None:
        last: Exception | None = None
        for project in index.probes:
            url = index.place.url() + project
            try:
                body, at, hops = self._read(url, index, _SIMPLE)
            except urllib.error.HTTPError as error:
                last = error
                if error.code in (401, 403):
                    break
                continue
            self._files(index, probed, body, at, hops)
            return
        if last is not None:
            raise last

    def _links(self, index: Index, probed: Probed) -> None:
        body, at, hops = self._read(index.place.url(), index)
        self._files(index, probed, body, at, hops)

    def _files(self, index: Index, probed: Probed, body: bytes, at: str, hops: list[str]) -> None:
        for hop in hops:
            probed.add(hop, index.place)
        try:
            found = [str(one["url"]) for one in json.loads(body)["files"]]
        except (ValueError, KeyError, TypeError):
            text = body.decode(errors="replace")
            found = [link for link in links(text) if re.search(r"\.(whl|gz|zip|bz2)(#|$)", link)]
        urls = [urljoin(at, link).partition("#")[0] for link in found[-200:]]
        for url in urls:
            probed.add(url, index.place)
        if urls:
            self._follow(urls[-1], index, probed)

    def _npm(self, index: Index, probed: Probed) -> None:
        for project in index.probes:
            try:
                body, at, hops = self._read(
                    index.place.url() + project, index, f"{_ABBREVIATED}, application/json"
                )
            except urllib.error.HTTPError:
                if project == index.probes[-1]:
                    raise
                continue
            told = json.loads(body)
            if isinstance(told, dict) and "versions" in told:
                told = next(reversed(told["versions"].values()), {})
            tarball = str((told.get("dist") or {}).get("tarball") or "") if isinstance(told, dict) else ""
            for url in [*hops, *([urljoin(at, tarball)] if tarball else ())]:
                probed.add(url, index.place)
            if tarball:
                self._follow(urljoin(at, tarball), index, probed)
            return

    def _sparse(self, index: Index, probed: Probed) -> None:
        body, at, hops = self._read(index.place.url() + "config.json", index)
        for hop in hops:
            probed.add(hop, index.place)
        told = json.loads(body)
        template = str(told["dl"])
        url = urljoin(at, template.partition("{")[0])
        probed.add(url if "{" in template else url.rstrip("/") + "/x", index.place)
        if index.name == "":
            self._follow(_crate_url(template, at), index, probed)

    def _git(self, index: Index, probed: Probed) -> None:
        probed.places = [index.place]
        # Its config.json is in the repository; cargo's client would have to be asked to clone it.

    def _go(self, index: Index, probed: Probed) -> None:
        for probe in index.probes:
            with (
                contextlib.suppress(urllib.error.HTTPError),
                self._open(index.place.url() + probe, index) as (_, hops),
            ):
                for hop in hops:
                    probed.add(hop, index.place)

    def _sumdb(self, index: Index, probed: Probed) -> None:
        """Nothing to ask: clients go there only when no proxy serves it."""

    def _apt(self, index: Index, probed: Probed) -> None:
        for at, probe in enumerate(index.probes):
            try:
                with self._open(index.place.url() + probe, index) as (_, hops):
                    for hop in hops:
                        probed.add(hop, index.place)
            except urllib.error.HTTPError:
                if at == 0:
                    raise


def _crate_url(template: str, at: str) -> str:
    """Of the small crate that cargo was asked for."""
    crate, version = "cfg-if", "1.0.0"
    if "{" not in template:
        return f"{urljoin(at, template).rstrip('/')}/{crate}/{version}/download"
    for marker, text in (
        ("{crate}", crate),
        ("{version}", version),
        ("{prefix}", "cf/g-"),
        ("{lowerprefix}", "cf/g-"),
    ):
        template = template.replace(marker, text)
    return urljoin(at, template)


def _said(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    if isinstance(error, urllib.error.URLError):
        reason = error.reason
        return str(getattr(reason, "strerror", None) or reason)
    return str(error) or type(error).__name__
