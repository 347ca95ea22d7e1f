use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;

use super::*;
use crate::clock::ManualClock;
use crate::id::{EventId, Scope, Tenant};

fn identity(tenant: Option<&str>, scope: &str, id: &str) -> Identity {
    let tenant = tenant.map(|tenant| Tenant::new(tenant).unwrap());
    Identity { tenant, scope: Scope::new(scope).unwrap(), id: EventId::new(id).unwrap() }
}

fn event(n: usize) -> Sighting {
    identity(None, "mailer", &format!("e{n}")).into()
}

fn memory(entries_max: usize) -> (MemoryWindow, ManualClock) {
    let clock = ManualClock::new(crate::Time::from_millis(1_772_600_000_000));
    let window =
        MemoryWindow::with_clock(WindowSettings::new("1"), entries_max, Arc::new(clock.clone())).unwrap();
    (window, clock)
}

/// Hole 1: the window says "seen" only for what was remembered, which happens after done.
#[tokio::test]
async fn t01_window_is_written_after_done() {
    let (window, _) = memory(10);
    for _ in 0..3 {
        assert_eq!(window.seen(&[event(1)]).await.unwrap(), [false]);
    }
    window.remember(&[event(1)]).await.unwrap();
    assert_eq!(window.seen(&[event(0), event(1)]).await.unwrap(), [false, true]);
}

/// An id that is reused for something else is a miss. Without a fingerprint the two cannot be told
/// apart.
#[tokio::test]
async fn another_fingerprint_is_a_miss() {
    let (window, _) = memory(10);
    let of = |n: u8| Sighting { fingerprint: Some(Fingerprint([n; 16])), ..event(1) };
    window.remember(&[of(1)]).await.unwrap();
    assert_eq!(window.seen(&[of(1), of(2), event(1)]).await.unwrap(), [true, false, true]);
    window.remember(&[event(1)]).await.unwrap();
    assert_eq!(window.seen(&[of(1), of(2), event(1)]).await.unwrap(), [true, true, true]);
}

/// Hole 3: another scope or tenant has seen nothing.
#[tokio::test]
async fn t03_window_keys_carry_the_scope() {
    let (window, _) = memory(10);
    window.remember(&[identity(Some("a"), "mailer", "e").into()]).await.unwrap();
    let others = [
        identity(Some("a"), "mailer", "e"),
        identity(None, "mailer", "e"),
        identity(Some("b"), "mailer", "e"),
        identity(Some("a"), "biller", "e"),
    ]
    .map(Sighting::from);
    assert_eq!(window.seen(&others).await.unwrap(), [true, false, false, false]);
}

#[tokio::test]
async fn memory_forgets_in_time() {
    let (window, clock) = memory(10);
    window.remember(&[event(1)]).await.unwrap();
    clock.advance(Duration::from_secs(86_399));
    window.remember(&[event(2)]).await.unwrap();
    assert_eq!(window.seen(&[event(1), event(2)]).await.unwrap(), [true, true]);
    clock.advance(Duration::from_secs(1));
    assert_eq!(window.seen(&[event(1), event(2)]).await.unwrap(), [false, true]);
    window.remember(&[event(3)]).await.unwrap();
    assert_eq!(window.len(), 2, "what is past its time leaves its room");
}

#[tokio::test]
async fn memory_is_bounded() {
    let (window, _) = memory(3);
    window.remember(&[event(1), event(2), event(3)]).await.unwrap();
    window.remember(&[event(1)]).await.unwrap(); // again: now 2 is the oldest
    window.remember(&[event(4)]).await.unwrap();
    let all: Vec<_> = (1..=4).map(event).collect();
    assert_eq!(window.seen(&all).await.unwrap(), [true, false, true, true]);
    assert_eq!(window.len(), 3);
}

#[tokio::test]
async fn another_epoch_is_a_miss() {
    let (window, _) = memory(10);
    window.remember(&[event(1)]).await.unwrap();
    let restored = window.in_epoch("2");
    assert_eq!(restored.seen(&[event(1)]).await.unwrap(), [false]);
    restored.remember(&[event(1)]).await.unwrap();
    assert_eq!(restored.seen(&[event(1)]).await.unwrap(), [true]);
    assert_eq!(window.seen(&[event(1)]).await.unwrap(), [false]);
    // The ledger's epoch, besides the configured one.
    let of = |life: &str| Sighting { epoch: Some(Epoch::of([life])), ..event(2) };
    window.remember(&[of("a")]).await.unwrap();
    assert_eq!(window.seen(&[of("a"), of("b"), event(2)]).await.unwrap(), [true, false, false]);
    assert_eq!(restored.seen(&[of("a")]).await.unwrap(), [false]);
}

