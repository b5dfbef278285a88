//! Processes and groups of processes the VMM is put among: its namespaces' first process, its cgroup.
//!
//! Not here: mounts (`mounts`), and what the VMM itself gives up (`jail`).

use std::ffi::{CStr, CString};
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use crate::sys::{self, check, text};

/// argv[1] of the process below.
pub const PAUSE: &str = "--pause";
/// Directories below a cgroup of ours: what a VMM's own jailer makes there.
const CGROUP_DEPTH_MAX: u32 = 4;

/// The namespaces a jailed VMM is made in; `cgroup` follows when it is in its own cgroup.
const MADE: libc::c_int =
    libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;

/// Which namespaces a child is made in.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Ours,
    Own,
    /// Own ones, of a user namespace that maps nothing but ourselves.
    OfUser,
}

/// `fork`, into namespaces; the child is the first process of its pid namespace.
pub fn child(kind: Kind) -> Result<libc::pid_t> {
    let flags = match kind {
        Kind::Ours => return check(unsafe { libc::fork() }),
        Kind::Own => MADE,
        Kind::OfUser => MADE | libc::CLONE_NEWUSER,
    };
    // SAFETY: without a stack of its own and without CLONE_VM it is a fork; there are no threads.
    let pid = unsafe { libc::syscall(libc::SYS_clone, (flags | libc::SIGCHLD) as libc::c_long, 0, 0, 0, 0) };
    check(pid as libc::c_int)
}

/// In a new user namespace: the ids we had outside are ours inside, and there are no others.
pub fn map_ourselves(uid: libc::uid_t, gid: libc::gid_t) -> Result<()> {
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("{gid} {gid} 1"))
}

/// A pid namespace for the children to come, and its first process: when it ends, the kernel ends every other in it.
///
/// It ends with us, as the VMM's own jailer could not: a change of credentials clears the parent-death signal.
pub fn keep_pids(run_dir: &CStr) -> Result<libc::pid_t> {
    check(unsafe { libc::unshare(libc::CLONE_NEWPID) })?;
    // A pipe of its own, that no other child holds: its readers are gone when we are.
    let (failure, failure_end) = sys::pipe()?;
    let pid = check(unsafe { libc::fork() })?;
    if pid == 0 {
        let error = become_first(run_dir, &failure_end);
        let _ = sys::write_all(failure_end.as_raw_fd(), error.to_string().as_bytes());
        unsafe { libc::_exit(127) };
    }
    drop(failure_end);
    unsafe { libc::fcntl(failure.as_raw_fd(), libc::F_SETFL, 0) };
    let words = sys::read_to_end(failure.as_raw_fd(), 4096)?;
    if words.is_empty() {
        Ok(pid)
    } else {
        Err(Error::new(std::io::ErrorKind::Other, String::from_utf8_lossy(&words)))
    }
}

fn become_first(run_dir: &CStr, failure: &OwnedFd) -> Error {
    match try_become_first(run_dir, failure) {
        Err(error) => error,
        Ok(()) => Error::last_os_error(),
    }
}

fn try_become_first(run_dir: &CStr, failure: &OwnedFd) -> Result<()> {
    // Everything but the pipe is the shim's, the server's or the VMM's.
    sys::close_others(0, &mut [failure.as_raw_fd()]);
    let _ = sys::drop_bounding();
    sys::capset(0)?;
    sys::no_new_privs()?;
    sys::die_with_parent()?;
    if sys::readers_gone(failure.as_raw_fd())? {
        return Err(Error::from_raw_os_error(libc::ESRCH));
    }
    // Executed anew: a copy of the shim's memory is not needed, and `ps` and the server tell it from a shim.
    let argv = [CString::new(["llm4agents-pids ", &run_dir.to_string_lossy()].concat())?, CString::new(PAUSE)?];
    let argv: Vec<*const libc::c_char> = argv.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect();
    let env = [std::ptr::null()];
    let ourselves = text("/proc/self/exe")?;
    // SAFETY: NULL-ended arrays of strings that live through the call.
    unsafe { libc::execve(ourselves.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    Ok(())
}

/// The life of that process: orphans of its namespace are its children, and vanish as they end.
pub fn pause() -> ! {
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        loop {
            libc::pause();
        }
    }
}

/// Become a member of the cgroup (v2) whose directory is open.
pub fn join_cgroup(directory: RawFd) -> Result<()> {
    let file = sys::open_at(directory, &text("cgroup.procs")?, libc::O_WRONLY)?;
    sys::write_all(file.as_raw_fd(), b"0")
}

/// What it is in becomes the root of what it sees of cgroups.
pub fn hide_cgroups() -> Result<()> {
    check(unsafe { libc::unshare(libc::CLONE_NEWCGROUP) })?;
    Ok(())
}

/// What a VMM's own jailer does not make: namespaces for messages between processes, the host's name and cgroups.
pub fn beside_a_jailers() -> Result<()> {
    check(unsafe { libc::unshare(libc::CLONE_NEWIPC | libc::CLONE_NEWUTS) })?;
    hide_cgroups()
}

/// Remove a cgroup whose processes have ended, with what is below it. What cannot be removed, a later server finds.
pub fn remove_cgroup(path: &std::path::Path) {
    fn remove(path: &std::path::Path, depth: u32) {
        if depth > 0 {
            for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    remove(&entry.path(), depth - 1);
                }
            }
        }
        let _ = std::fs::remove_dir(path);
    }
    remove(path, CGROUP_DEPTH_MAX);
}
