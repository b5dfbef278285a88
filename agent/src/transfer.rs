//! Bytes that flow to and from files, a bounded chunk at a time. Runs in workers; flow control is `stream`'s.

use crate::failure::{at, Failure, Outcome};
use crate::files::{c_path, entry, is_special, make_parents, mtime, not_regular};
use crate::msgpack::Writer;
use crate::sys;
use crate::users::Users;
use std::ffi::{CStr, CString};
use std::fs::{self, File, OpenOptions, ReadDir};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What one job reads, and so what one stream holds.
pub const CHUNK_BYTES: usize = 256 * 1024;
/// How long one job of a source may go on finding nothing to send: CANCEL and other verbs wait no longer for a worker.
const SLICE: Duration = Duration::from_millis(20);
const LIST_ENTRIES_MAX: u64 = 100_000;
const LIST_DEPTH_MAX: usize = 64;
const LINKS_MAX: usize = 40;

/// Something whose bytes go to the host.
pub trait Source: Send {
    /// Replace what is in `chunk` by the next bytes, which may be none yet; true when those are the last.
    fn fill(&mut self, chunk: &mut Vec<u8>) -> Outcome<bool>;
    /// The payload of END.
    fn end(&self) -> Vec<u8>;
    /// The payload of a REPLY that could not be given when it was opened, once, when it can be.
    fn reply(&mut self) -> Option<Vec<u8>> {
        None
    }
    /// False for one that only answers: no DATA and no EOF.
    fn has_body(&self) -> bool {
        true
    }
    /// The descriptor to be waited for before there is more.
    fn waits(&self) -> Option<RawFd> {
        None
    }
}

/// Something that takes the host's bytes; gone without a trace of what is half done when dropped before `commit`.
pub trait Sink: Send {
    fn write(&mut self, bytes: &[u8]) -> Outcome<()>;
    /// After the last byte; the payload of END.
    fn commit(self: Box<Self>) -> Outcome<Vec<u8>>;
}

/// The time one job has.
pub struct Slice(Instant);

impl Slice {
    pub fn begin() -> Self {
        Self(Instant::now() + SLICE)
    }

    pub fn over(&self) -> bool {
        Instant::now() >= self.0
    }
}

pub struct FileSource {
    file: File,
    path: PathBuf,
    offset: u64,
    left: u64,
    bytes: u64,
}

impl FileSource {
    /// The source, and the payload of REPLY.
    pub fn open(path: &Path, offset: u64, length: Option<u64>) -> Outcome<(Self, Vec<u8>)> {
        let what = format!("open {}", path.display());
        // A FIFO would wait for a writer, a device may act when opened.
        let metadata = fs::metadata(path).map_err(at(&what))?;
        if metadata.is_dir() || is_special(&metadata) {
            return Err(not_regular(path, &metadata));
        }
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
            .map_err(at(&what))?;
        let metadata = file.metadata().map_err(at(&what))?;
        if !metadata.is_file() {
            return Err(not_regular(path, &metadata));
        }
        let mut reply = Writer::map(3);
        reply.str("size").int(metadata.size() as i64).str("mode").int(i64::from(metadata.mode() & 0o7777));
        reply.str("mtime").float(mtime(&metadata));
        let left = length.unwrap_or(u64::MAX);
        Ok((Self { file, path: path.to_owned(), offset, left, bytes: 0 }, reply.0))
    }
}

impl Source for FileSource {
    fn fill(&mut self, chunk: &mut Vec<u8>) -> Outcome<bool> {
        let want = CHUNK_BYTES.min(usize::try_from(self.left).unwrap_or(CHUNK_BYTES));
        chunk.resize(want, 0);
        let mut have = 0;
        while have < want {
            match self.file.read_at(&mut chunk[have..], self.offset) {
                Ok(0) => break,
                Ok(n) => {
                    have += n;
                    self.offset += n as u64;
                }
                Err(error) if sys::interrupted(&error) => {}
                Err(error) => return Err(Failure::io(&error, format_args!("read {}", self.path.display()))),
            }
        }
        chunk.truncate(have);
        self.left -= have as u64;
        self.bytes += have as u64;
        Ok(have < want || self.left == 0)
    }

    fn end(&self) -> Vec<u8> {
        let mut end = Writer::map(1);
        end.str("bytes").int(self.bytes as i64);
        end.0
    }
}

pub struct ListSource {
    open: Vec<(ReadDir, PathBuf)>,
    depth: usize,
    users: Users,
    entries: u64,
    truncated: bool,
}

impl ListSource {
    pub fn open(path: &Path, depth: usize) -> Outcome<Self> {
        let top = fs::read_dir(path).map_err(at(format_args!("list {}", path.display())))?;
        let depth = depth.clamp(1, LIST_DEPTH_MAX);
        Ok(Self { open: vec![(top, path.to_owned())], depth, users: Users::load(), entries: 0, truncated: false })
    }
}

