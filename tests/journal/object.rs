//! The journal in an object store, on a directory and on an S3 server: the conformance suite, races, bad settings. Processes that are
//! killed are in `journal_object_killed.rs`.
#![cfg(all(feature = "s3", feature = "testing"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::sync::Arc;
use std::time::Duration;

use crate::support::objects::{Place, aggregate, append, event, follow, s3_settings};
use crate::support::watched::{Watched, held_up, open_watched};
use async_trait::async_trait;
use bytes::Bytes;
use hapax::Error;
use hapax::backend::object::{AllocatorMode, AllocatorSettings, ObjectJournal, ObjectSettings, S3};
use hapax::journal::{
    Append, Appended, Expected, Journal as _, JournalSettings, Placing, Position, RelayStore as _,
};
use hapax::testing::journal::JournalHarness;

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

    fn model_cases(&self) -> u64 {
        4
    }
}

hapax::journal_conformance!(directory_suite, ObjectHarness(Place::directory()));
hapax::journal_conformance!(s3_suite, ObjectHarness(Place::s3()));

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

/// Tries until it is known what became of it.
async fn append_surely(journal: &ObjectJournal, append: &Append) -> Appended {
    loop {
        match journal.append(append).await {
            Ok(appended) => return appended,
            Err(e) => assert!(e.is_retryable(), "{}", e.chain()),
        }
    }
}

