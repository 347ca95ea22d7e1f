//! The async side of a member.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaErrorCode as Code;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use tokio::sync::oneshot;

use super::begin::metadata;
use super::inbox::{Inbox, Seek};
use super::link::{code, meaning, passes_soon};
use super::member::{
    End, IDLE, Member, MemberConsumer, pause_fetching, resume_fetching, run, to_list, unassign,
};
use crate::bus::{Assignment, BusEvent, Partition, Subscriber};
use crate::error::{Error, Result};
use crate::id::Topic;

/// How long to wait before retrying a commit that failed because of a rebalance.
const AGAIN: Duration = Duration::from_millis(50);

/// How often in a row a member may be expelled without an assignment before the subscriber gets an
/// error.
const FRUITLESS_MAX: u32 = 5;
/// How long to wait before joining again, for each time in a row; and at most.
const FRUITLESS_WAIT: Duration = Duration::from_millis(200);
const FRUITLESS_WAIT_MAX: Duration = Duration::from_secs(5);

/// The member's current client. `None` once it has left.
type Slot = Arc<Mutex<Option<Arc<MemberConsumer>>>>;

pub(super) struct KafkaSubscriber {
    slot: Slot,
    inbox: Arc<Inbox>,
    group: Arc<str>,
    answer_timeout: Duration,
    /// The number of partitions each topic had when the group started, if it started at the end.
    began: Arc<Mutex<BTreeMap<Topic, i32>>>,
    /// Completes when the thread has ended and the group was left.
    left: oneshot::Receiver<()>,
}

impl KafkaSubscriber {
    /// Joins the group. Blocks briefly while librdkafka starts its threads.
    pub(super) fn join(config: ClientConfig, member: Member) -> Result<Self> {
        let (inbox, group, answer_timeout) =
            (member.inbox.clone(), member.group.clone(), member.answer_timeout);
        let began = member.began.clone();
        let consumer = client(&config, &member)?;
        let slot: Slot = Arc::new(Mutex::new(Some(consumer.clone())));
        let (done, left) = oneshot::channel();
        let its_slot = slot.clone();
        std::thread::Builder::new()
            .name("hapax-kafka".into())
            .spawn(move || {
                no_silence(&member.inbox, || be_member(consumer, &config, &member, &its_slot));
                let left_over = its_slot.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(consumer) = left_over {
                    consumer.context().retired.store(true, Ordering::SeqCst);
                    close(consumer);
                }
                let _ = done.send(()); // the receiver may be gone
            })
            .map_err(|e| Error::unavailable("starting the thread of a Kafka member", e))?;
        Ok(KafkaSubscriber { slot, inbox, group, answer_timeout, began, left })
    }

    fn consumer(&self) -> Result<Arc<MemberConsumer>> {
        let slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
        slot.clone().ok_or_else(|| Error::Unavailable {
            what: format!("the group {:?} was left", self.group),
            source: None,
        })
    }

