//! A relay between a journal and a bus that both misbehave: nothing is missing, each aggregate is in order, and what fails holds back
//! nobody else.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::bus::{Bus, MemoryBus, Record, TopicSettings};
use hapax::journal::{
    AggregateOf, Append, Behind, Checkpoint, Expected, Journal, JournalSettings, JournalSweep, Leadership,
    MemoryJournal, Position, RelayStore as _,
};
use hapax::relay::{Progress, Relay, RelayHandle, RelaySettings, resume, skip};
use hapax::testing::relay::{FaultyBus, OddJournal, Witnessed, away, read_topic, too_large, witness};
use hapax::{Aggregate, Event, EventId, Owner, RelayName, Tenant, Topic};
use tokio::task::JoinHandle;

fn topic() -> Topic {
    Topic::new("orders").unwrap()
}

fn name() -> RelayName {
    RelayName::new("main").unwrap()
}

fn of(aggregate: &str) -> AggregateOf {
    AggregateOf { tenant: None, aggregate: Aggregate::new(aggregate).unwrap() }
}

/// Quick to try again.
fn settings() -> RelaySettings {
    let mut settings = RelaySettings::new(name(), topic());
    settings.backoff_base = Duration::from_millis(2);
    settings.backoff_max = Duration::from_millis(20);
    settings.batch_max = 20;
    settings.lease = Duration::from_secs(12); // which a busy machine does not lose
    settings
}

async fn bus() -> Arc<FaultyBus> {
    let bus = MemoryBus::default();
    bus.create_topic(&topic(), TopicSettings::new(3)).await.unwrap();
    Arc::new(FaultyBus::new(Arc::new(bus)))
}

async fn append(journal: &dyn Journal, aggregate: &str, count: usize) {
    for _ in 0..count {
        let event = Event::new(EventId::now_v7()).payload(format!(r#"{{"of": "{aggregate}"}}"#));
        let append = Append::new(Aggregate::new(aggregate).unwrap(), Expected::Any, [event]);
        let _ = journal.append(&append).await.unwrap();
    }
}

/// `count` events each of aggregates a0, a1, …, taking turns.
async fn fill(journal: &dyn Journal, aggregates: usize, count: usize) {
    for _ in 0..count {
        for n in 0..aggregates {
            append(journal, &format!("a{n}"), 1).await;
        }
    }
}

struct Running {
    handle: RelayHandle,
    task: JoinHandle<hapax::Result<Progress>>,
}

fn start(journal: Arc<dyn Journal>, bus: &Arc<FaultyBus>, settings: RelaySettings) -> Running {
    let relay = Relay::new(journal, bus.clone(), settings).unwrap();
    let handle = relay.handle();
    let task = tokio::spawn(relay.run());
    Running { handle, task }
}

impl Running {
    async fn until(&self, what: &str, is: impl Fn(&Progress) -> bool) -> Progress {
        // A mutant may never come there, and need not be waited for as long.
        let mutant = std::env::var("HAPAX_MUTANT").is_ok_and(|mutant| mutant != "none");
        let end = tokio::time::Instant::now() + Duration::from_secs(if mutant { 10 } else { 120 });
        loop {
            let progress = self.handle.progress();
            if is(&progress) {
                return progress;
            }
            assert!(tokio::time::Instant::now() < end, "never came: {what}: {progress:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn stop(self) -> Progress {
        self.handle.stop();
        self.task.await.unwrap().unwrap()
    }
}

async fn witnessed(bus: &Arc<FaultyBus>) -> Witnessed {
    let found = witness(&read_topic(&**bus, &topic()).await).unwrap_or_else(|problem| panic!("{problem}"));
    println!("{} events, {} repeats", found.events, found.repeats);
    found
}

async fn checkpoint(journal: &dyn Journal) -> Checkpoint {
    journal.relays().await.unwrap().remove(0).checkpoint.expect("a checkpoint")
}

fn is_of(record: &Record, aggregate: &str) -> bool {
    record.headers.get("aggregate_id") == Some(aggregate.as_bytes())
}

fn has_seq(record: &Record, seq: u64) -> bool {
    record.headers.get("sequence_number") == Some(seq.to_string().as_bytes())
}

#[tokio::test]
async fn everything_comes_once_and_in_order() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 7, 50).await;
    let running = start(journal.clone(), &bus, settings());
    running.until("the end", |progress| progress.position == Position::of(350)).await;
    append(&*journal, "later", 1).await;
    running.until("what came later", |progress| progress.position == Position::of(351)).await;
    let progress = running.stop().await;
    assert_eq!((progress.published, progress.leads, progress.behind), (351, false, 0));
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (351, 0));
    assert_eq!(found.heads[&of("a3")], 50);
}

#[tokio::test]
async fn two_tenants_with_one_aggregate_are_apart() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    for n in 0..20 {
        for tenant in ["x", "y"] {
            let event = Event::new(EventId::new(format!("e-{n}")).unwrap());
            let append = Append::new(Aggregate::new("same").unwrap(), Expected::Any, [event]);
            let _ = journal.append(&append.tenant(Tenant::new(tenant).unwrap())).await.unwrap();
        }
    }
    let running = start(journal, &bus, settings());
    running.until("the end", |progress| progress.published == 40).await;
    running.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats, found.heads.len()), (40, 0, 2));
}

