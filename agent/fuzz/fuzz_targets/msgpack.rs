//! Any payload: no panic, and what is read of it is within it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use llm4agents_agent::msgpack;

fuzz_target!(|data: &[u8]| {
    if let Some(value) = msgpack::decode(data) {
        let _ = value.get("verb").bytes().map(<[u8]>::len);
    }
});
