//! What the driver asks for, read once from descriptor 0: records `key=value`, each ended by a NUL byte.
//!
//! Not here: any act. NUL-ended records and not JSON, because an argument or variable can hold anything
//! but NUL, and a parser of that fits in this file.

use std::ffi::CString;

pub const CONFIG_BYTES_MAX: usize = 1 << 20;
/// Descriptors of one message to who asks for them.
pub const SERVED_MAX: usize = 16;

/// An open file or directory of ours and where the VMM sees it.
#[derive(Debug, PartialEq)]
pub struct Bind {
    pub fd: i32,
    pub read_only: bool,
    pub path: CString,
}

#[derive(Debug, Default, PartialEq)]
pub struct Config {
    /// `arg`, repeated: the VMM's argv; the first is the absolute path that is executed.
    pub argv: Vec<CString>,
    /// `env`, repeated: `NAME=value`; the VMM's whole environment.
    pub env: Vec<CString>,
    /// `fd`, repeated: our descriptors the VMM gets, as 3, 4, 5… in this order.
    pub fds: Vec<i32>,
    /// `hold`, repeated: descriptors we keep open for as long as the VMM lives (a lock).
    pub hold: Vec<i32>,
    /// `serve`, repeated: `NAME:FD`, descriptors we hold as long and hand to whoever asks at `serve_socket`.
    pub serve: Vec<(String, i32)>,
    /// `serve_socket`: a listening unix socket (SOCK_SEQPACKET).
    pub serve_socket: Option<i32>,
    /// `status`: where the one line of the handshake goes.
    pub status: i32,
    /// `uid` and `gid`: whom the VMM runs as; absent: as we do.
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    /// `rlimit`, repeated: `name:value`, soft and hard alike.
    pub rlimits: Vec<(Limit, u64)>,
    /// `run_dir`: gets the logs and `exit`, holds `deadline`.
    pub run_dir: CString,
    /// `grace_ms`: how long after the deadline the VMM is ended.
    pub grace_ms: u64,
    /// `console_bytes_max`: bound of `serial.log` and `serial.log.1` together.
    pub console_bytes_max: u64,
    /// `unlink`, repeated: names in `run_dir` that are removed when the VMM has ended.
    pub unlink: Vec<CString>,
    /// `jail`: the directory that becomes the VMM's root. Absent: it sees ours.
    pub jail: Option<i32>,
    /// `userns`: its namespaces are those of a new user namespace (1 or 0).
    pub userns: bool,
    /// `need`, repeated: parts of the jail (`ns`, `root`, `landlock`, `seccomp`) without which nothing is to start.
    pub need: Vec<String>,
    /// `memfd`: the VMM may make memory of that kind, which its limits do not bound (1 or 0).
    pub memfd: bool,
    /// `bind`, repeated: `FD:ro|rw:PATH`; with `jail`, a path inside that root.
    pub binds: Vec<Bind>,
    /// `cgroup`: the directory the VMM joins; removed when it has ended.
    pub cgroup: Option<i32>,
    /// `launcher` (1 or 0): argv is a VMM's own jailer, run with every right we have.
    pub launcher: bool,
    /// `oom_score_adj` of the VMM: the kernel should take a sandbox before the server.
    pub oom_score_adj: i32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    Nofile,
    Fsize,
    Core,
    Nproc,
    As,
    Memlock,
}

impl Config {
    pub fn parse(raw: &[u8]) -> Result<Config, String> {
        let mut config = Config { status: -1, console_bytes_max: 1 << 20, ..Config::default() };
        if raw.last() != Some(&0) {
            return Err("the configuration is cut off".into());
        }
        for record in raw[..raw.len() - 1].split(|&byte| byte == 0) {
            let at = record.iter().position(|&byte| byte == b'=').ok_or("a record has no '='")?;
            let (key, value) = (&record[..at], &record[at + 1..]);
            let key = std::str::from_utf8(key).map_err(|_| "a key is not text")?;
            config.set(key, value)?;
        }
        if config.argv.is_empty() || config.argv[0].as_bytes().first() != Some(&b'/') {
            return Err("'arg' must begin with an absolute path".into());
        }
        if config.run_dir.as_bytes().first() != Some(&b'/') {
            return Err("'run_dir' must be an absolute path".into());
        }
        if config.uid.is_some() != config.gid.is_some() {
            return Err("'uid' and 'gid' go together".into());
        }
        if config.serve.len() > SERVED_MAX {
            return Err(format!("'serve': at most {SERVED_MAX}"));
        }
        if config.launcher && (config.uid.is_some() || config.jail.is_some()) {
            return Err("'launcher' goes with neither 'uid' nor 'jail': it jails by itself".into());
        }
        if !config.launcher && config.jail.is_none() && (!config.binds.is_empty() || config.userns) {
            return Err("'bind' and 'userns' need 'jail' or 'launcher'".into());
        }
        if config.uid == Some(0) || config.gid == Some(0) {
            return Err("a VMM never runs as root".into());
        }
        Ok(config)
    }

