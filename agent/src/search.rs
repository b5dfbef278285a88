//! Search in a tree by name and by content, a bounded part at a time. Runs in workers.
//!
//! A line is matched in windows of WINDOW_BYTES: a match across the cut of a longer line may be missed.

use crate::failure::{at, Failure, Outcome};
use crate::files::is_special;
use crate::glob::Glob;
use crate::msgpack::{Value, Writer};
use crate::sys;
use crate::transfer::{Slice, Source, CHUNK_BYTES};
use crate::walk::{Step, Walk};
use regex_lite::{Regex, RegexBuilder};
use std::fs::{self, File, Metadata, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const WINDOW_BYTES: usize = 16 * 1024;
const READ_BYTES: usize = 64 * 1024;
/// NUL in the first so many bytes makes a file binary.
const BINARY_BYTES: usize = 8 * 1024;
const TEXT_BYTES_MAX: usize = 512;
/// What is shown before a match in a line that is longer than that.
const TEXT_BEFORE_BYTES: usize = 128;
const PATTERN_BYTES_MAX: usize = 1024;
/// Of a compiled regex: with WINDOW_BYTES it bounds what one match can cost.
const REGEX_BYTES_MAX: usize = 64 * 1024;
const MATCHES_MAX: u64 = 100_000;

enum Pattern {
    Literal(Vec<u8>),
    /// In lower case, of ASCII.
    AnyCase(Vec<u8>),
    Regex(Box<Regex>),
}

impl Pattern {
    fn parse(pattern: &[u8], regex: bool, ignore_case: bool) -> Outcome<Self> {
        if pattern.is_empty() || pattern.len() > PATTERN_BYTES_MAX || pattern.contains(&b'\n') {
            return Err(Failure::invalid(format!("content is 1 to {PATTERN_BYTES_MAX} bytes of one line")));
        }
        if !regex {
            return Ok(if ignore_case {
                Self::AnyCase(pattern.to_ascii_lowercase())
            } else {
                Self::Literal(pattern.to_vec())
            });
        }
        let text = std::str::from_utf8(pattern).map_err(|_| Failure::invalid("a regular expression is UTF-8"))?;
        let built = RegexBuilder::new(text)
            .case_insensitive(ignore_case)
            .size_limit(REGEX_BYTES_MAX)
            .nest_limit(50)
            .build()
            .map_err(|error| Failure::invalid(format!("the regular expression {text:?}: {error}")))?;
        Ok(Self::Regex(Box::new(built)))
    }

    fn find(&self, line: &[u8]) -> Option<usize> {
        match self {
            Self::Literal(wanted) => memmem(line, wanted),
            Self::AnyCase(wanted) => memmem(&line.to_ascii_lowercase(), wanted),
            Self::Regex(regex) => regex.find(&String::from_utf8_lossy(line)).map(|found| found.start().min(line.len())),
        }
    }

    /// False when nothing in `bytes`, of many lines, can match; cheap, and may say true for nothing.
    fn may_match(&self, bytes: &[u8]) -> bool {
        matches!(self, Self::Regex(_)) || self.find(bytes).is_some()
    }
}

fn memmem(text: &[u8], wanted: &[u8]) -> Option<usize> {
    // SAFETY: two slices with their lengths; the result is null or within the first.
    let found = unsafe { libc::memmem(text.as_ptr().cast(), text.len(), wanted.as_ptr().cast(), wanted.len()) };
    (!found.is_null()).then(|| found as usize - text.as_ptr() as usize)
}

/// How many there are, eight bytes at a time: most of what is searched has no match and is only counted.
fn newlines(bytes: &[u8]) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const LOW: u64 = 0x7F * ONES;
    let words = bytes.chunks_exact(8);
    let rest = words.remainder().iter().filter(|byte| **byte == b'\n').count() as u64;
    let (mut count, mut sums, mut added) = (rest, 0u64, 0);
    for word in words {
        let word = u64::from_ne_bytes(word.try_into().unwrap_or_default()) ^ (ONES * u64::from(b'\n'));
        // 1 in each byte that is now 0; no sum of 31 times 8 of them overflows a byte.
        sums += !(((word & LOW) + LOW) | word | LOW) >> 7;
        added += 1;
        if added == 31 {
            count += sums.wrapping_mul(ONES) >> 56;
            (sums, added) = (0, 0);
        }
    }
    count + (sums.wrapping_mul(ONES) >> 56)
}

