//! The parent for as long as the VMM lives: drains its logs, keeps its deadline, ends it, writes down the end.
//!
//! Blocks in `poll`; nothing here runs on a clock. The deadline is a wall-clock time in a file, because a
//! server moves it and may be dead when it matters; the wait for it is on the boot-time clock, taken when
//! the file is read, so that a step of the wall clock neither ends a sandbox early nor lets it live on.

use std::ffi::CString;
use std::io::Result;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::config::Config;
use crate::record::{self, Log, Reason};
use crate::serve;
use crate::sys::{self, Dir};

const READ_BYTES: usize = 65536;
const STDERR_BYTES_MAX: u64 = 65536;

pub struct Keeper<'a> {
    pub config: &'a Config,
    pub dir: &'a Dir,
    pub vmm: libc::pid_t,
    pub signals: OwnedFd,
    pub watch: OwnedFd,
    pub console: OwnedFd,
    pub stderr: OwnedFd,
}

impl Keeper<'_> {
    /// Until the VMM has ended; then its record is written and its sockets are gone.
    pub fn run(self) -> Result<()> {
        let timer = sys::timerfd()?;
        let mut deadline = None;
        // By us, at a deadline that says so; ended all the same by everything that ends a VMM.
        let mut stopped = false;
        self.arm(&timer, &mut deadline)?;
        let mut console = Log::new(self.dir, "serial.log", self.config.console_bytes_max);
        let mut stderr = Log::new(self.dir, "vmm.log", STDERR_BYTES_MAX);
        let mut reason = Reason::Exited;
        let mut open = [true, true];
        let mut ended: Option<libc::c_int> = None;
        while ended.is_none() {
            let ready = wait([
                self.signals.as_raw_fd(),
                self.watch.as_raw_fd(),
                timer.as_raw_fd(),
                if open[0] { self.console.as_raw_fd() } else { -1 },
                if open[1] { self.stderr.as_raw_fd() } else { -1 },
                self.config.serve_socket.unwrap_or(-1),
            ])?;
            if ready[3] {
                open[0] = drain(&self.console, &mut console);
            }
            if ready[4] {
                open[1] = drain(&self.stderr, &mut stderr);
            }
            if ready[5] {
                serve::answer(self.config);
            }
            if ready[1] {
                let before = deadline;
                if self.watched(&timer, &mut deadline)? {
                    self.end(Reason::Stopped, &mut reason);
                }
                if stopped && deadline != before {
                    stopped = false;
                    self.signal(libc::SIGCONT);
                }
            }
            // Nothing to be read: the deadline was moved at the last moment.
            if ready[2] && sys::read(timer.as_raw_fd(), &mut [0; 8]).is_ok() {
                match deadline {
                    Some(Deadline { act: Act::Stop, .. }) => {
                        stopped = true;
                        self.signal(libc::SIGSTOP);
                    }
                    _ => self.end(Reason::Deadline, &mut reason),
                }
            }
            if ready[0] {
                if asked_to_stop(&self.signals) {
                    self.end(Reason::Stopped, &mut reason);
                }
                ended = reap(self.vmm);
            }
        }
        while open[0] && drain_one(&self.console, &mut console) == Some(true) {}
        while open[1] && drain_one(&self.stderr, &mut stderr) == Some(true) {}
        for name in &self.config.unlink {
            self.dir.unlink(name);
        }
        let status = ended.unwrap_or_default();
        record::write_exit(self.dir, &record::exit_json(status, reason, console.tail(), stderr.tail()))
    }

    fn end(&self, why: Reason, reason: &mut Reason) {
        if *reason == Reason::Exited {
            *reason = why;
        }
        self.signal(libc::SIGKILL);
    }

    fn signal(&self, signal: libc::c_int) {
        // It is our child and not yet reaped: the pid cannot be another's.
        unsafe { libc::kill(self.vmm, signal) };
    }

    /// Read what inotify (or, where it has no room, a clock) has to say; true when `run_dir` itself is gone, and with it every way to this VM.
    fn watched(&self, timer: &OwnedFd, deadline: &mut Option<Deadline>) -> Result<bool> {
        let mut events = [0u8; 4096];
        let mut gone = false;
        while let Ok(count) = sys::read(self.watch.as_raw_fd(), &mut events) {
            if count == 0 {
                break;
            }
            let mut at = 0;
            while at + 16 <= count {
                let word = |offset: usize| {
                    u32::from_ne_bytes([events[offset], events[offset + 1], events[offset + 2], events[offset + 3]])
                };
                gone |= word(at + 4) & (libc::IN_DELETE_SELF | libc::IN_MOVE_SELF | libc::IN_IGNORED) != 0;
                at += 16 + word(at + 12) as usize;
            }
        }
        self.arm(timer, deadline)?;
        Ok(gone || self.dir.is_gone())
    }

    /// Set the timer to what `run_dir/deadline` says now. A file that makes no sense changes nothing.
    fn arm(&self, timer: &OwnedFd, deadline: &mut Option<Deadline>) -> Result<()> {
        let name = CString::new("deadline")?;
        let text = match self.dir.open(&name, libc::O_RDONLY) {
            Ok(file) => sys::read_to_end(file.as_raw_fd(), 4096).unwrap_or_else(|_| b"?".to_vec()),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Vec::new(),
            Err(_) => return Ok(()),
        };
        let Ok(next) = parse_deadline(&text) else { return Ok(()) };
        if next != *deadline {
            *deadline = next;
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |age| age.as_secs_f64());
            let grace = self.config.grace_ms as f64 / 1000.0;
            sys::timer_set(timer, next.map(|next| next.unix - now + grace))?;
        }
        Ok(())
    }
}

