//! Thin, checked wrappers of the system calls the shim makes; nothing here decides anything.

use std::ffi::{CStr, CString};
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

pub fn check(value: libc::c_int) -> Result<libc::c_int> {
    if value < 0 {
        Err(Error::last_os_error())
    } else {
        Ok(value)
    }
}

/// A string of ours for the kernel. Fails for one with a NUL in it.
pub fn text(words: &str) -> Result<CString> {
    Ok(CString::new(words)?)
}

fn owned(value: libc::c_int) -> Result<OwnedFd> {
    // SAFETY: a fresh descriptor that nothing else owns.
    check(value).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

pub fn open(path: &CStr, flags: libc::c_int) -> Result<OwnedFd> {
    owned(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC) })
}

pub fn open_at(directory: RawFd, path: &CStr, flags: libc::c_int) -> Result<OwnedFd> {
    owned(unsafe { libc::openat(directory, path.as_ptr(), flags | libc::O_CLOEXEC) })
}

/// A directory by its path. Nothing here keeps it open: an open directory's removal is not told to who watches it.
pub struct Dir(pub CString);

impl Dir {
    fn path(&self, name: &CStr) -> Result<CString> {
        Ok(CString::new([self.0.as_bytes(), b"/", name.to_bytes()].concat())?)
    }

    /// Never through a link: what is in it is ours.
    pub fn open(&self, name: &CStr, flags: libc::c_int) -> Result<OwnedFd> {
        let flags = flags | libc::O_CLOEXEC | libc::O_NOFOLLOW;
        owned(unsafe { libc::open(self.path(name)?.as_ptr(), flags, 0o600) })
    }

    pub fn rename(&self, from: &CStr, to: &CStr) -> Result<()> {
        check(unsafe { libc::rename(self.path(from)?.as_ptr(), self.path(to)?.as_ptr()) })?;
        Ok(())
    }

    pub fn is_gone(&self) -> bool {
        let there = check(unsafe { libc::access(self.0.as_ptr(), libc::F_OK) });
        there.is_err_and(|error| error.raw_os_error() == Some(libc::ENOENT))
    }

    /// Absent is what is wanted; anything else cannot be mended here.
    pub fn unlink(&self, name: &CStr) {
        if let Ok(path) = self.path(name) {
            unsafe { libc::unlink(path.as_ptr()) };
        }
    }
}

/// A pipe whose reading end does not block: (read, write).
pub fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    let (read, write) = (owned(ends[0])?, owned(ends[1])?);
    check(unsafe { libc::fcntl(ends[0], libc::F_SETFL, libc::O_NONBLOCK) })?;
    Ok((read, write))
}

pub fn read(fd: RawFd, buffer: &mut [u8]) -> Result<usize> {
    let count = unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) };
    if count < 0 {
        Err(Error::last_os_error())
    } else {
        Ok(count as usize)
    }
}

pub fn write_all(fd: RawFd, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        let count = unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
        if count < 0 {
            let error = Error::last_os_error();
            if error.kind() == std::io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        }
        bytes = &bytes[count as usize..];
    }
    Ok(())
}

pub fn read_to_end(fd: RawFd, bytes_max: usize) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    let mut buffer = [0; 16384];
    loop {
        match read(fd, &mut buffer) {
            Ok(0) => return Ok(all),
            Ok(count) => all.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if all.len() > bytes_max {
            return Err(Error::from_raw_os_error(libc::E2BIG));
        }
    }
}

/// Block these signals and read them from the descriptor instead.
pub fn signalfd(signals: &[libc::c_int]) -> Result<OwnedFd> {
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for &signal in signals {
            libc::sigaddset(&mut set, signal);
        }
        check(libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()))?;
        owned(libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))
    }
}

pub fn inotify(path: &CStr, mask: u32) -> Result<OwnedFd> {
    let fd = owned(unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) })?;
    check(unsafe { libc::inotify_add_watch(fd.as_raw_fd(), path.as_ptr(), mask) })?;
    Ok(fd)
}

pub fn timerfd() -> Result<OwnedFd> {
    owned(unsafe { libc::timerfd_create(libc::CLOCK_BOOTTIME, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) })
}

