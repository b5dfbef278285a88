//! Into a machine that is starting: where its memory is, and its pages written there by several threads. Not here: whether
//! the file is sane (`pages`).

use super::{pwrite_all, size_of, table, Map, Place, Run, PAGE};
use crate::sys::{self, check};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Pages written in one go.
const PIECE: usize = 256;
const LOADERS_MAX: usize = 4;

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
pub fn load_at(memory: RawFd, file: RawFd, places: &[Place]) -> Result<String> {
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
}
