//! Frames of the guest protocol (docs/design/protocol.md), pure: bytes in, frames out. Not for what frames mean.
//!
//! A decoder holds one fixed buffer, never allocates after `new`, never panics, and after anything at all finds
//! the next preamble.

pub const PAYLOAD_MAX: usize = 65_536;
pub const HEADER: usize = 16;
pub const TRAILER: usize = 4;
pub const FRAME_MAX: usize = HEADER + PAYLOAD_MAX + TRAILER;
pub const MAGIC: [u8; 8] = *b"L4Agent\x01";

/// Room for a partial frame and then some, so that what is left over is seldom moved.
const BUFFER: usize = 4 * PAYLOAD_MAX;

pub const HELLO: u8 = 1;
pub const HELLO_ACK: u8 = 2;
pub const OPEN: u8 = 3;
pub const REPLY: u8 = 4;
pub const DATA: u8 = 5;
pub const EOF: u8 = 6;
pub const CREDIT: u8 = 7;
pub const END: u8 = 8;
pub const ERROR: u8 = 9;
pub const CANCEL: u8 = 10;
pub const SIGNAL: u8 = 11;
pub const EVENT: u8 = 12;
pub const QUIESCE: u8 = 13;
pub const QUIESCED: u8 = 14;
pub const UNQUIESCE: u8 = 15;
pub const RESIZE: u8 = 16;
pub const DETACH: u8 = 17;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    pub stream: u32,
    pub kind: u8,
    pub flags: u8,
    pub payload: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A new session begins; its tag is the low half of the nonce.
    Preamble(u64),
    Frame(Frame<'a>),
}

/// The session tag of a nonce.
pub fn tag(nonce: u64) -> u32 {
    nonce as u32
}

fn check(length: u32, session: u32, stream: u32, kind: u8, flags: u8) -> u16 {
    let folded = length ^ session ^ stream;
    ((folded ^ folded >> 16) as u16) ^ (u16::from(kind) << 8 | u16::from(flags)) ^ 0x4C34
}

pub fn header(length: usize, session: u32, stream: u32, kind: u8, flags: u8) -> [u8; HEADER] {
    let length = length as u32;
    let mut bytes = [0; HEADER];
    bytes[0..4].copy_from_slice(&length.to_le_bytes());
    bytes[4..8].copy_from_slice(&session.to_le_bytes());
    bytes[8..12].copy_from_slice(&stream.to_le_bytes());
    bytes[12] = kind;
    bytes[13] = flags;
    bytes[14..16].copy_from_slice(&check(length, session, stream, kind, flags).to_le_bytes());
    bytes
}

/// Append one frame; `payload` is at most PAYLOAD_MAX bytes.
pub fn encode(out: &mut Vec<u8>, session: u32, stream: u32, kind: u8, flags: u8, payload: &[u8]) {
    debug_assert!(payload.len() <= PAYLOAD_MAX);
    out.reserve(HEADER + payload.len() + TRAILER);
    out.extend_from_slice(&header(payload.len(), session, stream, kind, flags));
    out.extend_from_slice(payload);
    out.extend_from_slice(&session.to_le_bytes());
}

pub fn preamble(out: &mut Vec<u8>, nonce: u64) {
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&nonce.to_le_bytes());
}

pub struct Decoder {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Bytes from here on have never been filled, or were wiped since.
    high: usize,
    hunting: bool,
    /// The live session's tag; 0 before the first preamble, and no frame can have that.
    tag: u32,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    pub fn new() -> Self {
        let buffer = vec![0; BUFFER].into_boxed_slice();
        Self { buffer, start: 0, end: 0, high: 0, hunting: false, tag: 0 }
    }

    /// Where to read more bytes into; never empty once `next` has answered None.
    pub fn spare(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.buffer.len() - self.end < PAYLOAD_MAX / 4 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.buffer[self.end..]
    }

    /// `n` bytes of `spare` have been filled.
    pub fn filled(&mut self, n: usize) {
        self.end = self.buffer.len().min(self.end + n);
        self.high = self.high.max(self.end);
    }

    /// Overwrite what has been decoded: it held a secret.
    pub fn wipe(&mut self) {
        self.buffer[..self.start].fill(0);
        self.buffer[self.end..self.high].fill(0);
        self.high = self.end;
    }

    /// The connection has ended, and with it a frame that has not come whole. The session goes on.
    pub fn cut(&mut self) {
        (self.start, self.end, self.hunting) = (0, 0, false);
    }

    /// The connection has ended and the session too: every frame is dropped until the next preamble.
    pub fn forget(&mut self) {
        self.cut();
        self.tag = 0;
    }

