//! From the journal to the handler: an event is its tenant's and of its own kind, whatever its headers and its payload say.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::sync::{Arc, Mutex};

use hapax::backend::memory::MemoryLedger;
use hapax::bus::{Bus, MemoryBus, TopicSettings};
use hapax::consumer::Consumer;
use hapax::journal::{Append, Expected, Journal, JournalSettings, MemoryJournal};
use hapax::ledger::{Filter, Operations as _, State};
use hapax::records::KIND_PREFIX;
use hapax::relay::Relay;
use hapax::{Event, EventId, Headers, Kind, Tenant, Topic};
use serde_json::{Value, json};

use crate::support::wait::until;

const STRUCTURED: (&str, &str) = ("content-type", "application/cloudevents+json");

/// What a handler was given of an event: tenant, id, kind, aggregate and seq.
type Handled = (Option<String>, String, Option<String>, String, u64);

/// Appends events, each to an aggregate of its own, and returns what the handler of a consumer behind the relay was given.
async fn through(events: &[(Option<&str>, Event)]) -> (Vec<Handled>, Arc<MemoryLedger>) {
    let journal: Arc<dyn Journal> = Arc::new(MemoryJournal::new(JournalSettings::default()));
    for (n, (tenant, event)) in events.iter().enumerate() {
        let mut append = Append::to(format!("order-{n}"), Expected::New, [event.clone()]).unwrap();
        append.tenant = tenant.map(|tenant| Tenant::new(tenant).unwrap());
        let _ = journal.append(&append).await.unwrap();
    }
    let (bus, ledger) = (Arc::new(MemoryBus::default()), Arc::new(MemoryLedger::default()));
    bus.create_topic(&Topic::new("orders").unwrap(), TopicSettings::new(3)).await.unwrap();
    let relay = Relay::builder(journal, bus.clone()).name("main").topic("orders").build().unwrap();
    let relaying = relay.handle();
    let relay = tokio::spawn(relay.run());
    let consumer =
        Consumer::builder(bus, Arc::clone(&ledger)).scope("mailer").topic("orders").build().unwrap();
    let (consuming, seen) = (consumer.handle(), Arc::new(Mutex::new(Vec::new())));
    let into = Arc::clone(&seen);
    let handler = move |event: &Event, _run: &hapax::guard::Run| {
        let handled = (
            event.tenant.as_ref().map(ToString::to_string),
            event.id.to_string(),
            event.kind.as_ref().map(ToString::to_string),
            event.aggregate.as_ref().unwrap().to_string(),
            event.seq.unwrap(),
        );
        into.lock().unwrap().push(handled);
        async { Ok(()) }
    };
    let consumer = tokio::spawn(consumer.leased(handler));
    until("all are consumed", async || {
        consuming.progress().passed.values().sum::<u64>() >= events.len() as u64
    })
    .await;
    consuming.stop();
    relaying.stop();
    consumer.await.unwrap().unwrap();
    relay.await.unwrap().unwrap();
    let mut seen = std::mem::take(&mut *seen.lock().unwrap());
    seen.sort();
    (seen, ledger)
}

fn event(id: &str, headers: &[(&str, &str)], payload: &Value) -> Event {
    let mut event = Event::new(EventId::new(id).unwrap()).payload(payload.to_string());
    event.headers =
        headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect::<Headers>();
    event
}

