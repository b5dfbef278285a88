//! One process, started as cheaply as the kernel allows: `clone3` with shared memory (vfork) straight into its cgroup.
//!
//! The child runs on a stack of its own and makes only raw system calls until `execve`: it shares our memory, and
//! libc's wrappers (setuid…) would reach into our other threads. Not for what a process is to do: that is `exec`.

use crate::sys::{self, cvt};
use std::ffi::{c_char, c_int, c_long, c_void};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr;

/// Many NUL-terminated strings in one allocation, and the array of pointers that execve wants.
#[derive(Default)]
pub struct Strings {
    bytes: Vec<u8>,
    starts: Vec<usize>,
}

impl Strings {
    /// Append the string that `parts` make; None if it has a NUL inside.
    pub fn push(&mut self, parts: &[&[u8]]) -> Option<()> {
        if parts.iter().any(|part| part.contains(&0)) {
            return None;
        }
        self.starts.push(self.bytes.len());
        for part in parts {
            self.bytes.extend_from_slice(part);
        }
        self.bytes.push(0);
        Some(())
    }

    fn pointers(&self) -> Vec<*const c_char> {
        let base = self.bytes.as_ptr();
        self.starts.iter().map(|at| base.wrapping_add(*at).cast()).chain([ptr::null()]).collect()
    }
}

pub struct Identity<'a> {
    pub uid: u32,
    pub gid: u32,
    pub groups: &'a [u32],
}

/// The namespaces of an init (see `enclose`), held open.
pub struct Inside {
    pid: OwnedFd,
    mounts: OwnedFd,
    cgroup: OwnedFd,
    /// The agent's own, to come back to.
    own: OwnedFd,
}

impl Inside {
    /// Those of process `pid`.
    pub fn of(pid: i32) -> io::Result<Self> {
        let open = |path: String| {
            let path = std::ffi::CString::new(path).unwrap_or_default();
            sys::open(&path, libc::O_RDONLY | libc::O_CLOEXEC, 0)
        };
        Ok(Self {
            pid: open(format!("/proc/{pid}/ns/pid"))?,
            mounts: open(format!("/proc/{pid}/ns/mnt"))?,
            cgroup: open(format!("/proc/{pid}/ns/cgroup"))?,
            own: open("/proc/self/ns/pid".to_owned())?,
        })
    }
}

pub struct Command<'a> {
    pub argv: Strings,
    pub env: Strings,
    /// Files to try to execute, in order; the first that is there and executable is it.
    pub files: Strings,
    /// Working directories to try, in order.
    pub cwd: Strings,
    /// None: as the agent itself.
    pub identity: Option<Identity<'a>>,
    /// stdin, stdout, stderr; each above 2.
    pub fds: [RawFd; 3],
    /// Whether they are a terminal, which becomes its controlling one.
    pub terminal: bool,
    /// The cgroup (a directory) to be born into.
    pub cgroup: Option<RawFd>,
    /// Whether it is process 1 of a PID namespace, with mounts of its own and its cgroup for a root: see `enclose`.
    pub init: bool,
    /// Whose processes, mounts and cgroup tree it is to see; None: the machine's.
    pub inside: Option<Inside>,
}

/// At which step a start failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Setup,
    Directory,
    Exec,
}

struct Child {
    argv: *const *const c_char,
    env: *const *const c_char,
    files: *const *const c_char,
    cwd: *const *const c_char,
    identity: bool,
    uid: c_long,
    gid: c_long,
    groups: *const u32,
    groups_len: usize,
    fds: [RawFd; 3],
    terminal: bool,
    init: bool,
    /// Mount and cgroup namespaces to enter, or -1.
    enter: [RawFd; 2],
    errno: c_int,
    step: Step,
}

const STACK: usize = 64 * 1024;

/// Starts processes; holds the stack children borrow.
pub struct Spawner {
    stack: *mut c_void,
    /// /proc/self/oom_score_adj, held open: it is inherited, so it is ours only between two starts.
    oom: Option<OwnedFd>,
}

