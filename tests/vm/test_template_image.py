"""A template from an OCI image without shell, libc or anything but one program, which is made here."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm4agents import Template, TemplateBuildError
from tests.support import Node, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")]
PROGRAM = r"""
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "serve")) {
        FILE *file = fopen(argv[1], "w");
        if (!file) { perror(argv[1]); return 3; }
        fprintf(file, "made by a step, FROM_IMAGE=%s\n", getenv("FROM_IMAGE"));
        return fclose(file);
    }
    char line[80] = "", where[200] = "";
    FILE *file = fopen("made", "r");
    if (file) fgets(line, sizeof line, file);
    printf("uid %d in %s: %s", getuid(), getcwd(where, sizeof where), line);
    fflush(stdout);
    if (argc < 2) return 0;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(8080)};
    int server = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(server, (void *)&at, sizeof at) || listen(server, 5)) { perror("listen"); return 4; }
    for (;;) pause();
}
"""


def layout(top: Path) -> Path:
    """An OCI image layout whose one layer has one static program."""
    (top / "program.c").write_text(PROGRAM)
    subprocess.run(["gcc", "-static", "-O1", "-w", "-o", top / "program", top / "program.c"], check=True)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("program")
        info.size, info.mode = (top / "program").stat().st_size, 0o755
        archive.addfile(info, io.BytesIO((top / "program").read_bytes()))
    image = top / "image"
    blobs = image / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {
            "mediaType": f"application/vnd.oci.image.{kind}",
            "digest": f"sha256:{digest}",
            "size": len(data),
        }

    layer = blob(gzip.compress(buffer.getvalue()), "layer.v1.tar+gzip")
    says = {"Env": ["FROM_IMAGE=yes"], "Entrypoint": ["/program"], "Cmd": ["serve"], "WorkingDir": "/data"}
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": says,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(buffer.getvalue()).hexdigest()}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(json.dumps(config).encode(), "config.v1+json"),
        "layers": [layer],
    }
    found = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    index = {
        "schemaVersion": 2,
        "manifests": [found | {"annotations": {"org.opencontainers.image.ref.name": "one"}}],
    }
    (image / "index.json").write_text(json.dumps(index))
    (image / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    return image


def test_an_image_of_one_program(shared_nodes: Callable[..., Node], tmp_path: Path) -> None:
    node = shared_nodes().start()
    begun = Template().from_image(f"oci:{layout(tmp_path)}:one").size(memory_mib=256).network([])
    (tmp_path / "file").write_text("copied\n")
    with sdk_of(node):
        with pytest.raises(TemplateBuildError, match="is there a shell in it"):
            begun.run("echo nobody runs this").build("t-image")
        begun.copy(tmp_path / "file", "/data/").run(["/program", "made"]).start(ready=8080).build("t-image")
    try:
        sandbox = node.create("t-image")
        answer = node.exec(sandbox, ["/program"])
        assert answer["stdout"] == "uid 0 in /data: made by a step, FROM_IMAGE=yes\n", answer
        assert 8080 in [one["port"] for one in node.call("GET", f"/v1/sandboxes/{sandbox}/ports")["data"]]
        assert node.http.get(f"/v1/sandboxes/{sandbox}/files", params={"path": "file"}).text == "copied\n"
        process = node.call("GET", f"/v1/sandboxes/{sandbox}/processes")["data"][0]
        assert (process["argv"], process["user"], process["cwd"]) == (["/program", "serve"], "root", "/data")
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")
    finally:
        node.call("DELETE", "/v1/templates/t-image")
