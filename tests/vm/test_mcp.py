"""`llm4agents mcp` as agents start it, over stdio, with the official client and real microVMs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters, stdio_client
from mcp_types import CallToolResult

from tests.support import Node, eventually

pytestmark = pytest.mark.vm


class Agent:
    """An MCP client, and what tests ask of it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.progress: list[tuple[float, str]] = []

    async def _told(self, progress: float, total: float | None, message: str | None) -> None:
        self.progress.append((progress, message or ""))

    async def call(self, name: str, **arguments: Any) -> CallToolResult:
        return await self.client.call_tool(name, arguments, progress_callback=self._told)

    async def text(self, name: str, **arguments: Any) -> str:
        """The text of a call that must succeed."""
        done = await self.call(name, **arguments)
        said = "\n".join(block.text for block in done.content if block.type == "text")
        assert not done.is_error, said
        return said

    async def error(self, name: str, **arguments: Any) -> str:
        done = await self.call(name, **arguments)
        assert done.is_error, done.content
        return str(done.content[0].text)  # type: ignore[union-attr]


@asynccontextmanager
async def _agent(node: Node, *options: str) -> AsyncIterator[Agent]:
    command = ["-m", "llm4agents", "mcp", *options]
    server = StdioServerParameters(command=sys.executable, args=command, env=node.env, cwd="/")
    async with Client(stdio_client(server)) as client:
        yield Agent(client)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(600):
            await test()

    asyncio.run(whole())


def _live(node: Node) -> list[dict[str, Any]]:
    found = node.call("GET", "/v1/sandboxes")["data"]
    return [one for one in found if one["state"] not in ("killed", "failed")]


def test_code_charts_and_files(shared_node: Node) -> None:
    async def test() -> None:
        async with _agent(shared_node) as agent:
            tools = {tool.name: tool for tool in (await agent.client.list_tools()).tools}
            assert {"create_sandbox", "list_sandboxes", "run_code", "exec", "read_file", "write_file"} < set(
                tools
            )
            assert not {"upload", "download"} & set(tools)
            assert "matplotlib" in (tools["run_code"].description or "")
            assert not _live(shared_node), "nothing is made before it is needed"

            assert await agent.text("run_code", code="x = 6\nprint('hello')\nx * 7") == "hello\n\n42"
            assert await agent.text("run_code", code="x") == "6"
            done = await agent.call(
                "run_code", code="import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
            )
            (picture,) = [block for block in done.content if block.type == "image"]
            assert picture.mime_type == "image/png"
            png = base64.b64decode(picture.data)
            assert png.startswith(b"\x89PNG")
            html = "from IPython.display import HTML, Markdown, display\ndisplay(HTML('<b>x</b>'), Markdown('*y*'))"
            assert await agent.text("run_code", code=html) == "<b>x</b>\n*y*"
            failed = await agent.text("run_code", code="1/0")
            assert failed.startswith("[error]")
            assert "ZeroDivisionError" in failed
            assert (await agent.text("run_code", code="while True: pass", timeout_s=1)).startswith(
                "[timed_out]"
            )
            assert "left out" in await agent.text("run_code", code="print('x' * 200_000)")

            encoded = base64.b64encode(png).decode()
            await agent.text("write_file", path="a/pic.png", text=encoded, encoding="base64")
            done = await agent.call("read_file", path="a/pic.png")
            assert [block.type for block in done.content] == ["image"]
            assert await agent.text("read_file", path="a/pic.png", encoding="base64") == encoded
            await agent.text("write_file", path="t.txt", text="grüß\n")
            assert await agent.text("read_file", path="t.txt") == "grüß\n"
            assert await agent.text("read_file", path="t.txt", length=2) == "gr\n[bytes 0 to 2 of 7]"
            assert "/home/user/a/" in await agent.text("list_files")
            assert "/home/user/a/" in await agent.text("list_files", path=".")
            assert "no such" in (await agent.error("read_file", path="none")).lower()
            assert len(_live(shared_node)) == 1
        eventually(lambda: not _live(shared_node), 30)

    run(test)