/// Fires once a second.
pub fn ticks() -> Result<OwnedFd> {
    let timer = timerfd()?;
    let second = libc::timespec { tv_sec: 1, tv_nsec: 0 };
    let spec = libc::itimerspec { it_interval: second, it_value: second };
    check(unsafe { libc::timerfd_settime(timer.as_raw_fd(), 0, &spec, std::ptr::null_mut()) })?;
    Ok(timer)
}

/// Fire once in `seconds` from now (at least 1 ns), or never.
pub fn timer_set(timer: &OwnedFd, seconds: Option<f64>) -> Result<()> {
    let value = match seconds {
        None => libc::timespec { tv_sec: 0, tv_nsec: 0 },
        Some(seconds) => {
            let bounded = seconds.clamp(1e-9, 1e9);
            libc::timespec { tv_sec: bounded as i64, tv_nsec: ((bounded.fract() * 1e9) as i64).max(1) }
        }
    };
    let spec = libc::itimerspec { it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
    check(unsafe { libc::timerfd_settime(timer.as_raw_fd(), 0, &spec, std::ptr::null_mut()) })?;
    Ok(())
}

/// Close every descriptor from `first` on.
pub fn close_from(first: RawFd) {
    close_range(first, RawFd::MAX);
}

/// Close every descriptor from `first` on but these.
pub fn close_others(mut first: RawFd, keep: &mut [RawFd]) {
    keep.sort_unstable();
    for &mut fd in keep {
        close_range(first, fd - 1);
        first = first.max(fd + 1);
    }
    close_range(first, RawFd::MAX);
}

fn close_range(first: RawFd, last: RawFd) {
    if first > last {
        return;
    }
    let done = unsafe { libc::syscall(libc::SYS_close_range, first as libc::c_uint, last as libc::c_uint, 0) };
    if done < 0 {
        // Linux before 5.9.
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
        for fd in first..=last.min(limit.rlim_cur.min(1 << 20) as RawFd) {
            unsafe { libc::close(fd) };
        }
    }
}

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: libc::c_int,
}

/// Effective and permitted become `keep` (bits), inheritable none.
pub fn capset(keep: u64) -> Result<()> {
    let header = CapHeader { version: 0x2008_0522, pid: 0 };
    let (low, high) = (keep as u32, (keep >> 32) as u32);
    let data: [u32; 6] = [low, low, 0, high, high, 0];
    let done = unsafe { libc::syscall(libc::SYS_capset, &header, data.as_ptr()) };
    check(done as libc::c_int)?;
    Ok(())
}

/// Empty the ambient set and the bounding set; the second needs CAP_SETPCAP and says so if it is not there.
pub fn drop_bounding() -> Result<()> {
    unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    for capability in 0..64 {
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } < 0 {
            let error = Error::last_os_error();
            if error.raw_os_error() == Some(libc::EINVAL) {
                break; // beyond the last one this kernel knows
            }
            return Err(error);
        }
    }
    Ok(())
}

pub fn no_new_privs() -> Result<()> {
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    Ok(())
}

/// SIGKILL when our parent dies. Cleared by every later change of credentials.
pub fn die_with_parent() -> Result<()> {
    let signal = libc::SIGKILL as libc::c_ulong;
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal, 0, 0, 0) })?;
    Ok(())
}

/// Whether nobody can read from this pipe any more: so a parent's death is seen also from another pid namespace.
pub fn readers_gone(pipe: RawFd) -> Result<bool> {
    let mut polled = libc::pollfd { fd: pipe, events: 0, revents: 0 };
    check(unsafe { libc::poll(&mut polled, 1, 0) })?;
    Ok(polled.revents & libc::POLLERR != 0)
}

/// Field 22 of /proc/PID/stat: when the process started, in clock ticks since boot; with its pid, its identity.
pub fn start_ticks(pid: libc::pid_t) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    stat.rsplit_once(')')
        .and_then(|(_, rest)| rest.split_ascii_whitespace().nth(19))
        .and_then(|ticks| ticks.parse().ok())
        .ok_or_else(|| Error::from_raw_os_error(libc::EINVAL))
}
