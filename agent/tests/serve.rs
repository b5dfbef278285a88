//! The real binary over a socketpair: what a host sees, and what it may do wrong.

use llm4agents_agent::frame::{self, Decoder, Event};
use llm4agents_agent::msgpack::{decode, Value, Writer};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, PartialEq)]
struct Got {
    stream: u32,
    kind: u8,
    flags: u8,
    payload: Vec<u8>,
}

struct Host {
    socket: UnixStream,
    child: Child,
    decoder: Decoder,
    tag: u32,
    next: u32,
}

fn map(n: usize, build: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut writer = Writer::map(n);
    build(&mut writer);
    writer.0
}

fn exec(argv: &[&str], stdin: bool, timeout_s: f64) -> Vec<u8> {
    map(4, |w| {
        w.str("verb").str("exec").str("stdin").bool(stdin).str("timeout_s").float(timeout_s);
        w.str("argv").begin_array(argv.len());
        for argument in argv {
            w.str(argument);
        }
    })
}

fn file(verb: &str, path: &str) -> Vec<u8> {
    map(2, |w| {
        w.str("verb").str(verb).str("path").str(path);
    })
}

impl Host {
    fn start() -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let fd = theirs.as_raw_fd();
        let mut command = Command::new(env!("CARGO_BIN_EXE_llm4agents-agent"));
        command.args(["--serve", &fd.to_string()]);
        // SAFETY: plain system calls between fork and exec.
        unsafe {
            command.pre_exec(move || {
                libc::fcntl(fd, libc::F_SETFD, 0);
                let mut files = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                libc::getrlimit(libc::RLIMIT_NOFILE, &mut files);
                files.rlim_cur = files.rlim_max;
                libc::setrlimit(libc::RLIMIT_NOFILE, &files);
                Ok(())
            })
        };
        let child = command.spawn().unwrap();
        ours.set_read_timeout(Some(DEADLINE)).unwrap();
        ours.set_write_timeout(Some(DEADLINE)).unwrap();
        let mut host = Self { socket: ours, child, decoder: Decoder::new(), tag: 0, next: 1 };
        host.greet(0x1122_3344_5566_7788, false);
        host
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    fn send(&mut self, stream: u32, kind: u8, flags: u8, payload: &[u8]) {
        let mut bytes = Vec::new();
        frame::encode(&mut bytes, self.tag, stream, kind, flags, payload);
        self.raw(&bytes);
    }

    fn greet(&mut self, nonce: u64, dirty: bool) {
        self.tag = frame::tag(nonce);
        let mut bytes = vec![0; if dirty { frame::FRAME_MAX } else { 0 }];
        frame::preamble(&mut bytes, nonce);
        self.raw(&bytes);
        self.send(
            0,
            frame::HELLO,
            0,
            &map(1, |w| {
                w.str("versions").begin_array(1);
                w.int(1);
            }),
        );
        loop {
            if let Some(Event::Preamble(seen)) = self.event() {
                if seen == nonce {
                    break;
                }
            }
        }
        let ack = self.frame();
        assert_eq!((ack.kind, decode(&ack.payload).unwrap().get("version").int()), (frame::HELLO_ACK, Some(1)));
    }

    /// A preamble, or None for a frame, whose copy is in `last`.
    fn event(&mut self) -> Option<Event<'static>> {
        loop {
            match self.decoder.next() {
                Some(Event::Preamble(nonce)) => return Some(Event::Preamble(nonce)),
                Some(Event::Frame(_)) => return None,
                None => {
                    let n = self.socket.read(self.decoder.spare()).expect("the agent answers in time");
                    assert!(n > 0, "the agent has gone");
                    self.decoder.filled(n);
                }
            }
        }
    }

    fn frame(&mut self) -> Got {
        loop {
            match self.decoder.next() {
                Some(Event::Preamble(_)) => panic!("a preamble nobody asked for"),
                Some(Event::Frame(f)) => {
                    return Got { stream: f.stream, kind: f.kind, flags: f.flags, payload: f.payload.to_vec() };
                }
                None => {
                    let n = self.socket.read(self.decoder.spare()).expect("the agent answers in time");
                    assert!(n > 0, "the agent has gone");
                    self.decoder.filled(n);
                }
            }
        }
    }

    fn open(&mut self, request: &[u8]) -> u32 {
        let stream = self.next;
        self.next += 1;
        self.send(stream, frame::OPEN, 0, request);
        stream
    }

    /// The bytes of each channel and the last frame, giving credit on the way.
    fn finish(&mut self, stream: u32) -> ([Vec<u8>; 3], Got) {
        let mut bytes = [Vec::new(), Vec::new(), Vec::new()];
        loop {
            let got = self.frame();
            if got.stream != stream {
                continue;
            }
            match got.kind {
                frame::DATA => {
                    let n = got.payload.len() as u32;
                    bytes[usize::from(got.flags)].extend_from_slice(&got.payload);
                    self.send(stream, frame::CREDIT, 0, &n.to_le_bytes());
                }
                frame::END | frame::ERROR => return (bytes, got),
                _ => {}
            }
        }
    }

    fn call(&mut self, request: &[u8]) -> ([Vec<u8>; 3], Got) {
        let stream = self.open(request);
        self.finish(stream)
    }

    fn alive(&mut self) {
        let (_, got) = self.call(&map(1, |w| {
            w.str("verb").str("ping");
        }));
        assert_eq!(got.kind, frame::END);
    }

    fn code(got: &Got) -> String {
        assert_eq!(got.kind, frame::ERROR, "{got:?}");
        String::from_utf8(decode(&got.payload).unwrap().get("code").bytes().unwrap().to_vec()).unwrap()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let ended = self.child.wait();
        if !std::thread::panicking() {
            assert!(ended.unwrap().success(), "the agent ends well when its host goes");
        }
    }
}

