"""The disks kept after the steps of builds, by the digest of all that went in. Bounded, and fairly; blocks little.

`CACHE/steps/KEY/` holds `upper.raw` (a whole disk, mostly holes) and `step.json`. It is there whole or not at all.
Not here: doing a step (`guest`), what a key is made of (`recipe`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llm4agents import limits
from llm4agents.fair import Held, surplus
from llm4agents.images.cache import Cache, tree_bytes
from llm4agents.images.process import in_thread

FORMAT: Final = 1
UPPER, ABOUT = "upper.raw", "step.json"
KEPT_S: Final = 14 * 86_400
"""How long a disk that no build has used is not pruned."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The disk after a step."""

    key: str
    upper: Path


class StepCache:
    """Those of one cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache, self._root = cache, cache.root / "steps"

    def find(self, key: str) -> Kept | None:
        """The disk of that key; it counts as used now."""
        about = self._root / key / ABOUT
        try:
            if json.loads(about.read_text())["format"] != FORMAT or not (self._root / key / UPPER).is_file():
                return None
            os.utime(about)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Kept(key, self._root / key / UPPER)

    def last(self, keys: Sequence[str]) -> tuple[int, Kept] | None:
        """Of the keys of a recipe's steps, in order, the last whose disk is there, and its place."""
        for at in range(len(keys) - 1, -1, -1):
            if (found := self.find(keys[at])) is not None:
                return at, found
        return None

    async def keep(
        self,
        key: str,
        rootfs: str,
        words: str,
        fill: Callable[[Path], Awaitable[None]],
        *,
        project: str,
        anew: bool,
    ) -> Kept:
        """Keep what `fill` writes to the path it is given. `rootfs`: the digest of what lies under it. `anew`: in the
        place of one that is there. Raises CapacityError; then there is nothing of it."""
        dest = self._root / key
        async with self._cache.workdir() as tmp:
            made = tmp / "step"
            made.mkdir(mode=0o700)
            await fill(made / UPPER)
            (made / UPPER).chmod(0o400)
            about = {"format": FORMAT, "key": key, "rootfs": rootfs, "words": words, "made_at": time.time()}
            (made / ABOUT).write_text(json.dumps({**about, "project": project}, indent=1))

            def publish() -> None:
                if anew and dest.exists():
                    dest.rename(tmp / "old")
                self._cache.publish(made, dest)

            await in_thread(lambda _: publish())
        return Kept(key, dest / UPPER)

    def evict(
        self,
        bytes_max: int = limits.STEPS_CACHE_BYTES_MAX,
        *,
        unused_s: float | None = None,
        but: Container[str] = (),
    ) -> list[str]:
        """Remove disks until the rest fits, each time the least recently used of the project that has most, and
        (`unused_s`) all that were not used for so long; their paths. Never those of the keys `but`."""
        held, gone, now = list[Held[Path]](), list[Path](), time.time()
        for path in self._root.iterdir() if self._root.is_dir() else []:
            used, project = 0.0, ""  # of one that is not in order, or older than that it is written down
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                used = (path / ABOUT).stat().st_mtime
                project = str(json.loads((path / ABOUT).read_text()).get("project") or "")
            if unused_s is not None and now - used >= unused_s and path.name not in but:
                gone.append(path)
            else:
                held.append(Held(project, used, path, tree_bytes(path), fixed=path.name in but))
        gone += surplus(held, bytes_max)
        for path in gone:
            shutil.rmtree(path, ignore_errors=True)
        return [str(path) for path in gone]
