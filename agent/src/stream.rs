//! What one open stream holds, and the flow of its bytes. Not for what verbs do.

use crate::connect::Connection;
use crate::exec::Exec;
use crate::files::Credentials;
use crate::frame::PAYLOAD_MAX;
use crate::out::Out;
use crate::sys;
use crate::transfer::{Sink, Source};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// What each side may send on a fresh stream before it hears more.
pub const CREDIT_BYTES: u64 = 262_144;
pub const WINDOW_BYTES_MAX: u64 = 4_194_304;
/// After a read that was short, how long the next waits for more to come together. What a process says first goes out
/// at once, and so does its last; one that says much in small pieces is not woken for, and framed, piece by piece.
const HOLD: Duration = Duration::from_millis(1);

pub struct Stream {
    /// What we may still send.
    pub credit: u64,
    /// What the host may still send.
    pub incoming: u64,
    /// What has been consumed and not yet given back.
    pub owed: u64,
    /// Whether it waits in the line of those that have something to send.
    pub queued: bool,
    pub kind: Kind,
}

pub enum Kind {
    Exec(Exec),
    Connect(Connection),
    /// Somebody who watches a managed process: its slot.
    Attach(u32),
    Pull(Pull),
    Push(Push),
    /// A worker will answer.
    Job,
    /// The kernel is freezing; then a worker syncs and answers.
    Freeze {
        fs: bool,
        sync: bool,
        drop_caches: bool,
    },
}

impl Stream {
    pub fn new(kind: Kind) -> Self {
        Self { credit: CREDIT_BYTES, incoming: CREDIT_BYTES, owed: 0, queued: false, kind }
    }

    /// `n` bytes of the host's were consumed: the credit to give back now, when it is worth a frame.
    pub fn consumed(&mut self, n: usize) -> Option<u32> {
        self.owed += n as u64;
        (self.owed >= CREDIT_BYTES / 4).then(|| {
            self.incoming += self.owed;
            std::mem::take(&mut self.owed) as u32
        })
    }
}

/// Bytes on their way into a process or socket, as many as the host had credit for.
#[derive(Default)]
pub struct Inlet {
    pending: Vec<u8>,
    at: usize,
    /// The host has sent its last.
    pub eof: bool,
    /// Nobody takes them any more; they are dropped, so that the host is not left waiting.
    pub broken: bool,
}

impl Inlet {
    /// Take bytes of the host; how many were consumed.
    pub fn offer(&mut self, fd: RawFd, bytes: &[u8]) -> usize {
        let mut done = 0;
        if self.is_empty() {
            done = self.write(fd, bytes);
        }
        self.pending.extend_from_slice(&bytes[done..]);
        done
    }

    /// Keep bytes for a descriptor that cannot be written to yet.
    pub fn hold(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// Go on with what waits; how many were consumed.
    pub fn drain(&mut self, fd: RawFd) -> usize {
        let pending = std::mem::take(&mut self.pending);
        let done = self.write(fd, &pending[self.at..]);
        self.pending = pending;
        self.at += done;
        if self.is_empty() {
            self.pending.clear();
            self.at = 0;
        }
        done
    }

    pub fn is_empty(&self) -> bool {
        self.at == self.pending.len()
    }

    pub fn finished(&self) -> bool {
        self.broken || (self.eof && self.is_empty())
    }

    fn write(&mut self, fd: RawFd, bytes: &[u8]) -> usize {
        let mut done = 0;
        while done < bytes.len() && !self.broken {
            match sys::write(fd, &bytes[done..]) {
                Ok(n) => done += n,
                Err(error) if sys::interrupted(&error) => {}
                Err(error) if sys::would_block(&error) => return done,
                Err(_) => self.broken = true,
            }
        }
        bytes.len()
    }
}

/// A descriptor whose bytes go to the host.
pub struct Outlet {
    pub fd: Option<OwnedFd>,
    pub channel: u8,
    /// An edge came and reading has not met its end since.
    pub ready: bool,
    pub hup: bool,
    /// So many more bytes are delivered whoever holds the other end.
    pub left: Option<usize>,
    /// Whether small pieces are gathered (HOLD): for what a process prints, not for what answers a request.
    gather: bool,
    hold: Option<Instant>,
    /// A terminal: a short read does not mean that nothing is left, nor does its count of what waits tell all.
    terminal: bool,
}

pub enum Flow {
    /// There may be more right now.
    More,
    /// Waits for its descriptor, or for credit.
    Dry,
    /// The end was met; the descriptor is closed.
    Ended,
    Failed(io::Error),
}

impl Outlet {
    pub fn new(fd: OwnedFd, channel: u8, gather: bool) -> Self {
        Self { fd: Some(fd), channel, ready: false, hup: false, left: None, gather, hold: None, terminal: false }
    }

