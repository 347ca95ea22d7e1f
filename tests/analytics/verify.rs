//! A read model that differs from its records is found out, and one that only lags is not.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hapax::analytics::{
    Block, Change, Difference, ReadModel, Uuid, Verified, VerifySettings, Version, verify,
};
use hapax::backend::sqlite::{SqliteJournal, SqliteReadModel, SqliteRecords};
use hapax::bus::Partition;
use hapax::journal::JournalSettings;
use hapax::records::{
    Create, Delete, ModuleSlug, Modules, Name, Payload, Record, Records, Scan, Snapshot, Update,
};
use hapax::testing::analytics as suite;
use hapax::{Tenant, Time};

/// Records, and a read model that was fed from them.
struct FedModel {
    dir: tempfile::TempDir,
    records: SqliteRecords,
    model: Arc<SqliteReadModel>,
}

fn orders() -> ModuleSlug {
    ModuleSlug::new("orders").unwrap()
}

fn payload(n: u128) -> Payload {
    Payload::new(format!(r#"{{"n":{n},"text":"some text of record {n}","amount":12.50}}"#)).unwrap()
}

impl FedModel {
    /// So many records, every third of a tenant; the model has them all.
    async fn of(count: u128) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let journal = SqliteJournal::open(dir.path().join("journal.db"), JournalSettings::default()).unwrap();
        let records = SqliteRecords::open(&journal).unwrap();
        records.create_module(&orders()).await.unwrap();
        let (writing, path) = (records.clone(), dir.path().join("journal.db"));
        let write = move || {
            let mut file = rusqlite::Connection::open(path).unwrap();
            let tx = file.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).unwrap();
            for n in 1..=count {
                writing.create_in(&tx, &create(n)).unwrap();
            }
            tx.commit().unwrap();
        };
        tokio::task::spawn_blocking(write).await.unwrap();
        let model = Arc::new(SqliteReadModel::open(dir.path().join("reads.db")).unwrap());
        let world = FedModel { dir, records, model };
        world.feed().await;
        world.pulse().await;
        world
    }

    /// Applies all records as they are.
    async fn feed(&self) {
        let mut scan = Scan::new(1000);
        loop {
            let page = self.records.snapshot(&scan).await.unwrap();
            let Some(last) = page.last() else { return };
            scan.after = Some(last.name());
            self.apply(page.into_iter().map(|of| change_of(of.tenant, of.record)).collect()).await;
        }
    }

    async fn apply(&self, changes: Vec<Change>) {
        let mut block = Block::aside(partition(), 1);
        block.changes = changes;
        self.model.apply(&[block]).await.unwrap();
    }

    /// Says that everything until now is applied.
    async fn pulse(&self) {
        let mut block = Block::new(partition(), 1, 0..1);
        block.pulse = Some(Time::from_micros(self.records.now().await.unwrap().as_micros() + 1));
        self.model.apply(&[block]).await.unwrap();
    }

    async fn verify(&self, wait: Duration) -> Verified {
        let mut settings = VerifySettings::default();
        settings.wait = wait;
        verify(&*self.model, &self.records, &settings).await.unwrap()
    }

    /// The same, while a relay pulses.
    async fn verify_with_pulses(&self) -> Verified {
        let pulses = async {
            loop {
                tokio::time::sleep(Duration::from_millis(100)).await; // how often a relay pulses, not a wait
                self.pulse().await;
            }
        };
        tokio::select! {
            verified = self.verify(Duration::from_secs(60)) => verified,
            () = pulses => unreachable!(),
        }
    }

    /// Changes one row of the model's file behind its back.
    fn change(&self, sql: &str, n: u128) {
        change(self.dir.path(), sql, n);
    }
}

fn change(dir: &Path, sql: &str, n: u128) {
    let file = rusqlite::Connection::open(dir.join("reads.db")).unwrap();
    file.busy_timeout(Duration::from_secs(30)).unwrap();
    let id = Uuid::from_u128(n).into_bytes();
    assert_eq!(file.execute(sql, [id]).unwrap(), 1, "{sql}");
}