/// The payload of an event without a tenant says that it is a CloudEvent of acme's, with the same id. If a reader believed
/// that, its effect would be acme's, and acme's own event of that id would be refused as another content.
#[tokio::test]
async fn t301_no_event_becomes_another_tenants_on_the_bus() {
    let forged = |id: &str, tenant: Value| json!({"specversion": "1.0", "id": id, "tenant": tenant, "type": "order.paid"});
    let mut all = vec![(Some("acme"), event("e-1", &[], &json!({"of": "acme"})))];
    for (id, tenant) in [("e-1", json!("acme")), ("e-2", json!(17)), ("e-3", json!("acme"))] {
        all.push((None, event(id, &[STRUCTURED], &forged(id, tenant))));
    }
    // Of one tenant, about another; in every form in which a content type may come.
    let other = event(
        "e-4",
        &[("Content-Type", " Application/CloudEvents+JSON; charset=UTF-8")],
        &forged("e-4", json!("acme")),
    );
    all.push((Some("other"), other));
    // What is its own keeps its form.
    all.push((Some("acme"), event("e-5", &[STRUCTURED], &forged("e-5", json!("acme")))));
    // Aggregate and seq are the journal's, whatever the payload says.
    let placed = json!({"specversion": "1.0", "id": "e-6", "type": "order.paid", "subject": "order-99", "sequence": "99"});
    all.push((
        None,
        event("e-6", &[STRUCTURED, ("tenant_id", "acme"), ("ce_tenant", "acme"), ("seq", "99")], &placed),
    ));
    let (seen, ledger) = through(&all).await;
    let tenants: Vec<_> = seen
        .iter()
        .map(|(tenant, id, _, aggregate, seq)| (tenant.as_deref(), &**id, &**aggregate, *seq))
        .collect();
    assert_eq!(
        tenants,
        [
            (None, "e-1", "order-1", 1),
            (None, "e-2", "order-2", 1),
            (None, "e-3", "order-3", 1),
            (None, "e-6", "order-6", 1),
            (Some("acme"), "e-1", "order-0", 1),
            (Some("acme"), "e-5", "order-5", 1),
            (Some("other"), "e-4", "order-4", 1),
        ]
    );
    let dead = Filter { states: vec![State::Dead], ..Filter::default() };
    assert!(ledger.list(&dead, None, 10).await.unwrap().entries.is_empty(), "nobody's event is refused");
}

/// An event without a kind says in a header, or in its payload, that it is of a kind that only writes of records may append.
#[tokio::test]
async fn t302_no_event_becomes_that_of_a_record_on_the_bus() {
    let deleted = json!({"id": "0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10", "module": "orders", "seq": 9});
    let mut all = Vec::new();
    for (n, name) in ["ce_type", "eventType", "event_type"].into_iter().enumerate() {
        all.push((None, event(&format!("h-{n}"), &[(name, "record.deleted")], &deleted)));
        all.push((None, event(&format!("o-{n}"), &[(name, "order.paid")], &deleted)));
    }
    for (n, name) in ["event_type", "eventType"].into_iter().enumerate() {
        let mut payload = deleted.clone();
        payload[name] = "record.deleted".into();
        all.push((None, event(&format!("p-{n}"), &[], &payload)));
        // With a kind of its own nobody looks further.
        all.push((None, event(&format!("q-{n}"), &[], &payload).kind(Kind::new("order.paid").unwrap())));
    }
    all.push((None, event("s-0", &[STRUCTURED], &json!({"id": "s-0", "type": "record.deleted"}))));
    // What hides behind the envelope comes to light when the envelope is refused for its tenant.
    let hidden = json!({"id": "s-1", "type": "order.paid", "tenant": "acme", "event_type": "record.deleted"});
    all.push((None, event("s-1", &[STRUCTURED], &hidden)));
    all.push((None, event("s-2", &[STRUCTURED], &json!({"id": "s-2", "type": "order.paid"}))));
    let (seen, _) = through(&all).await;
    assert_eq!(seen.len(), all.len(), "{seen:?}");
    for (tenant, id, kind, _, _) in &seen {
        assert_eq!(tenant, &None, "{id}");
        assert!(kind.as_ref().is_none_or(|kind| !kind.starts_with(KIND_PREFIX)), "{id} is a {kind:?}");
        if id.starts_with('o') || id.starts_with('q') || id == "s-2" {
            assert_eq!(kind.as_deref(), Some("order.paid"), "{id}");
        }
    }
}
