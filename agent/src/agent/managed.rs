//! Managed processes in the loop: started, attached to, read from, told about.

use super::{empty_map, Agent, Opened, MANAGED_ERR, MANAGED_IN, MANAGED_OUT};
use crate::exec::Exec;
use crate::failure::{Failure, Outcome};
use crate::frame;
use crate::managed::{self, Info, Managed, Wanted, STDIN_BYTES_MAX};
use crate::msgpack::{Value, Writer};
use crate::pty;
use crate::stream::{Kind, Pull, Stream};
use crate::sys::{self, EDGE, IN, OUT};
use crate::transfer::Source;
use std::io;
use std::os::fd::AsRawFd;

/// Processes whose pipes are read before anything else is looked at.
const FILLS_MAX: usize = 64;

impl Agent {
    /// A process has been started that is to be managed.
    pub(super) fn manage(&mut self, id: u32, info: Info, exec: Exec, wanted: &Wanted) -> Outcome<Opened> {
        let pid = exec.pid;
        let stdin = info.stdin;
        let slot = self.managed.add(Managed::new(info, exec, wanted));
        if let Err(error) = self.watch_managed(slot) {
            if let Some(managed) = self.managed.get(slot) {
                managed.exec.kill(); // it is reaped, and then known as ended
            }
            return Err(Failure::io(&error, "watch a process"));
        }
        let mut reply = Writer::map(2);
        reply.str("pid").int(pid.into()).str("id").bytes(&wanted.id);
        if !wanted.attach {
            return Ok(Opened::Done(reply.0.clone(), reply.0));
        }
        if let Some(managed) = self.managed.get(slot) {
            managed.enter(id, 0, true, stdin);
        }
        self.out.push(id, frame::REPLY, 0, &reply.0);
        Ok(Opened::Stream(Kind::Attach(slot)))
    }

    fn watch_managed(&mut self, slot: u32) -> io::Result<()> {
        let Some(managed) = self.managed.get(slot) else { return Ok(()) };
        let fds = managed.exec.outlets.iter().zip([MANAGED_OUT, MANAGED_ERR]);
        let fds = fds.filter_map(|(outlet, part)| outlet.fd.as_ref().map(|fd| (fd, IN, part)));
        for (fd, events, part) in fds.chain(managed.exec.stdin.as_ref().map(|fd| (fd, OUT, MANAGED_IN))) {
            sys::set_nonblocking(fd.as_raw_fd())?;
            self.epoll.add(fd.as_raw_fd(), events | EDGE, part << 32 | u64::from(slot))?;
        }
        Ok(())
    }

    pub(super) fn managed_event(&mut self, slot: u32, part: u64, events: u32) {
        let Some(managed) = self.managed.get(slot) else { return };
        if part == MANAGED_IN {
            self.drain_managed(slot);
        } else {
            managed.exec.outlets[usize::from(part == MANAGED_ERR)].event(events);
            self.managed.enqueue(slot);
        }
    }

    /// Go on with what waits for its stdin.
    fn drain_managed(&mut self, slot: u32) {
        let Some(managed) = self.managed.get(slot) else { return };
        let Some(fd) = managed.exec.stdin.as_ref().map(AsRawFd::as_raw_fd) else { return };
        let mut done = managed.exec.inlet.drain(fd);
        let mut paid = Vec::new();
        while done > 0 {
            let Some(first) = managed.writers.front_mut() else { break };
            let n = first.1.min(done);
            paid.push((first.0, n));
            (first.1, done) = (first.1 - n, done - n);
            if first.1 == 0 {
                managed.writers.pop_front();
            }
        }
        if managed.exec.inlet.finished() {
            managed.exec.stdin = None;
        }
        for (stream, n) in paid {
            self.consumed(stream, n);
        }
    }

    /// Read what processes have said, each in turn; then their readers have something to be sent.
    pub(super) fn fill(&mut self) {
        for _ in 0..self.managed.ready.len().min(FILLS_MAX) {
            let Some(slot) = self.managed.ready.pop_front() else { return };
            let Some(managed) = self.managed.get(slot) else { continue };
            managed.queued = false;
            let before = managed.log.end();
            let more = self.managed.fill(slot);
            let over = self.managed.settle(slot).map(|managed| managed.exec.leaf.take());
            if over.is_none() && more {
                self.managed.enqueue(slot);
            }
            let ended = over.is_some();
            if let (Some(leaf), Some(machine)) = (over.flatten(), &mut self.machine) {
                machine.sandbox.give(leaf);
            }
            let Some(managed) = self.managed.get(slot) else { continue };
            if managed.log.end() > before || ended {
                let streams: Vec<u32> = managed.readers.iter().map(|reader| reader.stream).collect();
                streams.into_iter().for_each(|stream| self.enqueue(stream));
            }
        }
    }

