//! The agent: one thread, one epoll, every stream of the session. This is the loop; `session` is what the host says,
//! `streams` what each stream comes to; `processes`, `files`, `trees`, `verbs` are what happens for whom, and what is done is
//! in the modules of the verbs. It blocks in `epoll_wait` with no timeout unless an exec has a deadline.

mod files;
mod managed;
mod processes;
mod session;
mod streams;
mod trees;
mod verbs;

use crate::cgroup::Sandbox;
use crate::channel::Channel;
use crate::exec::Environment;
use crate::failure::Outcome;
use crate::frame::Decoder;
use crate::fsfreeze::Disks;
use crate::managed::Table;
use crate::msgpack::Writer;
use crate::out::Out;
use crate::restore::Names;
use crate::spawn::Spawner;
use crate::stream::{Kind, Stream};
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
}
