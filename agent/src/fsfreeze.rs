//! Freezing the file systems that write to a disk, so that the disk alone is whole (verb `freeze` with `fs`).
//!
//! Not in the agent's thread: the kernel writes out everything first. While they are frozen nothing here may write to
//! one of them; who tries, in a worker, waits for the thaw.

use crate::failure::{at, Outcome};
use crate::sys::{self, cvt};
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError};

const FIFREEZE: libc::c_ulong = 0xC004_5877;
const FITHAW: libc::c_ulong = 0xC004_5878;

#[derive(Clone)]
pub struct Disks(Arc<Inner>);

struct Inner {
    /// The writable disk under the root: it has no path of its own.
    upper: OwnedFd,
    frozen: Mutex<Vec<OwnedFd>>,
}

impl Disks {
    /// `upper`: a directory of the file system under the root's overlay.
    pub fn new(upper: OwnedFd) -> Self {
        Self(Arc::new(Inner { upper, frozen: Mutex::new(Vec::new()) }))
    }

    /// All of them or none; those that are frozen stay so. Blocks while the kernel writes out.
    pub fn freeze(&self) -> Outcome<()> {
        let mut frozen = self.0.frozen.lock().unwrap_or_else(PoisonError::into_inner);
        if !frozen.is_empty() {
            return Ok(());
        }
        let result = self.candidates().and_then(|disks| {
            for disk in disks {
                match ioctl(&disk, FIFREEZE) {
                    Ok(()) => frozen.push(disk),
                    // It cannot be frozen, is read-only, or somebody else froze it and will thaw it.
                    Err(error) if skip(&error) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        });
        if result.is_err() {
            thaw(&mut frozen);
        }
        result.map_err(at("freeze a disk"))
    }

    /// Waits for a freeze under way. What is not frozen is fine.
    pub fn thaw(&self) {
        thaw(&mut self.0.frozen.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Each file system on a block device once, by an open directory of it. Volumes first: the root's disk is the one
    /// that everything else may still have to write to.
    fn candidates(&self) -> io::Result<Vec<OwnedFd>> {
        let root = fs::metadata(format!("/proc/self/fd/{}", self.0.upper.as_raw_fd()))?.dev();
        let mut seen = vec![root];
        let mut disks = Vec::new();
        for (device, path) in block_mounts(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default()) {
            if seen.contains(&device) {
                continue;
            }
            seen.push(device);
            let Ok(path) = CString::new(path) else { continue };
            if let Ok(fd) = sys::open(&path, libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NONBLOCK, 0) {
                disks.push(fd);
            }
        }
        disks.push(self.0.upper.try_clone()?);
        Ok(disks)
    }
}

fn skip(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EBUSY | libc::EROFS | libc::ENOTTY))
}

fn ioctl(fd: &OwnedFd, request: libc::c_ulong) -> io::Result<()> {
    // SAFETY: both take an int that is not looked at.
    cvt(unsafe { libc::ioctl(fd.as_raw_fd(), request as _, 0) }).map(drop)
}

fn thaw(frozen: &mut Vec<OwnedFd>) {
    for disk in frozen.drain(..).rev() {
        // An error means that somebody thawed it already.
        let _ = ioctl(&disk, FITHAW);
    }
}

/// (device, mount point) of each mount of a file system that is on a block device, from the text of mountinfo.
fn block_mounts(mountinfo: &str) -> Vec<(u64, Vec<u8>)> {
    let parse = |line: &str| {
        let (mount, origin) = line.split_once(" - ")?;
        let mut words = mount.split(' ');
        let (major, minor) = words.nth(2)?.split_once(':')?;
        let source = origin.split(' ').nth(1)?;
        // What is in memory, on an overlay or from the host has no device of its own.
        if !source.starts_with("/dev/") || major == "0" {
            return None;
        }
        let device = libc::makedev(major.parse().ok()?, minor.parse().ok()?);
        Some((device, unescape(words.nth(1)?)))
    };
    mountinfo.lines().filter_map(parse).collect()
}

/// Blanks and such are octal in mountinfo: `\040`.
fn unescape(path: &str) -> Vec<u8> {
    let bytes = path.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = (bytes[at] == b'\\').then(|| path.get(at + 1..at + 4)).flatten();
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 4;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_of_block_devices() {
        let text = "22 1 0:20 / / rw - overlay overlay rw,lowerdir=/x\n\
                    23 22 0:5 / /proc rw - proc proc rw\n\
                    24 22 254:32 / /mnt/my\\040disk rw,noatime shared:1 - ext4 /dev/vdc rw\n\
                    25 22 254:32 /sub /other rw - ext4 /dev/vdc rw\n\
                    26 22 0:30 / /fuse rw - fuse /dev/fuse rw\n\
                    nonsense\n";
        let device = libc::makedev(254, 32);
        assert_eq!(block_mounts(text), [(device, b"/mnt/my disk".to_vec()), (device, b"/other".to_vec())]);
    }

    #[test]
    fn a_directory_that_cannot_be_frozen_is_left_out() {
        let shm = CString::new("/proc").unwrap();
        let disks = Disks::new(sys::open(&shm, libc::O_RDONLY | libc::O_DIRECTORY, 0).unwrap());
        assert!(ioctl(&disks.0.upper, FIFREEZE).is_err());
        disks.thaw();
    }
}