def test_commands_ports_and_sandboxes_by_id(shared_node: Node) -> None:
    async def test() -> None:
        async with _agent(shared_node, "-t", "base") as agent:
            assert await agent.text("exec", command="echo out; echo err >&2; exit 3") == (
                "out\n\n[stderr]\nerr\n\n[exit code 3]"
            )
            assert await agent.text("exec", command="true") == "[exit code 0]"
            slow, quick = await asyncio.gather(
                agent.text("exec", command="sleep 2; date +%s.%N"), agent.text("exec", command="date +%s.%N")
            )
            assert float(quick) < float(slow) - 1, "calls run beside one another"
            other = await agent.text("create_sandbox", template="base", metadata={"by": "test"})
            await agent.text("exec", command="echo other > f", sandbox_id=other)
            assert "no such file" in (await agent.error("read_file", path="f")).lower()
            listed = await agent.text("list_sandboxes")
            assert other in listed
            assert '"by": "test"' in listed

            perl = (
                "use IO::Socket::INET; $s=IO::Socket::INET->new(LocalAddr=>'127.0.0.1',LocalPort=>8000,Listen=>5);"
                'while($c=$s->accept){<$c>;print $c "HTTP/1.0 200 OK\\r\\n\\r\\nserved";close $c}'
            )
            await agent.text("write_file", path="s.pl", text=perl)
            await agent.text("exec", command="nohup perl s.pl >log 2>&1 </dev/null &")
            url = await agent.text("expose_port", port=8000)
            assert await agent.text("expose_port", port=8000) == url

            def served() -> bool:
                try:
                    return bool(urllib.request.urlopen(url, timeout=30).read() == b"served")
                except OSError:
                    return False

            await asyncio.to_thread(eventually, served, 30)
            await agent.text("kill_sandbox", sandbox_id=other)
            assert "ended" in await agent.error("exec", command="true", sandbox_id=other)
            assert "not a sandbox's id" in await agent.error("exec", command="true", sandbox_id="nonsense")
            assert "argument" in (await agent.error("exec")).lower(), "what is missing"

            # The default one is killed behind its back: said once, then there is another.
            (default,) = _live(shared_node)
            await agent.text("write_file", path="f", text="kept")
            await agent.text("pause_sandbox")
            assert shared_node.get(default["id"])["state"] == "paused"
            assert await agent.text("read_file", path="f") == "kept"
            await agent.text("pause_sandbox")
            assert "running" in await agent.text("resume_sandbox")
            assert shared_node.get(default["id"])["state"] == "running"
            shared_node.call("DELETE", f"/v1/sandboxes/{default['id']}")
            assert "new sandbox" in await agent.error("exec", command="true")
            assert await agent.text("exec", command="ls") == "[exit code 0]"
        eventually(lambda: not _live(shared_node), 30)

    run(test)


def test_host_paths_only_below_the_directory_that_was_allowed(shared_node: Node, tmp_path: Path) -> None:
    async def test() -> None:
        root = tmp_path / "shared"
        root.mkdir()
        (root / "in").write_bytes(b"\0in")
        (tmp_path / "secret").write_text("secret")
        (root / "link").symlink_to(tmp_path / "secret")
        (root / "tree").mkdir()
        (root / "tree" / "link").symlink_to(tmp_path)
        async with _agent(shared_node, "-t", "base", "--allow-host-paths", str(root)) as agent:
            await agent.text("upload", host_path="in", path="f")
            await agent.text("download", path="f", host_path=str(root / "out"))
            assert (root / "out").read_bytes() == b"\0in"
            for path in ("../secret", str(tmp_path / "secret"), "link", "tree", "/etc/passwd"):
                assert "not below" in await agent.error("upload", host_path=path, path="g")
            assert "not below" in await agent.error("download", path="f", host_path="../out")
        assert not (tmp_path / "out").exists()

    run(test)


