//! The agent: one thread, one epoll, every stream of the session. This is what happens when; `processes`, `files`, `trees`,
//! `verbs` are what happens for whom, and what is done is in the modules of the verbs. It blocks in `epoll_wait` with no timeout unless an exec has a deadline.

mod files;
mod managed;
mod processes;
mod trees;
mod verbs;

use crate::cgroup::Sandbox;
use crate::channel::{Channel, Input};
use crate::exec::{Environment, Exec};
use crate::failure::{Failure, Outcome};
use crate::frame::{self, Decoder, Event, Frame};
use crate::fsfreeze::Disks;
use crate::managed::Table;
use crate::msgpack::{self, Value, Writer};
use crate::out::Out;
use crate::restore::Names;
use crate::spawn::Spawner;
use crate::stream::{Kind, Pull, Push, Stream, WINDOW_BYTES_MAX};
use crate::sys::{self, Epoll, EDGE, HUP, IN, OUT, PRI, RDHUP};
use crate::transfer::{Sink, Source};
use crate::users::Cache;
use crate::volumes::Mounted;
use crate::worker::Workers;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

const STREAMS_MAX: usize = 1024;
/// Read at most so much before looking at anything else.
const INPUT_BYTES_MAX: usize = 512 * 1024;
const EVENTS_MAX: usize = 64;
/// What a file being written may have on its way, so that the host sends on while a worker writes…
const PUSH_WINDOW_BYTES: u64 = 1_048_576;
/// …unless so many streams are open that it would be much memory.
const PUSH_WINDOWS_MAX: usize = 16;

// What an epoll token names, in bits 32..40; below it the stream, above it the session.
const STDIN: u64 = 0;
const STDOUT: u64 = 1;
const STDERR: u64 = 2;
const SOCKET: u64 = 3;
const SOURCE: u64 = 4;
const CHANNEL: u64 = 0x10;
const ACCEPT: u64 = 0x11;
const CHILDREN: u64 = 0x12;
const WORKERS: u64 = 0x13;
const FREEZER: u64 = 0x14;
// Of managed processes, which no session owns: below it the slot.
const MANAGED_OUT: u64 = 0x20;
const MANAGED_ERR: u64 = 0x21;
const MANAGED_IN: u64 = 0x22;

/// What a worker answers.
enum Done {
    Answer(Outcome<Vec<u8>>),
    Pulled(Outcome<Pulled>),
    Opened(Outcome<Box<dyn Sink>>),
    Pushed(Outcome<(Box<dyn Sink>, Vec<u8>)>),
    Committed(Outcome<Vec<u8>>),
    Nothing,
}

struct Pulled {
    /// The payload of REPLY, the first time.
    reply: Option<Vec<u8>>,
    source: Box<dyn Source>,
    chunk: Vec<u8>,
    last: bool,
}

/// What a verb has come to when its OPEN has been looked at.
enum Opened {
    /// REPLY and END, at once.
    Done(Vec<u8>, Vec<u8>),
    Stream(Kind),
}

struct Service {
    name: Vec<u8>,
    pid: i32,
    restore_signal: i32,
}

/// What being PID 1 of a machine adds.
pub struct Machine {
    pub sandbox: Sandbox,
    /// /dev/urandom, open so that a reseed walks no path.
    pub random: OwnedFd,
    pub names: Names,
    pub disks: Disks,
    pub volumes: Mounted,
    pub boot_id: String,
}

pub struct Agent {
    epoll: Epoll,
    channel: Channel,
    decoder: Option<Decoder>,
    out: Out,
    workers: Workers<Done>,
    /// The process that has namespaces of its own, in which others are started while it runs.
    init: Option<i32>,
    spawner: Spawner,
    children: OwnedFd,
    null: OwnedFd,
    machine: Option<Machine>,
    users: Cache,
    streams: BTreeMap<u32, Stream>,
    /// Streams that may have something to send, in turn.
    line: VecDeque<u32>,
    /// Files that bytes have come in for since input was last looked at.
    filled: Vec<u32>,
    services: Vec<Service>,
    managed: Table,
    environment: Environment,
    /// The last frames held what is not to stay in memory.
    wipe: bool,
    session: u32,
    greeted: bool,
    readable: bool,
    writable: bool,
    power_off: bool,
}

fn empty_map() -> Vec<u8> {
    Writer::map(0).0
}

