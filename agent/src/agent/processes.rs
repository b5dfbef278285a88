//! Processes in the loop: started, watched, reaped.

use super::{pid_map, Agent, Opened, Service, STDERR, STDIN, STDOUT};
use crate::exec::{self, Exec};
use crate::failure::{at, Failure, Outcome};
use crate::frame;
use crate::managed::Wanted;
use crate::msgpack::{Value, Writer};
use crate::pty::Pty;
use crate::spawn::Inside;
use crate::stream::{Inlet, Kind, Outlet};
use crate::sys::{self, EDGE, IN, OUT};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Instant;

impl Agent {
    pub(super) fn exec(&mut self, id: u32, request: &Value) -> Outcome<Opened> {
        if self.machine.as_ref().is_some_and(|machine| machine.sandbox.frozen) {
            return Err(Failure::invalid("frozen: nothing starts before thaw or post_restore"));
        }
        let timeout = exec::timeout(request)?;
        let (user, switch) = self.user(request)?;
        let mut command = exec::command(request, &user, switch, &self.environment)?;
        if command.init && (self.machine.is_none() || user.uid != 0 || self.init.is_some()) {
            return Err(Failure::invalid("init is for root, in a machine, and for one at a time"));
        }
        let service = request.get("service");
        let restore_signal = match service.get("restore_signal") {
            Value::Nil => 0,
            Value::Int(signal @ 1..=64) => *signal as i32,
            _ => return Err(Failure::invalid("restore_signal is 1 to 64")),
        };
        let is_service = *service != Value::Nil;
        let wanted = if is_service { None } else { Wanted::parse(request)? };
        if let Some(wanted) = &wanted {
            self.managed.admit(&wanted.id)?;
        }
        if let Some(init) = self.init.filter(|_| !is_service && request.get("inside").bool(true)) {
            command.inside = Inside::of(init).ok(); // none, if it has just ended
        }
        let terminal = match wanted.as_ref().and_then(|wanted| wanted.terminal) {
            Some((rows, columns)) => {
                Some(Pty::open(rows, columns, switch.then_some(user.uid)).map_err(at("open a terminal"))?)
            }
            None => None,
        };
        let leaf = match &mut self.machine {
            Some(machine) => Some(machine.sandbox.take(command.init).map_err(at("make a cgroup"))?),
            None => None,
        };
        command.cgroup = leaf.as_ref().map(crate::cgroup::Leaf::fd);
        command.terminal = terminal.is_some();
        let null = self.null.as_raw_fd();
        let pipes = !is_service && terminal.is_none();
        let wants_stdin = request.get("stdin").bool(false) && pipes;
        let pipe = |want: bool| if want { sys::pipe().map(Some).map_err(at("pipe")) } else { Ok(None) };
        let (stdin, stdout, stderr) = (pipe(wants_stdin)?, pipe(pipes)?, pipe(pipes)?);
        let end = |pipe: Option<&OwnedFd>| pipe.map_or(null, AsRawFd::as_raw_fd);
        command.fds = match &terminal {
            Some(terminal) => [terminal.slave.as_raw_fd(); 3],
            None => {
                let (stdin, stdout, stderr) = (stdin.as_ref(), stdout.as_ref(), stderr.as_ref());
                [end(stdin.map(|p| &p.0)), end(stdout.map(|p| &p.1)), end(stderr.map(|p| &p.1))]
            }
        };

        let pid = match self.spawner.spawn(&command) {
            Ok(pid) => pid,
            Err((step, error)) => {
                if let (Some(leaf), Some(machine)) = (leaf, &mut self.machine) {
                    machine.sandbox.give(leaf);
                }
                return Err(exec::failed(request, step, &error));
            }
        };
        if command.init {
            self.init = Some(pid);
        }
        let (stdin, outlets) = match (terminal, stdout, stderr) {
            (Some(Pty { master, .. }), ..) => {
                (master.try_clone().ok(), [Outlet::of_terminal(master, 1), Outlet::closed(2)])
            }
            (None, Some(stdout), Some(stderr)) => {
                (stdin.map(|(_, writer)| writer), [Outlet::new(stdout.0, 1, true), Outlet::new(stderr.0, 2, true)])
            }
            _ => {
                let name = service.get("name").bytes().unwrap_or_default().to_vec();
                self.services.push(Service { name, pid, restore_signal });
                return Ok(Opened::Done(pid_map(pid), pid_map(pid)));
            }
        };
        let mut exec = Exec {
            pid,
            leaf,
            group_kill: request.get("group_kill").bool(true),
            stdin,
            inlet: Inlet::default(),
            outlets,
            ended: None,
            timed_out: false,
            deadline: timeout.map(|timeout| Instant::now() + timeout),
            turn: 1,
        };
        if let Some(wanted) = wanted {
            let info = Self::info(request, &wanted, &user, exec.stdin.is_some());
            return self.manage(id, info, exec, &wanted);
        }
        if let Err(error) = self.watch(id, &mut exec) {
            exec.kill();
            return Err(Failure::io(&error, "watch a process"));
        }
        self.out.push(id, frame::REPLY, 0, &pid_map(pid));
        Ok(Opened::Stream(Kind::Exec(exec)))
    }

    pub(super) fn watch(&self, id: u32, exec: &mut Exec) -> io::Result<()> {
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

    pub(super) fn reap(&mut self) {
        let mut siginfo = [0; 128];
        let _ = sys::read(self.children.as_raw_fd(), &mut siginfo);
        while let Some(ended) = sys::reap(-1, false) {
            self.init = self.init.filter(|pid| *pid != ended.pid);
            let exec = self.streams.iter_mut().find_map(|(id, stream)| match &mut stream.kind {
                Kind::Exec(exec) if exec.pid == ended.pid && exec.ended.is_none() => Some((*id, exec)),
                _ => None,
            });
            if let Some((id, exec)) = exec {
                exec.reaped(ended);
                self.enqueue(id);
                continue;
            }
            if let Some(slot) = self.managed.reaped(ended) {
                self.managed.enqueue(slot);
                continue;
            }
            if let Some(at) = self.services.iter().position(|service| service.pid == ended.pid) {
                let service = self.services.swap_remove(at);
                let mut event = Writer::map(4);
                event.str("event").str("service_exited").str("name").bytes(&service.name);
                event
                    .str("exit_code")
                    .opt_int(ended.exit_code.map(i64::from))
                    .str("signal")
                    .opt_int(ended.signal.map(i64::from));
                self.out.push(0, frame::EVENT, 0, &event.0);
            }
        }
    }

    pub(super) fn expire(&mut self) {
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
        let mut woken = Vec::new();
        for (slot, managed) in self.managed.running() {
            let Some(at) = managed.wake_at() else { continue };
            let now = *now.get_or_insert_with(Instant::now);
            if at <= now {
                managed.exec.wake(now);
                woken.push(*slot);
            }
        }
        woken.into_iter().for_each(|slot| self.managed.enqueue(slot));
    }
}
