//! The server is put back under a relay: a fail-over to a replica that lost its last commits, or a restore. Positions are given out once more,
//! for other events. Nobody goes on as if nothing had happened, and what is told mends it.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use crate::support::cluster;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::support::postgres::{ask, fresh_schema, pool, pool_to, run, until};
use hapax::backend::object::Directory;
use hapax::backend::postgres::{PgJournal, PgJournalSettings, Pooling};
use hapax::bus::{Bus, MemoryBus, TopicSettings};
use hapax::journal::{
    Append, ArchiveSettings, Archived, Behind, Checkpoint, Expected, Journal, Position, RelayStore as _,
    archive, archive_files, archive_read,
};
use hapax::relay::{Progress, Relay, RelayHandle, RelaySettings};
use hapax::testing::relay::read_topic;
use hapax::{Aggregate, Error, Event, EventId, RelayName, Topic};
use sqlx::PgTransaction;
use tokio::task::JoinHandle;

const DEADLINE: Duration = Duration::from_secs(60);

fn name() -> RelayName {
    RelayName::new("main").unwrap()
}

fn topic() -> Topic {
    Topic::new("orders").unwrap()
}

struct Scene {
    journal: PgJournal,
    bus: Arc<MemoryBus>,
}

struct Running {
    handle: RelayHandle,
    task: JoinHandle<hapax::Result<Progress>>,
}

impl Scene {
    async fn new() -> Self {
        let schema = fresh_schema();
        let bus = Arc::new(MemoryBus::default());
        bus.create_topic(&topic(), TopicSettings::new(2)).await.unwrap();
        Scene { journal: open(&schema).await, bus }
    }

    async fn on(server: &str) -> Self {
        let bus = Arc::new(MemoryBus::default());
        bus.create_topic(&topic(), TopicSettings::new(2)).await.unwrap();
        Scene { journal: open_on(pool_to(server, 6).await, &fresh_schema()).await, bus }
    }

    /// As another process would open it.
    async fn reopened(self) -> Self {
        Scene { journal: open(self.journal.schema()).await, bus: self.bus }
    }

    async fn append(&self, count: usize) {
        for n in 0..count {
            let event = Event::new(EventId::now_v7()).payload("{}");
            let append = Append::new(Aggregate::new(format!("a{}", n % 3)).unwrap(), Expected::Any, [event]);
            let _ = self.journal.append(&append).await.unwrap();
        }
    }

    /// What a replica has that is behind by everything after a position.
    async fn put_back(&self, to: u64) {
        let s = self.journal.schema();
        let sql = format!(
            "begin; delete from {s}.journal where position > {to}; \
             alter table {s}.journal_head disable trigger user; delete from {s}.journal_head; \
             alter table {s}.journal_head enable always trigger journal_head_rises; \
             alter table {s}.journal_head enable always trigger journal_head_stays; \
             insert into {s}.journal_head (tenant, aggregate, last) select tenant, aggregate, max(seq) from {s}.journal group by 1, 2; \
             select setval('{s}.journal_position', {to}, true); commit;"
        );
        run(self.journal.pool(), sql).await;
    }

    /// An append that is not decided yet.
    async fn open_append(&self, aggregate: &str) -> (u64, PgTransaction<'static>) {
        let mut tx = self.journal.pool().begin().await.unwrap();
        let event = Event::new(EventId::now_v7()).payload("{}");
        let append = Append::new(Aggregate::new(aggregate).unwrap(), Expected::Any, [event]);
        let appended = self.journal.append_in(&mut tx, &append).await.unwrap();
        (appended.placed[0].position.number(), tx)
    }

    /// Draws positions for nothing, up to and with this one.
    async fn draw_up_to(&self, position: u64) {
        loop {
            let (drawn, tx) = self.open_append("undone").await;
            tx.rollback().await.unwrap();
            if drawn >= position {
                return;
            }
        }
    }

    /// Events up to position 5, and nothing of what was drawn after them up to 25 has become one: that is known to the journal.
    async fn five_of_twenty_five(&self) {
        self.append(3).await;
        self.draw_up_to(4).await;
        self.append(1).await;
        self.draw_up_to(25).await;
        let read = self.journal.read(&Position::START, 100).await.unwrap();
        assert_eq!((read.next, read.at_hole), (Position::of(5), false));
    }

    async fn draw_again_from(&self, position: u64) {
        let sql = format!("select setval('{}.journal_position', {position}, true)", self.journal.schema());
        run(self.journal.pool(), sql).await;
    }

    fn start(&self) -> Running {
        let mut settings = RelaySettings::new(name(), topic());
        settings.poll = Duration::from_millis(100);
        let relay = Relay::new(Arc::new(self.journal.clone()), self.bus.clone(), settings).unwrap();
        let handle = relay.handle();
        let task = tokio::spawn(relay.run());
        Running { handle, task }
    }

