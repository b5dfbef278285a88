//! The cgroup (v2) that holds every process but the agent: limits, freezing, and one leaf an exec.
//!
//! Leaves are used again: making one costs more than a process. A leaf whose daemons outlive their exec stays
//! with them until it is empty.

use crate::sys;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const ROOT: &str = "/sys/fs/cgroup";
/// Threads of all together: 2 for each MiB, since 4 of them eat all of it in stacks and page tables, and the
/// kernel then kills one a second. Half of it is one exec's: the other half can still look at a fork bomb.
const PIDS_PER_MIB: u64 = 2;
const PIDS_MIN: u64 = 512;
const PIDS_MAX: u64 = 4096;
/// What the sandbox's processes cannot have: for the agent, and for the kernel outside any cgroup's account.
const RESERVE_BYTES_MIN: u64 = 32 << 20;
const RESERVE_PERCENT: u64 = 4;
/// More idle leaves than this are removed.
const IDLE_MAX: usize = 16;

pub struct Leaf {
    name: String,
    /// Whether who lives in it divides it, so that nobody can afterwards.
    divided: bool,
    dir: OwnedFd,
    events: OwnedFd,
}

pub struct Sandbox {
    dir: OwnedFd,
    events: OwnedFd,
    /// cgroup.freeze, held open since a thaw is what a fresh clone waits for.
    freeze: OwnedFd,
    idle: Vec<Leaf>,
    /// Leaves of ended execs that still held processes when last looked at.
    lingering: Vec<Leaf>,
    made: u64,
    pids_max: u64,
    pub frozen: bool,
}

fn put(dir: RawFd, file: &str, text: &str) -> io::Result<()> {
    let name = CString::new(file).unwrap_or_default();
    let fd = sys::open_at(dir, &name, libc::O_WRONLY, 0)?;
    sys::write(fd.as_raw_fd(), text.as_bytes()).map(drop)
}

fn get(events: &OwnedFd, line: &str) -> bool {
    let mut buffer = [0; 256];
    let n = sys::pread(events.as_raw_fd(), &mut buffer, 0).unwrap_or(0);
    buffer[..n].windows(line.len()).any(|window| window == line.as_bytes())
}

fn open(parent: RawFd, name: &str) -> io::Result<(OwnedFd, OwnedFd)> {
    let name = CString::new(name).unwrap_or_default();
    let dir = sys::open_at(parent, &name, libc::O_RDONLY | libc::O_DIRECTORY, 0)?;
    let events = sys::open_at(dir.as_raw_fd(), c_str(b"cgroup.events\0"), libc::O_RDONLY, 0)?;
    Ok((dir, events))
}

fn c_str(bytes: &'static [u8]) -> &'static std::ffi::CStr {
    std::ffi::CStr::from_bytes_with_nul(bytes).unwrap_or_default()
}

/// An empty cgroup and those in it. What does not go is a directory left.
fn remove(path: &str) {
    for item in std::fs::read_dir(path).into_iter().flatten().flatten() {
        if item.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&item.path().to_string_lossy());
        }
    }
    let _ = std::fs::remove_dir(path);
}

impl Sandbox {
    /// Make the cgroup under a mounted cgroup2, with limits that leave the agent room to work.
    pub fn create(memory_total: u64) -> io::Result<Self> {
        let root = sys::open(&CString::new(ROOT)?, libc::O_RDONLY | libc::O_DIRECTORY, 0)?;
        for controller in ["+memory", "+pids", "+cpu"] {
            // A kernel without one of them still isolates by being a machine of its own.
            let _ = put(root.as_raw_fd(), "cgroup.subtree_control", controller);
        }
        let path = format!("{ROOT}/sandbox");
        std::fs::create_dir_all(&path)?;
        let (dir, events) = open(root.as_raw_fd(), "sandbox")?;
        let pids_max = ((memory_total >> 20) * PIDS_PER_MIB).clamp(PIDS_MIN, PIDS_MAX);
        let reserve = RESERVE_BYTES_MIN.max(memory_total * RESERVE_PERCENT / 100);
        let _ = put(dir.as_raw_fd(), "memory.max", &memory_total.saturating_sub(reserve).to_string());
        let _ = put(dir.as_raw_fd(), "pids.max", &pids_max.to_string());
        // A share of the processor for each exec, however many processes it has: a fork bomb starves itself.
        let _ = put(dir.as_raw_fd(), "cgroup.subtree_control", "+cpu +pids");
        let freeze = sys::open_at(dir.as_raw_fd(), c_str(b"cgroup.freeze\0"), libc::O_WRONLY, 0)?;
        let mut sandbox =
            Self { dir, events, freeze, idle: Vec::new(), lingering: Vec::new(), made: 0, pids_max, frozen: false };
        sandbox.spare()?;
        Ok(sandbox)
    }