/// A file whose lines are being looked through.
struct Lines {
    file: File,
    path: PathBuf,
    /// What has been read and not looked at: less than a line, or than a window.
    rest: Vec<u8>,
    line: u64,
    /// Bytes of the line that `rest` goes on, which were looked at before.
    column: u64,
    /// The line that `rest` goes on has matched already.
    matched: bool,
    first: bool,
}

pub struct SearchSource {
    walk: Option<Walk>,
    /// The top itself, when it is a file.
    single: Option<(PathBuf, Metadata)>,
    top: PathBuf,
    name: Option<Glob>,
    content: Option<Pattern>,
    hidden: bool,
    max: u64,
    max_file_bytes: u64,
    open: Option<Lines>,
    buffer: Vec<u8>,
    matches: u64,
    files: u64,
    truncated: bool,
}

impl SearchSource {
    /// What a request asks for; nothing is looked at yet.
    pub fn new(path: &Path, request: &Value) -> Outcome<Self> {
        let text = |key: &str| match request.get(key) {
            Value::Nil => Ok(None),
            Value::Bytes(bytes) => Ok(Some(*bytes)),
            _ => Err(Failure::invalid(format!("{key} is text"))),
        };
        let (regex, ignore_case) = (request.get("regex").bool(false), request.get("ignore_case").bool(false));
        let name = text("name")?.map(Glob::parse).transpose()?;
        let content = text("content")?.map(|pattern| Pattern::parse(pattern, regex, ignore_case)).transpose()?;
        let count = |key: &str, default: u64| match request.get(key) {
            Value::Nil => Ok(default),
            Value::Int(n) if *n > 0 => Ok(*n as u64),
            _ => Err(Failure::invalid(format!("{key} is a number above 0"))),
        };
        Ok(Self {
            walk: None,
            single: None,
            top: path.to_owned(),
            name,
            content,
            hidden: request.get("hidden").bool(true),
            max: count("max", 1000)?.min(MATCHES_MAX),
            max_file_bytes: count("max_file_bytes", u64::MAX)?,
            open: None,
            buffer: Vec::new(),
            matches: 0,
            files: 0,
            truncated: false,
        })
    }

    pub fn begin(mut self) -> Outcome<Self> {
        let metadata = fs::metadata(&self.top).map_err(at(format_args!("search {}", self.top.display())))?;
        if metadata.is_dir() {
            self.walk = Some(Walk::open(&self.top)?);
        } else {
            self.single = Some((self.top.clone(), metadata));
        }
        Ok(self)
    }

    fn entry(&mut self, path: PathBuf, metadata: &Metadata, out: &mut Writer) {
        let name = path.file_name().map_or(&b""[..], OsStrExt::as_bytes);
        if !self.hidden && name.starts_with(b".") {
            if let Some(walk) = &mut self.walk {
                walk.prune();
            }
            return;
        }
        let below = path.strip_prefix(&self.top).ok().filter(|below| !below.as_os_str().is_empty());
        let below = below.map_or(name, |below| below.as_os_str().as_bytes());
        if self.name.as_ref().is_some_and(|glob| !glob.matches(below)) {
            return;
        }
        if self.content.is_none() {
            self.files += 1;
            self.matches += 1;
            let kind = metadata.file_type();
            out.begin_map(4);
            out.str("path").bytes(path.as_os_str().as_bytes()).str("kind").str(match () {
                () if kind.is_file() => "file",
                () if kind.is_dir() => "directory",
                () if kind.is_symlink() => "symlink",
                () => "other",
            });
            out.str("size").int(metadata.size() as i64).str("mtime").float(crate::files::mtime(metadata));
            return;
        }
        if !metadata.is_file() || is_special(metadata) || metadata.size() > self.max_file_bytes {
            return;
        }
        let nofollow = if self.walk.is_some() { libc::O_NOFOLLOW } else { 0 };
        let flags = nofollow | libc::O_NONBLOCK | libc::O_NOCTTY;
        // What is not ours to read is not searched.
        if let Ok(file) = OpenOptions::new().read(true).custom_flags(flags).open(&path) {
            self.files += 1;
            let rest = Vec::new();
            self.open = Some(Lines { file, path, rest, line: 1, column: 0, matched: false, first: true });
        }
    }

