//! How much of the writable disk may be in use. The host bounds the file that the disk is, which a guest's root cannot
//! undo; this makes the bound a full disk for everybody else, instead of a write that fails.

use crate::disks;
use crate::sys::cvt;
use std::ffi::CStr;
use std::fs;
use std::io;

/// What ext4 keeps for itself anyway, in blocks.
const RESERVED_MIN: u64 = 4096;

/// Let at most `bytes` of the disk be in use, what the template left there included. Costs no write to the disk.
pub fn limit(bytes: u64) -> io::Result<()> {
    let disk = disks::find("upper").ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    let name = disk.rsplit('/').next().unwrap_or_default();
    let stat = stat(c"/")?;
    fs::write(format!("/sys/fs/ext4/{name}/reserved_clusters"), reserved(&stat, bytes).to_string())
}

fn reserved(stat: &libc::statvfs, bytes: u64) -> u64 {
    stat.f_blocks.saturating_sub(bytes / stat.f_frsize.max(1)).max(RESERVED_MIN)
}

fn stat(path: &CStr) -> io::Result<libc::statvfs> {
    // SAFETY: a C string and a struct to write into.
    unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        cvt(libc::statvfs(path.as_ptr(), &mut stat))?;
        Ok(stat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_allowed_is_reserved() {
        let mut here = stat(c"/").unwrap();
        (here.f_blocks, here.f_frsize) = (100_000, 4096);
        assert_eq!(reserved(&here, 40_000 * 4096), 60_000);
        assert_eq!(reserved(&here, u64::MAX), RESERVED_MIN);
        assert_eq!(reserved(&here, 1), 100_000);
    }
}
