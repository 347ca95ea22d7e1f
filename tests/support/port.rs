//! Ports for servers that a test starts, above all for those that it kills and starts again on the same port.
#![allow(dead_code)] // each test binary uses its part
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Below the ports that the system gives to outgoing connections (from 32768), so that none of them takes the port while
/// its server is down; and below those of the shared servers (from 25432).
const FIRST: u32 = 10_240;
const COUNT: u32 = 15_000;

/// A port that nobody has now. Processes that run at the same time begin far apart.
pub fn free() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let begin = std::process::id().wrapping_mul(7_919);
    (0..COUNT)
        .map(|_| begin.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT + FIRST)
        .filter_map(|port| u16::try_from(port).ok())
        .find(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok())
        .unwrap()
}
