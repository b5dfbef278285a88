"""Templates of one's own, built by real machines: steps, what is kept of them, failures, ends, one build for many."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm4agents import Template, TemplateBuildError
from tests.support import Node, eventually, lines, sdk_of

pytestmark = pytest.mark.vm
MEMORY = 256
OWN = secrets.token_hex(8)
"""Makes the steps of this run its own: those of an earlier one are in the cache still."""


@pytest.fixture(scope="module")
def node(shared_nodes: Callable[..., Node]) -> Iterator[Node]:
    node = shared_nodes().start()
    yield node
    for name in ("t-shop", "t-next", "t-many", "t-of-snapshot", "t-snapshot", "t-killed", "t-file"):
        node.http.delete(f"/v1/templates/{name}")


def statuses(node: Node, name: str) -> list[str]:
    return [step["status"] for step in node.call("GET", f"/v1/templates/{name}/build")["steps"]]


def out(node: Node, sandbox: str, command: str, **more: Any) -> str:
    answer = node.exec(sandbox, command, **more)
    assert answer["exit_code"] == 0, answer
    return str(answer["stdout"]).strip()


def shop(files: Path) -> Template:
    """All that a recipe may have, on what needs no network."""
    return (
        Template(directory=files, ignore=["*.log", "/private/"])
        .from_template("base")
        .size(memory_mib=MEMORY)
        .network([])
        .env(GREETING="hello", PLACE="world", OWN=OWN)
        .run("useradd -m shopkeeper && mkdir /opt/shop", user="root")
        .user("shopkeeper")
        .workdir("/srv/shop")
        .copy("site", "site")
        .copy("one.sh", "/usr/local/bin/")
        .run(
            'echo "$GREETING $PLACE" > greeting; id -un >> greeting; pwd >> greeting; cat greeting; sleep 1000 &'
        )
        .run(["/usr/local/bin/one.sh", "argument with spaces"])
        .start("echo serving; git daemon --reuseaddr --port=8000 --base-path=/srv/shop", ready=8000)
        .warm("cat greeting")
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("recipe")
    (top / "site" / "private").mkdir(parents=True)
    (top / "site" / "private" / "key").write_text("not sent")
    (top / "site" / "debug.log").write_text("not sent")
    (top / "site" / "index.html").write_text("<h1>shop</h1>\n")
    (top / "site" / "index.html").chmod(0o640)
    (top / "site" / "link").symlink_to("index.html")
    (top / "one.sh").write_text('#!/bin/sh\nprintf "%s" "$1" > said\n')
    (top / "one.sh").chmod(0o755)
    return top


@pytest.fixture(scope="module")
def built(node: Node, files: Path) -> list[Any]:
    told: list[Any] = []
    with sdk_of(node):
        done = shop(files).build("t-shop", on_log=told.append)
    assert [step.status for step in done.steps] == [
        "set",
        "done",
        "set",
        "set",
        "done",
        "done",
        "done",
        "done",
    ]
    assert (done.name, done.memory_mib) == ("t-shop", MEMORY)
    return told


def test_what_a_recipe_says_is_what_its_sandboxes_are(node: Node, built: list[Any]) -> None:
    sandbox = node.create("t-shop")  # of the recipe's size, though the create says none
    try:
        row = node.get(sandbox)
        assert (row["memory_mib"], row["template"]) == (MEMORY, "t-shop")
        # Environment, user and directory are what a call has that names none.
        assert out(node, sandbox, "echo $GREETING; id -un; pwd; cat greeting said") == (
            "hello\nshopkeeper\n/srv/shop\nhello world\nshopkeeper\n/srv/shop\nargument with spaces"
        )
        assert out(node, sandbox, "id -un; pwd", user="root", cwd="/") == "root\n/"
        file = node.http.get(f"/v1/sandboxes/{sandbox}/files", params={"path": "greeting"})
        assert file.text.startswith("hello world")
        # Copies: modes and links kept, the user's, without what was to be left out; times are nobody's.
        assert out(
            node, sandbox, "cd site; stat -c '%n %A %U %Y' *; ls -A; stat -c '%U %a' /usr/local/bin/one.sh"
        ) == (
            "index.html -rw-r----- shopkeeper 1577836800\nlink lrwxrwxrwx shopkeeper 1577836800\n"
            "index.html\nlink\nshopkeeper 755"
        )
        # What was started runs already, said so, and listens; what a step had left running does not run.
        process = node.call("GET", f"/v1/sandboxes/{sandbox}/processes")["data"][0]
        assert (process["id"], process["user"], process["running"]) == ("start", "shopkeeper", True)
        assert 8000 in [one["port"] for one in node.call("GET", f"/v1/sandboxes/{sandbox}/ports")["data"]]
        assert not [
            line for line in out(node, sandbox, "ps -eo args").splitlines() if line.startswith("sleep 1000")
        ]
        # Nothing of the build is in the frozen machine: not its host name, not its files of the package tools.
        assert "build-" not in out(node, sandbox, "hostname; cat /etc/hostname /proc/sys/kernel/hostname")
        cell = node.code(sandbox, "pwd; id -un", language="bash")
        assert cell["stdout"] == "/srv/shop\nshopkeeper\n"
    finally:
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def test_it_is_told_of_and_shown(node: Node, built: list[Any], files: Path) -> None:
    text = "\n".join(map(str, built))
    assert "[7/8] done: run echo" in text and "\n    hello world\n" in text
    shown = node.call("GET", "/v1/templates/t-shop")
    assert shown["recipe"]["steps"][0] == {"env": {"GREETING": "hello", "PLACE": "world", "OWN": OWN}}
    assert shown["variants"][0]["defaults"] == {"user": "shopkeeper", "workdir": "/srv/shop"}
    assert "not sent" not in json.dumps(shown)
    # The same again is there already, also when a file was only touched.
    (files / "one.sh").touch()
    with sdk_of(node):
        again = shop(files).build("t-shop")
    assert again.key == shown["variants"][0]["key"] and "done" not in [step.status for step in again.steps]
    assert statuses(node, "t-shop")[-1] == "cached"


def test_a_late_change_runs_that_step_and_what_follows(node: Node, built: list[Any], files: Path) -> None:
    (files / "one.sh").write_text('#!/bin/sh\nprintf "changed %s" "$1" > said\n')
    with sdk_of(node):
        done = shop(files).build("t-shop")
    assert [step.status for step in done.steps] == [
        "set",
        "cached",
        "set",
        "set",
        "cached",
        "done",
        "done",
        "done",
    ]
    sandbox = node.create(
        "t-shop", memory_mib=MEMORY + 128
    )  # another shape of it is made: on its disk, no step runs
    try:
        assert out(node, sandbox, "cat said; echo; id -un") == "changed argument with spaces\nshopkeeper"
        assert 8000 in [one["port"] for one in node.call("GET", f"/v1/sandboxes/{sandbox}/ports")["data"]]
    finally:
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")
    # What is built on it begins where it ends, and goes by its defaults.
    with sdk_of(node):
        Template().from_template("t-shop").network([]).size(memory_mib=MEMORY).run("pwd > where").build(
            "t-next"
        )
    sandbox = node.create("t-next")
    try:
        assert out(node, sandbox, "cat where; id -un; echo $PLACE") == "/srv/shop\nshopkeeper\nworld"
        assert node.call("GET", f"/v1/sandboxes/{sandbox}/processes")["data"][0]["id"] == "start"
    finally:
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def test_a_failing_step_is_named_and_leaves_nothing(node: Node, built: list[Any]) -> None:
    begun = Template().from_template("base").size(memory_mib=MEMORY).run(f"echo {OWN} > /var/tmp/one")
    with sdk_of(node), pytest.raises(TemplateBuildError) as failed:
        begun.run("curl -sS -m 20 http://denied.example/; echo 'it broke' >&2; exit 7").build("t-many")
    error = failed.value
    assert (
        error.outcome == "not_started" and "step 2 of 2 failed" in str(error) and "exit code 7" in str(error)
    )
    assert (error.details["step"], error.details["op"], error.details["exit_code"]) == (1, "run", 7)
    assert error.details["output"].endswith("it broke") and error.details["denied"] == ["denied.example"]
    assert node.http.get("/v1/templates/t-many").status_code == 404
    state = node.call("GET", "/v1/templates/t-many/build")
    assert state["state"] == "failed" and [step["status"] for step in state["steps"]] == ["done", "failed"]
    with sdk_of(node), pytest.raises(TemplateBuildError, match=r"start failed.*ended with exit code 3"):
        begun.start("echo no; exit 3", ready=1234).build("t-many")
    with sdk_of(node), pytest.raises(TemplateBuildError, match="there is no user nobody-knows"):
        begun.user("nobody-knows").run("true").build("t-many")
    assert not node.processes() and not list((node.run / "vm").glob("*"))
    assert not list((node.cache / "tmp").glob(f"{node.process.pid if node.process else 0}-*"))


def recipe(*commands: str) -> dict[str, Any]:
    steps = [{"run": f"{command} # {OWN}"} for command in commands]
    return {"from": {"template": "base"}, "memory_mib": MEMORY, "network": [], "steps": steps}


def test_who_asks_for_the_same_shares_a_build_and_a_cancel_ends_it(node: Node) -> None:
    asked = {"name": "t-many", "recipe": recipe("echo kept > kept", "until [ -e go ]; do sleep 0.1; done")}
    ends: list[dict[str, Any]] = []

    def ask() -> None:
        with node.connect() as http, http.stream("POST", "/v1/templates", json=asked) as answer:
            ends.append(list(lines(answer))[-1])

    def running() -> bool:
        answer = node.http.get("/v1/templates/t-many/build").json()
        return [step["status"] for step in answer.get("steps", [])] == ["done", "running"]

    callers = [threading.Thread(target=ask) for _ in range(2)]
    for caller in callers:
        caller.start()
    eventually(running, 90)
    assert len(node.machines()) == 1
    other = node.http.post("/v1/templates", json={**asked, "recipe": recipe("true")})
    assert "another recipe" in other.text
    node.call("DELETE", "/v1/templates/t-many/build")
    for caller in callers:
        caller.join(30)
    assert [end["code"] for end in ends] == ["template_build_failed"] * 2
    assert all("cancelled by request" in end["detail"] for end in ends)
    assert not node.machines() and not list((node.run / "vm").glob("*"))
    # Who goes away ends his build too; and the steps that were done are there for the next.
    with node.connect() as http, http.stream("POST", "/v1/templates", json=asked) as answer:
        for event in lines(answer):
            if event["type"] == "step" and event["step"] == 1:
                break
    state = eventually(
        lambda: (now := node.call("GET", "/v1/templates/t-many/build"))["state"] != "building" and now
    )
    assert not node.machines() and not list((node.run / "vm").glob("*"))
    assert state["state"] == "cancelled" and state["steps"][0]["status"] == "cached"


def test_a_killed_server_leaves_whole_steps_and_nothing_else(node: Node) -> None:
    asked = {"name": "t-killed", "recipe": recipe("echo kept > kept", "sleep 1000")}

    def ask() -> None:
        with (
            contextlib.suppress(httpx.HTTPError),  # its server is killed
            node.connect() as http,
            http.stream("POST", "/v1/templates", json=asked) as answer,
        ):
            list(lines(answer))

    caller = threading.Thread(target=ask)
    caller.start()
    eventually(
        lambda: statuses(node, "t-killed")[0] in ("done", "cached") if _known(node, "t-killed") else False, 90
    )
    eventually(lambda: statuses(node, "t-killed")[1] == "running", 30)
    node.kill9()
    caller.join(30)
    node.start()
    eventually(
        lambda: not node.processes() and not list((node.run / "vm").glob("*")) and not node.half_made(), 30
    )
    asked["recipe"] = recipe("echo kept > kept", "cat kept")
    with node.http.stream("POST", "/v1/templates", json=asked) as answer:
        events = list(lines(answer))
    assert events[-1]["type"] == "template", events[-1]
    assert next(event["status"] for event in events if event["type"] == "step") == "cached"


def _known(node: Node, name: str) -> bool:
    return node.http.get(f"/v1/templates/{name}/build").status_code == 200


def test_files_are_checked_and_recipes_refused_with_what_to_do(node: Node) -> None:
    digest = "0" * 64
    for content, words in ((b"no tar", "cut short"), (bytes(1024), "another digest")):
        answer = node.http.put(f"/v1/templates/files/{digest}", content=content)
        assert answer.status_code == 400 and words in answer.text, answer.text
    assert node.http.get(f"/v1/templates/files/{digest}").status_code == 404
    assert node.http.get("/v1/templates/files/..%2f..").status_code in (400, 404)
    for body, words in (
        ({"from": {"template": "base"}, "steps": [{"comand": "x"}]}, "did you mean 'run'"),
        ({"from": {"template": "none-such"}}, "there is no template 'none-such'"),
        ({"from": {"template": "base"}, "steps": [{"copy": "x", "to": "y", "sha256": digest}]}, "not sent"),
        ({"from": {"template": "base"}, "network": "no-profile", "steps": [{"run": "true"}]}, "no-profile"),
    ):
        answer = node.http.post("/v1/templates", json={"name": "t-many", "recipe": body})
        assert words in answer.text and "problem" not in answer.text[:9], answer.text
    assert node.http.post("/v1/templates", json={"name": "python", "recipe": {}}).status_code == 409
    assert not list((node.cache / "copies").glob("*/*.tmp"))


def test_from_a_snapshot(node: Node) -> None:
    maker = node.create("base", memory_mib=MEMORY, env={"TOKEN": "of-the-maker-alone"})
    out(node, maker, "echo made by hand > by-hand; sync")
    node.call("POST", f"/v1/sandboxes/{maker}/snapshot", json={"name": "t-snapshot"})
    node.call("DELETE", f"/v1/sandboxes/{maker}")
    with sdk_of(node):
        begun = Template().from_snapshot("t-snapshot").size(memory_mib=MEMORY).network([])
        begun.run("cat by-hand > read; env > saw").build("t-of-snapshot")
    sandbox = node.create("t-of-snapshot")
    try:
        assert out(node, sandbox, "cat read; grep -c TOKEN saw || true") == "made by hand\n0"
    finally:
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def test_a_file_and_the_command_line(node: Node, tmp_path: Path) -> None:
    place = tmp_path / "t-file"

    def l4a(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llm4agents", "template", *words]
        done = subprocess.run(command, env=node.env, cwd="/", capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done
        return done

    # What `init` writes is one, with the directory's name, and is written over nothing.
    l4a("init", str(place))
    example = Template.from_file(place)
    assert example.name == "t-file" and example.to_dict()["from"] == {"template": "python"}
    assert "exists" in l4a("init", str(place), code=3).stderr
    (place / "app").mkdir()
    (place / "app" / "word").write_text("of the file\n")
    (place / "app" / "debug.log").write_text("not sent")
    (place / "template.toml").write_text(
        f"""name = "t-file"
