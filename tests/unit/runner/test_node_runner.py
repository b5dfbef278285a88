"""Node's runner as a process of its own, over its unix socket, with whatever node this machine has."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.runner.runner_process import WAIT_S, Cell

SERVICE = Path(__file__).parents[3] / "src/llm4agents/images/data/node/service.js"
WARM = "// %%\n{ const a = 1; console.log(a) }\n// %%\nawait import('node:path')\n"


def version(node: str) -> tuple[int, ...]:
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in re.findall(r"\d+", said))


NODE = os.environ.get("LLM4AGENTS_TEST_NODE") or shutil.which("node") or ""
VERSION = version(NODE) if NODE else (0,)
pytestmark = pytest.mark.skipif(VERSION < (20, 11), reason="no node of 20.11 or newer here")


class Runner:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = str(directory / "node.sock")
        ready, warm = directory / "ready", directory / "warm.js"
        warm.write_text(WARM)
        argv = [NODE, "--expose-internals", str(SERVICE), "--socket", self.path, "--cwd", str(directory)]
        argv += ["--warm", str(warm), "--ready", str(ready), "--grace-s", "0.5"]
        with (directory / "log").open("wb") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while not ready.exists():
            assert self.process.poll() is None, (directory / "log").read_text()
            os.sched_yield()
        self.ready: dict[str, Any] = json.loads(ready.read_text())

    def start(self, code: str, context: str = "javascript:default", **more: Any) -> Cell:
        language = context.partition(":")[0]
        return Cell(self.path, {"op": "run", "context": context, "language": language, "code": code, **more})

    def run(self, code: str, context: str = "javascript:default", **more: Any) -> Cell:
        return self.start(code, context, **more).wait()

    def value(self, code: str, context: str = "javascript:default", **more: Any) -> str:
        cell = self.run(code, context, **more)
        assert cell.status == "ok", cell.events
        return cell.value

    def op(self, op: str, context: str = "javascript:default") -> Cell:
        return Cell(self.path + ".control", {"op": op, "context": context}).wait()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    made = Runner(tmp_path_factory.mktemp("n"))
    yield made
    made.process.send_signal(signal.SIGTERM)
    assert made.process.wait(WAIT_S) == 0
    assert not Path(made.path).exists()


def test_the_warm_up_leaves_nothing(node: Runner) -> None:
    assert node.ready == {"problems": []}
    assert node.run("1").events[-1]["execution_count"] == 1


def test_declarations_stay_and_can_be_made_again(node: Runner) -> None:
    node.run("const x = 1; let y = 2; class C {}; function f() { return x + y }")
    assert node.value("f() + new C().constructor.name") == "'3C'"
    assert node.value("const x = 10; x") == "10"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("'a'", "'a'"),
        ("[1, { b: [2] }]", "[ 1, { b: [ 2 ] } ]"),
        ("10n", "10n"),
        ("-0", "-0"),
        ("NaN", "NaN"),
        ("null", "null"),
        ("Symbol('s')", "Symbol(s)"),
        ("new Map([[1, 2]])", "Map(1) { 1 => 2 }"),
        ("Promise.resolve(1)", "Promise { 1 }"),
        ("await Promise.resolve(1)", "1"),
        ("for (const i of [1, 2]) i * 2", "4"),
    ],
)
def test_the_value_of_a_cell(node: Runner, code: str, text: str) -> None:
    assert node.value(code) == text


def test_no_value(node: Runner) -> None:
    assert not node.run("undefined").results and not node.run("const nothing = 1").results


def test_output_in_order_and_raw(node: Runner) -> None:
    cell = node.run(
        "console.log('a'); console.error('b'); display({'text/plain': 'c'}); process.stdout.write('d')"
    )
    types = [event["type"] for event in cell.events]
    assert types == ["stdout", "stderr", "result", "stdout", "result", "end"]  # `write` has a value
    raw = "child_process.execSync('echo raw; echo err >&2', { stdio: 'inherit' }); fs.writeSync(1, 'é\\n')"
    cell = node.run(raw)
    assert cell.stdout == "raw\né\n" and cell.stderr == "err\n"
    assert len(node.run("console.log('é'.repeat(2e6))").stdout) == 2_000_001


def test_rich_results(node: Runner) -> None:
    cell = node.run("display({'image/png': Buffer.from('abc'), 'application/json': {a: [1]}})")
    assert cell.results[0]["data"] == {"image/png": "YWJj", "application/json": {"a": [1]}}
    cell = node.run("({ [Symbol.for('llm4agents.display')]: () => ({ 'text/markdown': '# x' }) })")
    assert cell.results[0]["data"]["text/markdown"] == "# x" and cell.results[0]["main"]
    cell = node.run("({ toHTML() { throw new Error('no') } })")
    assert "its display failed: no" in cell.value
    cell = node.run("display({ 'image/png': 'x'.repeat(20e6) })")
    assert (
        list(cell.results[0]["data"]) == ["text/plain"]
        and "left out" in cell.results[0]["data"]["text/plain"]
    )


def test_errors(node: Runner) -> None:
    error = node.run("const a = 1\nfunction g() { throw new RangeError('bad') }\ng()").error
    assert (error["name"], error["value"]) == ("RangeError", "bad")
    assert ":2:22" in error["traceback"] and ":3:1" in error["traceback"]
    assert "worker.js" not in error["traceback"] and "inspector" not in error["traceback"]
    assert node.run("if (").error["name"] == "SyntaxError"
    assert node.run("throw { a: 1 }").error["traceback"] == "Uncaught { a: 1 }"
    assert node.run("await Promise.reject(new Error('later'))").error["value"] == "later"
    cell = node.run("process.chdir('/nothing')")
    assert cell.error["name"] == "Error" and cell.status == "error"


def test_what_fails_in_the_background_is_told_and_ends_nothing(node: Runner) -> None:
    node.run("kept = 1; Promise.reject(new Error('one')); setTimeout(() => { throw new Error('two') })")
    cell = node.run("await new Promise((resolve) => setTimeout(resolve, 50)); kept")
    assert (
        cell.value == "1"
        and "(in promise) Error: one" in cell.stderr
        and "Uncaught Error: two" in cell.stderr
    )


def test_imports_of_every_form(node: Runner) -> None:
    (node.directory / "lib.mjs").write_text("export const q = 5; export default { z: 1 }")
    (node.directory / "node_modules/dep").mkdir(parents=True)
    (node.directory / "node_modules/dep/index.js").write_text("exports.n = 3")
    (node.directory / "data.json").write_text('{"a": 1}')
    code = """import fs, { existsSync as there } from 'fs'