    /// One run of a relay.
    async fn relay_up_to(&self, position: u64) {
        let running = self.start();
        running.until(position).await;
        running.stop().await;
    }

    /// A relay goes on, and then nothing of the journal is missing on the bus.
    async fn must_go_on_to(&self, position: u64) {
        self.relay_up_to(position).await;
        self.must_be_published().await;
    }

    async fn checkpoint(&self) -> Checkpoint {
        self.journal.relays().await.unwrap().remove(0).checkpoint.expect("a checkpoint")
    }

    /// Does what the error says, as the command does it.
    async fn mend(&self, error: &Error) {
        let message = error.to_string();
        let to =
            message.split("rewind --to ").nth(1).and_then(|rest| rest.split('`').next()).expect("a command");
        let mut checkpoint = self.checkpoint().await;
        checkpoint.position = to.parse().unwrap();
        self.journal.rewind(&name(), &checkpoint, None).await.unwrap();
    }

    /// Everything that is in the journal is on the bus.
    async fn must_be_published(&self) {
        let of = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let records = read_topic(&*self.bus, &topic()).await;
        let published: BTreeSet<_> =
            records.iter().map(|received| of(received.record.headers.get("eventId").unwrap())).collect();
        let stored = self.journal.read(&Position::START, 1000).await.unwrap().events;
        for stored in stored {
            assert!(published.contains(stored.event.id.as_str().as_ref()), "{stored:?} is not published");
        }
    }
}

async fn open(schema: &str) -> PgJournal {
    open_on(pool(6).await, schema).await
}

async fn open_on(pool: sqlx::PgPool, schema: &str) -> PgJournal {
    let mut settings = PgJournalSettings::default();
    schema.clone_into(&mut settings.schema);
    settings.pooling = Pooling::Session;
    PgJournal::with_pool(pool, settings).await.expect("a journal")
}

impl Running {
    async fn until(&self, position: u64) {
        let end = tokio::time::Instant::now() + DEADLINE;
        while self.handle.progress().position != Position::of(position) {
            assert!(tokio::time::Instant::now() < end, "{:?}", self.handle.progress());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn stop(self) {
        self.handle.stop();
        self.task.await.unwrap().expect("it ends well");
    }

    /// It ends by itself, and says both positions.
    async fn refused(self, numbers: [u64; 2]) -> Error {
        let ended = tokio::time::timeout(DEADLINE, self.task).await.expect("it notices").unwrap();
        let error = ended.expect_err("it does not go on");
        assert_eq!(error.code(), "conflict", "{error}");
        for number in numbers {
            assert!(error.to_string().contains(&number.to_string()), "{number}: {error}");
        }
        error
    }
}

/// Between two runs, and nothing was appended since.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_checkpoint_beyond_a_journal_that_was_put_back_is_refused() {
    let scene = Scene::new().await;
    scene.append(20).await;
    scene.relay_up_to(20).await;
    scene.put_back(10).await;
    let scene = scene.reopened().await;
    let error = scene.start().refused([20, 10]).await;
    scene.append(5).await;
    let again = scene.start().refused([20, 15]).await;
    assert_eq!(scene.checkpoint().await.position, Position::of(20), "nothing was changed: {again}");
    scene.mend(&error).await;
    scene.must_go_on_to(15).await;
}

/// Between two runs; by now other events have the old positions, and more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn positions_given_out_once_more_between_two_runs_are_noticed() {
    let scene = Scene::new().await;
    scene.append(20).await;
    scene.relay_up_to(20).await;
    scene.put_back(10).await;
    scene.append(15).await;
    let scene = scene.reopened().await;
    let error = scene.start().refused([20, 25]).await;
    scene.mend(&error).await;
    scene.must_go_on_to(25).await;
}

/// Beneath a relay that waits for more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_journal_that_is_put_back_beneath_a_relay_is_noticed() {
    for appended in [0, 15] {
        let scene = Scene::new().await;
        scene.append(20).await;
        let running = scene.start();
        running.until(20).await;
        scene.put_back(10).await;
        scene.append(appended).await;
        // It may have noticed before, or after, those were appended.
        let error = running.refused([20, 20]).await;
        assert_eq!(scene.checkpoint().await.position, Position::of(20), "nothing was saved");
        scene.append(15 - appended).await;
        let error = if appended == 0 { scene.start().refused([20, 25]).await } else { error };
        scene.mend(&error).await;
        scene.must_go_on_to(25).await;
    }
}