description = "made from a file"
memory_mib = {MEMORY}
network = []
ignore = ["*.log"]
from.template = "base"

[[steps]]
workdir = "/srv/file"

[[steps]]
copy = "app"
to = "."

[[steps]]
run = "cat word; ls; echo {OWN} > greeting"
"""
    )
    said = l4a("build", str(place)).stderr
    assert "[3/3] done: run cat word" in said and "    of the file" in said and "debug.log" not in said
    assert re.search(r"^t-file is built \([\d.]+ MiB\): llm4agents create -t t-file$", said, re.MULTILINE), (
        said
    )
    listed = l4a("ls").stdout.splitlines()
    assert re.split(r"\s{2,}", listed[0])[-3:] == ["SIZE", "AGE", "WHAT IS IN IT"]
    rows = {line.split()[0]: line for line in listed[1:]}
    assert re.fullmatch(
        rf"t-file +yes +1 +{MEMORY} MiB +\S+.* [\d.]+ MiB +\d+ (s|min) +made from a file", rows["t-file"]
    ), rows["t-file"]
    shown = l4a("show", "t-file").stdout
    assert f"1 vCPU, {MEMORY} MiB" in shown and "/srv/file" in shown and "made from a file" in shown
    recipe = node.call("GET", "/v1/templates/t-file")["recipe"]
    assert f"echo {OWN}" in recipe["steps"][2]["run"]
    assert json.loads(shown[shown.index("{") :]) == recipe
    for words in (["logs", "t-file"], ["logs", "t-file", "--follow"]):
        told = l4a(*words)
        assert "of the file" in told.stdout and "the build of t-file: done" in told.stderr, told
    # The SDK reads the same from it: nothing is to be built.
    with sdk_of(node):
        again = Template.from_file(place / "template.toml").build()
    assert again.name == "t-file" and "done" not in [step.status for step in again.steps]
    sandbox = node.create("t-file")
    try:
        assert out(node, sandbox, "pwd; cat word greeting; ls") == (
            f"/srv/file\nof the file\n{OWN}\ngreeting\nword"
        )
    finally:
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")
    l4a("rm", "t-file")
    assert "t-file" not in l4a("ls").stdout
