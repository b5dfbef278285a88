//! Changes below a directory as they happen, from inotify. Runs in workers; between events it holds none.
//!
//! Watches form a tree by descriptor and name, so that a moved directory takes what is below it along. What nobody
//! takes waits in one chunk and in the kernel's own queue, whose overflow is told.

use crate::failure::{at, Failure, Outcome};
use crate::files::c_path;
use crate::msgpack::Writer;
use crate::sys;
use crate::transfer::{Slice, Source, CHUNK_BYTES};
use crate::walk::{Step, Walk};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What the guest's own limit may allow more of, at some 200 bytes each of ours.
const WATCHES_MAX: usize = 65_536;
const PATH_BYTES_MAX: usize = 4096;
/// Names a look into new directories has told of, so that the kernel's event of the same is not told too.
const TOLD_MAX: usize = 10_000;
const READ_BYTES: usize = 32 * 1024;
/// How long the second half of a move may take to follow the first.
const MOVE_MS: i32 = 20;
const MASK: u32 = libc::IN_CREATE
    | libc::IN_MODIFY
    | libc::IN_DELETE
    | libc::IN_MOVED_FROM
    | libc::IN_MOVED_TO
    | libc::IN_ATTRIB
    | libc::IN_DELETE_SELF
    | libc::IN_MOVE_SELF
    | libc::IN_DONT_FOLLOW
    | libc::IN_EXCL_UNLINK;

struct Node {
    parent: i32,
    name: Vec<u8>,
}

/// A look into a directory, whose subdirectories get watches.
struct Scan {
    walk: Walk,
    /// The watch of each directory on the way.
    way: Vec<i32>,
    tell: bool,
}

struct Moved {
    cookie: u32,
    parent: i32,
    name: Vec<u8>,
    directory: bool,
}

struct Seen {
    watch: i32,
    mask: u32,
    cookie: u32,
    name: Vec<u8>,
}

pub struct WatchSource {
    inotify: OwnedFd,
    top: PathBuf,
    top_watch: i32,
    recursive: bool,
    nodes: BTreeMap<i32, Node>,
    children: BTreeMap<(i32, Vec<u8>), i32>,
    scan: Option<Scan>,
    raw: Vec<u8>,
    at: usize,
    moved: Option<Moved>,
    told: BTreeSet<(i32, Vec<u8>)>,
    last: Vec<u8>,
    dry: bool,
    replied: bool,
    /// A directory could not be watched; said once until there is room again.
    short: bool,
    gone: bool,
}

impl WatchSource {
    pub fn open(path: &Path, recursive: bool) -> Outcome<Self> {
        let what = || format!("watch {}", path.display());
        // A link is watched where it leads: paths are told below `path` all the same.
        let real = fs::canonicalize(path).map_err(at(what()))?;
        let directory = fs::metadata(&real).map_err(at(what()))?.is_dir();
        let inotify = sys::inotify().map_err(|error| limited(&error, what(), "max_user_instances"))?;
        let top_watch = sys::add_watch(inotify.as_raw_fd(), &c_path(&real)?, MASK)
            .map_err(|error| limited(&error, what(), "max_user_watches"))?;
        let recursive = recursive && directory;
        let scan =
            if recursive { Some(Scan { walk: Walk::open(path)?, way: vec![top_watch], tell: false }) } else { None };
        Ok(Self {
            inotify,
            top: path.to_owned(),
            top_watch,
            recursive,
            nodes: BTreeMap::new(),
            children: BTreeMap::new(),
            scan,
            raw: Vec::new(),
            at: 0,
            moved: None,
            told: BTreeSet::new(),
            last: Vec::new(),
            dry: false,
            replied: false,
            short: false,
            gone: false,
        })
    }

    /// The path of a name in a watched directory; None when it is one the tree no longer has.
    fn path(&self, watch: i32, name: &[u8]) -> Option<PathBuf> {
        let (mut names, mut at) = (vec![name], watch);
        while at != self.top_watch {
            let node = self.nodes.get(&at)?;
            names.push(&node.name);
            at = node.parent;
            if names.len() > PATH_BYTES_MAX {
                return None;
            }
        }
        let mut path = self.top.clone();
        path.extend(names.iter().rev().filter(|name| !name.is_empty()).map(|name| OsStr::from_bytes(name)));
        Some(path).filter(|path| path.as_os_str().len() <= PATH_BYTES_MAX)
    }

