//! The one thread that writes. It puts all waiting requests into one transaction, so they share one
//! flush to disk. Between requests it sends heartbeats for this process's members and sweeps old
//! records.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tokio::sync::{Notify, oneshot};

use super::{group, log};
use crate::backend::sqlite::connect::{begin, commit, patiently, roll_back};
use crate::backend::sqlite::requests::{self, Kind};
use crate::clock::{Clock, Time};
use crate::error::Result;

/// The most requests in one transaction.
const REQUESTS_MAX: usize = 256;
/// The longest time between heartbeats.
const BEAT_MAX: Duration = Duration::from_secs(3);
/// The shortest time between heartbeats.
const BEAT_MIN: Duration = Duration::from_millis(20);

/// A request runs on the connection, with the time of its transaction.
pub(super) enum AtTime {}

impl Kind for AtTime {
    type Context<'c> = (&'c Connection, Time);
}

type Work = Box<dyn requests::Work<AtTime>>;

/// Sends requests to the writer thread.
pub(super) struct Requests(requests::Requests<AtTime>);

impl Requests {
    /// Runs a function in a transaction, perhaps together with other requests; see
    /// [`requests::Requests::send`].
    pub(super) fn send<T: Send + 'static>(
        &self,
        mut run: impl FnMut(&Connection, Time) -> Result<T> + Send + 'static,
    ) -> oneshot::Receiver<Result<T>> {
        self.0.send(move |(conn, now)| run(conn, *now))
    }
}

/// State shared by the writer thread and the members of this process.
#[derive(Default)]
pub(super) struct Common {
    /// The members in this process, and how often each needs a heartbeat.
    members: Mutex<BTreeMap<i64, Duration>>,
    /// Signalled after each commit of this process.
    pub(super) changed: Notify,
    /// Suppresses heartbeats, as if the process were stopped (tests only).
    pub(super) silent: AtomicBool,
}

impl Common {
    fn members(&self) -> MutexGuard<'_, BTreeMap<i64, Duration>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts heartbeats for a member.
    pub(super) fn begin(&self, member: i64, session: Duration, revoke: Duration) {
        self.members().insert(member, (session.min(revoke) / 4).clamp(BEAT_MIN, BEAT_MAX));
    }

    /// Stops heartbeats for a member.
    pub(super) fn end(&self, member: i64) {
        self.members().remove(&member);
    }
}

/// Starts the thread. It ends when the `Requests` are dropped.
pub(super) fn start(
    conn: Connection,
    clock: Arc<dyn Clock>,
    common: Arc<Common>,
    sweep_interval: Duration,
) -> std::io::Result<(Requests, std::thread::JoinHandle<()>)> {
    let (send, receive) = requests::Requests::new();
    let mut writer = Writer {
        conn,
        clock,
        common,
        sweep_interval,
        beaten: Instant::now(),
        sweep_at: Time::default(),
        sweep_waits: BEAT_MAX,
    };
    let thread =
        std::thread::Builder::new().name("hapax-bus-write".into()).spawn(move || writer.serve(&receive))?;
    Ok((Requests(send), thread))
}

struct Writer {
    conn: Connection,
    clock: Arc<dyn Clock>,
    common: Arc<Common>,
    sweep_interval: Duration,
    /// When the last heartbeat was sent.
    beaten: Instant,
    /// When to sweep again.
    sweep_at: Time,
    /// How long to wait for requests before continuing a sweep.
    sweep_waits: Duration,
}

impl Writer {
    fn serve(&mut self, requests: &Receiver<Work>) {
        loop {
            match requests.recv_timeout(self.beat_in().unwrap_or(BEAT_MAX).min(self.sweep_waits)) {
                Ok(first) => {
                    let group = requests::group(first, requests, REQUESTS_MAX);
                    requests::handle(group, |group| self.transact(group));
                    self.common.changed.notify_waiters();
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.heartbeat();
            self.sweep();
        }
    }

    fn transact(&self, group: &mut [Work]) -> Result<()> {
        patiently(|| self.once(|conn, now| group.iter_mut().try_for_each(|work| work.run(&mut (conn, now)))))
    }

    fn once<T>(&self, run: impl FnOnce(&Connection, Time) -> Result<T>) -> Result<T> {
        begin(&self.conn, "beginning a transaction of the bus")?;
        // Read the clock after taking the write lock: a later writer then has a later time.
        let now = self.clock.now();
        let result = run(&self.conn, now)
            .and_then(|value| commit(&self.conn, "committing to the bus").map(|()| value));
        if result.is_err() {
            roll_back(&self.conn);
        }
        result
    }

    /// How long until a heartbeat is due. `None` if this process has no members.
    fn beat_in(&self) -> Option<Duration> {
        let every = self.common.members().values().min().copied()?;
        Some(every.saturating_sub(self.beaten.elapsed()))
    }

    fn heartbeat(&mut self) {
        if self.beat_in() != Some(Duration::ZERO) {
            return;
        }
        self.beaten = Instant::now();
        if self.common.silent.load(Ordering::SeqCst) {
            return;
        }
        let members: Vec<i64> = self.common.members().keys().copied().collect();
        match self.once(|conn, now| group::heartbeat(conn, &members, now)) {
            Ok(true) => self.common.changed.notify_waiters(),
            Ok(false) => {}
            Err(error) => tracing::warn!(error = error.chain(), "the bus did not take a sign of life"),
        }
    }

    fn sweep(&mut self) {
        let now = self.clock.now();
        // Not yet. A clock that was set back does not postpone the sweep indefinitely.
        if now < self.sweep_at && self.sweep_at.since(now) <= self.sweep_interval {
            return;
        }
        let interval = self.sweep_interval;
        match self.once(|conn, now| log::sweep_some(conn, interval, now)) {
            // A long sweep runs in small steps, and requests are served in between.
            Ok(true) => self.sweep_waits = Duration::ZERO,
            Ok(false) => {
                self.sweep_waits = BEAT_MAX;
                self.sweep_at = now.plus(interval);
            }
            Err(error) => {
                tracing::warn!(error = error.chain(), "the bus could not be swept");
                self.sweep_waits = BEAT_MAX;
                self.sweep_at = now.plus(interval);
            }
        }
    }
}
