//! `post_restore`'s key `volumes`: the disks of others that this machine has now, mounted before any process runs.
//!
//! The host says what there is to be, whole, at every start; what was mounted in this memory and is not in it is let go of: a
//! fork's, a template's, or one that was detached while the machine was paused. Each attachment has an id of its own, so
//! that a volume which came back changed is never taken for the one that is mounted. One that cannot be mounted is told and
//! left out: a machine's memory is worth more than a disk of it.
//!
//! Who may write, the host decides (a reader's disk is a throw-away of its own); `ro` here is so that it is told early.

use crate::disks;
use crate::failure::{at, Failure, Outcome};
use crate::msgpack::{Value, Writer};
use crate::sys::{self, cvt};
use std::ffi::{CStr, CString};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;

const EXT4_IOC_RESIZE_FS: libc::c_ulong = 0x4008_6610;
const VOLUMES_MAX: usize = 16;
/// What has been removed is given back to the host's disk. Not a machine's end but a read-only disk is what errors are.
const OPTIONS: &CStr = c"noinit_itable,discard,errors=remount-ro";
const SAFE: libc::c_ulong = libc::MS_NOSUID | libc::MS_NODEV;

struct Volume {
    slot: String,
    id: String,
    path: CString,
    bytes: u64,
    read_only: bool,
}

/// What this machine has mounted, as far as its host knows.
#[derive(Default)]
pub struct Mounted {
    volumes: Vec<Volume>,
    /// Slots whose former volume something still has in use, though nothing finds it any more: a disk put there would be
    /// written to by this memory of another one. The host is told each time.
    busy: Vec<String>,
}

pub struct Wanted(Vec<Volume>);

impl Wanted {
    /// None: nothing is said, and all stays as it is. Everything is checked before anything is done.
    pub fn parse(request: &Value) -> Outcome<Option<Self>> {
        let bad = |what: &str| Failure::invalid(format!("volumes: {what}"));
        let list = match request {
            Value::Nil => return Ok(None),
            Value::Array(list) if list.len() <= VOLUMES_MAX => list,
            _ => return Err(bad("a list of volumes")),
        };
        let word = |value: &Value| {
            let bytes = value.bytes().filter(|word| !word.is_empty() && word.len() <= 64)?;
            let plain = bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
            plain.then(|| String::from_utf8_lossy(bytes).into_owned())
        };
        let volume = |value: &Value| {
            Some(Volume {
                slot: word(value.get("slot"))?,
                id: word(value.get("id"))?,
                path: disks::mount_point(value.get("path"))?,
                bytes: u64::try_from(value.get("bytes").int()?).ok()?,
                read_only: value.get("ro").bool(true),
            })
        };
        let volumes = list.iter().map(volume).collect::<Option<_>>();
        Ok(Some(Self(volumes.ok_or_else(|| bad("slot, id, a plain path, bytes, ro"))?)))
    }
}

impl Mounted {
    /// The payload of `post_restore`'s answer: which could not be mounted, and why; and which slots no other is to have.
    pub fn become_wanted(&mut self, wanted: Wanted) -> Vec<u8> {
        let stays = |have: &Volume| wanted.0.iter().any(|want| want.id == have.id && want.path == have.path);
        let (stay, go): (Vec<_>, Vec<_>) = std::mem::take(&mut self.volumes).into_iter().partition(stays);
        self.volumes = stay;
        go.iter().rev().for_each(Volume::unmount);
        self.busy.extend(go.into_iter().map(|volume| volume.slot));
        self.busy.retain(|slot| in_use(slot));
        let mut failed = Vec::new();
        for volume in wanted.0 {
            if self.volumes.iter().any(|have| have.id == volume.id) {
                continue;
            }
            match volume.mount() {
                Ok(()) => self.volumes.push(volume),
                Err(failure) => failed.push((volume.id, failure)),
            }
        }
        if failed.is_empty() && self.busy.is_empty() {
            return Writer::map(0).0;
        }
        let mut reply = Writer::map(2);
        reply.str("volumes").begin_array(failed.len());
        for (id, failure) in failed {
            reply.begin_map(2);
            reply.str("id").str(&id).str("error").str(&failure.message);
        }
        reply.str("busy").begin_array(self.busy.len());
        self.busy.iter().for_each(|slot| {
            reply.str(slot);
        });
        reply.0
    }
}

impl Volume {
    fn mount(&self) -> Outcome<()> {
        let device = self.device()?;
        let place = std::path::Path::new(std::ffi::OsStr::from_bytes(self.path.to_bytes()));
        let shown = place.display();
        DirBuilder::new().recursive(true).mode(0o755).create(place).map_err(at(&shown))?;
        let flags = SAFE | if self.read_only { libc::MS_RDONLY } else { 0 };
        // SAFETY: C strings that live through the call.
        let mounted = unsafe {
            let (kind, options) = (c"ext4".as_ptr(), OPTIONS.as_ptr());
            libc::mount(device.as_ptr(), self.path.as_ptr(), kind, flags, options.cast())
        };
        cvt(mounted).map_err(at(format_args!("mount the volume at {shown}")))?;
        let finished = match self.read_only {
            true => block_read_only(&device),
            false => {
                let _ = fs::remove_dir(place.join("lost+found"));
                self.grow().map_err(at(format_args!("grow the volume at {shown}")))
            }
        };
        if finished.is_err() {
            self.unmount();
        }
        finished
    }