    fn tell(&mut self, out: &mut Vec<u8>, event: &str, path: &Path, to: Option<&Path>, directory: bool) {
        let kind = if directory { "directory" } else { kind_now(to.unwrap_or(path)) };
        let mut writer = Writer::map(4);
        writer.str("event").str(event).str("path").bytes(path.as_os_str().as_bytes()).str("to");
        match to {
            Some(to) => writer.bytes(to.as_os_str().as_bytes()),
            None => writer.nil(),
        };
        writer.str("kind").str(kind);
        // One write after the other to one file is one change.
        if event == "modified" && self.last == writer.0 {
            return;
        }
        out.extend_from_slice(&writer.0);
        self.last = writer.0;
    }

    fn overflow(&mut self, out: &mut Vec<u8>) {
        let top = self.top.clone();
        self.tell(out, "overflow", &top, None, true);
    }

    /// Watch a subdirectory; whether it was not watched before. None when it cannot be.
    fn add(&mut self, path: &Path, parent: i32, name: &[u8], out: &mut Vec<u8>) -> Outcome<Option<(i32, bool)>> {
        let known = self.children.get(&(parent, name.to_vec())).copied();
        if self.nodes.len() >= WATCHES_MAX && known.is_none() {
            return self.no_room(out, &format!("{WATCHES_MAX} directories are watched")).map(|()| None);
        }
        let added = sys::add_watch(self.inotify.as_raw_fd(), &c_path(path)?, MASK | libc::IN_ONLYDIR);
        match added {
            Ok(watch) => {
                self.short = false;
                if watch == self.top_watch || known == Some(watch) {
                    return Ok(Some((watch, false)));
                }
                self.place(watch, parent, name);
                Ok(Some((watch, true)))
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                self.no_room(out, "the guest's limit max_user_watches is reached").map(|()| None)
            }
            Err(_) => Ok(None), // gone again, or not ours to see
        }
    }

    /// At the start an error, later an overflow.
    fn no_room(&mut self, out: &mut Vec<u8>, why: &str) -> Outcome<()> {
        if !self.replied {
            return Err(Failure::new("no_space", format!("watch {}: {why}", self.top.display())));
        }
        if !std::mem::replace(&mut self.short, true) {
            self.overflow(out);
        }
        Ok(())
    }

    fn place(&mut self, watch: i32, parent: i32, name: &[u8]) {
        if let Some(old) = self.nodes.remove(&watch) {
            self.children.remove(&(old.parent, old.name));
        }
        self.nodes.insert(watch, Node { parent, name: name.to_vec() });
        self.children.insert((parent, name.to_vec()), watch);
    }

    /// Let go of a directory that has left, and of all below it.
    fn forget(&mut self, watch: i32) {
        let mut below = vec![watch];
        while let Some(watch) = below.pop() {
            let from = (watch, Vec::new());
            below.extend(self.children.range(from..).take_while(|((of, _), _)| *of == watch).map(|(_, child)| *child));
            if let Some(node) = self.nodes.remove(&watch) {
                self.children.remove(&(node.parent, node.name));
                sys::remove_watch(self.inotify.as_raw_fd(), watch);
            }
        }
    }

    /// One step of the look into new directories.
    fn look(&mut self, out: &mut Vec<u8>) -> Outcome<()> {
        let Some(mut scan) = self.scan.take() else { return Ok(()) };
        let depth = scan.walk.depth();
        match scan.walk.step() {
            None => return Ok(()),
            Some(Step::Leave(_)) => scan.way.truncate(depth - 1),
            Some(Step::Missed(..)) => {}
            Some(Step::Entry(path, metadata)) => {
                scan.way.truncate(scan.walk.depth());
                let parent = scan.way.last().copied().unwrap_or(self.top_watch);
                let name = path.file_name().map(|name| name.as_bytes().to_vec()).unwrap_or_default();
                if scan.tell {
                    if self.told.len() < TOLD_MAX {
                        self.told.insert((parent, name.clone()));
                    }
                    self.tell(out, "created", &path, None, metadata.is_dir());
                }
                if metadata.is_dir() {
                    match self.add(&path, parent, &name, out)? {
                        Some((watch, _)) => scan.way.push(watch),
                        None => scan.walk.prune(),
                    }
                }
            }
        }
        self.scan = Some(scan);
        Ok(())
    }

