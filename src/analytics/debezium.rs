//! Debezium's messages about modules and pulses in PostgreSQL.
//!
//! The version is the row's seq, and a deletion has the next one: the same clock as the events of the
//! journal, so both may feed one model. Log positions are for people who look. They are not the order of
//! commits, not even for one record.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::{Change, Input, Rejected, Version};
use crate::bus::{PARTITIONS_MAX, Pulse, Received};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::records::{ModuleSlug, Payload};

/// What Debezium writes for a large value that an update did not change.
const UNCHANGED: &str = "__debezium_unavailable_value";
/// The schemas of modules, and the table of each.
const MODULE: &str = "module_";
const RECORDS: &str = "records";
/// The table of pulses, in hapax's schema.
pub(crate) const PULSES: &str = "record_pulse";

/// The value of a message. With schemas, it is the payload of another object.
#[derive(Deserialize)]
struct Message<'m> {
    #[serde(borrow)]
    op: Option<Cow<'m, str>>,
    #[serde(borrow)]
    before: Option<&'m RawValue>,
    #[serde(borrow)]
    after: Option<&'m RawValue>,
    #[serde(borrow)]
    source: Option<Place<'m>>,
    #[serde(borrow)]
    payload: Option<&'m RawValue>,
}

/// Where a row is.
#[derive(Deserialize)]
struct Place<'m> {
    #[serde(borrow)]
    schema: Option<Cow<'m, str>>,
    #[serde(borrow)]
    table: Option<Cow<'m, str>>,
    /// When its transaction committed.
    ts_us: Option<i64>,
    #[serde(borrow)]
    lsn: Option<&'m RawValue>,
}

/// A row of a module. Every column may be missing: tables are changed.
#[derive(Deserialize)]
struct Row<'m> {
    #[serde(borrow)]
    id: Option<Cow<'m, str>>,
    #[serde(borrow)]
    tenant_id: Option<Cow<'m, str>>,
    #[serde(borrow)]
    payload: Option<Cow<'m, str>>,
    seq: Option<u64>,
    #[serde(borrow)]
    created_at: Option<Cow<'m, str>>,
    #[serde(borrow)]
    updated_at: Option<Cow<'m, str>>,
}

/// A row of the table of pulses.
#[derive(Deserialize)]
struct PulseRow<'m> {
    partitions: i32,
    #[serde(borrow)]
    at: Cow<'m, str>,
}

/// Reads a message. What our relay published to the same topic is read as in [`Input::of`].
pub(super) fn input(received: &Received, generation: u16) -> std::result::Result<Input, Box<Rejected>> {
    let headers = &received.record.headers;
    let ours = Pulse::is(&received.record) || headers.get("ce_type").is_some();
    if ours || received.unreadable.is_some() {
        return Input::of(received, generation);
    }
    let Some(bytes) = received.record.payload.as_deref() else {
        return Ok(Input::Other); // a tombstone: the deletion came before it
    };
    read(received, bytes, generation).map_err(|error| {
        Box::new(Rejected {
            tenant: tenant_of(bytes),
            origin: received.origin.clone(),
            reason: error.chain(),
            payload: bytes.to_vec(),
        })
    })
}

fn bad(problem: impl Into<String>) -> Error {
    Error::invalid("change", problem)
}

fn message(bytes: &[u8]) -> Result<Message<'_>> {
    let unknown = |error| bad(format!("it is not a Debezium message in JSON ({error})"));
    let message: Message<'_> = serde_json::from_slice(bytes).map_err(unknown)?;
    match (&message.op, message.payload) {
        (None, Some(inner)) => serde_json::from_str(inner.get()).map_err(unknown),
        _ => Ok(message),
    }
}

fn read(received: &Received, bytes: &[u8], generation: u16) -> Result<Input> {
    let message = message(bytes)?;
    let op = message.op.as_deref().ok_or_else(|| {
        bad("it is not a Debezium message: it has no op (a transformation that flattens messages removes it)")
    })?;
    if op == "m" {
        return Ok(Input::Other); // a message that somebody wrote into the log: no row
    }
    let (schema, table) = match &message.source {
        Some(Place { schema: Some(schema), table: Some(table), .. }) => (&**schema, &**table),
        _ => return Err(bad("its source has no schema or no table")),
    };
    let module = match (schema.strip_prefix(MODULE), table) {
        (Some(slug), RECORDS) => ModuleSlug::new(slug)?,
        (_, PULSES) => return pulse(op, &message),
        _ => return Ok(Input::Other),
    };
    let mut change = match op {
        "c" | "u" | "r" => written(received, &message, module, generation)?,
        "d" => deleted(received, &message, module, generation)?,
        "t" => return Ok(Input::Truncated(module)),
        op => {
            let shown: String = op.chars().take(20).collect();
            return Err(bad(format!("its op is {shown:?}; expected c, u, d, r, t or m")));
        }
    };
    // It decides nothing, so a position that cannot be read is none.
    change.lsn = message.source.and_then(|source| source.lsn?.get().parse().ok()).unwrap_or(0);
    Ok(Input::Change(Box::new(change)))
}

