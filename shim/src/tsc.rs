//! How fast this processor's time-stamp counter runs, measured against CLOCK_MONOTONIC_RAW.
//!
//! A guest's clock is only as right as the figure it boots with (`tsc_early_khz`), and cpuinfo's MHz is the
//! momentary one on hosts that scale: half the value makes a guest's clock run at twice the speed.

const SPAN_NS: i64 = 200_000_000;

#[cfg(target_arch = "x86_64")]
fn sample() -> (u64, i64) {
    // The reading whose clock call took least: the one that was not interrupted.
    let mut best = (u64::MAX, 0, 0);
    for _ in 0..64 {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: rdtsc is in every x86-64.
        let before = unsafe { core::arch::x86_64::_rdtsc() };
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_RAW, &mut now) };
        let after = unsafe { core::arch::x86_64::_rdtsc() };
        if after - before < best.0 {
            best = (after - before, before + (after - before) / 2, now.tv_sec * 1_000_000_000 + now.tv_nsec);
        }
    }
    (best.1, best.2)
}

/// kHz, over 200 ms.
#[cfg(target_arch = "x86_64")]
pub fn measure() -> Result<u64, String> {
    let (tsc, nanos) = sample();
    std::thread::sleep(std::time::Duration::from_nanos(SPAN_NS as u64));
    let (tsc_after, nanos_after) = sample();
    let span = (nanos_after - nanos) as u128;
    if span == 0 || tsc_after <= tsc {
        return Err("the time-stamp counter of this machine does not run".into());
    }
    Ok(((tsc_after - tsc) as u128 * 1_000_000 / span) as u64)
}

#[cfg(not(target_arch = "x86_64"))]
pub fn measure() -> Result<u64, String> {
    Err("no time-stamp counter on this architecture".into())
}
