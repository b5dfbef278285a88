//! The child between `fork` and `execve`: from "a copy of us" to "a VMM that holds nothing but what it needs".
//!
//! Order matters: what names files of ours (cgroup, mounts, the root), descriptors (they need no rights), then limits,
//! then the bounding set (needs CAP_SETPCAP), groups and ids (need CAP_SETGID/SETUID), then capabilities, then the
//! flags that a change of credentials would clear, landlock, and the filter of system calls that forbids most of this.
//!
//! What this host cannot give is left out and said (`ns=…` or `no-ns=WHY`, `root=`, `proc=`, `landlock=`, `seccomp=`,
//! `cgroup=`); what was asked for and is this driver's mistake is a failure.

use std::ffi::{CStr, CString, OsStr};
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::config::{Config, Limit};
use crate::namespaces::{self, Kind};
use crate::sys::{self, check};
use crate::{landlock, mounts, seccomp};

/// The ends of pipes the child gets.
pub struct Pipes<'a> {
    pub console: &'a OwnedFd,
    pub stderr: &'a OwnedFd,
    /// Close-on-exec: says what failed, or closes when nothing did.
    pub failure: &'a OwnedFd,
    /// Our ids, as they are outside of every new namespace.
    pub ids: (libc::uid_t, libc::gid_t),
}

/// Begins what a child says that the namespaces it was made in are of no use: it is to be made without.
pub const WITHOUT: char = '-';
/// Begins, and a line end ends, what a child says of its jail when it is about to become the VMM.
pub const SAID: char = '+';

/// Become the VMM. Returns only by reporting what failed and exiting 127.
///
/// `around`: which namespaces it was made in. `why_not`: why they are not the wanted ones.
pub fn enter(config: &Config, pipes: &Pipes, around: Kind, why_not: Option<&str>) -> ! {
    let mut failure = pipes.failure.as_raw_fd();
    let words = match try_enter(config, pipes, around, why_not, &mut failure) {
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

fn try_enter(
    config: &Config,
    pipes: &Pipes,
    around: Kind,
    why_not: Option<&str>,
    failure: &mut RawFd,
) -> Step<Never> {
    let root = unsafe { libc::geteuid() } == 0;
    step("setsid", check(unsafe { libc::setsid() }))?;
    reset_signals();
    if around == Kind::OfUser {
        // The ids that were ours are nobody's here until they are mapped; the configuration's are those outside.
        step(&format!("{WITHOUT}mapping ids"), namespaces::map_ourselves(pipes.ids.0, pipes.ids.1))?;
    }
    let mut said = Vec::new();
    if let Some(cgroup) = config.cgroup {
        step("joining the cgroup", namespaces::join_cgroup(cgroup))?;
        said.push("cgroup=1".to_owned());
    }
    // Before the root is another. Raising it is open to everyone; where /proc is not mounted it is only a wish.
    let _ = std::fs::write("/proc/self/oom_score_adj", config.oom_score_adj.to_string());
    let null = step("opening /dev/null", sys::text("/dev/null").and_then(|name| sys::open(&name, libc::O_RDWR)))?;
    if config.launcher {
        step("making a mount namespace", mounts::leave())?;
        step("making namespaces", namespaces::beside_a_jailers())?;
        for bind in &config.binds {
            step(&format!("binding {}", bind.path.to_string_lossy()), mounts::bind(bind, None))?;
        }
    }
    let jailed = config.jail.is_some();
    let own_root = change_view(config, around, why_not, &mut said)?;
    step("arranging descriptors", arrange(config, pipes, null, failure))?;
    unsafe { libc::umask(0o077) };
    step("leaving the server's directory", std::env::set_current_dir("/"))?;
    for &(limit, value) in &config.rlimits {
        step(&format!("setting limit {limit:?} to {value}"), set_limit(limit, value))?;
    }
    // A jailer needs all of root's rights, and gives them up itself.
    if !config.launcher {
        give_up(config, root)?;
    }
    step("parent-death signal", sys::die_with_parent())?;
    if step("looking for the shim", sys::readers_gone(*failure))? {
        return Err(("the shim died".into(), Error::from_raw_os_error(libc::ESRCH)));
    }
    // QEMU asks for huge pages for its translation cache: clones would each pay megabytes they do not use.
    step("huge pages off", check(unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) }))?;
    let (argv, env) = (pointers(&config.argv), pointers(&config.env));
    if jailed {
        restrict(config, own_root, &mut said)?;
        step("answering", sys::write_all(*failure, format!("{SAID}{}\n", said.join(",")).as_bytes()))?;
    }
    unsafe { libc::execve(argv[0], argv.as_ptr(), env.as_ptr()) };
    Err((format!("executing {}", config.argv[0].to_string_lossy()), Error::last_os_error()))
}