fn row<'m>(side: &str, row: Option<&'m RawValue>) -> Result<Row<'m>> {
    let row = row.ok_or_else(|| bad(format!("it has no {side}")))?;
    serde_json::from_str(row.get())
        .map_err(|error| bad(format!("its {side} is not a row of a module ({error})")))
}

/// A column, which must be there.
fn column<'r, T: ?Sized>(side: &str, name: &str, value: Option<&'r T>) -> Result<&'r T> {
    value.ok_or_else(|| bad(format!("its {side} has no {name}: the column is gone, or is not published")))
}

fn uuid(side: &str, name: &str, text: Option<&str>) -> Result<Uuid> {
    let text = column(side, name, text)?;
    Uuid::try_parse(text).map_err(|_| bad(format!("the {name} of its {side} is not a UUID")))
}

fn time(side: &str, name: &str, text: Option<&str>) -> Result<Time> {
    Time::parse(column(side, name, text)?)
}

/// A payload as PostgreSQL prints it.
fn payload(side: &str, text: &str) -> Result<Payload> {
    let json: &RawValue = serde_json::from_str(text)
        .map_err(|error| bad(format!("the payload of its {side} is not JSON ({error})")))?;
    Payload::stored(json.get()).map_err(|_| bad(format!("the payload of its {side} is not a JSON object")))
}

/// The row after an insert, an update, or in a snapshot.
fn written(
    received: &Received,
    message: &Message<'_>,
    module: ModuleSlug,
    generation: u16,
) -> Result<Change> {
    const SIDE: &str = "after";
    let after = row(SIDE, message.after)?;
    let payload = match column(SIDE, "payload", after.payload.as_deref())? {
        UNCHANGED => unchanged(message)?,
        text => payload(SIDE, text)?,
    };
    Ok(Change {
        tenant: uuid(SIDE, "tenant_id", after.tenant_id.as_deref())?,
        module,
        id: uuid(SIDE, "id", after.id.as_deref())?,
        version: Version::new(generation, *column(SIDE, "seq", after.seq.as_ref())?)?,
        payload: Some(payload),
        created_at: time(SIDE, "created_at", after.created_at.as_deref())?,
        updated_at: time(SIDE, "updated_at", after.updated_at.as_deref())?,
        origin: received.origin.clone(),
        lsn: 0,
    })
}

/// The payload of an update that did not change it: the one before. A row without it would lose its content.
fn unchanged(message: &Message<'_>) -> Result<Payload> {
    let before = row("before", message.before).ok();
    match before.as_ref().and_then(|before| before.payload.as_deref()) {
        Some(text) if text != UNCHANGED => payload("before", text),
        _ => Err(bad(
            "its payload is not in it, because the update did not change it, and the row before has none either: the replica \
             identity of the table is not FULL",
        )),
    }
}

fn deleted(
    received: &Received,
    message: &Message<'_>,
    module: ModuleSlug,
    generation: u16,
) -> Result<Change> {
    const SIDE: &str = "before";
    let before = row(SIDE, message.before)?;
    // Without the replica identity, columns that are not of the key come as zeros and empty texts.
    let seq = *column(SIDE, "seq", before.seq.as_ref())?;
    if seq == 0 {
        return Err(bad(
            "it deletes a row whose seq is not in it: the replica identity of the table is not FULL",
        ));
    }
    let updated_at = time(SIDE, "updated_at", before.updated_at.as_deref())?;
    let committed = message.source.as_ref().and_then(|source| source.ts_us).map(Time::from_micros);
    Ok(Change {
        tenant: uuid(SIDE, "tenant_id", before.tenant_id.as_deref())?,
        module,
        id: uuid(SIDE, "id", before.id.as_deref())?,
        version: Version::new(generation, seq.saturating_add(1))?,
        payload: None,
        created_at: time(SIDE, "created_at", before.created_at.as_deref())?,
        updated_at: committed.unwrap_or(updated_at), // for people who look
        origin: received.origin.clone(),
        lsn: 0,
    })
}

