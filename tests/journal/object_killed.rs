//! Processes that append to, read, lead, archive and sweep a journal in an object store are killed between any two of their
//! writes, and others go on: nothing is lost, no number is gone, nothing is there twice.
#![cfg(all(feature = "s3", feature = "testing"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use crate::support::objects;
use std::process::Stdio;
use std::time::Duration;

use crate::support::objects::{Place, aggregate, append, event, follow};
use bytes::Bytes;
use hapax::backend::object::{AllocatorMode, AllocatorSettings, ObjectJournal, ObjectSettings};
use hapax::journal::{Append, Expected, Journal, Placing, Position, RelayStore as _, Stored};
use hapax::{Error, Tenant};

const ROLE: &str = "HAPAX_TEST_OBJECT_ROLE";
const PLACE: &str = "HAPAX_TEST_OBJECT_PLACE";

/// The child appends until it is killed, or until it is through.
#[tokio::test]
async fn plays_its_role_on_an_object_journal() {
    let (Ok(role), Ok(place)) = (std::env::var(ROLE), std::env::var(PLACE)) else { return };
    let place = Place::of(&place);
    let allocator = allocator_of(&role);
    let journal = place.open_with(allocator).await;
    match role.split(' ').next().unwrap() {
        "append" => work(&journal).await,
        "writers" => write(&journal).await,
        "elsewhere" => drop(journal.append(&append("elsewhere", Expected::New, &["a1"])).await.unwrap()),
        "forget" => drop(journal.forget_relay(&hapax::RelayName::new("r").unwrap()).await.unwrap()),
        "forgetful" => drop(forgetful(&place).await.sweep(&any_age()).await.unwrap()),
        "read" => drop(follow(&journal).await),
        "relay" => {
            let (relay, owner) = (hapax::RelayName::new("r").unwrap(), hapax::Owner::new("child").unwrap());
            let (token, mut checkpoint) = loop {
                match journal.acquire_leadership(&relay, &owner, Duration::from_millis(100)).await.unwrap() {
                    hapax::journal::Leadership::Acquired { token, checkpoint } => break (token, checkpoint),
                    _ => tokio::time::sleep(Duration::from_millis(20)).await, // until the lease of the one before is over
                }
            };
            checkpoint.position = Position::of(checkpoint.position.number() + 1);
            journal.save(&relay, token, &checkpoint).await.unwrap();
        }
        "sweep" => {
            let settings = hapax::journal::JournalSweep::new(Duration::ZERO);
            journal.sweep(&settings).await.unwrap();
        }
        "archive" => {
            let store = Place::of(&format!("{}-archive", std::env::var(PLACE).unwrap())).objects().await;
            hapax::journal::archive(&journal, store.as_ref(), &archive_settings()).await.unwrap();
        }
        _ => panic!("{role}"),
    }
    println!("through");
}

fn allocator_of(role: &str) -> AllocatorSettings {
    let mut allocator = AllocatorSettings::default();
    if let Some(schema) = role.split(' ').nth(1) {
        allocator.mode = Some(AllocatorMode::Postgres);
        schema.clone_into(&mut allocator.schema);
        allocator.postgres_url =
            Some(std::env::var("HAPAX_TEST_POSTGRES_URL").expect("scripts/services env"));
    }
    allocator
}

/// What every child appends, and whoever comes after it: the same ids, so all but the first time it is a repeat.
async fn work(journal: &dyn Journal) {
    // One that goes to another aggregate than a killed writer may have intended.
    for (of, ids) in [("a", vec!["a1", "a2"]), ("b", vec!["b1"]), ("a", vec!["a3"]), ("a", vec!["a3", "a4"])]
    {
        let _ = journal.append(&append(of, Expected::Any, &ids)).await.unwrap();
    }
}

