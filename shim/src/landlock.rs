//! Landlock over the VMM: files below its root can be read and executed, what was bound for it can be written, and
//! that is all. Raw system calls: what the kernel can is asked for, and the rules are of what it can.
//!
//! Descriptors the VMM was given are not touched by it; that is how it writes its disks.

use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use crate::sys::{self, text};

const CREATE_RULESET: libc::c_long = 444;
const ADD_RULE: libc::c_long = 445;
const RESTRICT_SELF: libc::c_long = 446;
const VERSION: libc::c_long = 1;
const PATH_BENEATH: libc::c_long = 1;

const EXECUTE: u64 = 1;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
const MAKE_REG: u64 = 1 << 8;
const MAKE_SOCK: u64 = 1 << 9;
const TRUNCATE: u64 = 1 << 14;
const IOCTL_DEV: u64 = 1 << 15;
const NET_TCP: u64 = 0b11;
/// Abstract unix sockets and signals, of and to who is outside.
const SCOPES: u64 = 0b11;

const LOOK: u64 = EXECUTE | READ_FILE | READ_DIR;
/// Of a directory also new files and sockets in it.
const USE: u64 = READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | IOCTL_DEV | MAKE_REG | MAKE_SOCK;
/// Of `USE` and `LOOK`, what a file that is no directory can have.
const OF_FILES: u64 = EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV;

/// What may be looked at where the VMM's root is ours: programs and their libraries, not what people keep.
pub const SYSTEM: [&str; 7] =
    ["/usr", "/lib", "/lib64", "/nix/store", "/proc", "/etc/ld.so.cache", "/sys/devices/system"];

#[repr(C)]
struct Ruleset {
    files: u64,
    net: u64,
    scoped: u64,
}

/// Packed in the kernel's interface: 12 bytes.
#[repr(C, packed)]
struct Beneath {
    allowed: u64,
    parent: i32,
}

/// Every right on files that a kernel of this ABI version knows.
fn rights(abi: i64) -> u64 {
    match abi {
        1 => (1 << 13) - 1,
        2 => (1 << 14) - 1,
        3 | 4 => (1 << 15) - 1,
        _ => (1 << 16) - 1,
    }
}

/// The version this kernel has.
pub fn version() -> Result<i64> {
    let null: *const libc::c_void = std::ptr::null();
    // SAFETY: no structure is passed.
    match unsafe { libc::syscall(CREATE_RULESET, null, 0usize, VERSION) } {
        found if found < 1 => Err(Error::last_os_error()),
        found => Ok(found),
    }
}

/// Restrict this thread and all it will execute; `readable` and `usable` are paths. Needs `no_new_privs`.
///
/// A path that does not exist is passed over. Returns the version.
pub fn restrict<P: AsRef<Path>>(readable: &[P], usable: &[P]) -> Result<i64> {
    let abi = version()?;
    let handled = rights(abi);
    let wanted = Ruleset { files: handled, net: NET_TCP, scoped: SCOPES };
    // Fields a kernel does not know must not be passed to it.
    let size: usize = match abi {
        ..=3 => 8,
        4 | 5 => 16,
        _ => 24,
    };
    // SAFETY: a structure of at least that size; the descriptor is fresh.
    let rules = unsafe {
        let fd = libc::syscall(CREATE_RULESET, &wanted, size, 0);
        sys::check(fd as libc::c_int)?;
        OwnedFd::from_raw_fd(fd as libc::c_int)
    };
    let both = readable.iter().map(|path| (path, LOOK)).chain(usable.iter().map(|path| (path, USE)));
    for (path, allowed) in both {
        let Some(name) = path.as_ref().to_str() else { continue };
        let Ok(parent) = sys::open(&text(name)?, libc::O_PATH) else { continue };
        let of_its_kind = if path.as_ref().is_dir() { handled } else { handled & OF_FILES };
        let rule = Beneath { allowed: allowed & of_its_kind, parent: parent.as_raw_fd() };
        // SAFETY: a structure of the kind that is said.
        let done = unsafe { libc::syscall(ADD_RULE, rules.as_raw_fd(), PATH_BENEATH, &rule, 0) };
        sys::check(done as libc::c_int)?;
    }
    // SAFETY: no pointer is passed.
    sys::check(unsafe { libc::syscall(RESTRICT_SELF, rules.as_raw_fd(), 0) } as libc::c_int)?;
    Ok(abi)
}

#[cfg(test)]
mod tests {
    use super::rights;

    #[test]
    fn a_kernel_is_asked_for_what_it_knows() {
        let bits: Vec<u32> = (1..8).map(|abi| rights(abi).count_ones()).collect();
        assert_eq!(bits, [13, 14, 15, 15, 16, 16, 16]);
    }
}
