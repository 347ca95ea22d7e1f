//! A feed that reads Debezium's messages: what it applies, what it keeps aside, and where it stops.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax::analytics::{
    Feed, FeedHandle, FeedProgress, FeedSettings, MemoryReadModel, ReadModel, Source, Uuid, Version,
};
use hapax::bus::{Bus, MemoryBus, Partition, Pulse, Record, TopicSettings};
use hapax::records::ModuleSlug;
use hapax::{Time, Topic};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::wait::until;

const TENANT: u128 = 0x2222;
const OTHER: u128 = 0x3333;

pub fn topic() -> Topic {
    Topic::new("cdc").unwrap()
}

fn orders() -> ModuleSlug {
    ModuleSlug::new("orders").unwrap()
}

/// A topic as Debezium writes it, and a read model that is fed from it.
struct TopicAndModel {
    bus: Arc<MemoryBus>,
    model: Arc<MemoryReadModel>,
}

impl TopicAndModel {
    async fn new() -> Self {
        let bus = Arc::new(MemoryBus::default());
        bus.create_topic(&topic(), TopicSettings::new(1)).await.unwrap();
        TopicAndModel { bus, model: Arc::default() }
    }

    fn feed(&self) -> (FeedHandle, JoinHandle<hapax::Result<FeedProgress>>) {
        let mut settings = FeedSettings::new(topic());
        settings.source = Source::Debezium;
        settings.linger = Duration::from_millis(5);
        let bus: Arc<dyn Bus> = Arc::<MemoryBus>::clone(&self.bus);
        let feed = Feed::new(bus, Arc::<MemoryReadModel>::clone(&self.model), settings).unwrap();
        (feed.handle(), tokio::spawn(feed.run()))
    }

    async fn publish(&self, value: &Value) {
        let record = Record { payload: Some(Bytes::from(value.to_string())), ..Record::default() };
        self.publish_record(record).await;
    }

    async fn publish_record(&self, record: Record) {
        let partition = Partition { topic: topic(), number: 0 };
        self.bus.publish_to(&partition, &[record]).await.unwrap().remove(0).unwrap();
    }

    async fn seq(&self, tenant: u128, id: u128) -> Option<u64> {
        let found =
            self.model.version(Uuid::from_u128(tenant), &orders(), Uuid::from_u128(id)).await.unwrap();
        found.map(Version::seq)
    }

    async fn synced(&self, tenant: u128) -> Option<Time> {
        self.model.last_sync_at(Uuid::from_u128(tenant)).await.unwrap()
    }
}

pub fn row(tenant: u128, id: u128, seq: u64) -> Value {
    let at = "2026-03-04T12:00:00.123456Z";
    json!({"id": Uuid::from_u128(id).to_string(), "tenant_id": Uuid::from_u128(tenant).to_string(), "payload": "{\"n\": 1}",
        "seq": seq, "created_at": at, "updated_at": at})
}

#[allow(clippy::needless_pass_by_value)] // the callers make them in place
pub fn message(op: &str, before: Value, after: Value) -> Value {
    json!({"op": op, "before": before, "after": after, "source": {"schema": "module_orders", "table": "records"}})
}

pub fn at(second: u32) -> String {
    format!("2026-03-04T12:00:{second:02}Z")
}

pub fn pulse(last: Option<u32>, second: u32) -> Value {
    let row = |second| json!({"partitions": 1, "n": 0, "at": at(second)});
    let op = if last.is_some() { "u" } else { "c" };
    json!({"op": op, "before": last.map(row), "after": row(second), "source": {"schema": "hapax", "table": "record_pulse"}})
}

async fn reaches(world: &TopicAndModel, tenant: u128, second: u32) {
    let wanted = Time::parse(&at(second)).unwrap();
    until("lastSyncAt moves", async || world.synced(tenant).await == Some(wanted)).await;
}

/// A truncate has no version for what is gone: the feed stops there, says what to do, and goes no further when it is
/// started again.
#[tokio::test]
async fn t54_a_truncate_stops_the_feed_and_asks_for_a_rebuild() {
    let world = TopicAndModel::new().await;
    world.publish(&message("c", Value::Null, row(TENANT, 1, 1))).await;
    world.publish(&pulse(None, 1)).await;
    let (handle, running) = world.feed();
    reaches(&world, TENANT, 1).await;
    world.publish(&message("t", Value::Null, Value::Null)).await;
    let error = running.await.unwrap().unwrap_err();
    assert!(!error.is_retryable());
    let text = error.to_string();
    assert!(
        text.contains("module orders") && text.contains("truncated") && text.contains("hapax cdc apply"),
        "{text}"
    );
    drop(handle);

    world.publish(&message("c", Value::Null, row(TENANT, 2, 1))).await;
    world.publish(&pulse(Some(1), 2)).await;
    assert!(world.feed().1.await.unwrap().is_err(), "again");
    let noted: Vec<_> =
        world.model.rejected(9).await.unwrap().into_iter().map(|entry| entry.rejected).collect();
    assert!(
        matches!(&noted[..], [one] if one.tenant.is_none() && one.reason.contains("truncated") && one.payload.is_empty()),
        "whoever asks the model is told, once: {noted:?}"
    );
    assert_eq!((world.seq(TENANT, 1).await, world.seq(TENANT, 2).await), (Some(1), None));
    assert_eq!(
        world.synced(TENANT).await,
        Some(Time::parse(&at(1)).unwrap()),
        "no answer claims to be complete"
    );
}

