//! The tar format, pure: one member's header to bytes (ustar, with pax records for what it cannot hold), and bytes of
//! any split back to members (ustar, pax, GNU long names). Nothing larger than EXTENDED_BYTES_MAX is kept.

pub const BLOCK: usize = 512;
/// Of one pax header or long name.
const EXTENDED_BYTES_MAX: u64 = 1 << 20;
/// What ustar's octal fields of 12 and of 8 bytes hold.
const SIZE_MAX: u64 = 0o777_7777_7777;
const ID_MAX: u32 = 0o777_7777;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    Hard,
    Symlink,
    Char,
    Block,
    Directory,
    Fifo,
}

const FLAGS: [(Kind, u8); 7] = [
    (Kind::File, b'0'),
    (Kind::Hard, b'1'),
    (Kind::Symlink, b'2'),
    (Kind::Char, b'3'),
    (Kind::Block, b'4'),
    (Kind::Directory, b'5'),
    (Kind::Fifo, b'6'),
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub kind: Kind,
    pub path: Vec<u8>,
    /// Of a link.
    pub link: Vec<u8>,
    /// Of a file's content; 0 for the rest.
    pub size: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub user: Vec<u8>,
    pub group: Vec<u8>,
    /// Seconds and nanoseconds; these from 0 on, also before 1970.
    pub mtime: (i64, u32),
    /// Major and minor, of a device.
    pub device: (u32, u32),
}

impl Member {
    pub fn new(kind: Kind, path: Vec<u8>) -> Self {
        let (link, user, group) = (Vec::new(), Vec::new(), Vec::new());
        Self { kind, path, link, size: 0, mode: 0, uid: 0, gid: 0, user, group, mtime: (0, 0), device: (0, 0) }
    }

    /// Append its header blocks; the content, padded to blocks, is the caller's.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut path = self.path.clone();
        if self.kind == Kind::Directory && !path.ends_with(b"/") {
            path.push(b'/');
        }
        let mut records = Vec::new();
        if path.len() > 100 || self.link.len() > 100 {
            let plain = [&path, &self.link].iter().all(|name| std::str::from_utf8(name).is_ok());
            if !plain {
                record(&mut records, "hdrcharset", b"BINARY");
            }
            for (key, name) in [("path", &path), ("linkpath", &self.link)] {
                if name.len() > 100 {
                    record(&mut records, key, name);
                }
            }
        }
        if self.size > SIZE_MAX {
            record(&mut records, "size", self.size.to_string().as_bytes());
        }
        for (key, id) in [("uid", self.uid), ("gid", self.gid)] {
            if id > ID_MAX {
                record(&mut records, key, id.to_string().as_bytes());
            }
        }
        let (seconds, nanoseconds) = self.mtime;
        if nanoseconds != 0 || !(0..=SIZE_MAX as i64).contains(&seconds) {
            record(&mut records, "mtime", decimal(seconds, nanoseconds).as_bytes());
        }
        if !records.is_empty() {
            let name = path.strip_suffix(b"/").unwrap_or(&path).rsplit(|b| *b == b'/').next().unwrap_or_default();
            let mut header = Self::new(Kind::File, [b"PaxHeaders/", &name[..name.len().min(88)]].concat());
            (header.size, header.mode) = (records.len() as u64, 0o644);
            header.block(out, &header.path, b'x');
            out.extend_from_slice(&records);
            pad(out, records.len() as u64);
        }
        let flag = FLAGS.iter().find(|(kind, _)| *kind == self.kind).map_or(b'0', |(_, flag)| *flag);
        self.block(out, &path, flag);
    }

    fn block(&self, out: &mut Vec<u8>, path: &[u8], flag: u8) {
        let mut block = [0; BLOCK];
        let mut text = |at: usize, max: usize, bytes: &[u8]| {
            let n = bytes.len().min(max);
            block[at..at + n].copy_from_slice(&bytes[..n]);
        };
        text(0, 100, path);
        text(157, 100, &self.link);
        text(257, 8, b"ustar\x0000");
        text(265, 31, &self.user);
        text(297, 31, &self.group);
        block[156] = flag;
        let (seconds, _) = self.mtime;
        octal(&mut block[100..108], u64::from(self.mode));
        octal(&mut block[108..116], u64::from(self.uid.min(ID_MAX)));
        octal(&mut block[116..124], u64::from(self.gid.min(ID_MAX)));
        octal(&mut block[124..136], self.size.min(SIZE_MAX));
        octal(&mut block[136..148], (seconds.max(0) as u64).min(SIZE_MAX));
        octal(&mut block[329..337], u64::from(self.device.0.min(ID_MAX)));
        octal(&mut block[337..345], u64::from(self.device.1.min(ID_MAX)));
        let sum = checksum(&block).0;
        octal(&mut block[148..155], sum);
        block[155] = b' ';
        out.extend_from_slice(&block);
    }
}