fn temporary(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("l4-agent-serve-{}-{name}", std::process::id()))
}

#[test]
fn a_process_has_its_streams_its_code_and_its_end() {
    let mut host = Host::start();
    let stream = host.open(&exec(&["sh", "-c", "cat; echo err >&2; exit 3"], true, 0.0));
    host.send(stream, frame::DATA, 0, b"in");
    host.send(stream, frame::EOF, 0, b"");
    let (bytes, end) = host.finish(stream);
    assert_eq!((&bytes[1][..], &bytes[2][..]), (&b"in"[..], &b"err\n"[..]));
    let end = decode(&end.payload).unwrap();
    assert_eq!((end.get("exit_code").int(), end.get("signal")), (Some(3), &Value::Nil));
    let (_, got) = host.call(&exec(&["/nope"], false, 0.0));
    assert_eq!(Host::code(&got), "exec_failed");
}

#[test]
fn a_timeout_kills_the_group() {
    let mut host = Host::start();
    let (_, end) = host.call(&exec(&["sh", "-c", "sleep 60 & exec sleep 60"], false, 0.05));
    let end = decode(&end.payload).unwrap();
    assert_eq!((end.get("timed_out"), end.get("signal").int()), (&Value::Bool(true), Some(9)));
}

#[test]
fn what_holds_the_pipe_does_not_hold_the_end() {
    let mut host = Host::start();
    let (bytes, end) = host.call(&exec(&["sh", "-c", "sleep 2 & echo out"], false, 0.0));
    assert_eq!((&bytes[1][..], end.kind), (&b"out\n"[..], frame::END));
}

#[test]
fn unread_output_stops_at_its_credit_and_blocks_nobody() {
    let mut host = Host::start();
    let unread = host.open(&exec(&["yes"], false, 0.0));
    let mut seen = 0;
    while seen < 262_144 {
        let got = host.frame();
        assert_eq!(got.stream, unread);
        seen += if got.kind == frame::DATA { got.payload.len() } else { 0 };
    }
    assert_eq!(seen, 262_144);
    let (bytes, _) = host.call(&exec(&["echo", "alive"], false, 0.0));
    assert_eq!(bytes[1], b"alive\n");
    host.send(unread, frame::CANCEL, 0, b"");
    assert_eq!(Host::code(&host.finish(unread).1), "cancelled");
}

#[test]
fn more_than_the_credit_ends_the_stream_and_not_the_session() {
    let mut host = Host::start();
    let stream = host.open(&exec(&["sleep", "60"], true, 0.0));
    for _ in 0..8 {
        host.send(stream, frame::DATA, 0, &[b'x'; 65_536]);
    }
    assert_eq!(Host::code(&host.finish(stream).1), "invalid");
    host.alive();
}

#[test]
fn a_torn_frame_then_a_new_host() {
    let mut host = Host::start();
    let marker = temporary("torn");
    let mut torn = Vec::new();
    let touch = exec(&["touch", marker.to_str().unwrap()], false, 0.0);
    for cut in [1, 10, 15, 16, 17, 60, touch.len() + 16, touch.len() + 19] {
        let mut whole = Vec::new();
        frame::encode(&mut whole, host.tag, 900, frame::OPEN, 0, &touch);
        torn.clear();
        torn.extend_from_slice(&whole[..cut]);
        host.raw(&torn);
        host.greet(0xAABB_0000_0102_0300 + cut as u64, true);
        host.alive();
    }
    assert!(!marker.exists(), "nothing of a torn frame is done");
}

