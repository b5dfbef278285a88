"""Cells in other languages than Python, and contexts of their own, in real clones."""

from __future__ import annotations

import json
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
    assert node.code(sandbox, "x=1; cd /usr", context=made["id"])["status"] == "ok"
    node.code(sandbox, "y=2")
    node.stop(keep=True)
    node.start()
    assert made in node.call("GET", path)["data"]
    assert node.code(sandbox, "echo $A $x $PWD", context=made["id"])["stdout"] == "b 1 /usr\n"
    assert node.code(sandbox, "echo $y")["stdout"] == "2\n"
    node.kill9()
    node.start()
    assert node.code(sandbox, "echo $x", context=made["id"])["stdout"] == "1\n"
    node.call("DELETE", f"{path}/{made['id']}")
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")


# -- JavaScript and TypeScript


@pytest.fixture(scope="module")
def node_(server: None) -> Iterator[Sandbox]:
    with Sandbox(template="node", env={"OF": "the sandbox"}) as made:
        yield made


def test_javascript_is_what_node_speaks(node_: Sandbox) -> None:
    assert node_.run_code("const x = 6; console.log('hello'); x * 7").text == "42"
    found = node_.run_code("const x = 7; console.error(process.env.OF); await Promise.resolve(x)")
    assert found.text == "7" and found.stderr == "the sandbox\n" and found.status == "ok"
    assert node_.run_code("require('os').userInfo().username").text == "'user'"


def test_typescript_has_a_state_of_its_own(node_: Sandbox) -> None:
    code = "interface P { x: number }\nenum E { A, B }\nconst p: P = { x: E.B };\np"
    assert node_.run_code(code, language="typescript").text == "{ x: 1 }"
    assert node_.run_code("typeof x + p.x", language="ts").text == "'undefined1'"
    error = node_.run_code("const z: = 1", language="typescript").error
    assert error is not None and error.name == "SyntaxError"


def test_modules_come_from_the_working_directory(node_: Sandbox) -> None:
    node_.files.write("lib/index.mjs", "export const q = 5; export default 'd'")
    node_.files.write("lib/node_modules/dep/index.js", "module.exports = { n: 3 }")
    made = node_.contexts.create("javascript", cwd="lib")
    found = node_.run_code(
        "import d, { q } from './index.mjs'\nimport dep from 'dep'\n[d, q, dep.n]", context=made
    )
    assert found.text == "[ 'd', 5, 3 ]"
    assert node_.run_code("require('dep').n + (await import('node:path')).sep", context=made).text == "'3/'"
    assert node_.run_code("typeof d").text == "'undefined'"
    node_.contexts.remove(made)


def test_an_error_in_javascript(node_: Sandbox) -> None:
    error = node_.run_code("function f() { null.x }\nf()").error
    assert error is not None and error.name == "TypeError" and "reading 'x'" in error.value
    assert ":2:1" in error.traceback and "llm4agents" not in error.traceback


def test_what_is_displayed(node_: Sandbox) -> None:
    code = "display({'text/html': '<b>x</b>', 'image/png': Buffer.from('abc')}); ({ toHTML: () => '<i>' })"
    shown, value = node_.run_code(code).results
    assert (shown.html, shown.png, shown.main) == ("<b>x</b>", b"abc", False)
    assert value.main and value.html == "<i>"


@pytest.mark.parametrize(
    "code",
    [
        "while (true) {}",
        "await new Promise(() => {})",
        "await 1; for (;;) {}",
        "child_process.execSync('sleep 99')",
    ],
)
def test_javascript_that_runs_too_long_is_interrupted_and_goes_on(node_: Sandbox, code: str) -> None:
    node_.run_code("globalThis.kept = 1")
    found = node_.run_code(code, timeout=1)
    assert found.status == "timed_out" and found.error is not None and found.error.name == "TimeoutError"
    assert node_.run_code("kept").text == "1"


def test_javascript_that_exits_is_replaced(node_: Sandbox) -> None:
    found = node_.run_code("console.log('bye'); process.exit(7)")
    assert found.status == "died" and found.error is not None and "code 7" in found.error.value
    assert found.stdout == "bye\n" and not found.stderr
    assert node_.run_code("typeof kept").text == "'undefined'"


def test_npm_is_there(node_: Sandbox) -> None:
    assert node_.exec("npm --version").stdout.count(".") == 2
    assert node_.exec("node -p 'process.version'").stdout.startswith("v24")
    node_.exec('mkdir -p pkg && echo \'{"name": "p", "version": "1.0.0"}\' > pkg/package.json').check()
    node_.exec("mkdir app; cd app; npm install ../pkg", timeout=120).check()
    assert node_.exec("ls app/node_modules").stdout == "p\n"


def test_two_clones_of_node_draw_different_numbers() -> None:
    code = (
        "const vm = require('vm'), c = require('crypto');\n"
        "const w = new (require('worker_threads').Worker)(\"const c = require('crypto'); require('worker_threads')"
        '.parentPort.postMessage([Math.random(), c.randomUUID()])", { eval: true });\n'
        "const threaded = await new Promise((resolve) => w.once('message', resolve));\n"
        "const key = c.generateKeyPairSync('ec', { namedCurve: 'P-256' }).privateKey.export({ format: 'jwk' }).d;\n"
        "JSON.stringify([Math.random(), c.randomBytes(8).toString('hex'), c.randomUUID(), crypto.randomUUID(),"
        " String(c.randomInt(2 ** 47)), Buffer.from(crypto.getRandomValues(new Uint8Array(8))).toString('hex'),"
        " key, vm.runInNewContext('Math.random()'), ...threaded])"
    )
    for language in ("javascript", "typescript"):
        draws = []
        for _ in range(2):
            with Sandbox(template="node") as made:
                draws.append(json.loads((made.run_code(code, language=language).text or "")[1:-1]))
        assert len(draws[0]) == len(draws[1]) == 10
        assert not set(map(str, draws[0])) & set(map(str, draws[1]))
