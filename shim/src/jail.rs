//! The child between `fork` and `execve`: from "a copy of us" to "a VMM that holds nothing but what it needs".
//!
//! Order matters: descriptors first (they need no rights), then limits, then the bounding set (needs
//! CAP_SETPCAP), groups and ids (need CAP_SETGID/SETUID), then capabilities, then the flags that a change
//! of credentials would clear.

use std::ffi::CString;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};

use crate::config::{Config, Limit};
use crate::sys::{self, check};
use crate::{mounts, namespaces};

/// The ends of pipes the child gets.
pub struct Pipes<'a> {
    pub console: &'a OwnedFd,
    pub stderr: &'a OwnedFd,
    /// Close-on-exec: says what failed, or closes when nothing did.
    pub failure: &'a OwnedFd,
}

/// Become the VMM. Returns only by reporting what failed and exiting 127.
pub fn enter(config: &Config, pipes: &Pipes) -> ! {
    let mut failure = pipes.failure.as_raw_fd();
    let words = match try_enter(config, pipes, &mut failure) {
        Err((step, error)) => format!("{step}: {error}"),
        Ok(never) => match never {},
    };
    let _ = sys::write_all(failure, words.as_bytes());
    unsafe { libc::_exit(127) }
}

enum Never {}

type Step<T> = std::result::Result<T, (String, Error)>;

fn step<T>(name: &str, result: Result<T>) -> Step<T> {
    result.map_err(|error| (name.to_owned(), error))
}

fn try_enter(config: &Config, pipes: &Pipes, failure: &mut RawFd) -> Step<Never> {
    step("setsid", check(unsafe { libc::setsid() }))?;
    reset_signals();
    if let Some(cgroup) = config.cgroup {
        step("joining the cgroup", namespaces::join_cgroup(cgroup))?;
    }
    if config.launcher {
        step("making a mount namespace", mounts::leave())?;
        for bind in &config.binds {
            step(&format!("binding {}", bind.path.to_string_lossy()), mounts::bind(bind, None))?;
        }
    }
    step("arranging descriptors", arrange(config, pipes, failure))?;
    unsafe { libc::umask(0o077) };
    step("leaving the server's directory", std::env::set_current_dir("/"))?;
    // Raising it is open to everyone; where /proc is not mounted it is only a wish.
    let _ = std::fs::write("/proc/self/oom_score_adj", config.oom_score_adj.to_string());
    for &(limit, value) in &config.rlimits {
        step(&format!("setting limit {limit:?} to {value}"), set_limit(limit, value))?;
    }
    // A jailer needs all of root's rights, and gives them up itself.
    if !config.launcher {
        give_up(config)?;
    }
    step("parent-death signal", sys::die_with_parent())?;
    if step("looking for the shim", sys::readers_gone(*failure))? {
        return Err(("the shim died".into(), Error::from_raw_os_error(libc::ESRCH)));
    }
    // QEMU asks for huge pages for its translation cache: clones would each pay megabytes they do not use.
    step("huge pages off", check(unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) }))?;
    let (argv, env) = (pointers(&config.argv), pointers(&config.env));
    unsafe { libc::execve(argv[0], argv.as_ptr(), env.as_ptr()) };
    Err((format!("executing {}", config.argv[0].to_string_lossy()), Error::last_os_error()))
}

/// Ids, capabilities, and the way back to either.
fn give_up(config: &Config) -> Step<()> {
    let root = unsafe { libc::geteuid() } == 0;
    match sys::drop_bounding() {
        Err(error) if root => return Err(("emptying the capability bounding set".into(), error)),
        _ => {} // an ordinary user may not, and with no_new_privs needs not
    }
    if let (Some(uid), Some(gid)) = (config.uid, config.gid) {
        step("clearing groups", check(unsafe { libc::setgroups(0, std::ptr::null()) }))?;
        step(&format!("becoming gid {gid}"), check(unsafe { libc::setresgid(gid, gid, gid) }))?;
        step(&format!("becoming uid {uid}"), check(unsafe { libc::setresuid(uid, uid, uid) }))?;
    }
    step("dropping capabilities", sys::capset(0))?;
    step("no_new_privs", sys::no_new_privs())
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([std::ptr::null()]).collect()
}

fn reset_signals() {
    unsafe {
        for signal in 1..32 {
            libc::signal(signal, libc::SIG_DFL);
        }
        // A file at its size limit is an I/O error for the guest, not the end of its VM.
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
    }
}

/// 0 = /dev/null, 1 = console, 2 = stderr, 3… = the VMM's, one more (close-on-exec) for `failure`, nothing else.
fn arrange(config: &Config, pipes: &Pipes, failure: &mut RawFd) -> Result<()> {
    // Its number may be that of a place filled below: nobody closes it there.
    let null = sys::open(&CString::new("/dev/null")?, libc::O_RDWR)?.into_raw_fd();
    let mut wanted = vec![null, pipes.console.as_raw_fd(), pipes.stderr.as_raw_fd()];
    wanted.extend(&config.fds);
    wanted.push(*failure);
    // First out of the way of every number that is to be filled, then into place.
    let clear = wanted.iter().max().map_or(3, |&highest| highest + 1).max(wanted.len() as RawFd);
    let mut parked = Vec::with_capacity(wanted.len());
    for &fd in &wanted {
        parked.push(check(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, clear) })?);
    }
    *failure = parked[parked.len() - 1];
    let last = wanted.len() - 1;
    for (place, &fd) in parked.iter().enumerate() {
        let flags = if place == last { libc::O_CLOEXEC } else { 0 };
        check(unsafe { libc::dup3(fd, place as RawFd, flags) })?;
    }
    *failure = last as RawFd;
    sys::close_from(last as RawFd + 1);
    Ok(())
}

fn set_limit(limit: Limit, value: u64) -> Result<()> {
    let resource = match limit {
        Limit::Nofile => libc::RLIMIT_NOFILE,
        Limit::Fsize => libc::RLIMIT_FSIZE,
        Limit::Core => libc::RLIMIT_CORE,
        Limit::Nproc => libc::RLIMIT_NPROC,
        Limit::As => libc::RLIMIT_AS,
        Limit::Memlock => libc::RLIMIT_MEMLOCK,
    };
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    check(unsafe { libc::getrlimit(resource, &mut now) })?;
    // An ordinary user cannot raise a hard limit; a lower one than asked for is stricter still.
    let value = value.min(now.rlim_max);
    let bound = libc::rlimit { rlim_cur: value, rlim_max: value };
    check(unsafe { libc::setrlimit(resource, &bound) })?;
    Ok(())
}
