//! Copies a guest's own memory pages out of a live VMM into a file (`--save-pages`) and back (`--load-pages`, or
//! `--load-pages-at` where it is known already where the memory is), or all of its memory into a sparse file of its size
//! (`--save-memory`).
//!
//! A process of its own for one copy, because it is bytes and page tables only: the server's event loop serves
//! other sandboxes meanwhile. It is given descriptors (of /proc/PID/mem, /proc/PID/pagemap) that the server was
//! allowed to open, and opens nothing itself. Here is what both ways share, and the file. Not here: which pages, and how they
//! go (`save`, `load`); digests, durability, which files these are (the driver).
//!
//! The file: a header of 4096 bytes (magic, pages of the machine, runs, of them with data, all u64 little-endian),
//! the data of the runs in their order, then the runs themselves: first page and count as u64, the top bit of the
//! count set for pages that are zero and have no data. Pages equal to the base's are in none of them.

mod load;
mod save;

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::fs::FileExt;

use crate::sys::check;
use load::{load, load_at};
use save::{save, save_whole};

const PAGE: usize = 4096;
const MAGIC: u64 = 0x3153_4547_4150_344c; // "L4PAGES1"
const HEADER: u64 = PAGE as u64;
const ZERO: u64 = 1 << 63;

/// `first` and `count` in pages.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    first: u64,
    count: u64,
    zero: bool,
}

/// Where a part of the guest's memory is in what is read or written: at `address`, `pages` long. Parts follow one another:
/// a page's number counts through all of them.
#[derive(Clone, Copy)]
pub struct Place {
    pub address: u64,
    pub pages: u64,
}

/// What `copy` does. After the descriptors, `PLACES` are pairs of address and pages.
pub const COPIES: [&str; 4] = ["--save-pages", "--load-pages", "--load-pages-at", "--save-memory"];

/// `--save-pages MEM PAGEMAP BASE OUT PLACES`, `--save-memory MEM PAGEMAP OUT PLACES`, `--load-pages-at MEM FILE PLACES`,
/// `--load-pages MAPS MEM FILE PAGES PATIENCE`: descriptors and numbers. Returns the figures.
pub fn copy(what: &str, numbers: &[i64]) -> Result<String> {
    match (what, numbers) {
        ("--save-pages", &[memory, pagemap, base, out, ref rest @ ..]) => {
            save(memory as i32, pagemap as i32, base as i32, out as i32, &places(rest)?)
        }
        ("--save-memory", &[memory, pagemap, out, ref rest @ ..]) => {
            save_whole(memory as i32, pagemap as i32, out as i32, &places(rest)?)
        }
        ("--load-pages-at", &[memory, file, ref rest @ ..]) => load_at(memory as i32, file as i32, &places(rest)?),
        ("--load-pages", &[maps, memory, file, pages, patience]) => {
            load(maps as i32, memory as i32, file as i32, pages as u64, patience as u32)
        }
        _ => Err(Error::from(ErrorKind::InvalidInput)),
    }
}

fn places(numbers: &[i64]) -> Result<Vec<Place>> {
    if numbers.is_empty() || numbers.len() % 2 != 0 || numbers.iter().any(|&number| number < 0) {
        return Err(Error::from(ErrorKind::InvalidInput));
    }
    Ok(numbers.chunks_exact(2).map(|pair| Place { address: pair[0] as u64, pages: pair[1] as u64 }).collect())
}

/// A read-only mapping of a whole file.
struct Map {
    start: *mut libc::c_void,
    bytes: usize,
}

impl Map {
    fn new(fd: RawFd, bytes: usize, flags: libc::c_int) -> Result<Map> {
        if bytes == 0 {
            return Err(Error::from(ErrorKind::InvalidData));
        }
        // SAFETY: a fresh mapping, checked; it is unmapped by nobody but us.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED | flags, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        Ok(Map { start, bytes })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for as long as self lives; sealed, or written once before.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.bytes) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        unsafe { libc::munmap(self.start, self.bytes) };
    }
}

