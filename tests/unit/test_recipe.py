"""What a recipe may say, what is refused and in which words, which changes make which steps anew."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm4agents import limits, recipe
from llm4agents.cli.templates import EXAMPLE
from llm4agents.engine.building import commands
from llm4agents.errors import InvalidRequestError
from llm4agents.recipe import State

BASE = {"from": {"template": "base"}}
DIGEST = "ab" * 32


def with_step(**step: Any) -> dict[str, Any]:
    return {**BASE, "steps": [{"run": "true"}, step]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "the recipe is list"),
        ({}, "does not say what it begins with"),
        ({"form": {}}, "'form' that means nothing here (did you mean 'from'?)"),
        ({**BASE, "memory": 1}, "did you mean 'memory_mib'?"),
        ({"from": {"templet": "base"}}, "did you mean 'template'?"),
        ({"from": {}}, "from says 0 things"),
        ({"from": {"template": "base", "image": "x"}}, "exactly one"),
        ({"from": {"template": "../base"}}, "cannot be a template's name"),
        ({"from": {"debian": ["-o=x"]}}, "from.debian[0] = '-o=x' is no Debian package"),
        (with_step(comand="x"), "steps[1] has a key 'comand' that means nothing here (did you mean 'run'?)"),
        (with_step(run="x", user="root"), "the user of one command is its `as`"),
        (with_step(run="x", env={}), "steps[1] has several"),
        (with_step(run=""), "steps[1].run: a command is 1 to"),
        (with_step(run=["a", 1]), "steps[1].run is list"),
        (with_step(run="x\0"), "without NUL"),
        (with_step(run="x", timeout_s=0), "steps[1].timeout_s = 0: more than 0"),
        (with_step(run="x", timeout_s=True), "more than 0"),
        (with_step(run="x", **{"as": "a b"}), "is no user"),
        (with_step(copy="x", to="/y"), "names the digest"),
        (with_step(copy="x", sha256=DIGEST), "says where to"),
        (with_step(copy="x", to="../y", sha256=DIGEST), "`..` is not possible"),
        (with_step(copy="x", to="~/y", sha256=DIGEST), "~ is not known here"),
        (with_step(copy="x", to="y", sha256="AB"), "64 hex digits"),
        (with_step(env={"A-B": "x"}), "no variable's name"),
        (with_step(env={"A": 1}), "steps[1].env.A is text"),
        (with_step(env={"A": "x" * limits.ENV_BYTES_MAX}), "bytes"),
        (with_step(user=""), "is no user"),
        (with_step(apt=[]), "names 1 to"),
        (with_step(apt=["a;b"]), "is no Debian package"),
        (with_step(pip=[1]), "steps[1].pip[0] is int"),
        ({**BASE, "start": {"run": True}}, "does not begin with an image"),
        ({**BASE, "start": {"run": "x", "ready": 0}}, "a TCP port, 1 to 65535"),
        (
            {**BASE, "start": {"run": "x", "ready": {"port": 1, "file": "/x"}}},
            "exactly one of port, file, run",
        ),
        ({**BASE, "start": {"run": "x", "ready": {"file": "x"}}}, "no absolute path"),
        ({**BASE, "start": {}}, "start has no command"),
        ({**BASE, "steps": [{"run": "x"}] * (limits.STEPS_MAX + 1)}, "are the most"),
        ({**BASE, "steps": [{"run": "x" * 40_000}] * 30}, "larger than"),
        ({**BASE, "network": 1}, "network is int"),
        ({**BASE, "vcpus": "2"}, "vcpus is str"),
    ],
)
def test_what_is_wrong_is_said_where_it_is(body: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        recipe.parse(body)
    assert words in str(refused.value), str(refused.value)


def test_it_is_written_as_it_is_read() -> None:
    body = {
        "from": {"image": "host.example/app:1"},
        "steps": [
            {"env": {"A": "b"}},
            {"workdir": "/app/"},
            {"user": 1000},
            {"run": "make", "as": "root", "timeout_s": 5},
            {"run": ["make", "it"]},
            {"copy": "x", "to": "y", "sha256": DIGEST},
            {"apt": "one"},
            {"pip": ["a>=1", "-r", "b.txt"]},
        ],
        "start": {"run": True, "ready": 80, "timeout_s": 5},
        "warm": ["curl -s localhost", ["a", "b"]],
        "network": ["allow a.example"],
        "memory_mib": 512,
    }
    read = recipe.parse(body)
    assert recipe.parse(json.loads(json.dumps(read.to_json()))) == read
    assert read.start is not None and read.start.ready == recipe.Ready("port", 80)
    assert [step.words() for step in read.steps][:4] == ["env A", "workdir /app", "user 1000", "run make"]
    for said, kind in (("/run/up", "file"), ("test -e /run/up", "run"), ("/bin/check it", "run")):
        start = recipe.parse({**BASE, "start": {"run": "x", "ready": said}}).start
        assert start is not None and start.ready == recipe.Ready(kind, said)  # type: ignore[arg-type]


def test_the_file() -> None:
    file = recipe.read_toml(EXAMPLE.replace("{name}", "mine"))
    assert (file.name, file.ignore) == ("mine", (".git", "node_modules", "__pycache__"))
    assert [step.op for step in recipe.parse(file.body).steps] == ["apt", "pip", "workdir", "run"]
    for text, words in (
        ("name = ", "is no TOML"),
        ("nane = 'x'\n[from]\ntemplate = 'base'", "did you mean 'name'?"),
        ("name = 'X'\n[from]\ntemplate = 'base'", "cannot be a template's name"),
        ("ignore = 'x'\n[from]\ntemplate = 'base'", "ignore is str"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            recipe.read_toml(text)
        assert words in str(refused.value)


def keys(*steps: dict[str, Any], base: str = "base") -> list[str]:
    return recipe.chain(base, recipe.parse({**BASE, "steps": list(steps)}).steps)


def test_a_key_is_of_all_that_came_before_and_of_nothing_else() -> None:
    one, two, three = {"run": "one"}, {"env": {"A": "b"}}, {"run": "three"}
    before = keys(one, two, three)
    assert before == keys(one, two, three) and len(set(before)) == 3
    late = keys(one, two, {"run": "other"})
    assert late[:2] == before[:2] and late[2] != before[2]
    early = keys({"run": "other"}, two, three)
    assert not set(early) & set(before)
    assert keys(one, {"env": {"A": "c"}}, three)[2] != before[2]  # what is only set counts too
    assert not set(keys(one, two, three, base="another")) & set(before)
    # Patience is no input, and neither is what a copied file is called here.
    assert keys({"run": "one", "timeout_s": 5}) == keys(one)
    assert keys({"copy": "a", "to": "/x", "sha256": DIGEST}) == keys(
        {"copy": "b", "to": "/x", "sha256": DIGEST}
    )
    assert keys({"copy": "a", "to": "/x", "sha256": DIGEST}) != keys(
        {"copy": "a", "to": "/x", "sha256": "cd" * 32}
    )
    assert keys({"run": ["a", "b"]}) != keys({"run": "a b"})


def test_what_steps_set_and_run() -> None:
    steps = recipe.parse(
        {
            **BASE,
            "steps": [
                {"workdir": "app"},
                {"env": {"A": "1"}},
                {"user": "me"},
                {"workdir": "sub"},
                {"run": "x"},
                {"run": ["y", "z"], "as": "root"},
                {"apt": ["a", "b=1"]},
                {"pip": ["a>1", "-r", "it's.txt"]},
                {"npm": ["left"]},
            ],
        }
    ).steps
    state = State(env={"BASE": "0"})
    for step in steps[:4]:
        assert commands.command(step, state) is None
        state = recipe.after(state, step)
    assert state == State({"BASE": "0", "A": "1"}, "/app/sub", "me")
    run, argv, apt, pip, npm = [commands.command(step, state) for step in steps[4:]]
    assert run is not None and (run.run, run.user, run.cwd) == ("x", "me", "/app/sub")
    assert argv is not None and commands.argv(argv.run) == ["y", "z"] and argv.user == "root"
    assert (
        apt is not None
        and apt.user == "root"
        and "install -qy --no-install-recommends a b=1 &&" in str(apt.run)
    )
    assert pip is not None and """'a>1' -r 'it'"'"'s.txt'""" in str(pip.run) and pip.env["A"] == "1"
    assert npm is not None and npm.env["NPM_CONFIG_PREFIX"] == "/usr/local"
