//! Keys that were asked for and given up.
//!
//! A begin without an answer may be granted all the same, now or when the store is back. Nobody would run
//! under it and nobody would release it: its retries would get 409 for a lease, and under `Hold` a person
//! would have to decide about a request that never ran. So it is asked for again, under its nonce, until
//! the store says how it ended, and released.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::service::Shared;
use crate::error::Error;
use crate::keyed::{Begin, Begun, Ended};

/// The most keys that may wait to be released. Beyond that, leases expire.
const WAITING_MAX: usize = 10_000;
/// How long a store that gives no answer is asked.
const FOR_MAX: Duration = Duration::from_hours(1);
/// The pause after a question without an answer. It doubles.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The keys of a layer that wait to be released. One task asks for them, one after another: a store that
/// comes back is not met by a crowd.
#[derive(Debug, Default, Clone)]
pub(super) struct GivenUp(Arc<Mutex<Waiting>>);

#[derive(Debug, Default)]
struct Waiting {
    begins: VecDeque<(Begin, Instant)>,
    /// Whether a task serves them.
    served: bool,
}

impl GivenUp {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next one; `None` ends the task.
    fn next(&self) -> Option<(Begin, Instant)> {
        let mut waiting = self.lock();
        let next = waiting.begins.pop_front();
        waiting.served = next.is_some();
        next
    }
}

/// Gives back what this begin was, or will be, granted.
pub(super) fn release_key(layer: &Arc<Shared>, begin: &Begin) {
    let mut waiting = layer.given_up.lock();
    if waiting.begins.len() >= WAITING_MAX {
        tracing::warn!(target: "hapax", key = %begin.key, "a request was abandoned, and too many are waiting to be released; if it was granted, its lease will expire");
        return;
    }
    waiting.begins.push_back((begin.clone(), Instant::now()));
    if !std::mem::replace(&mut waiting.served, true) {
        tokio::spawn(serve(Arc::clone(layer)));
    }
}

async fn serve(layer: Arc<Shared>) {
    let mut pause = PAUSE_MIN;
    while let Some((begin, since)) = layer.given_up.next() {
        if is_over(&layer, &begin).await {
            pause = PAUSE_MIN;
            continue;
        }
        if since.elapsed() >= FOR_MAX {
            tracing::warn!(target: "hapax", key = %begin.key, "a request was abandoned, and the store does not say what became of it; if it was granted, its lease will expire");
            continue;
        }
        // Behind the others: what is undecided keeps nobody waiting.
        layer.given_up.lock().begins.push_back((begin, since));
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Whether nothing is left to release.
async fn is_over(layer: &Shared, begin: &Begin) -> bool {
    match layer.bounded("asking for a key again", layer.keys.begin(begin)).await {
        Ok(Begun::First(lease)) => {
            let release = layer.keys.release(&lease, Ended::Undone);
            match layer.bounded("giving back a key", release).await {
                Ok(()) | Err(Error::Fenced { .. }) => true,
                Err(error) => !error.is_retryable(),
            }
        }
        // An open transaction has it, and that may be the first try.
        Ok(Begun::Running { until: None }) => false,
        Ok(_) => true,
        Err(error) => !error.is_retryable(),
    }
}
