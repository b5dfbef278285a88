//! PID 1's duties: from the initramfs to a root file system with every process but us in a cgroup; then the agent's
//! loop until the host powers off. Any failure here is the machine's: it is said on the console, and the machine ends.

use crate::agent::{Agent, Machine};
use crate::cgroup::Sandbox;
use crate::channel::Channel;
use crate::devices::{self, Found};
use crate::disks;
use crate::fsfreeze::Disks;
use crate::nested;
use crate::network;
use crate::restore::{Names, BOOT_ID, RUN};
use crate::sys::{self, cvt};
use crate::volumes::Mounted;
use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{symlink, DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

const PORT_NAME: &str = "llm4agents.agent";
const MODULES: &str = "/modules.order";
const HOSTNAME: &str = "sandbox";
const OPEN_FILES_SOFT: u64 = 65_536;
const OPEN_FILES_HARD: u64 = 1_048_576;
const NICE: i32 = -10;

const LOWER: &str = "/lower";
const UPPER: &str = "/upper";
const ROOT: &str = "/newroot";

const SYSCTLS: &[(&str, &str)] = &[
    ("vm/panic_on_oom", "0"),
    ("kernel/printk", "4 4 1 4"),
    ("kernel/sysrq", "0"),
    ("fs/inotify/max_user_watches", "524288"),
    ("fs/inotify/max_user_instances", "1024"),
    ("vm/max_map_count", "262144"),
    // Counters are folded once a second otherwise, which is a fifth of what an idle clone costs.
    ("vm/stat_interval", "60"),
    // An ordinary user may serve port 80 and ping: the machine is all its own.
    ("net/ipv4/ip_unprivileged_port_start", "0"),
    ("net/ipv4/ping_group_range", "0 2147483647"),
];

type Step<T> = Result<T, String>;

trait Context<T> {
    fn doing(self, what: impl std::fmt::Display) -> Step<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn doing(self, what: impl std::fmt::Display) -> Step<T> {
        self.map_err(|error| format!("{what}: {error}"))
    }
}

/// Never returns: the machine ends with it.
pub fn run() -> ! {
    console();
    std::panic::set_hook(Box::new(|panic| {
        say(&format!("panic: {panic}"));
        reboot(libc::RB_AUTOBOOT);
    }));
    match start().and_then(|(mut agent, how)| agent.run().doing("channel").map(|()| how)) {
        Ok(how) => {
            // SAFETY: takes nothing, cannot fail.
            unsafe { libc::sync() };
            reboot(how);
        }
        Err(error) => say(&error),
    }
    reboot(libc::RB_AUTOBOOT)
}

fn say(message: &str) {
    eprintln!("llm4agents-agent: {message}");
}

fn reboot(how: libc::c_int) -> ! {
    loop {
        // SAFETY: plain integers. Either ends the VMM, where its machine can be switched off at all.
        unsafe {
            libc::reboot(how);
            libc::reboot(libc::RB_AUTOBOOT);
            libc::pause();
        }
    }
}

/// Descriptors 0 to 2 must be something, or what is opened next would be.
fn console() {
    // SAFETY: plain integers and C strings.
    unsafe {
        while libc::fcntl(0, libc::F_GETFD) < 0
            || libc::fcntl(1, libc::F_GETFD) < 0
            || libc::fcntl(2, libc::F_GETFD) < 0
        {
            for path in [&b"/dev/console\0"[..], b"/dev/null\0", b"/\0"] {
                if libc::open(path.as_ptr().cast(), if path == b"/\0" { libc::O_RDONLY } else { libc::O_RDWR }) >= 0 {
                    break;
                }
            }
        }
    }
}

/// The agent, and how its machine is switched off.
fn start() -> Step<(Agent, libc::c_int)> {
    for (kind, path) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        mount(kind, path, kind, libc::MS_NOSUID, "")?;
    }
    let how = if power_off_ends() { libc::RB_POWER_OFF } else { libc::RB_AUTOBOOT };
    let events = devices::uevents();
    let pci = devices::has_pci();
    load_modules(|name| devices::is_bus(name, pci))?;
    // Buses are looked through as their drivers load, so this waits for nothing; but it would.
    let found = devices::wait(&events, || Some(Found::look(pci)).filter(Found::has_disks))
        .ok_or("there is no virtio disk: neither on virtio-mmio nor on PCI")?;
    load_modules(|name| !devices::is_bus(name, pci) && found.wants(name))?;
    let port = match found.vsock() {
        true => None,
        false => devices::wait(&events, || Channel::port(&port_name()).transpose()),
    };
    let upper = mount_root(&events)?;
    nested::load(load)?;
    switch_root()?;
    mount_rest()?;
    nested::open_devices();
    let names = settle()?;
    let channel = match port {
        Some(channel) => channel.doing("open the agent's port")?,
        None => Channel::vsock().doing(format_args!("listen on vsock, there being no virtio port {PORT_NAME}"))?,
    };
    let machine = machine(names, upper)?;
    prefer();
    Ok((Agent::new(channel, Some(machine)).doing("start the agent")?, how))
}

