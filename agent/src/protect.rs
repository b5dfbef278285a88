//! `post_restore`'s key `protect`: paths of the template that are covered by a read-only disk before any process runs.
//!
//! Each path gets a mount of its copy on that disk. A directory above it that an ordinary user could rename (a *pin*) gets a
//! mount of itself: what is a mount point cannot be renamed or removed, so nothing else can take the path's place. Root can
//! undo all of this in its own kernel; the disk's image it cannot change.

use crate::disks;
use crate::failure::{at, Failure, Outcome};
use crate::msgpack::Value;
use crate::sys::{self, cvt};
use std::ffi::{CStr, CString};
use std::fs::{self, DirBuilder, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

const PATHS_MAX: usize = 64;
const PINS_MAX: usize = 4096;
/// Where the disk is mounted for a moment: below a directory that is root's.
const PLACE: &str = "/run/llm4agents.protected";
const SAFE: libc::c_ulong = libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV;

pub struct Protect {
    slot: String,
    bytes: u64,
    paths: Vec<Covered>,
    /// Outermost first.
    pins: Vec<CString>,
}

struct Covered {
    source: CString,
    target: CString,
    directory: bool,
}

impl Protect {
    /// None when nothing is asked for. Everything is checked before anything is done.
    pub fn parse(request: &Value) -> Outcome<Option<Self>> {
        if matches!(request, Value::Nil) {
            return Ok(None);
        }
        let bad = |what: &str| Failure::invalid(format!("protect: {what}"));
        let slot = request.get("slot").bytes().filter(|slot| slot.iter().all(u8::is_ascii_alphanumeric));
        let slot = slot.and_then(|slot| std::str::from_utf8(slot).ok()).ok_or_else(|| bad("slot is a disk's"))?;
        let bytes = request.get("bytes").int().and_then(|bytes| u64::try_from(bytes).ok());
        let covered = |value: &Value| {
            let name = value.get("source").bytes().filter(|name| name.iter().all(u8::is_ascii_digit))?;
            let source = format!("{PLACE}/{}", std::str::from_utf8(name).ok()?);
            let target = disks::mount_point(value.get("target"))?;
            Some(Covered { source: CString::new(source).ok()?, target, directory: value.get("directory").bool(true) })
        };
        let (Value::Array(paths), Value::Array(pins)) = (request.get("paths"), request.get("pins")) else {
            return Err(bad("paths and pins are lists"));
        };
        if paths.is_empty() || paths.len() > PATHS_MAX || pins.len() > PINS_MAX {
            return Err(bad("too many paths, or none"));
        }
        Ok(Some(Self {
            slot: slot.to_owned(),
            bytes: bytes.ok_or_else(|| bad("bytes is the disk's size"))?,
            paths: paths.iter().map(covered).collect::<Option<_>>().ok_or_else(|| bad("paths are plain"))?,
            pins: pins.iter().map(disks::mount_point).collect::<Option<_>>().ok_or_else(|| bad("pins are plain"))?,
        }))
    }

    pub fn apply(&self) -> Outcome<()> {
        let device = self.device()?;
        let _ = DirBuilder::new().mode(0o700).create(PLACE);
        let place = CString::new(PLACE).unwrap_or_default();
        mount(&device, &place, c"erofs", SAFE).map_err(at("mount the protected paths' disk"))?;
        let covered = self.cover();
        // SAFETY: a C string. What was mounted from there stays.
        unsafe { libc::umount2(place.as_ptr(), libc::MNT_DETACH) };
        let _ = fs::remove_dir(PLACE);
        covered
    }

    /// The disk, once the kernel has heard how large it is now, without what the kernel knew of the empty one.
    fn device(&self) -> Outcome<CString> {
        let device = disks::sized(&self.slot, self.bytes)?;
        let file = sys::open(&device, libc::O_RDONLY, 0).map_err(at("open the protected paths' disk"))?;
        disks::forget(&file)?;
        disks::set_read_only(&file, true)?;
        Ok(device)
    }

    /// Also below what the pins hide: that is where a process of the template is whose directory is one of them.
    fn cover(&self) -> Outcome<()> {
        for path in &self.paths {
            path.make().map_err(at(path.target.to_string_lossy()))?;
            path.cover()?;
        }
        for pin in &self.pins {
            mount(pin, pin, c"", libc::MS_BIND).map_err(at(pin.to_string_lossy()))?;
        }
        self.paths.iter().filter(|path| self.pins.iter().any(|pin| path.below(pin))).try_for_each(Covered::cover)
    }
}

impl Covered {
    fn cover(&self) -> Outcome<()> {
        let again = libc::MS_BIND | libc::MS_REMOUNT | SAFE;
        let covered = mount(&self.source, &self.target, c"", libc::MS_BIND);
        covered.and_then(|()| mount(c"", &self.target, c"", again)).map_err(at(self.target.to_string_lossy()))
    }

    fn below(&self, pin: &CStr) -> bool {
        self.target.to_bytes().strip_prefix(pin.to_bytes()).is_some_and(|rest| rest.starts_with(b"/"))
    }

    /// What is mounted over must be there: after a cold boot root may have removed it.
    fn make(&self) -> io::Result<()> {
        let target = Path::new(std::ffi::OsStr::from_bytes(self.target.to_bytes()));
        if fs::symlink_metadata(target).is_ok() {
            return Ok(());
        }
        let directory = if self.directory { target } else { target.parent().unwrap_or(target) };
        DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
        if !self.directory {
            OpenOptions::new().write(true).create_new(true).mode(0o644).open(target)?;
        }
        Ok(())
    }
}

fn mount(source: &CStr, target: &CStr, kind: &CStr, flags: libc::c_ulong) -> io::Result<()> {
    // SAFETY: C strings that live through the call.
    cvt(unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, std::ptr::null()) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msgpack::{decode, Writer};

    fn request(source: &str, target: &str, pin: &str) -> Vec<u8> {
        let mut writer = Writer::map(4);
        writer.str("slot").str("vol0").str("bytes").int(4096).str("paths").begin_array(1);
        writer.begin_map(3);
        writer.str("source").str(source).str("target").str(target).str("directory").bool(false);
        writer.str("pins").begin_array(1);
        writer.str(pin);
        writer.0
    }

    #[test]
    fn a_request_is_checked_whole() {
        let good = request("0", "/home/user/a b", "/home/user");
        let parsed = Protect::parse(&decode(&good).unwrap()).ok().flatten().unwrap();
        assert_eq!((parsed.slot.as_str(), parsed.bytes, parsed.paths[0].directory), ("vol0", 4096, false));
        assert_eq!(parsed.paths[0].source.to_str(), Ok("/run/llm4agents.protected/0"));
        for bad in [
            request("../0", "/a", "/b"),
            request("0", "a", "/b"),
            request("0", "/a/../b", "/b"),
            request("0", "/a//b", "/b"),
            request("0", "/a", "/"),
            request("0", "/a\0b", "/b"),
        ] {
            assert!(Protect::parse(&decode(&bad).unwrap()).is_err());
        }
        assert!(Protect::parse(&Value::Nil).is_ok_and(|nothing| nothing.is_none()));
        assert!(Protect::parse(&Value::Int(1)).is_err());
    }

    #[test]
    fn what_is_missing_is_made() {
        let dir = crate::files::tests::Dir::new("protect");
        for (name, directory) in [("a/b/file", false), ("a/c/folder", true)] {
            let target = dir.0.join(name);
            let text = CString::new(target.as_os_str().as_bytes()).unwrap();
            let covered = Covered { source: CString::default(), target: text, directory };
            covered.make().unwrap();
            covered.make().unwrap();
            assert_eq!(target.is_dir(), directory);
        }
    }
}
