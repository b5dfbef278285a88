//! File verbs that answer at once: stat, mkdir, move, remove; and what all file verbs share. Runs in workers.
//!
//! Not here: bytes that flow (`transfer`).

use crate::failure::{at, Failure, Outcome};
use crate::msgpack::{Value, Writer};
use crate::sys;
use crate::transfer::{FileSink, Sink};
use crate::users::{User, Users};
use std::cell::RefCell;
use std::ffi::{CString, OsStr};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

const PATH_BYTES_MAX: usize = 4096;

/// Whose permissions a job has; None is the agent's own (which is all there is outside a VM).
pub type Credentials = Option<User>;

thread_local! {
    static ACTING_AS: RefCell<Credentials> = const { RefCell::new(None) };
}

/// Give this worker the user's rights until another job changes them.
pub fn become_user(user: &Credentials) -> Outcome<()> {
    let Some(wanted) = user else { return Ok(()) };
    ACTING_AS.with(|current| {
        if current.borrow().as_ref() != Some(wanted) {
            *current.borrow_mut() = None;
            sys::act_as(wanted.uid, wanted.gid, &wanted.groups).map_err(at("become the user"))?;
            *current.borrow_mut() = Some(wanted.clone());
        }
        Ok(())
    })
}

/// Take back what `become_user` gave away: for a job that needs the agent's own rights.
pub fn become_agent() -> Outcome<()> {
    ACTING_AS.with(|current| {
        if current.borrow().is_some() {
            sys::act_as(0, 0, &[]).map_err(at("become the agent again"))?;
            *current.borrow_mut() = None;
        }
        Ok(())
    })
}

/// An absolute path out of a request.
pub fn path(value: &Value) -> Outcome<PathBuf> {
    let bytes = value.bytes().ok_or_else(|| Failure::invalid("a path is missing"))?;
    if !bytes.starts_with(b"/") || bytes.contains(&0) || bytes.len() > PATH_BYTES_MAX {
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]);
        return Err(Failure::invalid(format!("{shown:?} is not an absolute path of at most {PATH_BYTES_MAX} bytes")));
    }
    Ok(PathBuf::from(OsStr::from_bytes(bytes)))
}

pub fn c_path(path: impl AsRef<OsStr>) -> Outcome<CString> {
    CString::new(path.as_ref().as_bytes()).map_err(|_| Failure::invalid("a path holds a NUL"))
}

pub fn not_regular(path: &Path, metadata: &Metadata) -> Failure {
    if metadata.is_dir() {
        return Failure {
            code: "is_directory",
            errno: libc::EISDIR,
            message: format!("{} is a directory", path.display()),
        };
    }
    Failure::invalid(format!("{} is not a regular file", path.display()))
}

/// Append the entry of `path` to `out`.
pub fn entry(out: &mut Writer, path: &Path, metadata: &Metadata, users: &Users) {
    let kind = metadata.file_type();
    let name = path.file_name().unwrap_or_else(|| OsStr::new("/"));
    out.begin_map(11);
    out.str("name").bytes(name.as_bytes()).str("path").bytes(path.as_os_str().as_bytes());
    out.str("kind").str(match () {
        () if kind.is_file() => "file",
        () if kind.is_dir() => "directory",
        () if kind.is_symlink() => "symlink",
        () => "other",
    });
    out.str("size").int(metadata.size() as i64).str("mode").int(i64::from(metadata.mode() & 0o7777));
    out.str("uid").int(metadata.uid().into()).str("gid").int(metadata.gid().into());
    out.str("user").bytes(&users.user_name(metadata.uid())).str("group").bytes(&users.group_name(metadata.gid()));
    out.str("mtime").float(mtime(metadata)).str("target");
    match if kind.is_symlink() { fs::read_link(path).ok() } else { None } {
        Some(target) => out.bytes(target.as_os_str().as_bytes()),
        None => out.nil(),
    };
}

pub fn mtime(metadata: &Metadata) -> f64 {
    metadata.mtime() as f64 + metadata.mtime_nsec() as f64 / 1e9
}

pub fn stat(path: &Path, follow: bool) -> Outcome<Vec<u8>> {
    let metadata = if follow { fs::metadata(path) } else { fs::symlink_metadata(path) };
    let metadata = metadata.map_err(at(format_args!("stat {}", path.display())))?;
    let mut out = Writer::default();
    entry(&mut out, path, &metadata, &Users::load());
    Ok(out.0)
}

pub fn mkdir(path: &Path, parents: bool, mode: u32, exist_ok: bool) -> Outcome<()> {
    let what = || format!("mkdir {}", path.display());
    if let Some(parent) = path.parent().filter(|_| parents) {
        make_parents(parent)?;
    }
    match fs::DirBuilder::new().mode(mode).create(path) {
        // The umask is not what was asked about.
        Ok(()) => fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(at(what())),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() && exist_ok => Ok(()),
            _ => Err(Failure::io(&error, what())),
        },
        Err(error) => Err(Failure::io(&error, what())),
    }
}

pub fn make_parents(path: &Path) -> Outcome<()> {
    if path.is_dir() {
        return Ok(());
    }
    fs::DirBuilder::new().recursive(true).mode(0o755).create(path).map_err(at(format_args!("mkdir {}", path.display())))
}

