//! Feeds the read model until the server stops, and says what the feed does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hapax::analytics::{Feed, FeedHandle};
use hapax::bus::Bus;
use hapax::records::Snapshot;

use super::app::{Shared, stopped};
use super::kept::Kept;

/// How long until a database that does not answer is asked again.
const PAUSE: Duration = Duration::from_secs(2);

/// The feed, as probes see it.
#[derive(Clone, Default)]
pub struct FeedStatus {
    feed: Kept<Feed>,
    /// Whether one runs in this process at all.
    is_here: Arc<AtomicBool>,
}

/// What a feed does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedState {
    /// The model begins: it is filled with the records as they are, or the group is joined.
    Starting,
    /// It applies what it reads.
    Follows,
    /// The model does not answer, and is asked again.
    Waits,
    /// Nothing is applied from here until it has been started again.
    Failed,
}

impl FeedState {
    /// The state in a word.
    pub fn word(self) -> &'static str {
        match self {
            FeedState::Starting => "starting",
            FeedState::Follows => "follows",
            FeedState::Waits => "waits",
            FeedState::Failed => "failed",
        }
    }

    /// Whether the read model is or will be in step. One that begins is: its answers say how far it is.
    pub fn is_ready(self) -> bool {
        matches!(self, FeedState::Starting | FeedState::Follows)
    }
}

impl FeedStatus {
    /// A feed will run in this process.
    pub fn begin(&self) {
        self.is_here.store(true, Ordering::Relaxed);
    }

    /// Stops the feed that runs.
    pub fn stop(&self) {
        self.feed.stop();
    }

    /// What the feed does, if one runs here.
    pub fn state(&self) -> Option<FeedState> {
        if !self.is_here.load(Ordering::Relaxed) {
            return None;
        }
        Some(match self.feed.ask(FeedHandle::progress) {
            _ if self.feed.has_failed() => FeedState::Failed,
            Some(progress) if progress.away.is_some() => FeedState::Waits,
            Some(progress) if progress.follows => FeedState::Follows,
            _ => FeedState::Starting,
        })
    }
}

/// Feeds the read model of a server.
pub async fn feed(app: Shared, bus: Arc<dyn Bus>) {
    let Some(model) = &app.reads else { return };
    let mut stopping = app.stopping.clone();
    let source = tokio::select! {
        source = records(&app) => source,
        () = stopped(&mut stopping) => return,
    };
    let make = || {
        let feed = Feed::new(Arc::clone(&bus), Arc::clone(model), app.config.feed_settings())?;
        Ok(match &source {
            Some(source) => feed.with_snapshot(Arc::clone(source)),
            None => feed,
        })
    };
    app.feed.feed.keep_running(make, stopping).await;
}

/// What a model begins with. A database that does not answer is asked again: a model that began with the
/// topic meanwhile would lack what retention has removed there.
async fn records(app: &Shared) -> Option<Arc<dyn Snapshot>> {
    loop {
        match app.records.snapshot(&app.config).await {
            Ok(source) => return source,
            Err(error) => tracing::warn!(
                target: "hapax", error = %error.chain(),
                "the feed of the read model waits for the records that a model begins with"
            ),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use hapax::analytics::{FeedSettings, MemoryReadModel};
    use hapax::bus::{MemoryBus, TopicSettings};
    use hapax::{Error, Topic};
    use tokio::sync::watch;

    use super::super::kept::until;
    use super::*;

    /// Its topic is missing, and made later.
    #[tokio::test]
    async fn a_feed_that_fails_is_not_ready_until_it_follows() {
        let (bus, topic) = (Arc::new(MemoryBus::default()), Topic::new("records").unwrap());
        let status = FeedStatus::default();
        assert_eq!(status.state(), None, "none runs here");
        status.begin();
        assert_eq!(status.state(), Some(FeedState::Starting));
        let (stop, stopping) = watch::channel(false);
        let (seen, settings, of) = (status.clone(), FeedSettings::new(topic.clone()), Arc::clone(&bus));
        let make = move || {
            let bus: Arc<dyn Bus> = Arc::<MemoryBus>::clone(&of);
            Feed::new(bus, Arc::new(MemoryReadModel::default()), settings.clone())
        };
        let running = tokio::spawn(async move { seen.feed.keep_running(make, stopping).await });
        until(|| status.state(), Some(FeedState::Failed)).await;
        assert!(!FeedState::Failed.is_ready() && !FeedState::Waits.is_ready());
        bus.create_topic(&topic, TopicSettings::new(1)).await.unwrap();
        until(|| status.state(), Some(FeedState::Follows)).await;
        stop.send_replace(true);
        status.stop();
        running.await.unwrap();

        // One that cannot even be made.
        let (_stop, stopping) = watch::channel(false);
        status.feed.keep_running(|| Err(Error::Config("no".into())), stopping).await;
        assert_eq!(status.state(), Some(FeedState::Failed));
    }
}
