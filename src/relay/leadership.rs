//! Keeps leadership, and detects its loss.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::{End, RelaySettings};
use crate::error::Error;
use crate::journal::Journal;
use crate::ledger::Token;

#[derive(Debug, Clone, Copy)]
struct LeaseState {
    /// Until when leadership may be used, by this machine's monotonic clock, counted from before
    /// the request to the journal.
    deadline: Instant,
    lost: Option<&'static str>,
}

/// Renews leadership in a task of its own, so that it survives while the relay waits. Stops when
/// dropped.
#[derive(Debug)]
pub(super) struct LeadershipHeartbeat {
    pub(super) token: Token,
    state: watch::Receiver<LeaseState>,
    task: AbortHandle,
}

impl Drop for LeadershipHeartbeat {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl LeadershipHeartbeat {
    /// Keeps leadership that was requested at `asked`.
    pub(super) fn spawn(
        journal: Arc<dyn Journal>,
        settings: Arc<RelaySettings>,
        token: Token,
        asked: Instant,
    ) -> Self {
        let deadline = asked + settings.lease - settings.margin();
        let (send, state) = watch::channel(LeaseState { deadline, lost: None });
        let task = tokio::spawn(renew_until_lost(journal, settings, token, send)).abort_handle();
        LeadershipHeartbeat { token, state, task }
    }

    /// Returns while leadership may be used. If its time is up, waits until it is renewed or lost.
    pub(super) async fn hold(&self) -> Result<(), End> {
        let mut state = self.state.clone();
        loop {
            let now = *state.borrow_and_update();
            match now.lost {
                Some(cause) => return Err(End::Lost(cause)),
                None if Instant::now() < now.deadline => return Ok(()),
                None => {}
            }
            if state.changed().await.is_err() {
                return Err(End::Lost("deadline")); // the task is gone
            }
        }
    }

    /// Returns when leadership is lost.
    pub(super) async fn lost(&self) -> End {
        let mut state = self.state.clone();
        let lost = state.wait_for(|state| state.lost.is_some()).await;
        End::Lost(lost.ok().and_then(|state| state.lost).unwrap_or("deadline"))
    }
}

async fn renew_until_lost(
    journal: Arc<dyn Journal>,
    settings: Arc<RelaySettings>,
    token: Token,
    state: watch::Sender<LeaseState>,
) {
    let mut deadline = state.borrow().deadline;
    let cause = loop {
        sleep_until((Instant::now() + settings.heartbeat()).min(deadline)).await;
        match renew_once(&*journal, &settings, token, deadline).await {
            Ok(next) => {
                deadline = next;
                state.send_modify(|state| state.deadline = next);
            }
            Err(cause) => break cause,
        }
    };
    state.send_modify(|state| state.lost = Some(cause));
}

/// Renews leadership once, retrying until the deadline. A process that was suspended past the
/// deadline asks once more, because perhaps no other relay has taken over.
async fn renew_once(
    journal: &dyn Journal,
    settings: &RelaySettings,
    token: Token,
    deadline: Instant,
) -> Result<Instant, &'static str> {
    let pause = (settings.heartbeat() / 4).min(Duration::from_secs(1));
    loop {
        let sent = Instant::now();
        let until = deadline.max(sent + settings.margin());
        match timeout_at(until, journal.renew_leadership(&settings.name, token, settings.lease)).await {
            Ok(Ok(())) => return Ok(sent + settings.lease - settings.margin()),
            Ok(Err(Error::Fenced { .. })) => return Err("fenced"),
            Ok(Err(error)) if Instant::now() < deadline => {
                tracing::debug!(target: "hapax::relay", relay = %settings.name, error = %error.chain(), "leadership is not renewed yet");
                sleep(pause).await;
            }
            Ok(Err(_)) | Err(_) => return Err("deadline"),
        }
    }
}
