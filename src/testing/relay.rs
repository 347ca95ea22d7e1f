//! Tools to break a relay's bus and journal, and a witness that reads what came out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::bus::{
    Bus, BusEvent, Capabilities, OnAnswer, Partition, Pulse, Received, Record, Subscriber, Subscription,
    TopicInfo, TopicSettings,
};
use crate::clock::Time;
use crate::consumer::Decoder;
use crate::error::{Error, Result};
use crate::event::{Event, Origin};
use crate::id::{Aggregate, EventId, Owner, RelayName, Tenant, Topic};
use crate::journal::{
    AggregateOf, Append, Appended, Checkpoint, JournalCapabilities, JournalSweep, Leadership, MemoryJournal,
    Page, Position, ReadBatch, RelayState, Stored,
};
use crate::ledger::Token;
use crate::testing::forward::journal_over;

/// What becomes of a record: none, it is published.
pub type Fault = Box<dyn FnMut(&Record) -> Option<Error> + Send>;

/// Whether a record is slow.
type Slow = Box<dyn Fn(&Record) -> bool + Send>;

/// A bus that refuses records, or does not answer, when the test says so.
pub struct FaultyBus {
    inner: Arc<dyn Bus>,
    fault: Mutex<Fault>,
    silent: watch::Sender<bool>,
    slow: Mutex<Slow>,
    /// How often the slow ones were let go.
    let_go: watch::Sender<u32>,
    /// How long it takes to publish what goes by key, in milliseconds. What goes to a partition overtakes it.
    pub late_ms: AtomicU64,
}

impl FaultyBus {
    /// A bus over another, without faults yet.
    pub fn new(inner: Arc<dyn Bus>) -> Self {
        FaultyBus {
            inner,
            fault: Mutex::new(Box::new(|_| None)),
            silent: watch::channel(false).0,
            slow: Mutex::new(Box::new(|_| false)),
            let_go: watch::channel(0).0,
            late_ms: AtomicU64::new(0),
        }
    }

    /// Faults from now on.
    pub fn fail(&self, fault: impl FnMut(&Record) -> Option<Error> + Send + 'static) {
        *self.fault.lock().unwrap() = Box::new(fault);
    }

    /// No faults from now on.
    pub fn heal(&self) {
        self.fail(|_| None);
    }

    /// These records are not published, nor answered, before they are [let go](FaultyBus::let_go).
    pub fn slow(&self, slow: impl Fn(&Record) -> bool + Send + 'static) {
        *self.slow.lock().unwrap() = Box::new(slow);
    }

    /// Publishes what was slow; nothing is from now on.
    pub fn let_go(&self) {
        self.slow(|_| false);
        self.let_go.send_modify(|times| *times += 1);
    }

    /// Whether `publish` does not answer.
    pub fn silence(&self, silent: bool) {
        self.silent.send_replace(silent);
    }
}

/// The bus does not answer.
pub fn away() -> Error {
    Error::Unavailable { what: "a fault the test ordered".into(), source: None }
}

/// The bus will never take it.
pub fn too_large() -> Error {
    Error::invalid("record", "it is larger than the test allows")
}