impl Source for ListSource {
    fn fill(&mut self, chunk: &mut Vec<u8>) -> Outcome<bool> {
        let mut out = Writer(std::mem::take(chunk));
        out.0.clear();
        while out.0.len() < CHUNK_BYTES / 2 {
            let depth = self.open.len();
            let Some((directory, parent)) = self.open.last_mut() else { break };
            let Some(found) = directory.next() else {
                self.open.pop();
                continue;
            };
            // What vanishes or is not ours to see while we walk is not listed.
            let Ok(found) = found else { continue };
            let path = parent.join(found.file_name());
            let Ok(metadata) = found.metadata() else { continue };
            if self.entries == LIST_ENTRIES_MAX {
                self.truncated = true;
                self.open.clear();
                break;
            }
            self.entries += 1;
            entry(&mut out, &path, &metadata, &self.users);
            if metadata.is_dir() && depth < self.depth {
                if let Ok(inner) = fs::read_dir(&path) {
                    self.open.push((inner, path));
                }
            }
        }
        *chunk = out.0;
        Ok(self.open.is_empty())
    }

    fn end(&self) -> Vec<u8> {
        let mut end = Writer::map(2);
        end.str("entries").int(self.entries as i64).str("truncated").bool(self.truncated);
        end.0
    }
}

/// A file being written: a temporary one beside its target until `commit`; gone when dropped before.
pub struct FileSink {
    file: File,
    directory: OwnedFd,
    temporary: CString,
    target: CString,
    path: PathBuf,
    mode: u32,
    bytes: u64,
    committed: bool,
}

static SERIAL: AtomicU64 = AtomicU64::new(0);

impl FileSink {
    /// `mode` None keeps the target's, or is 0o644.
    pub fn create(path: &Path, mode: Option<u32>, parents: bool, size: Option<u64>) -> Outcome<Self> {
        if path.as_os_str().to_string_lossy().ends_with('/') {
            return Err(Failure {
                code: "is_directory",
                errno: libc::EISDIR,
                message: format!("{} is a directory", path.display()),
            });
        }
        let path = &follow(path)?;
        let what = format!("write {}", path.display());
        let old = fs::symlink_metadata(path).ok();
        if let Some(old) = old.as_ref().filter(|old| !old.is_file()) {
            return Err(not_regular(path, old));
        }
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Failure::invalid(format!("{} names no file", path.display())));
        };
        if parents {
            make_parents(parent)?;
        }
        let parent_c = c_path(parent)?;
        let directory = sys::open(&parent_c, libc::O_PATH | libc::O_DIRECTORY, 0).map_err(at(&what))?;
        let free = sys::disk(&parent_c).map_or(u64::MAX, |(_, free)| free);
        if size.is_some_and(|size| size > free) {
            return Err(Failure::io(&io::Error::from_raw_os_error(libc::ENOSPC), what));
        }
        let (temporary, fd) = create_temporary(directory.as_raw_fd()).map_err(at(&what))?;
        let mode = mode.or(old.map(|old| old.permissions().mode())).unwrap_or(0o644) & 0o7777;
        Ok(Self {
            file: fd.into(),
            directory,
            temporary,
            target: c_path(name)?,
            path: path.clone(),
            mode,
            bytes: 0,
            committed: false,
        })
    }

    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }
}

impl Sink for FileSink {
    fn write(&mut self, bytes: &[u8]) -> Outcome<()> {
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(at(format_args!("write {}", self.path.display())))
    }

    /// Put it in its place.
    fn commit(mut self: Box<Self>) -> Outcome<Vec<u8>> {
        let what = format!("write {}", self.path.display());
        self.file.set_permissions(fs::Permissions::from_mode(self.mode)).map_err(at(&what))?;
        let directory = self.directory.as_raw_fd();
        // SAFETY: C strings and an open directory.
        let renamed = unsafe { libc::renameat(directory, self.temporary.as_ptr(), directory, self.target.as_ptr()) };
        sys::cvt(renamed).map_err(at(&what))?;
        self.committed = true;
        let mut end = Writer::map(1);
        end.str("bytes").int(self.bytes as i64);
        Ok(end.0)
    }
}

impl Drop for FileSink {
    fn drop(&mut self) {
        if !self.committed {
            unlink(self.directory.as_raw_fd(), &self.temporary);
        }
    }
}

/// A name no other file has, for what is renamed when it is whole.
pub fn temporary_name() -> CString {
    let name = format!(".l4-{:x}-{:x}.tmp", std::process::id(), SERIAL.fetch_add(1, Ordering::Relaxed));
    CString::new(name).unwrap_or_default()
}

/// An empty file of such a name, open for writing.
pub fn create_temporary(directory: RawFd) -> io::Result<(CString, OwnedFd)> {
    let name = temporary_name();
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
    let fd = match sys::open_at(directory, &name, flags, 0o600) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
            // Left by an agent of this pid that was cut off; names are never used twice by one agent.
            unlink(directory, &name);
            sys::open_at(directory, &name, flags, 0o600)
        }
        result => result,
    };
    Ok((name, fd?))
}