#[test]
fn limits_are_checked() {
    for ttl in [Duration::from_secs(3599), Duration::from_secs(30 * 86_400 + 1)] {
        let error = MemoryWindow::new(WindowSettings::new("1").ttl(ttl), 10).unwrap_err();
        assert!(error.to_string().contains("an hour"), "{error}");
    }
    assert!(MemoryWindow::new(WindowSettings::new(""), 10).is_err());
    assert!(MemoryWindow::new(WindowSettings::new("x".repeat(65)), 10).is_err());
    assert!(MemoryWindow::new(WindowSettings::new("1"), 0).is_err());
    assert!(crate::open::window("http://x", WindowSettings::new("1")).is_err());
}

/// Hole 7: a time limit shorter than redelivery is reported at start.
#[tokio::test]
async fn t07_a_short_memory_is_reported() {
    let (window, _) = memory(10);
    let level = async |hours: u64| {
        let findings = window.check(Some(Duration::from_secs(hours * 3600))).await;
        findings.into_iter().find(|finding| finding.check == "window.ttl").unwrap()
    };
    assert_eq!(level(24).await.level, Level::Fine);
    let level_of = level(168).await;
    assert_eq!(level_of.level, Level::Warning);
    assert!(level_of.message.contains("24 h") && level_of.message.contains("168 h"), "{}", level_of.message);
}

/// Fails the given number of times, then answers.
#[derive(Debug, Default)]
struct Flaky {
    failures: AtomicU32,
    remembered: Mutex<Vec<Sighting>>,
}

impl Flaky {
    fn call(&self) -> Result<()> {
        let left = self.failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        left.map_or(Ok(()), |_| Err(Error::unavailable("asking the window", "no route to it")))
    }
}

#[async_trait]
impl Window for Flaky {
    async fn seen(&self, sightings: &[Sighting]) -> Result<Vec<bool>> {
        self.call()?;
        let remembered = self.remembered.lock().unwrap();
        Ok(sightings.iter().map(|sighting| remembered.contains(sighting)).collect())
    }
    async fn remember(&self, sightings: &[Sighting]) -> Result<()> {
        self.call()?;
        self.remembered.lock().unwrap().extend_from_slice(sightings);
        Ok(())
    }
    async fn check(&self, _: Option<Duration>) -> Vec<Finding> {
        Vec::new()
    }
}

fn with(policy: OnOutage) -> OutageWindow<Flaky> {
    OutageWindow::new(Flaky::default(), policy).probe(Duration::from_millis(1), Duration::from_millis(4))
}

/// Hole 2: the behaviour in an outage is chosen, not an accident.
#[tokio::test]
async fn t02_pass_through_lets_everything_pass() {
    let window = with(OnOutage::PassThrough);
    window.remember(&[event(1)]).await.unwrap();
    window.inner().failures.store(2, Ordering::SeqCst);
    assert_eq!(window.seen(&[event(1), event(2)]).await.unwrap(), [false, false]);
    window.remember(&[event(2)]).await.unwrap(); // dropped: the ledger knows it
    assert_eq!(window.seen(&[event(1), event(2)]).await.unwrap(), [true, false]);
}

#[tokio::test]
async fn t02_pause_waits_until_the_window_is_back() {
    let window = with(OnOutage::Pause);
    window.remember(&[event(1)]).await.unwrap();
    window.inner().failures.store(7, Ordering::SeqCst);
    assert_eq!(window.seen(&[event(1), event(2)]).await.unwrap(), [true, false]);
    assert_eq!(window.inner().failures.load(Ordering::SeqCst), 0, "it was asked until it answered");
    window.inner().failures.store(1, Ordering::SeqCst);
    window.remember(&[event(2)]).await.unwrap(); // it is done, so remembering does not wait
    assert_eq!(window.seen(&[event(2)]).await.unwrap(), [false]);
}

proptest! {
    /// Two identities never share a key, whatever their parts contain.
    #[test]
    fn keys_are_injective(
        a in (proptest::option::of("[:%a ~é]{1,3}"), "[:%a ~é]{1,3}", "[:%a ~é]{1,3}"),
        b in (proptest::option::of("[:%a ~é]{1,3}"), "[:%a ~é]{1,3}", "[:%a ~é]{1,3}"),
    ) {
        let make = |(tenant, scope, id): &(Option<String>, String, String)| -> Result<Identity> {
            let tenant = tenant.as_ref().map(Tenant::new).transpose()?;
            Ok(Identity { tenant, scope: Scope::new(scope)?, id: EventId::new(id)? })
        };
        if let (Ok(a), Ok(b)) = (make(&a), make(&b)) {
            prop_assert_eq!(a == b, key(&a) == key(&b));
        }
    }
}