/// Two handles, as two processes have them; one of thirty requests fails, done or not.
async fn writers_are_gapless(place: Place, writers: usize, each: usize) {
    let seed: u64 = uuid::Uuid::new_v4().as_u64_pair().0;
    println!("seed {seed}");
    let stores = [Watched::new(place.objects().await), Watched::new(place.objects().await)];
    let mut journals = Vec::new();
    for (n, store) in stores.iter().enumerate() {
        journals.push(open_watched(store, Duration::from_secs(1)).await);
        store.fail(30, seed.wrapping_add(n as u64));
    }
    let tasks: Vec<_> = (0..writers)
        .map(|writer| {
            let journal = journals[writer % 2].clone();
            tokio::spawn(async move {
                for n in 0..each {
                    let of = format!("order-{}", (writer + n) % 8);
                    let ids = [format!("{writer}-{n}"), format!("{writer}-{n}-more")];
                    let ids: Vec<&str> = ids.iter().map(String::as_str).take(1 + n % 2).collect();
                    let append = append(&of, Expected::Any, &ids);
                    let first = append_surely(&journal, &append).await;
                    // Each is asked for again: it is a repeat.
                    if n % 3 == 0 {
                        let again = append_surely(&journal, &append).await;
                        assert!(again.is_repeat());
                        assert_eq!(again.placed[0].seq, first.placed[0].seq);
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let failed: usize = stores.iter().map(|store| store.failed()).sum();
    assert!(failed > 0);
    let all = follow(&place.open().await).await;
    let wanted: usize = (0..each).map(|n| 1 + n % 2).sum::<usize>() * writers;
    assert_eq!(all.len(), wanted);
    println!(
        "{wanted} events of {writers} writers in 8 aggregates, {failed} requests failed: gapless, none twice"
    );
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

/// A reader does not pass an append that is under way, however many others are done; then it gives both.
async fn a_reader_waits_for_an_append_under_way(place: Place) {
    let store = Watched::new(place.objects().await);
    let journal = open_watched(&store, Duration::from_mins(10)).await;
    let slow = held_up(&store, &journal, append("slow", Expected::New, &["s1"])).await;
    let _ = journal.append(&append("fast", Expected::New, &["f1"])).await.unwrap();
    let other = open_watched(&store, Duration::from_mins(10)).await;
    for reader in [&journal, &other] {
        let batch = reader.read(&Position::START, 10).await.unwrap();
        assert!(batch.events.is_empty() && batch.at_hole, "{batch:?}");
        assert_eq!(batch.next, Position::START);
    }
    store.hold(None);
    assert_eq!(slow.await.unwrap().unwrap().placed[0].seq, 1);
    assert_eq!(follow(&other).await.len(), 2, "both, in whichever order");
}

/// One that takes too long is not waited for; when it goes on, it finds its place taken and takes the next, with the same number.
async fn a_reader_does_not_wait_for_ever(place: Place) {
    let store = Watched::new(place.objects().await);
    let journal = open_watched(&store, Duration::from_mins(10)).await;
    let slow = held_up(&store, &journal, append("slow", Expected::New, &["s1"])).await;
    let _ = journal.append(&append("fast", Expected::New, &["f1"])).await.unwrap();
    let impatient = place.open().await; // it waits a second
    let given = follow(&impatient).await;
    assert_eq!(given.len(), 1);
    store.hold(None);
    let placed = slow.await.unwrap().unwrap().placed.remove(0);
    assert_eq!((placed.seq, placed.placing), (1, Placing::New), "no number is gone");
    assert!(placed.position > given[0].position, "nobody has passed it");
    assert_eq!(follow(&impatient).await.len(), 2);
}

/// Whichever answer is lost: the append says that it does not know, or is done; asked again it is there once.
async fn answers_are_lost(new: impl Fn() -> Place) {
    for (part, certain) in [("id/", false), ("pending/", false), ("aggregate/", true), ("index/", true)] {
        let place = new();
        let store = Watched::new(place.objects().await);
        let journal = open_watched(&store, Duration::from_millis(100)).await;
        store.lose(part);
        let append = append("a", Expected::New, &["x"]);
        let answer = journal.append(&append).await;
        match &answer {
            Ok(_) => assert!(certain, "{part}"),
            Err(e) => assert!(!certain && e.is_retryable(), "{part}: {e}"),
        }
        let again = journal.append(&append).await.unwrap();
        assert_eq!((again.placed[0].seq, again.is_repeat()), (1, certain), "{part}");
        assert_eq!(follow(&place.open().await).await.len(), 1, "{part}");
    }
}

/// What the documentation says it costs.
#[tokio::test]
async fn requests_are_as_documented() {
    let place = Place::directory();
    let store = Watched::new(place.objects().await);
    let journal = open_watched(&store, Duration::from_secs(5)).await;
    assert_eq!(store.requests(), 12, "opening a new one");
    let put = async |of: &str, ids: &[&str]| {
        let _ = journal.append(&append(of, Expected::Any, ids)).await.unwrap();
        store.requests()
    };
    assert_eq!(put("a", &["a1"]).await, 1 + 4 + 2, "the first time: a hint and a listing more");
    assert_eq!(put("a", &["a2"]).await, 1 + 4);
    assert_eq!(put("a", &["a3", "a4", "a5"]).await, 3 + 4);
    assert_eq!(
        put("a", &["a3"]).await,
        4 + 1,
        "a repeat: an intent in vain, its number, its aggregate, the event"
    );
    assert_eq!(journal.head(None, &aggregate("a")).await.unwrap(), 5);
    assert_eq!(store.requests(), 1, "head");
    let batch = journal.read(&Position::START, 100).await.unwrap();
    assert_eq!((batch.events.len(), store.requests()), (5, 2 + 3), "read of three appends");
    let batch = journal.read(&batch.next, 100).await.unwrap();
    assert_eq!((batch.events.len(), store.requests()), (0, 2), "read of nothing");
    assert!(journal.find(None, &hapax::EventId::new("a4").unwrap()).await.unwrap().is_some());
    assert_eq!(store.requests(), 4, "find");
}

mod directory {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn an_append_under_way_is_waited_for() {
        a_reader_waits_for_an_append_under_way(Place::directory()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_append_that_takes_too_long_is_not() {
        a_reader_does_not_wait_for_ever(Place::directory()).await;
    }

    #[tokio::test]
    async fn lost_answers() {
        answers_are_lost(Place::directory).await;
    }

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
}

mod s3 {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn an_append_under_way_is_waited_for() {
        a_reader_waits_for_an_append_under_way(Place::s3()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_append_that_takes_too_long_is_not() {
        a_reader_does_not_wait_for_ever(Place::s3()).await;
    }

    #[tokio::test]
    async fn lost_answers() {
        answers_are_lost(Place::s3).await;
    }

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
            assert_eq!(error.code(), "config", "{}", error.chain());
            assert!(error.to_string().contains("credentials"), "{error}");
            assert!(!error.chain().contains('<'), "no XML: {}", error.chain());
            assert!(!error.chain().contains("wrong-secret"), "{}", error.chain());
        }
        let mut nobody = s3_settings();
        nobody.endpoint = Some("http://127.0.0.1:9".to_owned());
        nobody.timeout = Duration::from_secs(2);
        let error = S3::connect(nobody).await.unwrap_err();
        assert_eq!(error.code(), "unavailable", "{}", error.chain());
        assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
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

/// Any journal can be archived; a second archivist is told so, and nothing that is not published goes.
#[tokio::test]
async fn a_journal_in_memory_is_archived() {
    use hapax::journal::{
        ArchiveSettings, Checkpoint, Leadership, MemoryJournal, archive, archive_files, archive_read,
    };
    let place = Place::directory();
    let store = place.objects().await;
    let journal = MemoryJournal::default();
    for n in 0..10 {
        let _ = journal.append(&append("a", Expected::Exact(n), &[&format!("e{n}")])).await.unwrap();
    }
    let all = follow(&journal).await;
    let owner = hapax::Owner::new("archivist").unwrap();
    let mut archiving = ArchiveSettings::new(Duration::ZERO, owner.clone()).unwrap();
    archiving.file_events_max = 4;
    let none = archive(&journal, store.as_ref(), &archiving).await.unwrap();
    assert_eq!((none.events, none.swept), (0, 0), "nobody publishes");
    let relay = hapax::RelayName::new("main").unwrap();
    let answer = journal.acquire_leadership(&relay, &owner, Duration::from_secs(60)).await.unwrap();
    let Leadership::Acquired { token, .. } = answer else { panic!("{answer:?}") };
    for (published, files, events) in [(6, 2, 6), (6, 0, 0), (10, 1, 4)] {
        let mut checkpoint = Checkpoint::start(journal.id());
        checkpoint.position = Position::of(published);
        journal.save(&relay, token, &checkpoint).await.unwrap();
        let archived = archive(&journal, store.as_ref(), &archiving).await.unwrap();
        assert_eq!((archived.files, archived.events, archived.swept), (files, events, events));
    }
    let mut read = Vec::new();
    for file in archive_files(store.as_ref(), journal.id()).await.unwrap() {
        read.extend(archive_read(store.as_ref(), &file).await.unwrap());
    }
    assert_eq!(read, all);
    // By bytes: a file has one event if that is as large as a file may be, however small the journal's pages are.
    for n in 10..16 {
        let _ = journal.append(&append("a", Expected::Exact(n), &[&format!("e{n}")])).await.unwrap();
    }
    let mut settings = hapax::journal::JournalSettings::default();
    settings.page_bytes_max = 0;
    let small = journal.reopened(settings);
    let mut checkpoint = Checkpoint::start(journal.id());
    checkpoint.position = Position::of(16);
    journal.save(&relay, token, &checkpoint).await.unwrap();
    let all = journal.read(&Position::START, 100).await.unwrap().events;
    archiving.sweep = false;
    for (file_bytes_max, up_to, files) in [(1, 3, 3), (1 << 20, 6, 1)] {
        archiving.file_bytes_max = file_bytes_max;
        checkpoint.position = Position::of(10 + up_to);
        journal.save(&relay, token, &checkpoint).await.unwrap();
        let archived = archive(&small, store.as_ref(), &archiving).await.unwrap();
        assert_eq!((archived.files, archived.events), (files, 3), "{file_bytes_max}");
    }
    let files = archive_files(store.as_ref(), journal.id()).await.unwrap();
    let mut read = Vec::new();
    for file in &files[files.len() - 4..] {
        read.extend(archive_read(store.as_ref(), file).await.unwrap());
    }
    assert_eq!(read, all);
    let other = hapax::Owner::new("another").unwrap();
    let _ = journal.acquire_leadership(&archiving.relay, &other, Duration::from_secs(60)).await.unwrap();
    let taken = archive(&journal, store.as_ref(), &archiving).await.unwrap_err();
    assert!(taken.to_string().contains("another"), "{taken}");
}

#[tokio::test]
async fn a_url_opens_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("dir:{}", dir.path().join("new/journal").display());
    let journal = hapax::open::journal_with(&url, &hapax::open::OpenSettings::default()).await.unwrap();
    let _ = journal.append(&append("a", Expected::New, &["x"])).await.unwrap();
    let again = hapax::open::journal_with(&url, &hapax::open::OpenSettings::default()).await.unwrap();
    assert_eq!(again.id(), journal.id());
    assert_eq!(again.head(None, &aggregate("a")).await.unwrap(), 1);
    let mut check = hapax::open::OpenSettings::default();
    check.migrate = hapax::config::Migrate::Check;
    let other = format!("dir:{}", dir.path().join("other").display());
    assert_eq!(hapax::open::journal_with(&other, &check).await.err().unwrap().code(), "schema");
    assert_eq!(hapax::open::journal_with("dir:", &check).await.err().unwrap().code(), "config");
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let error =
        hapax::open::journal_with(&format!("dir:{}", file.display()), &hapax::open::OpenSettings::default())
            .await
            .err()
            .unwrap();
    assert_eq!(error.code(), "refused", "{}", error.chain());
}

/// Events that come late: their writer's clock is a minute behind, far more than the skew, so that their place in the index is one
/// that the relay has passed.
mod late_events {
    use std::sync::Arc;
    use std::time::Duration;

    use hapax::backend::object::{ObjectJournal, ObjectSettings, Objects};
    use hapax::bus::{Bus, MemoryBus, TopicSettings};
    use hapax::journal::{
        AggregateOf, Checkpoint, Expected, Journal as _, JournalSweep, Position, RelayStore as _,
    };
    use hapax::relay::{Progress, RelaySettings, skip};
    use hapax::testing::relay::{FaultyBus, away, read_topic, too_large, witness};
    use hapax::{Relay, RelayName, Topic};

    use crate::support::objects::{Behind, DEADLINE, Place, aggregate, append};

    const BY: Duration = Duration::from_mins(1);

    struct Scene {
        journal: Arc<ObjectJournal>,
        /// The same journal, to a writer whose clock is behind.
        slow: ObjectJournal,
        bus: Arc<FaultyBus>,
        settings: RelaySettings,
        place: Place,
    }

    impl Scene {
        async fn new(place: Place) -> Self {
            let inner = MemoryBus::default();
            let topic = Topic::new("orders").unwrap();
            inner.create_topic(&topic, TopicSettings::new(2)).await.unwrap();
            let mut settings = RelaySettings::new(RelayName::new("main").unwrap(), topic);
            settings.poll = Duration::from_millis(20);
            settings.backoff_base = Duration::from_millis(2);
            settings.backoff_max = Duration::from_millis(20);
            let slow: Arc<dyn Objects> = Arc::new(Behind { inner: place.objects().await, by: BY });
            Scene {
                journal: Arc::new(place.open().await),
                slow: ObjectJournal::open(slow, ObjectSettings::default()).await.unwrap(),
                bus: Arc::new(FaultyBus::new(Arc::new(inner))),
                settings,
                place,
            }
        }

        async fn append(&self, of: &str, id: &str) -> Position {
            let appended = self.journal.append(&append(of, Expected::Any, &[id])).await.unwrap();
            appended.placed[0].position.clone()
        }

        async fn append_late(&self, of: &str, id: &str) -> Position {
            let appended = self.slow.append(&append(of, Expected::Any, &[id])).await.unwrap();
            appended.placed[0].position.clone()
        }

        /// Runs the relay beside `work`.
        async fn relay<T>(&self, work: impl AsyncFnOnce(&dyn Fn() -> Progress) -> T) -> T {
            let relay = Relay::new(self.journal.clone(), self.bus.clone(), self.settings.clone()).unwrap();
            let handle = relay.handle();
            let running = tokio::spawn(relay.run());
            let done = work(&|| handle.progress()).await;
            handle.stop();
            running.await.unwrap().unwrap();
            done
        }

        /// Publishes so many events, and answers with the saved position.
        async fn publishes(&self, count: u64) -> Position {
            self.relay(async |progress| until(progress, |progress| progress.published == count).await).await;
            self.saved().await.position
        }

        async fn saved(&self) -> Checkpoint {
            self.journal.relays().await.unwrap().remove(0).checkpoint.unwrap()
        }

        /// The ids on the topic, in order, of one aggregate.
        async fn ids(&self, of: &str) -> Vec<String> {
            let records = read_topic(&*self.bus, &self.settings.topic).await;
            let header = |record: &hapax::bus::Record, name| {
                String::from_utf8(record.headers.get(name).unwrap().to_vec()).unwrap()
            };
            let of = records.iter().filter(|received| header(&received.record, "aggregate_id") == of);
            of.map(|received| header(&received.record, "eventId")).collect()
        }

        /// So many events on the topic, each once and in order.
        async fn must_be_published(&self, events: usize) {
            let found = witness(&read_topic(&*self.bus, &self.settings.topic).await).unwrap();
            assert_eq!((found.events, found.repeats), (events, 0));
        }
    }

    async fn until(progress: &dyn Fn() -> Progress, is: impl Fn(&Progress) -> bool) -> Progress {
        let end = tokio::time::Instant::now() + DEADLINE;
        while !is(&progress()) {
            assert!(tokio::time::Instant::now() < end, "never came: {:?}", progress());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        progress()
    }

    /// A running relay finds it; nothing is published twice, also not after a restart.
    async fn is_published_once(place: Place) {
        let mut scene = Scene::new(place).await;
        scene.settings.lookback = BY * 10;
        scene.append("b", "b1").await;
        scene
            .relay(async |progress| {
                let passed = until(progress, |progress| progress.position > Position::START).await.position;
                let late = scene.append_late("a", "a1").await;
                assert!(late < passed, "{late} is not a late event: the relay is at {passed}");
                until(progress, |progress| progress.published == 2).await;
                scene.append("a", "a2").await;
                until(progress, |progress| progress.published == 3).await;
            })
            .await;
        scene.append("b", "b2").await;
        scene.publishes(1).await;
        scene.must_be_published(4).await;
    }

    /// An event whose predecessor comes late is not published before it, though the relay has not looked there yet.
    async fn precedes_its_successors(place: Place) {
        let mut scene = Scene::new(place).await;
        for id in ["c1", "c2", "c3"] {
            scene.append_late("c", id).await;
        }
        scene.append("b", "b1").await;
        let passed = scene.publishes(4).await;
        for id in ["a1", "a2"] {
            assert!(scene.append_late("a", id).await < passed);
        }
        scene.append("a", "a3").await;
        // The first look finds c1 only.
        scene.settings.lookback_max = 1;
        scene.publishes(3).await;
        scene.must_be_published(7).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_late_event_in_a_directory_is_published_once() {
        is_published_once(Place::directory()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_late_event_on_s3_is_published_once() {
        is_published_once(Place::s3()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_late_event_in_a_directory_precedes_its_successors() {
        precedes_its_successors(Place::directory()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_late_event_on_s3_precedes_its_successors() {
        precedes_its_successors(Place::s3()).await;
    }

    /// The bus is away when the relay finds it, and the next pass over the lookback is far away.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_late_event_survives_an_outage_of_the_bus() {
        let mut scene = Scene::new(Place::directory()).await;
        scene.settings.lookback = Duration::from_hours(24);
        scene.append("b", "b1").await;
        let passed = scene.publishes(1).await;
        assert!(scene.append_late("a", "a1").await < passed && scene.append_late("d", "d1").await < passed);
        scene.bus.fail(|_| Some(away()));
        scene
            .relay(async |progress| {
                until(progress, |progress| progress.outages > 0).await;
                scene.bus.heal();
                until(progress, |progress| progress.published == 2).await;
            })
            .await;
        scene.must_be_published(3).await;
    }

    /// A sweep does not take for published what a relay has passed without seeing it.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_late_event_is_not_swept_before_it_is_published() {
        let scene = Scene::new(Place::directory()).await;
        scene.append_late("c", "c1").await;
        scene.append("b", "b1").await;
        let passed = scene.publishes(2).await;
        assert!(scene.append_late("a", "a1").await < passed);
        let all = JournalSweep::new(Duration::ZERO);
        scene.place.until_past(&scene.journal).await;
        assert_eq!(scene.journal.sweep(&all).await.unwrap(), 2);
        scene.publishes(1).await;
        assert_eq!(scene.journal.sweep(&all).await.unwrap(), 1);
        scene.must_be_published(3).await;
    }

    /// What an operator gave up is not a late event.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_skipped_event_is_not_taken_for_late() {
        let scene = Scene::new(Place::directory()).await;
        scene.append("a", "a1").await;
        scene.append("a", "a2").await;
        scene.bus.fail(|_| Some(too_large()));
        scene.relay(async |progress| until(progress, |progress| progress.parked == 1).await).await;
        scene.bus.heal();
        let of = AggregateOf { tenant: None, aggregate: aggregate("a") };
        skip(&*scene.journal, &scene.settings.name, &of, 1).await.unwrap();
        scene.publishes(1).await;
        scene.append("a", "a3").await;
        scene.publishes(1).await;
        assert_eq!(scene.ids("a").await, ["a2", "a3"]);
        let saved = scene.saved().await;
        assert_eq!(saved.recent.len(), 4, "{saved:?}"); // the start, and all three
    }
}