fn argument(name: &str) -> Option<String> {
    let line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned)
}

fn port_name() -> String {
    argument("l4.port").unwrap_or(PORT_NAME.to_owned())
}

/// A VMM whose machine has no power button (Firecracker) is told to reset by the keyboard controller, which is how it
/// ends; "off" would leave its processor halted for ever.
fn power_off_ends() -> bool {
    argument("reboot").as_deref() != Some("k")
}

fn mount(source: &str, target: &str, kind: &str, flags: libc::c_ulong, data: &str) -> Step<()> {
    let _ = fs::create_dir_all(target);
    let c = |text: &str| CString::new(text).unwrap_or_default();
    let (source, path, kind, data) = (c(source), c(target), c(kind), c(data));
    // SAFETY: C strings that live through the call.
    let result = unsafe { libc::mount(source.as_ptr(), path.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast()) };
    cvt(result).map(drop).doing(format_args!("mount {target}"))
}

// Drivers and devices

fn load_modules(wanted: impl Fn(&str) -> bool) -> Step<()> {
    let order = fs::read_to_string(MODULES).unwrap_or_default();
    let paths = order.lines().map(str::trim).filter(|path| !path.is_empty());
    paths.filter(|path| wanted(devices::module_name(path))).try_for_each(load)
}

fn load(path: &str) -> Step<()> {
    let file = fs::File::open(path).doing(format_args!("module {path}"))?;
    // SAFETY: an open file and an empty string.
    let result = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), b"\0".as_ptr(), 0) };
    let error = io::Error::last_os_error();
    if result != 0 && error.raw_os_error() != Some(libc::EEXIST) {
        return Err(format!("module {path}: {error}"));
    }
    Ok(())
}

// The root file system

/// The upper disk's own directory, which is under the overlay and has no path any more afterwards.
fn mount_root(events: &Option<OwnedFd>) -> Step<OwnedFd> {
    let find = |slot: &str| devices::wait(events, || disks::find(slot)).ok_or(format!("there is no disk {slot}"));
    let (lower, upper) = (find("root")?, find("upper")?);
    mount(&lower, LOWER, "erofs", libc::MS_RDONLY, "")?;
    // No background thread that fills in inode tables: it would be running in every clone. What is removed is given
    // back to the host, whose bound of the disk counts what has ever been written and not given back.
    mount(&upper, UPPER, "ext4", libc::MS_NOATIME, "noinit_itable,discard")?;
    for name in ["upper", "work"] {
        let path = format!("{UPPER}/{name}");
        fs::DirBuilder::new().recursive(true).mode(0o755).create(&path).doing(format_args!("mkdir {path}"))?;
    }
    // redirect_dir: a directory of the image can be renamed like any other.
    let options = format!("lowerdir={LOWER},upperdir={UPPER}/upper,workdir={UPPER}/work,redirect_dir=on");
    mount("overlay", ROOT, "overlay", libc::MS_NOATIME, &options)?;
    let path = CString::new(UPPER).unwrap_or_default();
    sys::open(&path, libc::O_RDONLY | libc::O_DIRECTORY, 0).doing(format_args!("open {UPPER}"))
}

fn switch_root() -> Step<()> {
    for name in ["proc", "sys", "dev"] {
        let target = format!("{ROOT}/{name}");
        mount(&format!("/{name}"), &target, "", libc::MS_MOVE, "")?;
    }
    // The initramfs is memory: only what has a mount on it stays.
    if let Ok(device) = fs::metadata("/").map(|root| root.dev()) {
        empty(Path::new("/"), device);
    }
    std::env::set_current_dir(ROOT).doing("chdir to the new root")?;
    let (dot, root) = (CString::new(".").unwrap_or_default(), CString::new("/").unwrap_or_default());
    // SAFETY: C strings that live through the calls.
    unsafe {
        cvt(libc::mount(dot.as_ptr(), root.as_ptr(), std::ptr::null(), libc::MS_MOVE, std::ptr::null()))
            .doing("move the new root")?;
        cvt(libc::chroot(dot.as_ptr())).doing("chroot")?;
    }
    std::env::set_current_dir("/").doing("chdir /")
}

