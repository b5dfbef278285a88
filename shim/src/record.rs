//! What stays of a VM on disk: its bounded logs and the one-line JSON of how it ended.

use std::ffi::{CStr, CString};
use std::os::fd::AsRawFd;

use crate::sys::{self, Dir};

const TAIL_BYTES: usize = 8192;
const CREATE: libc::c_int = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC;

/// A log of at most `bytes_max` bytes in two files, `NAME` and the older `NAME.1`, and its tail in memory.
///
/// A guest can write to its console for ever; a full disk loses log lines, never the VM.
pub struct Log<'a> {
    dir: &'a Dir,
    name: CString,
    older: CString,
    written: u64,
    bytes_max: u64,
    tail: Vec<u8>,
}

impl<'a> Log<'a> {
    pub fn new(dir: &'a Dir, name: &str, bytes_max: u64) -> Log<'a> {
        let older = CString::new(format!("{name}.1")).unwrap_or_default();
        let name = CString::new(name).unwrap_or_default();
        Log { dir, name, older, written: 0, bytes_max, tail: Vec::new() }
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.tail.extend_from_slice(bytes);
        if self.tail.len() > 2 * TAIL_BYTES {
            self.tail.drain(..self.tail.len() - TAIL_BYTES);
        }
        for part in bytes.chunks((self.bytes_max / 2).max(1) as usize) {
            if self.written + part.len() as u64 > self.bytes_max / 2 {
                self.written = 0;
                let _ = self.dir.rename(&self.name, &self.older);
            }
            // Opened anew for each write: an open file in it would hide the loss of `run_dir` from its watch.
            let flags = if self.written == 0 { CREATE } else { libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND };
            if let Ok(file) = self.dir.open(&self.name, flags) {
                let _ = sys::write_all(file.as_raw_fd(), part);
            }
            self.written += part.len() as u64;
        }
    }

    pub fn tail(&self) -> &[u8] {
        &self.tail[self.tail.len().saturating_sub(TAIL_BYTES)..]
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reason {
    Exited,
    Stopped,
    Deadline,
}

/// The JSON of `run_dir/exit`. `status` is waitpid's.
pub fn exit_json(status: libc::c_int, reason: Reason, console: &[u8], stderr: &[u8]) -> String {
    let number = |some: bool, value: libc::c_int| if some { value.to_string() } else { "null".into() };
    let reason = match reason {
        Reason::Exited => "exited",
        Reason::Stopped => "stopped",
        Reason::Deadline => "deadline",
    };
    format!(
        "{{\"code\":{},\"signal\":{},\"reason\":\"{reason}\",\"console_tail\":{},\"stderr_tail\":{}}}\n",
        number(libc::WIFEXITED(status), libc::WEXITSTATUS(status)),
        number(libc::WIFSIGNALED(status), libc::WTERMSIG(status)),
        json_string(console),
        json_string(stderr),
    )
}

/// Any bytes as a JSON string; what is not UTF-8 becomes U+FFFD.
fn json_string(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len() + 2);
    out.push('"');
    for letter in String::from_utf8_lossy(bytes).chars() {
        match letter {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            control if (control as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", control as u32)),
            other => out.push(other),
        }
    }
    out.push('"');
    out
}

/// Write `exit` whole or not at all.
pub fn write_exit(dir: &Dir, body: &str) -> std::io::Result<()> {
    let (temporary, name): (&CStr, &CStr) = (&CString::new("exit.tmp")?, &CString::new("exit")?);
    let file = dir.open(temporary, CREATE)?;
    sys::write_all(file.as_raw_fd(), body.as_bytes())?;
    dir.rename(temporary, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_console_bytes_are_a_json_string() {
        assert_eq!(json_string(b"a\"\\\n\x1b[0m\xff"), "\"a\\\"\\\\\\n\\u001b[0m\u{fffd}\"");
    }

    #[test]
    fn exit_status_and_signal_exclude_each_other() {
        assert!(exit_json(3 << 8, Reason::Exited, b"", b"").starts_with("{\"code\":3,\"signal\":null,"));
        assert!(exit_json(9, Reason::Deadline, b"", b"").contains("\"signal\":9,\"reason\":\"deadline\""));
    }

    #[test]
    fn a_log_stays_within_its_bound_and_keeps_the_end() {
        let path = std::env::temp_dir().join(format!("shim-log-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let dir = Dir(CString::new(path.to_str().unwrap()).unwrap());
        let mut log = Log::new(&dir, "x.log", 1000);
        for number in 0..500 {
            log.write(format!("line {number:04}\n").as_bytes());
        }
        let size = |name| std::fs::metadata(path.join(name)).unwrap().len();
        assert!(size("x.log") + size("x.log.1") <= 1000);
        assert!(log.tail().ends_with(b"line 0499\n"));
        assert!(std::fs::read(path.join("x.log")).unwrap().ends_with(b"line 0499\n"));
        std::fs::remove_dir_all(path).unwrap();
    }
}
