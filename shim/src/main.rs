//! The shim: parent of one virtual machine monitor (VMM).
//!
//! A server that starts VMs can crash; the VMs, their deadlines and the record of how they ended must not
//! depend on it. So each VMM's parent is this: it reads what to start from descriptor 0 (`config`), puts the
//! VMM into its jail (`jail`), says on the status descriptor `ok VMM_PID VMM_START SHIM_PID SHIM_START [JAIL]`
//! (start times in clock ticks; what it could do of the jail that was asked for, between commas) or `error: words`,
//! and then waits (`keeper`) in a session of its own, without terminal, for the first of: the VMM's end, the deadline
//! in `run_dir/deadline` plus grace, SIGTERM (stop the VMM now), the loss of `run_dir`. Meanwhile it holds what must
//! live exactly as long as the VMM, and hands it out again (`serve`).
//! If the shim itself is killed the kernel kills the VMM with it. `--tsc` prints the TSC frequency in kHz,
//! `--save-pages` and its like copy a guest's memory (`pages`).
//!
//! Not here: anything about QEMU or any other VMM, networks, disks, the guest.

mod config;
mod jail;
mod keeper;
mod landlock;
mod mounts;
mod namespaces;
mod pages;
mod record;
mod seccomp;
mod serve;
mod sys;
mod tsc;

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;

use config::Config;
use namespaces::Kind;

const CAP_KILL: u64 = 1 << 5;
const WATCHED: u32 = libc::IN_CLOSE_WRITE
    | libc::IN_MOVED_TO
    | libc::IN_MOVED_FROM
    | libc::IN_DELETE
    | libc::IN_DELETE_SELF
    | libc::IN_MOVE_SELF
    | libc::IN_ONLYDIR;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        None => {}
        Some("--version") => {
            println!("{}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        Some("--tsc") => match tsc::measure() {
            Ok(khz) => {
                println!("{khz}");
                return ExitCode::SUCCESS;
            }
            Err(words) => {
                eprintln!("{words}");
                return ExitCode::FAILURE;
            }
        },
        Some(namespaces::PAUSE) => namespaces::pause(),
        Some(word) if pages::COPIES.contains(&word) => return copy(),
        Some(other) => {
            eprintln!("unknown argument {other}: the configuration is read from standard input");
            return ExitCode::FAILURE;
        }
    }
    let config = sys::read_to_end(0, config::CONFIG_BYTES_MAX)
        .map_err(|error| format!("reading the configuration: {error}"))
        .and_then(|raw| Config::parse(&raw));
    let config = match config {
        Ok(config) => config,
        Err(words) => {
            // Without a configuration there is no status descriptor: standard error is all there is.
            eprintln!("error: {words}");
            return ExitCode::FAILURE;
        }
    };
    match run(&config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(words) => {
            let _ = sys::write_all(config.status, format!("error: {words}\n").as_bytes());
            ExitCode::FAILURE
        }
    }
}

/// One copy of a guest's memory (`pages`). Says its figures on standard output, or `ERRNO words` on standard error.
fn copy() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    // A guest stands still, or is waited for: ahead of those that run, where we may be.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -10) };
    let numbers: Vec<i64> = words[1..].iter().filter_map(|word| word.parse().ok()).collect();
    match pages::copy(&words[0], &numbers) {
        Ok(figures) => {
            println!("{figures}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{} {error}", error.raw_os_error().unwrap_or(0));
            // Damage is told apart by the status alone.
            ExitCode::from(if error.kind() == std::io::ErrorKind::InvalidData { 3 } else { 1 })
        }
    }
}

fn run(config: &Config) -> Result<(), String> {
    let said = |step: &'static str| move |error: std::io::Error| format!("{step}: {error}");
    unsafe { libc::setsid() };
    unsafe { libc::umask(0o077) };
    std::env::set_current_dir("/").map_err(said("leaving the server's directory"))?;
    // What the server holds without close-on-exec is not for us, and still less for the VMM.
    let served = config.serve.iter().map(|(_, fd)| fd).chain(&config.serve_socket);
    let jail = config.binds.iter().map(|bind| &bind.fd).chain(&config.jail).chain(&config.cgroup);
    let named = config.fds.iter().chain(&config.hold).chain([&config.status]).chain(served).chain(jail);
    sys::close_others(3, &mut named.copied().collect::<Vec<_>>());
    let dir = sys::Dir(config.run_dir.clone());
    // Watched before the child exists: a deadline that moves while we start is not missed.
    // A user's instances are few (128 by default, root's too): a machine more than that is looked after once a second.
    let watch = sys::inotify(&config.run_dir, WATCHED)
        .or_else(|error| match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENOSPC) => sys::ticks(),
            _ => Err(error),
        })
        .map_err(said("watching run_dir"))?;
    let signals = sys::signalfd(&[libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGHUP])
        .map_err(said("signalfd"))?;
    let (console, console_end) = sys::pipe().map_err(said("pipe"))?;
    let (stderr, stderr_end) = sys::pipe().map_err(said("pipe"))?;
    let shim = unsafe { libc::getpid() };
    let cgroup = config.cgroup.map(|fd| std::fs::read_link(format!("/proc/self/fd/{fd}"))).transpose();
    let cgroup = cgroup.map_err(said("the cgroup's name"))?;
    let first = match config.launcher {
        true => Some(namespaces::keep_pids(&config.run_dir).map_err(said("making a pid namespace"))?),
        false => None,
    };
    let begun = begin(config, console_end, stderr_end);
    let settled = begun.and_then(|(vmm, jail)| Ok((vmm, settle(config, vmm, shim, &jail)?)));
    let (vmm, answer) = match settled {
        Ok(settled) => settled,
        Err(words) => {
            clean_up(first, cgroup.as_deref());
            return Err(words);
        }
    };
    sys::write_all(config.status, answer.as_bytes()).map_err(said("answering"))?;
    unsafe { libc::close(config.status) };
    let kept = keeper::Keeper { config, dir: &dir, vmm, signals, watch, console, stderr }.run();
    clean_up(first, cgroup.as_deref());
    kept.map_err(|error| format!("keeping the VMM: {error}"))
}

