//! Copies a guest's own memory pages out of a live VMM into a file (`--save-pages`) and back (`--load-pages`, or
//! `--load-pages-at` where it is known already where the memory is), or all of its memory into a sparse file of its size
//! (`--save-memory`).
//!
//! A process of its own for one copy, because it is bytes and page tables only: the server's event loop serves
//! other sandboxes meanwhile. It is given descriptors (of /proc/PID/mem, /proc/PID/pagemap) that the server was
//! allowed to open, and opens nothing itself. Not here: digests, durability, which files these are (the driver).
//!
//! The file: a header of 4096 bytes (magic, pages of the machine, runs, of them with data, all u64 little-endian),
//! the data of the runs in their order, then the runs themselves: first page and count as u64, the top bit of the
//! count set for pages that are zero and have no data. Pages equal to the base's are in none of them.

use std::io::{Error, ErrorKind, Result};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::sys::{self, check};

const PAGE: usize = 4096;
const MAGIC: u64 = 0x3153_4547_4150_344c; // "L4PAGES1"
const HEADER: u64 = PAGE as u64;
const ZERO: u64 = 1 << 63;
/// Pages read in one go: small enough to stay in the cache between compare and write.
const BATCH: usize = 128;
const ENTRIES: usize = 1 << 16;
const IOV_MAX: usize = 512;
/// Pages written in one go.
const PIECE: usize = 256;
const LOADERS_MAX: usize = 4;

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