/// A replication slot that was made anew leaves out what was written between. The next pulse says which one came before it.
#[tokio::test]
async fn t53_a_gap_between_two_pulses_holds_everybody_back() {
    let world = TopicAndModel::new().await;
    let (handle, running) = world.feed();
    for (last, second) in [(None, 1), (Some(1), 2), (Some(2), 3)] {
        world.publish(&pulse(last, second)).await;
    }
    // Published again: what was before is known.
    world.publish(&pulse(Some(1), 2)).await;
    world.publish(&pulse(Some(2), 3)).await;
    reaches(&world, TENANT, 3).await;
    assert_eq!(handle.progress().rejected, 0);
    world.publish(&pulse(Some(6), 7)).await;
    until("the gap is noted", async || handle.progress().rejected == 1).await;
    until("it is applied", async || !world.model.rejected(1).await.unwrap().is_empty()).await;
    let entry = world.model.rejected(10).await.unwrap().remove(0);
    assert!(entry.rejected.reason.contains("changes before it are missing"), "{}", entry.rejected.reason);
    world.publish(&pulse(Some(7), 8)).await;
    until("the pulse after it is read", async || handle.progress().pulses == 7).await;
    assert!(
        world.synced(TENANT).await <= Some(Time::parse(&at(3)).unwrap()),
        "{:?}",
        world.synced(TENANT).await
    );
    handle.stop();
    running.await.unwrap().unwrap();

    // A feed that is started later knows the last pulse from the model.
    let (handle, running) = world.feed();
    world.publish(&pulse(Some(20), 21)).await;
    until("the gap is noted", async || handle.progress().rejected == 1).await;
    handle.stop();
    running.await.unwrap().unwrap();
}

/// A pulse as a snapshot reads it.
pub fn snapshot_pulse(second: u32) -> Value {
    let mut pulse = pulse(None, second);
    pulse["op"] = "r".into();
    pulse
}

/// Publishes pulses, then waits until the last of them is read: how far the model says it is, and why not further.
async fn outcome_of(world: &TopicAndModel, pulses: &[Value]) -> (Option<Time>, Vec<String>) {
    let (handle, running) = world.feed();
    for pulse in pulses {
        world.publish(pulse).await;
    }
    let seq = world.seq(OTHER, 99).await.unwrap_or(0) + 1;
    world.publish(&message("u", Value::Null, row(OTHER, 99, seq))).await;
    until("all is read", async || world.seq(OTHER, 99).await == Some(seq)).await;
    handle.stop();
    running.await.unwrap().unwrap();
    let rejected = world.model.rejected(10).await.unwrap();
    (world.synced(TENANT).await, rejected.into_iter().map(|entry| entry.rejected.reason).collect())
}

/// The connector streamed for long before it was told of this topic: nothing of that is in it.
#[tokio::test]
async fn t328_a_topic_without_a_beginning_is_never_complete() {
    let world = TopicAndModel::new().await;
    let (synced, reasons) = outcome_of(&world, &[pulse(Some(9), 10), pulse(Some(10), 11)]).await;
    assert_eq!(synced, None, "{reasons:?}");
    assert!(reasons.len() == 1 && reasons[0].contains("the beginning is missing"), "{reasons:?}");
}

/// A snapshot that was cut off is taken again, and what was deleted between both is in neither.
#[tokio::test]
async fn t328_a_snapshot_that_was_cut_off_is_never_complete() {
    for restart in [false, true] {
        let world = TopicAndModel::new().await;
        world.publish(&snapshot_pulse(5)).await;
        world.publish(&message("r", Value::Null, row(TENANT, 1, 1))).await;
        if restart {
            let (handle, running) = world.feed();
            until("the first is read", async || world.seq(TENANT, 1).await.is_some()).await;
            handle.stop();
            running.await.unwrap().unwrap();
        }
        let (synced, reasons) = outcome_of(&world, &[snapshot_pulse(20), pulse(Some(20), 21)]).await;
        assert_eq!(synced, None, "{reasons:?}");
        assert!(reasons.len() == 1 && reasons[0].contains("was cut off"), "{reasons:?}");
    }
    // One that was not cut off is: its stream follows.
    let world = TopicAndModel::new().await;
    let (synced, reasons) = outcome_of(&world, &[snapshot_pulse(5), pulse(Some(5), 6)]).await;
    assert_eq!((synced, reasons), (Some(Time::parse(&at(6)).unwrap()), vec![]));
}

