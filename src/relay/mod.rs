//! The relay publishes a journal to a bus: every event at least once, each aggregate's in order.
//!
//! ```text
//! leadership ─▶ read after the checkpoint ─▶ publish in order ─▶ acknowledged ─▶ save the checkpoint ─▶ wait for more
//!                  └ without what is behind                                         └ fenced? a candidate again
//! ```
//!
//! The checkpoint is saved only after acknowledgement, so a crash repeats at most one batch plus
//! the events that were catching up. An event that the bus does not accept holds back only its own
//! aggregate: the aggregate is *behind*, and the relay retries it, in order, until it has caught
//! up. An event that the bus will never accept (too large) parks its aggregate until an operator
//! decides ([`resume`], [`skip`]). While the bus accepts nothing at all, the relay waits. Of
//! several relays of a name one leads; the others wait to take over. If
//! [`pulse`](RelaySettings::pulse) is set, the leader also tells each partition up to when
//! everything is there.
//!
//! A relay may touch the journal (it reads, and saves its checkpoint under its token) and publish to a
//! bus. It never appends, consumes or claims, and names no database.
//!
//! ```
//! use std::sync::Arc;
//! use hapax::bus::{Bus, MemoryBus, TopicSettings};
//! use hapax::journal::{Expected, JournalExt, MemoryJournal};
//! use hapax::{Event, Relay, Topic};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
//! let (journal, bus) = (Arc::new(MemoryJournal::default()), Arc::new(MemoryBus::default()));
//! let orders = Topic::new("orders")?;
//! bus.create_topic(&orders, TopicSettings::new(1)).await?;
//! journal.append_to("order-17", Expected::New, [Event::of("order-17-paid")?]).await?;
//!
//! let relay = Relay::builder(journal, bus).name("main").topic("orders").build()?;
//! let handle = relay.handle();
//! let running = tokio::spawn(relay.run());
//! while handle.progress().position.number() < 1 {
//!     tokio::task::yield_now().await;
//! }
//! handle.stop();
//! assert_eq!(running.await.expect("the task ends")?.published, 1);
//! # Ok(()) }
//! ```

mod answers;
mod backoff;
mod behind;
mod leadership;
mod leading;
mod lookback;
mod meter;
mod operate;
mod publish;
mod pulse;
mod record;
mod settings;
mod wait;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

pub use meter::Progress;
pub use operate::{resume, resume_all, skip};
pub use record::ORIGINAL;
pub use settings::{RelaySettings, Route};

use self::leadership::LeadershipHeartbeat;
use self::leading::Leading;
use self::meter::Meter;
use crate::bus::Bus;
use crate::error::{Error, Result};
use crate::id::{Owner, RelayName, Topic};
use crate::journal::{Checkpoint, Journal, Leadership};
use crate::ledger::Token;

/// Why leadership ended.
#[derive(Debug)]
enum End {
    /// Another relay leads, or may lead.
    Lost(&'static str),
    /// A stop was requested.
    Stopped,
    /// An error that the relay cannot recover from.
    Failed(Error),
}

impl From<Error> for End {
    fn from(error: Error) -> Self {
        match error {
            Error::Fenced { .. } => End::Lost("fenced"),
            other => End::Failed(other),
        }
    }
}

/// Publishes a journal to a bus. Any number of relays may run in any number of processes; one per
/// name leads at a time.
pub struct Relay {
    journal: Arc<dyn Journal>,
    bus: Arc<dyn Bus>,
    settings: Arc<RelaySettings>,
    handle: RelayHandle,
}

/// Stops a relay and reports its progress. Clones share the same state.
#[derive(Debug, Clone)]
pub struct RelayHandle {
    stop: Arc<watch::Sender<bool>>,
    meter: Arc<Meter>,
}

impl RelayHandle {
    /// Stops the relay: it finishes the current batch as far as the bus answers within the flush
    /// timeout, and releases leadership.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// The progress so far.
    pub fn progress(&self) -> Progress {
        self.meter.progress()
    }
}

impl Relay {
    /// A relay with these settings. Fails if they are invalid.
    pub fn new(journal: Arc<dyn Journal>, bus: Arc<dyn Bus>, settings: RelaySettings) -> Result<Self> {
        settings.check()?;
        let meter = Arc::new(Meter::new(&settings)?);
        let handle = RelayHandle { stop: Arc::new(watch::channel(false).0), meter };
        Ok(Relay { journal, bus, settings: Arc::new(settings), handle })
    }