impl Spawner {
    /// `protect`: keep the agent (and not its children) from the out-of-memory killer.
    pub fn new(protect: bool) -> io::Result<Self> {
        // SAFETY: a fresh anonymous mapping.
        let stack = unsafe {
            libc::mmap(
                ptr::null_mut(),
                STACK,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if stack == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let path = std::ffi::CStr::from_bytes_with_nul(b"/proc/self/oom_score_adj\0").unwrap_or_default();
        let oom = if protect { sys::open(path, libc::O_WRONLY, 0).ok() } else { None };
        let spawner = Self { stack, oom };
        spawner.oom_score("-1000");
        Ok(spawner)
    }

    fn oom_score(&self, score: &str) {
        if let Some(fd) = &self.oom {
            let _ = sys::write(fd.as_raw_fd(), score.as_bytes());
        }
    }

    /// The pid, once the new program runs.
    pub fn spawn(&mut self, command: &Command) -> Result<i32, (Step, io::Error)> {
        let (argv, env) = (command.argv.pointers(), command.env.pointers());
        let (files, cwd) = (command.files.pointers(), command.cwd.pointers());
        let mut child = Child {
            argv: argv.as_ptr(),
            env: env.as_ptr(),
            files: files.as_ptr(),
            cwd: cwd.as_ptr(),
            identity: command.identity.is_some(),
            uid: command.identity.as_ref().map_or(0, |who| who.uid.into()),
            gid: command.identity.as_ref().map_or(0, |who| who.gid.into()),
            groups: command.identity.as_ref().map_or(ptr::null(), |who| who.groups.as_ptr()),
            groups_len: command.identity.as_ref().map_or(0, |who| who.groups.len()),
            fds: command.fds,
            terminal: command.terminal,
            init: command.init,
            enter: command.inside.as_ref().map_or([-1; 2], |to| [to.cgroup.as_raw_fd(), to.mounts.as_raw_fd()]),
            errno: 0,
            step: Step::Setup,
        };
        if let Some(inside) = &command.inside {
            children_in(&inside.pid).map_err(|error| (Step::Setup, error))?;
        }
        self.oom_score("0");
        // SAFETY: `child` and what it points to outlive the call, which returns after the child has let go of them.
        let pid = unsafe { clone_vfork(&mut child, self.stack, command.cgroup) };
        self.oom_score("-1000");
        if let Some(inside) = &command.inside {
            let _ = children_in(&inside.own); // a namespace that one comes from lets one back
        }
        let pid = pid.map_err(|error| (Step::Setup, error))?;
        if child.errno != 0 {
            sys::reap(pid, true);
            return Err((child.step, io::Error::from_raw_os_error(child.errno)));
        }
        Ok(pid)
    }
}

/// The PID namespace of what this thread starts from now on.
fn children_in(namespace: &OwnedFd) -> io::Result<()> {
    // SAFETY: an open descriptor and a plain integer.
    cvt(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWPID) }).map(drop)
}

#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

fn namespaces(init: bool) -> u64 {
    if init {
        (libc::CLONE_NEWPID | libc::CLONE_NEWNS) as u64
    } else {
        0
    }
}

/// # Safety: `child` is complete, `stack` has STACK bytes that nothing else uses.
#[cfg(target_arch = "x86_64")]
unsafe fn clone_vfork(child: &mut Child, stack: *mut c_void, cgroup: Option<RawFd>) -> io::Result<i32> {
    let args = CloneArgs {
        flags: (libc::CLONE_VM | libc::CLONE_VFORK) as u64
            | if cgroup.is_some() { CLONE_INTO_CGROUP } else { 0 }
            | namespaces(child.init),
        exit_signal: libc::SIGCHLD as u64,
        stack: stack as u64,
        stack_size: STACK as u64,
        cgroup: cgroup.unwrap_or(0) as u64,
        ..CloneArgs::default()
    };
    let result: i64;
    // The child comes out of the system call on its own stack and must not return from here.
    std::arch::asm!(
        "syscall",
        "test rax, rax",
        "jnz 2f",
        "xor ebp, ebp",
        "mov rdi, r12",
        "call r13",
        "ud2",
        "2:",
        inout("rax") libc::SYS_clone3 => result,
        in("rdi") &args,
        in("rsi") std::mem::size_of::<CloneArgs>(),
        in("r12") child as *mut Child,
        in("r13") run_child as unsafe extern "C" fn(*mut Child) -> !,
        out("rcx") _,
        out("r11") _,
    );
    if result < 0 {
        Err(io::Error::from_raw_os_error(-result as i32))
    } else {
        Ok(result as i32)
    }
}

