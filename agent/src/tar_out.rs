//! A directory's content as a tar stream, a bounded chunk at a time. Runs in workers; the format is `tar`'s.

use crate::failure::{Failure, Outcome};
use crate::files::{c_path, is_special};
use crate::glob::Glob;
use crate::msgpack::Writer;
use crate::sys;
use crate::tar::{padding, Kind, Member, BLOCK};
use crate::transfer::{Slice, Source, CHUNK_BYTES};
use crate::users::Users;
use crate::walk::{Step, Walk};
use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Names kept of files with several links; those past it are stored as files of their own.
const LINKS_BYTES_MAX: usize = 4 << 20;

pub struct TarSource {
    walk: Walk,
    top: PathBuf,
    exclude: Vec<Glob>,
    users: Users,
    /// The file that is being read, and how much its header has promised.
    file: Option<(File, PathBuf, u64)>,
    padding: usize,
    links: BTreeMap<(u64, u64), Vec<u8>>,
    links_bytes: usize,
    entries: u64,
    skipped: u64,
    unreadable: u64,
    first_unreadable: Option<PathBuf>,
    bytes: u64,
}

impl TarSource {
    pub fn open(path: &Path, exclude: Vec<Glob>) -> Outcome<Self> {
        Ok(Self {
            walk: Walk::open(path)?,
            top: path.to_owned(),
            exclude,
            users: Users::load(),
            file: None,
            padding: 0,
            links: BTreeMap::new(),
            links_bytes: 0,
            entries: 0,
            skipped: 0,
            unreadable: 0,
            first_unreadable: None,
            bytes: 0,
        })
    }

    fn missed(&mut self, path: PathBuf, error: &io::Error) {
        // What has vanished while we walk is not there.
        if error.kind() != io::ErrorKind::NotFound {
            self.unreadable += 1;
            self.first_unreadable.get_or_insert(path);
        }
    }

    fn entry(&mut self, path: PathBuf, metadata: &Metadata, chunk: &mut Vec<u8>) {
        let name = path.strip_prefix(&self.top).unwrap_or(&path).as_os_str().as_bytes().to_vec();
        if self.exclude.iter().any(|glob| glob.matches(&name)) {
            return self.walk.prune();
        }
        let kind = metadata.file_type();
        if kind.is_socket() {
            self.skipped += 1;
            return;
        }
        let mut member = Member::new(
            match () {
                () if kind.is_dir() => Kind::Directory,
                () if kind.is_symlink() => Kind::Symlink,
                () if kind.is_fifo() => Kind::Fifo,
                () if kind.is_char_device() => Kind::Char,
                () if kind.is_block_device() => Kind::Block,
                () => Kind::File,
            },
            name,
        );
        let device = metadata.rdev();
        member.device = (libc::major(device), libc::minor(device));
        if !is_special(metadata) || kind.is_fifo() {
            member.device = (0, 0);
        }
        member.mode = metadata.mode() & 0o7777;
        (member.uid, member.gid) = (metadata.uid(), metadata.gid());
        (member.user, member.group) = (self.users.user_name(member.uid), self.users.group_name(member.gid));
        member.mtime = (metadata.mtime(), metadata.mtime_nsec() as u32);
        if kind.is_symlink() {
            match fs::read_link(&path) {
                Ok(target) => member.link = target.as_os_str().as_bytes().to_vec(),
                Err(error) => return self.missed(path, &error),
            }
        }
        if kind.is_file() && metadata.nlink() > 1 {
            if let Some(first) = self.links.get(&(metadata.dev(), metadata.ino())) {
                (member.kind, member.link) = (Kind::Hard, first.clone());
            }
        }
        if member.kind == Kind::File {
            match open_file(&path) {
                Ok(file) => {
                    member.size = metadata.size();
                    (self.file, self.padding) = (Some((file, path, member.size)), padding(member.size));
                }
                Err(error) => return self.missed(path, &error),
            }
            if metadata.nlink() > 1 && self.links_bytes < LINKS_BYTES_MAX {
                self.links_bytes += member.path.len() + 64;
                self.links.insert((metadata.dev(), metadata.ino()), member.path.clone());
            }
        }
        self.entries += 1;
        member.encode(chunk);
    }

    /// Go on with the file at hand; one that has shrunk is filled up with zeros, as its header has been sent.
    fn content(&mut self, chunk: &mut Vec<u8>) -> Outcome<()> {
        let Some((file, path, left)) = &mut self.file else { return Ok(()) };
        let want = usize::try_from(*left).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
        let start = chunk.len();
        chunk.resize(start + want, 0);
        let mut have = 0;
        while have < want {
            match file.read(&mut chunk[start + have..]) {
                Ok(0) => have = want,
                Ok(n) => have += n,
                Err(error) if sys::interrupted(&error) => {}
                Err(error) => return Err(Failure::io(&error, format_args!("read {}", path.display()))),
            }
        }
        *left -= want as u64;
        if *left == 0 {
            chunk.resize(chunk.len() + self.padding, 0);
            self.file = None;
        }
        Ok(())
    }
}

/// Anything that is not a plain file by now is not waited for.
fn open_file(path: &Path) -> io::Result<File> {
    let flags = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let path = c_path(path).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    let file: File = sys::open(&path, flags, 0)?.into();
    if !file.metadata()?.is_file() {
        return Err(io::Error::from_raw_os_error(libc::ENOENT));
    }
    Ok(file)
}

impl Source for TarSource {
    fn fill(&mut self, chunk: &mut Vec<u8>) -> Outcome<bool> {
        chunk.clear();
        let (slice, mut last) = (Slice::begin(), false);
        while !last && chunk.len() < CHUNK_BYTES && !slice.over() {
            if self.file.is_some() {
                self.content(chunk)?;
                continue;
            }
            match self.walk.step() {
                Some(Step::Entry(path, metadata)) => self.entry(path, &metadata, chunk),
                Some(Step::Missed(path, error)) => self.missed(path, &error),
                Some(Step::Leave(_)) => {}
                None => {
                    chunk.resize(chunk.len() + 2 * BLOCK, 0);
                    last = true;
                }
            }
        }
        self.bytes += chunk.len() as u64;
        Ok(last)
    }

    fn end(&self) -> Vec<u8> {
        let mut end = Writer::map(5);
        end.str("entries").int(self.entries as i64).str("skipped").int(self.skipped as i64);
        end.str("bytes").int(self.bytes as i64).str("unreadable").int(self.unreadable as i64);
        end.str("first_unreadable");
        match &self.first_unreadable {
            Some(path) => end.bytes(path.as_os_str().as_bytes()),
            None => end.nil(),
        };
        end.0
    }
}
