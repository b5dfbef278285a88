"""Machines that are no sandboxes (builds', readers of volumes): one project has a share of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llm4agents import limits
from llm4agents import recipe as recipes
from llm4agents.engine import parts
from llm4agents.engine.building.buildlog import BuildLog
from llm4agents.engine.building.builds import Builds, _Build
from llm4agents.engine.building.making import Wanted
from llm4agents.engine.parts import Shape
from llm4agents.engine.volume_files import VolumeFiles, _Reader
from llm4agents.errors import CapacityError, QuotaError
from llm4agents.images.cache import Cache
from tests.unit.api.served import serving


def test_a_project_has_so_many_builds_at_once_and_each_counts_for_its_templates(tmp_path: Path) -> None:
    async def pick(*_: Any) -> Any:
        return SimpleNamespace(name="qemu")

    workshop, drivers = SimpleNamespace(cache=Cache(tmp_path)), SimpleNamespace(pick=pick)
    builds = Builds(cast(Any, workshop), cast(Any, None), cast(Any, None), cast(Any, drivers), tmp_path)
    recipe = recipes.parse({"from": {"template": "base"}})
    asked: list[str] = []

    def full(name: str) -> None:
        asked.append(name)
        raise QuotaError("no more templates")

    async def test() -> None:
        builds.room = full
        with pytest.raises(QuotaError):
            await builds._join(Wanted("mine@prj_ours00000000", recipe, "prj_ours00000000"))
        assert asked == ["mine@prj_ours00000000"], "the template that is to be, not its project"
        builds.room = lambda name: None
        for at in range(limits.BUILDS_PER_PROJECT_MAX):
            wanted = Wanted(f"t{at}", recipe, "prj_ours00000000")
            build = _Build(wanted, Shape(wanted.name, 1, 512, "qemu", False), BuildLog())
            builds._running[build.key] = build
        with pytest.raises(CapacityError, match="8 builds under way"):
            await builds._join(Wanted("mine", recipe, "prj_ours00000000"))
        assert builds.names("prj_ours00000000") == {f"t{at}" for at in range(8)}
        assert not builds.names("prj_other")

    asyncio.run(test())


def test_a_project_reads_so_many_volumes_at_once() -> None:
    async def test() -> None:
        node = SimpleNamespace()
        files = VolumeFiles(cast(Any, node), cast(Any, SimpleNamespace()), cast(Any, None))
        for at in range(limits.VOLUME_READERS_PER_PROJECT_MAX):
            files._readers[f"vol_{at}"] = _Reader(f"r{at}", "ours", cast(Any, None), users=1)
        with files._counted("theirs"):
            await files._make_room("theirs")
        with files._counted("ours"), pytest.raises(CapacityError, match="4 volumes of the project"):
            await files._make_room("ours")
        ended: list[str] = []

        async def end(volume: str, reader: Any) -> None:
            ended.append(volume)

        files._end = end  # type: ignore[method-assign,assignment]
        files._readers["vol_2"].users = 0
        with files._counted("ours"):
            await files._make_room("ours")
        assert ended == ["vol_2"] and not files._starting

    asyncio.run(test())


def test_of_a_built_in_template_so_many_shapes_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHAPES_MAX", 2)
    with serving(tmp_path) as served:
        templates = served.context.engine.templates
        keys = templates.cache.templates / "base" / "keys"
        usual = templates.size("base")
        sizes = {
            "usual": usual,
            "a": (1, 256),
            "used": (1, 384),
            "b": (1, 640),
            "c": (2, 256),
            "kept": (2, 384),
        }
        for name in sizes:
            (keys / name).mkdir(parents=True)

        def load(path: Path, _: Any) -> Any:
            size = sizes[path.name]
            at = float(list(sizes).index(path.name))
            return SimpleNamespace(
                created_at=at, vcpus=size[0], memory_mib=size[1], shape=Shape("base", *size, "qemu", False)
            )

        monkeypatch.setattr(parts, "load", load)
        monkeypatch.setattr(templates, "users_of", lambda key: {"sbx_x"} if key == "used" else set())
        kept = SimpleNamespace(name="base", path=keys / "kept")
        served.on_loop(templates._drop_oldest, kept)
        assert {path.name for path in keys.iterdir()} == {"usual", "used", "b", "c", "kept"}