    /// Whether nothing is to start without that part of the jail.
    pub fn needs(&self, part: &str) -> bool {
        self.need.iter().any(|name| name == part)
    }

    fn set(&mut self, key: &str, value: &[u8]) -> Result<(), String> {
        // Split at NUL above: a CString cannot fail.
        let string = || CString::new(value).map_err(|_| format!("{key}: holds a NUL"));
        match key {
            "arg" => self.argv.push(string()?),
            "env" => self.env.push(string()?),
            "fd" => self.fds.push(number(key, value)?),
            "hold" => self.hold.push(number(key, value)?),
            "serve" => {
                let text = std::str::from_utf8(value).map_err(|_| "serve: not text")?;
                let (name, fd) = text.split_once(':').ok_or("serve: expected name:fd")?;
                if name.is_empty() || name.contains(',') {
                    return Err("serve: a name is not empty and has no comma".into());
                }
                self.serve.push((name.to_owned(), number("serve", fd.as_bytes())?));
            }
            "serve_socket" => self.serve_socket = Some(number(key, value)?),
            "status" => self.status = number(key, value)?,
            "uid" => self.uid = Some(number(key, value)?),
            "gid" => self.gid = Some(number(key, value)?),
            "run_dir" => self.run_dir = string()?,
            "grace_ms" => self.grace_ms = number(key, value)?,
            "console_bytes_max" => self.console_bytes_max = number(key, value)?,
            "jail" => self.jail = Some(number(key, value)?),
            "need" => {
                let name = std::str::from_utf8(value).map_err(|_| "need: not text")?;
                if !["ns", "root", "landlock", "seccomp"].contains(&name) {
                    return Err(format!("need: unknown part {name}"));
                }
                self.need.push(name.to_owned());
            }
            "userns" => self.userns = flag(key, value)?,
            "memfd" => self.memfd = flag(key, value)?,
            "launcher" => self.launcher = flag(key, value)?,
            "cgroup" => self.cgroup = Some(number(key, value)?),
            "bind" => {
                let mut parts = value.splitn(3, |&byte| byte == b':');
                let mut part = || parts.next().ok_or("bind: expected fd:ro|rw:path");
                let (fd, mode, path) = (part()?, part()?, part()?);
                if path.first() != Some(&b'/') || path.split(|&byte| byte == b'/').any(|name| name == b"..") {
                    return Err("bind: the path must be absolute and without '..'".into());
                }
                let read_only = match mode {
                    b"ro" => true,
                    b"rw" => false,
                    _ => return Err("bind: expected ro or rw".into()),
                };
                let path = CString::new(path).map_err(|_| "bind: holds a NUL")?;
                self.binds.push(Bind { fd: number(key, fd)?, read_only, path });
            }
            "oom_score_adj" => self.oom_score_adj = number(key, value)?,
            "unlink" if value.is_empty() || value.contains(&b'/') => {
                return Err("unlink: only plain names".into())
            }
            "unlink" => self.unlink.push(string()?),
            "rlimit" => {
                let text = std::str::from_utf8(value).map_err(|_| "rlimit: not text")?;
                let (name, bound) = text.split_once(':').ok_or("rlimit: expected name:value")?;
                let limit = match name {
                    "nofile" => Limit::Nofile,
                    "fsize" => Limit::Fsize,
                    "core" => Limit::Core,
                    "nproc" => Limit::Nproc,
                    "as" => Limit::As,
                    "memlock" => Limit::Memlock,
                    _ => return Err(format!("rlimit: unknown limit {name}")),
                };
                self.rlimits.push((limit, number("rlimit", bound.as_bytes())?));
            }
            _ => return Err(format!("unknown key {key}: driver and shim are of different versions")),
        }
        Ok(())
    }
}

