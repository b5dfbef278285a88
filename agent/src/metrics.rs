//! The verb `metrics`: what the guest's kernel counts.

use crate::cgroup::Sandbox;
use crate::msgpack::Writer;
use crate::sys;
use std::fs;

fn line_value(text: &str, key: &str) -> i64 {
    text.lines().find_map(|line| line.strip_prefix(key)?.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

fn first_float(path: &str) -> f64 {
    fs::read_to_string(path).ok().and_then(|text| text.split_whitespace().next()?.parse().ok()).unwrap_or(0.0)
}

pub fn reply(sandbox: Option<&Sandbox>) -> Vec<u8> {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let cpu: Vec<i64> =
        stat.lines().next().unwrap_or("").split_whitespace().skip(1).filter_map(|n| n.parse().ok()).collect();
    // SAFETY: plain integers.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1);
    let ms = |columns: &[usize]| columns.iter().map(|&at| cpu.get(at).unwrap_or(&0)).sum::<i64>() * 1000 / ticks;
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |key| line_value(&memory, key) * 1024;
    let (disk_total, disk_free) =
        sys::disk(std::ffi::CStr::from_bytes_with_nul(b"/\0").unwrap_or_default()).unwrap_or((0, 0));
    let mut reply = Writer::map(11);
    reply
        .str("cpu_user_ms")
        .int(ms(&[0, 1]))
        .str("cpu_system_ms")
        .int(ms(&[2, 5, 6]))
        .str("cpu_idle_ms")
        .int(ms(&[3, 4]));
    reply.str("mem_total").int(bytes("MemTotal:")).str("mem_available").int(bytes("MemAvailable:"));
    reply.str("mem_cache").int(bytes("Cached:") + bytes("Buffers:") + bytes("SReclaimable:"));
    reply.str("disk_total").int(disk_total as i64).str("disk_used").int(disk_total.saturating_sub(disk_free) as i64);
    reply.str("processes").int(sandbox.map_or(0, Sandbox::processes));
    reply.str("uptime_s").float(first_float("/proc/uptime")).str("load1").float(first_float("/proc/loadavg"));
    reply.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msgpack::decode;

    #[test]
    fn of_this_machine() {
        let bytes = reply(None);
        let value = decode(&bytes).unwrap();
        assert!(value.get("mem_total").int().unwrap() > value.get("mem_available").int().unwrap());
        assert!(value.get("uptime_s").float().unwrap() > 0.0);
        assert!(value.get("disk_total").int().unwrap() > 0);
    }
}
