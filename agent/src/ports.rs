//! The verb `ports`: TCP sockets that listen, as the kernel lists them.

use crate::msgpack::Writer;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Of a reply; the lowest ports are told.
const PORTS_MAX: usize = 250;
const LISTEN: &str = "0A";

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Port {
    port: u16,
    address: IpAddr,
    inode: i64,
}

pub fn reply() -> Vec<u8> {
    let mut ports = Vec::new();
    for file in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let table = fs::read_to_string(file).unwrap_or_default();
        ports.extend(table.lines().skip(1).filter_map(parse));
    }
    ports.sort();
    ports.dedup_by_key(|port| (port.port, port.address));
    ports.truncate(PORTS_MAX);
    let mut reply = Writer::map(1);
    reply.str("ports").begin_array(ports.len());
    for port in ports {
        reply.begin_map(3);
        reply.str("port").int(port.port.into()).str("address").str(&port.address.to_string());
        reply.str("inode").int(port.inode);
    }
    reply.0
}

/// A line of /proc/net/tcp or tcp6; None unless it listens.
fn parse(line: &str) -> Option<Port> {
    let mut words = line.split_ascii_whitespace();
    let (address, port) = words.nth(1)?.split_once(':')?;
    if words.nth(1)? != LISTEN {
        return None;
    }
    // What the kernel prints are the address's 32-bit words in the machine's own order.
    let word = |at: usize| u32::from_str_radix(address.get(8 * at..8 * at + 8)?, 16).ok().map(u32::to_ne_bytes);
    let address = if address.len() == 8 {
        IpAddr::V4(Ipv4Addr::from(word(0)?))
    } else {
        let mut bytes = [0; 16];
        for at in 0..4 {
            bytes[4 * at..4 * at + 4].copy_from_slice(&word(at)?);
        }
        IpAddr::V6(Ipv6Addr::from(bytes))
    };
    let inode = words.nth(5)?.parse().ok()?;
    Some(Port { port: u16::from_str_radix(port, 16).ok()?, address, inode })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel() {
        let line = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000 0 31337 1 x";
        assert_eq!(parse(line), Some(Port { port: 8080, address: "127.0.0.1".parse().unwrap(), inode: 31_337 }));
        assert_eq!(parse(&line.replace(" 0A ", " 01 ")), None);
        let line = "   1: 00000000000000000000000001000000:0016 00000000000000000000000000000000:0000 0A \
                    00000000:00000000 00:00000000 00000000     0        0 7 1 x";
        assert_eq!(parse(line), Some(Port { port: 22, address: "::1".parse().unwrap(), inode: 7 }));
        assert_eq!((parse(""), parse("0: zz:1 y 0A")), (None, None));
    }

    #[test]
    fn a_socket_that_listens_is_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = i64::from(listener.local_addr().unwrap().port());
        let bytes = reply();
        let value = crate::msgpack::decode(&bytes).unwrap();
        let crate::msgpack::Value::Array(ports) = value.get("ports") else { panic!() };
        assert!(ports.len() == PORTS_MAX || ports.iter().any(|found| found.get("port").int() == Some(port)));
    }
}
