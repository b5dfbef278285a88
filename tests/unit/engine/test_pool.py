"""Which machine a pool makes next, and which it must not hand out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from llm4agents.engine import parts
from llm4agents.engine.pool import Pooled, Shelf, missing, stale, token_of

BASE, PYTHON = ("base", 1, 1024), ("python", 1, 1024)
TOKEN = ("/t", 1, 1)


def pooled(token: tuple[str, int, int] = TOKEN, *, dead: bool = False) -> Pooled:
    return Pooled("sbx_x", BASE, token, cast(Any, None), cast(Any, None), 0.0, 0.0, dead)


def test_the_emptiest_shelf_is_filled_first() -> None:
    shelves = {BASE: Shelf(4, ready=[pooled()]), PYTHON: Shelf(2, ready=[pooled()])}
    assert missing(shelves, 0) == BASE
    shelves[PYTHON].ready.clear()
    assert missing(shelves, 0) == PYTHON
    shelves[PYTHON].not_before_s = 10.0
    assert missing(shelves, 0) == BASE, "one that failed waits"
    assert missing(shelves, 10) == PYTHON
    assert missing({BASE: Shelf(0), PYTHON: Shelf(1, ready=[pooled()])}, 0) is None


def test_another_build_the_dead_and_the_surplus_are_handed_to_nobody() -> None:
    old, dead, good, more = pooled(("/t", 2, 1)), pooled(dead=True), pooled(), pooled()
    shelf = Shelf(1, ready=[old, dead, good, more])
    assert stale(shelf, TOKEN) == [old, dead, more]
    assert stale(shelf, None) == [old, dead, good, more], "its template is gone"
    assert stale(Shelf(4, ready=[good, more]), TOKEN) == []


def test_a_template_built_again_in_the_same_place_is_another(tmp_path: Path) -> None:
    variant = cast(Any, type("Variant", (), {"path": tmp_path}))
    assert token_of(variant) is None
    (tmp_path / parts.TEMPLATE).write_text("{}")
    first = token_of(variant)
    (tmp_path / "new").write_text("{}")
    (tmp_path / "new").rename(tmp_path / parts.TEMPLATE)
    assert first is not None and token_of(variant) not in (None, first)
