//! What runs beside the requests: the relay, the feed of the read model and the sweepers.

use std::sync::Arc;
use std::time::Duration;

use hapax::access::AuditSweep;
use hapax::analytics::Source;
use hapax::bus::Bus;
use hapax::keyed::KeySweeper;
use hapax::relay::{Progress, Relay, RelayHandle};
use hapax::sweep::Sweeper;
use tokio::task::JoinHandle;

use super::app::{Shared, With};
use super::feeding::{FeedStatus, feed};
use super::kept::Kept;
use crate::failure::Failure;

/// How often to check whether audit rows are due to be swept.
const AUDIT: Duration = Duration::from_hours(1);
/// How often the recorder of metrics tidies up.
const UPKEEP: Duration = Duration::from_secs(5);

/// The relay, as probes and statistics see it.
#[derive(Clone, Default)]
pub struct RelayStatus(Kept<Relay>);

/// What a relay does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayState {
    /// It does not know yet who leads.
    Starting,
    /// It publishes.
    Leads,
    /// Another process publishes.
    Follows,
    /// Nothing is published from here, and nothing will be until it has been started again.
    Failed,
}

impl RelayState {
    /// The state in a word.
    pub fn word(self) -> &'static str {
        match self {
            RelayState::Starting => "starting",
            RelayState::Leads => "leads",
            RelayState::Follows => "follows",
            RelayState::Failed => "failed",
        }
    }

    /// Whether the relay does what it is for.
    pub fn is_ready(self) -> bool {
        matches!(self, RelayState::Leads | RelayState::Follows)
    }
}

impl RelayStatus {
    /// What the relay does.
    pub fn state(&self) -> RelayState {
        match self.progress() {
            _ if self.0.has_failed() => RelayState::Failed,
            Some(progress) if progress.leads => RelayState::Leads,
            Some(progress) if progress.follows => RelayState::Follows,
            _ => RelayState::Starting,
        }
    }

    /// Its progress, if it runs here.
    pub fn progress(&self) -> Option<Progress> {
        self.0.ask(RelayHandle::progress)
    }
}

/// How often the relay says up to when everything is published, where a read model asks for it.
const PULSE: Duration = Duration::from_secs(1);

/// What runs until the server stops.
pub struct Background {
    relay: Option<JoinHandle<()>>,
    feed: Option<(JoinHandle<()>, FeedStatus)>,
    pulses: Option<JoinHandle<()>>,
    status: RelayStatus,
    upkeep: JoinHandle<()>,
    audit: Option<JoinHandle<()>>,
    _sweepers: (Option<Sweeper>, Option<KeySweeper>),
}

impl Background {
    pub fn start(app: &Shared, bus: Option<Arc<dyn Bus>>, with: With) -> Result<Self, Failure> {
        let entries = app.guard.settings().sweep.then(|| app.guard.spawn_sweeper());
        let keys = || KeySweeper::spawn(Arc::clone(&app.kept_keys), app.config.keys.retention);
        let sweepers = (entries, with.sweepers.then(keys).transpose()?);
        let audit = with.sweepers.then(|| tokio::spawn(sweep_audit(Arc::clone(app))));
        let feed = match (&bus, with.analytics && app.reads.is_some()) {
            (Some(bus), true) => {
                app.feed.begin();
                Some((tokio::spawn(feed(Arc::clone(app), Arc::clone(bus))), app.feed.clone()))
            }
            _ => None,
        };
        let pulses = match (&bus, &feed, app.config.analytics.source) {
            (Some(bus), Some(_), Source::Debezium) => {
                Some(tokio::spawn(super::pulses::stamp(Arc::clone(app), Arc::clone(bus), PULSE)))
            }
            _ => None,
        };
        let relay = bus.map(|bus| tokio::spawn(publish(Arc::clone(app), bus)));
        let metrics = app.metrics.clone();
        let upkeep = tokio::spawn(async move {
            let mut tick = tokio::time::interval(UPKEEP);
            loop {
                tick.tick().await;
                metrics.run_upkeep();
            }
        });
        Ok(Background { relay, feed, pulses, status: app.relay.clone(), upkeep, audit, _sweepers: sweepers })
    }