    /// Send a reader what he has not had, one frame at most; true when there is more.
    pub(super) fn pump_attached(&mut self, id: u32, slot: u32) -> bool {
        let Some(Stream { credit, .. }) = self.streams.get_mut(&id) else { return false };
        let Some(managed) = self.managed.get(slot) else { return false };
        let Some((at, output)) = managed.reader(id).map(|reader| (reader.at, reader.output)) else { return false };
        let mut sent = 0;
        if output {
            let (channel, bytes) = managed.piece(at, frame::PAYLOAD_MAX.min(*credit as usize));
            sent = bytes.len() as u64;
            if sent > 0 {
                self.out.push(id, frame::DATA, channel, bytes);
                *credit -= sent;
            }
        }
        let at = at + sent;
        if let Some(reader) = managed.reader(id) {
            reader.at = at;
        }
        let left = output && at < managed.log.end();
        if !left {
            if let Some(end) = managed.exec.end(Some(managed.log.end())) {
                if output {
                    for channel in [1, 2] {
                        self.out.push(id, frame::EOF, channel, b"");
                    }
                }
                self.end(id, &end);
                return false;
            }
        }
        let more = left && *credit > 0;
        if sent > 0 {
            self.managed.enqueue(slot); // it may have been held up by this reader
        }
        more
    }

    // What readers do

    pub(super) fn attached_data(&mut self, id: u32, slot: u32, bytes: &[u8]) {
        let Some(managed) = self.managed.get(slot) else { return };
        let takes = managed.reader(id).is_some_and(|reader| reader.stdin);
        let done = match &managed.exec.stdin {
            Some(fd) if takes => managed.exec.inlet.offer(fd.as_raw_fd(), bytes),
            _ => bytes.len(),
        };
        if done < bytes.len() {
            managed.writers.push_back((id, bytes.len() - done));
        }
        if managed.exec.inlet.finished() {
            managed.exec.stdin = None;
        }
        self.consumed(id, done);
    }

    pub(super) fn attached_eof(&mut self, id: u32, slot: u32) {
        let Some(managed) = self.managed.get(slot) else { return };
        if !managed.reader(id).is_some_and(|reader| reader.stdin) {
            return;
        }
        if managed.info.terminal {
            if let Some(fd) = &managed.exec.stdin {
                managed.exec.inlet.offer(fd.as_raw_fd(), &[pty::END_OF_INPUT]);
            }
            return;
        }
        managed.exec.inlet.eof = true;
        if managed.exec.inlet.finished() {
            managed.exec.stdin = None;
        }
    }

    pub(super) fn resize(&mut self, slot: u32, payload: &[u8]) {
        let &[a, b, c, d] = payload else { return };
        let (rows, columns) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
        if let Some(managed) = self.managed.get(slot).filter(|managed| managed.info.terminal) {
            if let Some(fd) = managed.exec.stdin.as_ref().filter(|_| rows > 0 && columns > 0) {
                let _ = pty::resize(fd.as_raw_fd(), rows, columns);
            }
        }
    }

    pub(super) fn detach(&mut self, id: u32, slot: u32) {
        let mut end = Writer::map(2);
        let at = self.managed.get(slot).and_then(|managed| managed.reader(id)).map_or(0, |reader| reader.at);
        end.str("detached").bool(true).str("offset").int(at as i64);
        self.end(id, &end.0);
    }

    // Verbs

