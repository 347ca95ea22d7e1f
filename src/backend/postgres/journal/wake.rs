//! Wakes readers that wait for events: in this process by a signal, in others by one merged NOTIFY
//! after the commit. Where neither arrives (a pooler, an `append_in` without a wake-up), readers
//! poll.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::AssertSqlSafe;
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::Inner;
use super::read::{follows, next, settle};
use crate::error::Result;
use crate::journal::Position;

/// Appends within this time of a NOTIFY share the next one.
const MERGED: Duration = Duration::from_millis(5);
/// A waiting reader polls for the first time after this long, then after twice as long, and so on.
const POLL_MIN: Duration = Duration::from_millis(1);
/// The longest interval at which a hole is polled.
const HOLE_POLL_MAX: Duration = Duration::from_millis(20);
/// How long a listener that cannot connect waits before it tries again.
const LISTEN_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Wake {
    channel: String,
    signal: watch::Sender<u64>,
    /// Whether a NOTIFY is scheduled that has not begun.
    due: AtomicBool,
    sent: Mutex<Option<Instant>>,
    listener: Mutex<Option<JoinHandle<()>>>,
}

impl Wake {
    pub(super) fn new(schema: &str) -> Self {
        Wake {
            channel: format!("hapax_journal_{schema}"),
            signal: watch::Sender::new(0),
            due: AtomicBool::new(false),
            sent: Mutex::default(),
            listener: Mutex::default(),
        }
    }
}

impl Drop for Wake {
    fn drop(&mut self) {
        let listener = self.listener.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(listener) = listener.take() {
            listener.abort();
        }
    }
}

/// Clears `due` when dropped: however the task ends, the next append can schedule another.
struct Due(Arc<Inner>);

impl Drop for Due {
    fn drop(&mut self) {
        self.0.wake.due.store(false, Ordering::SeqCst);
    }
}

pub(super) fn wake(inner: &Arc<Inner>) {
    let wake = &inner.wake;
    bump(&wake.signal);
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    if wake.due.swap(true, Ordering::SeqCst) {
        return;
    }
    let due = Due(Arc::clone(inner));
    runtime.spawn(async move {
        let inner = Arc::clone(&due.0);
        let sent = *inner.wake.sent.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sent) = sent {
            tokio::time::sleep_until(sent + MERGED).await;
        }
        *inner.wake.sent.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        drop(due); // commits from here on schedule their own
        let query = sqlx::query_as::<_, (String, String)>(AssertSqlSafe(Arc::clone(&inner.sql.wake)));
        if let Err(error) = inner.database.fetch_all(query.bind(&inner.wake.channel)).await {
            tracing::debug!(target: "hapax", %error, "a wake-up was not sent; readers look by themselves");
        }
    });
}

fn bump(signal: &watch::Sender<u64>) {
    signal.send_modify(|count| *count = count.wrapping_add(1));
}

/// Starts the listener, once, unless a pooler is in front: it would not forward notifications.
fn listen(inner: &Inner) {
    if inner.database.pooled() {
        return;
    }
    let mut listener = inner.wake.listener.lock().unwrap_or_else(PoisonError::into_inner);
    if listener.as_ref().is_none_or(JoinHandle::is_finished) {
        let options = (*inner.pool().connect_options()).clone();
        let (channel, signal) = (inner.wake.channel.clone(), inner.wake.signal.clone());
        *listener = Some(tokio::spawn(receive(options, channel, signal)));
    }
}

async fn receive(options: PgConnectOptions, channel: String, signal: watch::Sender<u64>) {
    // Its own connection, so that it takes none from the pool and returns none that is listening.
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .max_lifetime(None)
        .idle_timeout(None)
        .acquire_timeout(Duration::from_secs(10))
        .connect_lazy_with(options);
    loop {
        let listening = async {
            let mut listener = PgListener::connect_with(&pool).await?;
            listener.listen(&channel).await?;
            loop {
                bump(&signal); // also at the start: readers then poll for earlier events
                listener.recv().await?;
            }
        };
        let ended: sqlx::Result<()> = listening.await;
        if let Err(error) = ended {
            tracing::debug!(target: "hapax", %error, "LISTEN failed; readers poll for appends instead");
        }
        tokio::time::sleep(LISTEN_PAUSE).await;
    }
}

/// Waits until something can be read after a position. At a hole, waits until every transaction
/// that could fill it has ended.
pub(super) async fn wait(inner: &Inner, after: &Position, at_most: Duration) -> Result<()> {
    listen(inner);
    let after = after.number();
    let end = Instant::now() + at_most;
    let mut signal = inner.wake.signal.subscribe();
    let mut pause = POLL_MIN;
    loop {
        signal.borrow_and_update();
        let settled = inner.horizon.known().settled;
        let found = next(inner, after).await?;
        match found {
            Some(found)
                if follows(after, found, settled) || follows(after, found, settle(inner).await?.settled) =>
            {
                return Ok(());
            }
            _ => {}
        }
        let until = end.min(Instant::now() + pause);
        if found.is_some() {
            // A hole closes when a transaction ends, which sends no signal.
            tokio::time::sleep_until(until).await;
            pause = (pause * 2).min(HOLE_POLL_MAX);
        } else {
            // A timeout is as good as a wake-up.
            let _ = tokio::time::timeout_at(until, signal.changed()).await;
            pause = (pause * 2).min(inner.settings.poll_max.max(POLL_MIN));
        }
        if Instant::now() >= end {
            return Ok(());
        }
    }
}
