//! See `hapax::testing::fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hapax::testing::fuzz::request(data));
