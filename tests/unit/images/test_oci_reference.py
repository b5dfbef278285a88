"""What people write for an image, and where that is; what manifests and configurations may say."""

from __future__ import annotations

from typing import Any

import pytest

from llm4agents import limits
from llm4agents.errors import InvalidRequestError
from llm4agents.images.oci import Registries, is_local, manifest
from llm4agents.images.oci.image import OciConfig
from llm4agents.images.oci.reference import Local, Remote, parse

HEX = "ab" * 32
NONE = Registries()
KNOWN = Registries.parse(
    "mirror.example/all", "http://plain.example:5000, hub.example=registry.hub.example/library, own.example"
)


def remote(text: str, registries: Registries = NONE) -> Remote:
    found = parse(text, registries)
    assert isinstance(found, Remote)
    return found


@pytest.mark.parametrize(
    ("text", "endpoint", "repository", "which"),
    [
        ("a.example/b", "a.example", "b", "latest"),
        ("a.example:5000/b/c-d__e:v1.2_X", "a.example:5000", "b/c-d__e", "v1.2_X"),
        ("docker://a.example/b", "a.example", "b", "latest"),
        ("localhost/b:t", "localhost", "b", "t"),
        (f"a.example/b@sha256:{HEX}", "a.example", "b", f"sha256:{HEX}"),
        (f"a.example/b:t@sha256:{HEX}", "a.example", "b", f"sha256:{HEX}"),
    ],
)
def test_a_reference_says_where_it_is(text: str, endpoint: str, repository: str, which: str) -> None:
    found = remote(text)
    assert (found.endpoint, found.repository, found.which) == (endpoint, repository, which)
    assert not found.known


def test_registries_are_the_operators_words() -> None:
    assert remote("debian:12", KNOWN).endpoint == "mirror.example"
    assert remote("a/b:12", KNOWN).repository == "all/a/b"
    assert remote("plain.example:5000/b", KNOWN).plain and remote("plain.example:5000/b", KNOWN).known
    moved = remote("hub.example/debian", KNOWN)
    assert (moved.host, moved.endpoint, moved.repository) == (
        "hub.example",
        "registry.hub.example",
        "library/debian",
    )
    assert remote("own.example/b", KNOWN).known and not remote("own.example/b", KNOWN).plain
    assert (
        remote("127.0.0.1:5000/b").plain and remote("[::1]:5000/b").plain and not remote("a.example/b").plain
    )
    with pytest.raises(InvalidRequestError, match="LLM4AGENTS_REGISTRY"):
        parse("debian:12", NONE)
    for text in ("x y", "=a.example", "a.example=", "http:///x", "a.example=ftp://b.example"):
        with pytest.raises(InvalidRequestError, match="is no registry"):
            Registries.parse(None, text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "a.example/",
            "a.example/B",
            "a.example/b:",
            "a.example/b:a/b",
            "a.example/b@sha256:ab",
            "a.example/../b",
        ),
        *(
            "https://a.example/b",
            "a.example/b?c",
            "a.example/b c",
            "user:pass@a.example/b",
            "a.example/-b",
            "oci:",
        ),
        "a.example/" + "b" * 300,
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse(text, KNOWN)


def test_images_on_disk() -> None:
    assert parse("oci:/a/b", NONE) == Local("oci", "/a/b", None)
    assert parse("oci-archive:/a/b.tar:t", NONE) == Local("oci-archive", "/a/b.tar", "t")
    assert parse("docker-archive:/a:b/c", NONE) == Local("docker-archive", "/a:b/c", None)
    assert is_local("oci:/a") and is_local("docker-archive:/a") and not is_local("oci.example/a")


# -- manifests


def described(**more: Any) -> dict[str, Any]:
    return {"mediaType": "", "digest": f"sha256:{HEX}", "size": 7, **more}


def entry(platform: str | None, digest: str = HEX) -> dict[str, Any]:
    found = described(digest=f"sha256:{digest}")
    if platform:
        system, architecture, *variant = platform.split("/")
        found["platform"] = {
            "os": system,
            "architecture": architecture,
            **({"variant": variant[0]} if variant else {}),
        }
    return found


