//! Feeds a read model from a topic.
//!
//! ```text
//! assigned ─▶ seek to where the model is ─▶ records ─▶ a block per partition ─▶ apply ─▶ commit offsets
//! ```
//!
//! No ledger is needed: a change that arrives twice changes nothing the second time. The model
//! itself says where to continue, because it may have been restored or rebuilt; the group's commits
//! only show the lag. A new model starts with a copy of the records ([`Feed::with_snapshot`]),
//! because retention may have removed their events. What is missing later (retention removed it
//! before it was read, or the topic was created again) is noted as rejected, which holds
//! `lastSyncAt` back for everybody.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::{ReadModel, Source, Uuid, snapshot};
use crate::bus::{Bus, Subscriber, Subscription};
use crate::clock::jitter_permille;
use crate::error::{Error, Result};
use crate::id::Topic;
use crate::records::Snapshot;
use crate::telemetry::FeedMeter;
use run::Run;

mod chain;
mod run;

/// The longest pause between two attempts while the model does not answer.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How often the lag is measured.
const LAG_EVERY: Duration = Duration::from_secs(5);
/// The group of a model without an id, and what the others' begin with.
const GROUP: &str = "hapax-analytics";

/// Settings of a [`Feed`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FeedSettings {
    /// The topic of the records' events.
    pub topic: Topic,
    /// Who publishes it.
    pub source: Source,
    /// The consumer group. `None`: `hapax-analytics-ID`, with the [id](ReadModel::id) of the model. All feeds
    /// of one model share a group, and each applies some of the partitions; two models need two, or each
    /// gets only some.
    pub group: Option<Arc<str>>,
    /// The generation of the source; see [`Version`](super::Version).
    pub generation: u16,
    /// How many records a block has at most.
    pub block_max: usize,
    /// How many bytes wait or are being applied at most, in all partitions together. Then nothing more is
    /// read.
    pub buffer_bytes_max: usize,
    /// How long a block waits for more records.
    pub linger: Duration,
    /// The prefix of its metrics.
    pub telemetry_prefix: Option<String>,
}

impl FeedSettings {
    /// The settings for a topic: blocks of up to 5,000 records, applied every 100 ms, in 32 MiB.
    pub fn new(topic: Topic) -> Self {
        FeedSettings {
            topic,
            source: Source::default(),
            group: None,
            generation: 1,
            block_max: 5_000,
            buffer_bytes_max: 32 << 20,
            linger: Duration::from_millis(100),
            telemetry_prefix: None,
        }
    }

    fn check(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::Config(format!("{what} must be at least 1")));
        match (self.generation, self.block_max, self.buffer_bytes_max) {
            (0, ..) => bad("the generation of a feed"),
            (_, 0, _) => bad("the size of a feed's blocks"),
            (.., 0) => bad("the buffer of a feed"),
            _ => Ok(()),
        }
    }
}

/// What a feed has done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FeedProgress {
    /// Whether it follows the topic: the model began, and the group was joined.
    pub follows: bool,
    /// Changes that were applied, with repeats.
    pub changes: u64,
    /// Changes that could not be read.
    pub rejected: u64,
    /// Pulses that were applied.
    pub pulses: u64,
    /// Why nothing is applied at the moment, if so.
    pub away: Option<String>,
}

/// Stops a feed and reports its progress. Clones share the same state.
#[derive(Debug, Clone)]
pub struct FeedHandle {
    stop: Arc<watch::Sender<bool>>,
    progress: Arc<Mutex<FeedProgress>>,
}

impl FeedHandle {
    /// Stops the feed: what is being applied is finished, and the rest is read again later.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// The progress so far.
    pub fn progress(&self) -> FeedProgress {
        self.note(|progress| progress.clone())
    }

