//! Managed processes: they belong to the guest and not to a session, and what they say is kept so that whoever comes
//! back reads on. What is kept, who holds up whom, which are known. Not for descriptors and frames: `agent::managed`.

use crate::exec::Exec;
use crate::failure::{Failure, Outcome};
use crate::log::Log;
use crate::msgpack::{Value, Writer};
use crate::sys::Ended;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

const ID_BYTES_MAX: usize = 64;
const TAG_BYTES_MAX: usize = 128;
const KEEP_BYTES: i64 = 1 << 20;
const KEEP_BYTES_MIN: i64 = 64 << 10;
const KEEP_BYTES_MAX: i64 = 16 << 20;
/// What a reader may have been sent and can still be lost with its host: a stream's credit and the buffers after it.
/// It stays in the log, and a process whose output was ever sent keeps at least a third more than it.
const IN_FLIGHT_BYTES: u64 = 768 << 10;
const SENT_KEEP_BYTES_MIN: u64 = IN_FLIGHT_BYTES / 3 * 4;
pub const ENDED_MAX: usize = 256;
pub const RUNNING_MAX: usize = 1024;
/// Of argv in a listing: items, and bytes.
const ARGV_ITEMS_MAX: usize = 100;
const ARGV_BYTES_MAX: usize = 2048;
/// Bytes of stdin nobody takes, after which nobody may send more.
pub const STDIN_BYTES_MAX: usize = 1 << 20;
/// Output that is limited is read in pieces of so much time.
const RATE_TICK: Duration = Duration::from_millis(20);

/// What an `exec` with `id` wants beyond a command.
pub struct Wanted {
    pub id: Vec<u8>,
    pub tag: Option<Vec<u8>>,
    /// Rows and columns.
    pub terminal: Option<(u16, u16)>,
    pub keep: u64,
    pub block: bool,
    pub attach: bool,
}

impl Wanted {
    /// None for an exec of a session.
    pub fn parse(request: &Value) -> Outcome<Option<Self>> {
        let id = match request.get("id") {
            Value::Nil => return Ok(None),
            id => id.bytes().unwrap_or_default(),
        };
        let good = |byte: &u8| byte.is_ascii_alphanumeric() || b"_.-".contains(byte);
        if id.is_empty() || id.len() > ID_BYTES_MAX || !id.iter().all(good) {
            return Err(Failure::invalid("id is 1 to 64 of [A-Za-z0-9_.-]"));
        }
        let tag = match request.get("tag") {
            Value::Nil => None,
            tag => Some(tag.bytes().filter(|tag| tag.len() <= TAG_BYTES_MAX).map(<[u8]>::to_vec)),
        };
        let tag = tag.map(|tag| tag.ok_or_else(|| Failure::invalid("tag is a string of 128 bytes at most")));
        let keep = match request.get("keep") {
            Value::Nil => KEEP_BYTES,
            Value::Int(keep @ KEEP_BYTES_MIN..=KEEP_BYTES_MAX) => *keep,
            _ => return Err(Failure::invalid("keep is 64 KiB to 16 MiB")),
        };
        let block = match request.get("full") {
            Value::Nil | Value::Bytes(b"drop") => false,
            Value::Bytes(b"block") => true,
            _ => return Err(Failure::invalid("full is drop or block")),
        };
        let tty = request.get("tty");
        let side = |key: &str, default: i64| match tty.get(key) {
            Value::Nil => Ok(default as u16),
            Value::Int(n @ 1..=10_000) => Ok(*n as u16),
            _ => Err(Failure::invalid("rows and cols are 1 to 10000")),
        };
        let terminal = if *tty == Value::Nil { None } else { Some((side("rows", 24)?, side("cols", 80)?)) };
        let attach = request.get("attach").bool(true);
        Ok(Some(Self { id: id.to_vec(), tag: tag.transpose()?, terminal, keep: keep as u64, block, attach }))
    }
}

