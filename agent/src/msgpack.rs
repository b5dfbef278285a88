//! The part of msgpack the protocol uses, pure: maps of strings, numbers, booleans, arrays; no extensions.
//!
//! Decoding borrows from its input and its depth and memory are bounded by it. `str` and `bin` are one thing here:
//! bytes; what is written as bytes becomes `str` when it is UTF-8, else `bin`.

const DEPTH_MAX: u8 = 8;

#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    Nil,
    Bool(bool),
    Int(i64),
    Float(f64),
    Bytes(&'a [u8]),
    Array(Vec<Value<'a>>),
    Map(Vec<(Value<'a>, Value<'a>)>),
}

impl<'a> Value<'a> {
    /// The value of a key of a map; Nil when there is none or this is no map.
    pub fn get(&self, key: &str) -> &Value<'a> {
        if let Value::Map(pairs) = self {
            if let Some((_, value)) = pairs.iter().find(|(k, _)| *k == Value::Bytes(key.as_bytes())) {
                return value;
            }
        }
        &Value::Nil
    }

    pub fn bytes(&self) -> Option<&'a [u8]> {
        if let Value::Bytes(bytes) = self {
            Some(bytes)
        } else {
            None
        }
    }

    pub fn int(&self) -> Option<i64> {
        if let Value::Int(n) = self {
            Some(*n)
        } else {
            None
        }
    }

    pub fn bool(&self, default: bool) -> bool {
        if let Value::Bool(b) = self {
            *b
        } else {
            default
        }
    }

    pub fn float(&self) -> Option<f64> {
        match self {
            Value::Float(x) => Some(*x),
            Value::Int(n) => Some(*n as f64),
            _ => None,
        }
    }
}

/// One whole value, None when `bytes` is not exactly that.
pub fn decode(bytes: &[u8]) -> Option<Value<'_>> {
    let mut reader = Reader { bytes };
    let value = reader.value(0)?;
    reader.bytes.is_empty().then_some(value)
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        if n > self.bytes.len() {
            return None;
        }
        let (head, tail) = self.bytes.split_at(n);
        self.bytes = tail;
        Some(head)
    }

    fn uint(&mut self, width: usize) -> Option<u64> {
        Some(self.take(width)?.iter().fold(0, |n, byte| n << 8 | u64::from(*byte)))
    }

    fn value(&mut self, depth: u8) -> Option<Value<'a>> {
        if depth > DEPTH_MAX {
            return None;
        }
        let byte = self.take(1)?[0];
        Some(match byte {
            0x00..=0x7f => Value::Int(i64::from(byte)),
            0x80..=0x8f => self.map(usize::from(byte & 15), depth)?,
            0x90..=0x9f => self.array(usize::from(byte & 15), depth)?,
            0xa0..=0xbf => Value::Bytes(self.take(usize::from(byte & 31))?),
            0xc0 => Value::Nil,
            0xc2 => Value::Bool(false),
            0xc3 => Value::Bool(true),
            0xc4 | 0xd9 => self.sized(1)?,
            0xc5 | 0xda => self.sized(2)?,
            0xc6 | 0xdb => self.sized(4)?,
            0xca => Value::Float(f64::from(f32::from_bits(self.uint(4)? as u32))),
            0xcb => Value::Float(f64::from_bits(self.uint(8)?)),
            0xcc..=0xcf => Value::Int(i64::try_from(self.uint(1 << (byte - 0xcc))?).ok()?),
            0xd0 => Value::Int(i64::from(self.uint(1)? as i8)),
            0xd1 => Value::Int(i64::from(self.uint(2)? as i16)),
            0xd2 => Value::Int(i64::from(self.uint(4)? as i32)),
            0xd3 => Value::Int(self.uint(8)? as i64),
            0xdc => {
                let n = self.uint(2)? as usize;
                self.array(n, depth)?
            }
            0xdd => {
                let n = self.uint(4)? as usize;
                self.array(n, depth)?
            }
            0xde => {
                let n = self.uint(2)? as usize;
                self.map(n, depth)?
            }
            0xdf => {
                let n = self.uint(4)? as usize;
                self.map(n, depth)?
            }
            0xe0..=0xff => Value::Int(i64::from(byte as i8)),
            _ => return None,
        })
    }

    fn sized(&mut self, width: usize) -> Option<Value<'a>> {
        let n = self.uint(width)? as usize;
        Some(Value::Bytes(self.take(n)?))
    }

    fn array(&mut self, n: usize, depth: u8) -> Option<Value<'a>> {
        if n > self.bytes.len() {
            return None; // each takes a byte at least, so memory is bounded by the input
        }
        let mut items = Vec::with_capacity(n);
        for _ in 0..n {
            items.push(self.value(depth + 1)?);
        }
        Some(Value::Array(items))
    }

    fn map(&mut self, n: usize, depth: u8) -> Option<Value<'a>> {
        if n > self.bytes.len() / 2 {
            return None;
        }
        let mut pairs = Vec::with_capacity(n);
        for _ in 0..n {
            pairs.push((self.value(depth + 1)?, self.value(depth + 1)?));
        }
        Some(Value::Map(pairs))
    }
}

