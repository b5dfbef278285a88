//! A walk over a tree, one step at a time, whatever its size: links are not followed, and what the kernel makes up
//! (/proc, /sys…) is not entered from outside. Runs in workers.

use crate::failure::{at, Outcome};
use crate::sys;
use std::ffi::OsString;
use std::fs::{self, Metadata, ReadDir};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Above it the directories on the way are open; below it their names are held, which descriptors are too few for.
const OPEN_MAX: usize = 64;
const NAMES_MAX: usize = 10_000;
/// f_type of file systems without a disk or memory of their own: their files have no size, or no end.
const MADE_UP: [u64; 11] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x6367_7270, // cgroup2
    0x0027_e0eb, // cgroup
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0xcafe_4a11, // bpf
    0x6265_6570, // configfs
    0x6165_676c, // pstore
    0x1cd1,      // devpts
];

enum Names {
    Open(ReadDir),
    Held(std::vec::IntoIter<OsString>),
}

pub enum Step {
    Entry(PathBuf, Metadata),
    /// A directory and everything below it are done; not said of one that was not entered.
    Leave(PathBuf),
    /// What could not be looked at, and why.
    Missed(PathBuf, io::Error),
}

pub struct Walk {
    open: Vec<(Names, PathBuf, u64)>,
    /// A directory to be entered next.
    enter: Option<(PathBuf, u64)>,
}

impl Walk {
    /// Over what is in `top`, which may be a link to a directory; the first step is an entry of it.
    pub fn open(top: &Path) -> Outcome<Self> {
        let what = || format!("open {}", top.display());
        let device = fs::metadata(top).map_err(at(what()))?.dev();
        let names = Names::Open(fs::read_dir(top).map_err(at(what()))?);
        Ok(Self { open: vec![(names, top.to_owned(), device)], enter: None })
    }

    /// How many directories the last entry is below the top: 1 for what is in it.
    pub fn depth(&self) -> usize {
        self.open.len()
    }

    /// The directory that was the last step is not entered.
    pub fn prune(&mut self) {
        self.enter = None;
    }

    pub fn step(&mut self) -> Option<Step> {
        if let Some((path, device)) = self.enter.take() {
            if self.open.last().is_some_and(|(_, _, outer)| *outer != device) && made_up(&path) {
                return self.step();
            }
            match self.names(&path) {
                Ok(names) => self.open.push((names, path, device)),
                Err(error) => return Some(Step::Missed(path, error)),
            }
        }
        let (names, directory, _) = self.open.last_mut()?;
        let name = match names {
            Names::Open(found) => found.next().map(|entry| entry.map(|entry| entry.file_name())),
            Names::Held(held) => held.next().map(Ok),
        };
        match name {
            None => self.open.pop().map(|(_, path, _)| Step::Leave(path)),
            Some(Err(error)) => {
                // Reading on would fail for ever.
                let path = directory.clone();
                *names = Names::Held(Vec::new().into_iter());
                Some(Step::Missed(path, error))
            }
            Some(Ok(name)) => {
                let path = directory.join(name);
                match fs::symlink_metadata(&path) {
                    Ok(metadata) => {
                        self.enter = metadata.is_dir().then(|| (path.clone(), metadata.dev()));
                        Some(Step::Entry(path, metadata))
                    }
                    Err(error) => Some(Step::Missed(path, error)),
                }
            }
        }
    }

    fn names(&self, path: &Path) -> io::Result<Names> {
        let found = fs::read_dir(path)?;
        if self.open.len() < OPEN_MAX {
            return Ok(Names::Open(found));
        }
        let names: Vec<OsString> =
            found.take(NAMES_MAX + 1).map(|entry| Ok(entry?.file_name())).collect::<io::Result<_>>()?;
        if names.len() > NAMES_MAX {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        Ok(Names::Held(names.into_iter()))
    }
}

fn made_up(path: &Path) -> bool {
    crate::files::c_path(path)
        .ok()
        .and_then(|path| sys::file_system(&path).ok())
        .is_some_and(|kind| MADE_UP.contains(&kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::tests::Dir;

    fn names(walk: &mut Walk) -> Vec<String> {
        let mut found = Vec::new();
        while let Some(step) = walk.step() {
            if let Step::Entry(path, _) = step {
                found.push(path.file_name().unwrap().to_string_lossy().into_owned());
            }
        }
        found.sort();
        found
    }

    #[test]
    fn everything_is_met_once_and_links_are_not_followed() {
        let dir = Dir::new("walk");
        fs::create_dir_all(dir.0.join("a/b")).unwrap();
        fs::write(dir.0.join("a/b/f"), b"").unwrap();
        std::os::unix::fs::symlink("..", dir.0.join("a/up")).unwrap();
        assert_eq!(names(&mut Walk::open(&dir.0).unwrap()), ["a", "b", "f", "up"]);
        let mut walk = Walk::open(&dir.0).unwrap();
        assert!(matches!(walk.step(), Some(Step::Entry(..))));
        walk.prune();
        assert!(names(&mut walk).is_empty());
        assert_eq!(Walk::open(&dir.0.join("a/b/f")).map(drop).unwrap_err().code, "not_directory");
    }

    #[test]
    fn deeper_than_descriptors_would_reach() {
        let dir = Dir::new("deep");
        let deep = dir.0.join(["d"; 200].join("/"));
        fs::create_dir_all(&deep).unwrap();
        assert_eq!(names(&mut Walk::open(&dir.0).unwrap()).len(), 200);
    }

    #[test]
    fn what_the_kernel_makes_up_is_entered_only_when_asked_for() {
        let mut walk = Walk::open(Path::new("/")).unwrap();
        while let Some(step) = walk.step() {
            match step {
                Step::Entry(path, metadata) if metadata.is_dir() && path != Path::new("/proc") => walk.prune(),
                Step::Entry(path, _) => assert_ne!(path.parent(), Some(Path::new("/proc"))),
                _ => {}
            }
        }
        assert!(matches!(Walk::open(Path::new("/proc/self")).unwrap().step(), Some(Step::Entry(..))));
    }
}
