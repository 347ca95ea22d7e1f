//! Keeps something running until the server stops, and knows how it is.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax::analytics::{Feed, FeedHandle};
use hapax::relay::{Relay, RelayHandle};
use tokio::sync::watch;

use super::app::stopped;

/// The pause before what failed is started again; it doubles.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// A task that runs until its handle stops it, and waits for outages to end.
pub trait Runs: Send {
    /// Stops it.
    type Handle;
    /// What it is called in the log.
    const NAME: &str;

    fn handle(&self) -> Self::Handle;
    fn stop(handle: &Self::Handle);
    fn run(self) -> impl Future<Output = hapax::Result<()>> + Send + 'static;
}

impl Runs for Relay {
    type Handle = RelayHandle;
    const NAME: &str = "the relay";

    fn handle(&self) -> RelayHandle {
        Relay::handle(self)
    }
    fn stop(handle: &RelayHandle) {
        handle.stop();
    }
    async fn run(self) -> hapax::Result<()> {
        Relay::run(self).await.map(drop)
    }
}

impl Runs for Feed {
    type Handle = FeedHandle;
    const NAME: &str = "the feed of the read model";

    fn handle(&self) -> FeedHandle {
        Feed::handle(self)
    }
    fn stop(handle: &FeedHandle) {
        handle.stop();
    }
    async fn run(self) -> hapax::Result<()> {
        Feed::run(self).await.map(drop)
    }
}

/// What runs here, as probes and statistics see it. Clones share the same state.
pub struct Kept<R: Runs>(Arc<Mutex<Seen<R>>>);

struct Seen<R: Runs> {
    /// Of the last that was started.
    handle: Option<R::Handle>,
    /// Whether that has ended with an error, or none could be made.
    failed: bool,
}

impl<R: Runs> Default for Kept<R> {
    fn default() -> Self {
        Kept(Arc::new(Mutex::new(Seen { handle: None, failed: false })))
    }
}

impl<R: Runs> Clone for Kept<R> {
    fn clone(&self) -> Self {
        Kept(Arc::clone(&self.0))
    }
}

impl<R: Runs> Kept<R> {
    fn lock(&self) -> MutexGuard<'_, Seen<R>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the last one has ended with an error, or none could be made.
    pub fn has_failed(&self) -> bool {
        self.lock().failed
    }

    /// What the last one says, if one was started.
    pub fn ask<T>(&self, question: impl FnOnce(&R::Handle) -> T) -> Option<T> {
        self.lock().handle.as_ref().map(question)
    }

    /// Stops what runs.
    pub fn stop(&self) {
        let _ = self.ask(R::stop); // nothing to stop before it is started
    }

    /// Runs it until it is stopped. What ends with an error, or in a panic, is started again.
    pub async fn keep_running(
        &self,
        make: impl Fn() -> hapax::Result<R>,
        mut stopping: watch::Receiver<bool>,
    ) {
        let (name, mut pause) = (R::NAME, PAUSE_MIN);
        loop {
            let began = tokio::time::Instant::now();
            let one = match make() {
                Ok(one) => one,
                Err(error) => {
                    tracing::error!(target: "hapax", error = %error.chain(), "{name} cannot be started");
                    self.lock().failed = true;
                    return;
                }
            };
            *self.lock() = Seen { handle: Some(one.handle()), failed: false };
            if *stopping.borrow() {
                return; // it was told before there was a handle to stop
            }
            let error = match tokio::spawn(one.run()).await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error.chain(),
                Err(panicked) => panicked.to_string(),
            };
            tracing::error!(target: "hapax", error, "{name} failed; restarting it");
            self.lock().failed = true;
            if began.elapsed() > PAUSE_MAX {
                pause = PAUSE_MIN;
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stopped(&mut stopping) => return,
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

#[cfg(test)]
pub async fn until<S: PartialEq + std::fmt::Debug>(state: impl Fn() -> S, expected: S) {
    for _ in 0..6000 {
        if state() == expected {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it is {:?}, never {expected:?}", state());
}
