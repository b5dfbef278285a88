//! System calls that std lacks, in safe clothes. No policy.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

pub fn cvt(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn cvt_long(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// # Safety: `fd` is open and nobody else's.
unsafe fn own(fd: RawFd) -> OwnedFd {
    OwnedFd::from_raw_fd(fd)
}

pub fn would_block(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

pub fn interrupted(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Interrupted
}

pub fn open(path: &CStr, flags: i32, mode: u32) -> io::Result<OwnedFd> {
    open_at(libc::AT_FDCWD, path, flags, mode)
}

pub fn open_at(dir: RawFd, path: &CStr, flags: i32, mode: u32) -> io::Result<OwnedFd> {
    // SAFETY: a C string and plain integers; the result is ours.
    unsafe { cvt(libc::openat(dir, path.as_ptr(), flags | libc::O_CLOEXEC, mode)).map(|fd| own(fd)) }
}

pub fn read(fd: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the buffer is valid for its length.
    let n = unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) };
    if n < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(n as usize)
    }
}

pub fn write(fd: RawFd, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: the slice is valid for its length.
    let n = unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
    if n < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(n as usize)
    }
}

pub fn pread(fd: RawFd, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    // SAFETY: the buffer is valid for its length.
    let n = unsafe { libc::pread(fd, buffer.as_mut_ptr().cast(), buffer.len(), offset as libc::off_t) };
    if n < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(n as usize)
    }
}

/// Read up to `max` bytes onto the end of `buffer`, in place.
pub fn read_onto(fd: RawFd, buffer: &mut Vec<u8>, max: usize) -> io::Result<usize> {
    buffer.reserve(max);
    // SAFETY: `reserve` made room for `max` bytes past the length; the kernel wrote the first n of them.
    unsafe {
        let n = libc::read(fd, buffer.as_mut_ptr().add(buffer.len()).cast(), max);
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        buffer.set_len(buffer.len() + n as usize);
        Ok(n as usize)
    }
}

/// (read end, write end), both close-on-exec.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: room for two descriptors, which are ours after success.
    unsafe {
        cvt(libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC))?;
        Ok((own(fds[0]), own(fds[1])))
    }
}

pub fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // Plain O_RDONLY/O_WRONLY descriptors have no other status flag worth keeping, so no F_GETFL.
    // SAFETY: plain integers.
    unsafe { cvt(libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK)).map(drop) }
}

/// Bytes that wait in a pipe or socket.
pub fn readable_bytes(fd: RawFd) -> usize {
    let mut n: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int.
    unsafe { libc::ioctl(fd, libc::FIONREAD, &mut n) };
    n.max(0) as usize
}

pub struct Epoll(OwnedFd);

pub const IN: u32 = libc::EPOLLIN as u32;
pub const OUT: u32 = libc::EPOLLOUT as u32;
pub const HUP: u32 = (libc::EPOLLHUP | libc::EPOLLERR) as u32;
pub const RDHUP: u32 = libc::EPOLLRDHUP as u32;
pub const PRI: u32 = libc::EPOLLPRI as u32;
pub const EDGE: u32 = libc::EPOLLET as u32;

impl Epoll {
    pub fn new() -> io::Result<Self> {
        // SAFETY: plain integers; the result is ours.
        unsafe { cvt(libc::epoll_create1(libc::EPOLL_CLOEXEC)).map(|fd| Self(own(fd))) }
    }

    pub fn add(&self, fd: RawFd, events: u32, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, events, token)
    }

    /// Wait for other events of a descriptor; those that are so already count as an edge.
    pub fn modify(&self, fd: RawFd, events: u32, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, events, token)
    }

    fn control(&self, how: libc::c_int, fd: RawFd, events: u32, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events, u64: token };
        // SAFETY: the event lives through the call.
        unsafe { cvt(libc::epoll_ctl(self.0.as_raw_fd(), how, fd, &mut event)).map(drop) }
    }

    /// Wait, for ever when `timeout_ms` is -1.
    pub fn wait<'a>(&self, events: &'a mut [libc::epoll_event], timeout_ms: i32) -> &'a [libc::epoll_event] {
        // SAFETY: room for as many events as is said.
        let n = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), events.len() as i32, timeout_ms) };
        &events[..n.max(0) as usize]
    }
}

pub fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: plain integers; the result is ours.
    unsafe { cvt(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)).map(|fd| own(fd)) }
}

/// Block SIGCHLD and get it through a descriptor; ignore SIGPIPE.
pub fn child_signals() -> io::Result<OwnedFd> {
    // SAFETY: a set made here; the result is ours.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        cvt(libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()))?;
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        cvt(libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)).map(|fd| own(fd))
    }
}

/// An ended child and what it used.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    pub pid: i32,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub user_ms: i64,
    pub system_ms: i64,
}

