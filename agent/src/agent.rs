//! The agent: one thread, one epoll, every stream of the session. What verbs do is in their modules; this is what happens
//! when. It blocks in `epoll_wait` with no timeout unless an exec has a deadline.

use crate::cgroup::Sandbox;
use crate::channel::{Channel, Input};
use crate::connect::Connection;
use crate::exec::{self, Environment, Exec};
use crate::failure::{at, Failure, Outcome};
use crate::files::{self, Credentials};
use crate::frame::{self, Decoder, Event, Frame};
use crate::msgpack::{self, Value, Writer};
use crate::out::Out;
use crate::restore;
use crate::spawn::Spawner;
use crate::stream::{Inlet, Kind, Outlet, Pull, Push, Stream, CREDIT_BYTES, WINDOW_BYTES_MAX};
use crate::sys::{self, Epoll, EDGE, HUP, IN, OUT, PRI, RDHUP};
use crate::transfer::{FileSource, ListSource, Sink, Source};
use crate::users::{Cache, User};
use crate::worker::Workers;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
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
const CHANNEL: u64 = 0x10;
const ACCEPT: u64 = 0x11;
const CHILDREN: u64 = 0x12;
const WORKERS: u64 = 0x13;
const FREEZER: u64 = 0x14;

/// What a worker answers.
enum Done {
    Answer(Outcome<Vec<u8>>),
    /// The payload of REPLY the first time, the source, a chunk, and whether it is the last.
    Pulled(Outcome<(Option<Vec<u8>>, Box<dyn Source>, Vec<u8>, bool)>),
    Opened(Outcome<Box<Sink>>),
    Pushed(Outcome<(Box<Sink>, Vec<u8>)>),
    Committed(Outcome<Vec<u8>>),
    Nothing,
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
    pub boot_id: String,
}

