//! The streams of a session: opened, fed, drained in turn, ended. Not for what a verb does (`verbs` and its modules), nor
//! for the frames they come in (`session`).

use super::{empty_map, Agent, Done, Opened, STDERR, STDIN, STREAMS_MAX};
use crate::failure::Failure;
use crate::frame;
use crate::msgpack::{self, Value};
use crate::stream::{Kind, Pull, Push, Stream};
use crate::sys::{HUP, IN, OUT, RDHUP};
use std::os::fd::AsRawFd;

impl Agent {
    pub(super) fn data(&mut self, id: u32, bytes: &[u8]) {
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

    pub(super) fn host_eof(&mut self, id: u32) {
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

    pub(super) fn consumed(&mut self, id: u32, n: usize) {
        if let Some(credit) = self.streams.get_mut(&id).filter(|_| n > 0).and_then(|stream| stream.consumed(n)) {
            self.out.push(id, frame::CREDIT, 0, &credit.to_le_bytes());
        }
    }

    // Opening and ending streams

    pub(super) fn open(&mut self, id: u32, payload: &[u8]) {
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

    pub(super) fn end(&mut self, id: u32, payload: &[u8]) {
        if let Some(stream) = self.streams.remove(&id) {
            self.out.push(id, frame::END, 0, payload);
            self.discard(id, stream);
        }
    }

    pub(super) fn fail(&mut self, id: u32, failure: &Failure) {
        if let Some(stream) = self.streams.remove(&id) {
            self.out.push(id, frame::ERROR, 0, &failure.encode());
            self.discard(id, stream);
        }
    }

    /// Let go of what a stream held, and end what it did.
    pub(super) fn discard(&mut self, id: u32, stream: Stream) {
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

    pub(super) fn stream_event(&mut self, id: u32, part: u64, events: u32) {
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

    pub(super) fn enqueue(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id).filter(|stream| !stream.queued) {
            stream.queued = true;
            self.line.push_back(id);
        }
    }

    /// One frame or so of each stream in the line, around and around, until the queue to the host is full.
    pub(super) fn produce(&mut self) {
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