/// Writes one value after another; maps and arrays announce how many follow.
#[derive(Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    pub fn map(n: usize) -> Self {
        let mut writer = Self(Vec::with_capacity(64));
        writer.begin_map(n);
        writer
    }

    pub fn begin_map(&mut self, n: usize) {
        self.sized(n, 0x80, 16, [0xdf, 0xde, 0xdf]);
    }

    pub fn begin_array(&mut self, n: usize) {
        self.sized(n, 0x90, 16, [0xdd, 0xdc, 0xdd]);
    }

    fn sized(&mut self, n: usize, fix: u8, fix_end: usize, [one, two, four]: [u8; 3]) {
        if n < fix_end {
            self.0.push(fix | n as u8);
        } else if n < 256 && one != four {
            self.0.extend_from_slice(&[one, n as u8]);
        } else if n < 65_536 {
            self.0.push(two);
            self.0.extend_from_slice(&(n as u16).to_be_bytes());
        } else {
            self.0.push(four);
            self.0.extend_from_slice(&(n as u32).to_be_bytes());
        }
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        if std::str::from_utf8(bytes).is_ok() {
            self.sized(bytes.len(), 0xa0, 32, [0xd9, 0xda, 0xdb]);
        } else {
            self.sized(bytes.len(), 0, 0, [0xc4, 0xc5, 0xc6]);
        }
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn str(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    pub fn int(&mut self, n: i64) -> &mut Self {
        match n {
            -32..=127 => self.0.push(n as u8),
            128..=0xFFFF_FFFF => {
                self.0.push(0xce);
                self.0.extend_from_slice(&(n as u32).to_be_bytes());
            }
            _ => {
                self.0.push(0xd3);
                self.0.extend_from_slice(&n.to_be_bytes());
            }
        }
        self
    }

    pub fn bool(&mut self, b: bool) -> &mut Self {
        self.0.push(0xc2 | u8::from(b));
        self
    }

    pub fn float(&mut self, x: f64) -> &mut Self {
        self.0.push(0xcb);
        self.0.extend_from_slice(&x.to_bits().to_be_bytes());
        self
    }

    pub fn nil(&mut self) -> &mut Self {
        self.0.push(0xc0);
        self
    }

    /// `int`, or nil for None.
    pub fn opt_int(&mut self, n: Option<i64>) -> &mut Self {
        match n {
            Some(n) => self.int(n),
            None => self.nil(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut writer = Writer::map(5);
        writer.str("text").str(&"é".repeat(40)).str("bin").bytes(&[0xff; 300]);
        writer.str("n").begin_array(20);
        let numbers = [
            0,
            1,
            -1,
            -32,
            -33,
            127,
            128,
            255,
            65_535,
            65_536,
            -70_000,
            i64::from(u32::MAX),
            1 << 32,
            i64::MAX,
            i64::MIN,
        ];
        for n in numbers {
            writer.int(n);
        }
        writer.nil().bool(true).bool(false).float(1.5).opt_int(None);
        writer.str("x").str("").str("long").bytes(&vec![b'a'; 70_000]);
        let value = decode(&writer.0).unwrap();
        assert_eq!(value.get("text").bytes(), Some("é".repeat(40).as_bytes()));
        assert_eq!(value.get("bin").bytes(), Some(&[0xff; 300][..]));
        assert_eq!(value.get("long").bytes().map(<[u8]>::len), Some(70_000));
        let Value::Array(items) = value.get("n") else { panic!() };
        assert_eq!(items.iter().filter_map(Value::int).collect::<Vec<_>>(), numbers);
        assert_eq!(items[15..], [Value::Nil, Value::Bool(true), Value::Bool(false), Value::Float(1.5), Value::Nil]);
        assert_eq!(value.get("absent"), &Value::Nil);
    }

    #[test]
    fn hostile_input_is_none_and_cheap() {
        for bytes in [
            &b""[..],
            b"\xc1",
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff\x01",
            b"\xdb\x7f\xff\xff\xff",
            b"\x81\xa1a",
            b"\x01\x01",
        ] {
            assert_eq!(decode(bytes), None, "{bytes:?}");
        }
        assert_eq!(decode(&[0x91; 60_000]), None);
        assert_eq!(decode(b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff"), None, "beyond i64");
    }

    #[test]
    fn every_prefix_and_flip_of_a_map_is_survived() {
        let mut writer = Writer::map(2);
        writer.str("argv").begin_array(2);
        writer.str("a").str("b").str("env");
        writer.begin_map(1);
        writer.str("K").float(2.0);
        for cut in 0..writer.0.len() {
            assert_eq!(decode(&writer.0[..cut]), None);
            for bit in 0..8 {
                let mut flipped = writer.0.clone();
                flipped[cut] ^= 1 << bit;
                let _ = decode(&flipped);
            }
        }
    }
}
