//! Extends a lease in the background and reports when it is lost.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::Core;
use crate::error::Error;
use crate::ledger::{Extend, Identity, Settled};

/// The lease was lost while its handler ran: another claimer may be running the event now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the lease on {key} was lost while its handler ran ({cause})")]
pub struct LeaseLost {
    /// The event that was running.
    pub key: Identity,
    /// `fenced`: the ledger granted it to another claimer. `deadline`: it could not be extended in
    /// time.
    pub cause: &'static str,
}

impl From<LeaseLost> for Error {
    fn from(lost: LeaseLost) -> Self {
        Error::Fenced { what: lost.to_string() }
    }
}

/// The state of a lease that is being extended.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeaseState {
    pub(super) deadline: Instant,
    pub(super) lost: Option<&'static str>,
}

/// Extends a lease in its own task, so that a handler that blocks its thread keeps its lease. Ends
/// when dropped.
#[derive(Debug)]
pub(super) struct Heartbeat {
    state: watch::Receiver<LeaseState>,
    /// Whether it ended because the lease is settled, or about to be.
    settled: Arc<AtomicBool>,
    task: AbortHandle,
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.settled.store(true, Ordering::SeqCst);
        self.task.abort();
    }
}

impl Heartbeat {
    pub(super) fn spawn(core: Core, extend: Extend, deadline: Instant) -> Self {
        let (send, state) = watch::channel(LeaseState { deadline, lost: None });
        let task = tokio::spawn(extend_until_lost(core, extend, send)).abort_handle();
        Heartbeat { state, settled: Arc::default(), task }
    }

    pub(super) fn state(&self) -> LeaseState {
        *self.state.borrow()
    }

    /// Completes when the lease is lost, and never if it is settled first. If the task is gone,
    /// nothing extends the lease, so it is lost at its deadline.
    pub(super) fn lost(&self) -> impl Future<Output = &'static str> + Send + 'static + use<> {
        let (mut state, settled) = (self.state.clone(), Arc::clone(&self.settled));
        async move {
            let cause = state.wait_for(|state| state.lost.is_some()).await.ok().and_then(|state| state.lost);
            if let Some(cause) = cause {
                return cause;
            }
            let deadline = state.borrow().deadline;
            sleep_until(deadline).await;
            if settled.load(Ordering::SeqCst) {
                std::future::pending::<()>().await;
            }
            "deadline"
        }
    }
}

async fn extend_until_lost(core: Core, extend: Extend, state: watch::Sender<LeaseState>) {
    let mut deadline = state.borrow().deadline;
    let cause = loop {
        // If less than a heartbeat is left (the run did not start immediately), extend while there
        // is time.
        let left = deadline.saturating_duration_since(Instant::now());
        sleep(core.settings().heartbeat.min(left / 2)).await;
        match extend_once(&core, &extend, deadline).await {
            Ok(next) => {
                deadline = next;
                state.send_modify(|state| state.deadline = next);
            }
            Err(cause) => break cause,
        }
    };
    tracing::warn!(target: "hapax", key = %extend.identity, token = %extend.token, cause, "lease lost");
    if let Some(meter) = core.meter() {
        meter.lease_lost(cause);
    }
    state.send_modify(|state| state.lost = Some(cause));
}

/// Extends once, and retries until the deadline: a failed extension does not yet mean that the
/// lease is lost, and one that succeeds before the deadline counts.
async fn extend_once(core: &Core, extend: &Extend, deadline: Instant) -> Result<Instant, &'static str> {
    let pause = (core.settings().heartbeat / 4).min(Duration::from_secs(1));
    loop {
        let sent = Instant::now();
        if sent >= deadline {
            return Err("deadline");
        }
        match timeout_at(deadline, core.batcher().extend(extend.clone())).await {
            Ok(Ok(Settled::Ok { .. })) => return Ok(sent + extend.lease - core.settings().margin()),
            Ok(Ok(Settled::Fenced { .. })) => return Err("fenced"),
            Ok(Err(error)) => {
                tracing::debug!(target: "hapax", key = %extend.identity, error = %error.chain(), "not extended yet");
                sleep(pause).await;
            }
            Err(_) => return Err("deadline"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::memory::MemoryLedger;
    use crate::ledger::{Token, Week};
    use crate::{EventId, Guard, Scope};

    /// If a heartbeat's task is gone but its lease was not settled, the lease is lost at its
    /// deadline. If the heartbeat ended because the lease is settled, nothing is lost.
    #[tokio::test(start_paused = true)]
    async fn t39_a_heartbeat_that_is_gone_loses_its_lease_at_the_deadline() {
        let guard = Guard::builder(MemoryLedger::default()).scope("billing").build().unwrap();
        let lease = guard.core.settings().lease;
        let extend = || Extend {
            identity: Identity::new(Scope::new("billing").unwrap(), EventId::new("e").unwrap()),
            week: Week::TIMELESS,
            token: Token(1),
            lease,
        };
        let begun = Instant::now();
        let gone = Heartbeat::spawn(guard.core.clone(), extend(), begun + lease);
        gone.task.abort();
        assert_eq!(gone.lost().await, "deadline");
        assert_eq!(begun.elapsed(), lease);
        let settled = Heartbeat::spawn(guard.core.clone(), extend(), Instant::now() + lease);
        let lost = settled.lost();
        drop(settled);
        assert!(tokio::time::timeout(lease * 2, lost).await.is_err(), "it was settled");
    }
}