def test_an_index_has_one_for_each_platform() -> None:
    index = {
        "manifests": [
            entry("linux/arm64", "cd" * 32),
            entry("unknown/unknown", "ef" * 32),
            entry("linux/amd64"),
        ]
    }
    assert manifest.choose(index, "linux/amd64").hex == HEX
    assert manifest.choose({"manifests": [entry(None)]}, "linux/amd64").hex == HEX
    assert manifest.choose({"manifests": [entry("linux/arm64/v8")]}, "linux/arm64").hex == HEX
    with pytest.raises(
        InvalidRequestError, match="none for linux/riscv64; it is for linux/amd64, linux/arm64"
    ):
        manifest.choose(index, "linux/riscv64")


LAYER = described(mediaType="application/vnd.oci.image.layer.v1.tar+gzip")
WHOLE = {"config": described(mediaType="application/vnd.oci.image.config.v1+json"), "layers": [LAYER]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": []}, "no layers"),
        ({"layers": [LAYER] * (limits.OCI_LAYERS_MAX + 1)}, "more than"),
        ({"layers": [{**LAYER, "size": -1}]}, "no sane size"),
        ({"layers": [{**LAYER, "size": limits.OCI_LAYER_BYTES_MAX + 1}]}, "is the most"),
        ({"layers": [{**LAYER, "size": limits.OCI_LAYER_BYTES_MAX}] * 3}, "GiB together"),
        ({"layers": [{**LAYER, "digest": "sha256:../../etc/passwd"}]}, "no SHA-256"),
        ({"layers": [{**LAYER, "digest": f"sha512:{HEX}{HEX}"}]}, "no SHA-256"),
        ({"layers": [{**LAYER, "mediaType": LAYER["mediaType"] + "+encrypted"}]}, "of kind"),
        (
            {"layers": [{**LAYER, "mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"}]},
            "elsewhere",
        ),
        ({"config": described(mediaType="application/vnd.example.chart")}, "artifact"),
        ({"config": {**WHOLE["config"], "size": limits.OCI_DOCUMENT_BYTES_MAX + 1}}, "is the most"),
        ({"config": None}, "described by no object"),
    ],
)
def test_a_manifest_that_is_not_in_order_is_refused(change: dict[str, Any], words: str) -> None:
    assert manifest.manifest(WHOLE, "d").layers[0].hex == HEX
    with pytest.raises(InvalidRequestError, match=words):
        manifest.manifest({**WHOLE, **change}, "d")


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"[" * 200_000, b"\xff"])
def test_documents_that_are_none(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="no JSON object"):
        manifest.document(data, "manifest")
    with pytest.raises(InvalidRequestError, match="version 1"):
        manifest.is_index({"schemaVersion": 1}, "")


def configured(**config: Any) -> OciConfig:
    body = {
        "os": "linux",
        "architecture": "amd64",
        "rootfs": {"diff_ids": [f"sha256:{HEX}"]},
        "config": config,
    }
    return manifest.configuration(body, 1, "linux/amd64")


def test_a_configuration_says_how_it_is_run() -> None:
    said = configured(
        Env=["A=b=c", "PATH=/x"],
        User="app:staff",
        WorkingDir="srv/app/",
        Entrypoint=["/x", "y"],
        Cmd=["z"],
        ExposedPorts={"80/tcp": {}, "53/udp": {}, "8080": {}, "99999/tcp": {}},
        Labels={"a": "b"},
        Volumes={"/data": {}, "../x": {}},
    )
    assert said.env == {"A": "b=c", "PATH": "/x"} and (said.user, said.group) == ("app", "staff")
    assert said.workdir == "/srv/app" and said.ports == (80, 8080) and said.volumes == ("/data",)
    assert (
        said.entrypoint + said.cmd == ("/x", "y", "z") and said.labels == {"a": "b"} and said.diffs == (HEX,)
    )
    assert configured().user is None and configured().workdir == "/"


@pytest.mark.parametrize(
    "config",
    [
        {"Env": ["A"]},
        {"Env": "A=b"},
        {"Env": ["A=" + "x" * limits.ENV_BYTES_MAX]},
        {"Cmd": "x"},
        {"Cmd": [1]},
        {"Entrypoint": ["a\0b"]},
        {"WorkingDir": "/a/../../b"},
        {"User": 7},
    ],
)
def test_a_configuration_that_is_not_in_order_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        configured(**config)


def test_a_configuration_is_that_of_its_manifest_and_platform() -> None:
    body = {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": [f"sha256:{HEX}"]}}
    with pytest.raises(InvalidRequestError, match="1 layers and its manifest of 2"):
        manifest.configuration(body, 2, "linux/amd64")
    with pytest.raises(InvalidRequestError, match="for linux/amd64, not for linux/arm64"):
        manifest.configuration(body, 1, "linux/arm64")