    pub fn of_terminal(fd: OwnedFd, channel: u8) -> Self {
        Self { terminal: true, ..Self::new(fd, channel, true) }
    }

    /// One that has ended before it began.
    pub fn closed(channel: u8) -> Self {
        let (fd, left, hold) = (None, None, None);
        Self { fd, channel, ready: false, hup: false, left, gather: false, hold, terminal: false }
    }

    pub fn event(&mut self, events: u32) {
        self.ready = true;
        self.hup |= events & (sys::HUP | sys::RDHUP) != 0;
    }

    /// Until when what is ready waits for more.
    pub fn held(&self) -> Option<Instant> {
        self.hold.filter(|_| self.ready && !self.hup && self.left.is_none() && self.fd.is_some())
    }

    /// Nobody is waited for any more: deliver what is there and end.
    pub fn cut(&mut self) {
        if let Some(fd) = &self.fd {
            self.left = Some(if self.terminal { PAYLOAD_MAX } else { sys::readable_bytes(fd.as_raw_fd()) });
            self.ready = true;
        }
    }

    /// Move at most one frame to the host.
    pub fn pump(&mut self, out: &mut Out, stream: u32, credit: &mut u64) -> Flow {
        let channel = self.channel;
        let mut moved = 0;
        let flow = self.pump_into(*credit, |fd, max| {
            out.data_from(fd, stream, channel, max).map(|n| {
                moved = n as u64;
                n
            })
        });
        *credit -= moved;
        flow
    }

