//! Keeping a lease alive, and saying when it is lost.

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

/// The lease was lost while its handler ran: someone else may be running the event now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the lease on {key} was lost while it was being run ({cause})")]
pub struct LeaseLost {
    /// What was being run.
    pub key: Identity,
    /// `fenced`: the ledger gave it to someone else. `deadline`: it could not be extended in time.
    pub cause: &'static str,
}

impl From<LeaseLost> for Error {
    fn from(lost: LeaseLost) -> Self {
        Error::Fenced { what: lost.to_string() }
    }
}

/// What is known of a lease that is being kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeaseState {
    pub(super) deadline: Instant,
    pub(super) lost: Option<&'static str>,
}

/// Extends a lease in a task of its own, so that a handler that blocks its thread keeps its lease; ends when dropped.
#[derive(Debug)]
pub(super) struct Heartbeat {
    state: watch::Receiver<LeaseState>,
    /// Whether it was ended because the lease is settled, or about to be.
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
        let task = tokio::spawn(keep(core, extend, send)).abort_handle();
        Heartbeat { state, settled: Arc::default(), task }
    }

    pub(super) fn state(&self) -> LeaseState {
        *self.state.borrow()
    }

    /// Ends when the lease is lost; never, if it is settled before. One whose task is gone is extended by nobody: it is lost at its
    /// deadline.
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

async fn keep(core: Core, extend: Extend, state: watch::Sender<LeaseState>) {
    let mut deadline = state.borrow().deadline;
    let cause = loop {
        // One that has less left than a heartbeat (it was not run at once) is extended while there is time.
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

/// Extends once, trying again until the deadline: an extension that fails is no loss yet, and none that comes in time is
/// a false rescue.
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

    /// A heartbeat whose task is gone, though its lease was not settled: the lease is lost at its deadline. One that was ended because
    /// its lease is settled loses nothing.
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