    fn note<T>(&self, change: impl FnOnce(&mut FeedProgress) -> T) -> T {
        change(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Feeds a read model from a topic. Any number may run in any number of processes: each has some of the
/// partitions.
pub struct Feed {
    bus: Arc<dyn Bus>,
    model: Arc<dyn ReadModel>,
    settings: FeedSettings,
    handle: FeedHandle,
    source: Option<Arc<dyn Snapshot>>,
    meter: Arc<FeedMeter>,
}

impl Feed {
    /// A feed with these settings. Fails if they are invalid.
    pub fn new(bus: Arc<dyn Bus>, model: Arc<dyn ReadModel>, settings: FeedSettings) -> Result<Self> {
        settings.check()?;
        let handle = FeedHandle { stop: Arc::new(watch::channel(false).0), progress: Arc::default() };
        let meter = Arc::new(FeedMeter::new(settings.telemetry_prefix.as_deref())?);
        Ok(Feed { bus, model, settings, handle, source: None, meter })
    }

    /// Fills a model that has read nothing yet with the records as they are, before it follows the topic.
    /// They must be those whose events the topic carries.
    #[must_use]
    pub fn with_snapshot(mut self, source: Arc<dyn Snapshot>) -> Self {
        self.source = Some(source);
        self
    }

    /// A handle to stop it and to see its progress.
    pub fn handle(&self) -> FeedHandle {
        self.handle.clone()
    }

    /// Runs until its [handle](Feed::handle) stops it or an error ends it.
    pub async fn run(self) -> Result<FeedProgress> {
        let Some((partitions, subscriber)) = self.begin().await? else { return Ok(self.handle.progress()) };
        self.handle.note(|progress| progress.follows = true);
        let _measuring = Measuring::start(&self.model, &self.meter);
        let mut run = Run::new(&self, subscriber, partitions);
        let ended = run.serve().await;
        let left = run.leave().await;
        self.handle.note(|progress| progress.follows = false);
        ended.and(left).map(|()| self.handle.progress())
    }

    /// Begins to follow the topic, however long the bus or the model is away. `None`: it was stopped.
    async fn begin(&self) -> Result<Option<(i32, Box<dyn Subscriber>)>> {
        let (mut stop, mut attempts) = (self.handle.stop.subscribe(), 0);
        loop {
            let begun = tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return Ok(None),
                begun = self.join() => begun,
            };
            match begun {
                Err(error) if error.is_retryable() => self.away(&error, attempts),
                begun => {
                    if attempts > 0 {
                        self.answers_again();
                    }
                    return begun.map(Some);
                }
            }
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return Ok(None),
                () = tokio::time::sleep(pause(attempts)) => attempts += 1,
            }
        }
    }

    async fn join(&self) -> Result<(i32, Box<dyn Subscriber>)> {
        let topic = &self.settings.topic;
        let found = self.bus.topic(topic).await?;
        let missing = || Error::NotFound(format!("topic {topic}: make it before a read model follows it"));
        let partitions = found.ok_or_else(missing)?.partitions;
        self.of_generation().await?;
        self.model.expect(topic, partitions).await?;
        if let Some(source) = &self.source {
            snapshot::take(&*self.bus, &*self.model, &**source, &self.settings).await?;
        }
        let subscription = Subscription::new(self.group().await?, [topic.clone()])?;
        Ok((partitions, self.bus.subscribe(subscription).await?))
    }

    /// A model of another generation is left alone: what its source undid would stay in it.
    async fn of_generation(&self) -> Result<()> {
        let wanted = self.settings.generation;
        match self.model.generation().await? {
            Some(found) if found != wanted => Err(Error::Schema(format!(
                "the read model has rows of generation {found}, and analytics.generation is {wanted}: `hapax analytics rebuild` \
                 builds one in ClickHouse again, and it answers meanwhile; otherwise stop the server, remove the model's file and \
                 start the server"
            ))),
            _ => Ok(()),
        }
    }

    /// Reports that nothing can be applied at the moment; logs it once.
    fn away(&self, error: &Error, attempts: u32) {
        if attempts == 0 {
            tracing::warn!(target: "hapax::analytics", error = %error.chain(), "read model unavailable; the feed is waiting");
        }
        self.handle.note(|progress| progress.away = Some(error.chain()));
    }

    fn answers_again(&self) {
        tracing::info!(target: "hapax::analytics", "read model available again");
        self.handle.note(|progress| progress.away = None);
    }

    fn rejected(&self) {
        self.meter.rejected();
        self.handle.note(|progress| progress.rejected += 1);
    }

    async fn group(&self) -> Result<Arc<str>> {
        if let Some(group) = &self.settings.group {
            return Ok(Arc::clone(group));
        }
        Ok(match self.model.id().await? {
            Some(id) => format!("{GROUP}-{}", id.simple()).into(),
            None => GROUP.into(),
        })
    }
}

/// Measures the lag of a read model until it is dropped.
struct Measuring(JoinHandle<()>);

impl Measuring {
    fn start(model: &Arc<dyn ReadModel>, meter: &Arc<FeedMeter>) -> Self {
        let (model, meter) = (Arc::clone(model), Arc::clone(meter));
        Measuring(tokio::spawn(async move {
            let mut every = tokio::time::interval(LAG_EVERY);
            loop {
                every.tick().await;
                // Of no tenant: what holds all tenants back holds it back, too.
                match tokio::try_join!(model.now(), model.last_sync_at(Uuid::nil())) {
                    Ok((now, Some(at))) => meter.lag(now.since(at).as_secs_f64()),
                    Ok((_, None)) => meter.lag(f64::INFINITY),
                    Err(_) => {} // the feed says so itself
                }
            }
        }))
    }
}

impl Drop for Measuring {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The pause before the next attempt.
fn pause(attempts: u32) -> Duration {
    let base = Duration::from_millis(100) * 2_u32.saturating_pow(attempts.min(10));
    base.min(PAUSE_MAX) * u32::from(jitter_permille()) / 1000
}
