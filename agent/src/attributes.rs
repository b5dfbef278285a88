//! Mode, owner and times of a file or of a whole tree, a bounded part at a time; and making links. Runs in workers.

use crate::failure::{at, Failure, Outcome};
use crate::files::c_path;
use crate::msgpack::{Value, Writer};
use crate::sys;
use crate::transfer::{temporary_name, Slice, Source};
use crate::users::Users;
use crate::walk::{Step, Walk};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What is to become of each file; None stays.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Attributes {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub mtime: Option<f64>,
}

impl Attributes {
    pub fn parse(request: &Value) -> Outcome<Self> {
        let users = Users::load();
        let wrong = |key: &str, what: &str| Failure::invalid(format!("{key} is {what}"));
        let id = |key: &str, name_key: &str, find: &dyn Fn(&[u8]) -> Option<u32>| match (
            request.get(key),
            request.get(name_key),
        ) {
            (Value::Nil, Value::Nil) => Ok(None),
            (Value::Nil, Value::Bytes(name)) => match find(name) {
                Some(id) => Ok(Some(id)),
                None => {
                    Err(Failure::new("no_user", format!("there is no {key} of {:?}", String::from_utf8_lossy(name))))
                }
            },
            (Value::Int(id), Value::Nil) => u32::try_from(*id)
                .ok()
                .filter(|id| *id != u32::MAX)
                .map(Some)
                .ok_or_else(|| wrong(key, "0 to 4294967294")),
            _ => Err(wrong(key, "a number or a name")),
        };
        let wanted = Self {
            mode: match request.get("mode") {
                Value::Nil => None,
                Value::Int(mode @ 0..=0o7777) => Some(*mode as u32),
                _ => return Err(wrong("mode", "0 to 0o7777")),
            },
            uid: id("uid", "user_name", &|name| users.id_of_user(name))?,
            gid: id("gid", "group_name", &|name| users.id_of_group(name))?,
            mtime: match request.get("mtime") {
                Value::Nil => None,
                value => match value.float().filter(|time| time.abs() < 1e15) {
                    Some(time) => Some(time),
                    None => return Err(wrong("mtime", "a number of seconds")),
                },
            },
        };
        if wanted == Self::default() {
            return Err(Failure::invalid(
                "set_attributes of nothing: give mode, uid, gid, user_name, group_name or mtime",
            ));
        }
        Ok(wanted)
    }

    fn apply(&self, path: &Path, follow: bool) -> Outcome<()> {
        let name = c_path(path)?;
        let flags = if follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
        let link = !follow && fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink());
        const SAME: u32 = u32::MAX;
        let act = || -> io::Result<()> {
            // SAFETY: a C string, plain integers, two timespecs.
            unsafe {
                // Owner first: a change of it takes set-id bits away.
                if self.uid.is_some() || self.gid.is_some() {
                    let (uid, gid) = (self.uid.unwrap_or(SAME), self.gid.unwrap_or(SAME));
                    sys::cvt(libc::fchownat(libc::AT_FDCWD, name.as_ptr(), uid, gid, flags))?;
                }
                if let Some(mode) = self.mode.filter(|_| !link) {
                    sys::cvt(libc::fchmodat(libc::AT_FDCWD, name.as_ptr(), mode, 0))?;
                }
                if let Some(time) = self.mtime {
                    let times = [
                        libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT },
                        libc::timespec { tv_sec: time.floor() as i64, tv_nsec: ((time - time.floor()) * 1e9) as i64 },
                    ];
                    sys::cvt(libc::utimensat(libc::AT_FDCWD, name.as_ptr(), times.as_ptr(), flags))?;
                }
            }
            Ok(())
        };
        act().map_err(at(format_args!("set attributes of {}", path.display())))
    }
}

/// Sets them on one file, or on a tree in which links are changed themselves and not followed.
pub struct AttributesSource {
    wanted: Attributes,
    top: PathBuf,
    follow: bool,
    walk: Option<Walk>,
    changed: u64,
    done: bool,
}

