//! A read model in ClickHouse with many rows is compared with its records.

use async_trait::async_trait;
use hapax::analytics::{
    Change, Difference, MemoryReadModel, ReadModel, Uuid, VerifySettings, Version, verify,
};
use hapax::records::{ModuleSlug, Name, OfTenant, Payload, Record, Scan, Snapshot};
use hapax::testing::analytics::{all, apply, at, block, change, scanned};
use hapax::{Result, Time};

use crate::engine::Database;

const RECORDS: u64 = 300_000;
const AT: i64 = 1_700_000_000_000_000;

fn orders() -> ModuleSlug {
    ModuleSlug::new("orders").unwrap()
}

fn id(n: u64) -> Uuid {
    Uuid::from_u128(u128::from(n))
}

/// Records that are made when they are read: record `n` has the payload `{"n":…}`.
struct Made;

#[async_trait]
impl Snapshot for Made {
    async fn snapshot(&self, scan: &Scan) -> Result<Vec<OfTenant>> {
        let after = scan.after.as_ref().map_or(0, |name| u64::try_from(name.id.as_u128()).unwrap());
        let wanted = |n: &u64| scan.buckets.as_ref().is_none_or(|all| all.contains(&Scan::bucket(id(*n))));
        let record = |n: u64| -> Result<OfTenant> {
            let at = Time::from_micros(AT);
            let payload = Payload::new(format!(r#"{{"n":{n}}}"#))?;
            Ok(OfTenant { tenant: Uuid::nil(), record: Record::new(orders(), id(n), 1, payload, (at, at)) })
        };
        (after + 1..=RECORDS).filter(wanted).take(scan.limit).map(record).collect()
    }

    async fn gone(&self, _: Option<&Name>, _: usize) -> Result<Vec<(Name, u64)>> {
        Ok(Vec::new())
    }

    async fn now(&self) -> Result<Time> {
        Ok(Time::from_micros(AT + 1_000_000))
    }
}

/// One digit of one of 300,000 payloads, changed behind the back of everybody, is named, with the sums as a receipt: one
/// bucket differs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_changed_byte_among_300_000_rows_of_clickhouse_is_named() {
    let database = Database::new();
    let model = database.model();
    model.partitions().await.unwrap(); // makes the tables
    let version = Version::new(1, 1).unwrap();
    database.sql(&format!(
        "INSERT INTO DB.data_records SELECT toUUID('{}'), 'orders',
           concat('00000000-0000-0000-0000-', leftPad(lower(hex(number + 1)), 12, '0')) AS id,
           concat('{{\"n\":', toString(number + 1), '}}') AS json,
           map('/n', toString(number + 1)), map('/n', toDecimal128(number + 1, 9)),
           fromUnixTimestamp64Micro(toInt64({AT}), 'UTC'), fromUnixTimestamp64Micro(toInt64({AT}), 'UTC'),
           {}, 0, length(json), 'made', 0, number, 0
         FROM numbers({RECORDS})",
        Uuid::nil(),
        version.as_u64()
    ));
    let changed = 123_456;
    database.sql(&format!(
        "ALTER TABLE DB.data_records UPDATE payload = replaceOne(payload, '123456', '123457')
         WHERE record_id = '{}' SETTINGS mutations_sync = 2",
        id(changed)
    ));
    let verified = verify(&model, &Made, &VerifySettings::default()).await.unwrap();
    let name = Name { tenant: Uuid::nil(), module: orders(), id: id(changed) };
    let found: Vec<_> = verified.differences.into_iter().collect();
    assert_eq!(found, [(name, Difference::Corrupt { version })]);
    assert_eq!((verified.source.total().records, verified.model.total().records), (RECORDS, RECORDS));
    let differing: Vec<_> =
        verified.source.iter().filter(|(of, b, sum)| verified.model.bucket(of, *b) != *sum).collect();
    assert!(
        matches!(differing[..], [(_, bucket, _)] if bucket == Scan::bucket(id(changed))),
        "{differing:?}"
    );

    // Only the bucket that differs is read again.
    let wanted = Scan::new(100_000).buckets(Some([Scan::bucket(id(changed))].into()));
    let read = model.scan(&wanted).await.unwrap();
    assert!((500..2_500).contains(&read.len()), "{} rows of {RECORDS}", read.len());
    assert!(read.iter().all(|row| Scan::bucket(row.name.id) == Scan::bucket(id(changed))));
    assert!(read.iter().any(|row| row.name.id == id(changed)));
}

/// Records that changes have made, in the order of their ids.
struct Of(Vec<Change>);

#[async_trait]
impl Snapshot for Of {
    async fn snapshot(&self, scan: &Scan) -> Result<Vec<OfTenant>> {
        let after = scan.after.as_ref().map(|name| name.id);
        let wanted = |of: &&Change| {
            after.is_none_or(|after| of.id > after)
                && scan.buckets.as_ref().is_none_or(|all| all.contains(&Scan::bucket(of.id)))
        };
        let record = |of: &Change| {
            let (payload, times) = (of.payload.clone().unwrap(), (of.created_at, of.updated_at));
            let record = Record::new(of.module.clone(), of.id, of.version.seq(), payload, times);
            OfTenant { tenant: of.tenant, record }
        };
        Ok(self.0.iter().filter(wanted).take(scan.limit).map(record).collect())
    }

    async fn gone(&self, _: Option<&Name>, _: usize) -> Result<Vec<(Name, u64)>> {
        Ok(Vec::new())
    }

    async fn now(&self) -> Result<Time> {
        Ok(at(9))
    }
}

/// ClickHouse orders UUIDs by their second half. Of these ids the second half falls while the first rises: pages, scans and
/// sums are those of memory all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t56_ids_whose_halves_disagree_are_listed_and_compared_in_the_order_of_their_bytes() {
    const COUNT: u128 = 40;
    let (database, memory) = (Database::new(), MemoryReadModel::default());
    let model = database.model();
    let changes: Vec<_> =
        (1..=COUNT).map(|n| change(n << 64 | (COUNT - n + 1), 1, Some(&format!(r#"{{"n":{n}}}"#)))).collect();
    for each in [changes.clone(), changes.iter().rev().cloned().collect()] {
        let mut of = block(each);
        of.pulse = Some(at(10));
        apply(&model, of.clone()).await;
        apply(&memory, of).await;
    }
    let first = |by: &str| {
        let sql =
            format!("SELECT record_id FROM DB.data_records FINAL WHERE module != '' ORDER BY {by} LIMIT 1");
        database.sql(&sql)
    };
    assert_eq!(first("record_id"), changes[0].id.to_string());
    assert_eq!(first("toUUID(record_id)"), changes[39].id.to_string(), "the trap is there");
    let orders = hapax::testing::analytics::orders();
    for limit in [1, 7, 39, 1000] {
        let listed = all(&model, &orders, limit).await;
        assert_eq!(listed, all(&memory, &orders, limit).await, "pages of {limit}");
        assert!(listed.len() == 40 && listed.is_sorted_by_key(|record| record.id), "pages of {limit}");
        let scan = || Scan::new(limit);
        assert_eq!(scanned(&model, scan()).await, scanned(&memory, scan()).await, "scans of {limit}");
    }
    let source = Of(changes);
    let [one, other] = [
        verify(&model, &source, &VerifySettings::default()).await.unwrap(),
        verify(&memory, &source, &VerifySettings::default()).await.unwrap(),
    ];
    assert!(one.differences.is_empty() && one == other, "{:?}", one.differences);
    assert_eq!(one.source, one.model);
}
