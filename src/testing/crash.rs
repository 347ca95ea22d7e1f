//! Crash points: places in the code where a test kills the process, as `kill -9` would.
//!
//! `HAPAX_CRASH=name` kills the process when it reaches `crash_point!("name")` for the first time, `HAPAX_CRASH=name:3` at
//! the third. Only builds with the feature `testing` have them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// The variable that says where to crash.
pub const VARIABLE: &str = "HAPAX_CRASH";

static PLAN: OnceLock<Option<(String, u32)>> = OnceLock::new();
static HITS: AtomicU32 = AtomicU32::new(0);

fn plan() -> Option<(String, u32)> {
    let plan = std::env::var(VARIABLE).ok()?;
    match plan.split_once(':') {
        Some((name, hit)) => Some((name.to_owned(), hit.parse().expect("HAPAX_CRASH is name or name:hit"))),
        None => Some((plan, 1)),
    }
}

/// A crash point was reached.
pub fn reached(name: &str) {
    if let Some((wanted, hit)) = PLAN.get_or_init(plan)
        && wanted == name
        && HITS.fetch_add(1, Ordering::SeqCst) + 1 == *hit
    {
        die(name);
    }
}

fn die(name: &str) -> ! {
    eprintln!("crash point {name} reached");
    let pid = std::process::id().to_string();
    // Nothing of the process may run on: no destructors, no handlers, no last words.
    let _ = std::process::Command::new("kill").args(["-9", &pid]).status();
    std::process::abort()
}