    pub(super) fn attach(&mut self, id: u32, request: &Value) -> Outcome<Opened> {
        let slot = self.managed.known(request.get("id"))?;
        let Some(managed) = self.managed.get(slot) else { return Err(Failure::invalid("it is gone")) };
        let (stdin, output) = (request.get("stdin").bool(false), request.get("output").bool(true));
        if stdin && !managed.info.stdin {
            return Err(Failure::invalid("it was started without stdin"));
        }
        if stdin && managed.writers.iter().map(|writer| writer.1).sum::<usize>() > STDIN_BYTES_MAX {
            return Err(Failure::invalid("it does not read what waits for its stdin already"));
        }
        let from = match request.get("from") {
            Value::Nil => managed.log.end(),
            Value::Int(from) if (0..=managed.log.end() as i64).contains(from) => *from as u64,
            _ => return Err(Failure::invalid(format!("from is 0 to {}, where it is now", managed.log.end()))),
        };
        let gap = managed.enter(id, from, output, stdin);
        let mut reply = Writer::map(7);
        reply.str("pid").int(managed.exec.pid.into()).str("id").bytes(&managed.info.id);
        reply.str("running").bool(managed.exec.over().is_none()).str("start").int(managed.log.start() as i64);
        reply.str("offset").int((from + gap) as i64).str("gap").int(gap as i64).str("tty").bool(managed.info.terminal);
        self.out.push(id, frame::REPLY, 0, &reply.0);
        self.managed.enqueue(slot);
        Ok(Opened::Stream(Kind::Attach(slot)))
    }

    pub(super) fn processes(&mut self, id: u32) -> Opened {
        self.out.push(id, frame::REPLY, 0, &empty_map());
        let (chunk, source) = (self.managed.describe(), Box::new(Listed) as Box<dyn Source>);
        Opened::Stream(Kind::Pull(Pull { source: Some(source), chunk, last: true, ..Pull::default() }))
    }

    pub(super) fn signal_managed(&mut self, request: &Value) -> Outcome<()> {
        let slot = self.managed.known(request.get("id"))?;
        let signal = match request.get("signal") {
            Value::Int(signal @ 1..=64) => *signal as i32,
            _ => return Err(Failure::invalid("signal is 1 to 64")),
        };
        match self.managed.get(slot) {
            Some(managed) if managed.exec.ended.is_none() => managed.exec.signal(signal),
            _ => return Err(Failure::new("ended", "it has ended")),
        }
        Ok(())
    }

    pub(super) fn forget(&mut self, request: &Value) -> Outcome<()> {
        let one = std::slice::from_ref(request.get("id"));
        let ids = match request.get("ids") {
            Value::Array(ids) => &ids[..],
            _ => one,
        };
        let mut first = Ok(());
        for id in ids {
            match self.managed.forget(id) {
                Ok(readers) => {
                    let failure = Failure::new("not_found", "it was forgotten");
                    readers.into_iter().for_each(|stream| self.fail(stream, &failure));
                }
                Err(failure) => first = first.and(Err(failure)),
            }
        }
        first
    }

    pub(super) fn limits(&mut self, request: &Value) -> Outcome<()> {
        let count = |key: &str| match request.get(key) {
            Value::Nil => Ok(None),
            Value::Int(n) if *n > 0 => Ok(Some(*n as u64)),
            _ => Err(Failure::invalid(format!("{key} is a number above 0"))),
        };
        let (pids, memory, rate) = (count("pids")?, count("memory_bytes")?, count("output_bytes_per_s")?);
        if pids.is_some() || memory.is_some() {
            self.machine()?.sandbox.limit(pids, memory).map_err(crate::failure::at("set limits"))?;
        }
        if let Some(bytes) = count("disk_bytes")? {
            self.machine()?;
            crate::quota::limit(bytes).map_err(crate::failure::at("set the limit of the disk"))?;
        }
        self.managed.limit_rate(rate);
        Ok(())
    }

    pub(super) fn info(request: &Value, wanted: &Wanted, user: &crate::users::User, stdin: bool) -> Info {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Info {
            id: wanted.id.clone(),
            tag: wanted.tag.clone(),
            argv: managed::shown(request.get("argv")),
            cwd: request.get("cwd").bytes().map_or_else(|| user.home.clone(), <[u8]>::to_vec),
            user: user.name.clone(),
            terminal: wanted.terminal.is_some(),
            stdin,
            started_at: since.as_secs_f64(),
        }
    }
}

/// A listing that was made whole.
struct Listed;

impl Source for Listed {
    fn fill(&mut self, _: &mut Vec<u8>) -> Outcome<bool> {
        Ok(true)
    }

    fn end(&self) -> Vec<u8> {
        empty_map()
    }
}