/// What is left when the VMM has ended: the first process of a jailer's pid namespace, and the cgroup.
fn clean_up(first: Option<libc::pid_t>, cgroup: Option<&Path>) {
    if let Some(first) = first {
        // Whatever a jailer has left in its pid namespace ends before the cgroup that it is in.
        unsafe {
            libc::kill(first, libc::SIGKILL);
            libc::waitpid(first, std::ptr::null_mut(), 0);
        }
    }
    if let Some(path) = cgroup {
        namespaces::remove_cgroup(path);
    }
}

/// Make the child and wait until it has become the VMM: its pid, and what it said of its jail.
///
/// Without namespaces of its own where this host does not allow any: what else the jail is, it is made of all the same.
fn begin(config: &Config, console: OwnedFd, stderr: OwnedFd) -> Result<(libc::pid_t, String), String> {
    let ids = unsafe { (libc::getuid(), libc::getgid()) };
    let mut around = match (config.jail, config.userns) {
        (None, _) => Kind::Ours,
        (Some(_), false) => Kind::Own,
        (Some(_), true) => Kind::OfUser,
    };
    let mut why_not: Option<String> = None;
    loop {
        let (failure, failure_end) = sys::pipe().map_err(|error| format!("pipe: {error}"))?;
        let vmm = match namespaces::child(around) {
            Ok(vmm) => vmm,
            Err(error) if around != Kind::Ours && !config.needs("ns") => {
                why_not = Some(jail::word(&error));
                around = Kind::Ours;
                continue;
            }
            Err(error) if around != Kind::Ours => {
                return Err(format!("namespaces of its own: {error} (sysctl user.max_net_namespaces?)"))
            }
            Err(error) => return Err(format!("fork: {error}")),
        };
        if vmm == 0 {
            let pipes = jail::Pipes { console: &console, stderr: &stderr, failure: &failure_end, ids };
            jail::enter(config, &pipes, around, why_not.as_deref());
        }
        drop(failure_end);
        unsafe { libc::fcntl(failure.as_raw_fd(), libc::F_SETFL, 0) };
        let words = sys::read_to_end(failure.as_raw_fd(), 8192).unwrap_or_default();
        let words = String::from_utf8_lossy(&words).into_owned();
        let (said, failed) = match words.strip_prefix(jail::SAID) {
            Some(rest) => rest.split_once('\n').unwrap_or((rest, "")),
            None => ("", &words[..]),
        };
        if failed.is_empty() {
            return Ok((vmm, said.to_owned()));
        }
        unsafe { libc::waitpid(vmm, std::ptr::null_mut(), 0) };
        match failed.strip_prefix(jail::WITHOUT) {
            Some(words) if around != Kind::Ours && !config.needs("ns") => {
                why_not = Some(words.replace([' ', ',', '\n'], "_"));
                around = Kind::Ours;
            }
            _ => return Err(failed.trim_start_matches(jail::WITHOUT).to_owned()),
        }
    }
}

/// Let go of what is not ours to hold, and say who is who.
fn settle(config: &Config, vmm: libc::pid_t, shim: libc::pid_t, jail: &str) -> Result<String, String> {
    // A listening socket held here too would let a connection to a dead VM hang instead of fail.
    let of_jail = config.binds.iter().map(|bind| &bind.fd).chain(&config.jail).chain(&config.cgroup);
    for &fd in config.fds.iter().chain(of_jail) {
        unsafe { libc::close(fd) };
    }
    let null = CString::new("/dev/null").map_err(|error| error.to_string())?;
    let null = sys::open(&null, libc::O_RDWR).map_err(|error| format!("/dev/null: {error}"))?;
    for place in 0..3 {
        unsafe { libc::dup2(null.as_raw_fd(), place) };
    }
    let root = unsafe { libc::geteuid() } == 0;
    // The VMM of a root's shim has another uid: to be able to end it is the one right that is kept.
    sys::capset(if root { CAP_KILL } else { 0 }).map_err(|error| format!("dropping capabilities: {error}"))?;
    sys::no_new_privs().map_err(|error| format!("no_new_privs: {error}"))?;
    let born = |pid| sys::start_ticks(pid).map_err(|error| format!("the VMM ended at once: {error}"));
    Ok(format!("ok {vmm} {} {shim} {} {jail}\n", born(vmm)?, born(shim)?))
}