/// The database was put back, or a standby that lacked the last writes took over.
#[tokio::test]
async fn t328_a_past_that_was_put_back_is_noticed() {
    let world = TopicAndModel::new().await;
    let (synced, reasons) = outcome_of(&world, &[pulse(None, 10), pulse(Some(8), 30)]).await;
    assert_eq!(synced, Some(Time::parse(&at(10)).unwrap()));
    assert!(reasons.len() == 1 && reasons[0].contains("changes before it are missing"), "{reasons:?}");
}

/// The slot was made anew, and somebody emptied the table of pulses with it: the next pulse names none before it.
#[tokio::test]
async fn t431_an_emptied_table_of_pulses_hides_no_gap() {
    let world = TopicAndModel::new().await;
    let (synced, reasons) = outcome_of(&world, &[pulse(None, 1), pulse(Some(1), 2), pulse(None, 9)]).await;
    assert_eq!(synced, Some(Time::parse(&at(2)).unwrap()), "{reasons:?}");
    assert!(reasons.len() == 1 && reasons[0].contains("the table of pulses was emptied"), "{reasons:?}");
    // A feed that is started later knows of the pulse from the model.
    let world = TopicAndModel::new().await;
    let (synced, reasons) = outcome_of(&world, &[pulse(None, 1), pulse(Some(1), 2)]).await;
    assert_eq!((synced, reasons), (Some(Time::parse(&at(2)).unwrap()), vec![]));
    let (synced, reasons) = outcome_of(&world, &[pulse(None, 9), pulse(Some(9), 10)]).await;
    assert_eq!((synced, reasons.len()), (Some(Time::parse(&at(2)).unwrap()), 1), "{reasons:?}");
}

/// Until a pulse was streamed, each start reads the topic from its beginning. What was dropped stays dropped, and
/// the model's place never goes back.
#[tokio::test]
async fn t435_what_was_dropped_does_not_come_back_with_a_restart() {
    let world = TopicAndModel::new().await;
    world.publish(&snapshot_pulse(5)).await;
    let mut broken = message("r", Value::Null, row(TENANT, 1, 1));
    broken["after"].as_object_mut().unwrap().remove("seq");
    world.publish(&broken).await;
    let (_, reasons) = outcome_of(&world, &[]).await;
    assert_eq!(reasons.len(), 1, "{reasons:?}");
    let place = world.model.partitions().await.unwrap().remove(0);
    assert!(world.model.drop_rejected(&place.partition, 1).await.unwrap());

    let (handle, running) = world.feed();
    until("it is read again", async || handle.progress().changes > 0).await;
    handle.stop();
    running.await.unwrap().unwrap();
    assert!(world.model.rejected(9).await.unwrap().is_empty(), "it was given up");
    assert_eq!(world.model.partitions().await.unwrap().remove(0).offset, place.offset);
    let (synced, reasons) = outcome_of(&world, &[pulse(Some(5), 6)]).await;
    assert_eq!((synced, reasons), (Some(Time::parse(&at(6)).unwrap()), vec![]));
}

/// Another topic of the same database has more partitions: its pulses are here too, and say nothing of this one.
#[tokio::test]
async fn t329_the_pulses_of_another_topic_are_passed_by() {
    let world = TopicAndModel::new().await;
    let mut other = pulse(None, 40);
    other["after"]["partitions"] = 6.into();
    let (synced, reasons) = outcome_of(&world, &[pulse(None, 1), other, pulse(Some(1), 2)]).await;
    assert_eq!((synced, reasons), (Some(Time::parse(&at(2)).unwrap()), vec![]));
}

