"""What is told of a step that failed."""

from __future__ import annotations

import pytest

from llm4agents.engine.building.starting import telling


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("", ""),
        ("fetching\nE: Unable to locate package nope\n\n", "E: Unable to locate package nope"),
        (
            "npm error code E404\nnpm error 404 Not Found - GET nope\nnpm error 404\nnpm error 404 Note that you can\n",
            "npm error 404 Not Found - GET nope",
        ),
        ("npm error code EACCES\n", "npm error code EACCES"),
        ("npm error code E1\nthe script of a package: boom\n", "the script of a package: boom"),
    ],
)
def test_the_line_that_says_most(said: str, told: str) -> None:
    assert telling(said) == told