/// What a listing says that does not change.
pub struct Info {
    pub id: Vec<u8>,
    pub tag: Option<Vec<u8>>,
    pub argv: Vec<Vec<u8>>,
    pub cwd: Vec<u8>,
    pub user: Vec<u8>,
    pub terminal: bool,
    /// Whether it was started with a stdin somebody can write to.
    pub stdin: bool,
    pub started_at: f64,
}

/// argv as a listing has it.
pub fn shown(argv: &Value) -> Vec<Vec<u8>> {
    let Value::Array(words) = argv else { return Vec::new() };
    let mut room = ARGV_BYTES_MAX;
    let mut found = Vec::new();
    for word in words.iter().take(ARGV_ITEMS_MAX).filter_map(Value::bytes) {
        let n = word.len().min(room);
        found.push(word[..n].to_vec());
        room -= n;
        if room == 0 {
            break;
        }
    }
    found
}

/// Somebody attached: a stream of the session.
pub struct Reader {
    pub stream: u32,
    /// Where it began, and where it is.
    from: u64,
    pub at: u64,
    pub output: bool,
    pub stdin: bool,
}

/// A bound on what a process's pipes are read at.
struct Rate {
    per_s: u64,
    left: u64,
    since: Instant,
}

impl Rate {
    fn new(per_s: u64) -> Self {
        Self { per_s, left: Self::burst(per_s), since: Instant::now() }
    }

    fn burst(per_s: u64) -> u64 {
        (per_s / 10).max(1)
    }

    fn room(&mut self, now: Instant) -> u64 {
        let passed = now.saturating_duration_since(self.since);
        if passed >= RATE_TICK || self.left > 0 {
            let more = passed.as_micros().min(1_000_000) as u64 * self.per_s / 1_000_000;
            if more > 0 {
                (self.left, self.since) = ((self.left + more).min(Self::burst(self.per_s)), now);
            }
        }
        self.left
    }

    fn until(&self) -> Option<Instant> {
        // As long as one byte takes, at very small rates.
        (self.left == 0).then(|| self.since + RATE_TICK.max(Duration::from_micros(1_000_000 / self.per_s + 1)))
    }
}

pub struct Managed {
    pub info: Info,
    pub exec: Exec,
    pub log: Log,
    pub readers: Vec<Reader>,
    /// Whose bytes wait in the inlet, in order, and how many.
    pub writers: VecDeque<(u32, usize)>,
    /// Whether it is in the line of those whose pipes are to be read.
    pub queued: bool,
    keep: u64,
    block: bool,
    /// What somebody who has left may have missed; with `block` it stays until somebody comes.
    held: (u64, u64),
    sent: bool,
    rate: Option<Rate>,
}

impl Managed {
    pub fn new(info: Info, exec: Exec, wanted: &Wanted) -> Self {
        Self {
            info,
            exec,
            log: Log::default(),
            readers: Vec::new(),
            writers: VecDeque::new(),
            queued: false,
            keep: wanted.keep,
            block: wanted.block,
            held: (0, 0),
            sent: false,
            rate: None,
        }
    }

    /// Somebody attaches; he reads on at `from`, or where the log begins after it. How many bytes are missing.
    pub fn enter(&mut self, stream: u32, from: u64, output: bool, stdin: bool) -> u64 {
        let at = from.max(self.log.start());
        self.sent |= output;
        self.readers.push(Reader { stream, from: at, at, output, stdin });
        at - from
    }

    pub fn reader(&mut self, stream: u32) -> Option<&mut Reader> {
        self.readers.iter_mut().find(|reader| reader.stream == stream)
    }

    pub fn leave(&mut self, stream: u32, cap: u64) {
        let held = (self.hold(cap), self.unread());
        self.readers.retain(|reader| reader.stream != stream);
        if held.0 != u64::MAX && !self.readers.iter().any(|reader| reader.output) {
            self.held = held;
        }
    }