/// A change that cannot be read holds its tenant back, and nobody else.
#[tokio::test]
async fn a_broken_message_holds_its_tenant_back() {
    let world = TopicAndModel::new().await;
    let (handle, running) = world.feed();
    world.publish(&pulse(None, 1)).await;
    reaches(&world, OTHER, 1).await;
    let mut broken = message("c", Value::Null, row(TENANT, 1, 1));
    broken["after"].as_object_mut().unwrap().remove("seq");
    world.publish(&broken).await;
    world.publish(&message("c", Value::Null, row(OTHER, 2, 1))).await;
    world.publish(&pulse(Some(1), 2)).await;
    reaches(&world, OTHER, 2).await;
    assert_eq!(world.synced(TENANT).await, Some(Time::parse(&at(1)).unwrap()));
    assert_eq!(world.seq(OTHER, 2).await, Some(1));
    let entry = world.model.rejected(10).await.unwrap().remove(0);
    assert!(entry.rejected.reason.contains("has no seq"), "{}", entry.rejected.reason);
    handle.stop();
    running.await.unwrap().unwrap();
}

/// The journal's events and Debezium's messages about the same writes may share a topic: one clock. Shuffled and
/// repeated, they give the same rows.
#[tokio::test]
async fn journal_and_debezium_feed_one_model_in_any_order() {
    let world = TopicAndModel::new().await;
    let event = |kind: &str, id: u128, seq: u64| {
        let mut body = row(TENANT, id, seq);
        let (module, aggregate) = ("orders", format!("orders/{}", Uuid::from_u128(id)));
        body["module"] = module.into();
        body["payload"] = if kind == "record.deleted" { Value::Null } else { json!({"n": 1}) };
        body.as_object_mut().unwrap().remove("tenant_id");
        let headers = [
            ("ce_type", kind.to_owned()),
            ("tenant_id", Uuid::from_u128(TENANT).to_string()),
            ("aggregate_id", aggregate),
            ("sequence_number", seq.to_string()),
        ];
        let payload = Some(Bytes::from(body.to_string()));
        Record { payload, headers: headers.into_iter().collect(), ..Record::default() }
    };
    let of = |value: Value| Record { payload: Some(Bytes::from(value.to_string())), ..Record::default() };
    // Record 1 is created, updated, deleted and created again; record 2 is created and deleted.
    let mut all = vec![
        event("record.created", 1, 1),
        of(message("c", Value::Null, row(TENANT, 1, 1))),
        event("record.updated", 1, 2),
        of(message("u", row(TENANT, 1, 1), row(TENANT, 1, 2))),
        event("record.deleted", 1, 3),
        of(message("d", row(TENANT, 1, 2), Value::Null)),
        of(message("c", Value::Null, row(TENANT, 1, 4))),
        event("record.created", 2, 1),
        of(message("r", Value::Null, row(TENANT, 2, 1))),
        of(message("d", row(TENANT, 2, 1), Value::Null)),
    ];
    let (handle, running) = world.feed();
    for round in 0..5 {
        let turn = round * 3 % all.len();
        all.rotate_left(turn);
        if round % 2 == 1 {
            all.reverse();
        }
        for record in &all {
            world.publish_record(record.clone()).await;
        }
    }
    world.publish_record(Pulse { at: Time::parse(&at(1)).unwrap(), partitions: 1 }.record()).await;
    reaches(&world, TENANT, 1).await;
    assert_eq!(handle.progress().rejected, 0);
    assert_eq!((world.seq(TENANT, 1).await, world.seq(TENANT, 2).await), (Some(4), Some(2)));
    let rows = hapax::analytics::Analytics::new(
        world.model.clone(),
        Some(&hapax::Tenant::new(Uuid::from_u128(TENANT).to_string()).unwrap()),
    )
    .unwrap();
    let page = hapax::analytics::ListPage::new(None, 10).unwrap();
    let listed = rows.records("orders").unwrap().list(page).await.unwrap();
    let seqs: Vec<_> = listed.value.records.iter().map(|record| (record.id.as_u128(), record.seq)).collect();
    assert_eq!(seqs, [(1, 4)]);
    handle.stop();
    running.await.unwrap().unwrap();
}

/// Where PostgreSQL's log has a change is kept for people who look. A position that is missing or strange is none: it must not
/// keep a change from being read.
#[test]
fn the_position_in_the_log_is_kept_and_rejects_nothing() {
    let read = |lsn: Value| {
        let mut value = message("c", Value::Null, row(TENANT, 1, 1));
        value["source"]["lsn"] = lsn;
        let record = Record { payload: Some(Bytes::from(value.to_string())), ..Record::default() };
        let received = hapax::bus::Received::new(record, hapax::event::Origin::new(topic(), 0, 0));
        match Source::Debezium.read(&received, 1) {
            Ok(hapax::analytics::Input::Change(change)) => change.lsn,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(read(json!(28_930_176)), 28_930_176);
    assert_eq!(read(json!(u64::MAX)), u64::MAX);
    for strange in [Value::Null, json!("0/1B96F80"), json!(-1), json!({"a": [1]})] {
        assert_eq!(read(strange.clone()), 0, "{strange}");
    }
}
