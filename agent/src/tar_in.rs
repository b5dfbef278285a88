//! A tar stream unpacked below a directory as it comes. Runs in workers; the format is `tar`'s.
//!
//! Every path is resolved by the kernel beneath the top (openat2): no member, and no link that one made, leads out.
//! A file appears whole or not at all. What had been unpacked when a stream ends early stays.

use crate::failure::{at, Failure, Outcome};
use crate::files::{c_path, make_parents};
use crate::msgpack::Writer;
use crate::sys;
use crate::tar::{Event, Kind, Member, Parser};
use crate::transfer::{create_temporary, temporary_name, unlink, Sink};
use crate::users::Users;
use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

const ZEROS: [u8; 4096] = [0; 4096];

/// A file being unpacked: under a temporary name until it is complete.
struct Unpacked {
    file: File,
    parent: OwnedFd,
    temporary: CString,
    name: CString,
    member: Member,
    at: u64,
    /// The last bytes were zeros, and not written.
    hole: bool,
    renamed: bool,
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        if !self.renamed {
            unlink(self.parent.as_raw_fd(), &self.temporary);
        }
    }
}

pub struct TarSink {
    top: OwnedFd,
    /// The top was made for this archive, which may then say what its mode is.
    made_top: bool,
    preserve_owner: bool,
    users: Users,
    parser: Parser,
    file: Option<Unpacked>,
    /// The directory of the last member.
    parent: Option<(Vec<u8>, OwnedFd)>,
    /// Directories on the way to the last member, whose modes and times wait until what is in them is done.
    directories: Vec<(Vec<u8>, Member)>,
    entries: u64,
    skipped: u64,
    bytes: u64,
}

impl TarSink {
    pub fn open(path: &Path, parents: bool, preserve_owner: bool) -> Outcome<Self> {
        let what = || format!("unpack into {}", path.display());
        let made_top = !path.exists();
        if made_top && parents {
            make_parents(path)?;
        } else if made_top {
            fs::create_dir(path).map_err(at(what()))?;
        }
        let top = sys::open(&c_path(path)?, libc::O_PATH | libc::O_DIRECTORY, 0).map_err(at(what()))?;
        Ok(Self {
            top,
            made_top,
            preserve_owner,
            users: Users::load(),
            parser: Parser::default(),
            file: None,
            parent: None,
            directories: Vec::new(),
            entries: 0,
            skipped: 0,
            bytes: 0,
        })
    }

