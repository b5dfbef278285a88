//! Which verb does what: those that answer at once, freezing, and who a verb runs as.

use super::{empty_map, Agent, Done, Machine, Opened, SOCKET};
use crate::connect::Connection;
use crate::exec;
use crate::failure::{at, Failure, Outcome};
use crate::files::Credentials;
use crate::frame;
use crate::msgpack::{Value, Writer};
use crate::protect::Protect;
use crate::restore;
use crate::stream::Kind;
use crate::sys::{self, EDGE, IN, OUT, RDHUP};
use crate::users::User;
use crate::volumes;

impl Agent {
    pub(super) fn verb(&mut self, id: u32, request: &Value) -> Outcome<Opened> {
        let verb = request.get("verb").bytes().unwrap_or_default();
        let done = |reply| Ok(Opened::Done(reply, empty_map()));
        match verb {
            b"exec" => self.exec(id, request),
            b"read" | b"list" | b"write" => self.transfer(id, verb, request),
            b"stat" | b"mkdir" | b"move" | b"remove" => self.file(id, verb, request),
            b"tar_out" | b"tar_in" | b"search" | b"watch" | b"set_attributes" | b"link" => self.tree(id, verb, request),
            b"connect" => {
                let mut connection = Connection::open(request)?;
                self.epoll
                    .add(connection.fd(), IN | OUT | RDHUP | EDGE, self.token(id, SOCKET))
                    .map_err(at("connect"))?;
                if !connection.connecting {
                    connection.connected()?;
                    self.out.push(id, frame::REPLY, 0, &empty_map());
                }
                Ok(Opened::Stream(Kind::Connect(connection)))
            }
            b"attach" => self.attach(id, request),
            b"processes" => Ok(self.processes(id)),
            b"signal" => self.signal_managed(request).and_then(|()| done(empty_map())),
            b"forget" => self.forget(request).and_then(|()| done(empty_map())),
            b"ports" => done(crate::ports::reply()),
            b"limits" => self.limits(request).and_then(|()| done(empty_map())),
            b"metrics" => done(crate::metrics::reply(self.machine.as_ref().map(|machine| &machine.sandbox))),
            b"ping" => done(empty_map()),
            b"set_env" => {
                let environment = exec::environment(request.get("env"))?;
                exec::forget(std::mem::replace(&mut self.environment, environment));
                self.wipe = true;
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
                let flag = |key: &str, default| request.get(key).bool(default);
                let (sync, drop_caches, fs) = (flag("sync", true), flag("drop_caches", false), flag("fs", false));
                Ok(Opened::Stream(Kind::Freeze { fs, sync, drop_caches }))
            }
            b"thaw" => {
                let machine = self.machine()?;
                machine.disks.thaw();
                machine.sandbox.set_frozen(false).map_err(at("thaw"))?;
                done(empty_map())
            }
            b"post_restore" => self.post_restore(request).and_then(done),
            b"network" => {
                self.machine()?;
                let Value::Bool(up) = request.get("up") else { return Err(Failure::invalid("up is a truth value")) };
                crate::network::set(*up)?;
                done(empty_map())
            }
            b"poweroff" => {
                self.machine()?;
                self.power_off = true;
                done(empty_map())
            }
            _ => Err(Failure::new("unknown_verb", format!("there is no verb {:?}", String::from_utf8_lossy(verb)))),
        }
    }

    pub(super) fn token(&self, id: u32, part: u64) -> u64 {
        u64::from(self.session & 0xFF_FFFF) << 40 | part << 32 | u64::from(id)
    }

    pub(super) fn machine(&mut self) -> Outcome<&mut Machine> {
        self.machine.as_mut().ok_or_else(|| Failure::invalid("this agent serves a process, not a machine"))
    }

    pub(super) fn post_restore(&mut self, request: &Value) -> Outcome<Vec<u8>> {
        let environment = exec::environment(request.get("env"))?;
        let machine =
            self.machine.as_mut().ok_or_else(|| Failure::invalid("this agent serves a process, not a machine"))?;
        let restore = restore::Request::parse(request)?;
        let protect = Protect::parse(request.get("protect"))?;
        let volumes = volumes::Wanted::parse(request.get("volumes"))?;
        restore.apply(&machine.random, &mut machine.names)?;
        if let Some(protect) = protect {
            protect.apply()?;
        }
        let mut reply = empty_map();
        if let Some(volumes) = volumes {
            machine.disks.thaw(); // what is frozen can neither be let go of nor grow
            reply = machine.volumes.become_wanted(volumes);
        }
        machine.boot_id = restore.boot_id.to_owned();
        exec::forget(std::mem::replace(&mut self.environment, environment));
        self.wipe = true;
        for service in self.services.iter().filter(|service| service.restore_signal != 0) {
            // Pending until the thaw, and then the first thing it sees.
            sys::kill(service.pid, service.restore_signal);
        }
        if restore.thaw {
            machine.disks.thaw();
            if machine.sandbox.frozen {
                machine.sandbox.set_frozen(false).map_err(at("thaw"))?;
            }
        }
        Ok(reply)
    }

    /// Who a verb runs as. Outside a machine only the agent itself.
    pub(super) fn user(&mut self, request: &Value) -> Outcome<(User, bool)> {
        let wanted = request.get("user");
        if self.machine.is_some() {
            return Ok((self.users.get().find(wanted)?, true));
        }
        let own = self.users.get().find(&Value::Int(sys::euid().into()))?;
        let same = match wanted {
            Value::Nil => true,
            other => self.users.get().find(other)?.uid == own.uid,
        };
        if same {
            Ok((own, false))
        } else {
            Err(Failure::invalid("this agent cannot become another user"))
        }
    }

    pub(super) fn credentials(&mut self, request: &Value) -> Outcome<Credentials> {
        let (user, switch) = self.user(request)?;
        Ok(switch.then_some(user))
    }

    /// The kernel may have finished freezing: answer those who wait for it.
    pub(super) fn freezer(&mut self) {
        if !self.machine.as_ref().is_some_and(|machine| machine.sandbox.frozen && machine.sandbox.is_frozen()) {
            return;
        }
        let waiting: Vec<(u32, bool, bool, bool)> = self
            .streams
            .iter()
            .filter_map(|(id, stream)| match stream.kind {
                Kind::Freeze { fs, sync, drop_caches } => Some((*id, fs, sync, drop_caches)),
                _ => None,
            })
            .collect();
        for (id, fs, sync, drop_caches) in waiting {
            let disks = self.machine.as_ref().filter(|_| fs).map(|machine| machine.disks.clone());
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.kind = Kind::Job;
            }
            self.submit(id, move || {
                // The thread may have served a user's files before.
                let own = crate::files::become_agent();
                if sync || drop_caches {
                    // SAFETY: takes nothing, cannot fail.
                    unsafe { libc::sync() };
                }
                if drop_caches {
                    let _ = std::fs::write("/proc/sys/vm/drop_caches", "3");
                }
                let frozen = own.and_then(|()| disks.map_or(Ok(()), |disks| disks.freeze()));
                Done::Answer(frozen.map(|()| {
                    let mut reply = Writer::map(1);
                    reply.str("frozen").bool(true);
                    reply.0
                }))
            });
        }
    }
}