/// Zeros up to the next block, after `size` bytes of content.
pub fn pad(out: &mut Vec<u8>, size: u64) {
    out.resize(out.len() + padding(size), 0);
}

pub fn padding(size: u64) -> usize {
    (BLOCK - (size % BLOCK as u64) as usize) % BLOCK
}

fn octal(field: &mut [u8], value: u64) {
    let digits = format!("{value:0width$o}\0", width = field.len() - 1);
    field.copy_from_slice(digits.as_bytes());
}

/// A record's length counts itself.
fn record(out: &mut Vec<u8>, key: &str, value: &[u8]) {
    let body = key.len() + value.len() + 3;
    let mut length = body + 1;
    while length != body + length.to_string().len() {
        length = body + length.to_string().len();
    }
    out.extend_from_slice(format!("{length} {key}=").as_bytes());
    out.extend_from_slice(value);
    out.push(b'\n');
}

fn decimal(seconds: i64, nanoseconds: u32) -> String {
    if seconds >= 0 || nanoseconds == 0 {
        return format!("{seconds}.{nanoseconds:09}");
    }
    let whole = seconds + 1;
    format!("{}{whole}.{:09}", if whole == 0 { "-" } else { "" }, 1_000_000_000 - nanoseconds)
}

/// Seconds and nanoseconds of `-1.5`; digits past the ninth are dropped.
fn parse_decimal(text: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(text).ok()?;
    let (negative, text) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(fraction) || whole.len() + fraction.len() == 0 {
        return None;
    }
    let seconds: i64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let nanoseconds: u32 = format!("{fraction:0<9}")[..9].parse().ok()?;
    Some(match (negative, nanoseconds) {
        (false, _) => (seconds, nanoseconds),
        (true, 0) => (-seconds, 0),
        (true, _) => (-seconds - 1, 1_000_000_000 - nanoseconds),
    })
}

/// The sum as it should be, and as signed bytes have it (old tars).
fn checksum(block: &[u8; BLOCK]) -> (u64, i64) {
    block.iter().enumerate().fold((0, 0), |(unsigned, signed), (at, byte)| {
        let byte = if (148..156).contains(&at) { b' ' } else { *byte };
        (unsigned + u64::from(byte), signed + i64::from(byte as i8))
    })
}

/// A number of a header: octal, or GNU's base 256.
fn number(field: &[u8]) -> Option<i64> {
    if let Some(first) = field.first().filter(|byte| **byte & 0x80 != 0) {
        let negative = first & 0x40 != 0;
        let start: i64 = if negative { -1 } else { 0 };
        let first = if negative { i64::from(*first as i8) } else { i64::from(first & 0x3f) };
        let mut value = start;
        for (at, byte) in field.iter().enumerate() {
            let byte = if at == 0 { first & 0xff } else { i64::from(*byte) };
            value = value.checked_mul(256)?.checked_add(byte)?;
        }
        return Some(value);
    }
    let text = std::str::from_utf8(field).ok()?.trim_matches(|c| c == ' ' || c == '\0');
    if text.is_empty() {
        return Some(0);
    }
    i64::from_str_radix(text, 8).ok().filter(|value| *value >= 0)
}

fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

#[derive(Debug, PartialEq)]
pub enum Event<'a> {
    Member(Member),
    /// Of the last member's content, in order.
    Data(&'a [u8]),
    /// The last member, a file, is whole.
    Complete,
}

/// What pax records and long names say of the next member, or of all.
#[derive(Clone, Default)]
struct Overrides {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    user: Option<Vec<u8>>,
    group: Option<Vec<u8>>,
    mtime: Option<(i64, u32)>,
}

enum State {
    Header,
    /// A pax header or long name, of that type, so many bytes still to come.
    Extended(u8, u64),
    /// So many bytes of content to come, then padding.
    Data(u64, usize),
    Padding(usize),
    /// The end marker was met; what follows is no matter.
    Ended,
}

/// Bytes to members. An error is final.
pub struct Parser {
    state: State,
    block: Vec<u8>,
    extended: Vec<u8>,
    next: Overrides,
    global: Overrides,
    zeros: bool,
}

impl Default for Parser {
    fn default() -> Self {
        let (next, global) = (Overrides::default(), Overrides::default());
        Self { state: State::Header, block: Vec::new(), extended: Vec::new(), next, global, zeros: false }
    }
}

fn take<'a>(input: &mut &'a [u8], n: u64) -> &'a [u8] {
    let n = usize::try_from(n).unwrap_or(usize::MAX).min(input.len());
    let (head, tail) = input.split_at(n);
    *input = tail;
    head
}

