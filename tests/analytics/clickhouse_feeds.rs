//! Feeds of a read model in ClickHouse that meet: two that share a writer's number, and a table that is made anew
//! under them.

use std::sync::Arc;

use hapax::Error;
use hapax::analytics::{Block, ReadModel, Tally, Uuid};
use hapax::backend::clickhouse::ClickHouseReadModel;
use hapax::testing::analytics::{apply, at, block, change, orders, partition, rejected, shown, topic};
use tokio::sync::watch;

use crate::engine::{Database, holding};
use crate::feed::witness;
use crate::support::this;

/// A block that ends at an offset, with a row and a pulse of its own.
fn upto(offsets: std::ops::Range<i64>) -> Block {
    let mut of = Block::new(partition(0), 1, offsets.clone());
    of.changes = vec![change(u128::try_from(offsets.end).unwrap(), 1, Some("{}"))];
    of.pulse = Some(at(offsets.end));
    of
}

async fn offset(model: &ClickHouseReadModel) -> Option<i64> {
    model.partitions().await.unwrap().first().and_then(|of| of.offset)
}

async fn refused(model: &ClickHouseReadModel, of: Block) {
    let error = model.apply(&[of]).await.unwrap_err();
    assert!(matches!(error, Error::Schema(_)) && !error.is_retryable(), "{error:?}");
}

/// The rows of every block wait for a reader, who so comes between them and the state that speaks of them; and rows of
/// a feed that was killed arrive after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t55_every_write_acknowledged_before_last_sync_at_is_in_the_answer_of_clickhouse() {
    let database = Database::new();
    let read = database.model();
    read.partitions().await.unwrap(); // makes the tables
    let passes = watch::Sender::new(0);
    let late = holding(&database.server, "data_records+%28", &passes).await;
    let url = format!("clickhouse://{late}/{}", database.name);
    witness(Arc::new(read), || Arc::new(ClickHouseReadModel::open(&url).unwrap()), passes).await;
}

/// The other order is not sound, and the test above sees it.
#[test]
fn t55_the_witness_catches_a_state_before_its_rows() {
    let mut child =
        this::test("t55_every_write_acknowledged_before_last_sync_at_is_in_the_answer_of_clickhouse");
    let done = child.env("HAPAX_MUTANT", "state before rows").output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success() && said.contains("is missing"), "{said}");
}

/// What another feed still writes when a partition was taken over, however much, moves nothing back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t44_a_late_state_of_another_feed_moves_nothing_back() {
    let database = Database::new();
    let (zombie, owner) = (database.model(), database.model());
    let place = async |model: &ClickHouseReadModel| {
        let found = model.partitions().await.unwrap().remove(0);
        (found.offset, found.pulse)
    };
    apply(&zombie, upto(0..10)).await;
    assert_eq!(place(&owner).await, (Some(10), Some(at(10)))); // it takes over
    apply(&owner, upto(10..30)).await;
    apply(&owner, upto(30..40)).await;
    for n in 1..=5 {
        apply(&zombie, upto(10..10 + n)).await;
    }
    assert_eq!(place(&owner).await, (Some(40), Some(at(40))));
    // A rejected change that was given up is not brought back by it either.
    let mut late = upto(15..16);
    late.rejected = vec![(rejected(None, 0, 12), None)];
    let mut own = upto(40..41);
    own.rejected = late.rejected.clone();
    apply(&owner, own).await;
    assert!(owner.drop_rejected(&partition(0), 12).await.unwrap());
    apply(&zombie, late).await;
    assert!(owner.rejected(9).await.unwrap().is_empty());
    assert_eq!(owner.last_sync_at(Uuid::nil()).await.unwrap(), Some(at(41)));
    database.sql("OPTIMIZE TABLE DB.data_records_sync FINAL");
    assert_eq!(place(&database.model()).await, (Some(41), Some(at(41))), "also after a merge");
    // The one that takes over next goes on, also backwards: a topic may be made anew.
    assert_eq!(place(&zombie).await.0, Some(41));
    apply(&zombie, upto(0..5)).await;
    assert_eq!(place(&owner).await, (Some(5), Some(at(41))));
}

/// Two processes ask how far a partition is before either has written. Later one takes it over from the other:
/// what it writes counts at once, however much the other wrote.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t333_two_feeds_that_asked_at_the_same_time_do_not_share_a_turn() {
    let database = Database::new();
    let (killed, heir) = (database.model(), database.model());
    apply(&database.model(), upto(0..10)).await;
    assert_eq!((offset(&killed).await, offset(&heir).await), (Some(10), Some(10)));
    for n in 10..20 {
        apply(&killed, upto(n..n + 1)).await;
    }
    assert_eq!(offset(&heir).await, Some(20)); // it takes over
    apply(&heir, upto(20..21)).await;
    assert_eq!(offset(&database.model()).await, Some(21));
}