    /// Look through the next piece of the file at hand.
    fn lines(&mut self, out: &mut Writer) {
        let (Some(lines), Some(pattern)) = (&mut self.open, &self.content) else { return };
        self.buffer.clear();
        self.buffer.append(&mut lines.rest);
        let read = loop {
            match sys::read_onto(lines.file.as_raw_fd(), &mut self.buffer, READ_BYTES) {
                Err(error) if sys::interrupted(&error) => {}
                read => break read.unwrap_or(0),
            }
        };
        if lines.first && self.buffer[..self.buffer.len().min(BINARY_BYTES)].contains(&0) {
            self.open = None;
            return;
        }
        lines.first = false;
        let mut at = 0;
        let whole = if read == 0 {
            self.buffer.len()
        } else {
            self.buffer.iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1)
        };
        if whole > 0 && !pattern.may_match(&self.buffer[..whole]) {
            lines.line += newlines(&self.buffer[..whole]);
            (at, lines.column, lines.matched) = (whole, 0, false);
        }
        while at < self.buffer.len() && self.matches < self.max {
            let end = self.buffer[at..].iter().take(WINDOW_BYTES).position(|b| *b == b'\n').map(|n| at + n);
            let end_of_window = end.unwrap_or((at + WINDOW_BYTES).min(self.buffer.len()));
            if end.is_none() && end_of_window == self.buffer.len() && read > 0 && end_of_window - at < WINDOW_BYTES {
                break; // the line goes on in what has not been read
            }
            let line = &self.buffer[at..end_of_window];
            let line = line.strip_suffix(b"\r").filter(|_| end.is_some()).unwrap_or(line);
            if !lines.matched {
                if let Some(column) = pattern.find(line) {
                    self.matches += 1;
                    lines.matched = true;
                    let start = if line.len() <= TEXT_BYTES_MAX { 0 } else { column.saturating_sub(TEXT_BEFORE_BYTES) };
                    out.begin_map(4);
                    out.str("path").bytes(lines.path.as_os_str().as_bytes()).str("line").int(lines.line as i64);
                    out.str("column").int((lines.column + column as u64 + 1) as i64);
                    out.str("text").bytes(&line[start..line.len().min(start + TEXT_BYTES_MAX)]);
                }
            }
            if end.is_some() {
                (at, lines.line, lines.column, lines.matched) = (end_of_window + 1, lines.line + 1, 0, false);
            } else {
                lines.column += (end_of_window - at) as u64;
                at = end_of_window;
            }
        }
        if read == 0 {
            self.open = None;
        } else {
            lines.rest.extend_from_slice(&self.buffer[at.min(self.buffer.len())..]);
        }
    }
}

impl Source for SearchSource {
    fn fill(&mut self, chunk: &mut Vec<u8>) -> Outcome<bool> {
        let mut out = Writer(std::mem::take(chunk));
        out.0.clear();
        let (slice, mut last) = (Slice::begin(), false);
        while !last && out.0.len() < CHUNK_BYTES / 2 && !slice.over() {
            if self.matches >= self.max {
                (self.truncated, last) = (true, true);
            } else if self.open.is_some() {
                self.lines(&mut out);
            } else if let Some((path, metadata)) = self.single.take() {
                self.entry(path, &metadata, &mut out);
            } else {
                match self.walk.as_mut().and_then(Walk::step) {
                    Some(Step::Entry(path, metadata)) => self.entry(path, &metadata, &mut out),
                    Some(Step::Leave(_) | Step::Missed(..)) => {}
                    None => last = true,
                }
            }
        }
        *chunk = out.0;
        Ok(last)
    }

