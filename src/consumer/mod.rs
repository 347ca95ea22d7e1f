//! The consumer: reads events from a bus and makes each take effect once.
//!
//! The path of a delivery: **match** (does the scope want it?) → **window** (was it done recently?)
//! → **order** (a queue per key) → **claim** the runnable heads → **handle** → **settle** →
//! **commit point** → **commit** the offset. Events that must wait long, are parked or are dead go
//! to the ledger's `held` with their bytes, and the commit point moves past them.
//!
//! The method that runs a handler names the guarantee: [`Consumer::leased`],
//! [`Consumer::leased_batch`], [`Consumer::at_most_once`], and [`Consumer::transactional`] for
//! ledgers in the same database as the effects. A handler is an `async fn`, or a type of yours that
//! implements the trait of its guarantee, such as [`LeasedHandler`].
//!
//! ```
//! use std::sync::Arc;
//! use hapax::backend::memory::MemoryLedger;
//! use hapax::bus::{Bus, Record, TopicSettings, memory::MemoryBus};
//! use hapax::consumer::{Consumer, ConsumerHandle, Handled, LeasedHandler};
//! use hapax::{Event, Topic, guard::Run};
//!
//! struct Mailer(ConsumerHandle);
//!
//! impl LeasedHandler for Mailer {
//!     async fn handle(&self, event: &Event, run: &Run) -> Handled {
//!         println!("mail for {}, key {}", event.id, run.key());
//!         self.0.stop(); // one mail is enough
//!         Ok(())
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
//! let bus = Arc::new(MemoryBus::default());
//! let orders = Topic::new("orders")?;
//! bus.create_topic(&orders, TopicSettings::new(1)).await?;
//! let record = Record { payload: Some(r#"{"event_id": "e-1"}"#.into()), ..Record::default() };
//! bus.publish(&orders, &[record.clone(), record]).await?; // the same event, twice
//!
//! let consumer = Consumer::builder(bus, MemoryLedger::default()).scope("mailer").topic("orders").build()?;
//! let mailer = Mailer(consumer.handle());
//! let counts = consumer.leased(mailer).await?; // or an `async fn(&Event, &Run) -> Handled`
//! assert_eq!(counts["done"], 1);
//! # Ok(()) }
//! ```
//!
//! A consumer uses a bus, a window, a guard, a ledger and telemetry, all through their contracts. It
//! names no database and no configuration.

mod arrival;
mod check;
mod claim;
mod dead;
mod decode;
mod handle;
mod handler;
mod held;
mod leased;
mod leased_batch;
mod markers;
mod meter;
mod offsets;
mod order;
mod passed;
mod pipeline;
mod settings;
mod transactional;
mod worker;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

pub use check::{check, refuse};
pub use decode::{Decoder, Places};
pub use handle::{BatchHandled, Failed, FailedExt, Handled, Permit, Permits};
pub use handler::{
    AtMostOnceHandler, ByEvent, Decoded, FromEvent, Json, LeasedBatchHandler, LeasedHandler,
    TransactionalBatchHandler, TransactionalHandler,
};
pub use leased_batch::LeasedEvent;
pub use meter::Progress;
pub use offsets::CommitPoint;
pub use order::{KeyQueues, QueueId, QueueRun};
pub use passed::Passed;
pub use settings::{ConsumerSettings, OutagePolicy, Wants};

use crate::bus::{Bus, Subscription, TopicSettings};
use crate::error::{Error, Result};
use crate::guard::Guard;
use crate::id::{Scope, Topic};
use crate::ledger::{Ledger, OnDead, OrderPolicy};
use crate::window::Window;

/// Whether and how to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    No,
    Drain,
    Now,
}

/// How many deliveries ended in which way.
pub type Counts = BTreeMap<Passed, u64>;