impl AttributesSource {
    pub fn open(path: &Path, wanted: Attributes, follow: bool, recursive: bool) -> Outcome<Self> {
        let metadata = if follow { fs::metadata(path) } else { fs::symlink_metadata(path) };
        let directory = metadata.map_err(at(format_args!("set attributes of {}", path.display())))?.is_dir();
        let walk = if recursive && directory { Some(Walk::open(path)?) } else { None };
        Ok(Self { wanted, top: path.to_owned(), follow, walk, changed: 0, done: false })
    }

    /// A mode that lets its owner in is set on the way in, any other on the way out.
    fn on_the_way_in(&self) -> bool {
        self.wanted.mode.map_or(true, |mode| mode & 0o500 == 0o500)
    }

    fn apply(&mut self, path: &Path, follow: bool) -> Outcome<()> {
        self.changed += 1;
        self.wanted.apply(path, follow)
    }

    fn entry(&mut self, path: &Path, metadata: &Metadata) -> Outcome<()> {
        if metadata.is_dir() && !self.on_the_way_in() {
            return Ok(());
        }
        self.apply(path, false)
    }
}

impl Source for AttributesSource {
    fn fill(&mut self, chunk: &mut Vec<u8>) -> Outcome<bool> {
        chunk.clear();
        let (slice, top, follow) = (Slice::begin(), self.top.clone(), self.follow);
        if self.changed == 0 && (self.walk.is_none() || self.on_the_way_in()) {
            self.apply(&top, follow)?;
        }
        while !slice.over() {
            match self.walk.as_mut().and_then(Walk::step) {
                Some(Step::Entry(path, metadata)) => self.entry(&path, &metadata)?,
                Some(Step::Leave(path)) if path == top => {
                    if !self.on_the_way_in() {
                        self.apply(&top, follow)?;
                    }
                }
                Some(Step::Leave(path)) => {
                    if !self.on_the_way_in() {
                        self.apply(&path, false)?;
                    }
                }
                Some(Step::Missed(_, error)) if error.kind() == io::ErrorKind::NotFound => {}
                Some(Step::Missed(path, error)) => {
                    return Err(Failure::io(&error, format_args!("enter {}", path.display())))
                }
                None => {
                    self.done = true;
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn end(&self) -> Vec<u8> {
        Writer::map(0).0
    }

    fn reply(&mut self) -> Option<Vec<u8>> {
        self.done.then(|| {
            let mut reply = Writer::map(1);
            reply.str("changed").int(self.changed as i64);
            reply.0
        })
    }

    fn has_body(&self) -> bool {
        false
    }
}

/// Make `path` a link: a symbolic one to whatever `target` says, or another name of the file `target`.
pub fn link(path: &Path, target: &[u8], symbolic: bool, overwrite: bool) -> Outcome<()> {
    let what = || format!("link {}", path.display());
    let target = c_path(std::ffi::OsStr::from_bytes(target))?;
    let make = |name: &std::ffi::CStr| {
        // SAFETY: C strings.
        sys::cvt(unsafe {
            if symbolic {
                libc::symlinkat(target.as_ptr(), libc::AT_FDCWD, name.as_ptr())
            } else {
                libc::linkat(libc::AT_FDCWD, target.as_ptr(), libc::AT_FDCWD, name.as_ptr(), 0)
            }
        })
    };
    let name = c_path(path)?;
    match make(&name) {
        Err(error) if overwrite && error.kind() == io::ErrorKind::AlreadyExists => {}
        made => return made.map(drop).map_err(at(what())),
    }
    let temporary = path.with_file_name(std::ffi::OsStr::from_bytes(temporary_name().to_bytes()));
    make(&c_path(&temporary)?).map_err(at(what()))?;
    let renamed = fs::rename(&temporary, path).map_err(at(what()));
    let _ = fs::remove_file(&temporary); // when it failed, or both were names of one file
    renamed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::tests::Dir;
    use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};

    fn set(path: &Path, wanted: Attributes, recursive: bool) -> Outcome<u64> {
        let mut source = AttributesSource::open(path, wanted, true, recursive)?;
        while !source.fill(&mut Vec::new())? {}
        assert!(source.reply().is_some());
        Ok(source.changed)
    }

    #[test]
    fn of_one_file_and_of_a_tree() {
        let dir = Dir::new("attributes");
        fs::create_dir(dir.0.join("d")).unwrap();
        fs::write(dir.0.join("d/f"), b"").unwrap();
        symlink("/etc/passwd", dir.0.join("d/l")).unwrap();
        let mode = |path: &str| fs::metadata(dir.0.join(path)).unwrap().permissions().mode() & 0o7777;
        let own = Attributes { mode: Some(0o4700), mtime: Some(-1.5), ..Attributes::default() };
        assert_eq!(set(&dir.0.join("d/f"), own, false).unwrap(), 1);
        let metadata = fs::metadata(dir.0.join("d/f")).unwrap();
        assert_eq!((mode("d/f"), metadata.mtime(), metadata.mtime_nsec()), (0o4700, -2, 500_000_000));
        let passwd = fs::metadata("/etc/passwd").unwrap().mode();
        for wanted in [0o000, 0o750] {
            let all = Attributes { mode: Some(wanted), ..Attributes::default() };
            assert_eq!(set(&dir.0, all, true).unwrap(), 4);
            assert_eq!(mode("d/f"), if sys::euid() == 0 { wanted } else { mode("d/f") });
        }
        assert_eq!(mode("d"), 0o750);
        assert_eq!(fs::metadata("/etc/passwd").unwrap().mode(), passwd, "links are not followed");
        assert_eq!(set(&dir.0.join("none"), own, true).unwrap_err().code, "not_found");
    }

    #[test]
    fn requests_are_checked() {
        let parse = |build: &dyn Fn(&mut Writer), n| {
            let mut request = Writer::map(n);
            build(&mut request);
            Attributes::parse(&crate::msgpack::decode(&request.0).unwrap())
        };
        assert_eq!(
            parse(
                &|w| {
                    w.str("uid").int(7);
                },
                1
            )
            .unwrap()
            .uid,
            Some(7)
        );
        assert_eq!(
            parse(
                &|w| {
                    w.str("user_name").str("root");
                },
                1
            )
            .unwrap()
            .uid,
            Some(0)
        );
        assert_eq!(
            parse(
                &|w| {
                    w.str("user_name").str("no such");
                },
                1
            )
            .unwrap_err()
            .code,
            "no_user"
        );
        assert_eq!(
            parse(
                &|w| {
                    w.str("mode").int(0o10000);
                },
                1
            )
            .unwrap_err()
            .code,
            "invalid"
        );
        assert_eq!(
            parse(
                &|w| {
                    w.str("uid").int(1 << 32);
                },
                1
            )
            .unwrap_err()
            .code,
            "invalid"
        );
        assert_eq!(
            parse(
                &|w| {
                    w.str("mtime").float(f64::NAN);
                },
                1
            )
            .unwrap_err()
            .code,
            "invalid"
        );
        assert_eq!(parse(&|_| {}, 0).unwrap_err().code, "invalid");
    }

    #[test]
    fn links_of_both_kinds() {
        let dir = Dir::new("links");
        let (path, file) = (dir.0.join("l"), dir.0.join("f"));
        fs::write(&file, b"1").unwrap();
        link(&path, b"any/where \xff", true, false).unwrap();
        assert_eq!(link(&path, b"x", true, false).unwrap_err().code, "exists");
        link(&path, b"x", true, true).unwrap();
        assert_eq!(fs::read_link(&path).unwrap(), Path::new("x"));
        for _ in 0..2 {
            link(&path, file.as_os_str().as_bytes(), false, true).unwrap();
        }
        assert_eq!(fs::metadata(&path).unwrap().nlink(), 2);
        assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 2);
        assert!(link(&dir.0, b"x", true, true).is_err());
    }
}