/// Namespaces and root; whether the root is the VMM's own now.
fn change_view(config: &Config, around: Kind, why_not: Option<&str>, said: &mut Vec<String>) -> Step<bool> {
    let Some(root) = config.jail else { return Ok(false) };
    if around == Kind::Ours {
        said.push(format!("no-ns={}", why_not.unwrap_or("not_asked_for")));
        return Ok(false);
    }
    let user = if around == Kind::OfUser { "user+" } else { "" };
    let cgroup = match namespaces::hide_cgroups() {
        Ok(()) => "+cgroup",
        Err(_) => "", // Linux before 4.6
    };
    said.push(format!("ns={user}mnt+pid+net+ipc+uts{cgroup}"));
    match mounts::enter(root, &config.binds, said) {
        Ok(()) => Ok(true),
        Err(mounts::Failure::Bind(path, error)) => {
            Err((format!("binding {}", path.to_string_lossy()), error))
        }
        Err(mounts::Failure::Host(error)) if config.needs("root") => Err(("a root of its own".into(), error)),
        Err(mounts::Failure::Host(error)) => {
            said.push(format!("no-root={}", word(&error)));
            Ok(false)
        }
    }
}

/// What no capability is needed for: landlock, and last the filter of system calls.
fn restrict(config: &Config, own_root: bool, said: &mut Vec<String>) -> Step<()> {
    let usable = config.binds.iter().filter(|bind| !bind.read_only).map(|bind| path_of(&bind.path));
    let usable: Vec<PathBuf> = usable.collect();
    let readable: Vec<PathBuf> = if own_root {
        vec!["/".into()]
    } else {
        // Of a program that was installed elsewhere, what was installed with it.
        let with_it = path_of(&config.argv[0]).parent().and_then(Path::parent).map(Path::to_owned);
        let with_it = with_it.filter(|path| path.parent().is_some());
        landlock::SYSTEM.iter().map(PathBuf::from).chain(with_it).collect()
    };
    match landlock::restrict(&readable, &usable) {
        Ok(version) => said.push(format!("landlock={version}")),
        Err(error) if config.needs("landlock") => return Err(("landlock".into(), error)),
        Err(error) => said.push(format!("no-landlock={}", word(&error))),
    }
    match seccomp::install(config.memfd) {
        Ok(()) => said.push("seccomp=1".into()),
        Err(error) if config.needs("seccomp") => return Err(("the filter of system calls".into(), error)),
        Err(error) => said.push(format!("no-seccomp={}", word(&error))),
    }
    Ok(())
}

/// An error in one word: the answer's parts are between blanks and commas.
pub fn word(error: &Error) -> String {
    let words = error.to_string();
    words.split(" (os").next().unwrap_or_default().replace([' ', ','], "_")
}

fn path_of(text: &CStr) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(text.to_bytes()))
}

/// Ids, capabilities, and the way back to either.
fn give_up(config: &Config, root: bool) -> Step<()> {
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
fn arrange(config: &Config, pipes: &Pipes, null: OwnedFd, failure: &mut RawFd) -> Result<()> {
    // Its number may be that of a place filled below: nobody closes it there.
    let mut wanted = vec![null.into_raw_fd(), pipes.console.as_raw_fd(), pipes.stderr.as_raw_fd()];
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