    /// The next event in what has been read, None when it takes more bytes.
    #[allow(clippy::should_implement_trait)] // it lends from the buffer
    pub fn next(&mut self) -> Option<Event<'_>> {
        loop {
            if self.hunting && !self.hunt() {
                return None;
            }
            let have = &self.buffer[self.start..self.end];
            if have.len() < HEADER {
                return None;
            }
            if have[..8] == MAGIC {
                let nonce = u64_at(have, 8);
                if tag(nonce) == 0 {
                    self.start += 1;
                    self.hunting = true;
                    continue;
                }
                self.start += MAGIC.len() + 8;
                self.hunting = false;
                self.tag = tag(nonce);
                return Some(Event::Preamble(nonce));
            }
            let (length, session, stream) = (u32_at(have, 0), u32_at(have, 4), u32_at(have, 8));
            let (kind, flags) = (have[12], have[13]);
            let sum = u16::from_le_bytes([have[14], have[15]]);
            if length as usize > PAYLOAD_MAX || sum != check(length, session, stream, kind, flags) {
                self.hunting = true;
                continue;
            }
            let body = HEADER + length as usize;
            if have.len() < body + TRAILER {
                return None;
            }
            let whole = u32_at(have, body) == session;
            let at = self.start;
            self.start += body + TRAILER;
            if !whole {
                self.hunting = true;
            } else if session == self.tag && session != 0 {
                let payload = &self.buffer[at + HEADER..at + body];
                return Some(Event::Frame(Frame { stream, kind, flags, payload }));
            }
        }
    }

    /// Drop bytes up to the next magic; false when there is none yet (a beginning of one is kept).
    fn hunt(&mut self) -> bool {
        let have = &self.buffer[self.start..self.end];
        if let Some(at) = have.windows(MAGIC.len()).position(|window| window == MAGIC) {
            self.start += at;
            return true;
        }
        self.start = self.start.max(self.end.saturating_sub(MAGIC.len() - 1));
        false
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    enum Seen {
        Preamble(u64),
        Frame(u32, u8, u8, Vec<u8>),
    }

    fn feed(decoder: &mut Decoder, mut bytes: &[u8], step: usize) -> Vec<Seen> {
        let mut seen = Vec::new();
        while !bytes.is_empty() {
            let spare = decoder.spare();
            assert!(!spare.is_empty());
            let n = spare.len().min(step).min(bytes.len());
            spare[..n].copy_from_slice(&bytes[..n]);
            decoder.filled(n);
            bytes = &bytes[n..];
            while let Some(event) = decoder.next() {
                seen.push(match event {
                    Event::Preamble(nonce) => Seen::Preamble(nonce),
                    Event::Frame(f) => Seen::Frame(f.stream, f.kind, f.flags, f.payload.to_vec()),
                });
            }
        }
        seen
    }

    fn session(nonce: u64, payloads: &[&[u8]]) -> Vec<u8> {
        let mut bytes = Vec::new();
        preamble(&mut bytes, nonce);
        for (i, payload) in payloads.iter().enumerate() {
            encode(&mut bytes, tag(nonce), i as u32, DATA, 1, payload);
        }
        bytes
    }

    #[test]
    fn a_cut_ends_a_torn_frame_and_not_the_session() {
        let bytes = session(9, &[b"first", &[7; 5000]]);
        let mut decoder = Decoder::new();
        assert_eq!(feed(&mut decoder, &bytes[..bytes.len() - 100], 512).len(), 2);
        decoder.cut();
        let mut more = Vec::new();
        encode(&mut more, tag(9), 3, DATA, 0, b"second");
        assert_eq!(feed(&mut decoder, &more, 512), [Seen::Frame(3, DATA, 0, b"second".to_vec())]);
        feed(&mut decoder, &bytes[bytes.len() - 100..], 512); // rubbish, it hunts
        decoder.forget();
        assert_eq!(feed(&mut decoder, &more, 512), [], "of no session any more");
        assert_eq!(feed(&mut decoder, &session(10, &[b"x"]), 512).len(), 2);
    }

    #[test]
    fn check_is_the_one_of_the_page() {
        let (length, session, stream, kind, flags) = (0x0001_0000u32, 0xDEAD_BEEFu32, 0x1234_5678u32, 5u32, 2u32);
        let page =
            (length ^ length >> 16 ^ session ^ session >> 16 ^ stream ^ stream >> 16 ^ kind << 8 ^ flags ^ 0x4C34)
                & 0xFFFF;
        assert_eq!(u32::from(check(length, session, stream, kind as u8, flags as u8)), page);
    }

    #[test]
    fn whole_in_any_split() {
        let big = vec![7; PAYLOAD_MAX];
        let bytes = session(0x1_0000_0009, &[b"", b"hello", &big, b"end"]);
        for step in [1, 2, 3, 7, 15, 16, 17, 4096, usize::MAX] {
            let seen = feed(&mut Decoder::new(), &bytes, step);
            assert_eq!(seen.len(), 5, "step {step}");
            assert_eq!(seen[0], Seen::Preamble(0x1_0000_0009));
            assert_eq!(seen[3], Seen::Frame(2, DATA, 1, big.clone()));
            assert_eq!(seen[4], Seen::Frame(3, DATA, 1, b"end".to_vec()));
        }
    }

    #[test]
    fn what_was_wiped_is_nowhere_and_what_waits_is() {
        let mut bytes = session(0x1_0000_0009, &[b"a secret"]);
        encode(&mut bytes, 9, 1, DATA, 1, b"for later");
        let mut decoder = Decoder::new();
        decoder.spare()[..bytes.len()].copy_from_slice(&bytes);
        decoder.filled(bytes.len());
        assert!(matches!(decoder.next(), Some(Event::Preamble(_))));
        assert!(matches!(decoder.next(), Some(Event::Frame(f)) if f.payload == b"a secret"));
        decoder.wipe();
        assert!(!decoder.buffer.windows(8).any(|window| window == b"a secret"));
        assert!(matches!(decoder.next(), Some(Event::Frame(f)) if f.payload == b"for later"));
    }

    #[test]
    fn pad_finishes_a_torn_frame() {
        let whole = session(0x0102_0304, &[&[b'x'; 60_000]]);
        let next = session(6, &[b"ok"]);
        for cut in [17, 20, 31, 32, 33, 100, 30_000, whole.len() - 5, whole.len() - 4, whole.len() - 1] {
            let mut bytes = whole[..cut].to_vec();
            bytes.extend_from_slice(&vec![0; FRAME_MAX]);
            bytes.extend_from_slice(&next);
            let seen = feed(&mut Decoder::new(), &bytes, 4096);
            let tail = &seen[seen.len() - 2..];
            assert_eq!(tail, [Seen::Preamble(6), Seen::Frame(0, DATA, 1, b"ok".to_vec())], "cut {cut}");
            assert!(seen.len() <= 3 && seen[0] == Seen::Preamble(0x0102_0304), "cut {cut}: nothing of the torn frame");
        }
    }

    #[test]
    fn foreign_tags_and_frames_before_a_session_are_dropped() {
        let mut bytes = Vec::new();
        encode(&mut bytes, 0, 1, DATA, 0, b"no session");
        encode(&mut bytes, 9, 1, DATA, 0, b"none either");
        preamble(&mut bytes, 5);
        encode(&mut bytes, 9, 1, DATA, 0, b"another's");
        encode(&mut bytes, 5, 1, DATA, 0, b"ours");
        let seen = feed(&mut Decoder::new(), &bytes, 5);
        assert_eq!(seen, [Seen::Preamble(5), Seen::Frame(1, DATA, 0, b"ours".to_vec())]);
    }

    #[test]
    fn wrong_check_length_or_trailer_hunts_until_the_next_preamble() {
        for (at, to) in [(14usize, 0xFFu8), (2, 2), (12, 99), (16 + 4, 1)] {
            let mut broken = Vec::new();
            encode(&mut broken, 5, 1, DATA, 0, b"torn");
            broken[at] ^= to;
            let mut bytes = session(5, &[]);
            bytes.extend_from_slice(&broken);
            encode(&mut bytes, 5, 1, DATA, 0, b"lost with it");
            bytes.extend_from_slice(&MAGIC[..5]);
            bytes.extend_from_slice(&session(7, &[b"back"]));
            let seen = feed(&mut Decoder::new(), &bytes, 3);
            let want = [Seen::Preamble(5), Seen::Preamble(7), Seen::Frame(0, DATA, 1, b"back".to_vec())];
            assert_eq!(seen, want, "byte {at}");
        }
    }

    #[test]
    fn a_nonce_without_a_tag_is_no_preamble() {
        let mut bytes = session(0xFFFF_FFFF_0000_0000, &[]);
        bytes.extend_from_slice(&session(3, &[b"a"]));
        assert_eq!(feed(&mut Decoder::new(), &bytes, 9)[0], Seen::Preamble(3));
    }

    /// The fuzz target's property on a fixed pseudo-random corpus: noise in random splits, and then a session is found.
    #[test]
    fn noise_never_stops_it() {
        let mut seed = 0x9E37_79B9_7F4A_7C15u64;
        let mut random = move || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        for round in 0..400u64 {
            let mut bytes = Vec::new();
            for _ in 0..random() % 12 {
                match random() % 6 {
                    0 => bytes.extend((0..random() % 3000).map(|_| random() as u8)),
                    1 => preamble(&mut bytes, random()),
                    2 => encode(
                        &mut bytes,
                        random() as u32 % 3,
                        1,
                        random() as u8,
                        0,
                        &vec![1; (random() % 9000) as usize],
                    ),
                    3 => bytes.extend(vec![0; (random() % 70_000) as usize]),
                    4 => bytes.extend_from_slice(&MAGIC[..(random() % 9) as usize]),
                    _ => bytes.truncate(bytes.len().saturating_sub((random() % 40) as usize)),
                }
            }
            bytes.extend(vec![0; FRAME_MAX]);
            let nonce = round << 32 | 0x1234;
            bytes.extend_from_slice(&session(nonce, &[b"found"]));
            let mut decoder = Decoder::new();
            let step = 1 + (random() % 5000) as usize;
            let seen = feed(&mut decoder, &bytes, step);
            assert_eq!(seen.last(), Some(&Seen::Frame(0, DATA, 1, b"found".to_vec())), "round {round}");
            assert_eq!(seen[seen.len() - 2], Seen::Preamble(nonce));
            assert_eq!(decoder.buffer.len(), BUFFER);
        }
    }
}