/// Somebody drops the table of rows under a running feed. A question makes a new one, and what the feed read for
/// the old one is not written to it: the feed must begin with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t332_a_feed_does_not_go_on_in_a_table_that_was_made_anew() {
    let database = Database::new();
    let model = database.model();
    model.expect(&topic(), 1).await.unwrap();
    apply(&model, upto(0..10)).await;
    database.sql("DROP TABLE DB.data_records SYNC");
    let count = async || model.tally(&orders(), &Tally::default()).await.map(|tally| tally.groups[0].count);
    assert!(matches!(count().await, Err(Error::Schema(_))));
    assert_eq!(count().await.unwrap(), 0, "the question has made it anew");
    for n in 10..13 {
        refused(&model, upto(n..n + 1)).await;
        assert_eq!(offset(&model).await, None, "to ask is not to begin");
    }
    assert_eq!(model.last_sync_at(Uuid::nil()).await.unwrap(), None);
    assert_eq!(count().await.unwrap(), 0);
    model.expect(&topic(), 1).await.unwrap();
    apply(&model, upto(0..13)).await;
    assert_eq!((offset(&model).await, count().await.unwrap()), (Some(13), 1));
    assert_eq!(model.last_sync_at(Uuid::nil()).await.unwrap(), Some(at(13)));
}

/// Of two feeds one has begun with the new table. The other, which knows only the old one, gives it no place: the
/// first would take the table for filled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t332_another_feed_gives_a_new_table_no_place() {
    let database = Database::new();
    let (first, other) = (database.model(), database.model());
    for model in [&first, &other] {
        model.expect(&topic(), 1).await.unwrap();
    }
    apply(&other, upto(0..10)).await;
    assert_eq!(offset(&first).await, Some(10));
    database.sql("DROP TABLE DB.data_records SYNC");
    assert!(matches!(first.last_sync_at(Uuid::nil()).await, Err(Error::Schema(_))));
    first.expect(&topic(), 1).await.unwrap();
    refused(&other, upto(10..11)).await;
    assert_eq!(offset(&other).await, None);
    refused(&other, upto(10..11)).await;
    assert_eq!(offset(&first).await, None, "it begins with the records as they are");
    assert_eq!(first.last_sync_at(Uuid::nil()).await.unwrap(), None);
    // One that only asked belongs to the table it asked.
    let asked = database.model();
    assert_eq!(offset(&asked).await, None);
    database.sql("DROP TABLE DB.data_records SYNC");
    assert!(matches!(asked.last_sync_at(Uuid::nil()).await, Err(Error::Schema(_))));
    refused(&asked, upto(10..11)).await;
}

/// The position in PostgreSQL's log is a column for people who look. The seq decides: of two versions the higher one counts,
/// whichever position it has, and a row of the journal has none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t46_log_positions_are_kept_and_decide_nothing() {
    let database = Database::new();
    let model = database.model();
    let at_lsn = |seq, lsn, json| {
        let mut of = change(1, seq, json);
        of.lsn = lsn;
        of
    };
    for of in [at_lsn(1, 900, Some("{}")), at_lsn(3, 100, Some(r#"{"n":3}"#)), at_lsn(2, 950, None)] {
        apply(&model, block([of])).await;
    }
    assert_eq!(shown(&model).await, [(1, 3, r#"{"n":3}"#.to_owned())]);
    apply(&model, block([change(2, 1, Some("{}"))])).await;
    let kept = "SELECT record_id, _lsn FROM DB.data_records FINAL WHERE module != '' ORDER BY record_id";
    let ids = [1, 2].map(Uuid::from_u128);
    assert_eq!(database.sql(kept), format!("{}\t100\n{}\t0", ids[0], ids[1]));
}

/// A table of an earlier build gets the column that it lacks from whoever may make tables; others say so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_without_log_positions_gets_them() {
    let database = Database::new();
    apply(&database.model(), block([change(1, 1, Some("{}"))])).await;
    database.sql("ALTER TABLE DB.data_records DROP COLUMN _lsn");
    let existing = ClickHouseReadModel::open_existing(&database.url()).unwrap();
    let error = existing.partitions().await.unwrap_err();
    assert!(matches!(&error, Error::Schema(error) if error.contains("`hapax serve` adds it")), "{error:?}");
    apply(&database.model(), block([change(2, 1, Some("{}"))])).await;
    assert_eq!(shown(&existing).await.len(), 2);
    assert_eq!(database.sql("SELECT sum(_lsn), count() FROM DB.data_records WHERE module != ''"), "0\t2");
}
