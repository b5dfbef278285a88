//! Handing out descriptors that live as long as the VMM: what a later server, or a restarted process of it, goes on with.
//!
//! One message to each connection (the names, joined by commas, and the descriptors in that order), then it is closed.
//! Not here: what they are. Nothing a client does is waited for; who it is, the kernel says.

use crate::config::{Config, SERVED_MAX};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Connections answered before the keeper looks at everything else again.
const BURST: usize = 16;

/// Answer who waits at the socket.
pub fn answer(config: &Config) {
    let Some(listening) = config.serve_socket else { return };
    for _ in 0..BURST {
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: a socket of ours and no address wanted; the descriptor is ours after success.
        let client = unsafe {
            match libc::accept4(listening, std::ptr::null_mut(), std::ptr::null_mut(), flags) {
                fd if fd < 0 => return,
                fd => OwnedFd::from_raw_fd(fd),
            }
        };
        if may(&client) {
            send(&client, config);
        }
    }
}

/// Our own user, or root.
fn may(client: &OwnedFd) -> bool {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut size = std::mem::size_of_val(&peer) as libc::socklen_t;
    // SAFETY: a struct of the size that is said; geteuid cannot fail.
    unsafe {
        let place = (&mut peer as *mut libc::ucred).cast();
        libc::getsockopt(client.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, place, &mut size) == 0
            && (peer.uid == 0 || peer.uid == libc::geteuid())
    }
}

/// One message into an empty buffer: it fits, or the client has gone.
fn send(client: &OwnedFd, config: &Config) {
    let names: Vec<&str> = config.serve.iter().map(|(name, _)| name.as_str()).collect();
    let names = names.join(",");
    let fds: Vec<RawFd> = config.serve.iter().map(|&(_, fd)| fd).collect();
    let bytes = std::mem::size_of_val(&fds[..]);
    #[repr(align(8))]
    struct Buffer([u8; 64 + SERVED_MAX * std::mem::size_of::<RawFd>()]);
    let mut buffer = Buffer([0; 64 + SERVED_MAX * std::mem::size_of::<RawFd>()]);
    let mut part = libc::iovec { iov_base: names.as_ptr().cast_mut().cast(), iov_len: names.len() };
    // SAFETY: everything pointed to lives through the call; the configuration bounds the descriptors, so the control
    // message fits its buffer.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
        if !fds.is_empty() {
            message.msg_control = buffer.0.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(bytes as u32) as usize;
            let control = libc::CMSG_FIRSTHDR(&message);
            (*control).cmsg_level = libc::SOL_SOCKET;
            (*control).cmsg_type = libc::SCM_RIGHTS;
            (*control).cmsg_len = libc::CMSG_LEN(bytes as u32) as usize;
            std::ptr::copy_nonoverlapping(fds.as_ptr().cast(), libc::CMSG_DATA(control), bytes);
        }
        libc::sendmsg(client.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
    }
}