#[tokio::test]
async fn t41_a_failing_aggregate_holds_back_itself_and_nobody_else() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 5, 20).await;
    bus.fail(|record| (is_of(record, "a2") && has_seq(record, 4)).then(away));
    let running = start(journal.clone(), &bus, settings());
    let progress = running.until("the others", |progress| progress.position == Position::of(100)).await;
    assert_eq!((progress.behind, progress.parked), (1, 0));
    let saved = checkpoint(&*journal).await;
    assert_eq!((saved.behind[0].aggregate.as_str(), saved.behind[0].next), ("a2", 4));
    append(&*journal, "a2", 3).await;
    running.until("more of it passed by", |progress| progress.position == Position::of(103)).await;
    bus.heal();
    running.until("it has caught up", |progress| progress.behind == 0).await;
    append(&*journal, "a2", 1).await;
    running.until("it goes on", |progress| progress.position == Position::of(104)).await;
    running.stop().await;
    let records = read_topic(&*bus, &topic()).await;
    let mut firsts = std::collections::HashSet::new();
    let order: Vec<_> = records
        .iter()
        .filter(|received| is_of(&received.record, "a2"))
        .map(|received| {
            String::from_utf8(received.record.headers.get("sequence_number").unwrap().to_vec()).unwrap()
        })
        .collect();
    // What was under way behind it was acknowledged, does not count and came again after it.
    let after: Vec<_> = order.iter().skip_while(|seq| *seq != "4").collect();
    let distinct: Vec<_> = after.iter().filter(|seq| firsts.insert((**seq).clone())).collect();
    assert_eq!(distinct.len(), 21, "{order:?}");
    assert!(
        distinct.windows(2).all(|two| two[0].parse::<u64>().unwrap() < two[1].parse().unwrap()),
        "{order:?}"
    );
}

/// A page that is shorter than asked for is not the end: neither of what is followed nor of what an aggregate is behind with.
#[tokio::test]
async fn large_events_make_short_pages_and_nothing_is_left_out() {
    let mut short = JournalSettings::default();
    short.page_bytes_max = 3000;
    let (journal, bus) = (Arc::new(MemoryJournal::new(short)), bus().await);
    fill(&*journal, 3, 60).await;
    let fails = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let failing = Arc::clone(&fails);
    bus.fail(move |record| (failing.load(Ordering::SeqCst) && is_of(record, "a1")).then(away));
    let running = start(journal.clone(), &bus, settings());
    let end = |progress: &Progress| progress.position == Position::of(180);
    let progress = running.until("the others", end).await;
    assert_eq!(progress.behind, 1);
    fails.store(false, Ordering::SeqCst);
    running.until("it has caught up", |progress| progress.behind == 0).await;
    running.stop().await;
    assert!(witnessed(&bus).await.heads.values().all(|head| *head == 60));
}

#[tokio::test]
async fn an_outage_of_the_bus_makes_nobody_behind() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 10, 10).await;
    let tried = Arc::new(Mutex::new(0));
    let count = tried.clone();
    bus.fail(move |_| {
        *count.lock().unwrap() += 1;
        Some(away())
    });
    let running = start(journal.clone(), &bus, settings());
    while *tried.lock().unwrap() < 100 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let progress = running.handle.progress();
    assert_eq!((progress.position, progress.behind, progress.outages), (Position::START, 0, 1));
    assert!(progress.lag > Duration::ZERO);
    bus.heal();
    running.until("the end", |progress| progress.position == Position::of(100)).await;
    let progress = running.stop().await;
    assert_eq!((progress.published, progress.outages), (100, 1));
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (100, 0));
}

#[tokio::test]
async fn an_outage_in_the_middle_of_a_batch_repeats_nothing_while_ids_are_remembered() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 10, 4).await;
    let mut settings = settings();
    (settings.batch_max, settings.flush_max) = (40, Some(10));
    let mut records = 0;
    bus.fail(move |_| {
        records += 1;
        (21..=60).contains(&records).then(away)
    });
    let running = start(journal, &bus, settings);
    running.until("the end", |progress| progress.position == Position::of(40)).await;
    let progress = running.stop().await;
    assert_eq!((progress.published, progress.behind), (40, 0));
    assert!(progress.suppressed >= 20);
    assert_eq!(witnessed(&bus).await.repeats, 0);
}

/// One aggregate's part of the bus is away and nothing else is published meanwhile: it does not stand in the way for ever.
#[tokio::test]
async fn a_lone_aggregate_that_fails_is_left_behind_once() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    append(&*journal, "bad", 45).await;
    bus.fail(|record| is_of(record, "bad").then(away));
    let running = start(journal.clone(), &bus, settings());
    running.until("it is behind", |progress| progress.behind == 1).await;
    append(&*journal, "good", 1).await;
    running.until("the other", |progress| progress.published == 1).await;
    bus.heal();
    running.until("all", |progress| progress.behind == 0 && progress.position == Position::of(46)).await;
    running.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (46, 0));
}