fn pread_all(fd: RawFd, buffer: &mut [u8], offset: u64) -> Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        let rest = &mut buffer[done..];
        let at = (offset + done as u64) as libc::off_t;
        let count = unsafe { libc::pread(fd, rest.as_mut_ptr().cast(), rest.len(), at) };
        match count {
            0 => return Err(Error::from(ErrorKind::UnexpectedEof)),
            count if count > 0 => done += count as usize,
            _ => {
                let error = Error::last_os_error();
                if error.kind() != ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

fn pwrite_all(fd: RawFd, bytes: &[u8], offset: u64) -> Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let rest = &bytes[done..];
        let at = (offset + done as u64) as libc::off_t;
        let count = unsafe { libc::pwrite(fd, rest.as_ptr().cast(), rest.len(), at) };
        match count {
            0 => return Err(Error::from(ErrorKind::WriteZero)),
            count if count > 0 => done += count as usize,
            _ => {
                let error = Error::last_os_error();
                if error.kind() != ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Gathers slices and writes them in few calls, one after the other in the file.
fn write_gathered(fd: RawFd, slices: &mut [libc::iovec], offset: &mut u64) -> Result<()> {
    let mut first = 0;
    while first < slices.len() {
        let many = (slices.len() - first).min(IOV_MAX) as libc::c_int;
        let count = unsafe { libc::pwritev(fd, slices[first..].as_ptr(), many, *offset as libc::off_t) };
        if count < 0 {
            let error = Error::last_os_error();
            if error.kind() == ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        }
        if count == 0 {
            return Err(Error::from(ErrorKind::WriteZero));
        }
        *offset += count as u64;
        let mut left = count as usize;
        while first < slices.len() && left >= slices[first].iov_len {
            left -= slices[first].iov_len;
            first += 1;
        }
        if left > 0 {
            slices[first].iov_base = unsafe { slices[first].iov_base.cast::<u8>().add(left).cast() };
            slices[first].iov_len -= left;
        }
    }
    Ok(())
}

/// Whether a page of a private file mapping is the process's own, by its pagemap entry: present and not the file's, or
/// swapped.
fn own(entry: u64) -> bool {
    let (present, swapped, of_file) = (entry >> 63 & 1, entry >> 62 & 1, entry >> 61 & 1);
    swapped == 1 || present == 1 && of_file == 0
}

/// Tells each stretch of pages for which `yes` holds, in order, as (first, count).
fn stretches(
    entries: &[u64],
    base: u64,
    yes: impl Fn(u64) -> bool,
    mut tell: impl FnMut(u64, u64) -> Result<()>,
) -> Result<()> {
    let mut at = 0;
    while at < entries.len() {
        // Most entries are nothing at all: eight of them at a time.
        if entries.len() - at >= 8 && entries[at..at + 8].iter().fold(0, |all, entry| all | entry) == 0 {
            at += 8;
            continue;
        }
        if !yes(entries[at]) {
            at += 1;
            continue;
        }
        let first = at;
        while at < entries.len() && yes(entries[at]) {
            at += 1;
        }
        tell(base + first as u64, (at - first) as u64)?;
    }
    Ok(())
}

struct Saver<'a> {
    memory: RawFd,
    pages: u64,
    base: &'a [u8],
    out: RawFd,
    offset: u64,
    buffer: Vec<u8>,
    runs: Vec<Run>,
    kept: u64,
    zeros: u64,
    looked_at: u64,
}

impl Saver<'_> {
    fn add(&mut self, page: u64, zero: bool) {
        if zero {
            self.zeros += 1;
        } else {
            self.kept += 1;
        }
        match self.runs.last_mut() {
            Some(run) if run.zero == zero && run.first + run.count == page => run.count += 1,
            _ => self.runs.push(Run { first: page, count: 1, zero }),
        }
    }

    /// Pages that may differ from the base's, the first of them at `address`.
    fn pages(&mut self, first: u64, count: u64, address: u64) -> Result<()> {
        let mut done = 0;
        while done < count {
            let many = ((count - done) as usize).min(BATCH);
            self.batch(first + done, many, address + done * PAGE as u64)?;
            done += many as u64;
        }
        Ok(())
    }

    fn batch(&mut self, first: u64, many: usize, address: u64) -> Result<()> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let bytes = &mut buffer[..many * PAGE];
        pread_all(self.memory, bytes, address)?;
        self.looked_at += many as u64;
        let mut slices: Vec<libc::iovec> = Vec::with_capacity(many);
        for (number, content) in bytes.chunks_exact(PAGE).enumerate() {
            let page = first + number as u64;
            let at = page as usize * PAGE;
            if content == &self.base[at..at + PAGE] {
                continue;
            }
            let zero = content == &[0u8; PAGE][..];
            self.add(page, zero);
            if zero {
                continue;
            }
            let start = content.as_ptr();
            match slices.last_mut() {
                Some(last) if unsafe { last.iov_base.cast::<u8>().add(last.iov_len) } as *const u8 == start => {
                    last.iov_len += PAGE
                }
                _ => slices.push(libc::iovec { iov_base: start as *mut libc::c_void, iov_len: PAGE }),
            }
        }
        write_gathered(self.out, &mut slices, &mut self.offset)?;
        self.buffer = buffer;
        Ok(())
    }

    fn finish(self) -> Result<String> {
        let mut table = Vec::with_capacity(self.runs.len() * 16);
        for run in &self.runs {
            table.extend_from_slice(&run.first.to_le_bytes());
            table.extend_from_slice(&(run.count | if run.zero { ZERO } else { 0 }).to_le_bytes());
        }
        pwrite_all(self.out, &table, self.offset)?;
        let mut header = [0; HEADER as usize];
        for (place, word) in [MAGIC, self.pages, self.runs.len() as u64, self.kept].iter().enumerate() {
            header[place * 8..place * 8 + 8].copy_from_slice(&word.to_le_bytes());
        }
        pwrite_all(self.out, &header, 0)?;
        Ok(format!("{} {} {} {}", self.kept, self.zeros, self.runs.len(), self.looked_at))
    }
}

/// Copy the pages that differ from `base`; says how many: with data, zero, runs, looked at.
///
/// `pagemap` tells which pages a private mapping has of its own. Without one (-1) `memory` is a file itself, mapped
/// shared by the machine, and every page that is in it or in the base is compared.
pub fn save(memory: RawFd, pagemap: RawFd, base: RawFd, out: RawFd, places: &[Place]) -> Result<String> {
    let pages: u64 = places.iter().map(|place| place.pages).sum();
    let bytes = pages as usize * PAGE;
    if size_of(base)? != bytes as u64 {
        return Err(Error::new(ErrorKind::InvalidInput, "the base is of another size"));
    }
    let map = Map::new(base, bytes, 0)?;
    let mut saver = Saver {
        memory,
        pages,
        base: map.bytes(),
        out,
        offset: HEADER,
        buffer: vec![0; BATCH * PAGE],
        runs: Vec::new(),
        kept: 0,
        zeros: 0,
        looked_at: 0,
    };
    if pagemap < 0 {
        for (first, count) in union(extents(memory, bytes as u64)?, extents(base, bytes as u64)?) {
            saver.pages(first, count, first * PAGE as u64)?;
        }
        return saver.finish();
    }
    own_pages(pagemap, places, |first, count, address| saver.pages(first, count, address))?;
    saver.finish()
}

/// Write all pages that are not zero to their places in `out`, a file of the machine's size; says how many.
fn save_whole(memory: RawFd, pagemap: RawFd, out: RawFd, places: &[Place]) -> Result<String> {
    let mut buffer = vec![0; BATCH * PAGE];
    let mut written = 0;
    own_pages(pagemap, places, |first, count, address| {
        let mut done = 0;
        while done < count {
            let many = ((count - done) as usize).min(BATCH);
            let bytes = &mut buffer[..many * PAGE];
            pread_all(memory, bytes, address + done * PAGE as u64)?;
            let mut number = 0;
            while number < many {
                let filled = |at: usize| bytes[at * PAGE..(at + 1) * PAGE] != [0; PAGE];
                let start = number;
                while number < many && filled(number) {
                    number += 1;
                }
                if number > start {
                    let at = (first + done + start as u64) * PAGE as u64;
                    pwrite_all(out, &bytes[start * PAGE..number * PAGE], at)?;
                    written += number - start;
                } else {
                    number += 1;
                }
            }
            done += many as u64;
        }
        Ok(())
    })?;
    Ok(written.to_string())
}

/// Tells each stretch of pages that a private mapping has of its own: number of the first, how many, address.
fn own_pages(pagemap: RawFd, places: &[Place], mut tell: impl FnMut(u64, u64, u64) -> Result<()>) -> Result<()> {
    let mut raw = vec![0u8; ENTRIES * 8];
    let mut entries = vec![0u64; ENTRIES];
    let mut before = 0;
    for place in places {
        let mut page = 0;
        while page < place.pages {
            let many = ((place.pages - page) as usize).min(ENTRIES);
            let at = (place.address / PAGE as u64 + page) * 8;
            pread_all(pagemap, &mut raw[..many * 8], at)?;
            for (entry, word) in entries.iter_mut().zip(raw[..many * 8].chunks_exact(8)) {
                *entry = u64::from_le_bytes([word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7]]);
            }
            stretches(&entries[..many], page, own, |first, count| {
                tell(before + first, count, place.address + first * PAGE as u64)
            })?;
            page += many as u64;
        }
        before += place.pages;
    }
    Ok(())
}