    fn end(&self) -> Vec<u8> {
        let mut end = Writer::map(3);
        end.str("matches").int(self.matches as i64).str("files").int(self.files as i64);
        end.str("truncated").bool(self.truncated);
        end.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::tests::Dir;
    use crate::msgpack::decode;

    fn search(path: &Path, build: &dyn Fn(&mut Writer), n: usize) -> Outcome<Vec<String>> {
        let mut request = Writer::map(n);
        build(&mut request);
        let mut source = SearchSource::new(path, &decode(&request.0).unwrap())?.begin()?;
        let (mut all, mut chunk) = (Vec::new(), Vec::new());
        while !source.fill(&mut chunk)? {
            all.extend_from_slice(&chunk);
        }
        all.extend_from_slice(&chunk);
        let mut framed = Writer::default();
        framed.begin_array(source.matches as usize);
        framed.0.extend_from_slice(&all);
        let Some(Value::Array(found)) = decode(&framed.0) else { panic!("{all:?}") };
        let mut found: Vec<String> = found
            .iter()
            .map(|one| {
                let name = String::from_utf8_lossy(one.get("path").bytes().unwrap()).into_owned();
                let name = name.strip_prefix(path.to_str().unwrap()).unwrap().trim_start_matches('/').to_owned();
                match (one.get("line").int(), one.get("column").int()) {
                    (Some(line), Some(column)) => {
                        format!("{name}:{line}:{column}:{}", String::from_utf8_lossy(one.get("text").bytes().unwrap()))
                    }
                    _ => name,
                }
            })
            .collect();
        found.sort();
        Ok(found)
    }

    #[test]
    fn by_name() {
        let dir = Dir::new("search-name");
        fs::create_dir_all(dir.0.join("a/.git")).unwrap();
        for path in ["a/x.py", "a/.git/y.py", "z.txt"] {
            fs::write(dir.0.join(path), b"").unwrap();
        }
        let named = |glob: &'static str| {
            search(
                &dir.0,
                &move |w| {
                    w.str("name").str(glob);
                },
                1,
            )
            .unwrap()
        };
        assert_eq!(named("*.py"), ["a/.git/y.py", "a/x.py"]);
        assert_eq!(named("a/*"), ["a/.git", "a/x.py"]);
        let visible = search(
            &dir.0,
            &|w| {
                w.str("hidden").bool(false);
            },
            1,
        )
        .unwrap();
        assert_eq!(visible, ["a", "a/x.py", "z.txt"]);
        assert_eq!(
            search(
                &dir.0,
                &|w| {
                    w.str("max").int(2);
                },
                1
            )
            .unwrap()
            .len(),
            2
        );
        assert_eq!(search(&dir.0.join("none"), &|_| {}, 0).unwrap_err().code, "not_found");
    }

    #[test]
    fn by_content() {
        let dir = Dir::new("search-content");
        fs::write(dir.0.join("f"), "one\r\nTwo two\n\nthree \u{e4}x\nlast two").unwrap();
        fs::write(dir.0.join("binary"), b"two\0two").unwrap();
        fs::write(dir.0.join("latin"), b"\xe4 two\n").unwrap();
        let found = |wanted: &'static str, regex: bool, any_case: bool| {
            let build = move |w: &mut Writer| {
                w.str("content").str(wanted).str("regex").bool(regex).str("ignore_case").bool(any_case);
            };
            search(&dir.0, &build, 3)
        };
        assert_eq!(found("two", false, false).unwrap(), ["f:2:5:Two two", "f:5:6:last two", "latin:1:3:\u{fffd} two"]);
        assert_eq!(found("TWO", false, true).unwrap().len(), 3);
        assert_eq!(found("^t.*e", true, false).unwrap(), ["f:4:1:three \u{e4}x"]);
        assert_eq!(found("ONE$", true, true).unwrap(), ["f:1:1:one"]);
        assert_eq!(found("(", true, false).unwrap_err().code, "invalid");
        assert_eq!(found("a\nb", false, false).unwrap_err().code, "invalid");
        assert_eq!(found("(((a{100}){100}){100})", true, false).unwrap_err().code, "invalid");
        let of_file = search(
            &dir.0.join("f"),
            &|w| {
                w.str("content").str("Two");
            },
            1,
        )
        .unwrap();
        assert_eq!(of_file, [":2:5:Two two"].map(|s| s.replace(":5:", ":1:")));
    }

    #[test]
    fn newlines_are_counted_wherever_they_are() {
        let mut seed = 1u64;
        for length in 0..600 {
            let bytes: Vec<u8> = (0..length)
                .map(|_| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    [b'\n', 0x8a, 0x0b, b'\n', 0xff][(seed >> 33) as usize % 5]
                })
                .collect();
            assert_eq!(newlines(&bytes), bytes.iter().filter(|b| **b == b'\n').count() as u64);
        }
        assert_eq!(newlines(&[b'\n'; 5000]), 5000);
    }

    #[test]
    fn long_lines_and_many() {
        let dir = Dir::new("search-long");
        let mut text = "x\n".repeat(200_000);
        text.push_str(&"y".repeat(300_000));
        text.push_str("needle");
        text.push_str(&"y".repeat(100_000));
        text.push_str("\nneedle\n");
        fs::write(dir.0.join("f"), &text).unwrap();
        for regex in [false, true] {
            let build = move |w: &mut Writer| {
                w.str("content").str("needle").str("regex").bool(regex);
            };
            let found = search(&dir.0, &build, 2).unwrap();
            assert_eq!(found.len(), 2, "{regex}");
            assert!(found.iter().any(|one| one == "f:200002:1:needle"));
            assert!(found.iter().any(|one| one.starts_with("f:200001:300001:yyy") && one.len() < 600));
        }
    }
}