/// A part of the bus that does not answer: what is there waits for its answers, and the rest goes on.
#[tokio::test]
async fn a_slow_partition_slows_nobody_else() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 5, 20).await;
    bus.slow(|record| is_of(record, "a1") || is_of(record, "a3"));
    let mut settings = settings();
    settings.flush_timeout = Duration::from_millis(50);
    let running = start(journal.clone(), &bus, settings);
    running.until("the others", |progress| progress.position == Position::of(100)).await;
    append(&*journal, "a1", 3).await;
    append(&*journal, "a4", 3).await;
    let others = |progress: &Progress| (progress.published, progress.behind) == (63, 2);
    running
        .until("more of them", |progress| others(progress) && progress.position == Position::of(106))
        .await;
    let mut saved: Vec<_> = checkpoint(&*journal)
        .await
        .behind
        .into_iter()
        .map(|behind| (behind.aggregate, behind.next))
        .collect();
    saved.sort();
    assert_eq!(saved, [("a1".to_owned(), 1), ("a3".to_owned(), 1)]);
    bus.let_go();
    running.until("it has caught up", |progress| progress.behind == 0).await;
    append(&*journal, "a1", 1).await;
    running.until("it goes on", |progress| progress.position == Position::of(107)).await;
    running.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (107, 0), "what was with the bus was not handed to it again");
}

/// Decision 22, measured: of twelve aggregates one was refused for a while. Catching up reads its events, not the journal
/// again, as a cursor for its partition would have to.
#[tokio::test]
async fn catching_up_reads_what_is_behind_and_not_the_journal_again() {
    let (journal, bus) = (Arc::new(OddJournal::default()), bus().await);
    fill(&*journal, 12, 50).await;
    bus.fail(|record| is_of(record, "a1").then(away));
    let running = start(journal.clone(), &bus, settings());
    let others = |progress: &Progress| progress.position == Position::of(600) && progress.behind == 1;
    running.until("the others", others).await;
    let before = journal.events_read.load(Ordering::SeqCst);
    bus.heal();
    running.until("it has caught up", |progress| progress.behind == 0).await;
    let read = journal.events_read.load(Ordering::SeqCst) - before;
    running.stop().await;
    println!("{read} events read to catch up with 50 of 600");
    assert!(read <= 2 * 50, "{read} events were read");
    assert_eq!(witnessed(&bus).await.events, 600);
}

/// All of a batch is where the bus does not answer, so that it may be the bus: what was appended meanwhile shows that it is not, once the
/// bus has given up and the batch is tried again with it.
#[tokio::test]
async fn a_batch_that_is_not_answered_at_all_is_tried_again_with_what_came_meanwhile() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 2, 5).await;
    bus.slow(|record| is_of(record, "a0") || is_of(record, "a1"));
    let mut settings = settings();
    settings.flush_timeout = Duration::from_millis(50);
    let running = start(journal.clone(), &bus, settings);
    running.until("it is noticed", |progress| progress.outages == 1).await;
    append(&*journal, "good", 3).await;
    // The bus gives up what it could not publish.
    bus.fail(|record| (!is_of(record, "good")).then(away));
    bus.let_go();
    running.until("the other", |progress| (progress.published, progress.behind) == (3, 2)).await;
    bus.heal();
    running.until("all", |progress| progress.behind == 0 && progress.position == Position::of(13)).await;
    running.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (13, 0));
}

/// However many do not get an answer, those that are behind stay as few as was asked for, but for a batch.
#[tokio::test]
async fn more_without_an_answer_than_may_be_behind_pauses_the_relay() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    for batch in 0..5 {
        for n in 0..19 {
            append(&*journal, &format!("slow-{batch}-{n}"), 1).await;
        }
        append(&*journal, "good", 1).await;
    }
    bus.slow(|record| !is_of(record, "good"));
    let mut settings = settings();
    (settings.flush_timeout, settings.behind_max) = (Duration::from_millis(50), 30);
    let running = start(journal.clone(), &bus, settings);
    let two_batches = |progress: &Progress| progress.published == 2 && progress.behind == 38;
    running.until("two batches", two_batches).await;
    tokio::time::sleep(Duration::from_millis(500)).await; // ten times what a batch takes that is not paused
    let progress = running.handle.progress();
    assert!(two_batches(&progress) && progress.position == Position::of(40), "{progress:?}");
    bus.let_go();
    running.until("all", |progress| progress.behind == 0 && progress.position == Position::of(100)).await;
    running.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (100, 0));
}

