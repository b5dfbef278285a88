//! A terminal for a process: its two ends, its size. Not for what flows through it.

use crate::sys::{self, cvt};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// The group that devices of terminals belong to (`gid=5` of the mount of devpts).
const TTY_GROUP: libc::gid_t = 5;
/// Control-D: what ends the input of whoever reads lines from a terminal.
pub const END_OF_INPUT: u8 = 4;

pub struct Pty {
    pub master: OwnedFd,
    pub slave: OwnedFd,
}

impl Pty {
    /// A new terminal of that size; `owner`: whose it is, None to leave it ours.
    pub fn open(rows: u16, columns: u16, owner: Option<u32>) -> io::Result<Self> {
        let path = std::ffi::CStr::from_bytes_with_nul(b"/dev/ptmx\0").unwrap_or_default();
        let master = sys::open(path, libc::O_RDWR | libc::O_NOCTTY, 0)?;
        let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
        // SAFETY: ioctls on a descriptor of ours that take a pointer to an int, or an int; the new one is ours.
        let slave = unsafe {
            let unlocked: libc::c_int = 0;
            cvt(libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &unlocked))?;
            OwnedFd::from_raw_fd(cvt(libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags))?)
        };
        resize(master.as_raw_fd(), rows, columns)?;
        if let Some(uid) = owner {
            // SAFETY: plain integers.
            cvt(unsafe { libc::fchown(slave.as_raw_fd(), uid, TTY_GROUP) })?;
        }
        Ok(Self { master, slave })
    }
}

/// The processes in it are told by SIGWINCH.
pub fn resize(master: RawFd, rows: u16, columns: u16) -> io::Result<()> {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the struct lives through the call.
    cvt(unsafe { libc::ioctl(master, libc::TIOCSWINSZ, &size) }).map(drop)
}
