//! The verb `post_restore`: what makes a clone another machine than its twin, in the order of the protocol.

use crate::failure::{at, Failure, Outcome};
use crate::msgpack::Value;
use crate::network;
use crate::sys::{self, cvt};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};

const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
const ENTROPY_BYTES: usize = 64;
const HOSTS_BYTES_FIRST: usize = 1024;
const HOSTS_BYTES_MAX: usize = 1 << 20;
pub const RUN: &str = "/run/llm4agents";
pub const BOOT_ID: &str = "/run/llm4agents/boot-id";
pub const BOOT_ID_C: &[u8] = b"/run/llm4agents/boot-id\0";
/// What /etc has links to: in memory, since three writes to a disk's file system cost a fresh clone 40 ms.
const HOSTNAME: &str = "/run/llm4agents/hostname";
const HOSTS: &str = "/run/llm4agents/hosts";
const MACHINE_ID: &str = "/run/llm4agents/machine-id";

/// The files of a machine's names, held open: a fresh clone has translated no path walk, no open and no close yet.
pub struct Names {
    hostname: Held,
    hosts: Held,
    machine_id: Held,
    boot_id: Held,
}

struct Held {
    path: &'static str,
    file: fs::File,
}

pub struct Request<'a> {
    entropy: &'a [u8],
    unix_ns: i64,
    hostname: &'a str,
    machine_id: &'a str,
    pub boot_id: &'a str,
    pub thaw: bool,
    network: Option<bool>,
}

impl<'a> Request<'a> {
    /// Everything is checked before anything is done.
    pub fn parse(request: &Value<'a>) -> Outcome<Self> {
        let text = |key: &str| request.get(key).bytes().and_then(|bytes| std::str::from_utf8(bytes).ok());
        let entropy = request.get("entropy").bytes().filter(|bytes| bytes.len() == ENTROPY_BYTES);
        let host = |name: &&str| {
            !name.is_empty()
                && name.len() <= 64
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.')
        };
        let machine = |id: &&str| id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit());
        let boot = |id: &&str| !id.is_empty() && id.len() <= 128 && id.bytes().all(|b| b.is_ascii_graphic());
        let bad = |what: &str| Failure::invalid(format!("post_restore: {what}"));
        Ok(Self {
            entropy: entropy.ok_or_else(|| bad("entropy is 64 bytes"))?,
            unix_ns: request.get("unix_ns").int().filter(|ns| *ns > 0).ok_or_else(|| bad("unix_ns is a time"))?,
            hostname: text("hostname").filter(host).ok_or_else(|| bad("hostname is 1 to 64 of a-z, 0-9, '-', '.'"))?,
            machine_id: text("machine_id").filter(machine).ok_or_else(|| bad("machine_id is 32 hex digits"))?,
            boot_id: text("boot_id").filter(boot).ok_or_else(|| bad("boot_id is 1 to 128 printable characters"))?,
            thaw: request.get("thaw").bool(true),
            network: match request.get("network") {
                Value::Nil => None,
                Value::Bool(up) => Some(*up),
                _ => return Err(bad("network is a truth value")),
            },
        })
    }

    /// All of it up to the interpreters. `random` is /dev/urandom.
    pub fn apply(&self, random: &OwnedFd, names: &mut Names) -> Outcome<()> {
        reseed(random, self.entropy).map_err(at("add entropy"))?;
        sys::set_wall_clock(self.unix_ns).map_err(at("set the clock"))?;
        names.set_hostname(self.hostname)?;
        names.machine_id.put(format!("{}\n", self.machine_id).as_bytes())?;
        names.boot_id.put(as_the_kernel_says_it(self.boot_id).as_bytes())?;
        // A guest whose root has renamed or unbound it wakes up all the same.
        match self.network.map_or(Ok(()), network::restore) {
            Err(failure) if failure.code == "not_found" => Ok(()),
            done => done,
        }
    }
}

/// Into the pool, and from there into the generator at once: two clones must not share one more draw.
fn reseed(random: &OwnedFd, entropy: &[u8]) -> io::Result<()> {
    #[repr(C)]
    struct PoolInfo {
        entropy_bits: libc::c_int,
        size: libc::c_int,
        bytes: [u8; ENTROPY_BYTES],
    }
    let mut info =
        PoolInfo { entropy_bits: ENTROPY_BYTES as i32 * 8, size: ENTROPY_BYTES as i32, bytes: [0; ENTROPY_BYTES] };
    info.bytes.copy_from_slice(entropy);
    // SAFETY: the struct RNDADDENTROPY wants; RNDRESEEDCRNG takes nothing.
    unsafe {
        cvt(libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, &info))?;
        cvt(libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG, 0))?;
    }
    Ok(())
}

/// A boot id in the form of /proc/sys/kernel/random/boot_id, which is what it is read as: journald takes no other.
fn as_the_kernel_says_it(id: &str) -> String {
    if id.len() != 32 || !id.is_ascii() {
        return format!("{id}\n");
    }
    format!("{}-{}-{}-{}-{}\n", &id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..])
}