/// More are due than may be with the bus: nobody turns in circles for them.
#[tokio::test]
async fn those_that_find_no_room_are_not_looked_for_again_and_again() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 50, 1).await;
    append(&*journal, "good", 1).await;
    bus.fail(|record| (!is_of(record, "good")).then(away));
    let mut settings = settings();
    settings.batch_max = 51; // so that the good one shows that it is the others' fault
    let running = start(journal.clone(), &bus, settings);
    running.until("they are behind", |progress| progress.behind == 50).await;
    bus.slow(|record| !is_of(record, "good"));
    bus.heal();
    // All that has room is with the bus soon, and the rest is due. No counter shows when.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let before = running.handle.progress().looks;
    tokio::time::sleep(Duration::from_secs(1)).await; // the second in which nothing should happen
    let looks = running.handle.progress().looks - before;
    assert!(looks < 50, "{looks} looks in a second without anything to do");
    bus.let_go();
    running.until("all", |progress| progress.behind == 0).await;
    running.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (51, 0));
}

/// An operator gives up an event that lies ahead of the checkpoint: it stays given up when the relay comes by.
#[tokio::test]
async fn what_is_skipped_ahead_of_the_checkpoint_stays_skipped() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 2, 10).await;
    bus.fail(|record| (is_of(record, "a1") && has_seq(record, 3)).then(too_large));
    let owner = Owner::new("someone").unwrap();
    let Leadership::Acquired { token, mut checkpoint } =
        journal.acquire_leadership(&name(), &owner, Duration::from_secs(60)).await.unwrap()
    else {
        panic!("nobody leads")
    };
    let stuck = journal.read_aggregate(None, &Aggregate::new("a1").unwrap(), 3, 1).await.unwrap();
    checkpoint.behind.push(Behind::at(&stuck.events[0], "too large", true, journal.now().await.unwrap()));
    journal.save(&name(), token, &checkpoint).await.unwrap();
    journal.release_leadership(&name(), token).await.unwrap();
    skip(&*journal, &name(), &of("a1"), 3).await.unwrap();
    // That it is stuck at 3 says that 1 and 2 are on the bus.
    let running = start(journal.clone(), &bus, settings());
    running.until("all", |progress| progress.position == Position::of(20) && progress.behind == 0).await;
    running.stop().await;
    let records = read_topic(&*bus, &topic()).await;
    let seqs: Vec<_> = records.iter().filter(|received| is_of(&received.record, "a1")).collect();
    assert_eq!(seqs.len(), 7);
    assert!(seqs.iter().zip(4..).all(|(received, seq)| has_seq(&received.record, seq)), "{seqs:?}");
}

/// One that has failed is tried again, and that try is not answered: nobody waits for it.
#[tokio::test]
async fn catching_up_keeps_nobody_waiting() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 3, 5).await;
    bus.fail(|record| is_of(record, "a1").then(away));
    let running = start(journal.clone(), &bus, settings());
    running.until("it is behind", |progress| progress.behind == 1).await;
    bus.slow(|record| is_of(record, "a1"));
    bus.heal();
    // Whatever the last try that failed was: the next is slow, and the default flush timeout is 10 s.
    let began = tokio::time::Instant::now();
    for n in 1..=20 {
        append(&*journal, "a2", 1).await;
        running.until("the others", |progress| progress.position == Position::of(15 + n)).await;
    }
    assert!(began.elapsed() < Duration::from_secs(60), "20 batches waited for an aggregate that is behind");
    assert_eq!(running.handle.progress().behind, 1);
    bus.let_go();
    running.until("it has caught up", |progress| progress.behind == 0).await;
    running.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (35, 0));
}

/// Answers that fail in the end are failures as any other.
#[tokio::test]
async fn a_late_refusal_leaves_its_aggregate_behind() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 2, 10).await;
    bus.slow(|record| is_of(record, "a1"));
    let mut settings = settings();
    settings.flush_timeout = Duration::from_millis(50);
    let running = start(journal.clone(), &bus, settings);
    running.until("the other", |progress| progress.position == Position::of(20)).await;
    bus.fail(|record| (is_of(record, "a1") && has_seq(record, 10)).then(too_large));
    bus.let_go();
    running.until("it is parked", |progress| progress.parked == 1).await;
    assert_eq!(checkpoint(&*journal).await.behind[0].next, 10);
    bus.heal();
    resume(&*journal, &name(), &of("a1")).await.unwrap();
    running.until("it has caught up", |progress| progress.behind == 0).await;
    running.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!(found.events, 20);
}

/// A stop waits for what is with the bus, so that it is not published again.
#[tokio::test]
async fn a_stop_waits_for_late_answers() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 2, 10).await;
    bus.slow(|record| is_of(record, "a1"));
    let mut brief = settings();
    brief.flush_timeout = Duration::from_secs(3);
    let running = start(journal.clone(), &bus, brief);
    running.until("the other", |progress| progress.position == Position::of(20)).await;
    bus.let_go();
    running.stop().await;
    let running = start(journal.clone(), &bus, settings());
    running.until("all", |progress| progress.leads && progress.behind == 0).await;
    running.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (20, 0));
}

