"""Profile `packages`: what this host's own package tools use, as hosts that a guest may read from.

Asks the tools (tools.py) and the indexes (probe.py); nothing here names a host. Passwords and tokens of index
addresses come back apart from everything else, in `Discovered.secrets`: they are put into requests on the host, and
are in no guest, no cache and no answer. What the policy makes of it is policy.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llm4agents import limits
from llm4agents.barrier.network import Binding, PackageHost, Packages, Rewrite
from llm4agents.barrier.packages import tools
from llm4agents.barrier.packages.index import THIS_HOST, Found, Index, Place, directory, pattern
from llm4agents.barrier.packages.probe import Probed, Prober, authorities
from llm4agents.barrier.rules import path_text

Progress = Callable[[str], None]
_LOOPBACK = "127.0.0.1"
# What clients of an index need POST for, below its path: npm's audit asks about versions, git asks for objects.
_POSTS = {
    "npm": (
        "-/npm/v1/security/advisories/bulk",
        "-/npm/v1/security/audits",
        "-/npm/v1/security/audits/quick",
    ),
    "git": ("git-upload-pack",),
}


@dataclass(frozen=True, slots=True)
class Discovered:
    """`secrets`: by the names that `packages.credentials` use; never to be written anywhere."""

    packages: Packages
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


class Discovery:
    """Asks once an hour. `env`: what the tools see (the server's environment); `cache`: where answers of indexes are
    kept between servers (packages.json, 0600, without secrets)."""

    def __init__(self, cache: Path, env: Mapping[str, str] | None = None) -> None:
        self._file = cache / "packages.json"
        self._env = dict(os.environ if env is None else env)
        self._lock = asyncio.Lock()
        self._last: tuple[float, Discovered] | None = None

    async def get(self, progress: Progress | None = None, *, fresh: bool = False) -> Discovered:
        """What there is; a tool that is missing or fails is said in `packages.skipped`, and no error."""
        async with self._lock:
            if (
                self._last is not None
                and not fresh
                and time.monotonic() - self._last[0] < limits.PACKAGES_KEPT_S
            ):
                return self._last[1]
            found = await self._ask(progress or (lambda _: None), fresh)
            self._last = (time.monotonic(), found)
            return found

    async def _ask(self, progress: Progress, fresh: bool) -> Discovered:
        progress("asking apt, pip, npm, cargo and go which registries they use")
        with tempfile.TemporaryDirectory(prefix="llm4agents-packages-") as scratch:
            names = list(tools.TOOLS)
            answers = await asyncio.gather(*(tools.ask(name, self._env, Path(scratch)) for name in names))
        indexes = [index for found in answers for index in found.indexes]
        progress(f"asking {len(indexes)} indexes where their files are")
        probed = await self._probe(indexes, fresh)
        return assemble(dict(zip(names, answers, strict=True)), indexes, probed)

    async def _probe(self, indexes: Sequence[Index], fresh: bool) -> list[Probed]:
        kept = {} if fresh else self._load()
        context = await asyncio.to_thread(authorities, tools.extra_authorities(self._env))
        prober = Prober(context)

        async def one(index: Index) -> Probed:
            key = hashlib.sha256(json.dumps(index.key()).encode()).hexdigest()
            if key in kept:
                return kept[key]
            probed = await asyncio.to_thread(prober.probe, index)
            if not probed.problems:
                kept[key] = probed
                new.append(key)
            return probed

        new: list[str] = []
        found = await asyncio.gather(*map(one, indexes))
        if new:
            self._save(kept, new)
        return found

    def _load(self) -> dict[str, Probed]:
        try:
            raw = json.loads(self._file.read_text())
            now = time.time()
            return {
                key: Probed([Place(*one) for one in entry["places"]])
                for key, entry in raw.items()
                if 0 <= now - entry["at"] < limits.PACKAGES_KEPT_S
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _save(self, kept: Mapping[str, Probed], new: Sequence[str]) -> None:
        try:
            raw: dict[str, Any] = json.loads(self._file.read_text())
        except (OSError, ValueError):
            raw = {}
        now = time.time()
        raw = {key: entry for key, entry in raw.items() if key in kept and key not in new}
        for key in new:
            places = [[p.scheme, p.host, p.port, p.path] for p in kept[key].places]
            raw[key] = {"at": now, "places": places}
        with contextlib.suppress(OSError):  # a cache: the next server asks again
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part = self._file.with_name(f".packages.{os.getpid()}")
            part.unlink(missing_ok=True)
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(raw, file)
            part.replace(self._file)


def assemble(answers: Mapping[str, Found], indexes: Sequence[Index], probed: Sequence[Probed]) -> Discovered:
    """What tools and indexes said, put together. Pure."""
    hosts: dict[tuple[str, int, str, str], PackageHost] = {}
    secrets: dict[str, str] = {}
    credentials: list[Binding] = []
    skipped: dict[str, str] = {}
    environment: dict[str, str] = {}
    files: dict[str, str] = {}
    rewrites: dict[str, Rewrite] = {}
    for tool, found in answers.items():
        environment |= found.environment
        files |= found.files
        for text in found.skipped:
            _note(skipped, tool, text)
    for index, seen in zip(indexes, probed, strict=True):
        for problem in seen.problems:
            _note(skipped, index.tool, f"{problem}: where its files are is not known")
        own = Place(index.place.scheme, index.place.host, index.place.port, directory(index.place.path))
        for where in dict.fromkeys([own, *seen.places]):
            if where.loopback:
                rewrites[THIS_HOST] = Rewrite.parse(f"{THIS_HOST} -> {_LOOPBACK}")
            _add(hosts, index, where)
            if index.login is not None and (where.host, where.port) == (own.host, own.port):
                _bind(credentials, secrets, index, where)
    return Discovered(
        Packages(
            tuple(hosts.values()),
            environment,
            files,
            tuple(credentials),
            skipped,
            tuple(rewrites.values()),
        ),
        secrets,
    )


def _note(skipped: dict[str, str], tool: str, text: str) -> None:
    text = text.removeprefix(f"{tool}: ")
    skipped[tool] = f"{skipped[tool]}; {text}" if tool in skipped else text


def _contacted(where: Place) -> str:
    return _LOOPBACK if where.loopback else where.host


def _add(hosts: dict[tuple[str, int, str, str], PackageHost], index: Index, where: Place) -> None:
    key = (_contacted(where), where.port, where.scheme, index.tool)
    path = pattern(where.path if where.path.endswith("/") else where.path + "/")
    base = index.place.path if index.place.path.endswith("/") else index.place.path + "/"
    posts = (
        tuple(base + post for post in _POSTS.get(index.kind, ())) if where.host == index.place.host else ()
    )
    known = hosts.get(key)
    if known is None:
        hosts[key] = PackageHost(
            key[0], key[1], where.scheme, index.tool, () if path is None else (path,), posts
        )
        return
    # (no paths at all is every path)
    paths = () if path is None or not known.paths else tuple(dict.fromkeys((*known.paths, path)))
    hosts[key] = replace(known, paths=paths, post=tuple(dict.fromkeys((*known.post, *posts))))


def _bind(credentials: list[Binding], secrets: dict[str, str], index: Index, where: Place) -> None:
    login = index.login
    assert login is not None
    host = _contacted(where)
    path = pattern(where.path)
    if any(str(b.host) == host and b.port == where.port and b.path == path for b in credentials):
        return
    value = login.value
    name = next(
        name
        for name in (f"index:{host}", *(f"index:{host}:{n}" for n in range(2, 1_000)))
        if secrets.get(name, value) == value
    )
    form: dict[str, Any] = {"as": "header", "header": "Authorization"}
    if login.user:
        form = {"as": "basic", "username": login.user}
    elif login.scheme:
        form["prefix"] = f"{login.scheme} "
    credentials.append(
        Binding.from_json(
            {
                "secret": name,
                "host": f"[{host}]" if ":" in host else host,
                "port": where.port,
                "scheme": where.scheme,
                "path": None if path is None else path_text(path),
                **form,
            },
            own=True,
        )
    )
    secrets[name] = value


async def discover(
    cache: Path, progress: Progress | None = None, env: Mapping[str, str] | None = None
) -> Discovered:
    """Once, for whoever keeps no Discovery."""
    return await Discovery(cache, env).get(progress)
