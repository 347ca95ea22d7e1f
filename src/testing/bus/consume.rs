//! Clauses 4, 5, 8, 9 and 13: one member, where it begins, what it commits, pauses and seeks, and what it is told of
//! removed records.

use std::ops::Range;
use std::task::Poll;
use std::time::Duration;

use super::BusHarness;
use super::kit::{Recorder, Stage, until};
use crate::bus::{Bus, Partition, Start};

/// A new member goes on where the group was.
pub async fn b4_a_group_goes_on_at_its_commit<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    let partition = stage.partition(0);
    stage.publish_some(10).await;
    let mut recorder = stage.member("a").await;
    until(&mut recorder, "all records", |recorder| recorder.records.len() >= 10).await;
    let assigned = recorder.assigned(&partition);
    recorder.commit(&assigned, 4).await.unwrap();
    recorder.leave().await;
    let mut recorder = stage.member("b").await;
    until(&mut recorder, "the rest", |recorder| recorder.records.len() >= 6).await;
    assert_eq!(recorder.offsets(&partition), [4, 5, 6, 7, 8, 9]);
    recorder.leave().await;
}

/// Without a commit, `Earliest` is the oldest record there is.
pub async fn b4_earliest_begins_with_the_oldest<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    stage.publish_some(4).await;
    harness.remove_below(&stage.partition(0), 2).await;
    let mut recorder = stage.member("a").await;
    until(&mut recorder, "the oldest", |recorder| recorder.records.len() >= 2).await;
    assert_eq!(recorder.offsets(&stage.partition(0)), [2, 3]);
    assert_eq!(stage.committed(0).await, None, "reading is not committing");
    recorder.leave().await;
}

/// `Latest` is what comes once the partition is given.
pub async fn b4_latest_begins_with_what_comes<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    stage.publish_some(4).await;
    let mut subscription = stage.subscription();
    subscription.start = Start::Latest;
    let mut recorder = Recorder::new("a", stage.bus.subscribe(subscription).await.unwrap());
    until(&mut recorder, "the partition", |recorder| recorder.held.len() == 1).await;
    stage.publish_some(2).await;
    until(&mut recorder, "what comes", |recorder| recorder.records.len() >= 2).await;
    assert_eq!(recorder.offsets(&stage.partition(0)), [4, 5]);
    recorder.leave().await;
}

/// Retention has passed what the group committed: it goes on with the oldest that is left, wherever it began once.
pub async fn b4_latest_goes_on_with_what_is_left<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    let partition = stage.partition(0);
    let mut subscription = stage.subscription();
    subscription.start = Start::Latest;
    let mut recorder = Recorder::new("a", stage.bus.subscribe(subscription.clone()).await.unwrap());
    until(&mut recorder, "the partition", |recorder| recorder.held.len() == 1).await;
    stage.publish_some(8).await;
    until(&mut recorder, "what comes", |recorder| recorder.records.len() >= 8).await;
    let assigned = recorder.assigned(&partition);
    recorder.commit(&assigned, 2).await.unwrap();
    recorder.leave().await;
    harness.remove_below(&partition, 5).await;
    let mut recorder = Recorder::new("b", stage.bus.subscribe(subscription).await.unwrap());
    until(&mut recorder, "what is left", |recorder| recorder.records.len() >= 3).await;
    assert_eq!(recorder.offsets(&partition), [5, 6, 7]);
    until(&mut recorder, "removed partitions to be reported", |recorder| !recorder.removed.is_empty()).await;
    assert_eq!(recorder.removed, [(partition, 2..5)]);
    recorder.leave().await;
}

/// Once a group has committed something of a topic, a partition of which it has committed nothing begins at its beginning:
/// it was added since, or never finished.
pub async fn b4_latest_of_a_group_that_has_begun_begins_at_the_beginning<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 2).await;
    stage.fill(3).await;
    let mut recorder = stage.member("a").await;
    until(&mut recorder, "both partitions", |recorder| recorder.held.len() == 2).await;
    let (_, end) = stage.bus.range(&stage.partition(0)).await.unwrap();
    let assigned = recorder.assigned(&stage.partition(0));
    recorder.commit(&assigned, end).await.unwrap();
    recorder.leave().await;
    let mut subscription = stage.subscription();
    subscription.start = Start::Latest;
    let mut recorder = Recorder::new("b", stage.bus.subscribe(subscription).await.unwrap());
    let (_, end) = stage.bus.range(&stage.partition(1)).await.unwrap();
    until(&mut recorder, "all of the other one", |recorder| recorder.records.len() >= end as usize).await;
    assert_eq!(recorder.offsets(&stage.partition(1)), (0..end).collect::<Vec<_>>());
    assert!(recorder.offsets(&stage.partition(0)).is_empty(), "what was committed stays committed");
    recorder.leave().await;
}