/// The change that made a record what it is.
fn change_of(tenant: Uuid, record: Record) -> Change {
    let mut change = suite::change(record.id.as_u128(), record.seq, None);
    (change.tenant, change.payload) = (tenant, Some(record.payload));
    (change.created_at, change.updated_at) = (record.created_at, record.updated_at);
    change
}

fn partition() -> Partition {
    suite::partition(0)
}

fn tenant(n: u128) -> Option<Tenant> {
    n.is_multiple_of(3).then(|| Tenant::new(Uuid::from_u128(7).to_string()).unwrap())
}

fn create(n: u128) -> Create {
    Create::new(orders(), payload(n)).id(Uuid::from_u128(n)).tenant(tenant(n))
}

fn name(n: u128) -> Name {
    let tenant = if n.is_multiple_of(3) { Uuid::from_u128(7) } else { Uuid::nil() };
    Name { tenant, module: orders(), id: Uuid::from_u128(n) }
}

fn version(seq: u64) -> Version {
    Version::new(1, seq).unwrap()
}

fn found(verified: &Verified) -> Vec<(Name, Difference)> {
    verified.differences.iter().map(|(name, what)| (name.clone(), *what)).collect()
}

/// One letter of one of 20,000 payloads, changed in the file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_changed_byte_among_many_rows_is_named() {
    let world = FedModel::of(20_000).await;
    let equal = world.verify(Duration::from_secs(30)).await;
    assert_eq!(found(&equal), []);
    assert_eq!((equal.source.total().records, equal.moving), (20_000, 0));
    assert_eq!(equal.source, equal.model, "the sums are equal, bucket by bucket");
    world
        .change("UPDATE hapax_read_row SET payload = replace(payload, 'some', 'sume') WHERE id = ?1", 12_345);
    let verified = world.verify(Duration::from_secs(30)).await;
    assert_eq!(found(&verified), [(name(12_345), Difference::Corrupt { version: version(1) })]);
    let differing = verified.source.iter().filter(|(of, b, sum)| verified.model.bucket(of, *b) != *sum);
    assert_eq!(differing.count(), 1, "one bucket differs");
}

/// The same value in other bytes is not a difference; what is not JSON any more, or not UTF-8, is one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_are_compared_and_not_bytes() {
    let world = FedModel::of(30).await;
    let same = r#"UPDATE hapax_read_row SET payload = '{ "amount": 1.25e1, "text": "some text of record 20", "n": 20 }' WHERE id = ?1"#;
    world.change(same, 20);
    assert_eq!(found(&world.verify(Duration::from_secs(30)).await), []);
    for broken in ["'x' || substr(payload, 2)", "CAST(x'7bff7d' AS TEXT)", "''"] {
        world.change(&format!("UPDATE hapax_read_row SET payload = {broken} WHERE id = ?1"), 20);
        let verified = world.verify(Duration::from_secs(30)).await;
        assert_eq!(found(&verified), [(name(20), Difference::Corrupt { version: version(1) })], "{broken}");
    }
}