    fn appeared(&mut self, watch: i32, name: Vec<u8>, path: &Path, out: &mut Vec<u8>) -> Outcome<()> {
        if !self.recursive {
            return Ok(());
        }
        if let Some((new, true)) = self.add(path, watch, &name, out)? {
            self.scan = Walk::open(path).ok().map(|walk| Scan { walk, way: vec![new], tell: true });
        }
        Ok(())
    }

    fn event(&mut self, seen: Seen, out: &mut Vec<u8>) -> Outcome<()> {
        let Seen { watch, mask, cookie, name } = seen;
        let directory = mask & libc::IN_ISDIR != 0;
        if let Some(moved) = self.moved.take() {
            if mask & libc::IN_MOVED_TO != 0 && moved.cookie == cookie {
                return self.arrived(moved, watch, name, out);
            }
            self.left(moved, out);
        }
        if mask & libc::IN_Q_OVERFLOW != 0 {
            self.overflow(out);
            if self.recursive {
                let way = vec![self.top_watch];
                self.scan = Walk::open(&self.top).ok().map(|walk| Scan { walk, way, tell: false });
            }
            return Ok(());
        }
        if mask & (libc::IN_DELETE_SELF | libc::IN_MOVE_SELF | libc::IN_IGNORED | libc::IN_UNMOUNT) != 0 {
            if watch == self.top_watch {
                let top = self.top.clone();
                self.tell(out, "removed", &top, None, self.recursive || directory);
                self.gone = true;
            } else if mask & libc::IN_IGNORED != 0 {
                if let Some(node) = self.nodes.remove(&watch) {
                    self.children.remove(&(node.parent, node.name));
                }
            }
            return Ok(());
        }
        // A directory's own attributes are told by its parent; only the top has none here.
        if name.is_empty() && watch != self.top_watch {
            return Ok(());
        }
        let Some(path) = self.path(watch, &name) else { return Ok(()) };
        if mask & (libc::IN_CREATE | libc::IN_MOVED_TO) != 0 {
            if !self.told.remove(&(watch, name.clone())) {
                self.tell(out, "created", &path, None, directory);
            }
            if directory {
                self.appeared(watch, name, &path, out)?;
            }
        } else if mask & libc::IN_MOVED_FROM != 0 {
            self.told.remove(&(watch, name.clone()));
            self.moved = Some(Moved { cookie, parent: watch, name, directory });
        } else if mask & libc::IN_DELETE != 0 {
            self.told.remove(&(watch, name));
            self.tell(out, "removed", &path, None, directory);
        } else if mask & libc::IN_MODIFY != 0 {
            self.tell(out, "modified", &path, None, directory);
        } else if mask & libc::IN_ATTRIB != 0 {
            self.tell(out, "attributes", &path, None, directory);
        }
        Ok(())
    }

    /// The first half of a move whose second half is not in the tree.
    fn left(&mut self, moved: Moved, out: &mut Vec<u8>) {
        if let Some(path) = self.path(moved.parent, &moved.name) {
            self.tell(out, "removed", &path, None, moved.directory);
        }
        if let Some(watch) = self.children.get(&(moved.parent, moved.name)).copied() {
            self.forget(watch);
        }
    }

    fn arrived(&mut self, moved: Moved, watch: i32, name: Vec<u8>, out: &mut Vec<u8>) -> Outcome<()> {
        let (from, to) = (self.path(moved.parent, &moved.name), self.path(watch, &name));
        if let (Some(from), Some(to)) = (&from, &to) {
            self.tell(out, "moved", from, Some(to), moved.directory);
        }
        if !moved.directory {
            return Ok(());
        }
        match (self.children.get(&(moved.parent, moved.name)).copied(), to) {
            (Some(child), _) => {
                self.place(child, watch, &name);
                Ok(())
            }
            // It was not watched: as if it were new.
            (None, Some(to)) => self.appeared(watch, name, &to, out),
            _ => Ok(()),
        }
    }