    fn member(&mut self, member: Member) -> Outcome<()> {
        self.entries += 1;
        let path = clean(&member.path)?;
        let what = || shown(&member.path);
        self.leave(&path)?;
        if path.is_empty() {
            return match member.kind {
                Kind::Directory if self.made_top => {
                    self.directories.push((path, member));
                    Ok(())
                }
                Kind::Directory => Ok(()),
                _ => Err(Failure::invalid("a member of the archive has no name")),
            };
        }
        let (directory, name) = match path.iter().rposition(|b| *b == b'/') {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (&b""[..], &path[..]),
        };
        let name = c_string(name)?;
        let parent = self.parent_of(directory, &what())?;
        match member.kind {
            Kind::File => {
                let parent = sys::duplicate(parent).map_err(at(what()))?;
                let (temporary, fd) = create_temporary(parent.as_raw_fd()).map_err(at(what()))?;
                let file = fd.into();
                self.file =
                    Some(Unpacked { file, parent, temporary, name, member, at: 0, hole: false, renamed: false });
                Ok(())
            }
            Kind::Directory => {
                // SAFETY: a C string and an open directory.
                let made = sys::cvt(unsafe { libc::mkdirat(parent, name.as_ptr(), member.mode | 0o700) });
                match made {
                    Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                        // A link to a directory below the top is as good.
                        self.beneath(&path, &what())?;
                    }
                    made => drop(made.map_err(at(what()))?),
                }
                self.directories.push((path, member));
                Ok(())
            }
            _ => {
                let temporary = temporary_name();
                if !self.make(parent, &temporary, &member)? {
                    self.skipped += 1;
                    return Ok(());
                }
                let placed = self.finish(parent, &temporary, &member).and_then(|()| {
                    // SAFETY: C strings and an open directory.
                    sys::cvt(unsafe { libc::renameat(parent, temporary.as_ptr(), parent, name.as_ptr()) })
                });
                // Two names of one file: rename leaves both as they are.
                if placed.is_err() || member.kind == Kind::Hard {
                    unlink(parent, &temporary);
                }
                placed.map(drop).map_err(at(what()))
            }
        }
    }

    /// Make a link, device or FIFO; false when this user may not make one (a device).
    fn make(&self, parent: RawFd, name: &CStr, member: &Member) -> Outcome<bool> {
        let what = || shown(&member.path);
        let made = match member.kind {
            Kind::Symlink => {
                let target = c_string(&member.link)?;
                // SAFETY: C strings and an open directory.
                unsafe { libc::symlinkat(target.as_ptr(), parent, name.as_ptr()) }
            }
            Kind::Hard => {
                let target = clean(&member.link)?;
                let slash = target.iter().rposition(|b| *b == b'/');
                let from = self.beneath(&target[..slash.unwrap_or(0)], &what())?;
                let target = c_string(&target[slash.map_or(0, |at| at + 1)..])?;
                // SAFETY: C strings and open directories; without AT_SYMLINK_FOLLOW.
                unsafe { libc::linkat(from.as_raw_fd(), target.as_ptr(), parent, name.as_ptr(), 0) }
            }
            _ => {
                let kind = match member.kind {
                    Kind::Fifo => libc::S_IFIFO,
                    Kind::Char => libc::S_IFCHR,
                    _ => libc::S_IFBLK,
                };
                let device = libc::makedev(member.device.0, member.device.1);
                // SAFETY: a C string and plain integers.
                unsafe { libc::mknodat(parent, name.as_ptr(), kind | 0o600, device) }
            }
        };
        match sys::cvt(made) {
            Err(error)
                if error.raw_os_error() == Some(libc::EPERM) && matches!(member.kind, Kind::Char | Kind::Block) =>
            {
                Ok(false)
            }
            made => made.map(|_| true).map_err(at(what())),
        }
    }

    /// Owner, mode and time of what is at `name` in `parent`, which is not followed.
    fn finish(&self, parent: RawFd, name: &CStr, member: &Member) -> io::Result<()> {
        if member.kind == Kind::Hard {
            return Ok(()); // they are the other name's
        }
        // SAFETY: C strings, an open directory, and two timespecs.
        unsafe {
            if self.preserve_owner {
                let (uid, gid) = self.owner(member);
                sys::cvt(libc::fchownat(parent, name.as_ptr(), uid, gid, libc::AT_SYMLINK_NOFOLLOW))?;
            }
            if member.kind != Kind::Symlink {
                sys::cvt(libc::fchmodat(parent, name.as_ptr(), self.mode(member), 0))?;
            }
            sys::cvt(libc::utimensat(parent, name.as_ptr(), times(member).as_ptr(), libc::AT_SYMLINK_NOFOLLOW))
                .map(drop)
        }
    }

    /// The same of what is open.
    fn finish_open(&self, fd: RawFd, member: &Member) -> io::Result<()> {
        // SAFETY: an open descriptor, plain integers, and two timespecs.
        unsafe {
            if self.preserve_owner {
                let (uid, gid) = self.owner(member);
                sys::cvt(libc::fchown(fd, uid, gid))?;
            }
            sys::cvt(libc::futimens(fd, times(member).as_ptr()))?;
            sys::cvt(libc::fchmod(fd, self.mode(member))).map(drop)
        }
    }

    fn owner(&self, member: &Member) -> (u32, u32) {
        let uid = self.users.id_of_user(&member.user).unwrap_or(member.uid);
        (uid, self.users.id_of_group(&member.group).unwrap_or(member.gid))
    }

    /// Set-id bits are worth what their owner is.
    fn mode(&self, member: &Member) -> u32 {
        member.mode & if self.preserve_owner { 0o7777 } else { 0o1777 }
    }

    fn data(&mut self, bytes: &[u8]) -> Outcome<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let failed = |error: io::Error| Failure::io(&error, shown(&file.member.path));
        self.bytes += bytes.len() as u64;
        // Holes are left where there are only zeros, as a sparse file that was read has them.
        let mut rest = bytes;
        while !rest.is_empty() {
            let zeros = |piece: &&[u8]| **piece == ZEROS[..piece.len()];
            let pieces = || rest.chunks(ZEROS.len());
            let run: usize = pieces().take_while(|piece| !zeros(piece)).map(<[u8]>::len).sum();
            file.file.write_all_at(&rest[..run], file.at).map_err(failed)?;
            let hole: usize = rest[run..].chunks(ZEROS.len()).take_while(zeros).map(<[u8]>::len).sum();
            file.at += (run + hole) as u64;
            file.hole = hole > 0;
            rest = &rest[run + hole..];
        }
        Ok(())
    }

    fn complete(&mut self) -> Outcome<()> {
        let Some(mut file) = self.file.take() else { return Ok(()) };
        let parent = file.parent.as_raw_fd();
        let put = || {
            if file.hole {
                file.file.set_len(file.at)?;
            }
            self.finish_open(file.file.as_raw_fd(), &file.member)?;
            // SAFETY: C strings and an open directory.
            sys::cvt(unsafe { libc::renameat(parent, file.temporary.as_ptr(), parent, file.name.as_ptr()) })
        };
        put().map_err(at(shown(&file.member.path)))?;
        file.renamed = true;
        Ok(())
    }

    /// Directories that `path` is not below are done: what they were to be, they now become.
    fn leave(&mut self, path: &[u8]) -> Outcome<()> {
        while let Some((directory, _)) = self.directories.last() {
            let below =
                directory.is_empty() || (path.starts_with(directory) && path.get(directory.len()) == Some(&b'/'));
            if below {
                return Ok(());
            }
            self.settle()?;
        }
        Ok(())
    }

    fn settle(&mut self) -> Outcome<()> {
        let Some((path, member)) = self.directories.pop() else { return Ok(()) };
        let directory = self.beneath(&path, &shown(&path))?;
        let own = sys::open_at(directory.as_raw_fd(), c_str(b".\0"), libc::O_RDONLY | libc::O_DIRECTORY, 0);
        let done = own.and_then(|own| self.finish_open(own.as_raw_fd(), &member));
        match done {
            // One that was there before and is another's stays as it is.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !self.preserve_owner => Ok(()),
            done => done.map_err(at(shown(&path))),
        }
    }

    /// The directory at a clean path below the top.
    fn beneath(&self, path: &[u8], what: &str) -> Outcome<OwnedFd> {
        let path = c_string(if path.is_empty() { b"." } else { path })?;
        sys::open_beneath(self.top.as_raw_fd(), &path, libc::O_PATH | libc::O_DIRECTORY).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::EXDEV | libc::ELOOP) => {
                    Failure::invalid(format!("{what}: a link on its way leads out of the directory"))
                }
                _ => Failure::io(&error, what),
            }
        })
    }

    /// The directory a member goes into, made when it is missing.
    fn parent_of(&mut self, path: &[u8], what: &str) -> Outcome<RawFd> {
        let known = self.parent.as_ref().is_some_and(|(known, _)| known == path);
        if !known {
            let found = match self.beneath(path, what) {
                Err(failure) if failure.code == "not_found" => self.make_directories(path, what)?,
                found => found?,
            };
            self.parent = Some((path.to_vec(), found));
        }
        Ok(self.parent.as_ref().map_or(-1, |(_, fd)| fd.as_raw_fd()))
    }

    fn make_directories(&self, path: &[u8], what: &str) -> Outcome<OwnedFd> {
        let (mut at, mut directory) = (0, self.beneath(b"", what)?);
        while at < path.len() {
            let end = path[at..].iter().position(|b| *b == b'/').map_or(path.len(), |n| at + n);
            directory = match self.beneath(&path[..end], what) {
                Err(failure) if failure.code == "not_found" => {
                    let name = c_string(&path[at..end])?;
                    // SAFETY: a C string and an open directory. What is wrong shows when it is opened.
                    unsafe { libc::mkdirat(directory.as_raw_fd(), name.as_ptr(), 0o755) };
                    self.beneath(&path[..end], what)?
                }
                found => found?,
            };
            at = end + 1;
        }
        Ok(directory)
    }
}

