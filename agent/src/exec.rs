//! The verb `exec`: from a request to a process, and from a process to its END. How to start one is `spawn`.

use crate::cgroup::Leaf;
use crate::failure::{Failure, Outcome};
use crate::frame;
use crate::msgpack::{Value, Writer};
use crate::out::Out;
use crate::spawn::{Command, Identity, Step, Strings};
use crate::stream::{Flow, Inlet, Outlet};
use crate::sys::{self, Ended};
use crate::users::User;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// How long something else may hold the pipes of a leader that has exited.
const GRACE: Duration = Duration::from_millis(200);
const ROOT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const USER_PATH: &[u8] = b"/usr/local/bin:/usr/bin:/bin";

pub type Environment = Vec<(Vec<u8>, Vec<u8>)>;

/// A map of strings out of a request.
pub fn environment(value: &Value) -> Outcome<Environment> {
    let pairs = match value {
        Value::Nil => return Ok(Vec::new()),
        Value::Map(pairs) => pairs,
        _ => return Err(Failure::invalid("env is a map")),
    };
    let good = |name: &[u8]| !name.is_empty() && !name.contains(&b'=') && !name.contains(&0);
    pairs
        .iter()
        .map(|(name, value)| match (name.bytes(), value.bytes()) {
            (Some(name), Some(value)) if good(name) && !value.contains(&0) => Ok((name.to_vec(), value.to_vec())),
            _ => Err(Failure::invalid("env maps names without '=' to strings without NUL")),
        })
        .collect()
}

/// Overwrite an environment before it is let go of: it may have held secrets, and memory is photographed.
pub fn forget(environment: Environment) {
    for (mut name, mut value) in environment {
        for bytes in [&mut name, &mut value] {
            bytes.fill(0);
            std::hint::black_box(bytes);
        }
    }
}

/// What is to run, but for its descriptors and cgroup.
pub fn command<'a>(request: &Value, user: &'a User, switch: bool, defaults: &Environment) -> Outcome<Command<'a>> {
    let Value::Array(arguments) = request.get("argv") else { return Err(Failure::invalid("argv is a list")) };
    let arguments: Option<Vec<&[u8]>> = arguments.iter().map(Value::bytes).collect();
    let arguments =
        arguments.filter(|a| !a.is_empty()).ok_or_else(|| Failure::invalid("argv is a list of strings, not empty"))?;
    let asked = environment(request.get("env"))?;
    let path = if user.uid == 0 { ROOT_PATH } else { USER_PATH };
    let mut variables: Vec<(&[u8], &[u8])> = Vec::new();
    if !request.get("env_clear").bool(false) {
        let own = [
            ("HOME", &user.home[..]),
            ("USER", &user.name),
            ("LOGNAME", &user.name),
            ("SHELL", &user.shell),
            ("PATH", path),
        ];
        variables.extend(own.map(|(name, value)| (name.as_bytes(), value)));
        defaults.iter().for_each(|(name, value)| set(&mut variables, name, value));
    }
    let init = request.get("init").bool(false);
    if init {
        // How systemd is told that it is not the machine's own.
        set(&mut variables, b"container", b"llm4agents");
    }
    if *request.get("tty") != Value::Nil {
        set(&mut variables, b"TERM", request.get("tty").get("term").bytes().unwrap_or(b"xterm-256color"));
    }
    asked.iter().for_each(|(name, value)| set(&mut variables, name, value));

    let nul = || Failure::invalid("an argument or path holds a NUL");
    let (mut argv, mut env, mut files, mut cwd) =
        (Strings::default(), Strings::default(), Strings::default(), Strings::default());
    for argument in &arguments {
        argv.push(&[argument]).ok_or_else(nul)?;
    }
    for (name, value) in &variables {
        env.push(&[name, b"=", value]).ok_or_else(nul)?;
    }
    if arguments[0].contains(&b'/') || arguments[0].is_empty() {
        files.push(&[arguments[0]]).ok_or_else(nul)?;
    } else {
        let path = variables.iter().find(|(name, _)| *name == b"PATH").map_or(path, |(_, path)| path);
        for directory in path.split(|b| *b == b':') {
            files.push(&[if directory.is_empty() { b"." } else { directory }, b"/", arguments[0]]).ok_or_else(nul)?;
        }
    }
    match request.get("cwd") {
        Value::Nil => {
            // A user without a home can still run things.
            cwd.push(&[&user.home]).ok_or_else(nul)?;
            cwd.push(&[b"/"]).ok_or_else(nul)?;
        }
        wanted => cwd.push(&[crate::files::path(wanted)?.as_os_str().as_encoded_bytes_compat()]).ok_or_else(nul)?,
    }
    let identity = switch.then_some(Identity { uid: user.uid, gid: user.gid, groups: &user.groups });
    Ok(Command { argv, env, files, cwd, identity, fds: [-1; 3], terminal: false, cgroup: None, init, inside: None })
}