#[async_trait]
impl Bus for FaultyBus {
    async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        let mut silent = self.silent.subscribe();
        let _ = silent.wait_for(|silent| !silent).await;
        let mut answers = Vec::with_capacity(records.len());
        for record in records {
            let fault = (self.fault.lock().unwrap())(record);
            answers.push(match fault {
                Some(error) => Err(error),
                None => self.inner.publish(topic, std::slice::from_ref(record)).await?.remove(0),
            });
        }
        Ok(answers)
    }
    async fn publish_each(&self, topic: &Topic, records: &[Record], on_answer: OnAnswer<'_>) -> Result<()> {
        let mut let_go = self.let_go.subscribe();
        let _ = let_go.borrow_and_update();
        let late_ms = self.late_ms.load(Ordering::SeqCst);
        if late_ms > 0 {
            tokio::time::sleep(Duration::from_millis(late_ms)).await;
        }
        let is_slow: Vec<bool> = {
            let slow = self.slow.lock().unwrap();
            records.iter().map(&*slow).collect()
        };
        for slow in [false, true] {
            if slow && is_slow.contains(&true) {
                let _ = let_go.changed().await;
            }
            for (place, record) in records.iter().enumerate().filter(|(place, _)| is_slow[*place] == slow) {
                on_answer(place, self.publish(topic, std::slice::from_ref(record)).await?.remove(0));
            }
        }
        Ok(())
    }
    async fn publish_to(&self, partition: &Partition, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        let mut silent = self.silent.subscribe();
        let _ = silent.wait_for(|silent| !silent).await;
        let mut answers = Vec::with_capacity(records.len());
        for record in records {
            let fault = (self.fault.lock().unwrap())(record);
            answers.push(match fault {
                Some(error) => Err(error),
                None => self.inner.publish_to(partition, std::slice::from_ref(record)).await?.remove(0),
            });
        }
        Ok(answers)
    }
    async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Subscriber>> {
        self.inner.subscribe(subscription).await
    }
    async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> Result<bool> {
        self.inner.create_topic(topic, settings).await
    }
    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        self.inner.topic(topic).await
    }
    async fn range(&self, partition: &Partition) -> Result<(i64, i64)> {
        self.inner.range(partition).await
    }
    async fn committed(&self, group: &str, partition: &Partition) -> Result<Option<i64>> {
        self.inner.committed(group, partition).await
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

/// A journal in memory whose events can be hidden for a while: they are holes.
#[derive(Default)]
pub struct OddJournal {
    /// What is in it.
    pub inner: MemoryJournal,
    hidden: Mutex<BTreeSet<u64>>,
    /// How often it was read.
    pub reads: AtomicU64,
    /// How many events were read, by position or by aggregate.
    pub events_read: AtomicU64,
    /// How late the answer to a candidate is, in milliseconds.
    pub lead_ms: AtomicU64,
    /// So many saves do not answer.
    pub saves_failing: AtomicU32,
    /// Whether it cannot say how far it is.
    pub no_horizon: AtomicBool,
    /// What someone else rewinds right after the next look at the relays.
    pub meddling: Mutex<Option<(RelayName, Checkpoint)>>,
}

impl OddJournal {
    /// Hides events: their writers have not committed.
    pub fn hide(&self, positions: impl IntoIterator<Item = u64>) {
        self.hidden.lock().unwrap().extend(positions);
    }

    /// Everything is there now.
    pub fn show(&self) {
        self.hidden.lock().unwrap().clear();
    }

    fn is_hidden(&self, stored: &Stored) -> bool {
        self.hidden.lock().unwrap().contains(&stored.position.number())
    }
}

journal_over!(OddJournal {
    async fn append(&self, append: &Append) -> Result<Appended> {
        self.inner.append(append).await
    }
    async fn read_aggregate(
        &self,
        tenant: Option<&Tenant>,
        aggregate: &Aggregate,
        from: u64,
        limit: usize,
    ) -> Result<Page> {
        let mut page = self.inner.read_aggregate(tenant, aggregate, from, limit).await?;
        if let Some(hidden) = page.events.iter().position(|stored| self.is_hidden(stored)) {
            page.events.truncate(hidden);
            page.more = false;
        }
        self.events_read.fetch_add(page.events.len() as u64, Ordering::SeqCst);
        Ok(page)
    }
    async fn read(&self, after: &Position, limit: usize) -> Result<ReadBatch> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let mut batch = self.inner.read(after, limit).await?;
        if let Some(hole) = batch.events.iter().position(|stored| self.is_hidden(stored)) {
            batch.events.truncate(hole);
            batch.next = batch.events.last().map_or_else(|| after.clone(), |last| last.position.clone());
            (batch.at_hole, batch.more) = (true, false);
        }
        self.events_read.fetch_add(batch.events.len() as u64, Ordering::SeqCst);
        Ok(batch)
    }
    async fn find(&self, tenant: Option<&Tenant>, id: &EventId) -> Result<Option<Stored>> {
        self.inner.find(tenant, id).await
    }
    async fn wait(&self, after: &Position, at_most: Duration) -> Result<()> {
        self.inner.wait(after, at_most).await
    }
    async fn sweep(&self, settings: &JournalSweep) -> Result<u64> {
        self.inner.sweep(settings).await
    }
    async fn horizon(&self) -> Result<(Time, Position)> {
        if self.no_horizon.load(Ordering::SeqCst) {
            return Err(Error::Unsupported("a fault the test ordered".into()));
        }
        self.inner.horizon().await
    }
    fn capabilities(&self) -> JournalCapabilities {
        self.inner.capabilities()
    }
} {
    async fn acquire_leadership(
        &self,
        relay: &RelayName,
        owner: &Owner,
        lease: Duration,
    ) -> Result<Leadership> {
        let answer = self.inner.acquire_leadership(relay, owner, lease).await;
        tokio::time::sleep(Duration::from_millis(self.lead_ms.load(Ordering::SeqCst))).await;
        answer
    }
    async fn save(&self, relay: &RelayName, token: Token, checkpoint: &Checkpoint) -> Result<()> {
        let one = |left: u32| left.checked_sub(1);
        if self.saves_failing.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one).is_ok() {
            return Err(away());
        }
        self.inner.save(relay, token, checkpoint).await
    }
    async fn relays(&self) -> Result<Vec<RelayState>> {
        let relays = self.inner.relays().await?;
        let meddling = self.meddling.lock().unwrap().take();
        if let Some((relay, to)) = meddling {
            self.inner.rewind(&relay, &to, None).await?;
        }
        Ok(relays)
    }
});

