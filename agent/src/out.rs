//! What is queued for the host. Bounded: streams ask for `room` before they produce; what remains is one small frame or
//! two a stream.

use crate::frame::{self, HEADER, PAYLOAD_MAX};
use crate::sys;
use std::io;
use std::os::fd::RawFd;

/// Streams stop producing when so much waits.
const HIGH_BYTES: usize = 256 * 1024;
/// A buffer that has grown beyond this is given back when it is empty.
const KEEP_BYTES: usize = HIGH_BYTES + 2 * frame::FRAME_MAX;

#[derive(Default)]
pub struct Out {
    buffer: Vec<u8>,
    sent: usize,
    /// Frames made since QUIESCED, for when the host wants them.
    held: Vec<u8>,
    quiesced: bool,
    tag: u32,
}

impl Out {
    /// A new session: nothing of the old one is sent any more.
    pub fn begin(&mut self, nonce: u64) {
        self.end();
        self.tag = frame::tag(nonce);
        frame::preamble(&mut self.buffer, nonce);
    }

    pub fn end(&mut self) {
        self.buffer.clear();
        self.held.clear();
        (self.sent, self.quiesced, self.tag) = (0, false, 0);
    }

    pub fn push(&mut self, stream: u32, kind: u8, flags: u8, payload: &[u8]) {
        if self.tag != 0 {
            let queue = if self.quiesced { &mut self.held } else { &mut self.buffer };
            frame::encode(queue, self.tag, stream, kind, flags, payload);
        }
    }

    /// Read up to `max` bytes of `fd` into a DATA frame, in place. 0 is the end of `fd`.
    pub fn data_from(&mut self, fd: RawFd, stream: u32, flags: u8, max: usize) -> io::Result<usize> {
        let queue = if self.quiesced { &mut self.held } else { &mut self.buffer };
        let at = queue.len();
        queue.extend_from_slice(&[0; HEADER]);
        let result = sys::read_onto(fd, queue, max.min(PAYLOAD_MAX));
        match result {
            Ok(n) if n > 0 => {
                let header = frame::header(n, self.tag, stream, frame::DATA, flags);
                queue[at..at + HEADER].copy_from_slice(&header);
                queue.extend_from_slice(&self.tag.to_le_bytes());
            }
            _ => queue.truncate(at),
        }
        result
    }

    /// The last frame until the host says UNQUIESCE or begins a session.
    pub fn quiesce(&mut self) {
        self.push(0, frame::QUIESCED, 0, b"");
        self.quiesced = true;
    }

    pub fn unquiesce(&mut self) {
        self.quiesced = false;
        self.buffer.append(&mut self.held);
    }

    pub fn room(&self) -> bool {
        !self.quiesced && self.tag != 0 && self.buffer.len() - self.sent < HIGH_BYTES
    }

    /// Whether the last that the host has been told is QUIESCED, so that nothing of the session is on its way.
    pub fn is_quiet(&self) -> bool {
        self.quiesced && self.is_empty()
    }

    pub fn is_empty(&self) -> bool {
        self.sent == self.buffer.len()
    }

    /// Write until all is written or the channel is full.
    pub fn flush(&mut self, mut write: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        while !self.is_empty() {
            match write(&self.buffer[self.sent..]) {
                Ok(n) => self.sent += n,
                Err(error) if sys::interrupted(&error) => {}
                Err(error) if sys::would_block(&error) => {
                    if self.sent > HIGH_BYTES {
                        self.buffer.drain(..self.sent);
                        self.sent = 0;
                    }
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        self.sent = 0;
        self.buffer.clear();
        self.buffer.shrink_to(KEEP_BYTES);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(out: &mut Out) -> Vec<u8> {
        let mut all = Vec::new();
        out.flush(|bytes| {
            let n = bytes.len().min(7);
            all.extend_from_slice(&bytes[..n]);
            Ok(n)
        })
        .unwrap();
        all
    }

    #[test]
    fn nothing_after_quiesced_until_unquiesce() {
        let mut out = Out::default();
        out.push(1, frame::END, 0, b"no session yet");
        out.begin(9);
        out.push(1, frame::REPLY, 0, b"a");
        out.quiesce();
        out.push(1, frame::END, 0, b"b");
        assert!(!out.room());
        let mut want = Vec::new();
        frame::preamble(&mut want, 9);
        frame::encode(&mut want, 9, 1, frame::REPLY, 0, b"a");
        frame::encode(&mut want, 9, 0, frame::QUIESCED, 0, b"");
        assert!(!out.is_quiet());
        assert_eq!(drain(&mut out), want);
        assert!(out.is_quiet());
        out.unquiesce();
        assert!(!out.is_quiet());
        want.clear();
        frame::encode(&mut want, 9, 1, frame::END, 0, b"b");
        assert_eq!(drain(&mut out), want);
    }

    #[test]
    fn a_new_session_drops_what_was_unsent_and_held() {
        let mut out = Out::default();
        out.begin(9);
        out.quiesce();
        out.push(1, frame::END, 0, b"b");
        out.begin(10);
        let mut want = Vec::new();
        frame::preamble(&mut want, 10);
        assert_eq!(drain(&mut out), want);
    }
}