#[tokio::test]
async fn t18_poison_leaves_the_queue_and_parks_its_aggregate() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 3, 10).await;
    let mut settings = settings();
    settings.large_bytes = 1; // every record is large: nothing passes one that fails
    bus.fail(|record| (is_of(record, "a1") && has_seq(record, 3)).then(too_large));
    let running = start(journal.clone(), &bus, settings);
    let progress = running.until("the others", |progress| progress.position == Position::of(30)).await;
    assert_eq!((progress.behind, progress.parked), (1, 1));
    let behind = checkpoint(&*journal).await.behind.remove(0);
    assert!(behind.poison && behind.reason.contains("larger"), "{behind:?}");
    assert_eq!(witnessed(&bus).await.heads[&of("a1")], 2, "nothing has passed it");

    let wrong = skip(&*journal, &name(), &of("a1"), 7).await.unwrap_err().to_string();
    assert!(wrong.contains("seq 7") && wrong.contains("seq 3"), "{wrong}");
    assert!(resume(&*journal, &name(), &of("a0")).await.is_err(), "it is not behind");
    resume(&*journal, &name(), &of("a1")).await.unwrap();
    running.until("it was tried again", |progress| progress.takeovers == 2 && progress.parked == 1).await;
    bus.heal();
    resume(&*journal, &name(), &of("a1")).await.unwrap();
    running.until("it has caught up", |progress| progress.takeovers == 3 && progress.behind == 0).await;
    running.stop().await;
    assert_eq!(witnessed(&bus).await.events, 30);
}

#[tokio::test]
async fn a_skipped_event_is_given_up_and_its_successors_follow() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 2, 5).await;
    let mut settings = settings();
    settings.large_bytes = 1;
    bus.fail(|record| (is_of(record, "a1") && has_seq(record, 3)).then(too_large));
    let running = start(journal.clone(), &bus, settings);
    running.until("it is parked", |progress| progress.parked == 1).await;
    let was = skip(&*journal, &name(), &of("a1"), 3).await.unwrap();
    assert!(was.poison && was.next == 3);
    running.until("it has caught up", |progress| progress.takeovers == 2 && progress.behind == 0).await;
    running.stop().await;
    let problem = witness(&read_topic(&*bus, &topic()).await).unwrap_err();
    assert!(problem.contains("seq 4 after 2"), "{problem}");
}

#[tokio::test]
async fn more_behind_than_may_be_pauses_the_relay() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 10, 2).await;
    bus.fail(|record| (!is_of(record, "a0")).then(away));
    let mut settings = settings();
    settings.behind_max = 3;
    let running = start(journal.clone(), &bus, settings);
    running.until("a0", |progress| progress.published >= 2).await;
    let progress = running.until("it looks again", |progress| progress.looks > 3).await;
    // a1, a2 and a3 are behind; a4 cannot be, and what comes before it is saved.
    assert_eq!((progress.position, progress.behind), (Position::of(4), 3));
    bus.heal();
    running.until("the end", |progress| progress.position == Position::of(20) && progress.behind == 0).await;
    running.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (20, 0));
}

/// Without any memory: what is acknowledged is not published again for as long as the relay pauses, nor what is saved after a restart.
#[tokio::test]
async fn at_the_limit_the_begin_of_the_batch_is_saved_and_none_of_it_repeated() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 5, 3).await;
    bus.fail(|record| (is_of(record, "a3") || is_of(record, "a4")).then(away));
    let mut settings = settings();
    (settings.behind_max, settings.dedup_max) = (1, 0);
    let running = start(journal.clone(), &bus, settings.clone());
    let progress = running.until("it looks again", |progress| progress.looks > 5).await;
    assert_eq!((progress.position, progress.behind, progress.published), (Position::of(4), 1, 9));
    running.stop().await;
    let saved = checkpoint(&*journal).await;
    assert_eq!((saved.position, saved.behind.len()), (Position::of(4), 1));
    bus.heal();
    let running = start(journal.clone(), &bus, settings);
    running.until("the end", |progress| progress.position == Position::of(15) && progress.behind == 0).await;
    running.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (15, 6), "a restart repeats what was not saved");
}

/// However many are parked, they are in nobody's way.
#[tokio::test]
async fn t18_poison_does_not_count_among_those_that_may_be_behind() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 50, 2).await;
    bus.fail(|record| (!is_of(record, "a0") && !is_of(record, "a7")).then(too_large));
    let mut settings = settings();
    settings.behind_max = 1;
    let running = start(journal.clone(), &bus, settings);
    let progress = running.until("the end", |progress| progress.position == Position::of(100)).await;
    assert_eq!((progress.behind, progress.parked, progress.published), (48, 48, 4));
    running.stop().await;
}

/// An id that was swept and is appended again is another event.
#[tokio::test]
async fn an_id_that_was_swept_and_appended_anew_is_published() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    let again = async |aggregate: &str| {
        let event = Event::new(EventId::new("same").unwrap());
        let append = Append::new(Aggregate::new(aggregate).unwrap(), Expected::Any, [event]);
        let _ = journal.append(&append).await.unwrap();
    };
    let running = start(journal.clone(), &bus, settings());
    for (n, aggregate) in [(1, "a"), (2, "a"), (3, "b")] {
        again(aggregate).await;
        running.until("it is published", |progress| progress.position == Position::of(n)).await;
        let all = JournalSweep::new(Duration::ZERO);
        while journal.sweep(&all).await.unwrap() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    let progress = running.stop().await;
    assert_eq!((progress.published, progress.suppressed), (3, 0));
}

