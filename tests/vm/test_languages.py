"""Cells in other languages than Python, and contexts of their own, in real clones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from llm4agents import ConflictError, InvalidRequestError, NotFoundError, Sandbox
from tests.support import Node, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]


@pytest.fixture(scope="module", autouse=True)
def server(shared_node: Node) -> Iterator[None]:
    with sdk_of(shared_node):
        yield


@pytest.fixture(scope="module")
def base(server: None) -> Iterator[Sandbox]:
    with Sandbox(template="base", env={"OF": "the sandbox"}) as made:
        yield made


# -- bash


def test_bash_is_what_base_speaks(base: Sandbox) -> None:
    base.run_code("x=6; cd /tmp; double() { echo $(($1 * 2)); }")
    found = base.run_code("double $x; pwd; whoami; echo $OF; echo oops >&2")
    assert found.stdout == "12\n/tmp\nuser\nthe sandbox\n" and found.stderr == "oops\n"
    assert found.status == "ok" and found.error is None and not found.results


def test_an_exit_status_is_an_error(base: Sandbox) -> None:
    found = base.run_code("ls /nothing-here", language="bash")
    assert found.error is not None and (found.error.name, found.error.value) == ("ExitStatus", "2")
    assert found.status == "error" and "No such file" in found.stderr


def test_bash_that_runs_too_long_is_interrupted_and_goes_on(base: Sandbox) -> None:
    base.run_code("kept=1")
    found = base.run_code("while :; do :; done", timeout=1)
    assert found.status == "timed_out" and found.error is not None and found.error.name == "TimeoutError"
    assert base.run_code("echo $kept").stdout == "1\n"


def test_bash_that_exits_is_replaced(base: Sandbox) -> None:
    found = base.run_code("kept=2; exit 7")
    assert found.status == "died" and found.error is not None and found.error.name == "InterpreterDied"
    assert base.run_code("echo [$kept]").stdout == "[]\n"


def test_output_of_bash_comes_as_it_is_made(base: Sandbox) -> None:
    parts: list[str] = []
    base.run_code("echo one; read -t 0.3 x < <(sleep 9); echo two", on_stdout=parts.append)
    assert "".join(parts) == "one\ntwo\n" and len(parts) >= 2


def test_contexts_have_states_of_their_own(base: Sandbox) -> None:
    first = base.contexts.create("bash", cwd="/etc", env={"WHO": "first"})
    second = base.contexts.create(cwd="/usr")
    assert (first.language, second.language, first.cwd) == ("bash", "bash", "/etc")
    base.run_code("v=1", context=first)
    assert base.run_code("echo $v $WHO $PWD", context=first).stdout == "1 first /etc\n"
    assert base.run_code("echo [$v] [$WHO] $PWD", context=second.id).stdout == "[] [] /usr\n"
    listed = {context.id: context for context in base.contexts.list()}
    assert listed[first.id] == first and listed[second.id] == second and "default" in listed
    base.contexts.restart(first)
    assert base.run_code("echo [$v] $WHO $PWD", context=first).stdout == "[] first /etc\n"
    base.contexts.remove(first)
    base.contexts.remove(second.id)
    assert first.id not in {context.id for context in base.contexts.list()}
    with pytest.raises(NotFoundError):
        base.contexts.remove(first)


def test_what_cannot_be_is_refused(base: Sandbox) -> None:
    with pytest.raises(ConflictError, match="no Node"):
        base.contexts.create("javascript")
    with pytest.raises(ConflictError, match="template 'python'"):
        base.run_code("1", language="python")
    with pytest.raises(InvalidRequestError, match="cobol"):
        base.run_code("1", language="cobol")
    with pytest.raises(InvalidRequestError):
        base.contexts.create("bash", cwd="/etc/passwd")
    with pytest.raises(NotFoundError):
        base.contexts.create("bash", cwd="/nothing/here")
    made = base.contexts.create("bash")
    with pytest.raises(InvalidRequestError, match="is of bash"):
        base.run_code("1", context=made, language="python")
    base.contexts.remove(made)


def test_there_are_bounds(base: Sandbox) -> None:
    made = [base.contexts.create("bash") for _ in range(15)]
    with pytest.raises(ConflictError, match="the most"):
        base.contexts.create("bash")
    for context in made:
        base.contexts.remove(context)


def test_contexts_are_known_to_the_next_server(nodes: Callable[..., Node]) -> None:
    node = nodes().start()
    sandbox = node.create("base")
    path = f"/v1/sandboxes/{sandbox}/contexts"
    made = node.call("POST", path, json={"language": "bash", "cwd": "/etc", "env": {"A": "b"}})
    node.stop(keep=True)
    node.start()
    assert made in node.call("GET", path)["data"]
    assert node.code(sandbox, "echo $A $PWD", context=made["id"])["stdout"] == "b /etc\n"
    node.call("DELETE", f"{path}/{made['id']}")
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")