impl Names {
    /// Give the names of the machine their place in memory, with what the image says, and /etc links to it.
    pub fn link() -> Outcome<Self> {
        for (etc, run) in [("/etc/hostname", HOSTNAME), ("/etc/hosts", HOSTS), ("/etc/machine-id", MACHINE_ID)] {
            if fs::read_link(etc).is_ok_and(|target| target.as_os_str() == run) {
                continue;
            }
            Held::open(run)?.put(&fs::read(etc).unwrap_or_default())?;
            let _ = fs::create_dir_all("/etc");
            let _ = fs::remove_file(etc);
            std::os::unix::fs::symlink(run, etc).map_err(at(format_args!("link {etc}")))?;
        }
        let mut names = Self {
            hostname: Held::open(HOSTNAME)?,
            hosts: Held::open(HOSTS)?,
            machine_id: Held::open(MACHINE_ID)?,
            boot_id: Held::open(BOOT_ID)?,
        };
        // As long as what a clone will write over them, which then cuts nothing off.
        let hex = |path: &str| fs::read_to_string(path).unwrap_or_default().replace('-', "");
        names.machine_id.put(hex("/proc/sys/kernel/random/uuid").as_bytes())?;
        names.boot_id.put(as_the_kernel_says_it(hex("/proc/sys/kernel/random/boot_id").trim()).as_bytes())?;
        Ok(names)
    }

    pub fn set_hostname(&mut self, name: &str) -> Outcome<()> {
        // SAFETY: a string and its length.
        cvt(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) }).map_err(at("set the hostname"))?;
        self.hostname.put(format!("{name}\n").as_bytes())?;
        let old = self.hosts.get();
        let new = hosts(&old, name);
        if old == new {
            Ok(())
        } else {
            self.hosts.put(&new)
        }
    }
}

/// /etc/hosts with our own line renamed, and every other line as it was.
fn hosts(old: &[u8], name: &str) -> Vec<u8> {
    const OURS: &[u8] = b"127.0.1.1";
    let mut new = Vec::with_capacity(old.len() + 64);
    if old.is_empty() {
        new.extend_from_slice(b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    }
    for line in old.split_inclusive(|b| *b == b'\n').filter(|line| !line.starts_with(OURS)) {
        new.extend_from_slice(line);
    }
    if new.last() != Some(&b'\n') {
        new.push(b'\n');
    }
    new.extend_from_slice(format!("127.0.1.1\t{name}\n").as_bytes());
    new
}

impl Held {
    fn open(path: &'static str) -> Outcome<Self> {
        let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o644).clone();
        Ok(Self { path, file: options.open(path).map_err(at(format_args!("open {path}")))? })
    }

    fn get(&self) -> Vec<u8> {
        let mut content = vec![0; HOSTS_BYTES_FIRST];
        let mut have = 0;
        while let Ok(n @ 1..) = self.file.read_at(&mut content[have..], have as u64) {
            have += n;
            if have < content.len() || have >= HOSTS_BYTES_MAX {
                break;
            }
            content.resize(2 * have, 0);
        }
        content.truncate(have);
        content
    }

    /// Overwrite in place: no new inode, no truncation to nothing, so that a file of the same size costs one page.
    fn put(&mut self, content: &[u8]) -> Outcome<()> {
        let path = self.path;
        let mut metadata = self.file.metadata().map_err(at(path))?;
        if metadata.nlink() == 0 {
            // Removed by somebody in the guest since, and perhaps made anew.
            *self = Self::open(path)?;
            metadata = self.file.metadata().map_err(at(path))?;
        }
        let write = || {
            self.file.write_all_at(content, 0)?;
            if metadata.len() > content.len() as u64 {
                self.file.set_len(content.len() as u64)?;
            }
            Ok(())
        };
        write().map_err(at(format_args!("write {path}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msgpack::{decode, Writer};

    #[test]
    fn hosts_keeps_what_others_wrote() {
        let first = hosts(b"", "a");
        assert_eq!(hosts(&first, "a"), first);
        let edited = [&first[..], b"10.0.0.1 db"].concat();
        let text = String::from_utf8(hosts(&edited, "b")).unwrap();
        assert!(
            text.ends_with("10.0.0.1 db\n127.0.1.1\tb\n")
                && !text.contains("\ta\n")
                && text.starts_with("127.0.0.1\tlocalhost\n")
        );
    }

    #[test]
    fn a_boot_id_reads_as_the_kernels() {
        let id = "0123456789abcdef0123456789abcdef";
        assert_eq!(as_the_kernel_says_it(id), "01234567-89ab-cdef-0123-456789abcdef\n");
        assert_eq!(as_the_kernel_says_it("b"), "b\n");
    }

    #[test]
    fn a_request_is_checked_whole() {
        let build = |entropy: usize, hostname: &str, machine: &str| {
            let mut writer = Writer::map(5);
            writer.str("entropy").bytes(&vec![0xff; entropy]).str("unix_ns").int(1).str("hostname").str(hostname);
            writer.str("machine_id").str(machine).str("boot_id").str("b");
            writer.0
        };
        let id = "0123456789abcdef0123456789abcdef";
        let ok = build(64, "sbx-1", id);
        assert!(Request::parse(&decode(&ok).unwrap()).is_ok_and(|request| request.thaw));
        for bad in [build(63, "sbx-1", id), build(64, "a b", id), build(64, "", id), build(64, "a", "xyz")] {
            assert!(Request::parse(&decode(&bad).unwrap()).is_err());
        }
    }

    #[test]
    fn put_overwrites_longer_and_shorter_and_makes_anew() {
        let dir = crate::files::tests::Dir::new("put");
        let path: &'static str = dir.0.join("f").to_str().unwrap().to_owned().leak();
        let mut held = Held::open(path).unwrap();
        for content in ["long content", "short", "longer again", &"x".repeat(5000)] {
            held.put(content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(path).unwrap(), content);
            assert_eq!(held.get(), content.as_bytes());
        }
        fs::remove_file(path).unwrap();
        held.put(b"anew").unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), "anew");
    }
}