fn pid_map(pid: i32) -> Vec<u8> {
    let mut map = Writer::map(1);
    map.str("pid").int(pid.into());
    map.0
}

impl Agent {
    pub fn new(channel: Channel, machine: Option<Machine>) -> io::Result<Self> {
        sys::keep_memory();
        let null = sys::open(std::ffi::CStr::from_bytes_with_nul(b"/dev/null\0").unwrap_or_default(), libc::O_RDWR, 0)?;
        let agent = Self {
            epoll: Epoll::new()?,
            channel,
            decoder: Some(Decoder::new()),
            out: Out::default(),
            workers: Workers::new()?,
            init: None,
            spawner: Spawner::new(machine.is_some())?,
            children: sys::child_signals()?,
            null,
            machine,
            users: Cache::default(),
            streams: BTreeMap::new(),
            line: VecDeque::new(),
            filled: Vec::new(),
            services: Vec::new(),
            managed: Table::new(sys::memory_bytes()),
            environment: Vec::new(),
            wipe: false,
            session: 0,
            greeted: false,
            readable: true,
            writable: true,
            power_off: false,
        };
        agent.channel.register(&agent.epoll, CHANNEL << 32, ACCEPT << 32)?;
        agent.epoll.add(agent.children.as_raw_fd(), IN, CHILDREN << 32)?;
        agent.epoll.add(agent.workers.fd(), IN, WORKERS << 32)?;
        if let Some(machine) = &agent.machine {
            agent.epoll.add(machine.sandbox.events_fd(), PRI | EDGE, FREEZER << 32)?;
        }
        Ok(agent)
    }

