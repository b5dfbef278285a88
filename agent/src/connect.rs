//! The verb `connect`: a TCP or unix connection inside the guest, relayed.

use crate::failure::{Failure, Outcome};
use crate::frame;
use crate::msgpack::Value;
use crate::out::Out;
use crate::stream::{Flow, Inlet, Outlet};
use crate::sys::cvt;
use std::io;
use std::mem;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

pub struct Connection {
    pub connecting: bool,
    pub inlet: Inlet,
    pub outlet: Outlet,
    /// Our direction is shut, so that the other side has seen the host's EOF.
    shut: bool,
    /// Lives as long as either direction; the outlet has a duplicate.
    socket: OwnedFd,
}

impl Connection {
    /// Begin; the descriptor says EPOLLOUT when it is decided.
    pub fn open(request: &Value) -> Outcome<Self> {
        let (fd, connecting) = match request.get("unix") {
            Value::Nil => tcp(request)?,
            path => (unix(&crate::files::path(path)?)?, false),
        };
        let outlet = Outlet::new(fd.try_clone().map_err(|error| refused(&error))?, 0, false);
        Ok(Self { connecting, inlet: Inlet::default(), outlet, shut: false, socket: fd })
    }

    pub fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// The connection is decided.
    pub fn connected(&mut self) -> Outcome<()> {
        self.connecting = false;
        let mut errno: libc::c_int = 0;
        let mut size = mem::size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: an int and its size to write into.
        unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ERROR,
                (&mut errno as *mut libc::c_int).cast(),
                &mut size,
            )
        };
        if errno == 0 {
            Ok(())
        } else {
            Err(refused(&io::Error::from_raw_os_error(errno)))
        }
    }

    /// Bytes of the host; how many were consumed.
    pub fn offer(&mut self, bytes: &[u8]) -> usize {
        if self.connecting {
            // A write would take the socket's error, and the connection would look made.
            self.inlet.hold(bytes);
            return 0;
        }
        let done = self.inlet.offer(self.fd(), bytes);
        self.settle();
        done
    }

    pub fn drain(&mut self) -> usize {
        let done = self.inlet.drain(self.fd());
        self.settle();
        done
    }

    pub fn host_eof(&mut self) {
        self.inlet.eof = true;
        self.settle();
    }

    fn settle(&mut self) {
        if self.inlet.finished() && !self.shut && !self.connecting {
            self.shut = true;
            // SAFETY: plain integers; an error means the other side is gone already.
            unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_WR) };
        }
    }

    /// Send what there is: true when there may be more at once.
    pub fn pump(&mut self, out: &mut Out, stream: u32, credit: &mut u64) -> Outcome<bool> {
        match self.outlet.pump(out, stream, credit) {
            Flow::More => Ok(true),
            Flow::Dry => Ok(false),
            Flow::Ended => {
                out.push(stream, frame::EOF, 0, b"");
                Ok(false)
            }
            Flow::Failed(error) => Err(Failure::io(&error, "connection")),
        }
    }

    /// Closed without both ends having said all they had to: the other side is told so (RST) and not that all is well.
    pub fn reset(self) {
        if self.ended() {
            return;
        }
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        // SAFETY: a struct and its size; a unix socket does not mind.
        unsafe {
            libc::setsockopt(
                self.fd(),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&linger as *const libc::linger).cast(),
                mem::size_of_val(&linger) as libc::socklen_t,
            )
        };
    }

    pub fn ended(&self) -> bool {
        self.shut && self.outlet.fd.is_none()
    }
}

fn refused(error: &io::Error) -> Failure {
    Failure::io(error, "connect")
}

fn socket(family: i32) -> Outcome<OwnedFd> {
    // SAFETY: plain integers; the descriptor is ours.
    unsafe {
        cvt(libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0))
            .map(|fd| OwnedFd::from_raw_fd(fd))
            .map_err(|error| refused(&error))
    }
}

fn connect<T>(fd: &OwnedFd, address: &T, size: usize) -> io::Result<()> {
    // SAFETY: an address that lives through the call, of at least that size.
    cvt(unsafe { libc::connect(fd.as_raw_fd(), (address as *const T).cast(), size as libc::socklen_t) }).map(drop)
}

fn tcp(request: &Value) -> Outcome<(OwnedFd, bool)> {
    let port = request.get("port").int().and_then(|port| u16::try_from(port).ok()).filter(|port| *port != 0);
    let port = port.ok_or_else(|| Failure::invalid("port is 1 to 65535"))?.to_be();
    let host = match request.get("host").bytes() {
        None | Some(b"localhost") => "127.0.0.1",
        Some(host) => std::str::from_utf8(host).unwrap_or(""),
    };
    let address: IpAddr = host.parse().map_err(|_| Failure::invalid("host is an address, or localhost"))?;
    // SAFETY: all-zero is a valid socket address of either family.
    let (fd, result) = match address {
        IpAddr::V4(ip) => {
            let mut name: libc::sockaddr_in = unsafe { mem::zeroed() };
            (name.sin_family, name.sin_port) = (libc::AF_INET as libc::sa_family_t, port);
            name.sin_addr.s_addr = u32::from_ne_bytes(ip.octets());
            let fd = socket(libc::AF_INET)?;
            let result = connect(&fd, &name, mem::size_of_val(&name));
            (fd, result)
        }
        IpAddr::V6(ip) => {
            let mut name: libc::sockaddr_in6 = unsafe { mem::zeroed() };
            (name.sin6_family, name.sin6_port) = (libc::AF_INET6 as libc::sa_family_t, port);
            name.sin6_addr.s6_addr = ip.octets();
            let fd = socket(libc::AF_INET6)?;
            let result = connect(&fd, &name, mem::size_of_val(&name));
            (fd, result)
        }
    };
    match result {
        Ok(()) => Ok((fd, false)),
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok((fd, true)),
        Err(error) => Err(refused(&error)),
    }
}

fn unix(path: &std::path::Path) -> Outcome<OwnedFd> {
    use std::os::unix::ffi::OsStrExt;
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: all-zero is a valid unix address.
    let mut name: libc::sockaddr_un = unsafe { mem::zeroed() };
    name.sun_family = libc::AF_UNIX as libc::sa_family_t;
    if bytes.len() >= name.sun_path.len() {
        return Err(Failure::invalid("a socket's path has 107 bytes at most"));
    }
    for (to, from) in name.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    let fd = socket(libc::AF_UNIX)?;
    match connect(&fd, &name, mem::size_of_val(&name)) {
        Ok(()) => Ok(fd),
        // Its queue is full: nobody accepts.
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {
            Err(Failure::new("refused", "connect: the listener does not accept"))
        }
        Err(error) => Err(refused(&error)),
    }
}