    /// Builds a relay step by step.
    pub fn builder(journal: Arc<dyn Journal>, bus: Arc<dyn Bus>) -> RelayBuilder {
        RelayBuilder { journal, bus, name: None, topic: None, changes: Vec::new(), error: None }
    }

    /// A handle to stop the relay and to read its progress from another task.
    pub fn handle(&self) -> RelayHandle {
        self.handle.clone()
    }

    /// The relay's settings.
    pub fn settings(&self) -> &RelaySettings {
        &self.settings
    }

    /// Runs until its [handle](Relay::handle) stops it or an error ends it.
    pub async fn run(self) -> Result<Progress> {
        let lines = tokio::spawn(lines(Arc::clone(&self.handle.meter), self.settings.log_interval));
        let ended = self.serve(self.handle.stop.subscribe()).await;
        lines.abort();
        ended.map(|()| self.handle.progress())
    }

    /// Leads whenever it acquires leadership.
    async fn serve(&self, stop: watch::Receiver<bool>) -> Result<()> {
        self.check_topic().await?;
        while let Some((token, checkpoint, asked)) = self.candidate(stop.clone()).await? {
            if let Ok(now) = self.journal.now().await {
                self.handle.meter.clock_is(now);
            }
            let mut leading = self.leading(token, &checkpoint, asked, stop.clone())?;
            self.handle.meter.leads(&checkpoint);
            let end = leading.run().await;
            drop(leading);
            match end {
                End::Lost(cause) => self.handle.meter.leads_no_more(cause),
                End::Stopped => {
                    self.give_up(token).await;
                    return Ok(());
                }
                End::Failed(error) => {
                    self.give_up(token).await;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    async fn check_topic(&self) -> Result<()> {
        match self.bus.topic(&self.settings.topic).await {
            Ok(None) => Err(Error::NotFound(format!(
                "topic {}: make it before a relay publishes to it",
                self.settings.topic
            ))),
            Ok(Some(_)) => Ok(()),
            Err(error) if error.is_retryable() => Ok(()), // wait for the outage to end
            Err(error) => Err(error),
        }
    }

    /// Waits for leadership. None if the relay is to stop.
    async fn candidate(
        &self,
        mut stop: watch::Receiver<bool>,
    ) -> Result<Option<(Token, Checkpoint, Instant)>> {
        let owner = self.owner()?;
        let mut attempts = 0;
        loop {
            let asked = Instant::now();
            let asking = self.journal.acquire_leadership(&self.settings.name, &owner, self.settings.lease);
            let mut asking = pin!(asking);
            let answer = tokio::select! {
                answer = &mut asking => Some(answer),
                _ = stop.wait_for(|stop| *stop) => None,
            };
            let Some(answer) = answer else {
                // Release leadership that is granted now; otherwise others would wait for its lease
                // to expire.
                let answer = tokio::time::timeout(ANSWER_TIMEOUT, asking).await;
                if let Ok(Ok(Leadership::Acquired { token, .. })) = answer {
                    self.release(token).await;
                }
                return Ok(None);
            };
            let pause = match answer {
                Ok(Leadership::Acquired { token, checkpoint }) => {
                    checkpoint.must_be_of(self.journal.id())?;
                    return Ok(Some((token, checkpoint, asked)));
                }
                Ok(Leadership::Taken { by, until }) => {
                    attempts = 0;
                    self.handle.meter.follows();
                    tracing::debug!(target: "hapax::relay", relay = %self.settings.name, %by, "someone else leads");
                    let left = match self.journal.now().await {
                        Ok(now) => until.since(now) + Duration::from_millis(5),
                        Err(_) => self.settings.heartbeat(),
                    };
                    left.min(self.settings.heartbeat())
                }
                Err(error) if error.is_retryable() => {
                    attempts += 1;
                    if attempts == 1 {
                        tracing::warn!(target: "hapax::relay", relay = %self.settings.name, error = %error.chain(), "the journal does not answer; the relay tries again");
                    }
                    self.settings.backoff(attempts).min(Duration::from_secs(5))
                }
                Err(error) => return Err(error),
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = stop.wait_for(|stop| *stop) => return Ok(None),
            }
        }
    }

    fn owner(&self) -> Result<Owner> {
        match &self.settings.owner {
            Some(owner) => Ok(owner.clone()),
            None => Owner::new(format!("relay-{}-{}", std::process::id(), uuid::Uuid::new_v4().simple())),
        }
    }

    fn leading(
        &self,
        token: Token,
        checkpoint: &Checkpoint,
        asked: Instant,
        stop: watch::Receiver<bool>,
    ) -> Result<Leading> {
        let (journal, settings) = (Arc::clone(&self.journal), Arc::clone(&self.settings));
        let timed = journal.capabilities().timed;
        let lookback = timed.then(|| lookback::Lookback::new(&settings, checkpoint)).flatten();
        Ok(Leading {
            leadership: LeadershipHeartbeat::spawn(Arc::clone(&journal), Arc::clone(&settings), token, asked),
            publisher: publish::Publisher {
                bus: Arc::clone(&self.bus),
                encoder: record::RecordEncoder::new(&settings, journal.id()),
                settings: Arc::clone(&settings),
                stop: stop.clone(),
            },
            position: checkpoint.position.clone(),
            acknowledged: std::collections::HashSet::new(),
            waiters: behind::Waiters::of(checkpoint)?,
            lookback,
            backoff: backoff::ReadBackoff::default(),
            ahead: None,
            attempts: 0,
            proved: true,
            taken: Instant::now(),
            awaited: answers::Awaited::default(),
            last_answer: None,
            pulses: pulse::Pulses::new(
                &settings,
                Arc::clone(&journal),
                Arc::clone(&self.bus),
                Arc::clone(&self.handle.meter),
            ),
            reads: 0,
            meter: Arc::clone(&self.handle.meter),
            journal,
            settings,
            stop,
        })
    }

    async fn give_up(&self, token: Token) {
        self.handle.meter.leads_no_more("released");
        self.release(token).await;
    }

    async fn release(&self, token: Token) {
        if let Err(error) = self.journal.release_leadership(&self.settings.name, token).await {
            tracing::debug!(target: "hapax::relay", relay = %self.settings.name, error = %error.chain(), "leadership could not be released; it will lapse");
        }
    }
}

type Change = Box<dyn FnOnce(&mut RelaySettings) + Send>;

/// Builds a [`Relay`].
#[must_use = "a builder does nothing until it is built"]
pub struct RelayBuilder {
    journal: Arc<dyn Journal>,
    bus: Arc<dyn Bus>,
    name: Option<RelayName>,
    topic: Option<Topic>,
    changes: Vec<Change>,
    error: Option<Error>,
}

impl RelayBuilder {
    /// The relay's name. One relay of a name leads at a time, and each name has its own checkpoint.
    pub fn name(mut self, name: impl AsRef<str>) -> Self {
        match RelayName::new(name) {
            Ok(name) => self.name = Some(name),
            Err(error) => self.error = self.error.or(Some(error)),
        }
        self
    }

    /// The topic to publish to.
    pub fn topic(mut self, topic: impl AsRef<str>) -> Self {
        match Topic::new(topic) {
            Ok(topic) => self.topic = Some(topic),
            Err(error) => self.error = self.error.or(Some(error)),
        }
        self
    }

    /// Changes settings in place.
    pub fn with(mut self, change: impl FnOnce(&mut RelaySettings) + Send + 'static) -> Self {
        self.changes.push(Box::new(change));
        self
    }

    /// Builds the relay. Fails if something is missing or invalid.
    pub fn build(self) -> Result<Relay> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let (Some(name), Some(topic)) = (self.name, self.topic) else {
            return Err(Error::Config("a relay needs a name and a topic".into()));
        };
        let mut settings = RelaySettings::new(name, topic);
        for change in self.changes {
            change(&mut settings);
        }
        Relay::new(self.journal, self.bus, settings)
    }
}

/// How long a stopping relay waits for the answer to its pending request for leadership.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Logs a line with counts at each interval, and refreshes the gauges more often.
async fn lines(meter: Arc<Meter>, interval: Duration) {
    let mut next = Instant::now() + interval;
    loop {
        tokio::time::sleep(Duration::from_secs(1).min(interval.max(Duration::from_millis(100)))).await;
        meter.refresh();
        if !interval.is_zero() && Instant::now() >= next {
            next = Instant::now() + interval;
            meter.log(interval);
        }
    }
}