    /// Serve until the inherited socket ends or the host asks to power off.
    pub fn run(&mut self) -> io::Result<()> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS_MAX];
        loop {
            let timeout = self.timeout_ms();
            for event in self.epoll.wait(&mut events, timeout) {
                let (events, token) = (event.events, event.u64);
                self.event(events, token)?;
            }
            if self.readable && !self.receive()? {
                self.end_session();
                return Ok(());
            }
            self.expire();
            self.fill();
            self.produce();
            if self.writable && !self.out.is_empty() {
                match self.out.flush(|bytes| self.channel.write(bytes)) {
                    Ok(()) => self.set_writable(self.out.is_empty())?,
                    Err(_) if self.channel.hang_up() => self.reconnect(),
                    Err(error) => return Err(error),
                }
            }
            if self.power_off && self.out.is_empty() {
                return Ok(());
            }
        }
    }

    fn timeout_ms(&self) -> i32 {
        if self.readable || !self.managed.ready.is_empty() || (!self.line.is_empty() && self.out.room()) {
            return 0;
        }
        let deadlines = self.streams.values().filter_map(|stream| match &stream.kind {
            Kind::Exec(exec) => exec.wake_at(),
            _ => None,
        });
        let deadlines = deadlines.chain(self.managed.waking());
        deadlines.min().map_or(-1, |deadline| {
            let ms = deadline.saturating_duration_since(Instant::now()).as_millis() + 1;
            i32::try_from(ms).unwrap_or(i32::MAX)
        })
    }

    fn event(&mut self, events: u32, token: u64) -> io::Result<()> {
        match token >> 32 & 0xFF {
            CHANNEL => {
                self.readable |= events & (IN | HUP | RDHUP) != 0;
                if events & OUT != 0 {
                    self.set_writable(true)?;
                }
            }
            ACCEPT if self.channel.accept(&self.epoll, CHANNEL << 32).unwrap_or(false) => {
                self.reconnect();
                (self.readable, self.writable) = (true, true);
            }
            CHILDREN => self.reap(),
            WORKERS => {
                for (token, done) in self.workers.done() {
                    self.worker_done(token, done);
                }
            }
            FREEZER => self.freezer(),
            part @ (MANAGED_OUT | MANAGED_ERR | MANAGED_IN) => self.managed_event(token as u32, part, events),
            part if token >> 40 == u64::from(self.session & 0xFF_FFFF) => self.stream_event(token as u32, part, events),
            _ => {}
        }
        Ok(())
    }

    fn set_writable(&mut self, writable: bool) -> io::Result<()> {
        if self.writable != writable {
            self.writable = writable;
            self.channel.want_write(&self.epoll, CHANNEL << 32, !writable)?;
        }
        Ok(())
    }

    // Input

    /// False when the inherited socket has ended.
    fn receive(&mut self) -> io::Result<bool> {
        let Some(mut decoder) = self.decoder.take() else { return Ok(true) };
        let mut budget = INPUT_BYTES_MAX;
        let mut open = true;
        while budget > 0 {
            match self.channel.read(decoder.spare())? {
                Input::Bytes(n) => {
                    decoder.filled(n);
                    budget = budget.saturating_sub(n.max(1));
                    while let Some(event) = decoder.next() {
                        match event {
                            Event::Preamble(nonce) => self.begin_session(nonce),
                            Event::Frame(frame) => self.frame(frame),
                        }
                    }
                }
                Input::Drained => {
                    self.readable = false;
                    break;
                }
                Input::Closed => {
                    self.readable = false;
                    self.disconnected(&mut decoder);
                    open = matches!(self.channel, Channel::Listener { .. });
                    break;
                }
            }
        }
        if std::mem::take(&mut self.wipe) {
            decoder.wipe();
        }
        self.decoder = Some(decoder);
        // All that has come goes to a worker as one piece: handing over costs more than writing.
        for id in std::mem::take(&mut self.filled) {
            self.push_on(id);
        }
        Ok(open)
    }

    fn begin_session(&mut self, nonce: u64) {
        self.end_session();
        self.out.begin(nonce);
    }

    fn reconnect(&mut self) {
        if let Some(mut decoder) = self.decoder.take() {
            self.disconnected(&mut decoder);
            self.decoder = Some(decoder);
        }
    }

    /// The connection is gone, and with it what was on its way in either direction. Where that is nothing, since the host had
    /// silenced us (a VMM whose snapshot resets connections), the session waits for the next one.
    fn disconnected(&mut self, decoder: &mut Decoder) {
        if self.out.is_quiet() {
            return decoder.cut();
        }
        self.end_session();
        decoder.forget();
    }

    /// Cancel every stream; services live on.
    fn end_session(&mut self) {
        self.session = self.session.wrapping_add(1);
        self.greeted = false;
        self.out.end();
        self.line.clear();
        for (id, stream) in std::mem::take(&mut self.streams) {
            self.discard(id, stream);
        }
        self.managed.end_session();
    }

    fn frame(&mut self, frame: Frame) {
        let id = frame.stream;
        match (frame.kind, id) {
            (frame::HELLO, 0) => self.hello(frame.payload),
            _ if !self.greeted => {}
            (frame::QUIESCE, 0) => self.out.quiesce(),
            (frame::UNQUIESCE, 0) => self.out.unquiesce(),
            (_, 0) => {}
            (frame::OPEN, _) => self.open(id, frame.payload),
            (frame::DATA, _) => self.data(id, frame.payload),
            (frame::EOF, _) => self.host_eof(id),
            (frame::CREDIT, _) => {
                let Ok(bytes) = <[u8; 4]>::try_from(frame.payload) else {
                    return self.fail(id, &Failure::invalid("CREDIT is a u32"));
                };
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.credit = (stream.credit + u64::from(u32::from_le_bytes(bytes))).min(WINDOW_BYTES_MAX);
                    self.enqueue(id);
                }
            }
            (frame::CANCEL, _) => {
                if let Some(exec) = self.managed_exec(id) {
                    exec.kill();
                }
                self.fail(id, &Failure::new("cancelled", "cancelled by the host"));
            }
            (frame::SIGNAL, _) => {
                let &[signal @ 1..=64] = frame.payload else { return };
                match self.streams.get(&id).map(|stream| &stream.kind) {
                    Some(Kind::Exec(exec)) => exec.signal(signal.into()),
                    _ => {
                        if let Some(exec) = self.managed_exec(id) {
                            exec.signal(signal.into());
                        }
                    }
                }
            }
            (frame::RESIZE | frame::DETACH, _) => {
                let Some(Kind::Attach(slot)) = self.streams.get(&id).map(|stream| &stream.kind) else { return };
                let slot = *slot;
                if frame.kind == frame::RESIZE {
                    self.resize(slot, frame.payload);
                } else {
                    self.detach(id, slot);
                }
            }
            _ => {}
        }
    }

    /// The process that a stream is attached to.
    fn managed_exec(&mut self, id: u32) -> Option<&Exec> {
        match self.streams.get(&id)?.kind {
            Kind::Attach(slot) => self.managed.get(slot).map(|managed| &managed.exec),
            _ => None,
        }
    }

    fn hello(&mut self, payload: &[u8]) {
        let request = msgpack::decode(payload).unwrap_or(Value::Nil);
        let speaks = matches!(request.get("versions"), Value::Array(versions) if versions.contains(&Value::Int(1)));
        let mut ack = Writer::map(if speaks { 5 } else { 2 });
        if speaks {
            let machine: &[&str] = if self.machine.is_some() {
                &[
                    "freeze",
                    "fsfreeze",
                    "post_restore",
                    "set_time",
                    "poweroff",
                    "cgroup",
                    "network",
                    "protect",
                    "volumes",
                    "init",
                ]
            } else {
                &[]
            };
            ack.str("version").int(1).str("agent").str(crate::VERSION);
            ack.str("boot_id").str(self.machine.as_ref().map_or("", |machine| &machine.boot_id));
            ack.str("capabilities").begin_array(4 + machine.len());
            ack.str("service").str("connect").str("managed").str("files2");
            for name in machine {
                ack.str(name);
            }
            ack.str("streams_max").int(STREAMS_MAX as i64);
        } else {
            ack.str("version").int(0).str("versions").begin_array(1);
            ack.int(1);
        }
        self.greeted = speaks;
        self.out.push(0, frame::HELLO_ACK, 0, &ack.0);
    }

    fn data(&mut self, id: u32, bytes: &[u8]) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if bytes.len() as u64 > stream.incoming {
            return self.fail(id, &Failure::invalid("more DATA than credit"));
        }
        stream.incoming -= bytes.len() as u64;
        let done = match &mut stream.kind {
            Kind::Exec(exec) => match &exec.stdin {
                Some(fd) => exec.inlet.offer(fd.as_raw_fd(), bytes),
                None => bytes.len(),
            },
            Kind::Connect(connection) => connection.offer(bytes),
            Kind::Push(push) => {
                push.pending.extend_from_slice(bytes);
                0
            }
            Kind::Attach(slot) => {
                let slot = *slot;
                return self.attached_data(id, slot, bytes);
            }
            Kind::Pull(_) | Kind::Job | Kind::Freeze { .. } => bytes.len(),
        };
        self.consumed(id, done);
        self.settle_input(id);
    }

    fn host_eof(&mut self, id: u32) {
        match self.streams.get_mut(&id).map(|stream| &mut stream.kind) {
            Some(Kind::Exec(exec)) => exec.inlet.eof = true,
            Some(Kind::Connect(connection)) => connection.host_eof(),
            Some(Kind::Push(push)) => push.eof = true,
            Some(Kind::Attach(slot)) => {
                let slot = *slot;
                return self.attached_eof(id, slot);
            }
            _ => {}
        }
        self.settle_input(id);
    }

    /// After bytes or their end have come in: hand on, close what is finished.
    fn settle_input(&mut self, id: u32) {
        match self.streams.get_mut(&id).map(|stream| &mut stream.kind) {
            Some(Kind::Exec(exec)) if exec.inlet.finished() => exec.stdin = None,
            Some(Kind::Connect(connection)) if connection.ended() => self.end(id, &empty_map()),
            Some(Kind::Push(_)) if !self.filled.contains(&id) => self.filled.push(id),
            _ => {}
        }
    }

    fn consumed(&mut self, id: u32, n: usize) {
        if let Some(credit) = self.streams.get_mut(&id).filter(|_| n > 0).and_then(|stream| stream.consumed(n)) {
            self.out.push(id, frame::CREDIT, 0, &credit.to_le_bytes());
        }
    }

    // Opening and ending streams

    fn open(&mut self, id: u32, payload: &[u8]) {
        if self.streams.contains_key(&id) {
            return self.fail(id, &Failure::invalid("the stream is open"));
        }
        let opened = if self.streams.len() >= STREAMS_MAX {
            Err(Failure::new("too_many_streams", format!("{STREAMS_MAX} streams are open")))
        } else {
            match msgpack::decode(payload) {
                Some(request @ Value::Map(_)) => self.verb(id, &request),
                _ => Err(Failure::invalid("OPEN carries a map")),
            }
        };
        match opened {
            Ok(Opened::Stream(kind)) => {
                let at_once = matches!(kind, Kind::Attach(_) | Kind::Pull(Pull { source: Some(_), .. }));
                self.streams.insert(id, Stream::new(kind));
                if at_once {
                    self.enqueue(id);
                }
                // What was decided while it was being opened had no stream to tell.
                if matches!(self.streams[&id].kind, Kind::Freeze { .. }) {
                    self.freezer();
                }
            }
            Ok(Opened::Done(reply, end)) => {
                self.out.push(id, frame::REPLY, 0, &reply);
                self.out.push(id, frame::END, 0, &end);
            }
            Err(failure) => self.out.push(id, frame::ERROR, 0, &failure.encode()),
        }
    }

    fn end(&mut self, id: u32, payload: &[u8]) {
        if let Some(stream) = self.streams.remove(&id) {
            self.out.push(id, frame::END, 0, payload);
            self.discard(id, stream);
        }
    }

    fn fail(&mut self, id: u32, failure: &Failure) {
        if let Some(stream) = self.streams.remove(&id) {
            self.out.push(id, frame::ERROR, 0, &failure.encode());
            self.discard(id, stream);
        }
    }

    /// Let go of what a stream held, and end what it did.
    fn discard(&mut self, id: u32, stream: Stream) {
        match stream.kind {
            Kind::Exec(mut exec) => {
                if exec.ended.is_none() {
                    exec.kill();
                }
                if let (Some(leaf), Some(machine)) = (exec.leaf.take(), &mut self.machine) {
                    machine.sandbox.give(leaf);
                }
            }
            Kind::Attach(slot) => self.managed.leave(slot, id),
            Kind::Connect(connection) => connection.reset(),
            // Unlinking what was half written can take the disk's time, and letting go of many watches the kernel's.
            Kind::Pull(Pull { source: Some(source), .. }) => self.workers.submit(0, move || {
                drop(source);
                Done::Nothing
            }),
            Kind::Push(Push { sink: Some(sink), user, .. }) => self.workers.submit(0, move || {
                let _ = crate::files::become_user(&user); // without its rights the file may stay
                drop(sink);
                Done::Nothing
            }),
            _ => {}
        }
    }

    // Output

    fn stream_event(&mut self, id: u32, part: u64, events: u32) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let mut done = 0;
        match &mut stream.kind {
            Kind::Exec(exec) => match part {
                STDIN => {
                    if let Some(fd) = &exec.stdin {
                        done = exec.inlet.drain(fd.as_raw_fd());
                    }
                }
                _ => exec.outlets[usize::from(part == STDERR)].event(events),
            },
            Kind::Connect(connection) => {
                if connection.connecting {
                    if events & (OUT | HUP) == 0 {
                        return;
                    }
                    if let Err(failure) = connection.connected() {
                        return self.fail(id, &failure);
                    }
                    self.out.push(id, frame::REPLY, 0, &empty_map());
                }
                if events & (IN | HUP | RDHUP) != 0 {
                    connection.outlet.event(events);
                }
                done = connection.drain();
            }
            Kind::Pull(pull) => pull.ready = true,
            _ => {}
        }
        self.consumed(id, done);
        self.settle_input(id);
        self.enqueue(id);
    }

    fn enqueue(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id).filter(|stream| !stream.queued) {
            stream.queued = true;
            self.line.push_back(id);
        }
    }

    /// One frame or so of each stream in the line, around and around, until the queue to the host is full.
    fn produce(&mut self) {
        while self.out.room() {
            let Some(id) = self.line.pop_front() else { return };
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            stream.queued = false;
            let more = match &mut stream.kind {
                Kind::Exec(exec) => {
                    let more = exec.pump(&mut self.out, id, &mut stream.credit);
                    if let Some(end) = exec.end(None) {
                        self.end(id, &end);
                        continue;
                    }
                    more
                }
                Kind::Connect(connection) => {
                    let flow = if connection.connecting {
                        Ok(false)
                    } else {
                        connection.pump(&mut self.out, id, &mut stream.credit)
                    };
                    match flow {
                        Ok(more) => {
                            if connection.ended() {
                                self.end(id, &empty_map());
                                continue;
                            }
                            more
                        }
                        Err(failure) => {
                            self.fail(id, &failure);
                            continue;
                        }
                    }
                }
                Kind::Attach(slot) => {
                    let slot = *slot;
                    self.pump_attached(id, slot)
                }
                Kind::Pull(_) => self.pull(id),
                Kind::Push(_) | Kind::Job | Kind::Freeze { .. } => false,
            };
            if more {
                self.enqueue(id);
            }
        }
    }
}