/// A stamp of the table of pulses. Those of a snapshot do not say how far the topic is: its tables are
/// read one after the other, so this one may come before rows that were written before its time.
fn pulse(op: &str, message: &Message<'_>) -> Result<Input> {
    if !matches!(op, "c" | "u" | "r") {
        return Ok(Input::Other);
    }
    let read = |side: &str, row: Option<&RawValue>| -> Result<(Time, i32)> {
        let problem =
            |reason: String| Error::invalid("pulse", format!("its {side} is not a pulse: {reason}"));
        let row = row.ok_or_else(|| problem("it is missing".into()))?;
        let row: PulseRow<'_> =
            serde_json::from_str(row.get()).map_err(|error| problem(error.to_string()))?;
        if !(1..=PARTITIONS_MAX).contains(&row.partitions) {
            return Err(problem(format!(
                "it gives the topic {} partitions; a topic has 1 to {PARTITIONS_MAX}",
                row.partitions
            )));
        }
        Ok((Time::parse(&row.at)?, row.partitions))
    };
    let (at, partitions) = read("after", message.after)?;
    let pulse = Pulse { at, partitions };
    Ok(match op {
        "r" => Input::SnapshotPulse(pulse),
        "u" => Input::NextPulse { pulse, last: Some(read("before", message.before)?.0) },
        _ => Input::NextPulse { pulse, last: None },
    })
}

/// The rows of the table of pulses that reach every partition of a topic, one for each: Debezium's key in
/// JSON is hashed as Kafka's clients do.
#[cfg_attr(not(feature = "postgres"), allow(dead_code))] // for the table
pub(crate) fn pulse_rows(partitions: i32) -> Vec<i32> {
    let mut rows = vec![None; usize::try_from(partitions).unwrap_or(0)];
    let mut left = rows.len();
    for n in 0.. {
        if left == 0 {
            break;
        }
        let key = format!("{{\"partitions\":{partitions},\"n\":{n}}}");
        let at = crate::bus::route::partition_of(key.as_bytes(), partitions);
        let row: &mut Option<i32> = &mut rows[at as usize];
        if row.is_none() {
            *row = Some(n);
            left -= 1;
        }
    }
    let mut rows: Vec<i32> = rows.into_iter().flatten().collect();
    rows.sort_unstable();
    rows
}

