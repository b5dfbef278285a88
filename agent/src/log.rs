//! What a managed process has said: one log of bytes, each with an offset and a channel, of which the newest are kept.
//! Pure but for the read that fills it. Not for who reads it: that is `managed`.

use crate::sys;
use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;

/// Memory comes in pieces of this as it fills; only what is written is ever touched.
const CHUNK_BYTES: usize = 65_536;
/// A chunk with less room than this is left as it is, so that a full pipe is read in one call.
const ROOM_MIN: usize = 4_096;
/// One change of channel for so many bytes of what is kept; more than that, and less is kept.
const BYTES_PER_MARK: u64 = 64;

/// From `at` on the bytes are of `channel`.
#[derive(Clone, Copy)]
struct Mark {
    at: u64,
    channel: u8,
}

#[derive(Default)]
pub struct Log {
    chunks: VecDeque<Vec<u8>>,
    /// Offset of the first byte of the first chunk.
    first: u64,
    /// Oldest offset that can be read.
    start: u64,
    /// Offset of the next byte.
    end: u64,
    marks: VecDeque<Mark>,
}

impl Log {
    pub fn start(&self) -> u64 {
        self.start
    }

    pub fn end(&self) -> u64 {
        self.end
    }

    /// Bytes of memory that hold it.
    pub fn bytes(&self) -> u64 {
        self.end - self.first + 16 * self.marks.len() as u64
    }

    /// How many more bytes may come so that everything from `hold` on stays, when `keep` bytes are kept in all. From
    /// `unread` on it stays also when the channel changes with every byte.
    pub fn room(&self, keep: u64, hold: u64, unread: u64) -> u64 {
        let marks = self.marks.len() - self.marks.partition_point(|mark| mark.at <= unread);
        if marks as u64 + 1 >= keep / BYTES_PER_MARK {
            return 0;
        }
        keep.saturating_sub(self.end - hold.min(self.end))
    }

    /// How many bytes one read can take.
    pub fn space(&self) -> usize {
        let room = self.chunks.back().map_or(0, |chunk| CHUNK_BYTES - chunk.len());
        if room < ROOM_MIN {
            CHUNK_BYTES
        } else {
            room
        }
    }

    /// Read up to `max` bytes of `fd`, but not more than `space`, onto the end. 0 is the end of `fd`.
    pub fn read_from(&mut self, fd: RawFd, channel: u8, max: usize) -> io::Result<usize> {
        let space = self.space();
        if self.chunks.back().map_or(true, |chunk| CHUNK_BYTES - chunk.len() < ROOM_MIN) {
            self.chunks.push_back(Vec::with_capacity(CHUNK_BYTES));
        }
        let Some(chunk) = self.chunks.back_mut() else { return Ok(0) };
        let n = sys::read_onto(fd, chunk, max.min(space))?;
        if n > 0 && self.marks.back().map_or(true, |mark| mark.channel != channel) {
            self.marks.push_back(Mark { at: self.end, channel });
        }
        self.end += n as u64;
        Ok(n)
    }

    /// Let go of what is older than the newest `keep` bytes.
    pub fn trim(&mut self, keep: u64) {
        let most = (keep / BYTES_PER_MARK).max(1) as usize;
        let of_marks = if self.marks.len() > most { self.marks[self.marks.len() - most].at } else { 0 };
        let start = self.end.saturating_sub(keep).max(of_marks);
        if start <= self.start {
            return;
        }
        self.start = start;
        while let Some(chunk) = self.chunks.front() {
            let after = self.first + chunk.len() as u64;
            if after > start {
                break;
            }
            self.first = after;
            self.chunks.pop_front();
        }
        while self.marks.len() > 1 && self.marks[1].at <= start {
            self.marks.pop_front();
        }
    }

    /// Nothing more will come: give back the room for it.
    pub fn close(&mut self) {
        if let Some(chunk) = self.chunks.back_mut() {
            chunk.shrink_to_fit();
        }
    }