/// A lost row, a lost update, a lost deletion, a ghost and a version that was never written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_lost_or_was_never_written_is_named() {
    let world = FedModel::of(50).await;
    world.change("DELETE FROM hapax_read_row WHERE id = ?1", 1);
    let update = |n: u128| {
        Update::new(orders(), Uuid::from_u128(n), 1, Payload::new(r#"{"new":true}"#).unwrap())
            .tenant(tenant(n))
    };
    world.records.update(&update(2)).await.unwrap();
    world.records.delete(&Delete::new(orders(), Uuid::from_u128(3), 1).tenant(tenant(3))).await.unwrap();
    world.change("UPDATE hapax_read_row SET id = x'000000000000000000000000000000ff' WHERE id = ?1", 4);
    world.change("UPDATE hapax_read_row SET seq = 5 WHERE id = ?1", 5);
    // A deletion in the model that never was.
    world.change("UPDATE hapax_read_row SET payload = NULL, seq = 2 WHERE id = ?1", 7);
    let verified = world.verify_with_pulses().await;
    let mut expected = vec![
        (name(1), Difference::Lost { expected: version(1), found: None }),
        (name(2), Difference::Lost { expected: version(2), found: Some(version(1)) }),
        (name(3), Difference::Ghost { found: version(1) }),
        (name(4), Difference::Lost { expected: version(1), found: None }),
        (Name { id: Uuid::from_u128(0xff), ..name(4) }, Difference::Ghost { found: version(1) }),
        (name(5), Difference::Ahead { expected: version(1), found: version(5) }),
        (name(7), Difference::Lost { expected: version(1), found: None }),
    ];
    expected.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(found(&verified), expected);
    // Without a pulse it cannot be known of the newest, and that is said.
    let verified = world.verify(Duration::from_millis(1)).await;
    assert_eq!(verified.differences.len(), expected.len(), "{:?}", verified.differences);
    let late = Difference::Late { expected: None, found: Some(version(1)) };
    assert_eq!(verified.differences[&Name { id: Uuid::from_u128(0xff), ..name(4) }], late);
    assert!(late.to_string().contains("lastSyncAt"), "{late}");
}

/// Writes go on all the time, and the model follows them late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_in_motion_is_not_reported() {
    let world = Arc::new(FedModel::of(200).await);
    let writing = {
        let world = Arc::clone(&world);
        async move {
            let mut seqs = vec![1; 200];
            for round in 0_usize.. {
                let mut changes = Vec::new();
                for at in (0..20).map(|k| (round * 7 + k * 11) % 200) {
                    let n = at as u128 + 1;
                    let update =
                        Update::new(orders(), Uuid::from_u128(n), seqs[at], payload(n)).tenant(tenant(n));
                    let record = world.records.update(&update).await.unwrap();
                    seqs[at] = record.seq;
                    changes.push(change_of(name(n).tenant, record));
                }
                let before = Time::from_micros(world.records.now().await.unwrap().as_micros());
                tokio::time::sleep(Duration::from_millis(20)).await; // how far the model lags behind
                world.apply(changes).await;
                let mut block = Block::new(partition(), 1, 0..1);
                block.pulse = Some(before);
                world.model.apply(&[block]).await.unwrap();
            }
        }
    };
    let writing = tokio::spawn(writing);
    for _ in 0..3 {
        let verified = world.verify(Duration::from_secs(60)).await;
        assert_eq!(found(&verified), []);
    }
    writing.abort();
}

/// `--since` goes by the time of the write, so a changed time is a changed row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t353_a_changed_time_of_a_row_is_named() {
    let world = FedModel::of(30).await;
    world.change("UPDATE hapax_read_row SET updated_at = updated_at - 1000000 WHERE id = ?1", 5);
    world.change("UPDATE hapax_read_row SET created_at = created_at + 1 WHERE id = ?1", 6);
    let verified = world.verify_with_pulses().await;
    let corrupt = |n| (name(n), Difference::Corrupt { version: version(1) });
    assert_eq!(
        found(&verified).into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        [corrupt(5), corrupt(6)].into()
    );
}

/// A wait that is shorter than the time between two pulses does not make a ghost late: the model follows, so its next
/// pulse decides. Of a model that stands still nothing more is known.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_wait_lasts_until_the_next_pulse() {
    let world = FedModel::of(30).await;
    world.change("UPDATE hapax_read_row SET id = x'000000000000000000000000000000ff' WHERE id = ?1", 4);
    world.pulse().await;
    let pulses = async {
        loop {
            // The time between two pulses, which must be longer than the wait of the comparison below.
            tokio::time::sleep(Duration::from_secs(1)).await;
            world.pulse().await;
        }
    };
    let verified = tokio::select! {
        verified = world.verify(Duration::from_millis(1)) => verified,
        () = pulses => unreachable!(),
    };
    let kinds: Vec<_> = verified.differences.values().map(Difference::kind).collect();
    assert_eq!(kinds, ["loss", "ghost"], "{:?}", verified.differences);
}