/// What is not a hole of `fd`, in pages.
fn extents(fd: RawFd, bytes: u64) -> Result<Vec<(u64, u64)>> {
    let mut found = Vec::new();
    let mut offset = 0;
    while offset < bytes {
        let start = unsafe { libc::lseek(fd, offset as libc::off_t, libc::SEEK_DATA) };
        if start < 0 {
            let error = Error::last_os_error();
            if error.raw_os_error() == Some(libc::ENXIO) {
                break;
            }
            return Err(error);
        }
        let end = unsafe { libc::lseek(fd, start, libc::SEEK_HOLE) };
        if end < 0 {
            return Err(Error::last_os_error());
        }
        offset = (end as u64).min(bytes);
        let first = start as u64 / PAGE as u64;
        let last = (offset + PAGE as u64 - 1) / PAGE as u64;
        found.push((first, last - first));
    }
    Ok(found)
}

/// Both lists of (first, count) as one, in order and without overlap.
fn union(one: Vec<(u64, u64)>, other: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, u64)> = one.into_iter().chain(other).collect();
    all.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (first, count) in all {
        match joined.last_mut() {
            Some((start, length)) if *start + *length >= first => {
                *length = (*length).max(first + count - *start);
            }
            _ => joined.push((first, count)),
        }
    }
    joined
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

/// The address of the mapping of `bytes` bytes whose name holds `memfd:llm4agents-ram`, in the text of /proc/PID/maps.
pub fn mapping(maps: &str, bytes: u64) -> Option<u64> {
    maps.lines().filter(|line| line.contains("/memfd:llm4agents-ram ")).find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        (rest.starts_with("rw-p") && end - start == bytes).then_some(start)
    })
}