    /// The bytes from `at` on that are of one channel and lie together, `max` at most; empty at the end.
    pub fn piece(&self, at: u64, max: usize) -> (u8, &[u8]) {
        if at < self.start || at >= self.end {
            return (0, &[]);
        }
        let following = self.marks.partition_point(|mark| mark.at <= at);
        let channel = following.checked_sub(1).map_or(1, |mark| self.marks[mark].channel);
        let until = self.marks.get(following).map_or(self.end, |mark| mark.at);
        let mut before = self.end;
        for chunk in self.chunks.iter().rev() {
            before -= chunk.len() as u64;
            if before <= at {
                let from = (at - before) as usize;
                let n = max.min(chunk.len() - from).min((until - at) as usize);
                return (channel, &chunk[from..from + n]);
            }
        }
        (0, &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn add(log: &mut Log, channel: u8, bytes: &[u8]) {
        for bytes in bytes.chunks(60_000) {
            let (reader, writer) = sys::pipe().unwrap();
            sys::write(writer.as_raw_fd(), bytes).unwrap();
            let mut left = bytes.len();
            while left > 0 {
                left -= log.read_from(reader.as_raw_fd(), channel, left).unwrap();
            }
        }
    }

    fn all(log: &Log, mut at: u64) -> Vec<(u8, Vec<u8>)> {
        let mut found: Vec<(u8, Vec<u8>)> = Vec::new();
        loop {
            let (channel, bytes) = log.piece(at, 1000);
            if bytes.is_empty() {
                return found;
            }
            at += bytes.len() as u64;
            match found.last_mut() {
                Some(last) if last.0 == channel => last.1.extend_from_slice(bytes),
                _ => found.push((channel, bytes.to_vec())),
            }
        }
    }

    #[test]
    fn bytes_come_back_by_offset_and_channel() {
        let mut log = Log::default();
        add(&mut log, 1, b"abc");
        add(&mut log, 1, b"def");
        add(&mut log, 2, b"XY");
        add(&mut log, 1, b"g");
        assert_eq!(all(&log, 0), [(1, b"abcdef".to_vec()), (2, b"XY".to_vec()), (1, b"g".to_vec())]);
        assert_eq!(all(&log, 7), [(2, b"Y".to_vec()), (1, b"g".to_vec())]);
        assert_eq!((log.start(), log.end(), log.piece(9, 10).1), (0, 9, &b""[..]));
    }

    #[test]
    fn what_is_kept_is_the_newest_whatever_the_chunks() {
        let mut log = Log::default();
        let text: Vec<u8> = (0..400_000u32).map(|n| (n % 251) as u8).collect();
        for part in text.chunks(7_001) {
            add(&mut log, 1, part);
            log.trim(100_000);
        }
        assert_eq!((log.start(), log.end()), (300_000, 400_000));
        assert_eq!(all(&log, 300_000), [(1, text[300_000..].to_vec())]);
        assert!(log.bytes() < 100_000 + 2 * CHUNK_BYTES as u64);
        log.trim(0);
        assert_eq!((log.start(), log.end(), log.piece(400_000, 1).1), (400_000, 400_000, &b""[..]));
        add(&mut log, 2, b"more");
        assert_eq!(all(&log, 400_000), [(2, b"more".to_vec())]);
    }

    #[test]
    fn changes_of_channel_are_bounded_too() {
        let mut log = Log::default();
        for _ in 0..3_000 {
            add(&mut log, 1, b"a");
            add(&mut log, 2, b"b");
            log.trim(65_536);
        }
        assert!(log.marks.len() <= 1_025);
        assert_eq!(log.room(65_536, 0, 0), 0);
        assert!(log.room(65_536, log.end(), log.end()) > 0);
    }

    #[test]
    fn room_is_what_the_slowest_has_not_read() {
        let mut log = Log::default();
        add(&mut log, 1, &[1; 1_000]);
        let room = |hold| log.room(65_536, hold, hold);
        assert_eq!((room(0), room(600), room(u64::MAX)), (64_536, 65_136, 65_536));
    }
}
