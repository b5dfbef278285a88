"""What a template's machines take is what its frozen machine says, not what is written beside it."""

import json
from pathlib import Path

from llm4agents.config import Settings
from llm4agents.engine import parts
from llm4agents.engine.templates import Templates
from llm4agents.vmm import snapshot
from llm4agents.vmm.base import MachineSpec, Snapshot
from llm4agents.vmm.choice import Drivers


def test_an_imported_template_is_counted_by_the_machine_in_it(tmp_path: Path) -> None:
    """A bundle that says 256 MiB and whose machine has 4096 would take no more of a quota than the one."""
    settings = Settings(*(tmp_path / name for name in ("state", "cache", "run")))
    templates = Templates(settings, Drivers(settings))
    digest, rootfs = templates.cache.ingest_bytes(b"rootfs")
    path = templates.cache.templates / "mine" / "keys" / "k1"
    (path / parts.SNAPSHOT).mkdir(parents=True)
    for name in (parts.UPPER, parts.EMPTY):
        (path / name).touch()
    machine = MachineSpec(vcpus=2, memory_mib=4096, kernel=Path("/k"), initrd=Path("/i"), disks=())
    snapshot.write_manifest(Snapshot(path / parts.SNAPSHOT, machine, {"driver": "qemu"}, 1))
    said = parts.Variant(path, "mine", "k1", 1, 256, 0.0, rootfs, digest, {}, [], [], [], vmm="firecracker")
    parts.save(said, path)

    found = templates.find_at(path)
    assert found is not None
    assert found[0].shape == parts.Shape("mine", 2, 4096, "qemu")

    manifest = path / parts.SNAPSHOT / snapshot.MANIFEST
    body = json.loads(manifest.read_text())
    body["spec"]["memory_mib"] = "4096"
    manifest.write_text(json.dumps(body))
    assert snapshot.load(path / parts.SNAPSHOT).spec.memory_mib == 4096


def test_of_a_shape_the_one_that_is_cloned_is_told(tmp_path: Path) -> None:
    """After an upgrade the older one is there as long as a paused sandbox lies on it."""
    settings = Settings(*(tmp_path / name for name in ("state", "cache", "run")))
    templates = Templates(settings, Drivers(settings))
    digest, rootfs = templates.cache.ingest_bytes(b"rootfs")
    for key, memory_mib, at in (("newer", 256, 2.0), ("older", 256, 1.0), ("larger", 512, 1.0)):
        path = templates.cache.templates / "base" / "keys" / key
        path.mkdir(parents=True)
        for name in (parts.UPPER, parts.EMPTY):
            (path / name).touch()
        parts.save(
            parts.Variant(path, "base", key, 1, memory_mib, at, rootfs, digest, {}, [], [], [], vmm="qemu"),
            path,
        )

    def told() -> list[str]:
        keys = [one["key"] for one in templates.described("base")]
        assert keys == [one["key"] for one in templates.catalogue() if one["name"] == "base"]
        return sorted(keys)

    assert told() == ["larger", "newer"]
    (templates.cache.templates / "base" / "pinned-1-256-qemu").write_text("older")
    assert told() == ["larger", "older"]