/// Whose row it is, as far as that can be read.
fn tenant_of(bytes: &[u8]) -> Option<Uuid> {
    #[derive(Deserialize)]
    struct Whose {
        tenant_id: String,
    }
    let message = message(bytes).ok()?;
    let sides = [message.after, message.before].into_iter().flatten();
    let mut tenants = sides.filter_map(|side| serde_json::from_str::<Whose>(side.get()).ok());
    tenants.find_map(|whose| Uuid::try_parse(&whose.tenant_id).ok())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::analytics::{MemoryReadModel, Source};
    use crate::event::{Headers, Origin, Record};
    use crate::id::Topic;

    const TENANT: &str = "22222222-2222-2222-2222-222222222222";
    const ID: &str = "11111111-1111-1111-1111-111111111111";
    const AT: &str = "2026-11-17T17:43:15.409346Z";

    fn received(value: Option<Vec<u8>>) -> Received {
        let record = Record { payload: value.map(Bytes::from), ..Record::default() };
        Received::new(record, Origin::new(Topic::new("cdc").unwrap(), 1, 7))
    }

    fn read(value: &Value) -> std::result::Result<Input, Box<Rejected>> {
        Source::Debezium.read(&received(Some(value.to_string().into_bytes())), 3)
    }

    fn change(value: &Value) -> Change {
        match read(value) {
            Ok(Input::Change(change)) => *change,
            other => panic!("{other:?}"),
        }
    }

    fn rejected(value: &Value) -> Rejected {
        *read(value).unwrap_err()
    }

    fn source(schema: &str, table: &str) -> Value {
        json!({"version": "3.6.1.Final", "connector": "postgresql", "name": "hapax", "ts_ms": 1_794_937_395_418_u64,
            "snapshot": "false", "db": "app", "sequence": "[null,\"9\"]", "ts_us": 1_794_937_395_418_657_u64, "schema": schema,
            "table": table, "txId": 781, "lsn": 28_930_176, "xmin": null})
    }

    fn of_row(seq: u64, payload: &str) -> Value {
        json!({"id": ID, "tenant_id": TENANT, "payload": payload, "seq": seq, "created_at": AT, "updated_at": AT})
    }

    /// A message about the module orders.
    #[allow(clippy::needless_pass_by_value)] // the callers make them in place
    fn about(op: &str, before: Value, after: Value) -> Value {
        json!({"before": before, "after": after, "source": source("module_orders", "records"), "transaction": null, "op": op,
            "ts_ms": 1})
    }

    #[test]
    fn rows_are_changes_under_their_seq() {
        for (op, before) in [("c", Value::Null), ("r", Value::Null), ("u", of_row(4, "{}"))] {
            let change = change(&about(op, before, of_row(5, r#"{"amount": 1.50}"#)));
            assert_eq!(
                (change.tenant.to_string(), change.id.to_string()),
                (TENANT.into(), ID.into()),
                "{op}"
            );
            assert_eq!((change.module.as_str(), change.version), ("orders", Version::new(3, 5).unwrap()));
            assert_eq!(change.payload.unwrap().as_str(), r#"{"amount":1.50}"#);
            assert_eq!(
                (change.created_at.to_string(), change.updated_at.to_string()),
                (AT.into(), AT.into())
            );
        }
    }

    #[test]
    fn t48_a_deletion_has_the_seq_after_the_last() {
        let change = change(&about("d", of_row(5, "{}"), Value::Null));
        assert_eq!((change.version, change.payload), (Version::new(3, 6).unwrap(), None));
    }

    #[test]
    fn messages_with_schemas_say_the_same() {
        let value = about("u", of_row(1, "{}"), of_row(2, r#"{"a": "ä"}"#));
        let with =
            json!({"schema": {"type": "struct", "fields": [], "name": "hapax.Envelope"}, "payload": value});
        assert_eq!(change(&with), change(&value));
        let gone = json!({"schema": null, "payload": about("d", of_row(2, "{}"), Value::Null)});
        assert_eq!(change(&gone).payload, None);
    }

    #[test]
    fn tombstones_other_tables_and_log_messages_are_passed_by() {
        assert_eq!(Source::Debezium.read(&received(None), 3).unwrap(), Input::Other);
        let mut other = about("c", Value::Null, of_row(1, "{}"));
        for (schema, table) in [("public", "records"), ("module_orders", "lines"), ("hapax", "keys")] {
            other["source"] = source(schema, table);
            assert_eq!(read(&other).unwrap(), Input::Other, "{schema}.{table}");
        }
        assert_eq!(read(&json!({"op": "m", "source": source("", ""), "message": {}})).unwrap(), Input::Other);
    }

    #[test]
    fn an_unchanged_payload_is_the_one_before_or_is_rejected() {
        let (large, unchanged) = (of_row(1, r#"{"large": 1}"#), of_row(2, UNCHANGED));
        let change = change(&about("u", large, unchanged.clone()));
        assert_eq!(change.payload.unwrap().as_str(), r#"{"large":1}"#);
        for before in
            [Value::Null, of_row(1, UNCHANGED), json!({"id": ID, "tenant_id": TENANT}), of_row(1, "")]
        {
            let rejected = rejected(&about("u", before, unchanged.clone()));
            assert!(
                rejected.reason.contains("payload") || rejected.reason.contains("FULL"),
                "{}",
                rejected.reason
            );
            assert_eq!(rejected.tenant.unwrap().to_string(), TENANT);
        }
    }

    /// Without the replica identity, Debezium fills what it does not know with zeros: version 1 would lose to every row.
    #[test]
    fn a_deletion_without_its_row_is_rejected() {
        let zeros = json!({"id": ID, "tenant_id": TENANT, "payload": "", "seq": 0, "created_at": "1970-01-01T00:00:00Z",
            "updated_at": "1970-01-01T00:00:00Z"});
        let rejected = rejected(&about("d", zeros, Value::Null));
        assert!(rejected.reason.contains("replica identity"), "{}", rejected.reason);
        assert_eq!(rejected.tenant.unwrap().to_string(), TENANT);
    }

    #[test]
    fn a_column_that_disappeared_is_named_and_holds_its_tenant_back() {
        for name in ["id", "tenant_id", "payload", "seq", "created_at", "updated_at"] {
            for (op, side) in [("c", "after"), ("u", "after"), ("d", "before")] {
                if (op, name) == ("d", "payload") {
                    continue; // a deletion has none
                }
                let mut value = about(op, of_row(1, "{}"), of_row(2, "{}"));
                for side in ["before", "after"] {
                    value[side].as_object_mut().unwrap().remove(name);
                }
                let rejected = rejected(&value);
                assert!(
                    rejected.reason.contains(&format!("its {side} has no {name}")),
                    "{}",
                    rejected.reason
                );
                assert_eq!(rejected.tenant.is_some(), name != "tenant_id");
                assert_eq!(rejected.payload, value.to_string().into_bytes(), "it is kept");
            }
        }
    }

    #[test]
    fn an_unknown_shape_is_rejected_with_its_reason() {
        let mut nowhere = about("c", Value::Null, of_row(1, "{}"));
        nowhere["source"] = json!({"lsn": 1});
        for (value, expected) in [
            (json!({"id": ID, "seq": 1}), "no op"),
            (json!([]), "not a Debezium message"),
            (json!({"op": 5}), "not a Debezium message"),
            (json!({"schema": {}, "payload": null}), "no op"),
            (nowhere, "no schema or no table"),
            (about("x", Value::Null, of_row(1, "{}")), "its op is \"x\""),
            (about("c", Value::Null, Value::Null), "it has no after"),
            (about("d", Value::Null, Value::Null), "it has no before"),
            (about("c", Value::Null, of_row(0, "{}")), "it is 0"),
            (about("c", Value::Null, of_row(1, "[]")), "not a JSON object"),
            (about("c", Value::Null, of_row(1, "{")), "not JSON ("),
            (about("c", Value::Null, json!({"seq": "1"})), "not a row of a module"),
        ] {
            let reason = rejected(&value).reason;
            assert!(reason.contains(expected), "{reason}");
        }
        let broken = Source::Debezium.read(&received(Some(b"\xff".to_vec())), 3).unwrap_err();
        assert_eq!(broken.tenant, None);
    }

    #[test]
    fn t54_a_truncate_is_no_change() {
        let value = about("t", Value::Null, Value::Null);
        assert_eq!(read(&value).unwrap(), Input::Truncated(ModuleSlug::new("orders").unwrap()));
    }

    fn beat(op: &str, before: Option<&str>, after: &str, partitions: i64) -> Value {
        let row = |at: &str| json!({"partitions": partitions, "n": 2, "at": at});
        let before = before.map_or(Value::Null, row);
        json!({"before": before, "after": row(after), "source": source("hapax", PULSES), "op": op})
    }

    /// A snapshot reads one table after the other, so what it says of pulses is not true of the others yet.
    #[test]
    fn pulses_count_where_they_were_streamed_and_not_in_a_snapshot() {
        let pulse = Pulse { at: Time::parse(AT).unwrap(), partitions: 4 };
        let first = read(&beat("c", None, AT, 4)).unwrap();
        assert_eq!(first, Input::NextPulse { pulse, last: None });
        let last = Time::parse("2026-11-17T17:43:14Z").unwrap();
        let next = read(&beat("u", Some("2026-11-17T17:43:14Z"), AT, 4)).unwrap();
        assert_eq!(next, Input::NextPulse { pulse, last: Some(last) });
        assert_eq!(read(&beat("r", None, AT, 4)).unwrap(), Input::SnapshotPulse(pulse));
        for op in ["d", "t"] {
            assert_eq!(read(&beat(op, None, AT, 4)).unwrap(), Input::Other, "{op}");
        }
        for value in [beat("u", None, "soon", 4), beat("c", None, AT, 0), beat("c", None, AT, 1_000_000)] {
            assert_eq!(rejected(&value).tenant, None, "{value}");
        }
    }

    #[test]
    fn there_is_a_pulse_for_every_partition() {
        for partitions in [1, 2, 3, 4, 12, 1000] {
            let rows = pulse_rows(partitions);
            assert!(rows.is_sorted() && rows.len() == partitions as usize);
            let key = |n| format!("{{\"partitions\":{partitions},\"n\":{n}}}");
            let mut reached: Vec<_> =
                rows.iter().map(|n| crate::bus::route::partition_of(key(n).as_bytes(), partitions)).collect();
            reached.sort_unstable();
            assert_eq!(reached, (0..partitions).collect::<Vec<_>>());
        }
        // Seen on a broker: Debezium's keys of these two went to these partitions of four.
        assert_eq!(crate::bus::route::partition_of(br#"{"partitions":4,"n":0}"#, 4), 3);
        assert_eq!(crate::bus::route::partition_of(br#"{"partitions":4,"n":1}"#, 4), 2);
    }

    /// What our own relay publishes to the same topic.
    #[test]
    fn events_of_the_journal_are_read_as_such() {
        let pulse = Pulse { at: Time::from_millis(5), partitions: 1 };
        let of_relay = Received::new(pulse.record(), Origin::new(Topic::new("cdc").unwrap(), 0, 0));
        assert_eq!(Source::Debezium.read(&of_relay, 3).unwrap(), Input::Pulse(pulse));
        let body = json!({"id": ID, "module": "orders", "seq": 6, "created_at": AT, "updated_at": AT, "payload": null});
        let aggregate = format!("orders/{ID}");
        let headers: Headers = [
            ("ce_type", "record.deleted".to_owned()),
            ("tenant_id", TENANT.to_owned()),
            ("aggregate_id", aggregate),
            ("sequence_number", "6".to_owned()),
        ]
        .into_iter()
        .collect();
        let record = Record { headers, payload: Some(body.to_string().into()), ..Record::default() };
        let journal = Received::new(record, Origin::new(Topic::new("events").unwrap(), 0, 0));
        let Ok(Input::Change(journal)) = Source::Debezium.read(&journal, 3) else { panic!("it is a change") };
        let debezium = change(&about("d", of_row(5, "{}"), Value::Null));
        assert_eq!(
            (journal.version, journal.tenant, journal.id),
            (debezium.version, debezium.tenant, debezium.id)
        );
    }

    /// Row positions in the log are not the order of commits: the later insert has the lower one. In every order the record is
    /// there at the end, under its last seq.
    #[tokio::test]
    async fn t46_the_seq_decides_whatever_the_log_positions_say() {
        use crate::analytics::{Block, ReadModel as _};
        use crate::bus::Partition;
        let mut history = [
            about("c", Value::Null, of_row(1, r#"{"n": 1}"#)),
            about("d", of_row(1, r#"{"n": 1}"#), Value::Null),
            about("c", Value::Null, of_row(3, r#"{"n": 3}"#)),
        ];
        for (value, lsn) in history.iter_mut().zip([100, 300, 200]) {
            value["source"]["lsn"] = lsn.into();
        }
        let partition = Partition { topic: Topic::new("cdc").unwrap(), number: 0 };
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let model = MemoryReadModel::default();
            for (offset, at) in (0..).zip(order) {
                let mut block = Block::new(partition.clone(), 1, offset..offset + 1);
                block.changes.push(change(&history[at]));
                model.apply(&[block]).await.unwrap();
            }
            let slug = ModuleSlug::new("orders").unwrap();
            let (tenant, id) = (Uuid::try_parse(TENANT).unwrap(), Uuid::try_parse(ID).unwrap());
            assert_eq!(
                model.version(tenant, &slug, id).await.unwrap(),
                Some(Version::new(3, 3).unwrap()),
                "{order:?}"
            );
        }
    }

    proptest! {
        /// Whatever a row holds comes back, with schemas and without.
        #[test]
        fn any_row_is_read_as_it_is(
            text in any::<String>(), number in any::<i64>(), seq in 1..=crate::analytics::SEQ_MAX - 1, us in 0..4_000_000_000_000_000_i64,
            tenant in any::<u128>(), id in any::<u128>(), op in prop::sample::select(vec!["c", "u", "r", "d"]), schemas in any::<bool>(),
        ) {
            let payload = Payload::of(&json!({"text": text.replace('\0', ""), "number": number})).unwrap();
            let (tenant, id, at) = (Uuid::from_u128(tenant), Uuid::from_u128(id), Time::from_micros(us));
            let row = json!({"id": id.to_string(), "tenant_id": tenant.to_string(), "payload": payload.as_str(), "seq": seq,
                "created_at": at.to_string(), "updated_at": at.to_string()});
            let mut value = if op == "d" { about(op, row, Value::Null) } else { about(op, Value::Null, row) };
            if schemas {
                value = json!({"schema": {"type": "struct"}, "payload": value});
            }
            let read = change(&value);
            prop_assert_eq!((read.tenant, read.id, read.created_at), (tenant, id, at));
            prop_assert_eq!(read.version.seq(), if op == "d" { seq + 1 } else { seq });
            prop_assert_eq!(read.payload, (op != "d").then_some(payload));
        }
    }
}