/// As a fail-over does it: the checkpoint is put back with the rest. The relay that ran ends, and the next goes on by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_checkpoint_that_was_put_back_too_is_gone_on_from() {
    let scene = Scene::new().await;
    scene.append(10).await;
    let running = scene.start();
    running.until(10).await;
    let s = scene.journal.schema().to_owned();
    run(scene.journal.pool(), format!("create table {s}.kept as select * from {s}.journal_relay")).await;
    scene.append(10).await;
    running.until(20).await;
    let sql = format!(
        "update {s}.journal_relay r set checkpoint = k.checkpoint from {s}.kept k where r.relay = k.relay"
    );
    run(scene.journal.pool(), sql).await;
    scene.put_back(10).await;
    scene.append(15).await;
    running.refused([20, 20]).await;
    assert_eq!(scene.checkpoint().await.position, Position::of(10));
    scene.must_go_on_to(25).await;
}

/// A crash takes draws with it that nobody committed: a sequence is only as durable as what was flushed for others. No event is gone, and the relay's
/// own position is as it was; but what is drawn above it is not decided any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn positions_that_are_drawn_once_more_above_a_relay_are_waited_for() {
    let scene = Scene::new().await;
    scene.five_of_twenty_five().await;
    let running = scene.start();
    running.until(5).await;
    scene.draw_again_from(5).await;
    let (six, slow) = scene.open_append("slow").await;
    scene.append(1).await;
    assert_eq!(six, 6);
    let read = scene.journal.read(&Position::of(5), 100).await.unwrap();
    assert!(read.at_hole && read.events.is_empty(), "{read:?}");
    slow.commit().await.unwrap();
    running.until(7).await;
    running.stop().await;
    scene.must_be_published().await;
}

/// The same, where as many were drawn since as had been before: only that it is another incarnation of the server tells. Its processes are started again
/// after one of them died, its first one lives on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_is_noticed_when_draws_have_caught_up() {
    let server = cluster::Cluster::new().await;
    let scene = Scene::on(&server.url()).await;
    scene.five_of_twenty_five().await;
    let started = "select pg_postmaster_start_time()::text";
    let before: String = ask(scene.journal.pool(), started).await;
    let victim: i32 = ask(scene.journal.pool(), "select pg_backend_pid()").await;
    let killed = std::process::Command::new("kill").args(["-9", &victim.to_string()]).status().unwrap();
    assert!(killed.success());
    until("the server has noticed, and answers again", async || {
        let crashed = server.log().contains("reinitializing");
        crashed && sqlx::query("select 1").execute(scene.journal.pool()).await.is_ok()
    })
    .await;
    assert_eq!(ask::<String>(scene.journal.pool(), started).await, before);
    scene.draw_again_from(5).await; // however much of it was flushed
    let (six, slow) = scene.open_append("slow").await;
    scene.append(1).await;
    scene.draw_up_to(40).await;
    assert_eq!(six, 6);
    let read = scene.journal.read(&Position::of(5), 100).await.unwrap();
    assert!(read.at_hole && read.events.is_empty(), "{read:?}");
    slow.commit().await.unwrap();
    let read = scene.journal.read(&Position::of(5), 100).await.unwrap();
    assert_eq!((read.events.len(), read.next), (2, Position::of(7)));
}

/// An operator's change is refused for what it is, not for others who would be changing it too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_to_a_journal_that_was_put_back_is_refused_as_such() {
    let scene = Scene::new().await;
    scene.append(20).await;
    let stored = scene.journal.read(&Position::START, 1).await.unwrap().events.remove(0);
    let mut checkpoint = Checkpoint::start(scene.journal.id());
    checkpoint.position = Position::of(20);
    checkpoint.behind.push(Behind::at(&stored, "too large", true, stored.at));
    scene.journal.rewind(&name(), &checkpoint, None).await.unwrap();
    scene.put_back(10).await;
    let of = checkpoint.behind[0].of().unwrap();
    let error = hapax::relay::resume(&scene.journal, &name(), &of).await.unwrap_err();
    assert_eq!(error.code(), "conflict", "{error}");
    assert!(error.to_string().contains("put back"), "{error}");
    scene.mend(&error).await;
    hapax::relay::resume(&scene.journal, &name(), &of).await.unwrap();
}

/// Archives what is published up to a position, four events to a file, and leaves the journal as it is.
async fn archive_up_to(journal: &PgJournal, store: &Directory, position: u64, sweep: bool) -> Archived {
    let mut checkpoint = Checkpoint::start(journal.id());
    checkpoint.position = Position::of(position);
    journal.rewind(&name(), &checkpoint, None).await.unwrap();
    let mut settings = ArchiveSettings::new(Duration::ZERO, hapax::Owner::new("archivist").unwrap()).unwrap();
    settings.file_events_max = 4;
    settings.sweep = sweep;
    archive(journal, store, &settings).await.unwrap()
}

