"""Modules load after what they depend on, without what is built in; a kernel that lacks one says which."""

from __future__ import annotations

import struct

import pytest

from llm4agents.errors import HostSetupError
from llm4agents.images import kmod
from llm4agents.images.kmod import Module, canonical, depends_of, load_order, modinfo


def elf_with(sections: dict[bytes, bytes]) -> bytes:
    """A 64-bit ELF with those sections and the one that has their names."""
    names = b"\0"
    body = bytearray(64)
    headers = []
    for name, data in {**sections, b".shstrtab": b""}.items():
        at = len(names)
        names += name + b"\0"
        headers.append((at, len(body), len(data)))
        body += data
    headers[-1] = (headers[-1][0], len(body), len(names))
    body += names
    table = len(body)
    for at, offset, size in headers:
        body += struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, offset, size, 0, 0, 1, 0)
    body[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", body, 0x28, table)
    struct.pack_into("<HHH", body, 0x3A, 64, len(headers), len(headers) - 1)
    return bytes(body)


def modules(**depends: str) -> dict[str, Module]:
    return {name: Module(name, f"kernel/{name}.ko", tuple(d.split())) for name, d in depends.items()}


def names(order: list[Module]) -> list[str]:
    return [module.name for module in order]


def test_modinfo_is_read_from_the_module() -> None:
    info = modinfo(
        elf_with({b".text": b"abc", b".modinfo": b"license=GPL\0depends=lz4-hc,crc16\0depends=no\0\0"})
    )
    assert info["license"] == "GPL"
    assert depends_of(info) == ("lz4_hc", "crc16")
    assert depends_of({"depends": ""}) == ()


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + b"\xff" * 100, elf_with({b".text": b""})]
)
def test_what_is_no_module_is_refused(data: bytes) -> None:
    with pytest.raises(HostSetupError, match="could not be read"):
        modinfo(data)


@pytest.mark.parametrize("name", ["virtio-rng", "virtio_rng.ko", "kernel/drivers/char/virtio-rng.ko.xz"])
def test_a_name_has_one_form(name: str) -> None:
    assert canonical(name) == "virtio_rng"


def test_dependencies_come_first_and_once() -> None:
    have = modules(erofs="libcrc32c lz4", overlay="", libcrc32c="", lz4="libcrc32c")
    assert names(load_order(["erofs", "overlay"], [], have, frozenset())) == [
        "libcrc32c",
        "lz4",
        "erofs",
        "overlay",
    ]


def test_what_is_built_in_is_left_out() -> None:
    builtin = kmod.builtin_names("kernel/fs/ext4/ext4.ko\nkernel/drivers/char/virtio-rng.ko\n")
    assert load_order(["ext4", "virtio_rng"], [], {}, builtin) == []


def test_the_virtio_core_leads_even_before_optional_ones() -> None:
    have = modules(
        virtio_ring="", virtio="virtio_ring", virtio_mmio="virtio", crc32c_generic="", ext4="crc32c_generic"
    )
    order = load_order(
        ["virtio_ring", "virtio", "virtio_mmio", "ext4"], ["crc32c-generic"], have, frozenset()
    )
    assert names(order) == ["virtio_ring", "virtio", "virtio_mmio", "crc32c_generic", "ext4"]


def test_an_optional_one_may_be_missing_a_wanted_one_not() -> None:
    assert load_order([], ["crc32c_generic"], {}, frozenset()) == []
    with pytest.raises(HostSetupError, match=r"no module lz4 \(needed by erofs\)"):
        load_order(["erofs"], [], modules(erofs="lz4"), frozenset())


def test_a_circle_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(HostSetupError, match="circle"):
        load_order(["a"], [], modules(a="b", b="a"), frozenset())


def test_a_guest_has_a_driver_for_its_nic_and_makes_none_of_its_own() -> None:
    assert {"virtio_net", "tun"} & set(kmod.WANTED) == {"virtio_net"}