impl Parser {
    /// The next event of `input`, which is consumed; None when it is used up. Errors say what is wrong.
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<Event<'a>>, String> {
        loop {
            match self.state {
                State::Data(0, padding) => {
                    self.state = State::Padding(padding);
                    return Ok(Some(Event::Complete));
                }
                State::Padding(0) => self.state = State::Header,
                State::Extended(kind, 0) => {
                    let padding = padding(self.extended.len() as u64);
                    let extended = std::mem::take(&mut self.extended);
                    self.extend(kind, &extended)?;
                    self.state = State::Padding(padding);
                }
                _ if input.is_empty() => return Ok(None),
                State::Data(left, padding) => {
                    let data = take(input, left);
                    self.state = State::Data(left - data.len() as u64, padding);
                    return Ok(Some(Event::Data(data)));
                }
                State::Padding(left) => self.state = State::Padding(left - take(input, left as u64).len()),
                State::Extended(kind, left) => {
                    let data = take(input, left);
                    self.extended.extend_from_slice(data);
                    self.state = State::Extended(kind, left - data.len() as u64);
                }
                State::Ended => *input = &[],
                State::Header => {
                    self.block.extend_from_slice(take(input, (BLOCK - self.block.len()) as u64));
                    if let Ok(block) = <[u8; BLOCK]>::try_from(&self.block[..]) {
                        self.block.clear();
                        if let Some(member) = self.header(&block)? {
                            return Ok(Some(Event::Member(member)));
                        }
                    }
                }
            }
        }
    }

    /// After the last input: whether the archive was whole.
    pub fn finish(&self) -> Result<(), String> {
        match self.state {
            State::Ended => Ok(()),
            State::Header if self.zeros && self.block.is_empty() => Ok(()),
            _ => Err("the archive is cut off: its end marker is missing".to_owned()),
        }
    }

    fn header(&mut self, block: &[u8; BLOCK]) -> Result<Option<Member>, String> {
        if block.iter().all(|byte| *byte == 0) {
            if self.zeros {
                self.state = State::Ended;
            }
            self.zeros = true;
            return Ok(None);
        }
        self.zeros = false;
        let (unsigned, signed) = checksum(block);
        let said = number(&block[148..156]);
        if said != i64::try_from(unsigned).ok() && said != Some(signed) {
            return Err("this is no tar archive, or a broken one: a header's checksum is wrong".to_owned());
        }
        let field = |name: &str, at: usize, n: usize| {
            number(&block[at..at + n]).ok_or_else(|| format!("a header of the archive has no sane {name}"))
        };
        let size = u64::try_from(field("size", 124, 12)?).map_err(|_| "a member's size is below 0".to_owned())?;
        let flag = block[156];
        if matches!(flag, b'x' | b'g' | b'L' | b'K') {
            if size > EXTENDED_BYTES_MAX {
                return Err(format!("an extended header of the archive is over {EXTENDED_BYTES_MAX} bytes"));
            }
            self.extended.clear();
            self.state = State::Extended(flag, size);
            return Ok(None);
        }
        self.member(block, flag, size, &field).map(Some)
    }

    fn member(
        &mut self,
        block: &[u8; BLOCK],
        flag: u8,
        size: u64,
        field: &dyn Fn(&str, usize, usize) -> Result<i64, String>,
    ) -> Result<Member, String> {
        let mut path = until_nul(&block[..100]).to_vec();
        if &block[257..263] == b"ustar\0" && block[345] != 0 {
            path = [until_nul(&block[345..500]), b"/", &path].concat();
        }
        let own = std::mem::take(&mut self.next);
        path = own.path.or_else(|| self.global.path.clone()).unwrap_or(path);
        let kind = match flag {
            0 | b'0' | b'7' if path.ends_with(b"/") && flag != b'7' => Kind::Directory,
            0 | b'0' | b'7' => Kind::File,
            _ => FLAGS.iter().find(|(_, known)| *known == flag).map(|(kind, _)| *kind).ok_or_else(|| {
                let shown = String::from_utf8_lossy(&path).into_owned();
                format!("{shown:?} is of a type ({:?}) that is not understood", char::from(flag))
            })?,
        };
        let id = |name, at| field(name, at, 8).map(|id| u32::try_from(id).unwrap_or(u32::MAX));
        let mut member = Member::new(kind, path);
        member.link =
            own.link.or_else(|| self.global.link.clone()).unwrap_or_else(|| until_nul(&block[157..257]).to_vec());
        member.mode = field("mode", 100, 8)? as u32 & 0o7777;
        member.uid = own.uid.or(self.global.uid).map_or_else(|| id("uid", 108), Ok)?;
        member.gid = own.gid.or(self.global.gid).map_or_else(|| id("gid", 116), Ok)?;
        member.mtime = own.mtime.or(self.global.mtime).map_or_else(|| field("mtime", 136, 12).map(|s| (s, 0)), Ok)?;
        if block[257..262] == *b"ustar" {
            member.user =
                own.user.or_else(|| self.global.user.clone()).unwrap_or_else(|| until_nul(&block[265..297]).to_vec());
            member.group =
                own.group.or_else(|| self.global.group.clone()).unwrap_or_else(|| until_nul(&block[297..329]).to_vec());
        }
        if matches!(kind, Kind::Char | Kind::Block) {
            member.device = (id("device", 329)?, id("device", 337)?);
        }
        for name in [&member.path, &member.link] {
            if name.contains(&0) {
                return Err("a member's name holds a NUL".to_owned());
            }
        }
        let size = own.size.or(self.global.size).unwrap_or(size);
        if i64::try_from(size).is_err() {
            return Err("a member's size is beyond every file".to_owned());
        }
        // What a header of another kind says of a size is a hint: there is no content.
        self.state = if kind == Kind::File {
            member.size = size;
            State::Data(size, padding(size))
        } else {
            State::Header
        };
        Ok(member)
    }

    fn extend(&mut self, kind: u8, bytes: &[u8]) -> Result<(), String> {
        match kind {
            b'L' => self.next.path = Some(until_nul(bytes).to_vec()),
            b'K' => self.next.link = Some(until_nul(bytes).to_vec()),
            b'g' => records(bytes, &mut self.global)?,
            _ => records(bytes, &mut self.next)?,
        }
        Ok(())
    }
}

