//! The devices this machine has: which modules of the initramfs they need, and waiting for one to appear. What is loaded
//! for nobody is a tenth of a second of an emulated boot, and surface. Not for loading modules (`init`), nor for which
//! there are (`images/kmod.py`); what a disk is for, `disks` knows.

use crate::sys::{self, cvt};
use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// For devices to appear after their drivers are loaded, or a disk's new size to be heard of.
const DEVICE_WAIT: Duration = Duration::from_secs(10);

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

/// A socket that wakes when the kernel announces a device.
pub fn uevents() -> Option<OwnedFd> {
    // SAFETY: an address made here, of the size that is said; the descriptor is ours.
    unsafe {
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let fd = cvt(libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_KOBJECT_UEVENT)).ok()?;
        let socket = OwnedFd::from_raw_fd(fd);
        let mut address: libc::sockaddr_nl = std::mem::zeroed();
        (address.nl_family, address.nl_groups) = (libc::AF_NETLINK as libc::sa_family_t, 1);
        let size = std::mem::size_of_val(&address) as libc::socklen_t;
        cvt(libc::bind(fd, (&address as *const libc::sockaddr_nl).cast(), size)).ok()?;
        Some(socket)
    }
}

/// What `look` finds, now or after some announced device; None when DEVICE_WAIT has passed.
pub fn wait<T>(events: &Option<OwnedFd>, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let socket = events.as_ref()?;
    let deadline = Instant::now() + DEVICE_WAIT;
    let mut buffer = [0; 8192];
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        let left = deadline.saturating_duration_since(Instant::now()).as_millis() as libc::c_int;
        let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        if left == 0 || unsafe { libc::poll(&mut poll, 1, left) } == 0 {
            return look();
        }
        while sys::read(socket.as_raw_fd(), &mut buffer).is_ok() {}
    }
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