/// The server is restored, with the checkpoints of that time, and draws positions again that an archive has files of. What lies in them
/// is compared before it is believed: nothing is removed from the journal that is in no file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t82_archive_files_of_a_lost_timeline_are_not_trusted() {
    let dir = tempfile::tempdir().unwrap();
    // At the restore's moment the archive stood at the end, within what became a file, and where nothing was archived yet.
    for (case, (archived, restored)) in [(10, 10), (10, 12), (0, 10), (8, 8)].into_iter().enumerate() {
        let store = Directory::open(dir.path().join(case.to_string())).unwrap();
        let scene = Scene::new().await;
        let s = scene.journal.schema().to_owned();
        scene.append(restored as usize).await;
        archive_up_to(&scene.journal, &store, archived, false).await;
        run(scene.journal.pool(), format!("create table {s}.kept as select * from {s}.journal_relay")).await;
        scene.append(8).await;
        archive_up_to(&scene.journal, &store, restored + 8, false).await;
        let lost = scene.journal.read(&Position::of(restored), 100).await.unwrap().events;
        assert_eq!(lost.len(), 8);

        scene.put_back(restored).await;
        let relays =
            format!("delete from {s}.journal_relay; insert into {s}.journal_relay select * from {s}.kept");
        run(scene.journal.pool(), relays).await;
        let scene = scene.reopened().await;
        scene.append(8).await;
        let stored = scene.journal.read(&Position::START, 100).await.unwrap().events;
        assert_eq!(stored.last().unwrap().position, lost.last().unwrap().position, "drawn again");
        let done = archive_up_to(&scene.journal, &store, restored + 8, true).await;
        assert_eq!((done.events, done.swept), (8, restored + 8), "{archived} of {restored}");

        let mut files = Vec::new();
        for file in archive_files(&store, scene.journal.id()).await.unwrap() {
            files.extend(archive_read(&store, &file).await.unwrap());
        }
        for event in stored.iter().chain(&lost) {
            assert_eq!(files.iter().filter(|one| *one == event).count(), 1, "{event:?} is in one file");
        }
    }
}

/// What is swept is not taken for lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sweep_puts_nothing_back() {
    let scene = Scene::new().await;
    scene.append(20).await;
    let running = scene.start();
    running.until(20).await;
    let all = hapax::journal::JournalSweep::new(Duration::ZERO);
    assert_eq!(scene.journal.sweep(&all).await.unwrap(), 20);
    scene.append(5).await;
    running.until(25).await;
    running.stop().await;
    assert_eq!(scene.journal.sweep(&all).await.unwrap(), 5);
    let scene = scene.reopened().await;
    let running = scene.start();
    scene.append(5).await;
    running.until(30).await;
    running.stop().await;
}

#[cfg(feature = "sqlite")]
#[tokio::test]
async fn a_file_that_was_put_back_in_part_is_refused() {
    use hapax::backend::sqlite::SqliteJournal;
    use hapax::journal::{JournalSettings, Leadership};
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("journal.db");
    let journal = SqliteJournal::open(&file, JournalSettings::default()).unwrap();
    let events = (0..20).map(|n| Event::new(EventId::new(format!("e{n}")).unwrap()));
    let _ = journal.append(&Append::new(Aggregate::new("a").unwrap(), Expected::New, events)).await.unwrap();
    let owner = hapax::Owner::new("ada").unwrap();
    let Leadership::Acquired { token, mut checkpoint } =
        journal.acquire_leadership(&name(), &owner, DEADLINE).await.unwrap()
    else {
        panic!("nobody else leads");
    };
    checkpoint.position = Position::of(20);
    journal.save(&name(), token, &checkpoint).await.unwrap();
    journal.release_leadership(&name(), token).await.unwrap();
    drop(journal);
    let other = rusqlite::Connection::open(&file).unwrap();
    other
        .execute_batch(
            "DELETE FROM hapax_journal_event WHERE position > 10; UPDATE hapax_journal_meta SET last = 10",
        )
        .unwrap();
    drop(other);
    let journal = SqliteJournal::open(&file, JournalSettings::default()).unwrap();
    let error = journal.acquire_leadership(&name(), &owner, DEADLINE).await.unwrap_err();
    let message = error.to_string();
    assert!(message.contains("20") && message.contains("rewind --to 10"), "{message}");
    checkpoint.position = Position::of(10);
    journal.rewind(&name(), &checkpoint, None).await.unwrap();
    assert!(matches!(
        journal.acquire_leadership(&name(), &owner, DEADLINE).await,
        Ok(Leadership::Acquired { .. })
    ));
}