impl Sink for TarSink {
    fn write(&mut self, mut bytes: &[u8]) -> Outcome<()> {
        let mut parser = std::mem::take(&mut self.parser);
        while let Some(event) = parser.next(&mut bytes).map_err(Failure::invalid)? {
            match event {
                Event::Member(member) => self.member(member)?,
                Event::Data(data) => self.data(data)?,
                Event::Complete => self.complete()?,
            }
        }
        self.parser = parser;
        Ok(())
    }

    fn commit(mut self: Box<Self>) -> Outcome<Vec<u8>> {
        self.parser.finish().map_err(Failure::invalid)?;
        while !self.directories.is_empty() {
            self.settle()?;
        }
        let mut end = Writer::map(3);
        end.str("entries").int(self.entries as i64).str("bytes").int(self.bytes as i64);
        end.str("skipped").int(self.skipped as i64);
        Ok(end.0)
    }
}

fn times(member: &Member) -> [libc::timespec; 2] {
    let (seconds, nanoseconds) = member.mtime;
    [
        libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT },
        libc::timespec { tv_sec: seconds, tv_nsec: i64::from(nanoseconds) },
    ]
}

fn shown(path: &[u8]) -> String {
    format!("member {:?}", String::from_utf8_lossy(&path[..path.len().min(300)]))
}

