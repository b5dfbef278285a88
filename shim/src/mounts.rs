//! Mounts in a mount namespace of the VMM's own: nothing done here is seen outside, so nothing is to be undone.
//!
//! Sources are descriptors, opened by whoever decided what the VMM gets. A descriptor belongs to the namespace it
//! was opened in and cannot be a mount's source in another, so each is opened again by its name here and is used
//! only if it is the same file still.

use std::ffi::{CStr, CString};
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;

use crate::config::Bind;
use crate::sys::{self, check, text};

const NOTHING: libc::c_ulong = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;

/// `mount` with what is absent as NULL.
fn mount(
    source: Option<&CStr>,
    target: &CStr,
    kind: Option<&CStr>,
    flags: libc::c_ulong,
    data: Option<&CStr>,
) -> Result<()> {
    let pointer = |text: Option<&CStr>| text.map_or(std::ptr::null(), CStr::as_ptr);
    // SAFETY: strings that live through the call.
    let done =
        unsafe { libc::mount(pointer(source), target.as_ptr(), pointer(kind), flags, pointer(data).cast()) };
    check(done)?;
    Ok(())
}

/// A mount namespace of our own, from and to which no mount spreads.
pub fn leave() -> Result<()> {
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    private()
}

/// No mount of this namespace spreads to another, or comes from one.
fn private() -> Result<()> {
    mount(None, &text("/")?, None, libc::MS_REC | libc::MS_PRIVATE, None)
}

/// Bind what `bind.fd` is onto its path, which exists, in the directory `under` (None: the root).
pub fn bind(bind: &Bind, under: Option<RawFd>) -> Result<()> {
    let source = again(bind.fd)?;
    let target = at(under, &bind.path)?;
    mount(Some(&by_fd(&source)?), &by_fd(&target)?, None, libc::MS_BIND, None)?;
    // What may be written is a device or a file: it needs neither set-user-id nor execution.
    let flags = if bind.read_only { libc::MS_RDONLY | NOTHING } else { libc::MS_NOSUID | libc::MS_NOEXEC };
    // The name leads to what lies on top now.
    change(&at(under, &bind.path)?, flags)
}

/// Make the directory `root` the root of this mount namespace, read-only, with a `/proc` of this pid namespace and
/// these binds on it. `Err(Failure::Host)`: this host does not allow it, and the old root is where it was.
///
/// `said` is told how. The working directory is the root afterwards.
pub fn enter(root: RawFd, binds: &[Bind], said: &mut Vec<String>) -> std::result::Result<(), Failure> {
    let host = |error: Error| Failure::Host(error);
    private().map_err(host)?;
    let source = again(root).map_err(host)?;
    let source = by_fd(&source).map_err(host)?;
    mount(Some(&source), &source, None, libc::MS_BIND, None).map_err(host)?;
    // By its name once more: what lies on top now.
    let root = on_top(root).map_err(host)?;
    change(&root, libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV).map_err(host)?;
    check(unsafe { libc::fchdir(root.as_raw_fd()) }).map_err(host)?;
    let proc = mount_proc().map_err(host)?;
    for bind in binds {
        self::bind(bind, Some(root.as_raw_fd())).map_err(|error| Failure::Bind(bind.path.clone(), error))?;
    }
    said.push(proc.into());
    said.push(change_root().map_err(host)?.into());
    Ok(())
}

pub enum Failure {
    Host(Error),
    Bind(CString, Error),
}

/// `proc` in the working directory: of the processes of this namespace alone, as far as the kernel can.
fn mount_proc() -> Result<&'static str> {
    let proc = text("proc")?;
    let flags = libc::MS_RDONLY | NOTHING;
    // Linux 5.8 has both; what is older knows a proc for each pid namespace and hides others' processes in it.
    for (options, word) in [("subset=pid,hidepid=ptraceable", "proc=subset"), ("hidepid=2", "proc=hidepid")] {
        if mount(Some(&proc), &proc, Some(&proc), flags, Some(&text(options)?)).is_ok() {
            return Ok(word);
        }
    }
    // In a user namespace below a container that has parts of its own /proc covered, no new one may be mounted.
    mount(Some(&text("/proc")?), &proc, None, libc::MS_BIND | libc::MS_REC, None)?;
    change(&sys::open(&proc, libc::O_PATH)?, flags)?;
    Ok("proc=shared")
}

/// The working directory, a mount, becomes the root; the old one is out of reach.
fn change_root() -> Result<&'static str> {
    let here = text(".")?;
    // SAFETY: strings that live through the calls.
    unsafe {
        if libc::syscall(libc::SYS_pivot_root, here.as_ptr(), here.as_ptr()) == 0 {
            // It lies over the new one, and is what "." means until it is gone.
            check(libc::umount2(here.as_ptr(), libc::MNT_DETACH))?;
            check(libc::chdir(text("/")?.as_ptr()))?;
            return Ok("root=pivot");
        }
        // The root of an initramfs cannot be left that way. Who has no capabilities does not get out of this either.
        check(libc::chroot(here.as_ptr()))?;
        check(libc::chdir(text("/")?.as_ptr()))?;
    }
    Ok("root=chroot")
}

/// Give the mount whose root `mounted` is these flags.
fn change(mounted: &OwnedFd, flags: libc::c_ulong) -> Result<()> {
    mount(None, &by_fd(mounted)?, None, libc::MS_REMOUNT | libc::MS_BIND | flags, None)
}

/// What lies now where `fd` was opened.
fn on_top(fd: RawFd) -> Result<OwnedFd> {
    let name = std::fs::read_link(format!("/proc/self/fd/{fd}"))?.into_os_string().into_vec();
    sys::open(&CString::new(name)?, libc::O_PATH | libc::O_NOFOLLOW)
}

/// The file of a descriptor from another mount namespace, in this one.
fn again(fd: RawFd) -> Result<OwnedFd> {
    let found = on_top(fd)?;
    if identity(fd)? != identity(found.as_raw_fd())? {
        return Err(Error::from_raw_os_error(libc::ESTALE));
    }
    Ok(found)
}

/// A path to what is open, for calls that take paths.
fn by_fd(fd: &OwnedFd) -> Result<CString> {
    Ok(CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd()))?)
}

/// `path`, which is absolute, as a place below `under`; no link at its end.
fn at(under: Option<RawFd>, path: &CStr) -> Result<OwnedFd> {
    let flags = libc::O_PATH | libc::O_NOFOLLOW;
    let found = match under {
        None => sys::open(path, flags)?,
        Some(directory) => {
            let bytes = path.to_bytes();
            let inside = bytes.iter().position(|&byte| byte != b'/').map_or(&b"."[..], |first| &bytes[first..]);
            sys::open_at(directory, &CString::new(inside)?, flags)?
        }
    };
    if stat(found.as_raw_fd())?.st_mode & libc::S_IFMT == libc::S_IFLNK {
        return Err(Error::from_raw_os_error(libc::ELOOP));
    }
    Ok(found)
}

fn identity(fd: RawFd) -> Result<(libc::dev_t, libc::ino_t)> {
    stat(fd).map(|found| (found.st_dev, found.st_ino))
}

fn stat(fd: RawFd) -> Result<libc::stat> {
    // SAFETY: a struct of the right type that fstat fills.
    unsafe {
        let mut found: libc::stat = std::mem::zeroed();
        check(libc::fstat(fd, &mut found))?;
        Ok(found)
    }
}