    /// See to it that the next exec finds a leaf made.
    pub fn spare(&mut self) -> io::Result<()> {
        if self.idle.is_empty() {
            let leaf = self.make()?;
            self.idle.push(leaf);
        }
        Ok(())
    }

    fn make(&mut self) -> io::Result<Leaf> {
        self.made += 1;
        let name = format!("x{}", self.made);
        let path = CString::new(name.as_str())?;
        // SAFETY: a C string and plain integers.
        sys::cvt(unsafe { libc::mkdirat(self.dir.as_raw_fd(), path.as_ptr(), 0o755) })?;
        let (dir, events) = open(self.dir.as_raw_fd(), &name)?;
        let _ = put(dir.as_raw_fd(), "pids.max", &(self.pids_max / 2).max(1).to_string());
        Ok(Leaf { name, divided: false, dir, events })
    }

    /// `divided`: for an init, which makes cgroups of its own in it.
    pub fn take(&mut self, divided: bool) -> io::Result<Leaf> {
        let mut leaf = match self.idle.pop() {
            Some(leaf) => leaf,
            None => self.make()?,
        };
        leaf.divided = divided;
        Ok(leaf)
    }

    /// Give back a leaf whose exec has ended, and look at those that still had processes.
    pub fn give(&mut self, leaf: Leaf) {
        self.lingering.push(leaf);
        let mut at = 0;
        while at < self.lingering.len() {
            if self.lingering[at].populated() {
                at += 1;
                continue;
            }
            let leaf = self.lingering.swap_remove(at);
            if leaf.divided {
                remove(&format!("{ROOT}/sandbox/{}", leaf.name));
            } else if self.idle.len() < IDLE_MAX {
                self.idle.push(leaf);
            } else if let Ok(name) = CString::new(leaf.name.as_str()) {
                // SAFETY: a C string and plain integers. One that does not go now is one directory left.
                unsafe { libc::unlinkat(self.dir.as_raw_fd(), name.as_ptr(), libc::AT_REMOVEDIR) };
            }
        }
    }

    /// Ask the kernel to freeze or thaw; it says through `events_fd` (EPOLLPRI) when `is_frozen` has changed.
    pub fn set_frozen(&mut self, frozen: bool) -> io::Result<()> {
        sys::write(self.freeze.as_raw_fd(), if frozen { b"1" } else { b"0" })?;
        self.frozen = frozen;
        Ok(())
    }

    pub fn is_frozen(&self) -> bool {
        get(&self.events, "frozen 1")
    }

    pub fn events_fd(&self) -> RawFd {
        self.events.as_raw_fd()
    }

    /// Change what all processes together may have; None leaves it as it is.
    pub fn limit(&mut self, pids: Option<u64>, memory_bytes: Option<u64>) -> io::Result<()> {
        if let Some(pids) = pids {
            put(self.dir.as_raw_fd(), "pids.max", &pids.to_string())?;
            self.pids_max = pids;
            for leaf in &self.idle {
                let _ = put(leaf.dir.as_raw_fd(), "pids.max", &(pids / 2).max(1).to_string());
            }
        }
        memory_bytes.map_or(Ok(()), |bytes| put(self.dir.as_raw_fd(), "memory.max", &bytes.to_string()))
    }

    pub fn processes(&self) -> i64 {
        let mut buffer = [0; 32];
        sys::open_at(self.dir.as_raw_fd(), c_str(b"pids.current\0"), libc::O_RDONLY, 0)
            .and_then(|fd| sys::read(fd.as_raw_fd(), &mut buffer))
            .ok()
            .and_then(|n| std::str::from_utf8(&buffer[..n]).ok()?.trim().parse().ok())
            .unwrap_or(0)
    }
}

impl Leaf {
    pub fn fd(&self) -> RawFd {
        self.dir.as_raw_fd()
    }

    fn populated(&self) -> bool {
        get(&self.events, "populated 1")
    }

    /// SIGKILL to everything in it, whatever it has forked; works on the frozen too.
    pub fn kill(&self) {
        let _ = put(self.dir.as_raw_fd(), "cgroup.kill", "1");
    }
}