    /// Stops it all; returns when the relay has given up its leadership.
    pub async fn stop(self) {
        self.upkeep.abort();
        if let Some(audit) = &self.audit {
            audit.abort(); // a sweep that is cut off is finished by the next
        }
        if let Some(pulses) = &self.pulses {
            pulses.abort(); // one that is cut off is not written
        }
        self.status.0.stop();
        if let Some((task, status)) = self.feed {
            status.stop();
            let _ = task.await; // it logged how it ended
        }
        if let Some(relay) = self.relay {
            let _ = relay.await; // it logged how it ended
        }
    }
}

/// Forgets audit rows after their retention, in one of all servers.
async fn sweep_audit(app: Shared) {
    let retention = app.config.serve.audit_retention;
    let settings = AuditSweep::new(retention).unless_within((retention / 4).min(Duration::from_hours(20)));
    let mut tick = tokio::time::interval(AUDIT);
    loop {
        tick.tick().await;
        if let Err(error) = app.kept_access.sweep(&settings).await {
            tracing::warn!(target: "hapax", error = %error.chain(), "audit rows could not be swept; retrying");
        }
    }
}

/// Publishes until the server stops. A relay itself waits for outages to end; one that ends with an
/// error, or in a panic, is started again, and is not ready until then.
async fn publish(app: Shared, bus: Arc<dyn Bus>) {
    let (journal, mut settings) = (Arc::clone(&app.journal), app.config.relay_settings());
    if app.reads.is_some() && app.config.analytics.source == Source::Journal {
        settings.pulse.get_or_insert(PULSE);
    }
    let make = || Relay::new(Arc::clone(&journal), Arc::clone(&bus), settings.clone());
    app.relay.0.keep_running(make, app.stopping.clone()).await;
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use async_trait::async_trait;
    use hapax::bus::{
        Capabilities, MemoryBus, Partition, Record, Subscriber, Subscription, TopicInfo, TopicSettings,
    };
    use hapax::config::{Config, Sources};
    use hapax::event::Origin;
    use hapax::journal::MemoryJournal;
    use hapax::{Error, Result, Topic};
    use tokio::sync::watch;

    use super::super::kept::until;
    use super::*;

    /// A bus that panics until it is mended.
    struct Broken(AtomicBool, MemoryBus);

    #[async_trait]
    impl Bus for Broken {
        async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>> {
            self.1.publish(topic, records).await
        }
        async fn publish_to(&self, partition: &Partition, records: &[Record]) -> Result<Vec<Result<Origin>>> {
            self.1.publish_to(partition, records).await
        }
        async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Subscriber>> {
            self.1.subscribe(subscription).await
        }
        async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> Result<bool> {
            self.1.create_topic(topic, settings).await
        }
        async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
            assert!(!self.0.load(Ordering::SeqCst), "the bus is broken");
            self.1.topic(topic).await
        }
        async fn range(&self, partition: &Partition) -> Result<(i64, i64)> {
            self.1.range(partition).await
        }
        async fn committed(&self, group: &str, partition: &Partition) -> Result<Option<i64>> {
            self.1.committed(group, partition).await
        }
        fn capabilities(&self) -> Capabilities {
            self.1.capabilities()
        }
    }

    #[tokio::test]
    async fn t233_a_relay_that_fails_is_not_ready_until_it_leads() {
        let config = Config::load(&Sources::new()).unwrap();
        let settings = config.relay_settings();
        let (_stop, stopping) = watch::channel(false);
        let status = RelayStatus::default();
        assert_eq!(status.state(), RelayState::Starting, "there is none yet");
        assert!(!status.state().is_ready());

        let bus = Arc::new(Broken(AtomicBool::new(true), MemoryBus::default()));
        let journal: Arc<dyn hapax::Journal> = Arc::new(MemoryJournal::default());
        let (seen, broken) = (status.clone(), Arc::clone(&bus));
        let relayed = settings.clone();
        let make = move || {
            let bus: Arc<dyn Bus> = Arc::<Broken>::clone(&broken);
            Relay::new(Arc::clone(&journal), bus, relayed.clone())
        };
        let running = tokio::spawn(async move { seen.0.keep_running(make, stopping).await });
        until(|| status.state(), RelayState::Failed).await; // it panicked
        bus.0.store(false, Ordering::SeqCst);
        bus.create_topic(&settings.topic, TopicSettings::new(1)).await.unwrap();
        until(|| status.state(), RelayState::Leads).await;
        running.abort();

        // One that cannot even be made.
        let (_stop, stopping) = watch::channel(false);
        let status = RelayStatus::default();
        status.0.keep_running(|| Err(Error::Config("no".into())), stopping).await;
        assert_eq!(status.state(), RelayState::Failed);
    }
}