    /// The next event of the kernel's; None when there is none now.
    fn next(&mut self) -> Outcome<Option<Seen>> {
        if self.at >= self.raw.len() {
            self.raw.clear();
            self.at = 0;
            let read = loop {
                match sys::read_onto(self.inotify.as_raw_fd(), &mut self.raw, READ_BYTES) {
                    Err(error) if sys::interrupted(&error) => {}
                    Err(error) if sys::would_block(&error) => {
                        let half = self.moved.is_some();
                        if half && sys::wait_readable(self.inotify.as_raw_fd(), MOVE_MS) {
                            continue;
                        }
                        break 0;
                    }
                    read => break read.map_err(at(format_args!("watch {}", self.top.display())))?,
                }
            };
            if read == 0 {
                return Ok(None);
            }
        }
        // struct inotify_event: wd, mask, cookie, len, then len bytes of a name that ends in NULs.
        let word = |at: usize| self.raw.get(at..at + 4).map_or(0, |b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
        let (start, length) = (self.at + 16, word(self.at + 12) as usize);
        let name = self.raw.get(start..start + length).unwrap_or_default();
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default().to_vec();
        let seen = Seen { watch: word(self.at) as i32, mask: word(self.at + 4), cookie: word(self.at + 8), name };
        self.at = start + length;
        Ok(Some(seen))
    }
}

fn kind_now(path: &Path) -> &'static str {
    match fs::symlink_metadata(path).map(|metadata| metadata.file_type()) {
        Ok(kind) if kind.is_symlink() => "symlink",
        Ok(kind) if kind.is_dir() => "directory",
        Ok(kind) if !kind.is_file() => "other",
        _ => "file",
    }
}

fn limited(error: &io::Error, what: String, limit: &str) -> Failure {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EMFILE) => {
            Failure::new("no_space", format!("{what}: the guest's limit {limit} of /proc/sys/fs/inotify is reached"))
        }
        _ => Failure::io(error, what),
    }
}