/// Begun again while the bus answers nobody: it is known at once who is behind, so that nobody takes it for done.
#[tokio::test]
async fn whoever_leads_says_at_once_who_is_behind() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 4, 3).await;
    bus.fail(|record| if is_of(record, "a1") { Some(away()) } else { is_of(record, "a2").then(too_large) });
    let running = start(journal.clone(), &bus, settings());
    running.until("the others", |progress| progress.position == Position::of(12)).await;
    running.stop().await;
    bus.heal();
    bus.silence(true);
    let running = start(journal.clone(), &bus, settings());
    let progress = running.until("it leads", |progress| progress.leads).await;
    assert_eq!((progress.position, progress.behind, progress.parked), (Position::of(12), 2, 1));
    assert!(progress.lag > Duration::ZERO, "what is behind is not on the bus");
    bus.silence(false);
    running.until("it has caught up", |progress| (progress.behind, progress.parked) == (1, 1)).await;
    running.stop().await;
}

/// Two operators at once: the second decides from what the first has left, and undoes nothing.
#[tokio::test]
async fn a_decision_undoes_no_other() {
    let journal = OddJournal::default();
    fill(&journal, 3, 2).await;
    let stored = journal.read(&Position::START, 10).await.unwrap().events;
    let mut parked = Checkpoint::start(journal.id());
    parked.position = Position::of(6);
    let poison = |n: usize| Behind::at(&stored[n], "too large", true, hapax::Time::from_micros(1));
    parked.behind = vec![poison(1), poison(2)];
    journal.rewind(&name(), &parked, None).await.unwrap();
    let mut other = parked.clone();
    other.behind.remove(1);
    *journal.meddling.lock().unwrap() = Some((name(), other));
    resume(&journal, &name(), &of("a1")).await.unwrap();
    let saved = checkpoint(&journal).await;
    assert_eq!(saved.behind.len(), 1, "a2 stays decided");
    assert!(!saved.behind[0].poison);
    journal.rewind(&name(), &parked, None).await.unwrap();
    *journal.meddling.lock().unwrap() = Some((name(), Checkpoint::start(journal.id())));
    let error = skip(&journal, &name(), &of("a1"), 1).await.unwrap_err();
    assert_eq!(error.code(), "not-found", "{error}");
    assert_eq!(checkpoint(&journal).await.position, Position::START, "the rewind stays");
}

/// What the configuration says if nobody says anything is what the library does.
#[test]
fn the_configuration_has_the_same_defaults() {
    let config = hapax::config::Config::load(&hapax::config::Sources::new()).unwrap();
    let mut configured = config.relay_settings();
    let settings = RelaySettings::new(configured.name.clone(), configured.topic.clone());
    assert_eq!(configured.flush(), settings.flush());
    configured.flush_max = None;
    let all = |s: &RelaySettings| {
        let counts =
            [s.lookback_max, s.dedup_max, s.dedup_checkpoint_max, s.batch_max, s.behind_max, s.large_bytes];
        let times =
            [s.lookback, s.flush_timeout, s.log_interval, s.lease, s.poll, s.backoff_base, s.backoff_max];
        (counts, times, s.flush_max, s.source.clone(), s.schema.clone())
    };
    assert_eq!(all(&configured), all(&settings));
    let keys = include_str!("../../docs/relay.md");
    for setting in hapax::config::SETTINGS.iter().filter(|setting| setting.key.starts_with("relay.")) {
        let documented = keys.contains(&format!("`{}`", setting.key));
        assert!(documented || ["relay.name", "relay.topic"].contains(&setting.key), "{}", setting.key);
    }
}

#[tokio::test]
async fn whoever_lost_leadership_saves_nothing_and_is_a_candidate_again() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 2, 10).await;
    bus.silence(true);
    let running = start(journal.clone(), &bus, settings());
    running.until("it leads", |progress| progress.leads).await;
    // As another leader would: it has published nothing yet.
    journal.rewind(&name(), &Checkpoint::start(journal.id()), None).await.unwrap();
    bus.silence(false);
    running.until("it leads again", |progress| progress.takeovers == 2).await;
    running.until("the end", |progress| progress.position == Position::of(20)).await;
    running.stop().await;
    assert_eq!(witnessed(&bus).await.events, 20);
}

#[tokio::test]
async fn a_second_relay_takes_over_at_once_when_the_first_stops() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 2, 10).await;
    let mut settings = settings();
    settings.lease = Duration::from_millis(600);
    let first = start(journal.clone(), &bus, settings.clone());
    first.until("the end", |progress| progress.position == Position::of(20)).await;
    let second = start(journal.clone(), &bus, settings);
    assert!(!second.handle.progress().leads);
    first.stop().await;
    second.until("it leads", |progress| progress.leads).await;
    append(&*journal, "a0", 1).await;
    second.until("it relays", |progress| progress.published == 1).await;
    second.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (21, 0));
}