fn empty(directory: &Path, device: u64) {
    for item in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = item.path();
        match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.dev() != device => {}
            Ok(metadata) if metadata.is_dir() => {
                empty(&path, device);
                let _ = fs::remove_dir(&path);
            }
            _ => drop(fs::remove_file(&path)),
        }
    }
}

fn mount_rest() -> Step<()> {
    let (safe, tmpfs) = (libc::MS_NOSUID | libc::MS_NODEV, "tmpfs");
    mount("devpts", "/dev/pts", "devpts", libc::MS_NOSUID | libc::MS_NOEXEC, "mode=620,gid=5,ptmxmode=666")?;
    mount(tmpfs, "/dev/shm", tmpfs, safe, "mode=1777")?;
    mount(tmpfs, "/run", tmpfs, safe, "mode=755")?;
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", safe | libc::MS_NOEXEC, "")?;
    for (link, target) in [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")] {
        let _ = symlink(target, format!("/dev/{link}"));
    }
    shared_directory("/tmp")?;
    // A service of an ordinary user puts its socket here.
    shared_directory(RUN)?;
    shared_directory("/run/lock")
}

fn shared_directory(path: &str) -> Step<()> {
    let _ = fs::create_dir_all(path);
    if fs::metadata(path).is_ok_and(|metadata| metadata.mode() & 0o7777 == 0o1777) {
        return Ok(()); // no copy-up for nothing
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o1777)).doing(format_args!("chmod {path}"))
}

// The machine's settings

fn settle() -> Step<Names> {
    // SAFETY: plain integers.
    unsafe { libc::umask(0o022) };
    for (name, value) in SYSCTLS {
        let _ = fs::write(format!("/proc/sys/{name}"), value); // not every kernel has every one
    }
    loopback().doing("set lo up")?;
    network::boot().map_err(|failure| failure.message)?;
    let mut names = Names::link().map_err(|failure| failure.message)?;
    names.set_hostname(HOSTNAME).map_err(|failure| failure.message)?;
    // So that what asks the kernel hears of each clone's own boot id too.
    let _ = mount(BOOT_ID, "/proc/sys/kernel/random/boot_id", "", libc::MS_BIND, "");
    for (resource, soft, hard) in [
        (libc::RLIMIT_NOFILE, OPEN_FILES_SOFT, OPEN_FILES_HARD),
        (libc::RLIMIT_CORE, 0, libc::RLIM_INFINITY),
        (libc::RLIMIT_NPROC, libc::RLIM_INFINITY, libc::RLIM_INFINITY),
        (libc::RLIMIT_MEMLOCK, libc::RLIM_INFINITY, libc::RLIM_INFINITY),
    ] {
        let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
        // SAFETY: a limit that lives through the call.
        unsafe { libc::setrlimit(resource, &limit) };
    }
    Ok(names)
}

fn loopback() -> io::Result<()> {
    // SAFETY: a request made here, of the kind the calls want; the descriptor is ours.
    unsafe {
        let socket = OwnedFd::from_raw_fd(cvt(libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0))?);
        let mut request: libc::ifreq = std::mem::zeroed();
        (request.ifr_name[0], request.ifr_name[1]) = (b'l' as libc::c_char, b'o' as libc::c_char);
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        cvt(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &request)).map(drop)
    }
}

fn machine(names: Names, upper: OwnedFd) -> Step<Machine> {
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib: u64 = memory.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
    let random = CStr::from_bytes_with_nul(b"/dev/urandom\0").unwrap_or_default();
    Ok(Machine {
        sandbox: Sandbox::create(kib * 1024).doing("make the sandbox cgroup")?,
        random: sys::open(random, libc::O_RDWR, 0).doing("open /dev/urandom")?,
        names,
        disks: Disks::new(upper),
        volumes: Mounted::default(),
        boot_id: fs::read_to_string(BOOT_ID).unwrap_or_default().trim().replace('-', ""),
    })
}

/// Ahead of everything else that wants the processor; what we start is not (RESET_ON_FORK).
fn prefer() {
    // SAFETY: plain integers and a parameter that lives through the call.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, NICE);
        let parameter = libc::sched_param { sched_priority: 0 };
        libc::sched_setscheduler(0, libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK, &parameter);
    }
}