/// `Refuse` is an error until something was committed.
pub async fn b4_refuse_does_not_begin<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    stage.publish_some(4).await;
    let mut subscription = stage.subscription();
    subscription.start = Start::Refuse;
    let refused = async {
        let mut subscriber = stage.bus.subscribe(subscription.clone()).await?;
        for _ in 0..4 {
            let event = subscriber.next().await?;
            assert!(!matches!(event, crate::bus::BusEvent::Records(_)), "it began by itself: {event:?}");
        }
        subscriber.leave().await
    };
    let refused = tokio::time::timeout(super::DEADLINE, refused).await.expect("an answer");
    refused.expect_err("nothing was committed");
    let mut recorder = stage.member("a").await;
    until(&mut recorder, "all records", |recorder| recorder.records.len() >= 4).await;
    let assigned = recorder.assigned(&stage.partition(0));
    recorder.commit(&assigned, 3).await.unwrap();
    recorder.leave().await;
    let mut recorder = Recorder::new("b", stage.bus.subscribe(subscription).await.unwrap());
    until(&mut recorder, "the last one", |recorder| !recorder.records.is_empty()).await;
    assert_eq!(recorder.offsets(&stage.partition(0)), [3]);
    recorder.leave().await;
}

/// What is committed is what others see as committed.
pub async fn b5_a_commit_is_the_offset_after<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 2).await;
    stage.fill(3).await;
    let mut recorder = stage.member("a").await;
    until(&mut recorder, "both partitions", |recorder| recorder.held.len() == 2).await;
    assert_eq!(stage.committed(0).await, None);
    let (zero, one) = (recorder.assigned(&stage.partition(0)), recorder.assigned(&stage.partition(1)));
    let answers = recorder.subscriber().commit(&[(one.clone(), 2), (zero, 3)]).await.unwrap();
    assert!(answers.len() == 2 && answers.iter().all(Result::is_ok), "{answers:?}");
    let other = harness.open().await;
    assert_eq!(other.committed(&stage.group, &stage.partition(0)).await.unwrap(), Some(3));
    assert_eq!(other.committed(&stage.group, &stage.partition(1)).await.unwrap(), Some(2));
    assert_eq!(other.committed(&harness.unique("group"), &stage.partition(1)).await.unwrap(), None);
    recorder.commit(&one, 3).await.unwrap();
    assert_eq!(stage.committed(1).await, Some(3));
    recorder.leave().await;
}

/// The paused one waits, the other one does not.
pub async fn b8_a_paused_partition_is_silent_and_others_go_on<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 2).await;
    let (paused, other) = (stage.partition(0), stage.partition(1));
    let mut recorder = stage.member("a").await;
    until(&mut recorder, "both partitions", |recorder| recorder.held.len() == 2).await;
    let assigned = recorder.assigned(&paused);
    recorder.subscriber().pause(std::slice::from_ref(&assigned)).await.unwrap();
    stage.fill(5).await;
    let (_, end) = stage.bus.range(&other).await.unwrap();
    until(&mut recorder, "the other partition", |recorder| {
        recorder.offsets(&other).last() == Some(&(end - 1))
    })
    .await;
    assert!(
        recorder.offsets(&paused).is_empty(),
        "a paused partition delivers {:?}",
        recorder.offsets(&paused)
    );
    recorder.subscriber().resume(std::slice::from_ref(&assigned)).await.unwrap();
    let (_, end) = stage.bus.range(&paused).await.unwrap();
    until(&mut recorder, "the resumed one", |recorder| recorder.offsets(&paused).last() == Some(&(end - 1)))
        .await;
    assert_eq!(recorder.offsets(&paused), (0..end).collect::<Vec<_>>());
    recorder.leave().await;
}

/// Everything paused for longer than a session: it is still a member, in the same epoch.
pub async fn b8_membership_survives_a_pause<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    let partition = stage.partition(0);
    stage.publish_some(3).await;
    let mut recorder = stage.member("a").await;
    until(&mut recorder, "all records", |recorder| recorder.records.len() >= 3).await;
    let assigned = recorder.assigned(&partition);
    recorder.subscriber().pause(std::slice::from_ref(&assigned)).await.unwrap();
    stage.publish_some(3).await;
    let paused = tokio::time::Instant::now();
    let long = harness.session() * 2 + Duration::from_millis(100);
    until(&mut recorder, "time to pass", |_| paused.elapsed() > long).await;
    assert_eq!(recorder.records.len(), 3);
    recorder.commit(&assigned, 3).await.expect("it is still a member");
    recorder.subscriber().resume(std::slice::from_ref(&assigned)).await.unwrap();
    until(&mut recorder, "the rest", |recorder| recorder.records.len() >= 6).await;
    assert_eq!(recorder.assigned(&partition), assigned, "the epoch is the same");
    assert_eq!(recorder.lost, []);
    recorder.leave().await;
}

