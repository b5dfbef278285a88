//! The guest's one interface to the outside: brought up with the addresses every sandbox has, or down.
//!
//! Down is the honest state where nothing is at its other end: a program is told so at once (ENETUNREACH) instead of waiting.
//! Not here: what may be reached, which the host decides and the guest cannot see.

use crate::failure::{at, Failure, Outcome};
use crate::sys::cvt;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicI8, Ordering};

/// What we last made of it: 1 up, 0 down, -1 nothing yet.
static LEFT_UP: AtomicI8 = AtomicI8::new(-1);
/// These are the host's too (`limits.py`): a clone's memory holds them.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 19, 255, 2);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(198, 19, 255, 1);
const MASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 252);
const GATEWAY_MAC: [u8; 6] = [0x02, 0x4c, 0x34, 0, 0, 0x02];
const NIC: &str = "eth0";
const NIC_PATH: &str = "/sys/class/net/eth0";
const IPV6: &str = "/proc/sys/net/ipv6/conf/eth0/disable_ipv6";
const RESOLV_CONF: &str = "/etc/resolv.conf";
const RESOLVER: &str = "\
# Names are answered by this sandbox's network policy, which is kept on the host: a name that
# is not allowed does not exist. `llm4agents net why ID URL` says why, `llm4agents net set ID ...` changes it.
nameserver 198.19.255.1\n";

/// At boot: up, if there is such an interface. Whether something is at its other end a clone is told (`post_restore`).
pub fn boot() -> Outcome<()> {
    if !Path::new(NIC_PATH).exists() {
        return Ok(());
    }
    resolver();
    set(true)
}

/// After a restore. What we left it at is not even looked at: in a fresh clone each system call is code to translate. So a
/// guest's root who has changed it since finds it changed.
pub fn restore(up: bool) -> Outcome<()> {
    if LEFT_UP.load(Ordering::Relaxed) == i8::from(up) {
        return Ok(());
    }
    set(up)
}

/// Up, with its address, route and the gateway's hardware address, or down. What is so already is left alone.
pub fn set(up: bool) -> Outcome<()> {
    let control = control().map_err(at("open a socket"))?;
    let mut request = named();
    ioctl(&control, libc::SIOCGIFFLAGS, &mut request).map_err(|error| match error.raw_os_error() {
        Some(libc::ENODEV) => Failure::new("not_found", "there is no eth0"),
        _ => Failure::io(&error, "look at eth0"),
    })?;
    LEFT_UP.store(-1, Ordering::Relaxed);
    // SAFETY: what SIOCGIFFLAGS has written.
    let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
    if (flags & libc::IFF_UP != 0) == up {
        LEFT_UP.store(up.into(), Ordering::Relaxed);
        return Ok(());
    }
    if up {
        // No IPv6 here (loopback keeps its own): the host drops it, and programs would try it first.
        let _ = fs::write(IPV6, "1");
        for (what, address) in [(libc::SIOCSIFADDR, ADDRESS), (libc::SIOCSIFNETMASK, MASK)] {
            let mut request = named();
            request.ifr_ifru.ifru_addr = inet(address);
            ioctl(&control, what, &mut request).map_err(at("give eth0 its address"))?;
        }
    }
    request.ifr_ifru.ifru_flags = (if up { flags | libc::IFF_UP } else { flags & !libc::IFF_UP }) as libc::c_short;
    ioctl(&control, libc::SIOCSIFFLAGS, &mut request)
        .map_err(at(format_args!("set eth0 {}", if up { "up" } else { "down" })))?;
    if up {
        route(&control).map_err(at("set the default route"))?;
        // One round trip less, and nothing to be asked for.
        neighbour(&control).map_err(at("set the gateway's hardware address"))?;
    }
    LEFT_UP.store(up.into(), Ordering::Relaxed);
    Ok(())
}

/// An image that names no resolver gets ours; one that does keeps it (every address leads to ours).
fn resolver() {
    let old = fs::read(RESOLV_CONF).unwrap_or_default();
    if old.split(|byte| *byte == b'\n').any(|line| line.starts_with(b"nameserver")) {
        return;
    }
    let _ = fs::create_dir_all("/etc");
    let _ = fs::remove_file(RESOLV_CONF); // a link to what a resolver that does not run here would write
    let _ = fs::write(RESOLV_CONF, RESOLVER);
}

fn control() -> io::Result<OwnedFd> {
    // SAFETY: plain integers; the descriptor is ours after success.
    unsafe {
        let fd = cvt(libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

fn named() -> libc::ifreq {
    // SAFETY: plain data, of which zeros are a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(NIC.bytes()) {
        *place = byte as libc::c_char;
    }
    request
}

fn inet(address: Ipv4Addr) -> libc::sockaddr {
    // SAFETY: plain data, and a sockaddr_in is as large as a sockaddr.
    unsafe {
        let mut inet: libc::sockaddr_in = std::mem::zeroed();
        inet.sin_family = libc::AF_INET as libc::sa_family_t;
        inet.sin_addr.s_addr = u32::from(address).to_be();
        std::mem::transmute(inet)
    }
}

fn ioctl<T>(control: &OwnedFd, what: libc::c_ulong, request: &mut T) -> io::Result<()> {
    // SAFETY: the struct that call wants, which lives through it.
    cvt(unsafe { libc::ioctl(control.as_raw_fd(), what as _, request as *mut T) }).map(drop)
}

fn route(control: &OwnedFd) -> io::Result<()> {
    let device = CStr::from_bytes_with_nul(b"eth0\0").unwrap_or_default();
    // SAFETY: plain data, of which zeros are a value.
    let mut entry: libc::rtentry = unsafe { std::mem::zeroed() };
    entry.rt_dst = inet(Ipv4Addr::UNSPECIFIED);
    entry.rt_genmask = inet(Ipv4Addr::UNSPECIFIED);
    entry.rt_gateway = inet(GATEWAY);
    entry.rt_flags = (libc::RTF_UP | libc::RTF_GATEWAY) as libc::c_ushort;
    entry.rt_dev = device.as_ptr().cast_mut();
    match ioctl(control, libc::SIOCADDRT, &mut entry) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        done => done,
    }
}

fn neighbour(control: &OwnedFd) -> io::Result<()> {
    // SAFETY: plain data, of which zeros are a value.
    let mut entry: libc::arpreq = unsafe { std::mem::zeroed() };
    entry.arp_pa = inet(GATEWAY);
    entry.arp_ha.sa_family = libc::ARPHRD_ETHER;
    for (place, byte) in entry.arp_ha.sa_data.iter_mut().zip(GATEWAY_MAC) {
        *place = byte as libc::c_char;
    }
    entry.arp_flags = libc::ATF_COM | libc::ATF_PERM;
    for (place, byte) in entry.arp_dev.iter_mut().zip(NIC.bytes()) {
        *place = byte as libc::c_char;
    }
    ioctl(control, libc::SIOCSARP, &mut entry)
}