/// `OsStr::as_encoded_bytes` came after our oldest compiler.
trait Bytes {
    fn as_encoded_bytes_compat(&self) -> &[u8];
}

impl Bytes for std::ffi::OsStr {
    fn as_encoded_bytes_compat(&self) -> &[u8] {
        std::os::unix::ffi::OsStrExt::as_bytes(self)
    }
}

fn set<'a>(variables: &mut Vec<(&'a [u8], &'a [u8])>, name: &'a [u8], value: &'a [u8]) {
    match variables.iter_mut().find(|(known, _)| *known == name) {
        Some(variable) => variable.1 = value,
        None => variables.push((name, value)),
    }
}

pub fn failed(request: &Value, step: Step, error: &std::io::Error) -> Failure {
    let name = match request.get("argv") {
        Value::Array(argv) => argv.first().and_then(Value::bytes).unwrap_or_default(),
        _ => b"",
    };
    let name = String::from_utf8_lossy(name);
    let what = match step {
        Step::Setup => format!("start {name}"),
        Step::Directory => format!("working directory of {name}"),
        Step::Exec => format!("exec {name}"),
    };
    Failure { code: "exec_failed", ..Failure::io(error, what) }
}

/// `timeout_s`: None or 0 is none.
pub fn timeout(request: &Value) -> Outcome<Option<Duration>> {
    match request.get("timeout_s") {
        Value::Nil => Ok(None),
        value => match value.float() {
            Some(0.0) => Ok(None),
            Some(seconds) if seconds > 0.0 && seconds < 1e9 => Ok(Some(Duration::from_secs_f64(seconds))),
            _ => Err(Failure::invalid("timeout_s is a number of seconds")),
        },
    }
}

/// A process whose streams the host sees.
pub struct Exec {
    pub pid: i32,
    pub leaf: Option<Leaf>,
    pub group_kill: bool,
    pub stdin: Option<OwnedFd>,
    pub inlet: Inlet,
    pub outlets: [Outlet; 2],
    pub ended: Option<Ended>,
    pub timed_out: bool,
    /// When it is killed, or once it has exited, when its pipes are.
    pub deadline: Option<Instant>,
    /// Which outlet goes first next time.
    pub turn: usize,
}

impl Exec {
    /// To the whole group; nobody when its leader is gone, since its number may be another's.
    pub fn signal(&self, signal: i32) {
        if self.ended.is_none() {
            sys::kill(-self.pid, signal);
        }
    }

    /// End all of it now, whatever it has forked.
    pub fn kill(&self) {
        if !self.group_kill {
            if self.ended.is_none() {
                sys::kill(self.pid, libc::SIGKILL);
            }
            return;
        }
        self.signal(libc::SIGKILL);
        if let Some(leaf) = &self.leaf {
            leaf.kill();
        }
    }

    /// The leader has exited.
    pub fn reaped(&mut self, ended: Ended) {
        self.ended = Some(ended);
        let open = self.outlets.iter().any(|outlet| outlet.fd.is_some());
        self.deadline = open.then(|| Instant::now() + GRACE);
        (self.stdin, self.inlet.broken) = (None, true);
    }

