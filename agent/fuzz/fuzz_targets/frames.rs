//! Any bytes in any split: no panic, no growth, and the preamble after them is found.
#![no_main]

use libfuzzer_sys::fuzz_target;
use llm4agents_agent::frame::{self, Decoder, Event};

fuzz_target!(|data: &[u8]| {
    let Some((&step, noise)) = data.split_first() else { return };
    let step = 1 + usize::from(step) * 17;
    let mut bytes = noise.to_vec();
    bytes.extend_from_slice(&vec![0; frame::FRAME_MAX]);
    frame::preamble(&mut bytes, 0x1234_5678_9ABC_DEF1);
    frame::encode(&mut bytes, 0x9ABC_DEF1, 1, frame::DATA, 0, b"found");
    let mut decoder = Decoder::new();
    let mut last = Vec::new();
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let spare = decoder.spare();
        let n = spare.len().min(step).min(rest.len());
        assert!(n > 0);
        spare[..n].copy_from_slice(&rest[..n]);
        decoder.filled(n);
        rest = &rest[n..];
        while let Some(event) = decoder.next() {
            if let Event::Frame(frame) = event {
                assert!(frame.payload.len() <= frame::PAYLOAD_MAX);
                last = frame.payload.to_vec();
            }
        }
    }
    assert_eq!(last, b"found");
});