pub fn rename(from: &Path, to: &Path, overwrite: bool) -> Outcome<()> {
    let what = || format!("move {} to {}", from.display(), to.display());
    let (from_c, to_c) = (c_path(from)?, c_path(to)?);
    let flags = if overwrite { 0 } else { libc::RENAME_NOREPLACE };
    // SAFETY: C strings and plain integers.
    let result = unsafe {
        libc::syscall(libc::SYS_renameat2, libc::AT_FDCWD, from_c.as_ptr(), libc::AT_FDCWD, to_c.as_ptr(), flags)
    };
    if result == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() != Some(libc::EXDEV) {
        return Err(Failure::io(&error, what()));
    }
    let metadata = fs::symlink_metadata(from).map_err(at(what()))?;
    if !metadata.is_file() {
        return Err(Failure::io(&error, what())); // a directory across file systems: the caller copies what it wants
    }
    if !overwrite && fs::symlink_metadata(to).is_ok() {
        return Err(Failure::io(&io::Error::from_raw_os_error(libc::EEXIST), what()));
    }
    let mut source = fs::File::open(from).map_err(at(what()))?;
    let mut sink = Box::new(FileSink::create(to, Some(metadata.mode() & 0o7777), false, None)?);
    io::copy(&mut source, sink.file()).map_err(at(what()))?;
    sink.commit()?;
    fs::remove_file(from).map_err(at(what()))
}

pub fn remove(path: &Path, recursive: bool, missing_ok: bool) -> Outcome<()> {
    if path.components().count() <= 1 {
        return Err(Failure::invalid("the root directory stays"));
    }
    let result = fs::symlink_metadata(path).and_then(|metadata| match (metadata.is_dir(), recursive) {
        (false, _) => fs::remove_file(path),
        (true, false) => fs::remove_dir(path),
        (true, true) => fs::remove_dir_all(path),
    });
    match result {
        Err(error) if missing_ok && error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result.map_err(at(format_args!("remove {}", path.display()))),
    }
}

/// A FIFO, socket or device: opening one can block or act.
pub fn is_special(metadata: &Metadata) -> bool {
    let kind = metadata.file_type();
    kind.is_fifo() || kind.is_socket() || kind.is_char_device() || kind.is_block_device()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::msgpack::decode;

    pub struct Dir(pub PathBuf);

    impl Dir {
        pub fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("l4-agent-test-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn paths_are_absolute_and_clean() {
        assert_eq!(path(&Value::Bytes(b"/a/\xff")).unwrap().as_os_str().as_bytes(), b"/a/\xff");
        for bad in [&b"a"[..], b"", b"~/x", b"/a\0b", &[b'/'; 5000]] {
            assert_eq!(path(&Value::Bytes(bad)).unwrap_err().code, "invalid");
        }
    }

    #[test]
    fn stat_tells_links_from_their_targets() {
        let dir = Dir::new("stat");
        let (file, link) = (dir.0.join("f"), dir.0.join("l"));
        fs::write(&file, b"abc").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4750)).unwrap();
        std::os::unix::fs::symlink("f", &link).unwrap();
        let bytes = stat(&link, false).unwrap();
        let value = decode(&bytes).unwrap();
        assert_eq!(value.get("kind").bytes(), Some(&b"symlink"[..]));
        assert_eq!(value.get("target").bytes(), Some(&b"f"[..]));
        let bytes = stat(&link, true).unwrap();
        let value = decode(&bytes).unwrap();
        assert_eq!((value.get("size").int(), value.get("mode").int()), (Some(3), Some(0o4750)));
        assert_eq!(stat(&dir.0.join("none"), true).unwrap_err().code, "not_found");
    }

    #[test]
    fn mkdir_move_remove() {
        let dir = Dir::new("ops");
        let deep = dir.0.join("a/b/c");
        assert_eq!(mkdir(&deep, false, 0o700, true).unwrap_err().code, "not_found");
        mkdir(&deep, true, 0o700, true).unwrap();
        mkdir(&deep, true, 0o700, true).unwrap();
        assert_eq!(mkdir(&deep, true, 0o700, false).unwrap_err().code, "exists");
        fs::write(deep.join("x"), b"x").unwrap();
        fs::write(deep.join("y"), b"y").unwrap();
        assert_eq!(rename(&deep.join("x"), &deep.join("y"), false).unwrap_err().code, "exists");
        rename(&deep.join("x"), &deep.join("y"), true).unwrap();
        assert_eq!(remove(&deep, false, false).unwrap_err().code, "not_empty");
        remove(&dir.0.join("a"), true, false).unwrap();
        assert_eq!(remove(&dir.0.join("a"), true, false).unwrap_err().code, "not_found");
        remove(&dir.0.join("a"), true, true).unwrap();
        assert_eq!(remove(Path::new("/"), true, true).unwrap_err().code, "invalid");
    }

    #[test]
    fn a_link_to_a_directory_is_removed_not_followed() {
        let dir = Dir::new("link");
        mkdir(&dir.0.join("real"), false, 0o755, true).unwrap();
        fs::write(dir.0.join("real/f"), b"").unwrap();
        std::os::unix::fs::symlink("real", dir.0.join("link")).unwrap();
        remove(&dir.0.join("link"), true, false).unwrap();
        assert!(dir.0.join("real/f").exists());
    }
}