/// What is done with the VMM at its deadline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Act {
    Kill,
    /// Stand still (SIGSTOP): no time is used and nothing is lost, until a server moves the deadline or adopts it.
    Stop,
}

/// `unix`: seconds since the epoch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Deadline {
    unix: f64,
    act: Act,
}

/// `SECONDS` or `SECONDS stop`; empty = none.
pub fn parse_deadline(text: &[u8]) -> std::result::Result<Option<Deadline>, ()> {
    let text = std::str::from_utf8(text).map_err(|_| ())?.trim();
    if text.is_empty() {
        return Ok(None);
    }
    let (number, act) = match text.split_once(' ') {
        None => (text, Act::Kill),
        Some((number, "stop")) => (number, Act::Stop),
        Some(_) => return Err(()),
    };
    let unix: f64 = number.parse().map_err(|_| ())?;
    if unix.is_finite() {
        Ok(Some(Deadline { unix, act }))
    } else {
        Err(())
    }
}

fn wait(fds: [libc::c_int; 6]) -> Result<[bool; 6]> {
    let mut polled = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    loop {
        match sys::check(unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, -1) }) {
            Ok(_) => return Ok(polled.map(|entry| entry.revents != 0)),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// One read; Some(true) = got something, Some(false) = nothing there, None = the end.
fn drain_one(fd: &OwnedFd, log: &mut Log) -> Option<bool> {
    let mut buffer = [0; READ_BYTES];
    match sys::read(fd.as_raw_fd(), &mut buffer) {
        Ok(0) => None,
        Ok(count) => {
            log.write(&buffer[..count]);
            Some(true)
        }
        Err(_) => Some(false),
    }
}

fn drain(fd: &OwnedFd, log: &mut Log) -> bool {
    drain_one(fd, log).is_some()
}

fn asked_to_stop(signals: &OwnedFd) -> bool {
    let size = std::mem::size_of::<libc::signalfd_siginfo>();
    let mut buffer = [0u8; 1024];
    let mut asked = false;
    while let Ok(count) = sys::read(signals.as_raw_fd(), &mut buffer) {
        for info in buffer[..count].chunks_exact(size) {
            asked |= u32::from_ne_bytes([info[0], info[1], info[2], info[3]]) == libc::SIGTERM as u32;
        }
    }
    asked
}

fn reap(vmm: libc::pid_t) -> Option<libc::c_int> {
    let mut status = 0;
    (unsafe { libc::waitpid(vmm, &mut status, libc::WNOHANG) } == vmm).then_some(status)
}

#[cfg(test)]
mod tests {
    use super::{parse_deadline, Act, Deadline};

    #[test]
    fn deadlines() {
        assert_eq!(parse_deadline(b""), Ok(None));
        assert_eq!(parse_deadline(b" \n"), Ok(None));
        let unix = 1_700_000_000.25;
        assert_eq!(parse_deadline(b"1700000000.25\n"), Ok(Some(Deadline { unix, act: Act::Kill })));
        assert_eq!(parse_deadline(b"1700000000.25 stop\n"), Ok(Some(Deadline { unix, act: Act::Stop })));
        for bad in [&b"soon"[..], b"nan", b"inf", b"\xff", b"17 dance", b"stop", b"17 stop stop"] {
            assert_eq!(parse_deadline(bad), Err(()));
        }
    }
}