    /// Commits several partitions together. Retries if a rebalance got in the way.
    async fn commit_together(&self, offsets: &[(Assignment, i64)], by: Instant) -> Result<(), Refusal> {
        let list = self.commits(offsets)?;
        let list = Arc::new(list);
        loop {
            for (assigned, _) in offsets {
                self.inbox.check(assigned).map_err(Refusal::All)?;
            }
            let (consumer, list) = (self.consumer().map_err(Refusal::All)?, list.clone());
            // The group has already taken them, but the member does not know yet.
            if consumer.assignment_lost() {
                return Err(Refusal::Some(KafkaError::ConsumerCommit(Code::AssignmentLost)));
            }
            let commit = tokio::task::spawn_blocking(move || consumer.commit(&list, CommitMode::Sync));
            let wait = by.saturating_duration_since(Instant::now());
            let Ok(done) = tokio::time::timeout(wait, commit).await else {
                return Err(Refusal::All(Error::Unavailable {
                    what: format!(
                        "committing for the group {:?}: no answer within {:?}",
                        self.group, self.answer_timeout
                    ),
                    source: None,
                }));
            };
            match done.map_err(|e| Refusal::All(Error::unavailable("committing", e)))? {
                Ok(()) => return Ok(()),
                Err(error) if code(&error).is_some_and(passes_soon) && Instant::now() + AGAIN < by => {
                    tokio::time::sleep(AGAIN).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn commits(&self, offsets: &[(Assignment, i64)]) -> Result<TopicPartitionList, KafkaError> {
        let began = self.began.lock().unwrap_or_else(PoisonError::into_inner);
        let mut list = TopicPartitionList::with_capacity(offsets.len());
        for (Assignment { partition, .. }, offset) in offsets {
            let mut element = list.add_partition(partition.topic.as_str(), partition.number);
            element.set_offset(Offset::Offset(*offset))?;
            if let Some(began) = began.get(&partition.topic) {
                element.set_metadata(metadata(*began));
            }
        }
        Ok(list)
    }

    fn meaning(&self, error: KafkaError) -> Error {
        meaning(format!("committing for the group {:?}", self.group), error)
    }
}

/// A client that joins the group.
fn client(config: &ClientConfig, member: &Member) -> Result<Arc<MemberConsumer>> {
    let joining = |error| meaning(format!("joining the group {:?}", member.group), error);
    let context = Member { retired: Arc::default(), astray: Arc::default(), ..member.clone() };
    let mut consumer = BaseConsumer::from_config_and_context(config, context).map_err(joining)?;
    let wake_up = member.inbox.wake_up.clone();
    consumer.set_nonempty_callback(move || wake_up.wake());
    let topics: Vec<&str> = member.topics.iter().map(crate::id::Topic::as_str).collect();
    consumer.subscribe(&topics).map_err(joining)?;
    Ok(Arc::new(consumer))
}

/// The longest wait for a client to close.
const CLOSE_MAX: Duration = Duration::from_secs(5);

/// Runs a member on its thread until it leaves or fails, replacing its client if necessary.
fn be_member(mut consumer: Arc<MemberConsumer>, config: &ClientConfig, member: &Member, slot: &Slot) {
    let inbox = &member.inbox;
    let mut fruitless = 0;
    let error = loop {
        let epoch = inbox.epoch();
        let end = run(&consumer);
        // A closing client answers rebalances at once and reports nothing.
        consumer.context().retired.store(true, Ordering::SeqCst);
        match end {
            End::Left => break Error::Unavailable { what: "the group was left".into(), source: None },
            End::Over(error) => break error,
            End::Again => {}
        }
        tracing::warn!(target: "hapax::kafka", group = %member.group, "expelled from the group; joining again");
        fruitless = if inbox.epoch() == epoch { fruitless + 1 } else { 0 };
        answer_for_good(&consumer, inbox);
        inbox.lost_all();
        if fruitless >= FRUITLESS_MAX {
            inbox.failed(Error::Unavailable {
                what: format!(
                    "the group {:?} expelled this member {fruitless} times in a row without an assignment",
                    member.group
                ),
                source: None,
            });
        }
        // Close the old client first: two clients with the same `group.instance.id` would fence
        // each other.
        slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        close(consumer);
        // Join again only once the subscriber has taken all events: one that does not call `next`
        // gets no partitions.
        while !inbox.is_leaving() && !inbox.is_heard(member.poll_interval) {
            inbox.wake_up.wait(IDLE);
        }
        wait(inbox, (FRUITLESS_WAIT * fruitless).min(FRUITLESS_WAIT_MAX));
        consumer = match join_again(config, member) {
            Ok(new) => new,
            Err(error) => return inbox.end(error),
        };
        if !inbox.is_leaving() {
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(consumer.clone());
        }
    };
    slot.lock().unwrap_or_else(PoisonError::into_inner).take();
    answer_for_good(&consumer, inbox);
    inbox.lost_all();
    inbox.end(error);
    // Leaves the group, unless a commit is still in flight.
    close(consumer);
}

/// Creates a replacement client. Retries transient errors; only a permanent one ends the
/// subscription.
fn join_again(config: &ClientConfig, member: &Member) -> Result<Arc<MemberConsumer>> {
    loop {
        match client(config, member) {
            Err(error) if error.is_retryable() && !member.inbox.is_leaving() => {
                member.inbox.failed(error);
                wait(&member.inbox, FRUITLESS_WAIT_MAX);
            }
            other => return other,
        }
    }
}

/// Waits, unless the subscriber leaves.
fn wait(inbox: &Inbox, time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end && !inbox.is_leaving() {
        inbox.wake_up.wait(IDLE.min(time));
    }
}

/// Runs the thread's work. If it panics, the subscription ends with an error, so that the
/// subscriber does not wait forever.
fn no_silence(inbox: &Inbox, work: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        inbox.lost_all();
        inbox.end(Error::Corrupt(format!("the thread of a Kafka member panicked: {text}")));
    }
}

/// Closes a client, waiting for a limited time. One that was expelled while partitions were being
/// revoked may never close (librdkafka 2.12, `group.protocol=consumer`). It is out of the group
/// already, so nothing depends on it.
fn close(consumer: Arc<MemberConsumer>) {
    let (done, closed) = std::sync::mpsc::channel();
    let closing = std::thread::Builder::new().name("hapax-kafka-end".into()).spawn(move || {
        drop(consumer);
        let _ = done.send(());
    });
    if closing.is_ok() && closed.recv_timeout(CLOSE_MAX) == Err(RecvTimeoutError::Timeout) {
        tracing::warn!(target: "hapax::kafka", "a Kafka client that its group had removed does not close; continuing with a new client");
    }
}

/// Unassigns revoked partitions before a client is closed: librdkafka would wait for them forever.
fn answer_for_good(consumer: &MemberConsumer, inbox: &Inbox) {
    if let Some(partitions) = inbox.returned(|| true) {
        unassign(consumer, &to_list(&partitions));
    }
}

/// Why a commit of several partitions did not go through.
enum Refusal {
    /// Concerns all of them.
    All(Error),
    /// May concern only one of them.
    Some(KafkaError),
}

impl From<KafkaError> for Refusal {
    fn from(error: KafkaError) -> Self {
        Refusal::Some(error)
    }
}

#[async_trait]
impl Subscriber for KafkaSubscriber {
    async fn next(&mut self) -> Result<BusEvent> {
        self.inbox.next().await
    }

    async fn pause(&mut self, partitions: &[Assignment]) -> Result<()> {
        let _flow = self.inbox.flow();
        let dropped = self.inbox.pause(partitions);
        if dropped.is_empty() {
            return Ok(());
        }
        pause_fetching(&*self.consumer()?, &dropped).map_err(|e| meaning("pausing", e))
    }

    async fn resume(&mut self, partitions: &[Assignment]) -> Result<()> {
        let _flow = self.inbox.flow();
        let fetch_paused = self.inbox.resume(partitions);
        self.inbox.wake_subscriber();
        if fetch_paused.is_empty() {
            return Ok(());
        }
        resume_fetching(&*self.consumer()?, &fetch_paused).map_err(|e| meaning("resuming", e))
    }

    async fn seek(&mut self, partition: &Partition, offset: i64) -> Result<()> {
        if offset < 0 {
            return Err(Error::invalid("offset", format!("{offset} of {partition}; offsets begin at 0")));
        }
        let (answer, answered) = oneshot::channel();
        let by = Instant::now() + self.answer_timeout;
        self.inbox.seek(Seek { partition: partition.clone(), offset, by, answer })?;
        answered.await.unwrap_or_else(|_| {
            Err(Error::Fenced { what: format!("{partition} is not in this member's assignments") })
        })
    }

    async fn commit(&mut self, offsets: &[(Assignment, i64)]) -> Result<Vec<Result<()>>> {
        let mut answers: Vec<Result<()>> = offsets
            .iter()
            .map(|(assigned, offset)| {
                self.inbox.check(assigned)?;
                if *offset < 0 {
                    let problem = format!("{offset} of {}; offsets begin at 0", assigned.partition);
                    return Err(Error::invalid("offset", problem));
                }
                Ok(())
            })
            .collect();
        let ours: Vec<usize> = (0..offsets.len()).filter(|at| answers[*at].is_ok()).collect();
        if ours.is_empty() {
            return Ok(answers);
        }
        let by = Instant::now() + self.answer_timeout;
        // If a partition is named twice, the last offset counts.
        let last = |at: &usize| {
            !ours.iter().any(|other| other > at && offsets[*other].0.partition == offsets[*at].0.partition)
        };
        let together: Vec<_> = ours.iter().filter(|at| last(at)).map(|at| offsets[*at].clone()).collect();
        match self.commit_together(&together, by).await {
            Ok(()) => {}
            Err(Refusal::All(error)) => ours.iter().for_each(|at| answers[*at] = Err(error.copy())),
            // librdkafka reports only that one of them failed, so commit each separately.
            Err(Refusal::Some(error)) => {
                for at in &ours {
                    answers[*at] = if together.len() == 1 {
                        Err(self.meaning(error.clone()))
                    } else {
                        match self.commit_together(&offsets[*at..=*at], by).await {
                            Ok(()) => Ok(()),
                            Err(Refusal::All(error)) => Err(error),
                            Err(Refusal::Some(error)) => Err(self.meaning(error)),
                        }
                    };
                }
            }
        }
        Ok(answers)
    }

    async fn release(&mut self, partitions: &[Assignment]) -> Result<()> {
        self.inbox.release(partitions);
        Ok(())
    }

    async fn leave(mut self: Box<Self>) -> Result<()> {
        *self.slot.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.inbox.leave();
        match tokio::time::timeout(self.answer_timeout, &mut self.left).await {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::Unavailable {
                what: format!(
                    "leaving the group {:?}: no answer within {:?}; the broker removes this member when its session times out",
                    self.group, self.answer_timeout
                ),
                source: None,
            }),
        }
    }
}

impl Drop for KafkaSubscriber {
    fn drop(&mut self) {
        // Dropping the last reference to the consumer closes it, which blocks. Let that happen on
        // the thread.
        *self.slot.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.inbox.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If anything panics on a member's thread, the subscriber gets an error that says the
    /// subscription has ended.
    #[tokio::test]
    async fn t73_a_panic_of_the_polling_thread_ends_the_subscription() {
        let inbox = Arc::new(Inbox::new(10, 1000, Arc::default()));
        let partition = crate::bus::Partition { topic: Topic::new("t").unwrap(), number: 0 };
        inbox.assigned(vec![(partition, None)]);
        let its = inbox.clone();
        std::thread::spawn(move || no_silence(&its, || panic!("out of order"))).join().unwrap();
        assert!(matches!(inbox.next().await, Ok(BusEvent::Assigned(_))));
        assert!(matches!(inbox.next().await, Ok(BusEvent::Lost(_))));
        for _ in 0..2 {
            let error = inbox.next().await.expect_err("it is over");
            assert!(!error.is_retryable() && error.to_string().contains("out of order"), "{error}");
        }
    }
}
