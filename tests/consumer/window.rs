//! The window in Valkey: keys, epochs, time limits, outages, and what a key costs.
#![cfg(all(feature = "testing", feature = "redis"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use crate::support::valkey as support;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::backend::redis::RedisWindow;
use hapax::event::Fingerprint;
use hapax::ledger::{Epoch, Identity, Level};
use hapax::window::{OnOutage, OutageWindow, Sighting, Window, WindowSettings, key};
use hapax::{EventId, Scope, Tenant};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

/// A scope of the test's own, so that tests share a server.
fn scope() -> Scope {
    Scope::new(format!("t:{}", uuid::Uuid::new_v4().simple())).unwrap()
}

fn events(scope: &Scope, count: usize) -> Vec<Sighting> {
    (0..count).map(|_| Identity::new(scope.clone(), EventId::now_v7()).into()).collect()
}

fn window() -> RedisWindow {
    RedisWindow::new(&support::url(), WindowSettings::new("1")).unwrap()
}

#[tokio::test]
async fn remembers_what_is_done_and_nothing_else() {
    let (window, scope) = (window(), scope());
    let mine = events(&scope, 1000);
    assert!(window.seen(&mine).await.unwrap().iter().all(|seen| !seen));
    assert!(window.seen(&mine).await.unwrap().iter().all(|seen| !seen), "looking remembers nothing");
    window.remember(&mine[..500]).await.unwrap();
    let seen = window.seen(&mine).await.unwrap();
    assert!(seen[..500].iter().all(|seen| *seen) && seen[500..].iter().all(|seen| !seen));
    let mut other = mine[0].clone();
    other.identity.tenant = Some(Tenant::new("acme").unwrap());
    assert_eq!(window.seen(&[other]).await.unwrap(), [false]);
    assert!(window.seen(&[]).await.unwrap().is_empty());
    window.remember(&[]).await.unwrap();
}

#[tokio::test]
async fn another_epoch_is_a_miss() {
    let (window, mine) = (window(), events(&scope(), 2));
    window.remember(&mine).await.unwrap();
    let restored = window.in_epoch("2");
    assert_eq!(restored.seen(&mine).await.unwrap(), [false, false]);
    restored.remember(&mine[..1]).await.unwrap();
    assert_eq!(restored.seen(&mine).await.unwrap(), [true, false]);
    assert_eq!(window.seen(&mine).await.unwrap(), [false, true]);
    // The ledger's epoch, besides the one by hand.
    let of = |life: &str| Sighting { epoch: Some(Epoch::of([life])), ..mine[1].clone() };
    assert_eq!(window.seen(&[of("a")]).await.unwrap(), [false]);
    window.remember(&[of("a")]).await.unwrap();
    assert_eq!(window.seen(&[of("a"), of("b"), mine[1].clone()]).await.unwrap(), [true, false, false]);
    assert_eq!(restored.seen(&[of("a")]).await.unwrap(), [false]);
}

/// An id that is used again for something else is a miss; what has no fingerprint cannot be told apart.
#[tokio::test]
async fn another_fingerprint_is_a_miss() {
    let (window, plain) = (window(), events(&scope(), 1).remove(0));
    let of = |n: u8| Sighting { fingerprint: Some(Fingerprint([n; 16])), ..plain.clone() };
    for print in [0, 1, 255] {
        window.remember(&[of(print)]).await.unwrap();
        let seen = window.seen(&[of(print), of(2), plain.clone()]).await.unwrap();
        assert_eq!(seen, [true, false, true], "{print}");
        assert_eq!(window.in_epoch("2").seen(&[of(print)]).await.unwrap(), [false]);
    }
    window.remember(std::slice::from_ref(&plain)).await.unwrap();
    assert_eq!(window.seen(&[of(1), of(2), plain]).await.unwrap(), [true, true, true]);
}