def test_a_given_sandbox_outlives_the_agent(shared_node: Node) -> None:
    async def test() -> None:
        id = shared_node.create("base")
        async with _agent(shared_node, "--sandbox", id[:12]) as agent:
            await agent.text("exec", command="echo kept > f")
        assert shared_node.exec(id, "cat f")["stdout"] == "kept\n"
        shared_node.call("DELETE", f"/v1/sandboxes/{id}")

    run(test)


def test_a_first_call_tells_how_the_build_goes(nodes: Callable[..., Node]) -> None:
    """Of another shape than any that is built, so that there is something to build."""

    async def test() -> None:
        node = nodes().start()
        async with _agent(node, "-t", "base", "--memory-mib", "896") as agent:
            with contextlib.suppress(FileNotFoundError):
                for variant in (node.cache / "templates" / "base" / "keys").iterdir():
                    if json.loads((variant / "template.json").read_text()).get("memory_mib") == 896:
                        shutil.rmtree(variant)
            assert await agent.text("exec", command="echo built") == "built\n"
            assert [n for n, _ in agent.progress] == sorted({n for n, _ in agent.progress})
            assert any("boot" in said for _, said in agent.progress), agent.progress
            told = len(agent.progress)
            await agent.text("exec", command="true")
            assert len(agent.progress) == told
        eventually(lambda: not _live(node), 30)

    run(test)


def test_the_user_says_the_network_and_no_tool_does(shared_node: Node) -> None:
    wrong = [sys.executable, "-m", "llm4agents", "mcp", "--sandbox", "sbx_none", "--net", "public"]
    done = subprocess.run(wrong, env=shared_node.env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "keeps its own network" in done.stderr

    async def test() -> None:
        rule = "allow files.example"
        async with _agent(shared_node, "-t", "base", "--memory-mib", "256", "--net", rule) as agent:
            for tool in (await agent.client.list_tools()).tools:
                assert "network" not in json.dumps(tool.input_schema)
            await agent.text("exec", command="true")
            await agent.text("create_sandbox", template="base")
            assert [one["network"]["rules"] for one in _live(shared_node)] == [[rule], [rule]]
            for one in _live(shared_node):
                await agent.text("kill_sandbox", sandbox_id=one["id"])

    run(test)


def test_keep_leaves_it_paused(shared_node: Node) -> None:
    async def test() -> None:
        async with _agent(shared_node, "-t", "base", "--keep") as agent:
            await agent.text("write_file", path="f", text="kept")
        eventually(lambda: [one["state"] for one in _live(shared_node)] == ["paused"], 30)
        (kept,) = _live(shared_node)
        assert shared_node.exec(kept["id"], "cat f")["stdout"] == "kept"
        shared_node.call("DELETE", f"/v1/sandboxes/{kept['id']}")

    run(test)


def test_an_agent_that_dies_leaves_nothing(shared_node: Node) -> None:
    """SIGTERM with stdin left open, as hosts of MCP servers do it."""
    command = [sys.executable, "-m", "llm4agents", "mcp", "-t", "base"]
    process = subprocess.Popen(
        command, env=shared_node.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None

        def send(**message: Any) -> None:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]

        hello = {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "t", "version": "1"},
        }
        send(id=1, method="initialize", params=hello)
        assert json.loads(process.stdout.readline())["result"]["serverInfo"]["name"] == "llm4agents"
        send(method="notifications/initialized")
        send(id=2, method="tools/call", params={"name": "exec", "arguments": {"command": "echo one"}})
        assert json.loads(process.stdout.readline())["result"]["content"][0]["text"] == "one\n"
        assert len(_live(shared_node)) == 1
        process.terminate()
        began = time.monotonic()
        assert process.wait(20) == 0
        assert time.monotonic() - began < 15
        assert not _live(shared_node)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()  # type: ignore[union-attr]
        process.stdout.close()  # type: ignore[union-attr]
