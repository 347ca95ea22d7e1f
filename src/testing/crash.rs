//! Crash points: a named step at which a test build kills its own process, as a power cut would.
//!
//! `HAPAX_CRASH_AT=claim.after:3` kills it at the third time it comes by `crash_point!("claim.after")`. A test kills at
//! n = 1, 2, … until a run is clean, and looks at what is left each time. `claim.after:3:stop` stops it there instead
//! (SIGSTOP), as a frozen machine does: its connections stay open. `claim.after:3:panic` panics there, as a bug would.
//! Without the feature `testing` the macro is nothing at all.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The variable that names the point and the hit to die at.
pub const VARIABLE: &str = "HAPAX_CRASH_AT";

/// Where to die, read once.
static PLAN: OnceLock<Option<Plan>> = OnceLock::new();
static HITS: AtomicU64 = AtomicU64::new(0);

/// What happens at a point.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    at: String,
    hit: u64,
    how: How,
}

/// How it ends there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// The process is killed.
    Kill,
    /// The process is stopped.
    Stop,
    /// The thread, or the task, panics.
    Panic,
}

/// Kills or stops the process, or panics, if this is the point and the hit that [`VARIABLE`] names. Use `crash_point!`.
pub fn crash_point(name: &str) {
    let plan = PLAN.get_or_init(|| std::env::var(VARIABLE).ok().and_then(|text| plan(&text)));
    let Some(plan) = plan else { return };
    if plan.at == name && HITS.fetch_add(1, Ordering::SeqCst) + 1 == plan.hit {
        match plan.how {
            How::Kill => end_here("-9"),
            How::Stop => end_here("-STOP"),
            How::Panic => panic!("the crash point {name} was told to panic"),
        }
    }
}

/// Whether [`VARIABLE`] names this point, whatever the hit.
pub(crate) fn is_planned(name: &str) -> bool {
    let plan = PLAN.get_or_init(|| std::env::var(VARIABLE).ok().and_then(|text| plan(&text)));
    plan.as_ref().is_some_and(|plan| plan.at == name)
}

/// Whether `HAPAX_MUTANT` names this step: it is then to be done wrong.
pub(crate) fn is_mutant(name: &str) -> bool {
    static MUTANT: OnceLock<Option<String>> = OnceLock::new();
    MUTANT.get_or_init(|| std::env::var("HAPAX_MUTANT").ok()).as_deref() == Some(name)
}

fn plan(text: &str) -> Option<Plan> {
    let hows = [(":stop", How::Stop), (":panic", How::Panic)];
    let found = hows.into_iter().find_map(|(end, how)| Some((text.strip_suffix(end)?, how)));
    let (text, how) = found.unwrap_or((text, How::Kill));
    let (at, hit) = text.rsplit_once(':')?;
    Some(Plan { at: at.to_owned(), hit: hit.parse().ok()?, how })
}

/// A signal to ourselves. SIGKILL: no destructor, no flush, no goodbye; an abort would still be caught by handlers and
/// hooks. This thread does not go on: until a signal reaches all threads of a process, some of them still run.
fn end_here(signal: &str) -> ! {
    let _ = std::process::Command::new("kill").args([signal, &std::process::id().to_string()]).status();
    loop {
        std::thread::park(); // the signal is on its way
    }
}

#[cfg(test)]
mod tests {
    use super::{How, Plan, plan};

    #[test]
    fn a_plan_is_a_name_and_a_hit() {
        let at = |how| Plan { at: "claim.after".into(), hit: 3, how };
        assert_eq!(plan("claim.after:3"), Some(at(How::Kill)));
        assert_eq!(plan("claim.after:3:stop"), Some(at(How::Stop)));
        assert_eq!(plan("claim.after:3:panic"), Some(at(How::Panic)));
        assert_eq!(plan("claim.after"), None);
        assert_eq!(plan("claim.after:x"), None);
    }
}
