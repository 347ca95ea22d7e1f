//! A task of the relay panics: its end is the relay's, which says why.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::sync::Arc;
use std::time::Duration;

use hapax::bus::{Bus as _, MemoryBus, TopicSettings};
use hapax::journal::{Append, Expected, Journal as _, MemoryJournal};
use hapax::relay::{Relay, RelaySettings};
use hapax::testing::relay::FaultyBus;
use hapax::{Aggregate, Error, Event, EventId, RelayName, Topic};

use crate::support::this;

/// The bus does not answer for one aggregate in time. Whoever collects its answers panics: without the relay's end, the aggregate
/// would be waited for in vain, and nobody told.
#[tokio::test]
async fn t454_a_panic_behind_answers_that_come_late_ends_the_relay() {
    const POINT: &str = "relay.settling:1:panic";
    if std::env::var(hapax::testing::crash::VARIABLE).as_deref() != Ok(POINT) {
        let mut child = this::test("t454_a_panic_behind_answers_that_come_late_ends_the_relay");
        let ran = child.env(hapax::testing::crash::VARIABLE, POINT).output().unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        return;
    }
    let (journal, topic) = (Arc::new(MemoryJournal::default()), Topic::new("orders").unwrap());
    for aggregate in ["slow", "good"] {
        let append =
            Append::new(Aggregate::new(aggregate).unwrap(), Expected::Any, [Event::new(EventId::now_v7())]);
        assert_eq!(journal.append(&append).await.unwrap().placed.len(), 1);
    }
    let bus = MemoryBus::default();
    bus.create_topic(&topic, TopicSettings::new(3)).await.unwrap();
    let bus = Arc::new(FaultyBus::new(Arc::new(bus)));
    bus.slow(|record| record.headers.get("aggregate_id") == Some(b"slow"));
    let mut settings = RelaySettings::new(RelayName::new("main").unwrap(), topic);
    settings.flush_timeout = Duration::from_millis(50);
    let running = Relay::new(journal, bus, settings).unwrap().run();
    let ended = tokio::time::timeout(Duration::from_secs(60), running).await.expect("it ends");
    let error = ended.expect_err("a task of it is gone");
    let says = "a task of the relay ended badly";
    assert!(matches!(&error, Error::Corrupt(what) if what.contains(says)), "{error}");
}