impl Source for WatchSource {
    fn fill(&mut self, chunk: &mut Vec<u8>) -> Outcome<bool> {
        chunk.clear();
        self.dry = false;
        let slice = Slice::begin();
        while chunk.len() < CHUNK_BYTES / 2 && !slice.over() {
            if self.scan.is_some() {
                self.look(chunk)?;
                continue;
            }
            if !self.replied {
                return Ok(false); // REPLY first: from here on nothing is missed
            }
            match self.next()? {
                Some(seen) => self.event(seen, chunk)?,
                None => {
                    if let Some(moved) = self.moved.take() {
                        self.left(moved, chunk);
                    }
                    self.told.clear();
                    self.last.clear();
                    self.dry = true;
                    break;
                }
            }
            if self.gone {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn end(&self) -> Vec<u8> {
        Writer::map(0).0
    }

    fn reply(&mut self) -> Option<Vec<u8>> {
        let now = !self.replied && self.scan.is_none();
        self.replied |= now;
        now.then(|| Writer::map(0).0)
    }

    fn waits(&self) -> Option<RawFd> {
        self.dry.then(|| self.inotify.as_raw_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::tests::Dir;
    use crate::msgpack::{decode, Value};

    struct Watcher(WatchSource, PathBuf);

    impl Watcher {
        fn new(path: &Path, recursive: bool) -> Self {
            let mut source = WatchSource::open(path, recursive).unwrap();
            while source.reply().is_none() {
                assert!(!source.fill(&mut Vec::new()).unwrap());
            }
            Self(source, path.to_owned())
        }

        /// What has happened: `event path[>to] kind`, paths below the top.
        fn seen(&mut self) -> Vec<String> {
            let (mut all, mut chunk) = (Vec::new(), Vec::new());
            loop {
                let last = self.0.fill(&mut chunk).unwrap();
                all.extend_from_slice(&chunk);
                if last || self.0.waits().is_some() {
                    break;
                }
            }
            let mut found = Vec::new();
            while !all.is_empty() {
                let end = (1..=all.len()).find(|end| decode(&all[..*end]).is_some()).unwrap();
                let value = decode(&all[..end]).unwrap();
                let text = |key: &str| {
                    let path = String::from_utf8_lossy(value.get(key).bytes().unwrap()).into_owned();
                    path.strip_prefix(self.1.to_str().unwrap()).unwrap_or(&path).trim_start_matches('/').to_owned()
                };
                let to = if value.get("to") == &Value::Nil { String::new() } else { format!(">{}", text("to")) };
                found.push(format!("{} {}{to} {}", text("event"), text("path"), text("kind")));
                all.drain(..end);
            }
            found
        }
    }

    #[test]
    fn what_happens_in_directories_old_and_new() {
        let dir = Dir::new("watch");
        fs::create_dir(dir.0.join("old")).unwrap();
        let mut watcher = Watcher::new(&dir.0, true);
        assert!(watcher.seen().is_empty());
        fs::write(dir.0.join("old/f"), b"1").unwrap();
        assert_eq!(watcher.seen(), ["created old/f file", "modified old/f file"]);
        fs::create_dir_all(dir.0.join("new/deep")).unwrap();
        fs::write(dir.0.join("new/deep/g"), b"1").unwrap();
        let seen = watcher.seen();
        let created: Vec<_> = seen.iter().filter(|one| one.starts_with("created")).collect();
        assert_eq!(created, ["created new directory", "created new/deep directory", "created new/deep/g file"]);
        fs::write(dir.0.join("new/deep/h"), b"").unwrap();
        assert_eq!(watcher.seen(), ["created new/deep/h file"]);
        fs::rename(dir.0.join("new"), dir.0.join("old/moved")).unwrap();
        assert_eq!(watcher.seen(), ["moved new>old/moved directory"]);
        fs::remove_file(dir.0.join("old/moved/deep/h")).unwrap();
        assert_eq!(watcher.seen(), ["removed old/moved/deep/h file"]);
        std::os::unix::fs::symlink("x", dir.0.join("l")).unwrap();
        fs::set_permissions(dir.0.join("old"), fs::metadata(dir.0.join("old")).unwrap().permissions()).unwrap();
        assert_eq!(watcher.seen(), ["created l symlink", "attributes old directory"]);
        fs::remove_dir_all(dir.0.join("old")).unwrap();
        assert!(watcher.seen().contains(&"removed old directory".to_owned()));
        assert!(watcher.0.nodes.is_empty() && watcher.0.children.is_empty());
        fs::remove_dir_all(&dir.0).unwrap();
        assert_eq!(watcher.seen(), ["removed l file", "removed  directory"]);
    }

    #[test]
    fn what_is_moved_out_is_removed_and_what_comes_in_is_created() {
        let (dir, other) = (Dir::new("watch-in"), Dir::new("watch-out"));
        fs::create_dir_all(dir.0.join("d/e")).unwrap();
        fs::create_dir_all(other.0.join("n/m")).unwrap();
        let mut watcher = Watcher::new(&dir.0, true);
        fs::rename(dir.0.join("d"), other.0.join("d")).unwrap();
        assert_eq!(watcher.seen(), ["removed d directory"]);
        assert!(watcher.0.nodes.is_empty());
        fs::write(other.0.join("d/e/f"), b"1").unwrap();
        assert!(watcher.seen().is_empty());
        fs::rename(other.0.join("n"), dir.0.join("n")).unwrap();
        assert_eq!(watcher.seen(), ["created n directory", "created n/m directory"]);
        fs::write(dir.0.join("n/m/f"), b"").unwrap();
        assert_eq!(watcher.seen(), ["created n/m/f file"]);
    }

    #[test]
    fn one_file_and_one_directory() {
        let dir = Dir::new("watch-one");
        fs::create_dir(dir.0.join("d")).unwrap();
        fs::write(dir.0.join("f"), b"1").unwrap();
        let (mut file, mut flat) = (Watcher::new(&dir.0.join("f"), true), Watcher::new(&dir.0, false));
        fs::write(dir.0.join("f"), b"2").unwrap();
        fs::write(dir.0.join("d/g"), b"2").unwrap();
        assert_eq!(file.seen(), ["modified  file"]);
        assert_eq!(flat.seen(), ["modified f file"]);
        fs::remove_file(dir.0.join("f")).unwrap();
        assert!(file.seen().contains(&"removed  file".to_owned()) && file.0.gone);
        assert_eq!(WatchSource::open(&dir.0.join("none"), true).map(drop).unwrap_err().code, "not_found");
    }

    #[test]
    fn an_overflow_is_told_and_healed() {
        let dir = Dir::new("watch-flood");
        let mut watcher = Watcher::new(&dir.0, true);
        let limit: usize =
            fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap().trim().parse().unwrap();
        for n in 0..limit / 2 + 100 {
            fs::write(dir.0.join(format!("f{}", n % 50)), b"").unwrap();
            fs::remove_file(dir.0.join(format!("f{}", n % 50))).unwrap();
        }
        fs::create_dir(dir.0.join("late")).unwrap();
        assert!(watcher.seen().contains(&"overflow  directory".to_owned()));
        fs::write(dir.0.join("late/f"), b"").unwrap();
        assert_eq!(watcher.seen(), ["created late/f file"]);
    }
}
