"""Images from a real registry, and from the other places there are: what is in them is in the root file system."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llm4agents.errors import ForbiddenError, InvalidRequestError, NotFoundError
from llm4agents.images.cache import Cache
from llm4agents.images.oci import Auth, OciRootfs, Registries, rootfs
from tests.oci.conftest import NAME, PASSWORD, Server
from tests.oci.make import Entry, Layout, folder, hard, layer, link, sha


def made(image: str, cache: Cache, **more: object) -> OciRootfs:
    return asyncio.run(rootfs(image, cache, **more))  # type: ignore[arg-type]


def files(image: OciRootfs, to: Path) -> Path:
    subprocess.run(["fsck.erofs", f"--extract={to}", str(image.path)], check=True, capture_output=True)
    return to


def unfinished(cache: Cache) -> list[str]:
    return [path.name for path in cache.tmp.iterdir()] if cache.tmp.exists() else []


def test_an_image_made_by_umoci(registry: Server, cache: Cache, tmp_path: Path) -> None:
    """Layers of changes: what was removed is gone, what was changed has changed; in every form it is kept in."""
    layout, bundle = tmp_path / "layout", tmp_path / "bundle"

    def umoci(*arguments: str) -> None:
        subprocess.run(["umoci", *arguments], check=True, capture_output=True)

    umoci("init", "--layout", str(layout))
    umoci("new", "--image", f"{layout}:t")
    umoci("unpack", "--image", f"{layout}:t", str(bundle))
    root = bundle / "rootfs"
    for name in ("bin", "srv/a", "srv/b"):
        (root / name).mkdir(parents=True)
        (root / name / "one").write_text("one")
        (root / name / "two").write_bytes(os.urandom(50_000))
    os.link(root / "srv/a/two", root / "srv/b/same")
    umoci("repack", "--refresh-bundle", "--image", f"{layout}:t", str(bundle))
    (root / "srv/a/one").unlink()
    (root / "srv/b/one").write_text("changed")
    subprocess.run(["rm", "-r", str(root / "bin")], check=True)
    (root / "bin").symlink_to("srv/b")
    umoci("repack", "--image", f"{layout}:t", str(bundle))
    options = (
        "--config.entrypoint=/bin/one",
        "--config.env=A=b",
        "--config.user=33:44",
        "--config.workingdir=/w",
    )
    umoci("config", "--image", f"{layout}:t", *options, "--config.exposedports=8080/tcp")

    remote = registry.push(f"oci:{layout}:t", "umoci:t")
    found = made(remote, cache)
    assert (
        found.config.env == {"A": "b"}
        and found.config.argv == ("/bin/one",)
        and found.config.ports == (8080,)
    )
    assert (found.config.user, found.config.group, found.config.workdir) == ("33", "44", "/w")
    out = files(found, tmp_path / "out")
    assert not (out / "srv/a/one").exists() and (out / "srv/b/one").read_text() == "changed"
    assert (out / "bin").readlink() == Path("srv/b") and (out / "w").is_dir()
    assert (out / "srv/b/same").read_bytes() == (out / "srv/a/two").read_bytes()

    # The same files give the same bytes, whatever they were kept in.
    saved, archive = tmp_path / "saved.tar", tmp_path / "archive.tar"
    copy = ["skopeo", "copy", "-q", "--insecure-policy", f"oci:{layout}:t"]
    subprocess.run([*copy, f"docker-archive:{saved}:x:t"], check=True, capture_output=True)
    subprocess.run([*copy, f"oci-archive:{archive}"], check=True, capture_output=True)
    docker = registry.push(f"oci:{layout}:t", "docker:t", "--format=v2s2")
    for image in (f"docker-archive:{saved}", f"oci-archive:{archive}", f"oci:{layout}:t", docker):
        assert made(image, cache).digest == found.digest
    with pytest.raises(InvalidRequestError, match="it has"):
        made(f"oci:{layout}:other", cache)
    with pytest.raises(NotFoundError, match="there is no"):
        made(f"{registry.host}/umoci:other", cache)
    assert not unfinished(cache)


def test_an_index_of_several_platforms(registry: Server, cache: Cache, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout")
    arms = layout.manifest([layer(Entry("which", b"arm"))], architecture="arm64")
    intel = layout.manifest([layer(Entry("which", b"amd"))])
    image = registry.push(layout.index((arms, "arm64"), (intel, "amd64")), "many:t", "--all")
    found = made(image, cache)
    assert (files(found, tmp_path / "x") / "which").read_bytes() == b"amd"
    assert found.manifest == intel["digest"]
    # By its digest too, whatever the tag has become since; and for another platform.
    registry.push(layout.image(layer(Entry("which", b"new")), tag="new"), "many:t")
    assert made(f"{registry.host}/many@{found.manifest}", cache).digest == found.digest
    assert made(f"{registry.host}/many:t", cache).digest != found.digest
    other = made(f"{registry.host}/many@{arms['digest']}", cache, platform="linux/arm64")
    assert (files(other, tmp_path / "y") / "which").read_bytes() == b"arm"
    with pytest.raises(InvalidRequestError, match="for linux/arm64, not for linux/amd64"):
        made(f"{registry.host}/many@{arms['digest']}", cache)


def test_names_without_a_host_are_the_operators_default(
    registry: Server, cache: Cache, tmp_path: Path
) -> None:
    registry.push(Layout(tmp_path / "layout").image(layer(Entry("f", b"x"))), "team/app:t")
    for known in (
        Registries.parse(registry.host, ""),
        Registries.parse(f"{registry.host}/team", ""),
        Registries.parse(None, f"hub.example={registry.host}/team"),
    ):
        name = "team/app:t" if known.default == registry.host else "app:t"
        assert made(name if known.default else f"hub.example/{name}", cache, registries=known).bytes


def test_a_registry_with_a_password(private: Server, cache: Cache, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout").image(layer(Entry("f", b"x")))
    image = private.push(layout, "app:t", f"--dest-creds={NAME}:{PASSWORD}")
    with pytest.raises(ForbiddenError, match="wants a name and a password"):
        made(image, cache)
    with pytest.raises(ForbiddenError, match="are the credentials right"):
        made(image, cache, auth=Auth(NAME, "wrong"))
    assert made(image, cache, auth=Auth(NAME, PASSWORD)).bytes
    assert PASSWORD not in repr(Auth(NAME, PASSWORD))
    # What is in the cache is only for who may still pull it.
    with pytest.raises(ForbiddenError):
        made(image, cache)


def test_a_blob_that_was_changed_in_the_registry_is_refused(
    registry: Server, cache: Cache, tmp_path: Path
) -> None:
    tar = layer(Entry("f", os.urandom(2_000_000)))
    layout = Layout(tmp_path / "layout")
    image = registry.push(layout.image(tar, how="tar"), "tampered:t", "--preserve-digests")
    where = registry.blob(sha(tar))
    good = where.read_bytes()
    for bad in (good[:-700] + b"x" + good[-699:], good[:-512]):
        where.write_bytes(bad)
        with pytest.raises(Exception, match=r"is sha256:|ended after|is shorter"):
            made(image, cache)
        assert cache.blob(sha(tar).removeprefix("sha256:")) is None and not unfinished(cache)
    where.write_bytes(good)
    assert made(image, cache).bytes


def test_layers_are_what_the_configuration_says(cache: Cache, tmp_path: Path) -> None:
    one, two = layer(Entry("f", b"1")), layer(Entry("f", b"2"))
    layout = Layout(tmp_path / "layout")
    with pytest.raises(InvalidRequestError, match=r"layer 1 unpacks to sha256:"):
        made(layout.image(one, diffs=[sha(two)]), cache)
    layout.where(sha(two)).write_bytes(two)
    image = layout.image(two, tag="two", how="tar")
    layout.where(sha(two)).write_bytes(one)
    with pytest.raises(InvalidRequestError, match="not what it is to be"):
        made(image, cache)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([Entry("dev/null", kind=b"3", major=1, minor=3)], "layer 1 has a device, dev/null"),
        ([Entry("../../x", b"x")], "leads out of it"),
        ([link("etc2", "/etc"), hard("etc2/h", "../../../etc/shadow")], "no file of it"),
    ],
)
def test_what_is_refused_names_the_layer_and_the_file(
    entries: list[Entry], words: str, cache: Cache, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        made(Layout(tmp_path / "layout").image(layer(*entries)), cache)
    assert not unfinished(cache)


def test_bombs_are_refused_while_they_are_unpacked(cache: Cache, tmp_path: Path) -> None:
    zeros = layer(Entry("zeros", bytes(300 << 20)))
    with pytest.raises(InvalidRequestError, match="a bomb"):
        made(Layout(tmp_path / "layout").image(zeros), cache)
    assert not unfinished(cache)


def test_a_link_to_the_hosts_files_writes_the_images(cache: Cache, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    image = Layout(tmp_path / "layout").image(
        layer(link("out", str(tmp_path)), folder("d")),
        layer(Entry("out/victim", b"theirs"), link("d/up", "../../../../../.." + str(tmp_path))),
        layer(Entry("d/up/victim", b"theirs too")),
    )
    out = files(made(image, cache), tmp_path / "x")
    assert victim.read_text() == "mine" and (out / str(victim).lstrip("/")).read_bytes() == b"theirs too"


def test_two_who_ask_at_once_make_it_once(registry: Server, cache: Cache, tmp_path: Path) -> None:
    image = registry.push(
        Layout(tmp_path / "layout").image(layer(Entry("f", os.urandom(100_000)))), "twice:t"
    )
    said: list[str] = []

    async def both() -> list[OciRootfs]:
        def tell(step: str, detail: str, fraction: float | None) -> None:
            said.append(step + " " + detail)

        return await asyncio.gather(*(rootfs(image, cache, tell) for _ in range(2)))

    first, second = asyncio.run(both())
    assert first == second and len([line for line in said if "unpacking layer 1" in line]) == 1


def test_a_cancelled_call_leaves_nothing(cache: Cache, tmp_path: Path) -> None:
    image = Layout(tmp_path / "layout").image(layer(Entry("f", os.urandom(30_000_000))))

    async def cancelled() -> None:
        begun = asyncio.Event()

        def tell(step: str, detail: str, fraction: float | None) -> None:
            if step == "rootfs":
                begun.set()

        task = asyncio.ensure_future(rootfs(image, cache, tell))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert not unfinished(cache) and not list(cache.index.glob("oci/*"))
    assert made(image, cache).bytes


def test_who_reads_layers_can_open_nothing(tmp_path: Path) -> None:
    """The worker's confinement: no file by its name (as root), no new processes, no privileges."""
    script = (
        "import json, os, sys\nfrom pathlib import Path\nfrom llm4agents.images.oci import worker\n"
        "worker.confine(Path(sys.argv[1]))\nfound = {'uid': os.getresuid()}\n"
        "for name, what in (('open', lambda: open('/etc/passwd')), ('fork', os.fork)):\n"
        "    try:\n        what()\n        found[name] = 'did'\n"
        "    except OSError as error:\n        found[name] = type(error).__name__\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    if os.geteuid() == 0:  # the root is there, and not for nobody to look into
        assert found == {
            "uid": [65534] * 3,
            "open": "PermissionError",
            "fork": "BlockingIOError",
        }
