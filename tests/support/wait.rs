//! Waiting for a state, never for a time.

use std::time::{Duration, Instant};

/// How long a state may take to come. It is long, because machines are busy; a test that passes never waits so long.
const AT_MOST: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(5);

/// Waits until something is so; fails if it does not come.
pub async fn until(what: &str, mut is: impl AsyncFnMut() -> bool) {
    // Real time, also where a test has stopped tokio's clock: servers and threads do not know that.
    let end = Instant::now() + AT_MOST;
    while !is().await {
        assert!(Instant::now() < end, "never came: {what}");
        tokio::time::sleep(PAUSE).await;
    }
}

/// The same for what is known at once. Unlike [`until`], it can be part of a task.
pub async fn until_so(what: &str, is: impl Fn() -> bool) {
    let end = Instant::now() + AT_MOST;
    while !is() {
        assert!(Instant::now() < end, "never came: {what}");
        tokio::time::sleep(PAUSE).await;
    }
}
