"""Which kernel modules an initramfs needs and in which order. Pure.

Debian's kernel packages have no modules.dep (depmod writes it at installation), so dependencies are read from
where depmod reads them: the modules themselves (`depends=` in `.modinfo`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llm4agents.errors import HostSetupError

WANTED: tuple[str, ...] = (
    # The core first and in this order: with stock Debian kernels acpi=on is what finds the devices.
    "virtio_ring",
    "virtio",
    "virtio_mmio",
    # The agent loads what this machine has devices for (`agent/src/devices.rs`); Cloud Hypervisor's are on PCI.
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "virtio_rng",
    "virtio_balloon",
    "virtio_net",
    "erofs",
    "overlay",
    "ext4",
    "vsock",
    "vmw_vsock_virtio_transport_common",
    "vmw_vsock_virtio_transport",
)
OPTIONAL: tuple[str, ...] = ("crc32c_generic",)
"""Asked for by name by what is above where a kernel has them at all; newer ones have no such module."""
NESTED: tuple[str, ...] = (
    # A machine that may run machines of its own. `kvm_amd` and `kvm_intel` refuse to load on the other's processor:
    # the agent loads the one that fits.
    "kvm",
    "kvm_amd",
    "kvm_intel",
    # Their networks: taps, and what a ruleset such as our own barrier's is made of (`barrier.link.nft`).
    "tun",
    "vhost_net",
    "nf_tables",
    "nfnetlink_log",
    "nf_log_syslog",
    "nft_chain_nat",
    "nft_connlimit",
    "nft_ct",
    "nft_limit",
    "nft_log",
    "nft_masq",
    "nft_nat",
    "nft_numgen",
    "nft_redir",
    "nft_reject_ipv4",
    "nft_reject_inet",
)
"""What only a nested machine's initramfs has on top, so that no other pays for it."""


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    path: str
    """Where it is in the package, from lib/modules/RELEASE."""
    depends: tuple[str, ...]


def canonical(name: str) -> str:
    """A module's name from its name or file name: virtio-rng.ko.xz → virtio_rng."""
    base = name.rsplit("/", 1)[-1]
    return base.split(".ko", 1)[0].replace("-", "_")


def builtin_names(modules_builtin: str) -> frozenset[str]:
    """Names of what is compiled in, from the text of modules.builtin."""
    return frozenset(canonical(line.strip()) for line in modules_builtin.splitlines() if line.strip())


def modinfo(elf: bytes) -> dict[str, str]:
    """The key=value pairs of a module's .modinfo, the first of each key. HostSetupError if it has none."""
    try:
        if elf[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a little-endian 64-bit ELF")
        (section_offset,) = struct.unpack_from("<Q", elf, 0x28)
        entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)

        def section(index: int) -> tuple[int, int, int]:
            name, _, _, _, offset, size = struct.unpack_from(
                "<IIQQQQ", elf, section_offset + index * entry_size
            )
            return name, offset, size

        _, names_offset, names_size = section(names_index)
        names = elf[names_offset : names_offset + names_size]
        for index in range(count):
            name, offset, size = section(index)
            if names[name:].split(b"\0", 1)[0] == b".modinfo":
                pairs: dict[str, str] = {}
                for item in elf[offset : offset + size].split(b"\0"):
                    key, equals, value = item.partition(b"=")
                    if equals:
                        pairs.setdefault(key.decode("ascii", "replace"), value.decode("utf-8", "replace"))
                return pairs
        raise ValueError("no .modinfo section")
    except (struct.error, ValueError, OverflowError) as error:
        raise HostSetupError(f"a kernel module could not be read: {error}") from error


def depends_of(info: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(canonical(name) for name in info.get("depends", "").split(",") if name)


def load_order(
    wanted: Iterable[str], optional: Iterable[str], modules: Mapping[str, Module], builtin: frozenset[str]
) -> list[Module]:
    """`wanted` with what they depend on, each after its dependencies, without what is built in.

    Raises HostSetupError for a module that is neither there nor built in, and for a dependency cycle.
    """
    order: dict[str, Module] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in order or name in builtin:
            return
        if name in path:
            raise HostSetupError(
                f"kernel modules depend on each other in a circle: {' → '.join((*path, name))}"
            )
        if name not in modules:
            needed_by = f" (needed by {path[-1]})" if path else ""
            raise HostSetupError(
                f"this kernel has no module {name}{needed_by}",
                hint="use the kernel of Debian's linux-image-cloud-amd64",
            )
        for dependency in modules[name].depends:
            visit(dependency, (*path, name))
        order[name] = modules[name]

    for name in [*(n for n in optional if canonical(n) in modules), *wanted]:
        visit(canonical(name), ())
    # Optional ones were visited first so that what asks for them finds them; the core still leads.
    lead = [m for n, m in order.items() if n in ("virtio_ring", "virtio", "virtio_mmio")]
    return [*lead, *(m for m in order.values() if m not in lead)]
