//! File verbs in the loop: what goes to a worker, what comes back, and the bytes in between.

use super::{empty_map, Agent, Done, Opened, Pulled, PUSH_WINDOWS_MAX, PUSH_WINDOW_BYTES, SOURCE};
use crate::failure::{Failure, Outcome};
use crate::files::{self, Credentials};
use crate::frame;
use crate::msgpack::Value;
use crate::stream::{Kind, Pull, Push, Stream, CREDIT_BYTES};
use crate::sys::{EDGE, IN};
use crate::transfer::{FileSink, FileSource, ListSource, Sink, Source};

impl Agent {
    pub(super) fn submit(&self, id: u32, job: impl FnOnce() -> Done + Send + 'static) {
        self.workers.submit(u64::from(self.session) << 32 | u64::from(id), job);
    }

    pub(super) fn file(&mut self, id: u32, verb: &[u8], request: &Value) -> Outcome<Opened> {
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

    pub(super) fn transfer(&mut self, id: u32, verb: &[u8], request: &Value) -> Outcome<Opened> {
        let user = self.credentials(request)?;
        let path = files::path(request.get("path"))?;
        let count = |key: &str| match request.get(key) {
            Value::Nil => Ok(None),
            Value::Int(n) if *n >= 0 => Ok(Some(*n as u64)),
            _ => Err(Failure::invalid(format!("{key} is a number, not below 0"))),
        };
        if verb == b"write" {
            let (mode, parents, size) = (mode(request.get("mode"))?, request.get("parents").bool(true), count("size")?);
            let push = Push { user: user.clone(), ..Push::default() };
            self.submit(id, move || {
                let sink = files::become_user(&user).and_then(|()| FileSink::create(&path, mode, parents, size));
                Done::Opened(sink.map(|sink| Box::new(sink) as Box<dyn Sink>))
            });
            return Ok(Opened::Stream(Kind::Push(push)));
        }
        let (offset, length, depth) = (count("offset")?.unwrap_or(0), count("length")?, count("depth")?.unwrap_or(1));
        if verb == b"read" {
            return Ok(self.open_replying(id, user, move || FileSource::open(&path, offset, length)));
        }
        Ok(self.open_source(id, user, Some(empty_map()), move || ListSource::open(&path, depth as usize)))
    }

    /// Have a worker open a source. `reply`: the payload of REPLY; None when the source has it to give later.
    pub(super) fn open_source<S: Source + 'static>(
        &mut self,
        id: u32,
        user: Credentials,
        reply: Option<Vec<u8>>,
        open: impl FnOnce() -> Outcome<S> + Send + 'static,
    ) -> Opened {
        self.open_pull(id, user, move || Ok((Box::new(open()?), reply)))
    }

    fn open_replying<S: Source + 'static>(
        &mut self,
        id: u32,
        user: Credentials,
        open: impl FnOnce() -> Outcome<(S, Vec<u8>)> + Send + 'static,
    ) -> Opened {
        self.open_pull(id, user, move || {
            open().map(|(source, reply)| (Box::new(source) as Box<dyn Source>, Some(reply)))
        })
    }

    fn open_pull(
        &mut self,
        id: u32,
        user: Credentials,
        open: impl FnOnce() -> Outcome<(Box<dyn Source>, Option<Vec<u8>>)> + Send + 'static,
    ) -> Opened {
        let pull = Pull { user: user.clone(), ..Pull::default() };
        self.submit(id, move || {
            let open = || {
                files::become_user(&user)?;
                let (source, reply) = open()?;
                pulled(source, reply, Vec::new())
            };
            Done::Pulled(open())
        });
        Opened::Stream(Kind::Pull(pull))
    }

    /// Send of the chunk at hand what credit allows, one frame at most; true when there is more.
    pub(super) fn pull(&mut self, id: u32) -> bool {
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
        let waits = pull.source.as_ref().and_then(|source| source.waits()).filter(|_| !pull.last && !pull.ready);
        if let Some(fd) = waits {
            if !std::mem::replace(&mut pull.watched, true) {
                let token = self.token(id, SOURCE);
                if let Err(error) = self.epoll.add(fd, IN | EDGE, token) {
                    self.fail(id, &Failure::io(&error, "wait for changes"));
                }
            }
            return false;
        }
        let Some(source) = pull.source.take() else { return false };
        if pull.last {
            if source.has_body() {
                self.out.push(id, frame::EOF, 0, b"");
            }
            self.end(id, &source.end());
            return false;
        }
        pull.ready = false;
        let (chunk, user) = (std::mem::take(&mut pull.chunk), pull.user.clone());
        self.submit(id, move || Done::Pulled(files::become_user(&user).and_then(|()| pulled(source, None, chunk))));
        false
    }

    /// Hand what has come in to a worker, if none is at it.
    pub(super) fn push_on(&mut self, id: u32) {
        let Some(Stream { kind: Kind::Push(push), .. }) = self.streams.get_mut(&id) else { return };
        if push.pending.is_empty() && !push.eof {
            return;
        }
        let Some(mut sink) = push.sink.take() else { return };
        let bytes = std::mem::replace(&mut push.pending, std::mem::take(&mut push.spare));
        let (last, user) = (push.eof, push.user.clone());
        self.submit(id, move || {
            let written = files::become_user(&user).and_then(|()| sink.write(&bytes));
            if last {
                return Done::Committed(written.and_then(|()| sink.commit()));
            }
            Done::Pushed(written.map(|()| (sink, bytes)))
        });
    }

    pub(super) fn worker_done(&mut self, token: u64, done: Done) {
        let id = token as u32;
        let current = token >> 32 == u64::from(self.session);
        let wide = self.streams.len() <= PUSH_WINDOWS_MAX;
        let Some(stream) = self.streams.get_mut(&id).filter(|_| current) else {
            // Of a stream that has ended. What it held lets go of files, which can take the disk's time.
            if matches!(done, Done::Pulled(Ok(_)) | Done::Opened(Ok(_)) | Done::Pushed(Ok(_))) {
                self.workers.submit(0, move || {
                    drop(done);
                    Done::Nothing
                });
            }
            return;
        };
        match (done, &mut stream.kind) {
            (Done::Answer(Ok(reply)), _) => {
                self.out.push(id, frame::REPLY, 0, &reply);
                self.end(id, &empty_map());
            }
            (Done::Pulled(Ok(Pulled { reply, source, chunk, last })), Kind::Pull(pull)) => {
                (pull.source, pull.chunk, pull.at, pull.last) = (Some(source), chunk, 0, last);
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
}

/// The next chunk of a source.
fn pulled(mut source: Box<dyn Source>, reply: Option<Vec<u8>>, mut chunk: Vec<u8>) -> Outcome<Pulled> {
    let last = source.fill(&mut chunk)?;
    let reply = reply.or_else(|| source.reply());
    Ok(Pulled { reply, source, chunk, last })
}

fn mode(value: &Value) -> Outcome<Option<u32>> {
    match value {
        Value::Nil => Ok(None),
        Value::Int(mode @ 0..=0o7777) => Ok(Some(*mode as u32)),
        _ => Err(Failure::invalid("mode is 0 to 0o7777")),
    }
}
