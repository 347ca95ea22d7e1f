//! The journal in an object store, on a directory and on an S3 server: races, processes that are killed between any two of their
//! writes, bad settings. What it has in common with other journals is tested by the conformance suite.
#![cfg(all(feature = "s3", feature = "testing"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

#[path = "support/objects.rs"]
mod objects;

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use hapax::backend::object::{AllocatorMode, AllocatorSettings, ObjectJournal, ObjectSettings, Objects, S3};
use hapax::journal::{
    Append, Expected, Journal, JournalSettings, OpenSettings, Placing, Position, Stored, open,
};
use hapax::testing::journal::JournalHarness;
use hapax::{Aggregate, Error, Event, EventId, Tenant};
use objects::{Place, s3_settings};

/// A fresh directory, or a fresh prefix of the bucket.
struct ObjectHarness(Place);

#[async_trait]
impl JournalHarness for ObjectHarness {
    type Journal = ObjectJournal;

    async fn open(&self, settings: JournalSettings) -> ObjectJournal {
        let mut object = ObjectSettings::default();
        object.journal = settings;
        ObjectJournal::open(self.0.objects().await, object).await.expect("the store is there")
    }
}

hapax::journal_conformance!(directory_suite, ObjectHarness(Place::directory()));
hapax::journal_conformance!(s3_suite, ObjectHarness(Place::s3()));

const ROLE: &str = "HAPAX_TEST_OBJECT_ROLE";
const PLACE: &str = "HAPAX_TEST_OBJECT_PLACE";
const DEADLINE: Duration = Duration::from_mins(2);

fn aggregate(name: &str) -> Aggregate {
    Aggregate::new(name).unwrap()
}

fn event(id: &str) -> Event {
    Event::new(EventId::new(id).unwrap()).payload(format!("{{\"id\": \"{id}\"}}"))
}

fn append(of: &str, expected: Expected, ids: &[&str]) -> Append {
    Append::new(aggregate(of), expected, ids.iter().map(|id| event(id)))
}

/// Follows a journal until nothing comes any more and nobody is waited for; checks order and that nothing comes twice.
async fn follow(journal: &dyn Journal) -> Vec<Stored> {
    let started = std::time::Instant::now();
    let mut after = Position::START;
    let mut all: Vec<Stored> = Vec::new();
    loop {
        let stretch = journal.read(&after, 7).await.unwrap();
        let (empty, at_hole) = (stretch.events.is_empty(), stretch.at_hole);
        all.extend(stretch.events);
        after = stretch.next;
        if empty && !at_hole {
            break;
        }
        assert!(started.elapsed() < DEADLINE, "the journal does not come to an end");
        if at_hole {
            journal.wait(&after, Duration::from_millis(50)).await.unwrap();
        }
    }
    let mut heads: BTreeMap<(Option<Tenant>, Aggregate), u64> = BTreeMap::new();
    let mut ids = BTreeSet::new();
    assert!(all.windows(2).all(|two| two[0].position < two[1].position));
    for stored in &all {
        let of = (stored.event.tenant.clone(), stored.event.aggregate.clone().unwrap());
        let head = heads.entry(of).or_default();
        assert_eq!(stored.seq, *head + 1, "gapless and in order: {stored:?}");
        *head += 1;
        assert!(ids.insert((stored.event.tenant.clone(), stored.event.id.clone())), "twice: {stored:?}");
    }
    for ((tenant, aggregate), head) in heads {
        assert_eq!(journal.head(tenant.as_ref(), &aggregate).await.unwrap(), head);
        let chain = journal.read_aggregate(tenant.as_ref(), &aggregate, 1, usize::MAX).await.unwrap();
        let followed: Vec<_> = all
            .iter()
            .filter(|s| s.event.aggregate.as_ref() == Some(&aggregate) && s.event.tenant == tenant)
            .collect();
        assert_eq!(chain.iter().collect::<Vec<_>>(), followed, "the chain and the index say the same");
    }
    all
}

async fn one_creator_wins(place: Place) {
    let objects = [place.objects().await, place.objects().await];
    for key in 0..20 {
        let racers: Vec<_> = (0..50)
            .map(|n| {
                let objects = Arc::clone(&objects[n % 2]);
                tokio::spawn(async move {
                    let body = Bytes::from(format!("racer {n}"));
                    loop {
                        match objects.create(&format!("race/{key}"), body.clone()).await {
                            Ok(won) => return (won, body),
                            Err(e) => assert!(e.is_retryable(), "{e}"),
                        }
                    }
                })
            })
            .collect();
        let mut winners = Vec::new();
        for racer in racers {
            let (won, body) = racer.await.unwrap();
            winners.extend(won.then_some(body));
        }
        let there = objects[0].get(&format!("race/{key}")).await.unwrap();
        assert_eq!(winners.len(), 1, "key {key}");
        assert_eq!(there, winners.pop(), "key {key}");
    }
}