#[test]
fn foreign_frames_and_noise_are_survived() {
    let mut host = Host::start();
    let mut bytes = Vec::new();
    frame::encode(&mut bytes, host.tag ^ 1, 5, frame::OPEN, 0, &exec(&["true"], false, 0.0));
    host.raw(&bytes);
    host.alive();
    for (kind, payload) in
        [(77, &b"x"[..]), (frame::REPLY, b"x"), (frame::CREDIT, b"x"), (frame::SIGNAL, b""), (frame::DATA, b"x")]
    {
        host.send(4321, kind, 9, payload);
    }
    let (_, got) = host.call(b"\xc1 no map");
    assert_eq!(Host::code(&got), "invalid");
    host.alive();
    let mut seed = 1u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) as u8
    })
    .take(200_000)
    .collect();
    host.raw(&noise);
    host.greet(0x77, true);
    host.alive();
}

#[test]
fn quiesced_means_silent() {
    let mut host = Host::start();
    let stream = host.open(&exec(&["yes"], false, 0.0));
    assert_eq!(host.frame().kind, frame::REPLY);
    host.send(0, frame::QUIESCE, 0, b"");
    while host.frame().kind != frame::QUIESCED {}
    let ping = host.open(&map(1, |w| {
        w.str("verb").str("ping");
    }));
    host.socket.set_read_timeout(Some(Duration::from_millis(150))).unwrap();
    assert!(host.decoder.next().is_none() && host.socket.read(&mut [0; 1]).is_err(), "not a byte after QUIESCED");
    host.socket.set_read_timeout(Some(DEADLINE)).unwrap();
    host.send(0, frame::UNQUIESCE, 0, b"");
    assert_eq!(host.finish(ping).1.kind, frame::END);
    host.send(stream, frame::CANCEL, 0, b"");
    host.finish(stream);
}

#[test]
fn a_file_goes_in_and_out_and_a_lost_session_leaves_nothing() {
    let mut host = Host::start();
    let directory = temporary("files");
    let path = directory.join("deep/f");
    let content: Vec<u8> = (0..200_000u32).map(|n| (n * 7) as u8).collect();
    let stream = host.open(&file("write", path.to_str().unwrap()));
    for piece in content.chunks(65_536) {
        host.send(stream, frame::DATA, 0, piece);
    }
    host.send(stream, frame::EOF, 0, b"");
    assert_eq!(decode(&host.finish(stream).1.payload).unwrap().get("bytes").int(), Some(200_000));
    let (bytes, end) = host.call(&file("read", path.to_str().unwrap()));
    assert_eq!((bytes[0] == content, end.kind), (true, frame::END));
    let (_, got) = host.call(&file("read", directory.to_str().unwrap()));
    assert_eq!(Host::code(&got), "is_directory");

    let stream = host.open(&file("write", directory.join("lost").to_str().unwrap()));
    assert_eq!(host.frame().kind, frame::REPLY);
    host.send(stream, frame::DATA, 0, b"half");
    host.greet(0x99, false);
    // Unlinking is a worker's job that was submitted before this one.
    let (bytes, _) = host.call(&file("list", directory.to_str().unwrap()));
    let names = String::from_utf8_lossy(&bytes[0]).matches("lost").count()
        + String::from_utf8_lossy(&bytes[0]).matches(".l4-").count();
    assert!(names <= 2, "at most the temporary file that is being unlinked, by name and by path");
    host.call(&map(3, |w| {
        w.str("verb").str("remove").str("path").str(directory.to_str().unwrap()).str("recursive").bool(true);
    }));
}

#[test]
fn a_connection_is_relayed_both_ways() {
    let mut host = Host::start();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let request = map(2, |w| {
        w.str("verb").str("connect").str("port").int(port.into());
    });
    let stream = host.open(&request);
    let (mut peer, _) = listener.accept().unwrap();
    assert_eq!(host.frame().kind, frame::REPLY);
    // Small answers one after the other: none may be left waiting.
    for _ in 0..20 {
        host.send(stream, frame::DATA, 0, b"ask");
        peer.read_exact(&mut [0; 3]).unwrap();
        peer.write_all(b"answer").unwrap();
        assert_eq!(host.frame().payload, b"answer");
    }
    host.send(stream, frame::EOF, 0, b"");
    assert_eq!(peer.read(&mut [0; 9]).unwrap(), 0);
    drop(peer);
    assert_eq!((host.frame().kind, host.frame().kind), (frame::EOF, frame::END));
    drop(listener);
    assert_eq!(Host::code(&host.call(&request).1), "refused");
}