fn flag(key: &str, value: &[u8]) -> Result<bool, String> {
    match value {
        b"1" => Ok(true),
        b"0" => Ok(false),
        _ => Err(format!("{key}: expected 1 or 0")),
    }
}

fn number<N: std::str::FromStr>(key: &str, value: &[u8]) -> Result<N, String> {
    std::str::from_utf8(value)
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| format!("{key}: {:?} is not a number of its range", String::from_utf8_lossy(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text.replace('|', "\0").as_bytes())
    }

    #[test]
    fn reads_every_key() {
        let config = parse(
            "arg=/bin/vmm|arg=-x=1|arg=|env=A=b=c|fd=7|fd=5|hold=9|status=4|uid=70|gid=71|rlimit=core:0|\
             run_dir=/run/x|grace_ms=5000|console_bytes_max=99|unlink=a.sock|oom_score_adj=500|\
             serve=tcp:11|serve=net:12|serve_socket=13|jail=14|userns=1|memfd=1|bind=15:rw:/dev/kvm|\
             bind=16:ro:/a:b|cgroup=17|launcher=0|",
        )
        .unwrap();
        assert_eq!(config.argv.len(), 3);
        assert_eq!(config.argv[1].as_bytes(), b"-x=1");
        assert_eq!(config.env[0].as_bytes(), b"A=b=c");
        assert_eq!((config.fds, config.hold, config.status), (vec![7, 5], vec![9], 4));
        assert_eq!((config.uid, config.gid), (Some(70), Some(71)));
        assert_eq!(config.serve, vec![("tcp".to_owned(), 11), ("net".to_owned(), 12)]);
        assert_eq!(config.serve_socket, Some(13));
        assert_eq!((config.jail, config.userns, config.memfd, config.cgroup), (Some(14), true, true, Some(17)));
        assert!(!config.launcher);
        let bind = |fd, read_only, path: &str| Bind { fd, read_only, path: CString::new(path).unwrap() };
        assert_eq!(config.binds, vec![bind(15, false, "/dev/kvm"), bind(16, true, "/a:b")]);
        assert_eq!(config.rlimits, vec![(Limit::Core, 0)]);
        assert_eq!((config.grace_ms, config.console_bytes_max, config.oom_score_adj), (5000, 99, 500));
    }

    #[test]
    fn refuses_what_it_does_not_understand() {
        for (text, words) in [
            ("", "cut off"),
            ("arg=/x|run_dir=/r", "cut off"),
            ("arg=x|run_dir=/r|", "absolute"),
            ("arg=/x|run_dir=r|", "absolute"),
            ("arg=/x|run_dir=/r|uid=0|gid=0|", "root"),
            ("arg=/x|run_dir=/r|uid=5|", "together"),
            ("arg=/x|run_dir=/r|uid=-5|", "number"),
            ("arg=/x|run_dir=/r|rlimit=cpu:5|", "unknown limit"),
            ("arg=/x|run_dir=/r|unlink=../x|", "plain names"),
            ("arg=/x|run_dir=/r|serve=a,b:3|", "comma"),
            ("arg=/x|run_dir=/r|serve=a|", "name:fd"),
            ("arg=/x|run_dir=/r|serve=a:b|", "number"),
            ("arg=/x|run_dir=/r|jail=3|launcher=1|", "neither"),
            ("arg=/x|run_dir=/r|bind=3:ro:/x|", "need"),
            ("arg=/x|run_dir=/r|launcher=1|bind=3:ro|", "fd:ro"),
            ("arg=/x|run_dir=/r|launcher=1|bind=3:ro:x|", "absolute"),
            ("arg=/x|run_dir=/r|launcher=1|bind=3:ro:/a/../x|", "absolute"),
            ("arg=/x|run_dir=/r|launcher=1|bind=3:no:/x|", "ro or rw"),
            ("arg=/x|run_dir=/r|launcher=yes|", "1 or 0"),
            ("arg=/x|run_dir=/r|need=luck|", "unknown part"),
            ("arg=/x|run_dir=/r|colour=red|", "versions"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(words), "{text:?}: {error}");
        }
    }
}