async fn listings_are_in_order_and_bounded(place: Place) {
    let objects = place.objects().await;
    let names = ["a/1", "a/10", "a/2", "a.b", "a/2/x", "b/1"];
    // A file and a directory of one name cannot be in a file system: no journal needs it.
    let names: Vec<_> = names.iter().filter(|name| **name != "a/2/x").copied().collect();
    for name in &names {
        objects.put(name, Bytes::from_static(b"x")).await.unwrap();
    }
    let listed = async |prefix: &str, after: &str, limit| {
        let listed = objects.list(prefix, after, limit).await.unwrap();
        listed.into_iter().map(|listed| listed.name).collect::<Vec<_>>()
    };
    assert_eq!(listed("a/", "a/", 10).await, ["a/1", "a/10", "a/2"]);
    assert_eq!(listed("a/1", "", 10).await, ["a/1", "a/10"]);
    assert_eq!(listed("a/", "a/1", 10).await, ["a/10", "a/2"]);
    assert_eq!(listed("a/", "a/0", 2).await, ["a/1", "a/10"]);
    assert_eq!(listed("c/", "c/", 2).await, Vec::<String>::new());
    for n in 0..1100 {
        // Enough for a second page.
        if place.word.starts_with("dir:") || n < 40 {
            objects.put(&format!("many/{n:05}"), Bytes::new()).await.unwrap();
        }
    }
    let many = listed("many/", "many/", 5000).await;
    assert!(many.is_sorted() && many.len() >= 40);
    assert_eq!(objects.get("a/3").await.unwrap(), None);
    objects.delete("a/3").await.unwrap();
    objects.delete("a/2").await.unwrap();
    assert_eq!(objects.get("a/2").await.unwrap(), None);
    let now = objects.now().await.unwrap();
    assert!(now.low <= now.about && now.about <= now.high.plus(Duration::from_secs(2)), "{now:?}");
}