/// What a witness found on a topic.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Witnessed {
    /// How far each aggregate came, without a gap.
    pub heads: BTreeMap<AggregateOf, u64>,
    /// Different events.
    pub events: usize,
    /// Records that said the same again.
    pub repeats: usize,
}

/// Everything that lies on a topic, each partition's in order, read by nobody the relay knows of.
pub async fn read_topic(bus: &dyn Bus, topic: &Topic) -> Vec<Received> {
    let partitions = bus.topic(topic).await.unwrap().expect("the topic").partitions;
    let mut ends = BTreeMap::new();
    for number in 0..partitions {
        let (from, to) = bus.range(&Partition { topic: topic.clone(), number }).await.unwrap();
        if to > from {
            ends.insert(number, to);
        }
    }
    let group = format!("witness-{}", uuid::Uuid::new_v4().simple());
    let mut member =
        bus.subscribe(Subscription::new(group, [topic.clone()]).unwrap()).await.expect("a witness");
    let mut all = Vec::new();
    while !ends.is_empty() {
        let event = tokio::time::timeout(Duration::from_secs(60), member.next()).await;
        if let BusEvent::Records(records) = event.expect("records within a minute").unwrap() {
            for received in records {
                let origin = &received.origin;
                if ends.get(&origin.partition).is_some_and(|end| origin.offset + 1 >= *end) {
                    ends.remove(&origin.partition);
                }
                all.push(received);
            }
        }
    }
    member.leave().await.unwrap();
    all
}

/// Reads records as a consumer would, and says what is wrong with them: a gap, an order that goes back by anything but an exact repeat.
pub fn witness(records: &[Received]) -> std::result::Result<Witnessed, String> {
    let mut seen: BTreeMap<(AggregateOf, u64), (Event, Option<bytes::Bytes>)> = BTreeMap::new();
    let mut found = Witnessed::default();
    for received in records.iter().filter(|received| !Pulse::is(&received.record)) {
        let event = Decoder::default().decode(received).map_err(|error| error.to_string())?;
        let (Some(aggregate), Some(seq)) = (event.aggregate.clone(), event.seq) else {
            return Err(format!("{} has no aggregate or no seq", event.id));
        };
        let of = AggregateOf { tenant: event.tenant.clone(), aggregate };
        let head = found.heads.entry(of.clone()).or_default();
        if seq > *head + 1 {
            return Err(format!("{of}: seq {seq} after {head} ({:?})", received.origin));
        }
        let key = received.record.key.clone();
        let said = Event { origin: None, ..event };
        if seq == *head + 1 {
            *head = seq;
            found.events += 1;
            seen.insert((of, seq), (said, key));
        } else if seen.get(&(of.clone(), seq)).is_some_and(|before| *before == (said, key)) {
            found.repeats += 1;
        } else {
            return Err(format!("{of}: seq {seq} came again as another event"));
        }
    }
    Ok(found)
}