pub struct Agent {
    epoll: Epoll,
    channel: Channel,
    decoder: Option<Decoder>,
    out: Out,
    workers: Workers<Done>,
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
    environment: Environment,
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
            spawner: Spawner::new(machine.is_some())?,
            children: sys::child_signals()?,
            null,
            machine,
            users: Cache::default(),
            streams: BTreeMap::new(),
            line: VecDeque::new(),
            filled: Vec::new(),
            services: Vec::new(),
            environment: Vec::new(),
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
            self.produce();
            if self.writable && !self.out.is_empty() {
                self.out.flush(|bytes| self.channel.write(bytes))?;
                self.set_writable(self.out.is_empty())?;
            }
            if self.power_off && self.out.is_empty() {
                return Ok(());
            }
        }
    }

    fn timeout_ms(&self) -> i32 {
        if self.readable || (!self.line.is_empty() && self.out.room()) {
            return 0;
        }
        let deadlines = self.streams.values().filter_map(|stream| match &stream.kind {
            Kind::Exec(exec) => exec.wake_at(),
            _ => None,
        });
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
            ACCEPT => {
                if self.channel.accept(&self.epoll, CHANNEL << 32).unwrap_or(false) {
                    self.end_session();
                    (self.readable, self.writable) = (true, true);
                }
            }
            CHILDREN => self.reap(),
            WORKERS => {
                for (token, done) in self.workers.done() {
                    self.worker_done(token, done);
                }
            }
            FREEZER => self.freezer(),
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
                    self.end_session();
                    decoder.forget();
                    open = !matches!(self.channel, Channel::Socket(_));
                    break;
                }
            }
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

    /// Cancel every stream; services live on.
    fn end_session(&mut self) {
        self.session = self.session.wrapping_add(1);
        self.greeted = false;
        self.out.end();
        self.line.clear();
        for (_, stream) in std::mem::take(&mut self.streams) {
            self.discard(stream);
        }
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
                let Ok(bytes) = <[u8; 4]>::try_from(frame.payload) else { return self.fail(id, &Failure::invalid("CREDIT is a u32")) };
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.credit = (stream.credit + u64::from(u32::from_le_bytes(bytes))).min(WINDOW_BYTES_MAX);
                    self.enqueue(id);
                }
            }
            (frame::CANCEL, _) => self.fail(id, &Failure::new("cancelled", "cancelled by the host")),
            (frame::SIGNAL, _) => {
                if let (Some(Kind::Exec(exec)), [signal @ 1..=64]) = (self.streams.get(&id).map(|s| &s.kind), frame.payload) {
                    exec.signal(i32::from(*signal));
                }
            }
            _ => {}
        }
    }

    fn hello(&mut self, payload: &[u8]) {
        let request = msgpack::decode(payload).unwrap_or(Value::Nil);
        let speaks = matches!(request.get("versions"), Value::Array(versions) if versions.contains(&Value::Int(1)));
        let mut ack = Writer::map(if speaks { 5 } else { 2 });
        if speaks {
            let machine: &[&str] = if self.machine.is_some() { &["freeze", "post_restore", "set_time", "poweroff", "cgroup"] } else { &[] };
            ack.str("version").int(1).str("agent").str(crate::VERSION);
            ack.str("boot_id").str(self.machine.as_ref().map_or("", |machine| &machine.boot_id));
            ack.str("capabilities").begin_array(2 + machine.len());
            ack.str("service").str("connect");
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
                self.streams.insert(id, Stream::new(kind));
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
            self.discard(stream);
        }
    }

    fn fail(&mut self, id: u32, failure: &Failure) {
        if let Some(stream) = self.streams.remove(&id) {
            self.out.push(id, frame::ERROR, 0, &failure.encode());
            self.discard(stream);
        }
    }

    /// Let go of what a stream held, and end what it did.
    fn discard(&mut self, stream: Stream) {
        match stream.kind {
            Kind::Exec(mut exec) => {
                if exec.ended.is_none() {
                    exec.kill();
                }
                if let (Some(leaf), Some(machine)) = (exec.leaf.take(), &mut self.machine) {
                    machine.sandbox.give(leaf);
                }
            }
            // Unlinking what was half written can take the disk's time.
            Kind::Push(Push { sink: Some(sink), .. }) => self.workers.submit(0, move || {
                drop(sink);
                Done::Nothing
            }),
            _ => {}
        }
    }

    fn verb(&mut self, id: u32, request: &Value) -> Outcome<Opened> {
        let verb = request.get("verb").bytes().unwrap_or_default();
        let done = |reply| Ok(Opened::Done(reply, empty_map()));
        match verb {
            b"exec" => self.exec(id, request),
            b"read" | b"list" | b"write" => self.transfer(id, verb, request),
            b"stat" | b"mkdir" | b"move" | b"remove" => self.file(id, verb, request),
            b"connect" => {
                let mut connection = Connection::open(request)?;
                self.epoll.add(connection.fd(), IN | OUT | RDHUP | EDGE, self.token(id, SOCKET)).map_err(at("connect"))?;
                if !connection.connecting {
                    connection.connected()?;
                    self.out.push(id, frame::REPLY, 0, &empty_map());
                }
                Ok(Opened::Stream(Kind::Connect(connection)))
            }
            b"metrics" => done(crate::metrics::reply(self.machine.as_ref().map(|machine| &machine.sandbox))),
            b"ping" => done(empty_map()),
            b"set_env" => {
                self.environment = exec::environment(request.get("env"))?;
                done(empty_map())
            }
            b"set_time" => {
                self.machine()?;
                let time = request.get("unix_ns").int().ok_or_else(|| Failure::invalid("unix_ns is a number"))?;
                sys::set_wall_clock(time).map_err(at("set the clock"))?;
                done(empty_map())
            }
            b"freeze" => {
                self.machine()?.sandbox.set_frozen(true).map_err(at("freeze"))?;
                let (sync, drop_caches) = (request.get("sync").bool(true), request.get("drop_caches").bool(false));
                Ok(Opened::Stream(Kind::Freeze { sync, drop_caches }))
            }
            b"thaw" => {
                self.machine()?.sandbox.set_frozen(false).map_err(at("thaw"))?;
                done(empty_map())
            }
            b"post_restore" => self.post_restore(request).and_then(done),
            b"poweroff" => {
                self.machine()?;
                self.power_off = true;
                done(empty_map())
            }
            _ => Err(Failure::new("unknown_verb", format!("there is no verb {:?}", String::from_utf8_lossy(verb)))),
        }
    }

    fn token(&self, id: u32, part: u64) -> u64 {
        u64::from(self.session & 0xFF_FFFF) << 40 | part << 32 | u64::from(id)
    }

    fn machine(&mut self) -> Outcome<&mut Machine> {
        self.machine.as_mut().ok_or_else(|| Failure::invalid("this agent serves a process, not a machine"))
    }

    fn post_restore(&mut self, request: &Value) -> Outcome<Vec<u8>> {
        let environment = exec::environment(request.get("env"))?;
        let machine = self.machine.as_mut().ok_or_else(|| Failure::invalid("this agent serves a process, not a machine"))?;
        let restore = restore::Request::parse(request)?;
        restore.apply(&machine.random)?;
        machine.boot_id = restore.boot_id.to_owned();
        self.environment = environment;
        for service in self.services.iter().filter(|service| service.restore_signal != 0) {
            // Pending until the thaw, and then the first thing it sees.
            sys::kill(service.pid, service.restore_signal);
        }
        if restore.thaw && machine.sandbox.frozen {
            machine.sandbox.set_frozen(false).map_err(at("thaw"))?;
        }
        Ok(empty_map())
    }

    /// Who a verb runs as. Outside a machine only the agent itself.
    fn user(&mut self, request: &Value) -> Outcome<(User, bool)> {
        let wanted = request.get("user");
        if self.machine.is_some() {
            return Ok((self.users.get().find(wanted)?, true));
        }
        let own = self.users.get().find(&Value::Int(sys::euid().into()))?;
        let same = match wanted {
            Value::Nil => true,
            other => self.users.get().find(other)?.uid == own.uid,
        };
        if same { Ok((own, false)) } else { Err(Failure::invalid("this agent cannot become another user")) }
    }

    fn credentials(&mut self, request: &Value) -> Outcome<Credentials> {
        let (user, switch) = self.user(request)?;
        Ok(switch.then_some(user))
    }

    // Processes

    fn exec(&mut self, id: u32, request: &Value) -> Outcome<Opened> {
        if self.machine.as_ref().is_some_and(|machine| machine.sandbox.frozen) {
            return Err(Failure::invalid("frozen: nothing starts before thaw or post_restore"));
        }
        let timeout = exec::timeout(request)?;
        let (user, switch) = self.user(request)?;
        let mut command = exec::command(request, &user, switch, &self.environment)?;
        let service = request.get("service");
        let restore_signal = match service.get("restore_signal") {
            Value::Nil => 0,
            Value::Int(signal @ 1..=64) => *signal as i32,
            _ => return Err(Failure::invalid("restore_signal is 1 to 64")),
        };
        let is_service = *service != Value::Nil;
        let leaf = match &mut self.machine {
            Some(machine) => Some(machine.sandbox.take().map_err(at("make a cgroup"))?),
            None => None,
        };
        command.cgroup = leaf.as_ref().map(crate::cgroup::Leaf::fd);
        let null = self.null.as_raw_fd();
        let wants_stdin = request.get("stdin").bool(false) && !is_service;
        let pipe = |want: bool| if want { sys::pipe().map(Some).map_err(at("pipe")) } else { Ok(None) };
        let (stdin, stdout, stderr) = (pipe(wants_stdin)?, pipe(!is_service)?, pipe(!is_service)?);
        let end = |pipe: Option<&OwnedFd>| pipe.map_or(null, AsRawFd::as_raw_fd);
        command.fds = [end(stdin.as_ref().map(|p| &p.0)), end(stdout.as_ref().map(|p| &p.1)), end(stderr.as_ref().map(|p| &p.1))];

        let pid = match self.spawner.spawn(&command) {
            Ok(pid) => pid,
            Err((step, error)) => {
                if let (Some(leaf), Some(machine)) = (leaf, &mut self.machine) {
                    machine.sandbox.give(leaf);
                }
                return Err(exec::failed(request, step, &error));
            }
        };
        let (Some(stdout), Some(stderr)) = (stdout, stderr) else {
            let name = service.get("name").bytes().unwrap_or_default().to_vec();
            self.services.push(Service { name, pid, restore_signal });
            return Ok(Opened::Done(pid_map(pid), pid_map(pid)));
        };
        let mut exec = Exec {
            pid,
            leaf,
            group_kill: request.get("group_kill").bool(true),
            stdin: stdin.map(|(_, writer)| writer),
            inlet: Inlet::default(),
            outlets: [Outlet::new(stdout.0, 1), Outlet::new(stderr.0, 2)],
            ended: None,
            timed_out: false,
            deadline: timeout.map(|timeout| Instant::now() + timeout),
            turn: 1,
        };
        if let Err(error) = self.watch(id, &mut exec) {
            exec.kill();
            return Err(Failure::io(&error, "watch a process"));
        }
        self.out.push(id, frame::REPLY, 0, &pid_map(pid));
        Ok(Opened::Stream(Kind::Exec(exec)))
    }

    fn watch(&self, id: u32, exec: &mut Exec) -> io::Result<()> {
        let add = |fd: RawFd, events: u32, part: u64| {
            sys::set_nonblocking(fd)?;
            self.epoll.add(fd, events | EDGE, self.token(id, part))
        };
        for (outlet, part) in exec.outlets.iter().zip([STDOUT, STDERR]) {
            if let Some(fd) = &outlet.fd {
                add(fd.as_raw_fd(), IN, part)?;
            }
        }
        if let Some(fd) = &exec.stdin {
            add(fd.as_raw_fd(), OUT, STDIN)?;
        }
        Ok(())
    }

    fn reap(&mut self) {
        let mut siginfo = [0; 128];
        let _ = sys::read(self.children.as_raw_fd(), &mut siginfo);
        while let Some(ended) = sys::reap(-1, false) {
            let exec = self.streams.iter_mut().find_map(|(id, stream)| match &mut stream.kind {
                Kind::Exec(exec) if exec.pid == ended.pid && exec.ended.is_none() => Some((*id, exec)),
                _ => None,
            });
            if let Some((id, exec)) = exec {
                exec.reaped(ended);
                self.enqueue(id);
            } else if let Some(at) = self.services.iter().position(|service| service.pid == ended.pid) {
                let service = self.services.swap_remove(at);
                let mut event = Writer::map(4);
                event.str("event").str("service_exited").str("name").bytes(&service.name);
                event.str("exit_code").opt_int(ended.exit_code.map(i64::from)).str("signal").opt_int(ended.signal.map(i64::from));
                self.out.push(0, frame::EVENT, 0, &event.0);
            }
        }
    }

    fn expire(&mut self) {
        let mut now = None;
        let mut woken = Vec::new();
        for (id, stream) in &mut self.streams {
            if let Kind::Exec(exec) = &mut stream.kind {
                let Some(at) = exec.wake_at() else { continue };
                let now = *now.get_or_insert_with(Instant::now);
                if at <= now {
                    exec.wake(now);
                    woken.push(*id);
                }
            }
        }
        woken.into_iter().for_each(|id| self.enqueue(id));
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
                    if let Some(end) = exec.end() {
                        self.end(id, &end);
                        continue;
                    }
                    more
                }
                Kind::Connect(connection) => {
                    let flow = if connection.connecting { Ok(false) } else { connection.pump(&mut self.out, id, &mut stream.credit) };
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
                Kind::Pull(_) => self.pull(id),
                Kind::Push(_) | Kind::Job | Kind::Freeze { .. } => false,
            };
            if more {
                self.enqueue(id);
            }
        }
    }

    // Files

    fn submit(&self, id: u32, job: impl FnOnce() -> Done + Send + 'static) {
        self.workers.submit(u64::from(self.session) << 32 | u64::from(id), job);
    }

    fn file(&mut self, id: u32, verb: &[u8], request: &Value) -> Outcome<Opened> {
        let user = self.credentials(request)?;
        let flag = |key: &str, default: bool| request.get(key).bool(default);
        let mode = mode(request.get("mode"))?;
        let answer = |result: Outcome<()>| result.map(|()| empty_map());
        let act: Box<dyn FnOnce() -> Outcome<Vec<u8>> + Send> = if verb == b"move" {
            let (from, to) = (files::path(request.get("from"))?, files::path(request.get("to"))?);
            let overwrite = flag("overwrite", true);
            Box::new(move || answer(files::rename(&from, &to, overwrite)))
        } else {
            let path = files::path(request.get("path"))?;
            match verb {
                b"stat" => {
                    let follow = flag("follow", true);
                    Box::new(move || files::stat(&path, follow))
                }
                b"mkdir" => {
                    let (parents, exist_ok) = (flag("parents", true), flag("exist_ok", true));
                    Box::new(move || answer(files::mkdir(&path, parents, mode.unwrap_or(0o755), exist_ok)))
                }
                _ => {
                    let (recursive, missing_ok) = (flag("recursive", false), flag("missing_ok", false));
                    Box::new(move || answer(files::remove(&path, recursive, missing_ok)))
                }
            }
        };
        self.submit(id, move || Done::Answer(files::become_user(&user).and_then(|()| act())));
        Ok(Opened::Stream(Kind::Job))
    }

    fn transfer(&mut self, id: u32, verb: &[u8], request: &Value) -> Outcome<Opened> {
        let user = self.credentials(request)?;
        let path = files::path(request.get("path"))?;
        let count = |key: &str| match request.get(key) {
            Value::Nil => Ok(None),
            Value::Int(n) if *n >= 0 => Ok(Some(*n as u64)),
            _ => Err(Failure::invalid(format!("{key} is a number, not below 0"))),
        };
        if verb == b"write" {
            let (mode, parents, size) = (mode(request.get("mode"))?, request.get("parents").bool(true), count("size")?);
            self.submit(id, move || {
                let sink = files::become_user(&user).and_then(|()| Sink::create(&path, mode, parents, size));
                Done::Opened(sink.map(Box::new))
            });
            return Ok(Opened::Stream(Kind::Push(Push::default())));
        }
        let (offset, length, depth) = (count("offset")?.unwrap_or(0), count("length")?, count("depth")?.unwrap_or(1));
        let read = verb == b"read";
        self.submit(id, move || {
            let open = || {
                files::become_user(&user)?;
                let (mut source, reply): (Box<dyn Source>, _) = if read {
                    let (source, reply) = FileSource::open(&path, offset, length)?;
                    (Box::new(source), reply)
                } else {
                    (Box::new(ListSource::open(&path, depth as usize)?), empty_map())
                };
                let mut chunk = Vec::new();
                let last = source.fill(&mut chunk)?;
                Ok((Some(reply), source, chunk, last))
            };
            Done::Pulled(open())
        });
        Ok(Opened::Stream(Kind::Pull(Pull::default())))
    }

    /// Send of the chunk at hand what credit allows, one frame at most; true when there is more.
    fn pull(&mut self, id: u32) -> bool {
        let Some(Stream { kind: Kind::Pull(pull), credit, .. }) = self.streams.get_mut(&id) else { return false };
        if pull.source.is_none() {
            return false; // a worker is at it
        }
        let n = (pull.chunk.len() - pull.at).min(frame::PAYLOAD_MAX).min(*credit as usize);
        if n > 0 {
            self.out.push(id, frame::DATA, 0, &pull.chunk[pull.at..pull.at + n]);
            *credit -= n as u64;
            pull.at += n;
        }
        if pull.at < pull.chunk.len() {
            return *credit > 0;
        }
        let Some(mut source) = pull.source.take() else { return false };
        if pull.last {
            self.out.push(id, frame::EOF, 0, b"");
            self.end(id, &source.end());
            return false;
        }
        let mut chunk = std::mem::take(&mut pull.chunk);
        self.submit(id, move || Done::Pulled(source.fill(&mut chunk).map(|last| (None, source, chunk, last))));
        false
    }

    /// Hand what has come in to a worker, if none is at it.
    fn push_on(&mut self, id: u32) {
        let Some(Stream { kind: Kind::Push(push), .. }) = self.streams.get_mut(&id) else { return };
        if push.pending.is_empty() && !push.eof {
            return;
        }
        let Some(mut sink) = push.sink.take() else { return };
        let bytes = std::mem::replace(&mut push.pending, std::mem::take(&mut push.spare));
        let last = push.eof;
        self.submit(id, move || {
            let written = sink.write(&bytes);
            if last {
                return Done::Committed(written.and_then(|()| sink.commit()));
            }
            Done::Pushed(written.map(|()| (sink, bytes)))
        });
    }

    fn worker_done(&mut self, token: u64, done: Done) {
        let id = token as u32;
        if token >> 32 != u64::from(self.session) {
            return; // of an ended session: a sink among it unlinks itself
        }
        let wide = self.streams.len() <= PUSH_WINDOWS_MAX;
        let Some(stream) = self.streams.get_mut(&id) else { return };
        match (done, &mut stream.kind) {
            (Done::Answer(Ok(reply)), _) => {
                self.out.push(id, frame::REPLY, 0, &reply);
                self.end(id, &empty_map());
            }
            (Done::Pulled(Ok((reply, source, chunk, last))), Kind::Pull(pull)) => {
                *pull = Pull { source: Some(source), chunk, at: 0, last };
                if let Some(reply) = reply {
                    self.out.push(id, frame::REPLY, 0, &reply);
                }
                self.enqueue(id);
            }
            (Done::Opened(Ok(sink)), Kind::Push(push)) => {
                push.sink = Some(sink);
                self.out.push(id, frame::REPLY, 0, &empty_map());
                if wide {
                    stream.incoming += PUSH_WINDOW_BYTES - CREDIT_BYTES;
                    let extra = (PUSH_WINDOW_BYTES - CREDIT_BYTES) as u32;
                    self.out.push(id, frame::CREDIT, 0, &extra.to_le_bytes());
                }
                self.push_on(id);
            }
            (Done::Pushed(Ok((sink, mut buffer))), Kind::Push(push)) => {
                let n = buffer.len();
                buffer.clear();
                (push.sink, push.spare) = (Some(sink), buffer);
                self.consumed(id, n);
                self.push_on(id);
            }
            (Done::Committed(Ok(end)), _) => self.end(id, &end),
            (
                Done::Answer(Err(failure))
                | Done::Pulled(Err(failure))
                | Done::Opened(Err(failure))
                | Done::Pushed(Err(failure))
                | Done::Committed(Err(failure)),
                _,
            ) => self.fail(id, &failure),
            _ => {}
        }
    }

    // Freezing

    /// The kernel may have finished freezing: answer those who wait for it.
    fn freezer(&mut self) {
        if !self.machine.as_ref().is_some_and(|machine| machine.sandbox.frozen && machine.sandbox.is_frozen()) {
            return;
        }
        let waiting: Vec<(u32, bool, bool)> = self
            .streams
            .iter()
            .filter_map(|(id, stream)| match stream.kind {
                Kind::Freeze { sync, drop_caches } => Some((*id, sync, drop_caches)),
                _ => None,
            })
            .collect();
        for (id, sync, drop_caches) in waiting {
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.kind = Kind::Job;
            }
            self.submit(id, move || {
                if sync || drop_caches {
                    // SAFETY: takes nothing, cannot fail.
                    unsafe { libc::sync() };
                }
                if drop_caches {
                    let _ = std::fs::write("/proc/sys/vm/drop_caches", "3");
                }
                let mut reply = Writer::map(1);
                reply.str("frozen").bool(true);
                Done::Answer(Ok(reply.0))
            });
        }
    }
}

fn mode(value: &Value) -> Outcome<Option<u32>> {
    match value {
        Value::Nil => Ok(None),
        Value::Int(mode @ 0..=0o7777) => Ok(Some(*mode as u32)),
        _ => Err(Failure::invalid("mode is 0 to 0o7777")),
    }
}