    /// Move at most one frame's worth, and `room` bytes, to where `read` takes it.
    pub fn pump_into(&mut self, room: u64, mut read: impl FnMut(RawFd, usize) -> io::Result<usize>) -> Flow {
        let Some(fd) = self.fd.as_ref().filter(|_| self.ready).map(AsRawFd::as_raw_fd) else { return Flow::Dry };
        if self.held().is_some_and(|until| until > Instant::now()) {
            return Flow::Dry;
        }
        self.hold = None;
        let max = self.left.unwrap_or(PAYLOAD_MAX).min(PAYLOAD_MAX);
        if max == 0 || (room == 0 && self.hup && !self.terminal && sys::readable_bytes(fd) == 0) {
            self.fd = None;
            return Flow::Ended;
        }
        if room == 0 {
            return Flow::Dry;
        }
        let max = max.min(usize::try_from(room).unwrap_or(usize::MAX));
        let dry = match read(fd, max) {
            Ok(0) => {
                self.fd = None;
                return Flow::Ended;
            }
            Ok(n) => {
                self.left = self.left.map(|left| left.saturating_sub(n));
                n < max && !self.hup && !self.terminal
            }
            Err(error) if sys::interrupted(&error) => false,
            Err(error) if sys::would_block(&error) => true,
            Err(error) => {
                self.fd = None;
                return Flow::Failed(error);
            }
        };
        if dry && self.left.is_some() {
            self.fd = None;
            return Flow::Ended;
        }
        if dry && self.gather {
            self.hold = Some(Instant::now() + HOLD);
        }
        self.ready = !dry;
        if dry {
            Flow::Dry
        } else {
            Flow::More
        }
    }
}

/// A source in a worker's hands or ours, and the chunk of it that is being sent.
#[derive(Default)]
pub struct Pull {
    /// Whose rights each step of it has, whichever worker does it.
    pub user: Credentials,
    pub source: Option<Box<dyn Source>>,
    pub chunk: Vec<u8>,
    pub at: usize,
    pub last: bool,
    /// Its descriptor has been readable since it was last asked for more…
    pub ready: bool,
    /// …which epoll is watching for.
    pub watched: bool,
}

/// A sink in a worker's hands or ours, and what waits for it.
#[derive(Default)]
pub struct Push {
    /// As of `Pull`.
    pub user: Credentials,
    pub sink: Option<Box<dyn Sink>>,
    pub pending: Vec<u8>,
    /// The buffer the worker has given back.
    pub spare: Vec<u8>,
    pub eof: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_pieces_wait_for_each_other_but_not_the_first_or_the_last() {
        let (reader, writer) = sys::pipe().unwrap();
        sys::set_nonblocking(reader.as_raw_fd()).unwrap();
        let (mut out, mut credit) = (Out::default(), 1000);
        out.begin(9);
        let mut outlet = Outlet::new(reader, 1, true);
        let say = |outlet: &mut Outlet| {
            sys::write(writer.as_raw_fd(), b"x").unwrap();
            outlet.event(sys::IN);
        };
        say(&mut outlet);
        outlet.pump(&mut out, 1, &mut credit);
        assert_eq!(credit, 999);
        say(&mut outlet);
        assert!(outlet.held().is_some() || credit == 998);
        outlet.hold = outlet.hold.map(|_| Instant::now() + Duration::from_secs(60));
        assert!(matches!(outlet.pump(&mut out, 1, &mut credit), Flow::Dry));
        assert_eq!(credit, 999);
        outlet.event(sys::HUP);
        outlet.pump(&mut out, 1, &mut credit);
        assert_eq!(credit, 998);
    }

    #[test]
    fn credit_is_given_back_in_quarters() {
        let mut stream = Stream::new(Kind::Job);
        stream.incoming = 0;
        assert_eq!(stream.consumed(65_535), None);
        assert_eq!(stream.consumed(1), Some(65_536));
        assert_eq!((stream.incoming, stream.owed), (65_536, 0));
    }

    #[test]
    fn an_inlet_nobody_reads_keeps_and_one_that_is_closed_drops() {
        let (reader, writer) = sys::pipe().unwrap();
        sys::set_nonblocking(writer.as_raw_fd()).unwrap();
        let mut inlet = Inlet::default();
        let total = 200_000;
        let taken = inlet.offer(writer.as_raw_fd(), &vec![1; total]);
        assert!(taken > 0 && taken < total);
        let mut sink = Vec::new();
        sys::read_onto(reader.as_raw_fd(), &mut sink, 65_536).unwrap();
        assert!(inlet.drain(writer.as_raw_fd()) > 0);
        drop(reader);
        inlet.drain(writer.as_raw_fd());
        assert!(inlet.broken && inlet.is_empty());
        assert_eq!(inlet.offer(writer.as_raw_fd(), b"more"), 4);
    }

    #[test]
    fn an_outlet_stops_at_its_credit_and_still_sees_the_end() {
        let (reader, writer) = sys::pipe().unwrap();
        sys::set_nonblocking(reader.as_raw_fd()).unwrap();
        sys::write(writer.as_raw_fd(), &[1; 100]).unwrap();
        drop(writer);
        let mut out = Out::default();
        out.begin(9);
        let mut outlet = Outlet::new(reader, 1, true);
        outlet.event(sys::IN | sys::HUP);
        let mut credit = 60;
        assert!(matches!(outlet.pump(&mut out, 1, &mut credit), Flow::More));
        assert!(matches!(outlet.pump(&mut out, 1, &mut credit), Flow::Dry));
        credit = 40;
        assert!(matches!(outlet.pump(&mut out, 1, &mut credit), Flow::More));
        assert_eq!(credit, 0);
        assert!(matches!(outlet.pump(&mut out, 1, &mut credit), Flow::Ended));
    }
}