/// Reap one ended child, if there is one; `pid` -1 is any.
pub fn reap(pid: i32, wait: bool) -> Option<Ended> {
    let mut status = 0;
    // SAFETY: a rusage and a status to write into.
    let (pid, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        let pid = libc::wait4(pid, &mut status, if wait { 0 } else { libc::WNOHANG }, &mut usage);
        (pid, usage)
    };
    let ms = |time: libc::timeval| time.tv_sec * 1000 + time.tv_usec / 1000;
    (pid > 0).then(|| Ended {
        pid,
        exit_code: libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)),
        signal: libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status)),
        user_ms: ms(usage.ru_utime),
        system_ms: ms(usage.ru_stime),
    })
}

pub fn kill(pid: i32, signal: i32) {
    // SAFETY: plain integers. A process that is gone is what was wanted.
    unsafe { libc::kill(pid, signal) };
}

/// Nanoseconds of the wall clock.
pub fn set_wall_clock(unix_ns: i64) -> io::Result<()> {
    let time = libc::timespec { tv_sec: unix_ns.div_euclid(1_000_000_000), tv_nsec: unix_ns.rem_euclid(1_000_000_000) };
    // SAFETY: the timespec lives through the call.
    unsafe { cvt(libc::clock_settime(libc::CLOCK_REALTIME, &time)).map(drop) }
}

/// Buffers of a file's transfer come and go: from the heap and not as mappings that fault in anew each time.
pub fn keep_memory() {
    // SAFETY: plain integers, before there are threads.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 4 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 2 << 20);
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Of this machine.
pub fn memory_bytes() -> u64 {
    // SAFETY: plain integers.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    pages.max(0) as u64 * size.max(0) as u64
}

pub fn euid() -> u32 {
    // SAFETY: cannot fail.
    unsafe { libc::geteuid() }
}

/// Make this *thread* (libc's wrappers would change every thread) act for others' files as that user.
/// The real and saved uid stay root's, so that it can come back; the effective capabilities go and come with it.
pub fn act_as(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    const SAME: libc::c_long = -1;
    // SAFETY: raw system calls with plain integers and a slice of group ids.
    unsafe {
        cvt_long(libc::syscall(libc::SYS_setresuid, SAME, 0, SAME))?;
        cvt_long(libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()))?;
        cvt_long(libc::syscall(libc::SYS_setresgid, SAME, libc::c_long::from(gid), SAME))?;
        cvt_long(libc::syscall(libc::SYS_setresuid, SAME, libc::c_long::from(uid), SAME))?;
    }
    Ok(())
}

/// (total, available) bytes of the file system that holds `path`.
pub fn disk(path: &CStr) -> io::Result<(u64, u64)> {
    // SAFETY: a C string and a struct to write into.
    let stat = unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        cvt(libc::statvfs(path.as_ptr(), &mut stat))?;
        stat
    };
    Ok((stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize))
}

/// Which kind of file system holds `path`: statfs's f_type.
pub fn file_system(path: &CStr) -> io::Result<u64> {
    // SAFETY: a C string and a struct to write into.
    unsafe {
        let mut stat: libc::statfs = std::mem::zeroed();
        cvt(libc::statfs(path.as_ptr(), &mut stat))?;
        Ok(stat.f_type as u64 & 0xFFFF_FFFF)
    }
}

/// Open `path`, which may lead through links and `..` but not out of `directory`: that is EXDEV.
pub fn open_beneath(directory: RawFd, path: &CStr, flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: all zeros is a valid open_how.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (flags | libc::O_CLOEXEC) as u64;
    how.resolve = libc::RESOLVE_BENEATH | libc::RESOLVE_NO_MAGICLINKS;
    let mut tries = 0;
    loop {
        // SAFETY: a C string and a struct of the size that is said; the result is ours.
        let result = unsafe {
            let fd = libc::syscall(libc::SYS_openat2, directory, path.as_ptr(), &how, std::mem::size_of_val(&how));
            cvt_long(fd).map(|fd| own(fd as RawFd))
        };
        match result {
            // Something was moved meanwhile, and the kernel could not tell.
            Err(error) if would_block(&error) && tries < 10 => tries += 1,
            result => return result,
        }
    }
}

pub fn inotify() -> io::Result<OwnedFd> {
    // SAFETY: plain integers; the result is ours.
    unsafe { cvt(libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK)).map(|fd| own(fd)) }
}

pub fn add_watch(inotify: RawFd, path: &CStr, mask: u32) -> io::Result<i32> {
    // SAFETY: a C string and plain integers.
    unsafe { cvt(libc::inotify_add_watch(inotify, path.as_ptr(), mask)) }
}

pub fn remove_watch(inotify: RawFd, watch: i32) {
    // SAFETY: plain integers. One that is gone is what was wanted.
    unsafe { libc::inotify_rm_watch(inotify, watch) };
}

/// Wait at most `ms` until there is something to read.
pub fn wait_readable(fd: RawFd, ms: i32) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd that lives through the call.
    unsafe { libc::poll(&mut poll, 1, ms) > 0 }
}

/// Another descriptor of what `fd` is.
pub fn duplicate(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: plain integers; the result is ours.
    unsafe { cvt(libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0)).map(|fd| own(fd)) }
}