    fn kept(&self, cap: u64) -> u64 {
        let keep = if self.sent { self.keep.max(SENT_KEEP_BYTES_MIN) } else { self.keep };
        keep.min(cap)
    }

    /// From where on everything stays: what readers have not read and what may be on its way to them.
    fn hold(&self, cap: u64) -> u64 {
        let flight = IN_FLIGHT_BYTES.min(self.kept(cap) / 4 * 3);
        let readers = self.readers.iter().filter(|reader| reader.output);
        let attached = readers.map(|reader| reader.from.max(reader.at.saturating_sub(flight))).min();
        attached.unwrap_or(if self.block { self.held.0 } else { u64::MAX })
    }

    fn unread(&self) -> u64 {
        let attached = self.readers.iter().filter(|reader| reader.output).map(|reader| reader.at).min();
        attached.unwrap_or(if self.block { self.held.1 } else { u64::MAX })
    }

    pub fn limit_rate(&mut self, per_s: Option<u64>) {
        self.rate = per_s.map(Rate::new);
    }

    /// Read what its pipes have into the log, one piece of each; true when there may be more at once.
    pub fn fill(&mut self, cap: u64) -> bool {
        let (keep, hold, unread) = (self.kept(cap), self.hold(cap), self.unread());
        self.exec.turn ^= 1;
        let mut more = false;
        for at in [self.exec.turn, self.exec.turn ^ 1] {
            let outlet = &mut self.exec.outlets[at];
            if outlet.fd.is_none() || !outlet.ready {
                continue;
            }
            // Not more than a read can take: a read that is short tells that the pipe is empty.
            let mut room = self.log.room(keep, hold, unread).min(self.log.space() as u64);
            if let Some(rate) = &mut self.rate {
                room = room.min(rate.room(Instant::now()));
            }
            let before = self.log.end();
            let (log, channel) = (&mut self.log, outlet.channel);
            let flow = outlet.pump_into(room, |fd, max| log.read_from(fd, channel, max));
            more |= matches!(flow, crate::stream::Flow::More);
            if let Some(rate) = &mut self.rate {
                rate.left -= (self.log.end() - before).min(rate.left);
            }
            self.log.trim(keep);
        }
        more
    }

    /// When something is to be done without an event.
    pub fn wake_at(&self) -> Option<Instant> {
        let throttled = self.rate.as_ref().and_then(Rate::until);
        let waiting = self.exec.outlets.iter().any(|outlet| outlet.ready && outlet.fd.is_some());
        self.exec.wake_at().into_iter().chain(throttled.filter(|_| waiting)).min()
    }

    /// What a reader at `at` is to be sent next, `max` bytes at most.
    pub fn piece(&self, at: u64, max: usize) -> (u8, &[u8]) {
        self.log.piece(at, max)
    }

    /// One map of the answer to `processes`.
    pub fn describe(&self, list: &mut Writer) {
        let (info, ended) = (&self.info, self.exec.over());
        list.begin_map(16);
        list.str("id").bytes(&info.id).str("pid").int(self.exec.pid.into());
        match &info.tag {
            Some(tag) => list.str("tag").bytes(tag),
            None => list.str("tag").nil(),
        };
        list.str("argv").begin_array(info.argv.len());
        info.argv.iter().for_each(|word| {
            list.bytes(word);
        });
        list.str("cwd").bytes(&info.cwd).str("user").bytes(&info.user).str("tty").bool(info.terminal);
        list.str("stdin")
            .bool(info.stdin)
            .str("started_at")
            .float(info.started_at)
            .str("running")
            .bool(ended.is_none());
        list.str("exit_code").opt_int(ended.and_then(|ended| ended.exit_code).map(i64::from));
        list.str("signal").opt_int(ended.and_then(|ended| ended.signal).map(i64::from));
        list.str("timed_out").bool(self.exec.timed_out).str("start").int(self.log.start() as i64);
        list.str("offset").int(self.log.end() as i64).str("attached").int(self.readers.len() as i64);
    }
}