#[tokio::test]
async fn a_rewound_relay_publishes_again_whatever_it_remembers() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 2, 10).await;
    let running = start(journal.clone(), &bus, settings());
    running.until("the end", |progress| progress.position == Position::of(20)).await;
    journal.rewind(&name(), &Checkpoint::start(journal.id()), None).await.unwrap();
    running.until("once more", |progress| progress.published == 40).await;
    running.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (20, 20));
}

#[tokio::test]
async fn a_checkpoint_of_another_journal_is_refused() {
    let journal = MemoryJournal::default();
    let other = MemoryJournal::default();
    let error = journal.rewind(&name(), &Checkpoint::start(other.id()), None).await.unwrap_err();
    assert!(error.to_string().contains(other.id()), "{error}");
}

#[tokio::test]
async fn a_save_that_is_not_answered_is_tried_again() {
    let (journal, bus) = (Arc::new(OddJournal::default()), bus().await);
    fill(&*journal, 2, 30).await;
    journal.saves_failing.store(5, Ordering::SeqCst);
    let running = start(journal, &bus, settings());
    running.until("the end", |progress| progress.position == Position::of(60)).await;
    running.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (60, 0));
}

#[tokio::test]
async fn t40_a_hole_is_waited_for() {
    let (journal, bus) = (Arc::new(OddJournal::default()), bus().await);
    fill(&*journal, 3, 10).await;
    journal.hide([7, 8, 20]);
    let running = start(journal.clone(), &bus, settings());
    let progress = running.until("it waits", |progress| progress.holes > 0 && progress.looks > 6).await;
    assert_eq!(
        (progress.position, progress.holes),
        (Position::of(6), 1),
        "one hole, however often it is looked at"
    );
    running.until("it ages", |progress| progress.lag > Duration::from_millis(50)).await;
    journal.show();
    running.until("the end", |progress| progress.position == Position::of(30)).await;
    running.stop().await;
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats), (30, 0));
}

#[tokio::test]
async fn an_idle_relay_hardly_looks_and_is_woken_at_once() {
    let (journal, bus) = (Arc::new(OddJournal::default()), bus().await);
    let mut settings = settings();
    settings.poll = Duration::from_secs(30);
    let running = start(journal.clone(), &bus, settings);
    running.until("it leads", |progress| progress.leads && progress.looks > 0).await;
    tokio::time::sleep(Duration::from_secs(1)).await; // the second in which nothing happens
    let reads = journal.reads.load(Ordering::SeqCst);
    assert!(reads <= 5, "{reads} reads in an idle second");
    let mut slowest = Duration::ZERO;
    for n in 1..=20 {
        let began = tokio::time::Instant::now();
        append(&*journal, "a", 1).await;
        running.until("it is woken", |progress| progress.position == Position::of(n)).await;
        slowest = slowest.max(began.elapsed());
    }
    println!("{reads} reads in an idle second; the slowest of 20 took {slowest:?} from append to checkpoint");
    assert!(slowest < Duration::from_secs(20), "{slowest:?}: not woken");
    running.stop().await;
}

/// A batch of which most is known and one event is not acknowledged: the checkpoint stays before it.
#[tokio::test]
async fn t28_the_checkpoint_moves_only_after_acknowledgement() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    fill(&*journal, 2, 10).await;
    let mut settings = settings();
    settings.flush_max = Some(5);
    bus.fail(|record| (6..=10).any(|seq| has_seq(record, seq)).then(away));
    let running = start(journal.clone(), &bus, settings);
    running.until("it was tried again", |progress| progress.suppressed >= 10).await;
    let saved = journal.relays().await.unwrap().remove(0).checkpoint;
    assert!(saved.is_none(), "{saved:?}");
    bus.heal();
    running.until("the end", |progress| progress.position == Position::of(20) && progress.behind == 0).await;
    running.stop().await;
    assert_eq!(witnessed(&bus).await.events, 20);
}

#[tokio::test]
async fn events_go_where_they_are_routed() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    let even = Topic::new("even").unwrap();
    bus.create_topic(&even, TopicSettings::new(1)).await.unwrap();
    fill(&*journal, 4, 10).await;
    let mut settings = settings();
    let (to, other) = (even.clone(), topic());
    settings.route = Some(Arc::new(move |stored| {
        let name = stored.aggregate().unwrap().as_str().to_owned();
        if name.ends_with(['0', '2']) { to.clone() } else { other.clone() }
    }));
    let running = start(journal, &bus, settings);
    running.until("the end", |progress| progress.position == Position::of(40)).await;
    running.stop().await;
    assert_eq!(witnessed(&bus).await.events, 20);
    assert_eq!(witness(&read_topic(&*bus, &even).await).unwrap().events, 20);
}

#[tokio::test]
async fn a_missing_topic_and_impossible_settings_are_refused_with_a_sentence() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    let mut elsewhere = settings();
    elsewhere.topic = Topic::new("nowhere").unwrap();
    let relay = Relay::new(journal.clone(), bus.clone(), elsewhere).unwrap();
    let error = relay.run().await.unwrap_err().to_string();
    assert!(error.contains("nowhere"), "{error}");
    let mut impossible = settings();
    impossible.batch_max = 0;
    let error = Relay::new(journal, bus, impossible).err().unwrap().to_string();
    assert!(error.contains("relay.batch_max is 0; it must be 1 to"), "{error}");
}