fn pread_text(fd: RawFd) -> Result<String> {
    check(unsafe { libc::lseek(fd, 0, libc::SEEK_SET) } as libc::c_int)?;
    let bytes = sys::read_to_end(fd, 1 << 22)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Write the pages of `file` into a machine of `pages` that is just starting: `maps` is looked at until its memory is
/// there, `patience` times with a millisecond between. Says how many pages were written.
pub fn load(maps: RawFd, memory: RawFd, file: RawFd, pages: u64, patience: u32) -> Result<String> {
    let map = Map::new(file, size_of(file)? as usize, libc::MAP_POPULATE)?;
    let bytes = map.bytes();
    let runs = table(bytes, pages)?;
    let mut tries = 0;
    let address = loop {
        let text = pread_text(maps)?;
        if text.is_empty() {
            return Err(Error::from_raw_os_error(libc::ESRCH)); // it has ended
        }
        if let Some(address) = mapping(&text, pages * PAGE as u64) {
            break address;
        }
        tries += 1;
        if tries > patience {
            return Err(Error::new(ErrorKind::TimedOut, "the machine's memory did not appear"));
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    };
    let written = write_runs(memory, &runs, bytes, &[Place { address, pages }])?;
    Ok(format!("{written} {tries}"))
}

/// Write the pages of `file` into a machine whose memory is at `places`. Says how many were written.
fn load_at(memory: RawFd, file: RawFd, places: &[Place]) -> Result<String> {
    let map = Map::new(file, size_of(file)? as usize, libc::MAP_POPULATE)?;
    let runs = table(map.bytes(), places.iter().map(|place| place.pages).sum())?;
    Ok(write_runs(memory, &runs, map.bytes(), places)?.to_string())
}

/// The pages of `runs`, whose data is in `bytes`, to where they belong; returns how many.
fn write_runs(memory: RawFd, runs: &[Run], bytes: &[u8], places: &[Place]) -> Result<u64> {
    let pieces = pieces(&split(runs, places));
    let written: u64 = runs.iter().map(|run| run.count).sum();
    // Most of the time the kernel makes pages, which it does in several threads at once.
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(LOADERS_MAX));
    let next = AtomicUsize::new(0);
    let work = || {
        let zeros = vec![0; PIECE * PAGE];
        while let Some(&(page, count, at)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            let length = count * PAGE;
            let content = at.map_or(&zeros[..length], |at| &bytes[at..at + length]);
            pwrite_all(memory, content, address_of(page, places))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own: Result<()> = work();
        let gone = |_| Err(Error::from(ErrorKind::Other));
        others.into_iter().map(|other| other.join().unwrap_or_else(gone)).fold(own, |all, one| all.and(one))
    })?;
    Ok(written)
}

/// Runs cut where one place ends and the next begins.
fn split(runs: &[Run], places: &[Place]) -> Vec<Run> {
    let mut cut = Vec::with_capacity(runs.len());
    let mut before = 0;
    let ends: Vec<u64> = places
        .iter()
        .map(|place| {
            before += place.pages;
            before
        })
        .collect();
    for &run in runs {
        let mut rest = run;
        while let Some(&end) = ends.iter().find(|&&end| rest.first < end && end < rest.first + rest.count) {
            cut.push(Run { count: end - rest.first, ..rest });
            rest = Run { first: end, count: rest.first + rest.count - end, ..rest };
        }
        cut.push(rest);
    }
    cut
}

/// Where a page is that lies in one of `places`.
fn address_of(page: u64, places: &[Place]) -> u64 {
    let mut page = page;
    for place in places {
        if page < place.pages {
            return place.address + page * PAGE as u64;
        }
        page -= place.pages;
    }
    u64::MAX // `table` has checked that there is none
}

/// The runs as (first page, count, where the data is or None for zeros), none longer than PIECE.
fn pieces(runs: &[Run]) -> Vec<(u64, usize, Option<usize>)> {
    let mut at = PAGE;
    let mut pieces = Vec::new();
    for run in runs {
        let mut done = 0;
        while done < run.count {
            let count = (run.count - done).min(PIECE as u64) as usize;
            pieces.push((run.first + done, count, (!run.zero).then_some(at)));
            at += if run.zero { 0 } else { count * PAGE };
            done += count as u64;
        }
    }
    pieces
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
    fn own_pages_are_present_and_not_the_files_or_swapped() {
        let (present, swapped, of_file) = (1 << 63, 1 << 62, 1 << 61);
        let entries = [0, present, present | of_file, swapped, swapped, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, present];
        let mut found = Vec::new();
        stretches(&entries, 100, own, |first, count| {
            found.push((first, count));
            Ok(())
        })
        .unwrap();
        assert_eq!(found, [(101, 1), (103, 2), (116, 1)]);
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

    #[test]
    fn the_mapping_is_the_private_one_of_that_size() {
        let maps = "7f00-7f10 r--p 0 00:01 5 /memfd:llm4agents-ram (deleted)\n\
                    10000-30000 rw-s 0 00:01 5 /memfd:llm4agents-ram (deleted)\n\
                    40000-60000 rw-p 0 00:01 5 /memfd:llm4agents-rambo (deleted)\n\
                    70000-90000 rw-p 00000000 00:01 5                    /memfd:llm4agents-ram (deleted)\n";
        assert_eq!(mapping(maps, 0x20000), Some(0x70000));
        assert_eq!(mapping(maps, 0x30000), None);
    }

    #[test]
    fn long_runs_are_cut_and_keep_their_data() {
        let many = PIECE as u64;
        let run = |first, count, zero| Run { first, count, zero };
        let found = pieces(&[run(1, 2, false), run(5, many + 1, true), run(900, many + 3, false)]);
        let data = PAGE + 2 * PAGE;
        let wanted = [
            (1, 2, Some(PAGE)),
            (5, PIECE, None),
            (5 + many, 1, None),
            (900, PIECE, Some(data)),
            (900 + many, 3, Some(data + PIECE * PAGE)),
        ];
        assert_eq!(found, wanted);
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

    #[test]
    fn extents_are_joined() {
        assert_eq!(union(vec![(0, 2), (10, 5)], vec![(2, 1), (12, 9), (30, 1)]), [(0, 3), (10, 11), (30, 1)]);
    }
}
