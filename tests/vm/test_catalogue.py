"""The catalogue: of each built-in template a hello-world that is compiled or run in a clone, a server reached through a
port where it has one, and a package from the registry that this host uses. `browser` has a file of its own.

One sandbox for each template, for all that is asserted of it.
"""

from __future__ import annotations

import subprocess
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llm4agents import Sandbox
from llm4agents.images import spec
from tests.support import Node, eventually, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]


@pytest.fixture(scope="module", autouse=True)
def server(shared_node: Node) -> Iterator[None]:
    with sdk_of(shared_node):
        yield


def says(sandbox: Sandbox, command: str, timeout: float = 240) -> str:
    done = sandbox.exec(["/bin/bash", "-c", command], timeout=timeout)
    assert done.exit_code == 0, (done.stdout, done.stderr)
    return done.stdout


def registry_of(*command: str) -> bool:
    """Whether this host's own tool runs: the profile `packages` asks it for its registry, and has none without it."""
    try:
        runs = subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except OSError:
        runs = False
    if not runs:
        # It may be there and not run: rustup's stand-in for a toolchain that is not installed.
        warnings.warn(f"{command[0]} does not run on this host: nothing was installed with it", stacklevel=2)
    return runs


@contextmanager
def serving(sandbox: Sandbox, command: str, port: int = 8000) -> Iterator[str]:
    """The URL here of a server that was started in there, once it answers."""
    process = sandbox.processes.start(["/bin/bash", "-c", f"exec {command}"])
    with sandbox.ports.forward(port) as forward:

        def up() -> bool:
            try:
                fetch(forward.url)
            except OSError:
                assert process.refresh().running, process.read()
                return False
            return True

        eventually(up, 120)
        yield forward.url
    process.kill()


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def test_there_is_each_of_them(shared_node: Node) -> None:
    found = {one["name"]: one for one in shared_node.call("GET", "/v1/templates")["data"]}
    assert set(spec.BUILTIN) <= set(found)
    for name, wanted in spec.BUILTIN.items():
        one = found[name]
        assert one["description"] == wanted.description and one["languages"] == list(wanted.languages)
        assert one["memory_mib"] and one["vcpus"]


def test_deno() -> None:
    with Sandbox("deno", network="packages") as box:
        box.files.write("hello.ts", "const word: string = 'hello'; console.log(`${word} from Deno`)\n")
        assert says(box, "deno run hello.ts") == "hello from Deno\n"
        box.files.write(
            "serve.ts", "Deno.serve({ port: 8000, hostname: '127.0.0.1' }, () => new Response('deno here'))\n"
        )
        with serving(box, "deno run --allow-net serve.ts") as url:
            assert fetch(url) == "deno here"


def test_bun() -> None:
    with Sandbox("bun", network="packages") as box:
        box.files.write("hello.ts", "const word: string = 'hello'; console.log(`${word} from Bun`)\n")
        assert says(box, "bun run hello.ts") == "hello from Bun\n"
        box.files.write(
            "serve.ts",
            "Bun.serve({ port: 8000, hostname: '127.0.0.1', fetch: () => new Response('bun here') })\n",
        )
        with serving(box, "bun run serve.ts") as url:
            assert fetch(url) == "bun here"
        if registry_of("npm", "--version"):
            box.files.write("odd.ts", "import isOdd from 'is-odd'; console.log(isOdd(3))\n")
            assert says(box, "bun add is-odd@3.0.1 >/dev/null 2>&1 && bun run odd.ts").strip() == "true"


def test_node() -> None:
    with Sandbox("node") as box:
        box.files.write("hello.ts", "const word: string = 'hello'; console.log(`${word} from Node`)\n")
        assert says(box, "node hello.ts") == "hello from Node\n"
        box.files.write(
            "serve.mjs",
            "import { createServer } from 'node:http';\n"
            "createServer((_, answer) => answer.end('node here')).listen(8000, '127.0.0.1');\n",
        )
        with serving(box, "node serve.mjs") as url:
            assert fetch(url) == "node here"


def test_go() -> None:
    with Sandbox("go", network="packages") as box:
        box.files.write(
            "hello/main.go",
            'package main\n\nimport "fmt"\n\nfunc main() { fmt.Println("hello from Go") }\n',
        )
        says(box, "cd hello && go mod init hello && go build -o hello .")
        assert says(box, "./hello/hello") == "hello from Go\n"
        if registry_of("go", "version"):
            found = says(box, "cd hello && go mod download -json rsc.io/quote@v1.5.2")
            assert '"Version": "v1.5.2"' in found and '"Error"' not in found


def test_rust() -> None:
    with Sandbox("rust", network="packages") as box:
        assert says(box, "cargo new --quiet hello && cd hello && cargo run --quiet").startswith(
            "Hello, world!"
        )
        if registry_of("cargo", "--version"):
            says(box, "cd hello && echo 'cfg-if = \"=1.0.0\"' >> Cargo.toml && cargo fetch")
            assert "cfg-if" in says(box, "cd hello && cargo tree --offline")


def test_java() -> None:
    with Sandbox("java") as box:
        box.files.write(
            "Hello.java",
            "import com.sun.net.httpserver.HttpServer;\n"
            "import java.net.InetSocketAddress;\n"
            "public class Hello {\n"
            "    public static void main(String[] words) throws Exception {\n"
            '        System.out.println("hello from Java");\n'
            "        if (words.length == 0) return;\n"
            '        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", 8000), 0);\n'
            '        server.createContext("/", exchange -> {\n'
            '            byte[] body = "java here".getBytes();\n'
            "            exchange.sendResponseHeaders(200, body.length);\n"
            "            exchange.getResponseBody().write(body);\n"
            "            exchange.close();\n"
            "        });\n"
            "        server.start();\n"
            "    }\n"
            "}\n",
        )
        assert says(box, "javac Hello.java && java Hello") == "hello from Java\n"
        assert says(box, '"$JAVA_HOME"/bin/java -version 2>&1').startswith("openjdk")
        # What stands in for a host that has a credential is trusted by Java, too, by its own store.
        listed = says(box, "keytool -list -cacerts -storepass changeit 2>/dev/null")
        assert "llm4agents-node" in listed and "trustedCertEntry" in listed
        with serving(box, "java Hello serve") as url:
            assert fetch(url) == "java here"


def test_coding() -> None:
    with Sandbox("coding") as box:
        assert box.info().memory_mib == 2_048  # its own, since nothing was said
        box.files.write("hello.cc", '#include <cstdio>\nint main() { std::puts("hello from C++"); }\n')
        box.files.write("Makefile", "hello: hello.cc\n\tc++ -o hello hello.cc\n")
        assert says(box, "make -s && ./hello") == "hello from C++\n"
        assert says(box, "git init -q . && git add . && rg -l 'from C' && fd -e cc") == "hello.cc\nhello.cc\n"
        assert says(box, "python3 -c 'print(6*7)'; node -p 6*7; echo '{\"a\":42}' | jq .a") == "42\n42\n42\n"
        assert says(box, "sqlite3 :memory: 'select 6*7'; npm --version; tmux -V").startswith("42\n")
        assert says(box, "python3 -m venv env && env/bin/python -c 'import pip; print(1)'") == "1\n"
        with serving(box, "python3 -m http.server 8000 --bind 127.0.0.1") as url:
            assert "hello from C++" in fetch(f"{url}hello.cc")