/// All of them, by slot: a number of our own that is never used again.
#[derive(Default)]
pub struct Table {
    running: BTreeMap<u32, Managed>,
    ended: BTreeMap<u32, Managed>,
    /// Of the ended, the first to end first.
    order: VecDeque<u32>,
    /// Whose pipes are to be read, in turn.
    pub ready: VecDeque<u32>,
    next: u32,
    /// What all logs together may hold.
    total: u64,
    /// What one may hold, when that has been reached.
    cap: u64,
    rate: Option<u64>,
}

impl Table {
    pub fn new(memory_bytes: u64) -> Self {
        // The agent's memory is none of the processes', so it is little.
        let total = (memory_bytes / 32).clamp(8 << 20, 256 << 20);
        Self { total, cap: u64::MAX, ..Self::default() }
    }

    /// Whether one of that id may be started.
    pub fn admit(&self, id: &[u8]) -> Outcome<()> {
        if self.find(id).is_some() {
            return Err(Failure::new("exists", format!("a process {} is known", String::from_utf8_lossy(id))));
        }
        if self.running.len() >= RUNNING_MAX {
            return Err(Failure::new("too_many_streams", format!("{RUNNING_MAX} managed processes run")));
        }
        Ok(())
    }

    pub fn add(&mut self, mut managed: Managed) -> u32 {
        managed.limit_rate(self.rate);
        self.next = self.next.wrapping_add(1);
        self.running.insert(self.next, managed);
        self.next
    }

    pub fn find(&self, id: &[u8]) -> Option<u32> {
        self.all().find(|(_, managed)| managed.info.id == id).map(|(slot, _)| *slot)
    }

    pub fn known(&self, id: &Value) -> Outcome<u32> {
        let id = id.bytes().unwrap_or_default();
        self.find(id)
            .ok_or_else(|| Failure::new("not_found", format!("there is no process {:?}", String::from_utf8_lossy(id))))
    }

    pub fn get(&mut self, slot: u32) -> Option<&mut Managed> {
        match self.running.get_mut(&slot) {
            Some(managed) => Some(managed),
            None => self.ended.get_mut(&slot),
        }
    }

    pub fn running(&mut self) -> impl Iterator<Item = (&u32, &mut Managed)> {
        self.running.iter_mut()
    }