pub fn unlink(directory: RawFd, name: &CStr) {
    // SAFETY: a C string and an open directory. What is gone already is what was wanted.
    unsafe { libc::unlinkat(directory, name.as_ptr(), 0) };
}

/// The file a path means when it is a link, which is written through and not replaced.
fn follow(path: &Path) -> Outcome<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        match fs::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(Path::new("/")).join(target),
            Err(_) => return Ok(path),
        }
    }
    Err(Failure::io(&io::Error::from_raw_os_error(libc::ELOOP), path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::tests::Dir;
    use crate::msgpack::{decode, Value};

    fn all(source: &mut dyn Source) -> Vec<u8> {
        let (mut all, mut chunk) = (Vec::new(), Vec::new());
        loop {
            let last = source.fill(&mut chunk).unwrap();
            all.extend_from_slice(&chunk);
            if last {
                return all;
            }
        }
    }

    #[test]
    fn a_written_file_appears_whole_or_not_at_all() {
        let dir = Dir::new("sink");
        let path = dir.0.join("new/f");
        let mut sink = FileSink::create(&path, Some(0o640), true, None).unwrap();
        sink.write(b"abc").unwrap();
        assert!(!path.exists());
        Box::new(sink).commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"abc");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
        let mut sink = FileSink::create(&path, None, true, None).unwrap();
        sink.write(b"lost").unwrap();
        drop(sink);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no temporary file is left");
        Box::new(FileSink::create(&path, None, true, None).unwrap()).commit().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640, "no mode keeps the old one");
    }

    #[test]
    fn links_are_written_through_and_the_rest_is_refused() {
        let dir = Dir::new("sink-links");
        std::os::unix::fs::symlink("target", dir.0.join("link")).unwrap();
        std::os::unix::fs::symlink("loop", dir.0.join("loop")).unwrap();
        Box::new(FileSink::create(&dir.0.join("link"), None, false, None).unwrap()).commit().unwrap();
        assert!(fs::symlink_metadata(dir.0.join("target")).unwrap().is_file());
        let code = |path: &Path, size| FileSink::create(path, None, false, size).map(drop).unwrap_err().code;
        assert_eq!(code(&dir.0.join("loop"), None), "invalid");
        assert_eq!(code(&dir.0, None), "is_directory");
        assert_eq!(code(&dir.0.join("x/"), None), "is_directory");
        assert_eq!(code(&dir.0.join("none/x"), None), "not_found");
        assert_eq!(code(Path::new("/dev/null"), None), "invalid");
        assert_eq!(code(&dir.0.join("big"), Some(u64::MAX)), "no_space");
    }

    #[test]
    fn reading_a_part_a_whole_and_what_is_no_file() {
        let dir = Dir::new("source");
        let path = dir.0.join("f");
        let content: Vec<u8> = (0..600_000u32).map(|n| n as u8).collect();
        fs::write(&path, &content).unwrap();
        assert_eq!(all(&mut FileSource::open(&path, 0, None).unwrap().0), content);
        assert_eq!(all(&mut FileSource::open(&path, 599_990, Some(100)).unwrap().0), content[599_990..]);
        assert_eq!(all(&mut FileSource::open(&path, 5, Some(300_000)).unwrap().0), content[5..300_005]);
        assert_eq!(all(&mut FileSource::open(&path, 5, Some(0)).unwrap().0), b"");
        assert_eq!(all(&mut FileSource::open(&path, 1 << 40, None).unwrap().0), b"");
        let code = |path: &Path| FileSource::open(path, 0, None).map(drop).unwrap_err().code;
        assert_eq!(code(&dir.0), "is_directory");
        assert_eq!(code(&dir.0.join("none")), "not_found");
        assert_eq!(code(Path::new("/dev/zero")), "invalid");
        assert!(!all(&mut FileSource::open(Path::new("/proc/self/stat"), 0, None).unwrap().0).is_empty());
    }

    #[test]
    fn listing_goes_as_deep_as_asked() {
        let dir = Dir::new("list");
        fs::create_dir_all(dir.0.join("a/b/c")).unwrap();
        fs::write(dir.0.join("a/f"), b"x").unwrap();
        let names = |depth| {
            let bytes = all(&mut ListSource::open(&dir.0, depth).unwrap());
            let mut framed = Writer::default();
            let count = String::from_utf8_lossy(&bytes).matches("kind").count();
            framed.begin_array(count);
            framed.0.extend_from_slice(&bytes);
            let Some(Value::Array(entries)) = decode(&framed.0) else { panic!() };
            let mut names: Vec<String> =
                entries.iter().map(|e| String::from_utf8_lossy(e.get("name").bytes().unwrap()).into_owned()).collect();
            names.sort();
            names.join(" ")
        };
        assert_eq!(names(1), "a");
        assert_eq!(names(2), "a b f");
        assert_eq!(names(9), "a b c f");
        assert_eq!(ListSource::open(&dir.0.join("a/f"), 1).map(drop).unwrap_err().code, "not_directory");
    }
}