fn records(mut bytes: &[u8], into: &mut Overrides) -> Result<(), String> {
    let broken = || "a pax header of the archive is broken".to_owned();
    while !bytes.is_empty() && bytes[0] != 0 {
        let space = bytes.iter().take(20).position(|b| *b == b' ').ok_or_else(broken)?;
        let length: usize =
            std::str::from_utf8(&bytes[..space]).ok().and_then(|text| text.parse().ok()).ok_or_else(broken)?;
        if length <= space + 1 || length > bytes.len() || bytes[length - 1] != b'\n' {
            return Err(broken());
        }
        let (line, rest) = (&bytes[space + 1..length - 1], &bytes[length..]);
        bytes = rest;
        let equals = line.iter().position(|b| *b == b'=').ok_or_else(broken)?;
        let (key, value) = (&line[..equals], &line[equals + 1..]);
        let int = || std::str::from_utf8(value).ok().and_then(|text| text.parse::<u64>().ok()).ok_or_else(broken);
        let id = || int().map(|id| u32::try_from(id).unwrap_or(u32::MAX));
        match key {
            b"path" => into.path = Some(value.to_vec()),
            b"linkpath" => into.link = Some(value.to_vec()),
            b"uname" => into.user = Some(value.to_vec()),
            b"gname" => into.group = Some(value.to_vec()),
            b"size" => into.size = Some(int()?),
            b"uid" => into.uid = Some(id()?),
            b"gid" => into.gid = Some(id()?),
            b"mtime" => into.mtime = Some(parse_decimal(value).ok_or_else(broken)?),
            _ if key.starts_with(b"GNU.sparse.") => {
                return Err("GNU's sparse members are not understood: make the archive without --sparse".to_owned());
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(mut bytes: &[u8], piece: usize) -> Result<Vec<(Member, Vec<u8>)>, String> {
        let mut parser = Parser::default();
        let mut found: Vec<(Member, Vec<u8>)> = Vec::new();
        while !bytes.is_empty() {
            let mut input = &bytes[..piece.min(bytes.len())];
            bytes = &bytes[input.len()..];
            while let Some(event) = parser.next(&mut input)? {
                match event {
                    Event::Member(member) => found.push((member, Vec::new())),
                    Event::Data(data) => found.last_mut().unwrap().1.extend_from_slice(data),
                    Event::Complete => assert_eq!(found.last().unwrap().0.size, found.last().unwrap().1.len() as u64),
                }
            }
        }
        parser.finish()?;
        Ok(found)
    }

    fn members() -> Vec<(Member, Vec<u8>)> {
        let mut all = Vec::new();
        for (path, content) in [
            (&b"plain"[..], &b"abc"[..]),
            (b"\xff odd \n", b""),
            (&[b'l'; 250], &[7; 512]),
            (&[0xfe; 250], &[8; 1500]),
            ("\u{e4}/".repeat(60).as_bytes(), b"x"),
        ] {
            let mut member = Member::new(Kind::File, path.strip_suffix(b"/").unwrap_or(path).to_vec());
            (member.mode, member.uid, member.gid, member.size) = (0o4751, 5, 3_000_000_000, content.len() as u64);
            (member.user, member.mtime) = (b"root".to_vec(), (-7, 250_000_000));
            all.push((member, content.to_vec()));
        }
        for kind in [Kind::Hard, Kind::Symlink, Kind::Fifo, Kind::Char] {
            let mut member = Member::new(kind, b"a/link".to_vec());
            member.mtime = (1_700_000_000, 1);
            if matches!(kind, Kind::Hard | Kind::Symlink) {
                member.link = vec![b't'; 120];
            }
            if kind == Kind::Char {
                member.device = (1, 3);
            }
            all.push((member, Vec::new()));
        }
        all
    }

    fn archive() -> Vec<u8> {
        let mut bytes = Vec::new();
        for (member, content) in members() {
            member.encode(&mut bytes);
            bytes.extend_from_slice(&content);
            pad(&mut bytes, content.len() as u64);
        }
        bytes.resize(bytes.len() + 2 * BLOCK, 0);
        bytes
    }

    #[test]
    fn what_is_written_is_read_however_it_is_split() {
        for piece in [1, 7, 511, 512, 4096, 1 << 20] {
            assert_eq!(parse(&archive(), piece).unwrap(), members());
        }
        let mut directory = Member::new(Kind::Directory, b"d".to_vec());
        directory.size = 0;
        let mut bytes = Vec::new();
        directory.encode(&mut bytes);
        bytes.resize(bytes.len() + 1024, 0);
        assert_eq!(parse(&bytes, 9).unwrap()[0].0.path, b"d/");
    }

    #[test]
    fn large_numbers_and_gnu_names_are_read() {
        let mut large = Member::new(Kind::File, b"big".to_vec());
        large.size = 1 << 40;
        let mut bytes = Vec::new();
        large.encode(&mut bytes);
        let (mut parser, mut input) = (Parser::default(), &bytes[..]);
        assert_eq!(parser.next(&mut input), Ok(Some(Event::Member(large))));
        assert_eq!(number(b"\x80\0\0\0\0\0\0\x02\0\0\0\0"), Some(2 << 32));
        assert_eq!(number(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfe"), Some(-2));
        assert_eq!(number(b"\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), None);
        let mut bytes = Vec::new();
        for (flag, name) in [(b'L', [b'n'; 300]), (b'K', [b't'; 300])] {
            let mut long = Member::new(Kind::File, b"././@LongLink".to_vec());
            long.size = 301;
            long.block(&mut bytes, &long.path, flag);
            bytes.extend_from_slice(&name);
            bytes.push(0);
            pad(&mut bytes, 301);
        }
        Member::new(Kind::Symlink, b"short".to_vec()).encode(&mut bytes);
        bytes.resize(bytes.len() + 1024, 0);
        let (member, _) = parse(&bytes, 100).unwrap().remove(0);
        assert_eq!((member.path, member.link), (vec![b'n'; 300], vec![b't'; 300]));
    }

    #[test]
    fn a_cut_archive_is_told_from_a_whole_one() {
        let whole = archive();
        for cut in (0..whole.len() - 2 * BLOCK).step_by(97) {
            assert!(parse(&whole[..cut], 4096).is_err(), "{cut}");
        }
        assert!(parse(b"", 1).is_err() && parse(&[1; 600], 600).is_err());
        assert!(parse(&[whole, b"what follows the end is no matter".to_vec()].concat(), 1000).is_ok());
    }

    #[test]
    fn times_before_and_after_1970() {
        for (time, text) in
            [((0, 0), "0.000000000"), ((-1, 500_000_000), "-0.500000000"), ((-7, 250_000_000), "-6.750000000")]
        {
            assert_eq!(decimal(time.0, time.1), text);
            assert_eq!(parse_decimal(text.as_bytes()), Some(time));
        }
        assert_eq!(parse_decimal(b"12"), Some((12, 0)));
        assert_eq!(parse_decimal(b"1.1234567899"), Some((1, 123_456_789)));
        for bad in [&b""[..], b".", b"x", b"1e5", b"--1", b"99999999999999999999"] {
            assert_eq!(parse_decimal(bad), None);
        }
    }

    #[test]
    fn random_and_flipped_input_is_survived() {
        let (whole, mut seed) = (archive(), 1u64);
        let mut random = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as usize
        };
        for _ in 0..3000 {
            let mut bytes = whole.clone();
            for _ in 0..=random() % 3 {
                let at = random() % bytes.len();
                bytes[at] = random() as u8;
                // With a right checksum more than the checksum is tried.
                let start = at / BLOCK * BLOCK;
                if let Ok(block) = <[u8; BLOCK]>::try_from(&bytes[start..start + BLOCK]) {
                    octal(&mut bytes[start + 148..start + 155], checksum(&block).0);
                }
            }
            bytes.truncate(random() % bytes.len() + 1);
            let _ = parse(&bytes, random() % 2000 + 1);
        }
        let noise: Vec<u8> = (0..100_000).map(|_| random() as u8).collect();
        assert!(parse(&noise, 512).is_err());
    }
}
