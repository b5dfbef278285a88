//! `/init` of a guest, or `--serve FD` for tests.

use llm4agents_agent::agent::Agent;
use llm4agents_agent::channel::Channel;
use llm4agents_agent::{init, sys, VERSION};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::process::exit;

fn main() {
    // SAFETY: cannot fail.
    if unsafe { libc::getpid() } == 1 {
        init::run();
    }
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "--version"] => println!("llm4agents-agent {VERSION}"),
        [_, "--serve", fd] => serve(fd.parse().unwrap_or(-1)),
        _ => {
            eprintln!("usage: llm4agents-agent --serve FD | --version (as PID 1: the init of a sandbox)");
            exit(2);
        }
    }
}

fn serve(fd: RawFd) {
    // SAFETY: fcntl on any number is harmless; what is open and passed to us is ours.
    let socket = unsafe {
        if sys::cvt(libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC)).is_err() || fd < 3 {
            eprintln!("llm4agents-agent: --serve wants an inherited socket above 2");
            exit(2);
        }
        libc::fcntl(fd, libc::F_SETFL, libc::O_RDWR | libc::O_NONBLOCK);
        OwnedFd::from_raw_fd(fd)
    };
    if let Err(error) = Agent::new(Channel::inherited(socket), None).and_then(|mut agent| agent.run()) {
        eprintln!("llm4agents-agent: {error}");
        exit(1);
    }
}
