//! The byte stream to the host: a virtio-serial port, vsock, or an inherited socket. Not for what it carries.

use crate::sys::{self, cvt, Epoll, EDGE, IN, OUT, RDHUP};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

pub const VSOCK_PORT: u32 = 1024;

pub enum Channel {
    /// Has no connections: while no host is there `read` answers 0 and `write` EAGAIN, and an edge tells of its coming.
    Port(OwnedFd),
    /// Connections that follow each other: vsock, or in tests a unix socket.
    Listener {
        listener: OwnedFd,
        peer: Option<OwnedFd>,
    },
    Socket(OwnedFd),
}

pub enum Input {
    Bytes(usize),
    /// Nothing more for now.
    Drained,
    /// The connection has ended; another may come (`accept`), unless it was the inherited one.
    Closed,
}

impl Channel {
    /// The virtio-serial port of that name, if there is one (the modules are loaded and settled).
    pub fn port(name: &str) -> io::Result<Option<Self>> {
        let Ok(ports) = std::fs::read_dir("/sys/class/virtio-ports") else { return Ok(None) };
        for port in ports.flatten() {
            let found = std::fs::read_to_string(port.path().join("name")).unwrap_or_default();
            if found.trim_end() == name {
                let path = CString::new(format!("/dev/{}", port.file_name().to_string_lossy()))?;
                return sys::open(&path, libc::O_RDWR | libc::O_NONBLOCK, 0).map(|fd| Some(Self::Port(fd)));
            }
        }
        Ok(None)
    }

    pub fn vsock() -> io::Result<Self> {
        // SAFETY: an address made here, of the size that is said; the descriptor is ours.
        unsafe {
            let fd =
                cvt(libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0))?;
            let listener = OwnedFd::from_raw_fd(fd);
            let mut address: libc::sockaddr_vm = std::mem::zeroed();
            address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
            address.svm_port = VSOCK_PORT;
            address.svm_cid = libc::VMADDR_CID_ANY;
            let size = std::mem::size_of::<libc::sockaddr_vm>() as libc::socklen_t;
            cvt(libc::bind(fd, (&address as *const libc::sockaddr_vm).cast(), size))?;
            cvt(libc::listen(fd, 4))?;
            Ok(Self::Listener { listener, peer: None })
        }
    }

    /// An inherited socket, connected or (`accept`) listening.
    pub fn inherited(fd: OwnedFd) -> Self {
        let mut listens: libc::c_int = 0;
        let mut size = std::mem::size_of_val(&listens) as libc::socklen_t;
        let value = (&mut listens as *mut libc::c_int).cast();
        // SAFETY: room for one int, of the size that is said.
        unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ACCEPTCONN, value, &mut size) };
        match listens {
            0 => Self::Socket(fd),
            _ => Self::Listener { listener: fd, peer: None },
        }
    }

    pub fn register(&self, epoll: &Epoll, data: u64, accept: u64) -> io::Result<()> {
        match self {
            Self::Port(fd) | Self::Socket(fd) => epoll.add(fd.as_raw_fd(), IN | RDHUP | EDGE, data),
            Self::Listener { listener, .. } => epoll.add(listener.as_raw_fd(), IN, accept),
        }
    }

    /// Take a waiting connection; it replaces the one before, whose host is gone or has given up. Only the host may:
    /// false for one of the guest itself (vsock_loopback) or of a machine that runs in it, which is closed.
    pub fn accept(&mut self, epoll: &Epoll, data: u64) -> io::Result<bool> {
        let Self::Listener { listener, peer } = self else { return Ok(false) };
        // SAFETY: an address of the size that is said, longer than what another family writes; the descriptor is ours.
        let (fd, from) = unsafe {
            let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            let mut from: libc::sockaddr_vm = std::mem::zeroed();
            let mut size = std::mem::size_of_val(&from) as libc::socklen_t;
            let address = (&mut from as *mut libc::sockaddr_vm).cast();
            let fd = cvt(libc::accept4(listener.as_raw_fd(), address, &mut size, flags))?;
            (OwnedFd::from_raw_fd(fd), from)
        };
        if i32::from(from.svm_family) == libc::AF_VSOCK && from.svm_cid != libc::VMADDR_CID_HOST {
            return Ok(false);
        }
        epoll.add(fd.as_raw_fd(), IN | RDHUP | EDGE, data)?;
        *peer = Some(fd);
        Ok(true)
    }

    /// Whether to be woken when writing is possible: each write that drains is an edge, so only while it is not.
    pub fn want_write(&self, epoll: &Epoll, data: u64, wanted: bool) -> io::Result<()> {
        let events = IN | RDHUP | EDGE | if wanted { OUT } else { 0 };
        self.fd().map_or(Ok(()), |fd| epoll.modify(fd, events, data))
    }

    fn fd(&self) -> Option<i32> {
        match self {
            Self::Port(fd) | Self::Socket(fd) => Some(fd.as_raw_fd()),
            Self::Listener { peer, .. } => peer.as_ref().map(AsRawFd::as_raw_fd),
        }
    }

    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<Input> {
        let Some(fd) = self.fd() else { return Ok(Input::Drained) };
        match sys::read(fd, buffer) {
            Ok(0) => Ok(self.closed()),
            Ok(n) => Ok(Input::Bytes(n)),
            Err(error) if sys::would_block(&error) => Ok(Input::Drained),
            Err(error) if sys::interrupted(&error) => Ok(Input::Bytes(0)),
            Err(error) if matches!(self, Self::Port(_)) => Err(error),
            Err(_) => Ok(self.closed()),
        }
    }

    fn closed(&mut self) -> Input {
        match self {
            Self::Port(_) => Input::Drained,
            Self::Listener { peer, .. } => {
                *peer = None;
                Input::Closed
            }
            Self::Socket(_) => Input::Closed,
        }
    }

    /// Whether the connection may break and another come; a write's error has then ended this one.
    pub fn hang_up(&mut self) -> bool {
        match self {
            Self::Listener { peer, .. } => {
                *peer = None;
                true
            }
            Self::Port(_) | Self::Socket(_) => false,
        }
    }

    /// WouldBlock while the host does not read, or is not there.
    pub fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self.fd() {
            Some(fd) => sys::write(fd, bytes),
            None => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}