/// Two handles, as two processes have them.
async fn writers_are_gapless(place: Place, writers: usize, each: usize) {
    let journals = [place.open().await, place.open().await];
    let tasks: Vec<_> = (0..writers)
        .map(|writer| {
            let journal = journals[writer % 2].clone();
            tokio::spawn(async move {
                for n in 0..each {
                    let of = format!("order-{}", (writer + n) % 8);
                    let ids = [format!("{writer}-{n}"), format!("{writer}-{n}-more")];
                    let ids: Vec<&str> = ids.iter().map(String::as_str).take(1 + n % 2).collect();
                    let append = append(&of, Expected::Any, &ids);
                    loop {
                        match journal.append(&append).await {
                            Ok(_) => break,
                            Err(e) => assert!(e.is_retryable(), "{e}"),
                        }
                    }
                    // Each is asked for again: it is a repeat.
                    if n % 3 == 0 {
                        assert!(journal.append(&append).await.unwrap().is_repeat());
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let all = follow(&journals[0]).await;
    let wanted: usize = (0..each).map(|n| 1 + n % 2).sum::<usize>() * writers;
    assert_eq!(all.len(), wanted);
    println!("{wanted} events of {writers} writers in 8 aggregates: gapless, none twice");
}

/// An id goes to one aggregate, whoever was quicker; what a killed writer intended is given up for it.
async fn an_id_goes_to_one_aggregate(place: Place) {
    let journals = [place.open().await, place.open().await];
    for round in 0..5 {
        let id = format!("id-{round}");
        let tasks: Vec<_> = (0..8)
            .map(|n| {
                let (journal, id) = (journals[n % 2].clone(), id.clone());
                tokio::spawn(async move {
                    let append = append(&format!("a-{}", n % 4), Expected::Any, &[&id]);
                    journal.append(&append).await
                })
            })
            .collect();
        let mut new = 0;
        for task in tasks {
            match task.await.unwrap() {
                Ok(appended) => new += usize::from(appended.placed[0].placing == Placing::New),
                Err(Error::Mismatch { .. }) => {}
                Err(e) => assert!(e.is_retryable(), "{e}"),
            }
        }
        assert_eq!(new, 1, "{id}");
    }
    assert_eq!(follow(&journals[0]).await.len(), 5);
}

/// The child appends until it is killed, or until it is through.
#[tokio::test]
async fn plays_its_role_in_a_child_process() {
    let (Ok(role), Ok(place)) = (std::env::var(ROLE), std::env::var(PLACE)) else { return };
    let place = Place::of(&place);
    let allocator = allocator_of(&role);
    let journal = place.open_with(allocator).await;
    match role.split(' ').next().unwrap() {
        "append" => work(&journal).await,
        "read" => drop(follow(&journal).await),
        "relay" => {
            let (relay, owner) = (hapax::RelayName::new("r").unwrap(), hapax::Owner::new("child").unwrap());
            let (token, mut checkpoint) = loop {
                match journal.lead(&relay, &owner, Duration::from_millis(100)).await.unwrap() {
                    hapax::journal::Lead::Leads { token, checkpoint } => break (token, checkpoint),
                    _ => tokio::time::sleep(Duration::from_millis(20)).await, // until the lease of the one before is over
                }
            };
            checkpoint.position = Position::of(checkpoint.position.number() + 1);
            journal.save(&relay, token, &checkpoint).await.unwrap();
        }
        "sweep" => {
            let terms = hapax::journal::JournalSweep::new(Duration::ZERO);
            journal.sweep(&terms).await.unwrap();
        }
        "archive" => {
            let store = Place::of(&format!("{}-archive", std::env::var(PLACE).unwrap())).objects().await;
            hapax::journal::archive(&journal, store.as_ref(), &archive_terms()).await.unwrap();
        }
        _ => panic!("{role}"),
    }
    println!("through");
}

fn allocator_of(role: &str) -> AllocatorSettings {
    let mut allocator = AllocatorSettings::default();
    if let Some(schema) = role.split(' ').nth(1) {
        allocator.mode = Some(AllocatorMode::Postgres);
        allocator.schema = schema.to_owned();
        allocator.postgres_url =
            Some(std::env::var("HAPAX_TEST_POSTGRES18_URL").expect("scripts/services env"));
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

/// Runs a child that dies at the n-th time it comes by a point; says whether it came so far.
fn dies(place: &Place, role: &str, point: &str, hit: u32) -> bool {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "plays_its_role_in_a_child_process", "--nocapture"])
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
    let journal = place.open().await;
    let appended = journal.append(&append("elsewhere", Expected::New, &["a1"])).await.unwrap();
    assert_eq!(appended.placed[0].placing, Placing::New);
    let taken = journal.append(&append("a", Expected::Any, &["a1", "a2"])).await;
    assert!(matches!(taken, Err(Error::Mismatch { .. })), "{taken:?}");
    let _ = journal.append(&append("a", Expected::New, &["a2"])).await.unwrap();
    assert_eq!(follow(&journal).await.len(), 2);
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
        let lead = loop {
            match journal.lead(&relay, &owner, Duration::from_secs(60)).await.unwrap() {
                hapax::journal::Lead::Leads { checkpoint, .. } => break checkpoint,
                _ => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        assert_eq!(lead.position.number(), saved);
    }
}

fn archive_terms() -> hapax::journal::ArchiveTerms {
    let mut terms =
        hapax::journal::ArchiveTerms::new(Duration::ZERO, hapax::Owner::new("archivist").unwrap()).unwrap();
    terms.file_events_max = 3;
    terms.lease = Duration::from_millis(50);
    terms
}

/// Everything up to the end is published, as a relay says it.
async fn publish_all(journal: &dyn Journal) -> Vec<Stored> {
    let all = follow(journal).await;
    let (relay, owner) = (hapax::RelayName::new("main").unwrap(), hapax::Owner::new("relay").unwrap());
    let lead = journal.lead(&relay, &owner, Duration::from_secs(60)).await.unwrap();
    let hapax::journal::Lead::Leads { token, mut checkpoint } = lead else { panic!("{lead:?}") };
    checkpoint.position = all.last().unwrap().position.clone();
    journal.save(&relay, token, &checkpoint).await.unwrap();
    journal.give_up_lead(&relay, token).await.unwrap();
    all
}

/// Killed at each point of archiving and sweeping; in the end every event is in the archive once, as it was.
async fn archived_once(new: impl Fn() -> Place, points: &[&str]) {
    for point in points {
        for hit in 1.. {
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
            let died = dies(&place, "archive", point, hit);
            let store = Place::of(&format!("{}-archive", place.word)).objects().await;
            let terms = archive_terms();
            loop {
                match hapax::journal::archive(&journal, store.as_ref(), &terms).await {
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

    #[tokio::test(flavor = "multi_thread")]
    async fn of_fifty_creators_per_key_one_wins() {
        one_creator_wins(Place::directory()).await;
    }

    #[tokio::test]
    async fn listings() {
        listings_are_in_order_and_bounded(Place::directory()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn thirty_two_writers_on_eight_aggregates_are_gapless() {
        writers_are_gapless(Place::directory(), 32, 6).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_id_is_in_one_aggregate() {
        an_id_goes_to_one_aggregate(Place::directory()).await;
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
    async fn an_archive_is_killed_between_any_two_steps() {
        let points =
            ["archive.written", "archive.saved", "journal.object.sweep_ids", "journal.object.sweep_link"];
        archived_once(Place::directory, &points).await;
    }
}

mod s3 {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn of_fifty_creators_per_key_one_wins() {
        one_creator_wins(Place::s3()).await;
    }

    #[tokio::test]
    async fn listings() {
        listings_are_in_order_and_bounded(Place::s3()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn thirty_two_writers_on_eight_aggregates_are_gapless() {
        writers_are_gapless(Place::s3(), 32, 6).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_id_is_in_one_aggregate() {
        an_id_goes_to_one_aggregate(Place::s3()).await;
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
    async fn an_archive_is_killed_between_files() {
        archived_once(Place::s3, &["archive.written"]).await;
    }

    /// Bad settings get a sentence within a bounded time, and nothing is stored.
    #[tokio::test]
    async fn bad_settings_get_a_sentence() {
        let started = std::time::Instant::now();
        let mut missing = s3_settings();
        missing.bucket = "there-is-no-such-bucket".to_owned();
        let error = S3::connect(missing).await.unwrap_err();
        assert_eq!(error.code(), "not-found", "{}", error.chain());
        assert!(error.to_string().contains("there-is-no-such-bucket"), "{error}");
        for (key, secret) in [("test", "wrong-secret"), ("nobody", "testtest")] {
            let mut wrong = s3_settings();
            (wrong.access_key_id, wrong.secret_access_key) = (key.to_owned(), secret.to_owned());
            let error = S3::connect(wrong).await.unwrap_err();
            assert_eq!(error.code(), "refused", "{}", error.chain());
            assert!(error.to_string().contains("credentials"), "{error}");
            assert!(!error.chain().contains("wrong-secret"), "{}", error.chain());
        }
        let mut nobody = s3_settings();
        nobody.endpoint = Some("http://127.0.0.1:9".to_owned());
        nobody.timeout = Duration::from_secs(2);
        let error = S3::connect(nobody).await.unwrap_err();
        assert_eq!(error.code(), "unavailable", "{}", error.chain());
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    }
}

/// Where the caller numbers, it must, and it must be right.
#[tokio::test]
async fn off_the_caller_numbers() {
    let place = Place::directory();
    let mut allocator = AllocatorSettings::default();
    allocator.mode = Some(AllocatorMode::Off);
    let journal = place.open_with(allocator).await;
    let numbered =
        |id: &str, seq| Append::new(aggregate("a"), Expected::Any, [event(id).seq(aggregate("a"), seq)]);
    assert_eq!(journal.append(&append("a", Expected::New, &["x"])).await.unwrap_err().code(), "invalid");
    assert_eq!(journal.append(&numbered("x", 2)).await.unwrap_err().code(), "conflict");
    assert_eq!(journal.append(&numbered("x", 1)).await.unwrap().placed[0].seq, 1);
    assert!(journal.append(&numbered("x", 1)).await.unwrap().is_repeat());
    assert_eq!(journal.append(&numbered("y", 1)).await.unwrap_err().code(), "conflict");
    assert_eq!(journal.append(&numbered("y", 2)).await.unwrap().placed[0].seq, 2);
    assert_eq!(follow(&journal).await.len(), 2);
}

#[tokio::test]
async fn a_url_opens_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("dir:{}", dir.path().join("new/journal").display());
    let journal = open(&url, &OpenSettings::default()).await.unwrap();
    let _ = journal.append(&append("a", Expected::New, &["x"])).await.unwrap();
    let again = open(&url, &OpenSettings::default()).await.unwrap();
    assert_eq!(again.id(), journal.id());
    assert_eq!(again.head(None, &aggregate("a")).await.unwrap(), 1);
    let mut check = OpenSettings::default();
    check.migrate = hapax::config::Migrate::Check;
    let other = format!("dir:{}", dir.path().join("other").display());
    assert_eq!(open(&other, &check).await.err().unwrap().code(), "schema");
    assert_eq!(open("dir:", &check).await.err().unwrap().code(), "config");
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let error = open(&format!("dir:{}", file.display()), &OpenSettings::default()).await.err().unwrap();
    assert_eq!(error.code(), "refused", "{}", error.chain());
}
