//! What the host says: a session's frames, from its preamble to its end. Not for what is done with a stream (`streams`).

use super::{Agent, STREAMS_MAX};
use crate::channel::{Channel, Input};
use crate::exec::Exec;
use crate::failure::Failure;
use crate::frame::{self, Decoder, Event, Frame};
use crate::msgpack::{self, Value, Writer};
use crate::stream::{Kind, WINDOW_BYTES_MAX};
use std::io;

/// Read at most so much before looking at anything else.
const INPUT_BYTES_MAX: usize = 512 * 1024;

impl Agent {
    /// False when the inherited socket has ended.
    pub(super) fn receive(&mut self) -> io::Result<bool> {
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

    pub(super) fn reconnect(&mut self) {
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
    pub(super) fn end_session(&mut self) {
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
}