/// Back, forth, and while it is paused.
pub async fn b9_seek_goes_back_and_forth<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    let partition = stage.partition(0);
    stage.publish_some(6).await;
    let mut recorder = stage.member("a").await;
    until(&mut recorder, "all records", |recorder| recorder.records.len() >= 6).await;
    recorder.seek(&partition, 2).await;
    until(&mut recorder, "them again", |recorder| recorder.records.len() >= 10).await;
    let assigned = recorder.assigned(&partition);
    recorder.subscriber().pause(std::slice::from_ref(&assigned)).await.unwrap();
    recorder.seek(&partition, 5).await;
    recorder.subscriber().resume(std::slice::from_ref(&assigned)).await.unwrap();
    until(&mut recorder, "the last one again", |recorder| recorder.records.len() >= 11).await;
    assert_eq!(recorder.offsets(&partition), [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 5]);
    recorder.leave().await;
}

/// Where there is nothing any more, the next above is next.
pub async fn b9_seek_to_what_was_removed_goes_on_above<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    let partition = stage.partition(0);
    stage.publish_some(6).await;
    let mut recorder = stage.member("a").await;
    until(&mut recorder, "all records", |recorder| recorder.records.len() >= 6).await;
    harness.remove_below(&partition, 3).await;
    recorder.seek(&partition, 1).await;
    until(&mut recorder, "what is left", |recorder| recorder.records.len() >= 9).await;
    assert_eq!(recorder.offsets(&partition), [0, 1, 2, 3, 4, 5, 3, 4, 5]);
    recorder.leave().await;
}

/// Of a member that comes later than retention, and after seeks: of one whose partition was paused
/// meanwhile, and of one that has received what was removed. (What a member has in memory is delivered.)
pub async fn b13_what_was_removed_is_reported_before_what_lies_behind_it<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    let partition = stage.behind_retention().await;
    let mut recorder = stage.member("b").await;
    reported_first(&mut recorder, &partition, 1..4).await;
    until(&mut recorder, "what is left", |recorder| recorder.records.len() >= 2).await;
    let assigned = [recorder.assigned(&partition)];
    recorder.subscriber().pause(&assigned).await.unwrap();
    stage.publish_some(6).await;
    harness.remove_below(&partition, 10).await;
    recorder.seek(&partition, 6).await;
    recorder.subscriber().resume(&assigned).await.unwrap();
    reported_first(&mut recorder, &partition, 6..10).await;
    until(&mut recorder, "what is left", |recorder| recorder.records.len() >= 4).await;
    recorder.seek(&partition, 3).await;
    reported_first(&mut recorder, &partition, 3..10).await;
    until(&mut recorder, "it again", |recorder| recorder.records.len() >= 6).await;
    assert_eq!(recorder.offsets(&partition), [4, 5, 10, 11, 10, 11]);
    assert_eq!(recorder.removed.len(), 3, "each is reported once");
    recorder.leave().await;
}

/// Asserts that the member's next event is what was removed.
async fn reported_first(recorder: &mut Recorder, partition: &Partition, gone: Range<i64>) {
    let before = (recorder.records.len(), recorder.removed.len());
    until(recorder, "what comes first", |recorder| {
        (recorder.records.len(), recorder.removed.len()) != before
    })
    .await;
    assert_eq!(recorder.records.len(), before.0, "records come before the removal is reported");
    assert_eq!(recorder.removed.last(), Some(&(partition.clone(), gone)));
}

/// A call of `next` that is dropped loses nothing.
pub async fn next_can_be_cancelled<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    let partition = stage.partition(0);
    let mut recorder = stage.member("a").await;
    for _ in 0..20 {
        stage.publish_some(1).await;
        for polls in 1..=3 {
            let next = polled(polls, recorder.subscriber().next());
            // Dropped at whatever point it has come to; what it returns in time is kept.
            if let Ok(Some(event)) = tokio::time::timeout(Duration::from_millis(5), next).await {
                recorder.take(event.unwrap()).await;
            }
        }
    }
    stage.publish_some(1).await;
    until(&mut recorder, "the last record", |recorder| recorder.offsets(&partition).last() == Some(&20))
        .await;
    assert_eq!(recorder.offsets(&partition), (0..=20).collect::<Vec<_>>());
    recorder.leave().await;
}

/// Gives a future so many polls.
async fn polled<F: Future>(mut polls: u32, future: F) -> Option<F::Output> {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => {
            polls -= 1;
            if polls == 0 { Poll::Ready(None) } else { Poll::Pending }
        }
    })
    .await
}