    /// When something is to be done without an event.
    pub fn wake_at(&self) -> Option<Instant> {
        let held = self.outlets.iter().filter_map(Outlet::held);
        held.chain(self.deadline).min()
    }

    /// `wake_at` has come.
    pub fn wake(&mut self, now: Instant) {
        if self.deadline.map_or(true, |deadline| deadline > now) {
            return; // an outlet has been held long enough
        }
        self.deadline = None;
        if self.ended.is_some() {
            self.outlets.iter_mut().for_each(Outlet::cut);
        } else {
            self.timed_out = true;
            self.kill();
        }
    }

    /// Send what there is; true when there may be more at once.
    pub fn pump(&mut self, out: &mut Out, stream: u32, credit: &mut u64) -> bool {
        self.turn ^= 1;
        let mut more = false;
        for at in [self.turn, self.turn ^ 1] {
            let outlet = &mut self.outlets[at];
            match outlet.pump(out, stream, credit) {
                Flow::More => more = true,
                Flow::Dry => {}
                Flow::Ended | Flow::Failed(_) => out.push(stream, frame::EOF, outlet.channel, b""),
            }
        }
        more
    }

    /// How it ended, once the leader has exited and the pipes are at their ends.
    pub fn over(&self) -> Option<&Ended> {
        self.ended.as_ref().filter(|_| self.outlets.iter().all(|outlet| outlet.fd.is_none()))
    }

    /// The payload of END, once it is over; of a managed process with the `offset` of its output's end.
    pub fn end(&self, offset: Option<u64>) -> Option<Vec<u8>> {
        let ended = self.over()?;
        let mut end = Writer::map(5 + usize::from(offset.is_some()));
        end.str("exit_code").opt_int(ended.exit_code.map(i64::from)).str("signal").opt_int(ended.signal.map(i64::from));
        end.str("timed_out")
            .bool(self.timed_out)
            .str("user_ms")
            .int(ended.user_ms)
            .str("system_ms")
            .int(ended.system_ms);
        if let Some(offset) = offset {
            end.str("offset").int(offset as i64);
        }
        Some(end.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msgpack::decode;

    fn request(build: impl FnOnce(&mut Writer)) -> Outcome<()> {
        let mut writer = Writer::default();
        build(&mut writer);
        let user = User {
            name: b"u".to_vec(),
            uid: 1,
            gid: 1,
            home: b"/".to_vec(),
            shell: b"/bin/sh".to_vec(),
            groups: vec![],
        };
        command(&decode(&writer.0).unwrap(), &user, false, &vec![]).map(drop)
    }

    #[test]
    fn malformed_requests_are_invalid() {
        let code = |build: fn(&mut Writer)| request(build).map_err(|failure| failure.code);
        assert_eq!(code(|w| w.begin_map(0)), Err("invalid"));
        let argv = |w: &mut Writer, n: usize| {
            w.begin_map(n);
            w.str("argv").begin_array(1);
            w.str("true");
        };
        assert!(request(|w| argv(w, 1)).is_ok());
        assert!(request(|w| {
            argv(w, 2);
            w.str("cwd").str("relative");
        })
        .is_err());
        assert!(request(|w| {
            argv(w, 2);
            w.str("env").begin_map(1);
            w.str("A=B").str("c");
        })
        .is_err());
        assert!(request(|w| {
            argv(w, 2);
            w.str("env").begin_map(1);
            w.str("A").str("c\0");
        })
        .is_err());
        assert!(request(|w| {
            w.begin_map(1);
            w.str("argv").begin_array(0);
        })
        .is_err());
        assert!(request(|w| {
            w.begin_map(1);
            w.str("argv").begin_array(1);
            w.int(1);
        })
        .is_err());
    }

    #[test]
    fn timeouts() {
        for (seconds, want) in
            [(0.0, Some(None)), (1.5, Some(Some(Duration::from_millis(1500)))), (-1.0, None), (f64::NAN, None)]
        {
            let mut writer = Writer::map(1);
            writer.str("timeout_s").float(seconds);
            assert_eq!(timeout(&decode(&writer.0).unwrap()).ok(), want);
        }
    }
}
