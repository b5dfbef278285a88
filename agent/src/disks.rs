//! The machine's disks by their slots, and what its kernel is told of one that the host has made another.
//!
//! Not for what is mounted from them and where (`init`, `protect`, `volumes`).

use crate::devices;
use crate::failure::{at, Failure, Outcome};
use crate::msgpack::Value;
use crate::sys::cvt;
use std::ffi::CString;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

const BLKROSET: libc::c_ulong = 0x125D;
const BLKFLSBUF: libc::c_ulong = 0x1261;

/// The disk of a slot: by its serial number where the VMM gives disks their slots' names (QEMU, Cloud Hypervisor), else by
/// its place (Firecracker's serial numbers are its own).
pub fn find(slot: &str) -> Option<String> {
    let mut named = false;
    for block in fs::read_dir("/sys/block").ok()?.flatten() {
        let serial = fs::read_to_string(block.path().join("serial")).unwrap_or_default();
        if serial.trim_end() == slot {
            return Some(format!("/dev/{}", block.file_name().to_string_lossy()));
        }
        named |= devices::disk_place(serial.trim_end()).is_some();
    }
    let path = format!("/dev/{}", devices::disk_place(slot)?);
    (!named && Path::new(&path).exists()).then_some(path)
}

/// The slot's disk, once the kernel has heard that it is of that size now.
pub fn sized(slot: &str, bytes: u64) -> Outcome<CString> {
    let look = || {
        let device = find(slot)?;
        let size = fs::read_to_string(format!("/sys/block/{}/size", device.rsplit('/').next()?)).ok()?;
        (size.trim().parse::<u64>().ok()? * 512 == bytes).then_some(device)
    };
    let device = devices::wait(&devices::uevents(), look)
        .ok_or_else(|| Failure::new("not_found", format!("there is no disk {slot} of that size")))?;
    CString::new(device).map_err(|_| Failure::invalid("a disk's slot"))
}

/// Nothing that the kernel knew of the disk before is true any more.
pub fn forget(disk: &OwnedFd) -> Outcome<()> {
    // SAFETY: takes nothing.
    cvt(unsafe { libc::ioctl(disk.as_raw_fd(), BLKFLSBUF as _, 0) }).map(drop).map_err(at("flush a disk"))
}

pub fn set_read_only(disk: &OwnedFd, read_only: bool) -> Outcome<()> {
    let word = libc::c_int::from(read_only);
    // SAFETY: an int that lives through the call.
    let result = cvt(unsafe { libc::ioctl(disk.as_raw_fd(), BLKROSET as _, &word) });
    result.map(drop).map_err(at(if read_only { "make a disk read-only" } else { "make a disk writable" }))
}

/// Where something of a disk may be mounted: an absolute path below `/`, without a turn.
pub fn mount_point(value: &Value) -> Option<CString> {
    let bytes = value.bytes().filter(|path| path.starts_with(b"/") && path.len() < 4096)?;
    let plain = bytes[1..].split(|byte| *byte == b'/').all(|name| !matches!(name, b"" | b"." | b".."));
    plain.then(|| CString::new(bytes).ok()).flatten()
}