#[test]
fn the_machines_verbs_are_refused_outside_one() {
    let mut host = Host::start();
    for verb in ["freeze", "thaw", "post_restore", "set_time", "poweroff"] {
        let (_, got) = host.call(&map(1, |w| {
            w.str("verb").str(verb);
        }));
        assert_eq!(Host::code(&got), "invalid", "{verb}");
    }
    let (_, got) = host.call(&map(1, |w| {
        w.str("verb").str("no such");
    }));
    assert_eq!(Host::code(&got), "unknown_verb");
}

#[test]
fn too_many_streams_are_refused() {
    let mut host = Host::start();
    let request = exec(&["sleep", "60"], false, 0.0);
    let first = host.open(&request);
    host.send(first, frame::CANCEL, 0, b"");
    host.finish(first);
    // Files that wait for their bytes cost less than processes.
    let path = temporary("many");
    for n in 0..1024 {
        host.open(&file("write", path.join(n.to_string()).to_str().unwrap()));
    }
    let over = host.open(&request);
    assert_eq!(Host::code(&host.finish(over).1), "too_many_streams");
    host.greet(0x42, false);
    host.call(&map(3, |w| {
        w.str("verb").str("remove").str("path").str(path.to_str().unwrap()).str("recursive").bool(true);
    }));
    let _ = std::fs::remove_dir_all(&path);
}

fn managed(id: &str, script: &str, tty: bool) -> Vec<u8> {
    map(if tty { 5 } else { 4 }, |w| {
        w.str("verb").str("exec").str("id").str(id).str("stdin").bool(true);
        w.str("argv").begin_array(3);
        w.str("sh").str("-c").str(script);
        if tty {
            w.str("tty").begin_map(0);
        }
    })
}

#[test]
fn a_managed_process_is_let_go_and_read_again_whatever_else_is_said_of_it() {
    let mut host = Host::start();
    let stream = host.open(&managed("m", "read x; echo $x; echo err >&2; exit 3", false));
    assert_eq!(host.frame().kind, frame::REPLY);
    for (kind, payload) in [(frame::RESIZE, &b"\x01"[..]), (frame::RESIZE, &[0; 4]), (frame::SIGNAL, b""), (99, b"x")] {
        host.send(stream, kind, 0, payload);
    }
    host.send(stream, frame::DETACH, 0, b"");
    let (_, end) = host.finish(stream);
    assert_eq!(decode(&end.payload).unwrap().get("detached"), &Value::Bool(true));
    // What the host sends before it has read the END is ignored, and the stream's number is free no more.
    host.send(stream, frame::CANCEL, 0, b"");
    host.send(stream, frame::DETACH, 0, b"");
    host.greet(0x99, true);
    let attach = map(4, |w| {
        w.str("verb").str("attach").str("id").str("m").str("from").int(0).str("stdin").bool(true);
    });
    let stream = host.open(&attach);
    host.send(stream, frame::DATA, 0, b"said\n");
    let (bytes, end) = host.finish(stream);
    assert_eq!((&bytes[1][..], &bytes[2][..]), (&b"said\n"[..], &b"err\n"[..]));
    let end = decode(&end.payload).unwrap();
    assert_eq!((end.get("exit_code").int(), end.get("offset").int()), (Some(3), Some(9)));
    let verb = |verb: &str, key: &str, value: i64| {
        map(3, |w| {
            w.str("verb").str(verb).str("id").str("m").str(key).int(value);
        })
    };
    assert_eq!(Host::code(&host.call(&verb("signal", "signal", 9)).1), "ended");
    assert_eq!(Host::code(&host.call(&verb("attach", "from", 10)).1), "invalid");
    assert_eq!(Host::code(&host.call(&managed("m", "true", false)).1), "exists");
    assert_eq!(host.call(&verb("forget", "x", 0)).1.kind, frame::END);
    assert_eq!(Host::code(&host.call(&verb("attach", "from", 0)).1), "not_found");
    host.alive();
}

#[test]
fn a_terminal_is_killed_with_all_that_is_in_it() {
    let mut host = Host::start();
    let stream = host.open(&managed("t", "sleep 60 & sleep 60", true));
    assert_eq!(host.frame().kind, frame::REPLY);
    host.send(stream, frame::RESIZE, 0, &[50, 0, 100, 0]);
    host.send(stream, frame::CANCEL, 0, b"");
    assert_eq!(Host::code(&host.finish(stream).1), "cancelled");
    let (_, end) = host.call(&map(3, |w| {
        w.str("verb").str("attach").str("id").str("t").str("output").bool(false);
    }));
    assert_eq!(decode(&end.payload).unwrap().get("signal").int(), Some(9));
}