import * as os from 'node:os'
import d, {
  q,
} from './lib.mjs'
import json from './data.json' with { type: 'json' }
import 'node:path'
import dep from 'dep'
export const own = 1
const text = "import x from 'y'"
throw [typeof fs.statSync, there('/'), os.EOL, d.z, q, json.a, dep.n, own, text.length, (await import('./lib.mjs')).q]
"""
    value = node.run(code).error["value"]
    assert "".join(value.split()) == "['function',true,'\\n',1,5,1,3,1,17,5]"
    assert "cannot find" in node.run("import 'no-such-module'").error["value"].lower()
    assert (
        ":11:"
        in node.run(code.replace("throw [", "throw new Error([").replace("q]\n", "q])\n")).error["traceback"]
    )


def test_require_follows_the_directory(node: Runner) -> None:
    (node.directory / "sub").mkdir()
    (node.directory / "sub/m.js").write_text("module.exports = __dirname")
    there = str(node.directory / "sub")
    assert node.value("require('./m.js')", "javascript:sub", cwd=there) == f"'{there}'"
    assert node.value("process.cwd()", "javascript:sub") == f"'{there}'"
    assert node.value("process.cwd()") == f"'{node.directory}'"


def test_the_environment_is_the_cells(node: Runner) -> None:
    assert node.value("process.env.OWN", env={"OWN": "x"}) == "'x'"
    assert not node.run("process.env.OWN").results


@pytest.mark.parametrize(
    "code",
    [
        "for (;;) {}",
        "for (;;) { try { for (;;) {} } catch {} finally {} }",
        "await new Promise(() => {})",
        "await 1; for (;;) {}",
        "child_process.execSync('sleep 100')",
        "Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0)",
    ],
)
@pytest.mark.parametrize("how", ["interrupt", "timeout"])
def test_a_cell_that_does_not_end(node: Runner, code: str, how: str) -> None:
    node.run("kept = 1")
    if how == "timeout":
        cell = node.run(code, timeout_s=0.2)
        assert cell.status == "timed_out"
    else:
        cell = node.start(f"console.log('on'); {code}").until("on")
        node.op("interrupt")
        cell.wait()
        assert cell.status == "interrupted" and cell.error["name"] == "Interrupted"
    assert node.run("kept").status == "ok"


def test_hanging_up_interrupts(node: Runner) -> None:
    cell = node.start("console.log('on'); for (;;) {}").until("on")
    cell.close()
    assert node.value("kept") == "1"


def test_death_is_told_and_the_next_cell_has_a_fresh_one(node: Runner) -> None:
    cell = node.run("console.log('bye'); process.exit(3)")
    assert (cell.status, cell.stdout, cell.stderr) == ("died", "bye\n", "")
    assert cell.error["name"] == "InterpreterDied" and "code 3" in cell.error["value"]
    assert node.value("typeof kept") == "'undefined'"
    assert "SIGKILL" in node.run("process.kill(process.pid, 'SIGKILL')").error["value"]
    assert node.run("process.abort()").status == "died"
    assert node.run("fs.writeSync(4, Buffer.alloc(64, 255)); await new Promise(() => {})").status == "died"


def test_contexts(node: Runner) -> None:
    node.run("mine = 1", "javascript:a")
    node.run("mine = 2", "javascript:b")
    assert node.value("mine", "javascript:a") == "1"
    node.op("restart", "javascript:a")
    assert node.value("typeof mine", "javascript:a") == "'undefined'"
    node.op("remove", "javascript:b")
    listed = {item["id"] for item in node.op("list").events[0]["contexts"]}
    assert "javascript:a" in listed and "javascript:b" not in listed
    busy = node.start("console.log('on'); for (;;) {}", "javascript:a").until("on")
    node.op("remove", "javascript:a")
    busy.wait()
    assert busy.status == "died"


def test_there_are_bounds_and_bad_requests_are_told(node: Runner) -> None:
    for number in range(30):
        cell = node.run("1", f"javascript:many-{number}")
        if cell.status == "error":
            break
    assert cell.error["name"] == "TooManyContexts"
    for number in range(30):
        node.op("remove", f"javascript:many-{number}")
    assert Cell(node.path, {"op": "nothing"}).wait().error["name"] == "BadRequest"
    assert node.op("ping").status == "ok"


def test_output_nobody_reads_holds_up_that_cell_alone(node: Runner) -> None:
    flood = node.start(
        "for (let i = 0; i < 3000; i += 1) console.log('x'.repeat(8000)); 'done'", "javascript:flood"
    )
    assert node.value("1 + 1") == "2"
    assert flood.wait().value == "'done'" and len(flood.stdout) == 3000 * 8001
    node.op("remove", "javascript:flood")


def test_random_numbers_are_not_v8s(node: Runner) -> None:
    draws = json.loads(node.value("JSON.stringify(Array.from({ length: 1000 }, Math.random))")[1:-1])
    assert len(set(draws)) == 1000 and all(0 <= draw < 1 for draw in draws) and 0.4 < sum(draws) / 1000 < 0.6
    node.process.send_signal(signal.SIGUSR2)
    assert (
        node.value("[typeof Math.random(), crypto.randomUUID().length, require('crypto').randomInt(1)]")
        == "[ 'number', 36, 0 ]"
    )


@pytest.mark.skipif(VERSION < (22, 13), reason="this node cannot read TypeScript")
def test_typescript(node: Runner) -> None:
    here = "typescript:default"
    code = "import type { X } from './nothing'\ninterface A { x: number }\nenum E { P, Q }\nconst a: A = { x: E.Q }\na"
    assert node.value(code, here) == "{ x: 1 }"
    assert node.value("import { sep } from 'node:path'\n(sep as string)", here) == "'/'"
    assert node.run("const z: = 1", here).error["name"] == "SyntaxError"
    assert ":3:" in node.run("interface B {}\n\nthrow new Error('x')", here).error["traceback"]


@pytest.mark.skipif(VERSION >= (22, 13), reason="this node can read TypeScript")
def test_typescript_is_refused_by_an_old_node(node: Runner) -> None:
    assert "22.13" in node.run("1", "typescript:default").error["value"]