/// Elsewhere a plain fork: dearer, and the child's error comes back through a pipe instead of shared memory.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn clone_vfork(child: &mut Child, _stack: *mut c_void, cgroup: Option<RawFd>) -> io::Result<i32> {
    let shared = libc::mmap(
        ptr::null_mut(),
        4096,
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_SHARED | libc::MAP_ANONYMOUS,
        -1,
        0,
    );
    if shared == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let copy = shared.cast::<Child>();
    ptr::copy_nonoverlapping(child, copy, 1);
    let args = CloneArgs {
        flags: libc::CLONE_VFORK as u64 | if cgroup.is_some() { CLONE_INTO_CGROUP } else { 0 } | namespaces(child.init),
        exit_signal: libc::SIGCHLD as u64,
        cgroup: cgroup.unwrap_or(0) as u64,
        ..CloneArgs::default()
    };
    let result = libc::syscall(libc::SYS_clone3, &args, std::mem::size_of::<CloneArgs>());
    if result == 0 {
        run_child(copy);
    }
    let error = io::Error::last_os_error();
    (child.errno, child.step) = ((*copy).errno, (*copy).step);
    libc::munmap(shared, 4096);
    if result < 0 {
        Err(error)
    } else {
        Ok(result as i32)
    }
}

/// # Safety: only called in the fresh child.
unsafe extern "C" fn run_child(child: *mut Child) -> ! {
    let child = &mut *child;
    let errno = match become_program(child) {
        Ok(()) => 0,
        Err(error) => error.raw_os_error().unwrap_or(libc::EIO),
    };
    child.errno = errno;
    loop {
        libc::syscall(libc::SYS_exit_group, 127);
    }
}

/// The kernel's sigaction: handler, flags, restorer, mask.
type KernelSigaction = [u64; 4];

unsafe fn become_program(child: &mut Child) -> io::Result<()> {
    let raw = |result: c_long| cvt(result as c_int);
    let default: KernelSigaction = [0; 4];
    let nothing = 0u64;
    raw(libc::syscall(libc::SYS_rt_sigaction, libc::SIGPIPE, &default, 0usize, 8usize))?;
    raw(libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &nothing, 0usize, 8usize))?;
    raw(libc::syscall(libc::SYS_setsid))?;
    if child.init {
        enclose()?;
    }
    for (namespace, kind) in child.enter.iter().zip([libc::CLONE_NEWCGROUP, libc::CLONE_NEWNS]) {
        if *namespace >= 0 {
            raw(libc::syscall(libc::SYS_setns, *namespace, kind))?;
        }
    }
    for (to, from) in child.fds.iter().enumerate() {
        raw(libc::syscall(libc::SYS_dup3, *from, to as c_int, 0))?;
    }
    if child.terminal {
        raw(libc::syscall(libc::SYS_ioctl, 0usize, libc::TIOCSCTTY, 0usize))?;
    }
    if child.identity {
        raw(libc::syscall(libc::SYS_setgroups, child.groups_len, child.groups))?;
        raw(libc::syscall(libc::SYS_setresgid, child.gid, child.gid, child.gid))?;
        raw(libc::syscall(libc::SYS_setresuid, child.uid, child.uid, child.uid))?;
    }
    child.step = Step::Directory;
    first(child.cwd, |path| raw(libc::syscall(libc::SYS_chdir, path)))?;
    child.step = Step::Exec;
    // A look first: an execve that fails costs far more than a lookup that does.
    first(child.files, |path| {
        raw(libc::syscall(libc::SYS_faccessat, libc::AT_FDCWD, path, libc::X_OK))?;
        raw(libc::syscall(libc::SYS_execve, path, child.argv, child.env))
    })
}

