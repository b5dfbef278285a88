//! PID 1's duties.
pub fn run() -> ! { loop {} }