/// Stopped and begun again, from a journal that survives that: every event once.
async fn stopped_and_begun_again(url: &str) {
    let journal = hapax::open::journal_with(url, &hapax::open::OpenSettings::default()).await.unwrap();
    let bus = bus().await;
    let mut settings = settings();
    settings.poll = Duration::from_millis(50);
    for round in 1..=3 {
        fill(&*journal, 5, 6).await;
        let running = start(journal.clone(), &bus, settings.clone());
        let end = tokio::time::Instant::now() + Duration::from_secs(60);
        while running.handle.progress().position == Position::START
            || journal.count_after(&running.handle.progress().position, 1).await.unwrap() > 0
        {
            assert!(tokio::time::Instant::now() < end, "round {round}: {:?}", running.handle.progress());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(running.stop().await.published, 30);
    }
    let found = witnessed(&bus).await;
    assert_eq!((found.events, found.repeats, found.heads[&of("a4")]), (90, 0, 18));
}

#[cfg(feature = "sqlite")]
#[tokio::test]
async fn a_journal_in_sqlite_is_relayed() {
    let folder = tempfile::tempdir().unwrap();
    stopped_and_begun_again(&format!("sqlite:{}", folder.path().join("journal.db").display())).await;
}

#[tokio::test]
async fn a_journal_in_a_directory_is_relayed() {
    let folder = tempfile::tempdir().unwrap();
    stopped_and_begun_again(&format!("dir:{}", folder.path().display())).await;
}

#[test]
fn the_defaults_are_those_of_the_table() {
    let settings = RelaySettings::new(name(), topic());
    let table = include_str!("../../docs/relay.md");
    let documented = |knob: &str| {
        let row = table.lines().find(|line| line.starts_with(&format!("| `{knob}` |")));
        let row = row.unwrap_or_else(|| panic!("{knob} is not in docs/relay.md"));
        row.split('|').nth(2).unwrap().trim().replace(',', "")
    };
    let seconds = |duration: Duration| format!("{} s", duration.as_secs());
    for (knob, effective) in [
        ("lookback", seconds(settings.lookback)),
        ("lookback_max", settings.lookback_max.to_string()),
        ("dedup_max", settings.dedup_max.to_string()),
        ("dedup_checkpoint_max", settings.dedup_checkpoint_max.to_string()),
        ("batch_max", settings.batch_max.to_string()),
        ("flush_max", (if settings.flush() == settings.batch_max { "as `batch_max`" } else { "?" }).into()),
        ("flush_timeout", seconds(settings.flush_timeout)),
        ("log_interval", seconds(settings.log_interval)),
        ("lease", seconds(settings.lease)),
        ("poll", seconds(settings.poll)),
        ("behind_max", settings.behind_max.to_string()),
        ("backoff_base", format!("{} ms", settings.backoff_base.as_millis())),
        ("backoff_max", seconds(settings.backoff_max)),
        ("large_bytes", format!("{} KiB", settings.large_bytes >> 10)),
        ("pulse", settings.pulse.map_or_else(|| "off".to_owned(), seconds)),
    ] {
        assert_eq!(documented(knob), effective, "{knob}");
    }
}

/// Each mutant makes one of the scenarios fail; without one they pass.
#[test]
fn mutants_are_caught() {
    let runs = |scenario: &str, mutant: &str| {
        let mut command = crate::support::this::test(scenario);
        command.env("HAPAX_MUTANT", mutant);
        command.output().unwrap().status.success()
    };
    for (scenario, mutants) in [
        ("an_outage_of_the_bus_makes_nobody_behind", &["checkpoint before ack"][..]),
        ("everything_comes_once_and_in_order", &["publish out of order"]),
        ("t40_a_hole_is_waited_for", &["skip a hole at once"]),
    ] {
        assert!(runs(scenario, "none"), "{scenario} holds");
        for mutant in mutants {
            assert!(!runs(scenario, mutant), "{scenario} does not notice: {mutant}");
        }
    }
}

/// A relay is told to stop while it asks for leadership, and is granted it: it releases it, and the next one leads at
/// once.
#[tokio::test]
async fn leadership_that_is_granted_during_a_stop_is_released() {
    let journal = Arc::new(OddJournal::default());
    journal.lead_ms.store(300, Ordering::SeqCst);
    let mut settings = settings();
    settings.lease = Duration::from_secs(3600);
    let relay = start(journal.clone(), &bus().await, settings);
    let end = tokio::time::Instant::now() + Duration::from_secs(60);
    while journal.inner.relays().await.unwrap().is_empty() {
        assert!(tokio::time::Instant::now() < end, "it never asked");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    relay.stop().await;
    let next = Owner::new("next").unwrap();
    let answer = journal.inner.acquire_leadership(&name(), &next, Duration::from_secs(60)).await.unwrap();
    assert!(matches!(answer, Leadership::Acquired { .. }), "{answer:?}");
}
