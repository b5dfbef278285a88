//! How a verb fails, in the protocol's words. Not for bugs of ours: those panic and end the machine.

use crate::msgpack::Writer;
use std::io;

#[derive(Debug)]
pub struct Failure {
    pub code: &'static str,
    pub errno: i32,
    pub message: String,
}

pub type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, errno: 0, message: message.into() }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new("invalid", message)
    }

    /// An error of the kernel, with what was tried.
    pub fn io(error: &io::Error, what: impl std::fmt::Display) -> Self {
        let errno = error.raw_os_error().unwrap_or(0);
        Self { code: code_of(errno), errno, message: format!("{what}: {error}") }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::map(3);
        let end = (0..=self.message.len().min(1024)).rev().find(|&n| self.message.is_char_boundary(n)).unwrap_or(0);
        writer.str("code").str(self.code).str("errno").int(self.errno.into()).str("message").str(&self.message[..end]);
        writer.0
    }
}

fn code_of(errno: i32) -> &'static str {
    match errno {
        libc::ENOENT => "not_found",
        libc::EEXIST => "exists",
        libc::EISDIR => "is_directory",
        libc::ENOTDIR => "not_directory",
        libc::EACCES | libc::EPERM => "permission",
        libc::ENOSPC | libc::EDQUOT => "no_space",
        libc::EROFS => "read_only",
        libc::ENOTEMPTY => "not_empty",
        libc::EINVAL | libc::ENAMETOOLONG | libc::ELOOP => "invalid",
        libc::ECONNREFUSED => "refused",
        _ => "io",
    }
}

/// `map_err(at("open /x"))`.
pub fn at<D: std::fmt::Display>(what: D) -> impl FnOnce(io::Error) -> Failure {
    move |error| Failure::io(&error, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msgpack::decode;

    #[test]
    fn kernel_errors_have_the_protocols_names() {
        let failure = Failure::io(&io::Error::from_raw_os_error(libc::ENOENT), "open /x");
        let bytes = failure.encode();
        let value = decode(&bytes).unwrap();
        assert_eq!(value.get("code").bytes(), Some(&b"not_found"[..]));
        assert_eq!(value.get("errno").int(), Some(2));
        assert!(failure.message.starts_with("open /x: No such file"));
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let bytes = Failure::invalid("é".repeat(600)).encode();
        assert!(bytes.len() < 1100 && decode(&bytes).is_some());
    }
}