    /// When something is to be done with one of them without an event.
    pub fn waking(&self) -> impl Iterator<Item = Instant> + '_ {
        self.running.values().filter_map(Managed::wake_at)
    }

    /// A child has exited: whose leader it was.
    pub fn reaped(&mut self, ended: Ended) -> Option<u32> {
        let leads = |managed: &Managed| managed.exec.pid == ended.pid && managed.exec.ended.is_none();
        let (slot, managed) = self.running.iter_mut().find(|(_, managed)| leads(managed))?;
        managed.exec.reaped(ended);
        Some(*slot)
    }

    fn all(&self) -> impl Iterator<Item = (&u32, &Managed)> {
        self.running.iter().chain(&self.ended)
    }

    /// Its pipes are to be looked at.
    pub fn enqueue(&mut self, slot: u32) {
        if let Some(managed) = self.running.get_mut(&slot).filter(|managed| !managed.queued) {
            managed.queued = true;
            self.ready.push_back(slot);
        }
    }

    /// Read of one's pipes; true when there may be more at once. Keeps all together within their bound.
    pub fn fill(&mut self, slot: u32) -> bool {
        let cap = self.cap;
        let Some(managed) = self.running.get_mut(&slot) else { return false };
        let before = managed.log.bytes();
        let more = managed.fill(cap);
        if managed.log.bytes() > before {
            self.squeeze();
        }
        more
    }

    fn held(&self) -> u64 {
        self.all().map(|(_, managed)| managed.log.bytes()).sum()
    }

    fn squeeze(&mut self) {
        // The sum is of few, and most often of one.
        let mut held = self.held();
        if held <= self.total {
            return;
        }
        for slot in &self.order {
            let Some(managed) = self.ended.get_mut(slot).filter(|managed| managed.readers.is_empty()) else { continue };
            held -= managed.log.bytes();
            managed.log.trim(0);
            if held <= self.total {
                return;
            }
        }
        self.cap = (self.total / self.running.len().max(1) as u64).max(KEEP_BYTES_MIN as u64);
    }

    /// What one's end has come to, if it is over: it is then among the ended.
    pub fn settle(&mut self, slot: u32) -> Option<&mut Managed> {
        if !self.running.get(&slot).is_some_and(|managed| managed.exec.over().is_some()) {
            return None;
        }
        let mut managed = self.running.remove(&slot)?;
        managed.log.close();
        if self.cap < u64::MAX && (self.running.is_empty() || self.held() < self.total / 2) {
            self.cap = u64::MAX;
        }
        self.order.push_back(slot);
        if self.order.len() > ENDED_MAX {
            let unwatched = |slot: &u32| self.ended.get(slot).map_or(true, |managed| managed.readers.is_empty());
            let oldest = self.order.iter().position(unwatched).unwrap_or(0);
            if let Some(oldest) = self.order.remove(oldest) {
                self.ended.remove(&oldest);
            }
        }
        self.ended.insert(slot, managed);
        self.ended.get_mut(&slot)
    }

    /// Forget an ended one; who still read of it.
    pub fn forget(&mut self, id: &Value) -> Outcome<Vec<u32>> {
        let slot = self.known(id)?;
        let Some(managed) = self.ended.remove(&slot) else {
            return Err(Failure::invalid("it runs; signal or cancel it first"));
        };
        self.order.retain(|ended| *ended != slot);
        Ok(managed.readers.iter().map(|reader| reader.stream).collect())
    }

    /// A stream lets go of one.
    pub fn leave(&mut self, slot: u32, stream: u32) {
        let cap = self.cap;
        if let Some(managed) = self.get(slot) {
            managed.leave(stream, cap);
        }
        self.enqueue(slot);
    }

    /// The session is over: whose stdin waits is nobody's any more.
    pub fn end_session(&mut self) {
        for managed in self.running.values_mut() {
            managed.writers.clear();
        }
    }

    pub fn limit_rate(&mut self, per_s: Option<u64>) {
        self.rate = per_s;
        self.running.values_mut().for_each(|managed| managed.limit_rate(per_s));
        let slots: Vec<u32> = self.running.keys().copied().collect();
        slots.into_iter().for_each(|slot| self.enqueue(slot));
    }

    pub fn describe(&self) -> Vec<u8> {
        let mut list = Writer::default();
        self.all().for_each(|(_, managed)| managed.describe(&mut list));
        list.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Inlet, Outlet};
    use crate::sys;
    use std::os::fd::{AsRawFd, OwnedFd};

    fn wanted(keep: u64, block: bool) -> Wanted {
        Wanted { id: b"p".to_vec(), tag: None, terminal: None, keep, block, attach: true }
    }

    fn managed(keep: u64, block: bool) -> (Managed, OwnedFd) {
        let (reader, writer) = sys::pipe().unwrap();
        sys::set_nonblocking(reader.as_raw_fd()).unwrap();
        let info = Info {
            id: b"p".to_vec(),
            tag: None,
            argv: vec![],
            cwd: vec![],
            user: vec![],
            terminal: false,
            stdin: false,
            started_at: 0.0,
        };
        let exec = Exec {
            pid: 0,
            leaf: None,
            group_kill: true,
            stdin: None,
            inlet: Inlet::default(),
            outlets: [Outlet::new(reader, 1, false), Outlet::closed(2)],
            ended: None,
            timed_out: false,
            deadline: None,
            turn: 1,
        };
        (Managed::new(info, exec, &wanted(keep, block)), writer)
    }

    /// Write until it is read no further, `max` bytes at most.
    fn flood(managed: &mut Managed, writer: &OwnedFd, max: u64) -> u64 {
        let begin = managed.log.end();
        while managed.log.end() - begin < max {
            let before = managed.log.end();
            if sys::readable_bytes(writer.as_raw_fd()) == 0 {
                sys::write(writer.as_raw_fd(), &[7; 32_768]).unwrap();
            }
            managed.exec.outlets[0].event(sys::IN);
            managed.fill(u64::MAX);
            if managed.log.end() == before {
                break;
            }
        }
        managed.log.end() - begin
    }

    #[test]
    fn without_a_reader_the_oldest_go_or_the_pipe_waits() {
        let (mut dropping, writer) = managed(65_536, false);
        assert!(flood(&mut dropping, &writer, 1 << 20) >= 1 << 20);
        assert_eq!(dropping.log.end() - dropping.log.start(), 65_536);
        let (mut blocking, writer) = managed(65_536, true);
        assert_eq!(flood(&mut blocking, &writer, 1 << 20), 65_536);
        assert_eq!(blocking.log.start(), 0);
        blocking.enter(1, 0, true, false);
        blocking.reader(1).unwrap().at = 65_536;
        assert!(flood(&mut blocking, &writer, 4 << 20) > 0);
    }

    #[test]
    fn what_was_sent_but_may_be_lost_is_still_there_for_who_comes_back() {
        for block in [false, true] {
            let (mut managed, writer) = managed(65_536, block);
            managed.enter(1, 0, true, false);
            let mut sent = 0;
            for _ in 0..50 {
                flood(&mut managed, &writer, 8 << 20);
                sent = managed.log.end();
                managed.reader(1).unwrap().at = sent;
            }
            assert!(sent > 4 << 20);
            flood(&mut managed, &writer, 8 << 20);
            managed.leave(1, u64::MAX);
            if block {
                flood(&mut managed, &writer, 8 << 20);
            }
            let seen = sent - IN_FLIGHT_BYTES;
            assert_eq!(managed.enter(2, seen, true, false), 0, "block {block}");
        }
    }

    #[test]
    fn a_rate_bounds_what_is_read() {
        let (mut managed, writer) = managed(65_536, false);
        managed.limit_rate(Some(100_000));
        assert_eq!(flood(&mut managed, &writer, 1 << 20), 10_000);
        assert!(managed.wake_at().is_some());
    }

    #[test]
    fn logs_together_have_a_bound_and_the_ended_go_first() {
        let mut table = Table::new(0);
        let fill = |table: &mut Table, mib: u64| {
            let (managed, writer) = managed(16 << 20, false);
            let slot = table.add(managed);
            while table.get(slot).unwrap().log.end() < mib << 20 {
                sys::write(writer.as_raw_fd(), &[7; 32_768]).unwrap();
                table.get(slot).unwrap().exec.outlets[0].event(sys::IN);
                table.fill(slot);
            }
            (slot, writer)
        };
        let (first, _w) = fill(&mut table, 5);
        let exec = &mut table.get(first).unwrap().exec;
        exec.reaped(Ended { pid: 0, exit_code: Some(0), signal: None, user_ms: 0, system_ms: 0 });
        exec.outlets[0].fd = None;
        assert!(table.settle(first).is_some());
        let (second, _w) = fill(&mut table, 5);
        assert_eq!(table.get(first).unwrap().log.start(), 5 << 20);
        assert_eq!(table.get(second).unwrap().log.start(), 0);
        let (_, _w) = fill(&mut table, 20);
        assert!(table.held() < 14 << 20, "{}", table.held());
    }
}
