"""What the server's settings say of networks, as `doctor` reads them: without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llm4agents import config
from llm4agents.engine import network
from llm4agents.errors import HostSetupError, InvalidRequestError


def _checked(tmp_path: Path, **env: str) -> dict[str, tuple[bool, str, str]]:
    settings = config.load({"HOME": str(tmp_path), "LLM4AGENTS_BARRIER": "off", **env})
    return {name: (well, found, hint) for name, well, found, hint in asyncio.run(network.checks(settings))}


@pytest.mark.parametrize(
    "text, words, hint",
    [
        ("pubic", "'pubic' is no profile", "none, packages, public"),
        ('["alow example.com"]', "rule 1 'alow example.com'", "allow|deny"),
        ("[allow", "no JSON", "rules or an object as JSON"),
    ],
)
def test_a_default_network_that_is_none_is_told_with_what_is_expected(
    tmp_path: Path, text: str, words: str, hint: str
) -> None:
    well, found, told = _checked(tmp_path, LLM4AGENTS_NETWORK=text)["network default"]
    assert not well and "LLM4AGENTS_NETWORK" in found and words in found and hint in told
    with pytest.raises(InvalidRequestError) as raised:
        network.read_default(text)
    assert hint in str(raised.value.hint)


def test_a_floor_that_cannot_be_read_is_told_with_what_follows(tmp_path: Path) -> None:
    floor = tmp_path / "floor"
    for words in ("cannot be read", "line 1 'alow x'"):
        well, found, _ = _checked(tmp_path, LLM4AGENTS_NETWORK_FLOOR=str(floor))["network floor"]
        assert not well and words in found
        with pytest.raises(HostSetupError, match="no sandbox is made"):
            network.read_floor(floor)
        floor.write_text("alow x\n")
    assert _checked(tmp_path)["network default"][:2] == (True, "none")