/// Sixteen writers of one process.
async fn write(journal: &ObjectJournal) {
    let tasks: Vec<_> = (0..16)
        .map(|writer| {
            let journal = journal.clone();
            tokio::spawn(async move {
                for n in 0..4 {
                    let id = format!("{}-{writer}-{n}", std::process::id());
                    let append = append(&format!("order-{}", (writer + n) % 8), Expected::Any, &[&id]);
                    while let Err(e) = journal.append(&append).await {
                        assert!(e.is_retryable(), "{e}");
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
}

/// Two processes of sixteen writers each, on eight aggregates.
async fn two_processes_are_gapless(place: Place) {
    let child = || {
        crate::support::this::test("plays_its_role_on_an_object_journal")
            .env(ROLE, "writers")
            .env(PLACE, &place.word)
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    for mut child in [child(), child()] {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(follow(&place.open().await).await.len(), 2 * 16 * 4);
}

/// Runs a child that dies at the n-th time it comes by a point; says whether it came so far.
fn dies(place: &Place, role: &str, point: &str, hit: u32) -> bool {
    let child = crate::support::this::test("plays_its_role_on_an_object_journal")
        .env(ROLE, role)
        .env(PLACE, &place.word)
        .env("HAPAX_CRASH_AT", format!("{point}:{hit}"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let through = String::from_utf8_lossy(&child.stdout).contains("through");
    assert!(through || child.status.code().is_none(), "{}", String::from_utf8_lossy(&child.stderr));
    !through
}

const POINTS: [&str; 5] = [
    "journal.object.intent",
    "journal.object.noted",
    "journal.object.committed",
    "journal.object.indexed",
    "journal.object.done",
];

/// Killed at each point, at each time it is passed: whoever goes on finds nothing lost, no number gone, nothing twice.
async fn killed_at_each_point(new: impl Fn() -> Place, points: &[&str], role: &str) {
    let mut killed = 0;
    for point in points {
        for hit in 1.. {
            let place = new();
            if !dies(&place, role, point, hit) {
                assert!(hit > 1, "{point} is never passed");
                break;
            }
            killed += 1;
            let journal = place.open_with(allocator_of(role)).await;
            let before = follow(&journal).await;
            work(&journal).await;
            let after = follow(&journal).await;
            assert_eq!(after[..before.len()], before, "{point}:{hit}: what was read stays where it was");
            let mut ids: Vec<_> = after.iter().map(|stored| stored.event.id.to_string()).collect();
            ids.sort_unstable();
            assert_eq!(ids, ["a1", "a2", "a3", "a4", "b1"], "{point}:{hit}");
        }
    }
    println!("killed {killed} times at {} points", points.len());
}

/// A killed writer's id goes to another aggregate: its intent is given up, and no event is in two.
async fn a_killed_writers_id_is_free(place: Place) {
    assert!(dies(&place, "append", "journal.object.noted", 1));
    a_killed_writers_id_goes_elsewhere(&place).await;
}

async fn a_killed_writers_id_goes_elsewhere(place: &Place) {
    let journal = place.open().await;
    let appended = journal.append(&append("elsewhere", Expected::New, &["a1"])).await.unwrap();
    assert_eq!(appended.placed[0].placing, Placing::New);
    let taken = journal.append(&append("a", Expected::Any, &["a1", "a2"])).await;
    assert!(matches!(taken, Err(Error::Mismatch { .. })), "{taken:?}");
    let _ = journal.append(&append("a", Expected::New, &["a2"])).await.unwrap();
    assert_eq!(follow(&journal).await.len(), 2);
}

/// Who gives a killed writer's intent up is killed too, once nobody can commit under it any more; the next one goes on from there.
async fn whoever_gives_up_an_intent_is_replaced(place: Place) {
    assert!(dies(&place, "append", "journal.object.noted", 1));
    assert!(dies(&place, "elsewhere", "journal.object.void", 1));
    a_killed_writers_id_goes_elsewhere(&place).await;
}

/// A reader is killed while it does what a killed writer has not done; the next one does.
async fn a_killed_reader_is_replaced(place: Place, writer: &str, reader: &str) {
    assert!(dies(&place, "append", writer, 1));
    assert!(dies(&place, "read", reader, 1));
    let journal = place.open().await;
    follow(&journal).await;
    work(&journal).await;
    assert_eq!(follow(&journal).await.len(), 5);
}

async fn a_killed_leader_is_replaced(new: impl Fn() -> Place) {
    for point in ["journal.object.lead", "journal.object.lead_checkpoint", "journal.object.saved"] {
        let place = new();
        let journal = place.open().await;
        let relay = hapax::RelayName::new("r").unwrap();
        assert!(!dies(&place, "relay", "nowhere", 1), "the first one saves 1");
        assert!(dies(&place, "relay", point, 1));
        let state = journal.relays().await.unwrap().remove(0);
        let saved = state.checkpoint.unwrap().position.number();
        assert_eq!(saved, if point.ends_with("saved") { 2 } else { 1 }, "{point}");
        let owner = hapax::Owner::new("next").unwrap();
        let begun = loop {
            match journal.acquire_leadership(&relay, &owner, Duration::from_secs(60)).await.unwrap() {
                hapax::journal::Leadership::Acquired { checkpoint, .. } => break checkpoint,
                _ => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        assert_eq!(begun.position.number(), saved);
    }
}

/// An operator's process is killed while it forgets a relay: it is there as it was, or gone, and whoever leads next has a token of its own.
async fn a_relay_is_forgotten_or_not(new: impl Fn() -> Place) {
    for (point, forgotten) in [("journal.object.lead", false), ("journal.object.lead_checkpoint", true)] {
        let place = new();
        let journal = place.open().await;
        let (relay, owner) = (hapax::RelayName::new("r").unwrap(), hapax::Owner::new("next").unwrap());
        let acquire =
            async || match journal.acquire_leadership(&relay, &owner, Duration::from_secs(60)).await.unwrap()
            {
                hapax::journal::Leadership::Acquired { token, checkpoint } => (token, checkpoint),
                taken => panic!("{taken:?}"),
            };
        let (token, mut checkpoint) = acquire().await;
        checkpoint.position = Position::of(1);
        journal.save(&relay, token, &checkpoint).await.unwrap();
        journal.release_leadership(&relay, token).await.unwrap();
        assert!(dies(&place, "forget", point, 1), "{point}");
        let left = journal.relays().await.unwrap();
        assert_eq!(left.is_empty(), forgotten, "{point}");
        if !forgotten {
            assert_eq!(left[0].checkpoint.as_ref(), Some(&checkpoint), "as it was");
            let was = journal.forget_relay(&relay).await.unwrap();
            assert_eq!(was.checkpoint, Some(checkpoint));
            assert_eq!(journal.relays().await.unwrap(), []);
        }
        let (next, begun) = acquire().await;
        assert!(next > token && begun.position == Position::START, "{next:?} {begun:?}");
    }
}

fn any_age() -> hapax::journal::JournalSweep {
    hapax::journal::JournalSweep::new(Duration::ZERO)
}

/// Opened by someone whose claims are forgotten soon.
async fn forgetful(place: &Place) -> ObjectJournal {
    let mut settings = ObjectSettings::default();
    settings.intent_max = Duration::from_millis(300);
    ObjectJournal::open(place.objects().await, settings).await.unwrap()
}

/// A sweep is killed between any two of the intents that it removes of one id: the next one removes the rest, and the id is free and used once.
async fn a_killed_collector_is_replaced(new: impl Fn() -> Place) {
    for hit in 1.. {
        let place = new();
        let (journal, objects) = (forgetful(&place).await, place.objects().await);
        let _ = journal.append(&append("busy", Expected::Any, &["first"])).await.unwrap();
        for number in 0..3 {
            let intent = r#"{"id": "dead", "aggregate": "busy", "from": 2}"#;
            objects.put(&format!("id/-/dead_.{number:06}"), intent.into()).await.unwrap();
        }
        let left = async || {
            let listed = objects.list("id/-/dead_", "id/-/dead_", usize::MAX).await.unwrap();
            listed.len()
        };
        let (mut n, mut died, started) = (0, false, std::time::Instant::now());
        while !died && left().await > 0 {
            assert!(started.elapsed() < objects::DEADLINE, "{} are left", left().await);
            n += 1;
            let placed = journal.append(&append("busy", Expected::Any, &[&format!("b{n}")])).await.unwrap();
            publish_to(&journal, &placed.placed[0].position).await;
            died = dies(&place, "forgetful", "journal.object.collected", hit);
        }
        if !died {
            assert_eq!(hit, 4, "it is passed three times");
            return;
        }
        assert_eq!(left().await, 3 - hit as usize);
        let again = append("busy", Expected::Any, &["dead"]);
        assert_eq!(
            journal.append(&again).await.unwrap().placed[0].placing,
            Placing::New,
            "{hit}: it is free"
        );
        let known = forgetful(&place).await;
        assert_eq!(known.append(&again).await.unwrap().placed[0].placing, Placing::Repeat, "{hit}");
        let found =
            known.find(None, &hapax::EventId::new("dead").unwrap()).await.unwrap().expect("it is known");
        publish_to(&journal, &found.position).await;
        while left().await > 0 {
            assert!(started.elapsed() < objects::DEADLINE, "{} are left", left().await);
            journal.sweep(&any_age()).await.unwrap();
        }
    }
}

fn archive_settings() -> hapax::journal::ArchiveSettings {
    let mut settings =
        hapax::journal::ArchiveSettings::new(Duration::ZERO, hapax::Owner::new("archivist").unwrap())
            .unwrap();
    settings.file_events_max = 3;
    settings.lease = Duration::from_millis(50);
    settings
}

/// Everything up to the end is published, as a relay says it.
async fn publish_all(journal: &dyn Journal) -> Vec<Stored> {
    let all = follow(journal).await;
    publish_to(journal, &all.last().unwrap().position).await;
    all
}

/// Everything up to a position is published.
async fn publish_to(journal: &dyn Journal, position: &Position) {
    let (relay, owner) = (hapax::RelayName::new("main").unwrap(), hapax::Owner::new("relay").unwrap());
    let answer = journal.acquire_leadership(&relay, &owner, Duration::from_secs(60)).await.unwrap();
    let hapax::journal::Leadership::Acquired { token, mut checkpoint } = answer else { panic!("{answer:?}") };
    checkpoint.position = position.clone();
    journal.save(&relay, token, &checkpoint).await.unwrap();
    journal.release_leadership(&relay, token).await.unwrap();
}

/// Killed at each point of archiving and sweeping; in the end every event is in the archive once, as it was.
async fn archived_once(new: impl Fn() -> Place, points: &[&str], hits_max: u32) {
    for point in points {
        for hit in 1..=hits_max {
            let place = new();
            let journal = place.open().await;
            for n in 0..7 {
                let mut one = event(&format!("e{n}")).tenant(Tenant::new("acme").unwrap());
                if n % 2 == 0 {
                    one.payload = Bytes::from(vec![0xff, 0, n]);
                    one.headers = [("h", vec![0xfe_u8, n]), ("h", b"text".to_vec())].into_iter().collect();
                }
                let append = Append::new(aggregate(&format!("a{}", n % 2)), Expected::Any, [one])
                    .tenant(Tenant::new("acme").unwrap());
                let _ = journal.append(&append).await.unwrap();
            }
            let all = publish_all(&journal).await;
            assert_eq!(all.len(), 7);
            place.until_past(&journal).await;
            let died = dies(&place, "archive", point, hit);
            let store = Place::of(&format!("{}-archive", place.word)).objects().await;
            let settings = archive_settings();
            loop {
                match hapax::journal::archive(&journal, store.as_ref(), &settings).await {
                    Ok(_) => break,
                    Err(Error::Contended { .. }) => tokio::time::sleep(Duration::from_millis(50)).await,
                    Err(e) => panic!("{e}"),
                }
            }
            let mut archived = Vec::new();
            for file in hapax::journal::archive_files(store.as_ref(), journal.id()).await.unwrap() {
                archived.extend(hapax::journal::archive_read(store.as_ref(), &file).await.unwrap());
            }
            assert_eq!(archived, all, "{point}:{hit}: each once, in order, byte for byte");
            assert_eq!(journal.stat().await.unwrap().events, 0, "{point}:{hit}");
            let more = Append::new(aggregate("a0"), Expected::Exact(4), [event("more")])
                .tenant(Tenant::new("acme").unwrap());
            assert_eq!(journal.append(&more).await.unwrap().placed[0].seq, 5, "numbers go on");
            if !died {
                assert!(hit > 1, "{point} is never passed");
                break;
            }
        }
    }
}

mod directory {
    use super::*;

    #[tokio::test]
    async fn two_processes_of_sixteen_writers_are_gapless() {
        two_processes_are_gapless(Place::directory()).await;
    }

    #[tokio::test]
    async fn killed_between_any_two_writes() {
        killed_at_each_point(Place::directory, &POINTS, "append").await;
    }

    #[tokio::test]
    async fn the_id_of_a_killed_writer_goes_elsewhere() {
        a_killed_writers_id_is_free(Place::directory()).await;
    }

    #[tokio::test]
    async fn a_reader_is_killed_while_it_repairs() {
        a_killed_reader_is_replaced(
            Place::directory(),
            "journal.object.committed",
            "journal.object.repaired",
        )
        .await;
        a_killed_reader_is_replaced(Place::directory(), "journal.object.noted", "journal.object.voided")
            .await;
    }

    #[tokio::test]
    async fn a_leader_is_killed_between_any_two_writes() {
        a_killed_leader_is_replaced(Place::directory).await;
    }

    #[tokio::test]
    async fn an_operator_is_killed_while_a_relay_is_forgotten() {
        a_relay_is_forgotten_or_not(Place::directory).await;
    }

    #[tokio::test]
    async fn one_is_killed_while_it_gives_up_an_intent() {
        whoever_gives_up_an_intent_is_replaced(Place::directory()).await;
    }

    #[tokio::test]
    async fn a_sweep_is_killed_between_intents() {
        a_killed_collector_is_replaced(Place::directory).await;
    }

    #[tokio::test]
    async fn an_archive_is_killed_between_any_two_steps() {
        let points =
            ["archive.written", "archive.saved", "journal.object.sweep_ids", "journal.object.sweep_link"];
        archived_once(Place::directory, &points, u32::MAX).await;
    }
}

mod s3 {
    use super::*;

    #[tokio::test]
    async fn two_processes_of_sixteen_writers_are_gapless() {
        two_processes_are_gapless(Place::s3()).await;
    }

    #[tokio::test]
    async fn killed_between_any_two_writes() {
        killed_at_each_point(Place::s3, &POINTS, "append").await;
    }

    #[tokio::test]
    async fn the_id_of_a_killed_writer_goes_elsewhere() {
        a_killed_writers_id_is_free(Place::s3()).await;
    }

    #[tokio::test]
    async fn a_reader_is_killed_while_it_repairs() {
        a_killed_reader_is_replaced(Place::s3(), "journal.object.committed", "journal.object.repaired").await;
        a_killed_reader_is_replaced(Place::s3(), "journal.object.noted", "journal.object.voided").await;
    }

    #[tokio::test]
    async fn one_is_killed_while_it_gives_up_an_intent() {
        whoever_gives_up_an_intent_is_replaced(Place::s3()).await;
    }

    #[tokio::test]
    async fn an_archive_is_killed_between_files() {
        archived_once(Place::s3, &["archive.written"], u32::MAX).await;
    }

    #[tokio::test]
    async fn a_sweep_is_killed_between_ids_and_events() {
        archived_once(Place::s3, &["journal.object.sweep_ids", "journal.object.sweep_link"], 2).await;
    }

    #[tokio::test]
    async fn a_leader_is_killed_between_any_two_writes() {
        a_killed_leader_is_replaced(Place::s3).await;
    }
}

/// The allocator in PostgreSQL: what a killed writer was about to do is completed or taken back by whoever comes next.
#[cfg(feature = "postgres")]
mod allocator {
    use sqlx::{AssertSqlSafe, PgPool};

    use super::*;

    struct Schema {
        name: String,
        pool: PgPool,
    }

    impl Schema {
        async fn new() -> Self {
            let url = std::env::var("HAPAX_TEST_POSTGRES_URL").expect("scripts/services env");
            let name = format!("t_{}", uuid::Uuid::new_v4().simple());
            Schema { name, pool: PgPool::connect(&url).await.unwrap() }
        }

        fn role(&self) -> String {
            format!("append {}", self.name)
        }

        /// Aggregate, next seq, and who is about to append.
        async fn rows(&self) -> Vec<(String, i64, Option<String>)> {
            let sql = format!(
                "select aggregate, next_seq, pending_id from {}.aggregate_sequence order by 1, 2",
                self.name
            );
            sqlx::query_as(AssertSqlSafe(sql)).fetch_all(&self.pool).await.unwrap()
        }

        async fn drop_it(self) {
            let sql = format!("drop schema if exists {} cascade", self.name);
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.pool).await.unwrap();
        }
    }

    #[tokio::test]
    async fn killed_between_the_two_stores() {
        let points = [
            "journal.object.reserved",
            "journal.object.noted",
            "journal.object.committed",
            "journal.object.done",
        ];
        nobody_is_about_to(Place::directory, &points).await;
    }

    #[tokio::test]
    async fn killed_between_s3_and_the_rows() {
        nobody_is_about_to(Place::s3, &["journal.object.reserved", "journal.object.committed"]).await;
    }

    async fn nobody_is_about_to(new: impl Fn() -> Place, points: &[&str]) {
        let schema = Schema::new().await;
        killed_at_each_point(new, points, &schema.role()).await;
        let rows = schema.rows().await;
        assert!(
            rows.iter().all(|(of, next, pending)| pending.is_none()
                && (*next == 5 && of == "a" || *next == 2 && of == "b")),
            "{rows:?}"
        );
        println!("{} rows, nobody is about to append any more", rows.len());
        schema.drop_it().await;
    }

    #[tokio::test]
    async fn a_pending_number_is_completed_or_taken_back() {
        let schema = Schema::new().await;
        for (point, next) in [("journal.object.reserved", 1), ("journal.object.committed", 3)] {
            let place = Place::directory();
            assert!(dies(&place, &schema.role(), point, 1));
            assert!(
                schema.rows().await.contains(&("a".into(), 1, Some("a1".into()))),
                "{point}: it was about to"
            );
            let journal = place.open_with(allocator_of(&schema.role())).await;
            let other = journal.append(&append("a", Expected::Exact(next - 1), &["other"])).await.unwrap();
            assert_eq!(other.placed[0].seq, next, "{point}: no number is gone");
            work(&journal).await;
            assert_eq!(follow(&journal).await.len(), 6);
            sqlx::raw_sql(AssertSqlSafe(format!("delete from {}.aggregate_sequence", schema.name)))
                .execute(&schema.pool)
                .await
                .unwrap();
        }
        schema.drop_it().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn two_processes_share_the_rows() {
        let schema = Schema::new().await;
        let place = Place::directory();
        let journals = [
            place.open_with(allocator_of(&schema.role())).await,
            place.open_with(allocator_of(&schema.role())).await,
        ];
        let tasks: Vec<_> = (0..8)
            .map(|writer| {
                let journal = journals[writer % 2].clone();
                tokio::spawn(async move {
                    for n in 0..5 {
                        let append =
                            append(&format!("a{}", n % 2), Expected::Any, &[&format!("{writer}-{n}")]);
                        let _ = journal.append(&append).await.unwrap();
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(follow(&journals[0]).await.len(), 40);
        assert_eq!(schema.rows().await, [("a0".into(), 25, None), ("a1".into(), 17, None)]);
        schema.drop_it().await;
    }

    /// Numbers must not jump because the objects were put back to an older state and the rows were not.
    #[tokio::test]
    async fn rows_ahead_of_the_objects_are_noticed() {
        let schema = Schema::new().await;
        let place = Place::directory();
        let journal = place.open_with(allocator_of(&schema.role())).await;
        for n in 0..3 {
            let _ = journal.append(&append("a", Expected::Exact(n), &[&format!("x{n}")])).await.unwrap();
        }
        let root = std::path::PathBuf::from(place.word.strip_prefix("dir:").unwrap());
        std::fs::remove_dir_all(root.join("aggregate")).unwrap();
        let again = place.open_with(allocator_of(&schema.role())).await;
        let error = again.append(&append("a", Expected::Any, &["y"])).await.unwrap_err();
        assert_eq!(error.code(), "corrupt", "{error}");
        schema.drop_it().await;
    }

    #[tokio::test]
    async fn bad_settings_get_a_sentence() {
        let place = Place::directory();
        let open = async |allocator: AllocatorSettings| {
            let mut settings = ObjectSettings::default();
            settings.allocator = allocator;
            ObjectJournal::open(place.objects().await, settings).await.unwrap_err().to_string()
        };
        let mut allocator = AllocatorSettings::default();
        allocator.mode = Some(AllocatorMode::Postgres);
        assert!(open(allocator.clone()).await.contains("no database is named"));
        allocator.postgres_url =
            Some(std::env::var("HAPAX_TEST_POSTGRES_URL").expect("scripts/services env"));
        for schema in ["Robert'); drop table students;--", "select", ""] {
            allocator.schema = schema.to_owned();
            let text = open(allocator.clone()).await;
            assert!(text.contains("schema"), "{text}");
        }
        assert!("zookeeper".parse::<AllocatorMode>().is_err());
        assert_eq!("legacy".parse::<AllocatorMode>().unwrap(), AllocatorMode::S3);
    }
}