/// What an init of a distribution expects to find: the processes of its namespace in /proc, a /sys it cannot change,
/// and its own cgroup, which it may divide, as the root of the tree. /run and /tmp stay everybody's, so that its
/// sockets can be reached from outside (systemctl). The names are of our own mount namespace.
///
/// # Safety: only called in the fresh child, in new PID and mount namespaces.
unsafe fn enclose() -> io::Result<()> {
    let mount = |source: &[u8], target: &[u8], kind: &[u8], flags: libc::c_ulong| {
        let (source, target, kind): (*const u8, *const u8, *const u8) =
            (source.as_ptr(), target.as_ptr(), kind.as_ptr());
        cvt(libc::syscall(libc::SYS_mount, source, target, kind, flags, 0usize) as c_int).map(drop)
    };
    let safe = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    // Only now: it is the cgroup it was born into that becomes the root.
    cvt(libc::syscall(libc::SYS_unshare, libc::CLONE_NEWCGROUP) as c_int)?;
    mount(b"\0", b"/\0", b"\0", libc::MS_REC | libc::MS_SLAVE)?;
    mount(b"proc\0", b"/proc\0", b"proc\0", safe)?;
    let _ = mount(crate::restore::BOOT_ID_C, b"/proc/sys/kernel/random/boot_id\0", b"\0", libc::MS_BIND);
    mount(b"\0", b"/sys\0", b"\0", safe | libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY)?;
    // A file system is not mounted over itself, however different its root is here.
    let tree: *const u8 = b"/sys/fs/cgroup\0".as_ptr();
    cvt(libc::syscall(libc::SYS_umount2, tree, libc::MNT_DETACH) as c_int)?;
    mount(b"cgroup2\0", b"/sys/fs/cgroup\0", b"cgroup2\0", safe)
}

/// Try each until one works; the error is the first one that says more than "not there".
unsafe fn first(
    mut paths: *const *const c_char,
    mut attempt: impl FnMut(*const c_char) -> io::Result<c_int>,
) -> io::Result<()> {
    let mut errno = libc::ENOENT;
    while !(*paths).is_null() {
        match attempt(*paths) {
            Ok(_) => return Ok(()),
            Err(error) => {
                let found = error.raw_os_error().unwrap_or(libc::EIO);
                if errno == libc::ENOENT && found != libc::ENOTDIR {
                    errno = found;
                }
            }
        }
        paths = paths.add(1);
    }
    Err(io::Error::from_raw_os_error(errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(files: &[&str], argv: &[&str], cwd: &str) -> Result<(i32, Vec<u8>), (Step, i32)> {
        let null = sys::open(std::ffi::CStr::from_bytes_with_nul(b"/dev/null\0").unwrap(), libc::O_RDWR, 0).unwrap();
        let (reader, writer) = sys::pipe().unwrap();
        let strings = |items: &[&str]| {
            let mut strings = Strings::default();
            items.iter().for_each(|item| strings.push(&[item.as_bytes()]).unwrap());
            strings
        };
        let command = Command {
            argv: strings(argv),
            env: strings(&["A=b"]),
            files: strings(files),
            cwd: strings(&[cwd]),
            identity: None,
            fds: [null.as_raw_fd(), writer.as_raw_fd(), null.as_raw_fd()],
            terminal: false,
            cgroup: None,
            init: false,
            inside: None,
        };
        let pid = Spawner::new(false)
            .unwrap()
            .spawn(&command)
            .map_err(|(step, error)| (step, error.raw_os_error().unwrap()))?;
        drop(writer);
        let mut out = Vec::new();
        while sys::read_onto(reader.as_raw_fd(), &mut out, 4096).unwrap() > 0 {}
        Ok((sys::reap(pid, true).unwrap().exit_code.unwrap(), out))
    }

    #[test]
    fn runs_with_its_own_environment_directory_and_session() {
        let script = "echo $A $PWD; test $(cut -d' ' -f6 /proc/$$/stat) = $$ && exit 7";
        assert_eq!(run(&["/nope/sh", "/bin/sh"], &["sh", "-c", script], "/usr").unwrap(), (7, b"b /usr\n".to_vec()));
    }

    #[test]
    fn says_what_failed() {
        assert_eq!(run(&["/nope"], &["x"], "/"), Err((Step::Exec, libc::ENOENT)));
        assert_eq!(run(&["/etc/passwd", "/nope"], &["x"], "/"), Err((Step::Exec, libc::EACCES)));
        assert_eq!(run(&["/bin/sh"], &["x"], "/nope"), Err((Step::Directory, libc::ENOENT)));
    }

    #[test]
    fn a_nul_is_refused() {
        assert!(Strings::default().push(&[b"a\0b"]).is_none());
    }
}
