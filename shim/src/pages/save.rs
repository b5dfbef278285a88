//! Out of a machine: which pages are its own, and what of them differs. Not here: the file they are written as (`pages`).

use super::{pread_all, pwrite_all, size_of, Map, Place, Run, HEADER, MAGIC, PAGE, ZERO};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::RawFd;

/// Pages read in one go: small enough to stay in the cache between compare and write.
const BATCH: usize = 128;
const ENTRIES: usize = 1 << 16;
const IOV_MAX: usize = 512;

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
pub fn save_whole(memory: RawFd, pagemap: RawFd, out: RawFd, places: &[Place]) -> Result<String> {
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

#[cfg(test)]
mod tests {
    use super::*;

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
    fn extents_are_joined() {
        assert_eq!(union(vec![(0, 2), (10, 5)], vec![(2, 1), (12, 9), (30, 1)]), [(0, 3), (10, 11), (30, 1)]);
    }
}
