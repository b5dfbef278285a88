"""An image that somebody brings, as a template and as sandboxes: from a registry with a password, by a server."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llm4agents import LLM4AgentsError, Sandbox, Template
from tests.oci.conftest import NAME, PASSWORD, Server
from tests.oci.make import Entry, Layout, folder, layer
from tests.support import Node, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]
MEMORY = 256
_SERVE = """
.globl _start
_start: mov $41, %eax; mov $2, %edi; mov $1, %esi; xor %edx, %edx; syscall
        mov %eax, %ebx; mov $49, %eax; mov %ebx, %edi; lea at(%rip), %rsi; mov $16, %edx; syscall
        mov $50, %eax; mov %ebx, %edi; mov $8, %esi; syscall
        mov $1, %eax; mov $1, %edi; lea text(%rip), %rsi; mov $6, %edx; syscall
        mov $34, %eax; syscall
at:     .byte 2, 0, 0x1f, 0x90, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
text:   .ascii "ready\\n"
"""
"""A static program that listens on port 8080, says so and waits."""
_WHERE = """
.globl _start
_start: mov $79, %eax; sub $256, %rsp; mov %rsp, %rdi; mov $256, %esi; syscall
        mov %eax, %edx; dec %edx; mov $1, %eax; mov $1, %edi; mov %rsp, %rsi; syscall
        mov $102, %eax; syscall
        mov $60, %edx; xchg %eax, %edi; mov %edx, %eax; syscall
"""
"""A static program that says its directory, and ends with the lowest bits of its uid."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    home = tmp_path_factory.mktemp("program")

    def made(source: str) -> bytes:
        subprocess.run(["as", "-o", home / "a.o", "-"], input=source.encode(), check=True)
        subprocess.run(["ld", "-static", "-o", home / "a", home / "a.o"], check=True)
        return (home / "a").read_bytes()

    return made


@pytest.fixture(scope="module")
def image(private: Server, program: Callable[[str], bytes], tmp_path_factory: pytest.TempPathFactory) -> str:
    tar = layer(
        Entry("serve", program(_SERVE), mode=0o755),
        Entry("where", program(_WHERE), mode=0o755),
        folder("srv/app"),
    )
    config = {
        "Entrypoint": ["/serve"],
        "Env": ["COLOUR=green"],
        "WorkingDir": "/srv/app",
        "User": "1000",
        "ExposedPorts": {"8080/tcp": {}},
    }
    layout = Layout(tmp_path_factory.mktemp("layout") / "l").image(tar, config=config)
    return private.push(layout, "shell-less:t", f"--dest-creds={NAME}:{PASSWORD}")


@pytest.fixture(scope="module")
def node(private: Server, shared_nodes: Callable[..., Node]) -> Iterator[Node]:
    made = shared_nodes(LLM4AGENTS_REGISTRIES=f"http://{private.host}").start()
    yield made
    made.http.delete("/v1/templates/t-image")


def test_an_image_without_a_shell_becomes_a_template(
    node: Node, private: Server, image: str, tmp_path: Path, program: Callable[[str], bytes]
) -> None:
    (tmp_path / "note").write_text("copied")
    recipe = (
        Template(directory=tmp_path)
        .from_image(image)
        .size(memory_mib=MEMORY)
        .network([])
        .copy("note", "/srv/app/")
        .run(["/where"], user="root")
        .start(ready=8080)
    )
    with sdk_of(node):
        with pytest.raises(LLM4AgentsError, match="wants a name and a password"):
            recipe.build("t-image")
        recipe.build("t-image", auth={"username": NAME, "password": PASSWORD})
        with Sandbox(template="t-image") as sandbox:
            # Whose it is and where, without a shell: as the image says.
            said = node.exec(sandbox.id, ["/where"])
            assert (said["stdout"], said["exit_code"]) == ("/srv/app", 1000 % 256)
            assert sandbox.files.read("/srv/app/note") == "copied"
            assert 8080 in [
                one["port"] for one in node.call("GET", f"/v1/sandboxes/{sandbox.id}/ports")["data"]
            ]
            none = node.http.post(f"/v1/sandboxes/{sandbox.id}/exec", json={"command": "true"})
            assert none.status_code == 400 and "/bin/sh" in none.text
    # What the registry was asked with is nowhere: not in the store, not in a log, not in the template.
    for path in [node.state, node.cache / "templates/t-image", node.cache / "index/oci"]:
        found = subprocess.run(
            ["grep", "-rlF", PASSWORD, str(path)], capture_output=True, text=True, check=False
        )
        assert not found.stdout, found.stdout


def test_a_registry_that_the_operator_has_not_named_is_not_dialled(node: Node, image: str) -> None:
    elsewhere = image.replace("127.0.0.1", "127.0.0.2")
    answer = node.http.post(
        "/v1/templates", json={"name": "t-image2", "recipe": {"from": {"image": elsewhere}}}
    )
    assert "LLM4AGENTS_REGISTRIES" in answer.text and "loopback" in answer.text, answer.text