/// The server forgets in time, and a key costs about 80 bytes, whatever the epoch and the fingerprint.
#[tokio::test]
async fn keys_have_a_time_limit_and_a_price() {
    let epoch = uuid::Uuid::new_v4().to_string();
    let settings = WindowSettings::new(epoch).ttl(Duration::from_secs(7200));
    let window = RedisWindow::new(&support::url(), settings).unwrap();
    let mut mine: Sighting = Identity::new(scope(), EventId::now_v7()).into();
    mine.fingerprint = Some(Fingerprint([200; 16]));
    window.remember(std::slice::from_ref(&mine)).await.unwrap();
    let mut connection = support::connection().await;
    let ttl: u64 = redis::cmd("TTL").arg(key(&mine.identity)).query_async(&mut connection).await.unwrap();
    assert!((7190..=7200).contains(&ttl), "{ttl}");

    mine.identity.scope = Scope::new("orders").unwrap();
    let mut tenant = mine.clone();
    tenant.identity.tenant = Some(Tenant::new("acme").unwrap());
    window.remember(&[mine.clone(), tenant.clone()]).await.unwrap();
    for (identity, most) in [(mine.identity, 88), (tenant.identity, 104)] {
        let bytes: usize =
            redis::cmd("MEMORY").arg("USAGE").arg(key(&identity)).query_async(&mut connection).await.unwrap();
        println!("{bytes} bytes for {}", key(&identity));
        assert!(bytes <= most, "{bytes} bytes for one key");
    }
}

#[tokio::test]
async fn the_check_tells_about_eviction_time_and_absence() {
    let level = |findings: &[hapax::ledger::Finding], check: &str| {
        findings.iter().find(|finding| finding.check == check).map(|finding| finding.level)
    };
    let findings = window().check(Some(Duration::from_secs(7 * 86_400))).await;
    assert_eq!(level(&findings, "window.ttl"), Some(Level::Warning));
    assert_eq!(level(&findings, "window.maxmemory_policy"), Some(Level::Fine));
    let findings = window().check(Some(Duration::from_secs(3600))).await;
    assert_eq!(level(&findings, "window.ttl"), Some(Level::Fine));

    let gate = support::Gate::new().await;
    gate.shut();
    let away = RedisWindow::new(&gate.url(), WindowSettings::new("1")).unwrap();
    let findings = away.check(None).await;
    assert_eq!(level(&findings, "window.server"), Some(Level::Warning), "{findings:?}");
}

/// The lines that were logged.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

struct Text<'l>(&'l mut String);

impl tracing::field::Visit for Text<'_> {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            *self.0 = format!("{value:?}");
        }
    }
}

impl<S: tracing::Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() == "hapax" {
            let mut text = String::new();
            event.record(&mut Text(&mut text));
            self.0.lock().unwrap().push(text);
        }
    }
}

/// Hole 2, on a server that really goes away: what happens is chosen; one line begins and one ends the outage. One test, as
/// another thread without a subscriber would switch the lines off for all.
#[tokio::test]
async fn t02_window_outage_follows_its_policy() {
    let lines = Lines::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(lines.clone()));
    everything_passes().await;
    assert_eq!(std::mem::take(&mut *lines.0.lock().unwrap()), ["the window is away", "the window is back"]);
    everything_waits().await;
    assert_eq!(*lines.0.lock().unwrap(), ["the window is away", "the window is back"]);
}

async fn everything_passes() {
    let gate = support::Gate::new().await;
    let inner = RedisWindow::new(&gate.url(), WindowSettings::new("1")).unwrap();
    let window = OutageWindow::new(inner, OnOutage::PassThrough);
    let mine = events(&scope(), 2);
    window.remember(&mine).await.unwrap();
    assert_eq!(window.seen(&mine).await.unwrap(), [true, true]);
    gate.shut();
    for _ in 0..3 {
        assert_eq!(window.seen(&mine).await.unwrap(), [false, false]);
        window.remember(&mine).await.unwrap();
    }
    gate.open();
    support::until("the window is back", async || window.seen(&mine).await.unwrap() == [true, true]).await;
}

async fn everything_waits() {
    let gate = support::Gate::new().await;
    let inner = RedisWindow::new(&gate.url(), WindowSettings::new("1")).unwrap();
    let window = Arc::new(OutageWindow::new(inner, OnOutage::Pause));
    let mine = events(&scope(), 1);
    window.remember(&mine).await.unwrap();
    gate.shut();
    let waiting = tokio::spawn({
        let (window, mine) = (Arc::clone(&window), mine.clone());
        async move { window.seen(&mine).await.unwrap() }
    });
    support::until("it was turned away", async || gate.turned_away() > 0).await;
    assert!(!waiting.is_finished());
    gate.open();
    assert_eq!(waiting.await.unwrap(), [true]);
}