fn size_of(fd: RawFd) -> Result<u64> {
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    check(unsafe { libc::fstat(fd, &mut stat) })?;
    Ok(stat.st_size as u64)
}

/// Whose descriptor stays its owner's.
fn file_of(fd: RawFd) -> ManuallyDrop<File> {
    // SAFETY: it is open as long as the copy, and not closed by this.
    ManuallyDrop::new(unsafe { File::from_raw_fd(fd) })
}

fn pread_all(fd: RawFd, buffer: &mut [u8], offset: u64) -> Result<()> {
    file_of(fd).read_exact_at(buffer, offset)
}

fn pwrite_all(fd: RawFd, bytes: &[u8], offset: u64) -> Result<()> {
    file_of(fd).write_all_at(bytes, offset)
}

fn corrupt(words: &str) -> Error {
    Error::new(ErrorKind::InvalidData, words.to_owned())
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte))
}

/// The runs of a file of pages, every bound checked, for a machine of `pages`.
fn table(bytes: &[u8], pages: u64) -> Result<Vec<Run>> {
    if bytes.len() < PAGE || word(bytes, 0) != MAGIC {
        return Err(corrupt("it is no file of pages"));
    }
    let (own_pages, count, kept) = (word(bytes, 8), word(bytes, 16), word(bytes, 24));
    let data = kept.checked_mul(PAGE as u64).and_then(|data| data.checked_add(HEADER));
    let whole = count.checked_mul(16).and_then(|table| table.checked_add(data?));
    if own_pages != pages || whole != Some(bytes.len() as u64) {
        return Err(corrupt("its size is not what it says, or it is of another machine"));
    }
    let mut runs = Vec::with_capacity(count as usize);
    let (mut next, mut seen) = (0, 0);
    for entry in bytes[data.unwrap_or_default() as usize..].chunks_exact(16) {
        let run = Run { first: word(entry, 0), count: word(entry, 8) & !ZERO, zero: word(entry, 8) & ZERO != 0 };
        let end = run.first.checked_add(run.count).filter(|&end| end <= pages && run.first >= next && run.count > 0);
        next = end.ok_or_else(|| corrupt("its runs make no sense"))?;
        seen += if run.zero { 0 } else { run.count };
        runs.push(run);
    }
    if seen != kept {
        return Err(corrupt("its runs are not its data"));
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    fn memfd(bytes: &[u8]) -> OwnedFd {
        let fd = unsafe { libc::memfd_create(b"test\0".as_ptr().cast(), 0) };
        let fd = unsafe { OwnedFd::from_raw_fd(check(fd).unwrap()) };
        pwrite_all(fd.as_raw_fd(), bytes, 0).unwrap();
        fd
    }

    fn content(fd: &OwnedFd) -> Vec<u8> {
        let mut bytes = vec![0; size_of(fd.as_raw_fd()).unwrap() as usize];
        pread_all(fd.as_raw_fd(), &mut bytes, 0).unwrap();
        bytes
    }

    fn page(value: u8) -> Vec<u8> {
        vec![value; PAGE]
    }

    #[test]
    fn a_copy_has_what_differs_and_nothing_else() {
        let base = memfd(&[page(1), page(2), page(0), page(4), page(5)].concat());
        let now = memfd(&[page(1), page(7), page(8), page(0), page(5)].concat());
        let out = memfd(b"");
        let place = [Place { address: 0, pages: 5 }];
        let said = save(now.as_raw_fd(), -1, base.as_raw_fd(), out.as_raw_fd(), &place).unwrap();
        assert_eq!(said, "2 1 2 5");
        let bytes = content(&out);
        assert_eq!(&bytes[PAGE..3 * PAGE], &[page(7), page(8)].concat()[..]);
        let runs = table(&bytes, 5).unwrap();
        assert_eq!(runs, [Run { first: 1, count: 2, zero: false }, Run { first: 3, count: 1, zero: true }]);
    }

    #[test]
    fn a_file_that_is_none_or_of_another_machine_is_refused() {
        let base = memfd(&[page(0), page(0), page(0)].concat());
        let now = memfd(&[page(1), page(0), page(3)].concat());
        let out = memfd(b"");
        save(now.as_raw_fd(), -1, base.as_raw_fd(), out.as_raw_fd(), &[Place { address: 0, pages: 3 }]).unwrap();
        let good = content(&out);
        assert!(table(&good, 3).is_ok());
        assert!(table(&good, 4).is_err());
        for cut in [0, 100, PAGE, good.len() - 1] {
            assert!(table(&good[..cut], 3).is_err());
        }
        let runs = good.len() - 32;
        // Magic; more runs; more data; a run beyond the end; runs out of order; an empty run; overflow.
        for (at, value) in
            [(0, 1), (16, 3), (24, 1 << 60), (runs, 3), (runs + 16, 0), (runs + 8, 0), (runs + 8, u64::MAX >> 1)]
        {
            let mut bad = good.clone();
            bad[at..at + 8].copy_from_slice(&value.to_le_bytes());
            assert!(table(&bad, 3).is_err(), "{at} {value}");
        }
    }

    /// Own memory as a machine's, in two mappings: what is saved of it, loaded into it and saved as a whole.
    #[test]
    fn memory_in_two_places_is_one() {
        let pages = 6;
        let base = memfd(&[page(1), page(2), page(0), page(4), page(5), page(0)].concat());
        let map = |pages: usize, offset: usize| {
            let (prot, fd) = (libc::PROT_READ | libc::PROT_WRITE, base.as_raw_fd());
            let at = unsafe {
                libc::mmap(std::ptr::null_mut(), pages * PAGE, prot, libc::MAP_PRIVATE, fd, (offset * PAGE) as i64)
            };
            assert_ne!(at, libc::MAP_FAILED);
            at.cast::<u8>()
        };
        let parts = [map(4, 0), map(2, 4)];
        let places = [(0, 4), (1, 2)].map(|(at, pages)| Place { address: parts[at as usize] as u64, pages });
        let write = |part: usize, page: usize, value: u8| unsafe {
            std::ptr::write_bytes(parts[part].add(page * PAGE), value, PAGE)
        };
        let open = |name: &str| {
            let path = CString::new(format!("/proc/self/{name}")).unwrap();
            unsafe { OwnedFd::from_raw_fd(check(libc::open(path.as_ptr(), libc::O_RDWR)).unwrap()) }
        };
        let pagemap = unsafe {
            let path = CString::new("/proc/self/pagemap").unwrap();
            OwnedFd::from_raw_fd(check(libc::open(path.as_ptr(), libc::O_RDONLY)).unwrap())
        };
        let memory = open("mem");
        write(0, 3, 9);
        write(1, 0, 8);
        write(1, 1, 0);
        let out = memfd(b"");
        let [mem, map] = [&memory, &pagemap].map(AsRawFd::as_raw_fd);
        assert_eq!(save(mem, map, base.as_raw_fd(), out.as_raw_fd(), &places).unwrap(), "2 0 1 3");
        let runs = table(&content(&out), pages).unwrap();
        assert_eq!(runs, [Run { first: 3, count: 2, zero: false }]);
        write(0, 3, 1);
        write(1, 0, 1);
        assert_eq!(load_at(mem, out.as_raw_fd(), &places).unwrap(), "2");
        let seen = |part: usize, page: usize| unsafe { *parts[part].add(page * PAGE + 77) };
        assert_eq!([seen(0, 2), seen(0, 3), seen(1, 0), seen(1, 1)], [0, 9, 8, 0]);
        let whole = memfd(&vec![0; 6 * PAGE]);
        assert_eq!(save_whole(mem, map, whole.as_raw_fd(), &places).unwrap(), "2");
        assert_eq!(content(&whole), [page(0), page(0), page(0), page(9), page(8), page(0)].concat());
    }

    #[test]
    fn places_are_pairs() {
        assert!(places(&[]).is_err() && places(&[1]).is_err() && places(&[1, -1]).is_err());
        assert_eq!(places(&[4096, 1, 8192, 7]).unwrap().iter().map(|place| place.pages).sum::<u64>(), 8);
    }
}