fn c_string(bytes: &[u8]) -> Outcome<CString> {
    CString::new(bytes).map_err(|_| Failure::invalid("a member's name holds a NUL"))
}

fn c_str(bytes: &[u8]) -> &CStr {
    CStr::from_bytes_with_nul(bytes).unwrap_or_default()
}

/// A member's path without `.` and empty names; one that is absolute or has `..` is refused.
fn clean(path: &[u8]) -> Outcome<Vec<u8>> {
    let names: Vec<&[u8]> = path.split(|b| *b == b'/').filter(|name| !name.is_empty() && *name != b".").collect();
    if path.starts_with(b"/") || names.contains(&&b".."[..]) {
        return Err(Failure::invalid(format!("{} leaves the directory it is unpacked into", shown(path))));
    }
    Ok(names.join(&b'/'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::tests::Dir;
    use crate::tar::{pad, BLOCK};
    use crate::tar_out::TarSource;
    use crate::transfer::Source;
    use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};

    fn pack(path: &Path, exclude: &[&str]) -> Vec<u8> {
        let exclude = exclude.iter().map(|glob| crate::glob::Glob::parse(glob.as_bytes()).unwrap()).collect();
        let mut source = TarSource::open(path, exclude).unwrap();
        let (mut all, mut chunk) = (Vec::new(), Vec::new());
        loop {
            let last = source.fill(&mut chunk).unwrap();
            all.extend_from_slice(&chunk);
            if last {
                return all;
            }
        }
    }

    fn unpack(path: &Path, bytes: &[u8], piece: usize) -> Outcome<Vec<u8>> {
        let mut sink = Box::new(TarSink::open(path, true, false)?);
        for piece in bytes.chunks(piece) {
            sink.write(piece)?;
        }
        sink.commit()
    }

    fn archive(members: &[(Kind, &str, &str)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (kind, path, content) in members {
            let mut member = Member::new(*kind, path.as_bytes().to_vec());
            member.mode = 0o755;
            if *kind == Kind::File {
                member.size = content.len() as u64;
                member.encode(&mut bytes);
                bytes.extend_from_slice(content.as_bytes());
                pad(&mut bytes, member.size);
            } else {
                member.link = content.as_bytes().to_vec();
                member.encode(&mut bytes);
            }
        }
        bytes.resize(bytes.len() + 2 * BLOCK, 0);
        bytes
    }

    #[test]
    fn a_tree_comes_back_as_it_was() {
        let (from, to) = (Dir::new("pack"), Dir::new("unpack"));
        let deep = from.0.join("a/b");
        fs::create_dir_all(&deep).unwrap();
        fs::create_dir(from.0.join("empty")).unwrap();
        fs::write(deep.join("f"), vec![7; 700_000]).unwrap();
        fs::write(from.0.join("x".repeat(200)), b"long").unwrap();
        fs::hard_link(deep.join("f"), from.0.join("other name")).unwrap();
        symlink("a/b", from.0.join("way")).unwrap();
        symlink("/nowhere", from.0.join("dangling")).unwrap();
        File::create(from.0.join("hole")).unwrap().set_len(5 << 20).unwrap();
        fs::set_permissions(&deep, fs::Permissions::from_mode(0o500)).unwrap();
        let bytes = pack(&from.0, &[]);
        for piece in [1000, 1 << 20] {
            unpack(&to.0.join("t"), &bytes, piece).unwrap();
        }
        let at = to.0.join("t");
        assert_eq!(fs::read(at.join("way/f")).unwrap(), vec![7; 700_000]);
        assert_eq!(fs::read(at.join("x".repeat(200))).unwrap(), b"long");
        let ino = |path: &str| fs::metadata(at.join(path)).unwrap().ino();
        assert_eq!(ino("a/b/f"), ino("other name"));
        assert_eq!(fs::read_link(at.join("dangling")).unwrap(), Path::new("/nowhere"));
        assert_eq!(fs::metadata(at.join("a/b")).unwrap().mode() & 0o777, 0o500);
        let hole = fs::metadata(at.join("hole")).unwrap();
        assert!(hole.size() == 5 << 20 && hole.blocks() < 100);
        for path in ["a/b", "a/b/f", "empty", "hole"] {
            let (old, new) = (fs::metadata(from.0.join(path)).unwrap(), fs::metadata(at.join(path)).unwrap());
            assert_eq!((old.mtime(), old.mtime_nsec()), (new.mtime(), new.mtime_nsec()), "{path}");
        }
        assert_eq!(fs::read_dir(&at).unwrap().count(), fs::read_dir(&from.0).unwrap().count());
        for open in [&deep, &at.join("a/b")] {
            fs::set_permissions(open, fs::Permissions::from_mode(0o700)).unwrap();
        }
    }

    #[test]
    fn what_is_excluded_is_not_there() {
        let from = Dir::new("exclude");
        fs::create_dir_all(from.0.join("src/node_modules/x")).unwrap();
        fs::write(from.0.join("src/a.pyc"), b"").unwrap();
        fs::write(from.0.join("src/a.py"), b"").unwrap();
        let to = Dir::new("excluded");
        unpack(&to.0, &pack(&from.0, &["node_modules", "*.pyc"]), 512).unwrap();
        let names: Vec<_> = fs::read_dir(to.0.join("src")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["a.py"]);
    }

    #[test]
    fn nothing_leaves_the_directory() {
        let dir = Dir::new("escape");
        let at = dir.0.join("in");
        for members in [
            &[(Kind::File, "/etc/x", "")][..],
            &[(Kind::File, "../x", "")],
            &[(Kind::File, "a/../../x", "")],
            &[(Kind::Symlink, "l", ".."), (Kind::File, "l/x", "")],
            &[(Kind::Symlink, "l", "/tmp"), (Kind::File, "l/x", "")],
            &[(Kind::Symlink, "l", "/tmp"), (Kind::Directory, "l/x", "")],
            &[(Kind::Symlink, "l", "/tmp"), (Kind::Directory, "l", "")],
            &[(Kind::Directory, "d", ""), (Kind::Symlink, "d/l", "../.."), (Kind::File, "d/l/x", "")],
            &[(Kind::Hard, "l", "../secret")],
            &[(Kind::Symlink, "l", ".."), (Kind::Hard, "h", "l/secret")],
        ] {
            fs::write(dir.0.join("secret"), b"").unwrap();
            let failure = unpack(&at, &archive(members), 512).unwrap_err();
            assert_eq!(failure.code, "invalid", "{members:?} {failure:?}");
            assert!(failure.message.contains("member"), "{failure:?}");
            assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 2);
            let _ = fs::remove_dir_all(&at);
        }
        // Within the directory a link is a way like any other, and a link may point anywhere.
        let inside = [(Kind::Directory, "d", ""), (Kind::Symlink, "l", "d"), (Kind::File, "l/x", "1")];
        unpack(&at, &archive(&inside), 99).unwrap();
        assert_eq!(fs::read(at.join("d/x")).unwrap(), b"1");
    }

    #[test]
    fn a_file_replaces_a_link_and_is_not_written_through_it() {
        let dir = Dir::new("replace");
        fs::write(dir.0.join("target"), b"old").unwrap();
        fs::create_dir(dir.0.join("in")).unwrap();
        symlink("../target", dir.0.join("in/f")).unwrap();
        unpack(&dir.0.join("in"), &archive(&[(Kind::File, "./f", "new"), (Kind::Hard, "g", "f")]), 9).unwrap();
        assert_eq!(fs::read(dir.0.join("target")).unwrap(), b"old");
        assert_eq!(fs::read(dir.0.join("in/g")).unwrap(), b"new");
        let over_directory = [(Kind::Directory, "d", ""), (Kind::File, "d", "x")];
        assert_eq!(unpack(&dir.0, &archive(&over_directory), 512).unwrap_err().code, "is_directory");
    }

    #[test]
    fn what_is_cut_off_leaves_no_half_file() {
        let dir = Dir::new("cut");
        let bytes = archive(&[(Kind::File, "whole", "1"), (Kind::File, "half", &"x".repeat(5000))]);
        let mut sink = Box::new(TarSink::open(&dir.0, true, false).unwrap());
        sink.write(&bytes[..3000]).unwrap();
        assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 2);
        drop(sink);
        let names: Vec<_> = fs::read_dir(&dir.0).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["whole"]);
        assert_eq!(unpack(&dir.0, &bytes[..3000], 512).unwrap_err().code, "invalid");
        assert_eq!(unpack(&dir.0, b"not a tar archive", 512).unwrap_err().code, "invalid");
    }

    #[test]
    fn noise_is_refused_and_leaves_nothing() {
        let dir = Dir::new("noise");
        let (whole, mut seed) = (archive(&[(Kind::Directory, "d", ""), (Kind::File, "d/f", "abc")]), 9u64);
        for _ in 0..300 {
            let mut bytes = whole.clone();
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (seed >> 33) as usize % bytes.len();
            bytes[at] ^= 1 << (seed % 8);
            bytes.truncate(bytes.len() - (seed >> 40) as usize % 512);
            let _ = unpack(&dir.0.join("in"), &bytes, 777);
        }
        assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 1);
        let left = fs::read_dir(dir.0.join("in/d"))
            .unwrap()
            .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with(".l4-"));
        assert_eq!(left.count(), 0);
    }
}
