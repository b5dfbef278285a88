//! Which modules of the initramfs this machine needs, by the devices it has. What is loaded for nobody is a tenth of a
//! second of an emulated boot, and surface. Not for loading them (`init`), nor for which there are (`images/kmod.py`).

use std::fs;

const NET: u32 = 1;
const BLOCK: u32 = 2;
const CONSOLE: u32 = 3;
const ENTROPY: u32 = 4;
const BALLOON: u32 = 5;
const VSOCK: u32 = 19;

const BUSES: &[&str] = &["virtio", "virtio_ring", "virtio_mmio"];
const PCI_BUSES: &[&str] = &["virtio_pci", "virtio_pci_modern_dev", "virtio_pci_legacy_dev"];

/// What drives a device, and what that needs. Modules that are in no list are always loaded.
const DRIVERS: &[(u32, &[&str])] = &[
    (NET, &["virtio_net", "net_failover", "failover"]),
    (BLOCK, &["virtio_blk"]),
    (CONSOLE, &["virtio_console"]),
    (ENTROPY, &["virtio_rng"]),
    (BALLOON, &["virtio_balloon"]),
    (VSOCK, &["vsock", "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport"]),
];

/// `/modules/virtio-rng.ko` → `virtio-rng`: as `images/kmod.py` names them, with underscores.
pub fn module_name(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.split(".ko").next().unwrap_or(name)
}

/// Whether the module finds devices, and is so loaded before there is anything to look at.
pub fn is_bus(name: &str, pci: bool) -> bool {
    BUSES.contains(&name) || pci && PCI_BUSES.contains(&name)
}

/// The place of a slot's disk among the disks, which is the order every driver attaches them in; None: no such slot.
pub fn disk_place(slot: &str) -> Option<String> {
    let number = match slot {
        "root" => 0,
        "upper" => 1,
        _ => 2 + slot.strip_prefix("vol")?.parse::<u8>().ok().filter(|number| *number < 24)?,
    };
    Some(format!("vd{}", char::from(b'a' + number)))
}

pub fn has_pci() -> bool {
    fs::read_dir("/sys/bus/pci/devices").is_ok_and(|mut devices| devices.next().is_some())
}

/// The kinds of virtio devices on the machine's buses.
#[derive(Debug, Default)]
pub struct Found {
    kinds: Vec<u32>,
    pci: bool,
}

impl Found {
    pub fn look(pci: bool) -> Self {
        let kinds = fs::read_dir("/sys/bus/virtio/devices").into_iter().flatten().flatten().filter_map(|device| {
            let kind = fs::read_to_string(device.path().join("device")).ok()?;
            u32::from_str_radix(kind.trim().strip_prefix("0x")?, 16).ok()
        });
        Self { kinds: kinds.collect(), pci }
    }

    pub fn has_disks(&self) -> bool {
        self.kinds.contains(&BLOCK)
    }

    /// Whether the host is reached over vsock. A machine that has it (Firecracker, Cloud Hypervisor) may have a virtio console
    /// all the same; one with our port on its console (QEMU) has none.
    pub fn vsock(&self) -> bool {
        self.kinds.contains(&VSOCK)
    }

    pub fn wants(&self, module: &str) -> bool {
        if PCI_BUSES.contains(&module) {
            return self.pci;
        }
        match DRIVERS.iter().find(|(_, modules)| modules.contains(&module)) {
            // The console of a machine whose channel is vsock is nobody's.
            Some((CONSOLE, _)) if self.vsock() => false,
            Some((kind, _)) => self.kinds.contains(kind),
            None => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(kinds: &[u32]) -> Found {
        Found { kinds: kinds.to_vec(), pci: false }
    }

    #[test]
    fn a_module_is_wanted_for_its_device() {
        let qemu = found(&[BLOCK, BLOCK, CONSOLE, NET]);
        assert!(!qemu.vsock() && qemu.has_disks());
        for name in ["virtio_blk", "virtio_console", "virtio_net", "net_failover", "erofs", "crc32c_generic"] {
            assert!(qemu.wants(name), "{name}");
        }
        for name in ["vsock", "vmw_vsock_virtio_transport", "virtio_rng", "virtio_balloon", "virtio_pci"] {
            assert!(!qemu.wants(name), "{name}");
        }
    }

    #[test]
    fn vsock_is_the_channel_wherever_it_is() {
        let other = found(&[BLOCK, CONSOLE, VSOCK, ENTROPY, BALLOON]);
        assert!(other.vsock() && other.wants("vsock") && other.wants("virtio_rng") && other.wants("virtio_balloon"));
        assert!(!other.wants("virtio_console") && !other.wants("virtio_net"));
    }

    #[test]
    fn nothing_is_on_a_bus_that_is_not_there() {
        assert!(is_bus("virtio_mmio", false) && !is_bus("virtio_pci", false) && is_bus("virtio_pci_modern_dev", true));
        assert!(!is_bus("virtio_blk", true));
        let pci = Found { kinds: vec![BLOCK], pci: true };
        assert!(pci.wants("virtio_pci") && !found(&[BLOCK]).wants("virtio_pci"));
    }

    #[test]
    fn places_follow_the_slots() {
        let places: Vec<_> = ["root", "upper", "vol0", "vol3"].iter().filter_map(|slot| disk_place(slot)).collect();
        assert_eq!(places, ["vda", "vdb", "vdc", "vdf"]);
        for not in ["", "vol", "volx", "vol24", "vol300", "205702049171"] {
            assert_eq!(disk_place(not), None, "{not}");
        }
    }

    #[test]
    fn names_come_from_paths() {
        assert_eq!(module_name("/modules/virtio_rng.ko"), "virtio_rng");
        assert_eq!(module_name("erofs"), "erofs");
    }
}