    /// The disk, once the kernel has heard how large it is now, if nothing in this machine has it mounted still: a second
    /// mount of a disk that is in use would be of the first one's memory of it.
    fn device(&self) -> Outcome<CString> {
        let device = disks::sized(&self.slot, self.bytes)?;
        let busy = |error: io::Error| match error.raw_os_error() {
            Some(libc::EBUSY) => Failure::new(
                "busy",
                format!("something in this machine still uses the volume that was on its disk {} before", self.slot),
            ),
            _ => at("open the volume's disk")(error),
        };
        let file = sys::open(&device, libc::O_RDONLY | libc::O_EXCL, 0).map_err(busy)?;
        disks::forget(&file)?;
        disks::set_read_only(&file, false)?;
        Ok(device)
    }

    /// To the size of its disk, if that has become larger since it was last mounted.
    fn grow(&self) -> io::Result<()> {
        let place: OwnedFd = sys::open(&self.path, libc::O_RDONLY | libc::O_DIRECTORY, 0)?;
        // SAFETY: a descriptor and a struct to write into; then one and a number that lives through the call.
        unsafe {
            let mut stat: libc::statfs = std::mem::zeroed();
            cvt(libc::fstatfs(place.as_raw_fd(), &mut stat))?;
            let blocks: u64 = self.bytes / u64::try_from(stat.f_bsize).unwrap_or(4096).max(1024);
            let grown = cvt(libc::ioctl(place.as_raw_fd(), EXT4_IOC_RESIZE_FS as _, &blocks));
            match grown {
                // One that is larger than its disk would not have been mounted: it is a block or so that is left over.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
                // It has errors, which its owner sees: what is in it is still to be had.
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => Ok(()),
                other => other.map(drop),
            }
        }
    }

    /// What uses it keeps it until it lets go; nothing finds it any more.
    fn unmount(&self) {
        // SAFETY: a C string.
        unsafe {
            if libc::umount2(self.path.as_ptr(), libc::UMOUNT_NOFOLLOW) != 0 {
                libc::umount2(self.path.as_ptr(), libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW);
            }
        }
    }
}

/// Whether a file system of this machine has the slot's disk.
fn in_use(slot: &str) -> bool {
    let Some(device) = disks::find(slot).and_then(|device| CString::new(device).ok()) else { return false };
    let open = sys::open(&device, libc::O_RDONLY | libc::O_EXCL, 0);
    matches!(open, Err(error) if error.raw_os_error() == Some(libc::EBUSY))
}

fn block_read_only(device: &CStr) -> Outcome<()> {
    let file = sys::open(device, libc::O_RDONLY, 0).map_err(at("open the volume's disk"))?;
    disks::set_read_only(&file, true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msgpack::decode;

    fn request(slot: &str, id: &str, path: &str, bytes: i64) -> Vec<u8> {
        let mut writer = Writer::map(1);
        writer.str("volumes").begin_array(1);
        writer.begin_map(5);
        writer.str("slot").str(slot).str("id").str(id).str("path").str(path).str("bytes").int(bytes);
        writer.str("ro").bool(false);
        writer.0
    }

    fn parse(bytes: &[u8]) -> Outcome<Option<Wanted>> {
        Wanted::parse(decode(bytes).unwrap().get("volumes"))
    }

    #[test]
    fn a_request_is_checked_whole() {
        let good = parse(&request("vol1", "a1", "/data/my files", 4096)).ok().flatten().unwrap();
        let volume = &good.0[0];
        assert_eq!((volume.slot.as_str(), volume.id.as_str(), volume.bytes), ("vol1", "a1", 4096));
        assert!(!volume.read_only);
        for bad in [
            request("../1", "a", "/a", 1),
            request("vol1", "a/b", "/a", 1),
            request("vol1", "", "/a", 1),
            request("vol1", "a", "a", 1),
            request("vol1", "a", "/", 1),
            request("vol1", "a", "/a/../b", 1),
            request("vol1", "a", "/a\0b", 1),
            request("vol1", "a", "/a", -1),
        ] {
            assert!(parse(&bad).is_err());
        }
        assert!(Wanted::parse(&Value::Nil).is_ok_and(|nothing| nothing.is_none()));
        assert!(Wanted::parse(&Value::Int(1)).is_err());
    }

    #[test]
    fn what_is_mounted_stays_and_what_cannot_be_is_told() {
        let have =
            || Volume { slot: "vol1".into(), id: "a".into(), path: c"/nowhere/a".into(), bytes: 1, read_only: true };
        let mut mounted = Mounted { volumes: vec![have()], busy: vec!["vol9".into()] };
        assert_eq!(mounted.become_wanted(Wanted(vec![have()])), Writer::map(0).0);
        assert_eq!(mounted.volumes.len(), 1);
        mounted.become_wanted(Wanted(Vec::new()));
        assert!(mounted.volumes.is_empty() && mounted.busy.is_empty());
    }
}