/// Consumes topics for one scope. Run any number of them, in any number of processes: they share
/// the partitions as a group.
pub struct Consumer<L: Ledger> {
    bus: Arc<dyn Bus>,
    guard: Guard<L>,
    settings: Arc<ConsumerSettings>,
    window: Option<Arc<dyn Window>>,
    handle: ConsumerHandle,
}

/// Stops a consumer and reports its progress. Clones are the same handle.
#[derive(Debug, Clone)]
pub struct ConsumerHandle {
    stop: Arc<watch::Sender<Stop>>,
    progress: Arc<Mutex<Progress>>,
}

impl ConsumerHandle {
    /// Drains: starts nothing new, lets running handlers finish until the deadline and then
    /// releases their events, commits offsets and leaves the group.
    pub fn stop(&self) {
        self.stop.send_if_modified(|stop| {
            let first = *stop == Stop::No;
            if first {
                *stop = Stop::Drain;
            }
            first
        });
    }

    /// Ends at once. Nothing is lost: leases expire, and uncommitted events are delivered again.
    pub fn stop_now(&self) {
        self.stop.send_replace(Stop::Now);
    }

    /// The progress so far.
    pub fn progress(&self) -> Progress {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl<L: Ledger> Consumer<L> {
    /// Builds a consumer step by step.
    pub fn builder(bus: Arc<dyn Bus>, ledger: L) -> ConsumerBuilder<L> {
        ConsumerBuilder {
            bus,
            ledger,
            settings: None,
            scope: None,
            topics: Vec::new(),
            window: None,
            changes: Vec::new(),
            error: None,
        }
    }

    /// A handle to stop it from another task.
    pub fn handle(&self) -> ConsumerHandle {
        self.handle.clone()
    }

    /// Its settings.
    pub fn settings(&self) -> &ConsumerSettings {
        &self.settings
    }

    /// Consumes with this worker until it is stopped or cannot continue. Returns how many deliveries
    /// ended in which way. Start-up checks run first and refuse whatever would break the guarantee.
    async fn run(
        self,
        worker: impl FnOnce(claim::ConsumerContext, &L) -> Arc<dyn worker::Worker>,
    ) -> Result<Counts> {
        let findings = check(&*self.bus, self.guard.ledger(), self.window.as_deref(), &self.settings).await?;
        refuse(&findings)?;
        self.make_dead_topics().await;
        let epoch = match &self.window {
            Some(_) => Some(self.guard.ledger().epoch().await?),
            None => None,
        };
        let core = self.guard.core().clone();
        let meter = meter::Meter::new(
            Arc::clone(&self.handle.progress),
            core.telemetry().consumer_meter(&self.settings.scope),
        );
        let context = claim::ConsumerContext {
            ledger: core.ledger(),
            core,
            bus: self.bus,
            group: self.settings.group(),
            settings: Arc::clone(&self.settings),
        };
        let mut subscription =
            Subscription::new(context.group.clone(), self.settings.topics.iter().cloned())?;
        subscription.start = self.settings.start;
        subscription.session_timeout = self.settings.session_timeout;
        let meter = Arc::new(meter);
        let pipeline = pipeline::Pipeline {
            window: pipeline::WindowStage::new(context.clone(), self.window),
            ledger: pipeline::LedgerHealth::new(Arc::clone(&context.ledger), Arc::clone(&meter), epoch),
            held: held::HeldFeed::new(context.clone(), Arc::clone(&meter)),
            dead_letters: dead::DeadLetterOutlet::new(context.clone()),
            worker: worker(context.clone(), self.guard.ledger()),
            subscriber: context.bus.subscribe(subscription).await?,
            stop: self.handle.stop.subscribe(),
            context,
            meter,
            partitions: HashMap::new(),
            released: Vec::new(),
            queues: KeyQueues::default(),
            alone: VecDeque::new(),
            tasks: pipeline::Tasks::default(),
            state: pipeline::State::new(),
        };
        pipeline.run().await
    }

    /// Creates the dead-letter topics if they are missing. If that is not permitted, dead letters
    /// stay in the ledger until the topics exist.
    async fn make_dead_topics(&self) {
        for topic in &self.settings.topics {
            let Some(dead) = self.settings.dead_topic_of(topic) else { continue };
            let partitions = match self.bus.topic(topic).await {
                Ok(Some(info)) => info.partitions,
                _ => 1,
            };
            let mut settings = TopicSettings::new(partitions);
            settings.retention = None;
            if let Err(error) = self.bus.create_topic(&dead, settings).await {
                tracing::warn!(target: "hapax", topic = %dead, error = %error.chain(), "the dead-letter topic could not be made");
            }
        }
    }
}

type Change = Box<dyn FnOnce(&mut ConsumerSettings) + Send>;

/// Builds a [`Consumer`].
#[must_use = "a builder does nothing until it is built"]
pub struct ConsumerBuilder<L: Ledger> {
    bus: Arc<dyn Bus>,
    ledger: L,
    settings: Option<ConsumerSettings>,
    scope: Option<Scope>,
    topics: Vec<Topic>,
    window: Option<Arc<dyn Window>>,
    changes: Vec<Change>,
    error: Option<Error>,
}

impl<L: Ledger> ConsumerBuilder<L> {
    /// The scope: whose effect it is. There is no default, because two consumers that share a scope
    /// by accident would take events from each other.
    pub fn scope(mut self, scope: impl AsRef<str>) -> Self {
        match Scope::new(scope) {
            Ok(scope) => self.scope = Some(scope),
            Err(error) => self.error = self.error.or(Some(error)),
        }
        self
    }

    /// Adds a topic to consume. Call it again for more.
    pub fn topic(mut self, topic: impl AsRef<str>) -> Self {
        match Topic::new(topic) {
            Ok(topic) => self.topics.push(topic),
            Err(error) => self.error = self.error.or(Some(error)),
        }
        self
    }

    /// Sets all settings at once.
    pub fn settings(mut self, settings: ConsumerSettings) -> Self {
        self.settings = Some(settings);
        self
    }

    /// Changes settings in place.
    pub fn with(mut self, change: impl FnOnce(&mut ConsumerSettings) + Send + 'static) -> Self {
        self.changes.push(Box::new(change));
        self
    }

    /// How events of one aggregate are ordered, and how a dead one affects its successors.
    pub fn order(self, policy: OrderPolicy, on_dead: OnDead) -> Self {
        self.with(move |settings| settings.order = Some((policy, on_dead)))
    }

    /// Adds a best-effort filter in front of the ledger.
    pub fn window(mut self, window: Arc<dyn Window>) -> Self {
        self.window = Some(window);
        self
    }

    /// Delivers every event to every process, each under its own scope and group. Give each process
    /// a scope name that survives restarts and rollouts: a new name knows nothing of what was done
    /// under the old one.
    pub fn broadcast(mut self, scope: impl AsRef<str>) -> Self {
        self = self.scope(scope);
        self.with(|settings| settings.group = None)
    }

    /// Builds the consumer, or returns what is wrong with its settings.
    pub fn build(self) -> Result<Consumer<L>> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let mut settings = match (self.settings, self.scope) {
            (Some(mut settings), scope) => {
                settings.scope = scope.unwrap_or(settings.scope);
                settings.topics.extend(self.topics);
                settings
            }
            (None, Some(scope)) => ConsumerSettings::new(scope, self.topics),
            (None, None) => {
                return Err(Error::Config("a consumer needs a scope: name whose effect it is".into()));
            }
        };
        for change in self.changes {
            change(&mut settings);
        }
        settings.check()?;
        let guard = Guard::with_settings(self.ledger, settings.guard())?;
        let handle = ConsumerHandle { stop: Arc::new(watch::channel(Stop::No).0), progress: Arc::default() };
        Ok(Consumer { bus: self.bus, guard, settings: Arc::new(settings), window: self.window, handle })
    }
}
