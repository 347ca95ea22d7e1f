//! Records sent to the bus, and their acknowledgements, which arrive one by one.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::behind::aggregate_of;
use crate::bus::{Bus, Record};
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;
use crate::journal::{AggregateOf, Stored, bytes_of};

/// The index of an event in its batch, and the bus's answer to it.
type Answer = (usize, Result<Origin>);

/// The part of a batch that may be in flight at the same time.
#[derive(Debug, Default)]
pub(super) struct InFlightPart {
    pub(super) topics: HashMap<Topic, (Vec<usize>, Vec<Record>)>,
}

/// A part that was sent to the bus. Dropping it stops sending.
#[derive(Debug)]
pub(super) struct UnderWay {
    /// The indexes in the batch.
    pub(super) places: Vec<usize>,
    /// How many are unanswered.
    pub(super) open: usize,
    pub(super) began: Instant,
    answers: UnboundedReceiver<Answer>,
    _tasks: JoinSet<()>,
}

impl UnderWay {
    /// Sends a part.
    pub(super) fn begin(bus: &Arc<dyn Bus>, part: InFlightPart) -> Self {
        let (sender, answers) = unbounded_channel();
        let (mut tasks, mut all) = (JoinSet::new(), Vec::new());
        for (topic, (places, records)) in part.topics {
            all.extend_from_slice(&places);
            tasks.spawn(publish(Arc::clone(bus), topic, places, records, sender.clone()));
        }
        UnderWay { open: all.len(), places: all, began: Instant::now(), answers, _tasks: tasks }
    }

    /// Appends the next answers to `answers`. Cancel safe.
    pub(super) async fn next(&mut self, answers: &mut Vec<Answer>) {
        if self.answers.recv_many(answers, self.open.max(1)).await == 0 {
            // All senders are gone: the bus dropped them without answering.
            let known: std::collections::HashSet<usize> = answers.iter().map(|(place, _)| *place).collect();
            let lost = self.places.iter().filter(|place| !known.contains(place));
            answers.extend(lost.map(|&place| (place, Err(unanswered()))));
            self.open = 0;
            return;
        }
        self.open = self.places.len() - answers.len();
    }
}

fn unanswered() -> Error {
    Error::Unavailable { what: "publishing: the bus did not answer".to_owned(), source: None }
}

async fn publish(
    bus: Arc<dyn Bus>,
    topic: Topic,
    places: Vec<usize>,
    records: Vec<Record>,
    sender: UnboundedSender<Answer>,
) {
    let mut open = vec![true; records.len()];
    let published = bus
        .publish_each(&topic, &records, &mut |at, answer| {
            if std::mem::take(&mut open[at]) {
                let _ = sender.send((places[at], answer));
            }
        })
        .await;
    let error = published.err().unwrap_or_else(unanswered);
    for (place, _) in places.into_iter().zip(open).filter(|(_, open)| *open) {
        let _ = sender.send((place, Err(error.copy())));
    }
}

/// Events of aggregates with unanswered events, and the answers so far, in order.
#[derive(Debug)]
pub(super) struct Unanswered {
    pub(super) under_way: UnderWay,
    pub(super) open: Vec<(usize, Stored, Option<Result<Origin>>)>,
}

/// The relay pauses at this many unanswered bytes or events, to leave room in the bus's queue for
/// other producers.
const BYTES_MAX: usize = 32 << 20;
const EVENTS_MAX: usize = 10_000;
/// How many aggregates may catch up at a time. Those that failed repeatedly share half of the
/// places, so that they do not keep the others out.
const CATCH_UP_MAX: usize = 64;

/// Records that the relay no longer waits for. Their answers are collected as they arrive.
#[derive(Debug)]
pub(super) struct Awaited {
    all: Size,
    /// The part of `all` that is catching up.
    catching_up: Size,
    tasks: JoinSet<(Size, bool)>,
    sender: UnboundedSender<Answered>,
    answered: UnboundedReceiver<Answered>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Size {
    parts: usize,
    events: usize,
    bytes: usize,
}

impl Size {
    fn of(unanswered: &Unanswered) -> Self {
        let bytes = unanswered.open.iter().map(|(_, stored, _)| bytes_of(&stored.event)).sum();
        Size { parts: 1, events: unanswered.open.len(), bytes }
    }

    fn add(&mut self, other: Size) {
        self.parts += other.parts;
        self.events += other.events;
        self.bytes += other.bytes;
    }

    fn take_off(&mut self, other: Size) {
        self.parts -= other.parts;
        self.events -= other.events;
        self.bytes -= other.bytes;
    }
}

impl Default for Awaited {
    fn default() -> Self {
        let (sender, answered) = unbounded_channel();
        Awaited {
            all: Size::default(),
            catching_up: Size::default(),
            tasks: JoinSet::new(),
            sender,
            answered,
        }
    }
}

impl Awaited {
    pub(super) fn add(&mut self, unanswered: Unanswered, catches_up: bool) {
        let size = Size::of(&unanswered);
        self.all.add(size);
        if catches_up {
            self.catching_up.add(size);
        }
        let settling = unanswered.settle(self.sender.clone());
        self.tasks.spawn(async move {
            settling.await;
            (size, catches_up)
        });
    }

    /// Whether the relay may leave no more records unanswered.
    pub(super) fn is_full(&self) -> bool {
        self.all.bytes >= BYTES_MAX || self.all.events >= EVENTS_MAX
    }

    /// How many more events may start to catch up. All that catch up count against one batch,
    /// because a crash may repeat them. An aggregate that failed repeatedly (`again`) is tried with
    /// one event.
    pub(super) fn room(&self, batch_max: usize, again: bool) -> usize {
        let places = if again { CATCH_UP_MAX / 2 } else { CATCH_UP_MAX };
        if self.is_full() || self.catching_up.parts >= places {
            return 0;
        }
        let room = batch_max.saturating_sub(self.catching_up.events);
        if again { room.min(1) } else { room }
    }

    /// Waits for the next answered aggregate. Cancel safe.
    pub(super) async fn next(&mut self) -> Result<Option<Answered>> {
        loop {
            tokio::select! {
                biased;
                answered = self.answered.recv() => return Ok(answered),
                Some(ended) = self.tasks.join_next() => self.on_ended(ended)?,
            }
        }
    }

    /// The aggregates answered so far.
    pub(super) fn take_answered(&mut self) -> Result<Vec<Answered>> {
        while let Some(ended) = self.tasks.try_join_next() {
            self.on_ended(ended)?;
        }
        Ok(std::iter::from_fn(|| self.answered.try_recv().ok()).collect())
    }

    /// A panic here is a bug in hapax, and the answers for its aggregates are lost.
    fn on_ended(&mut self, ended: std::result::Result<(Size, bool), JoinError>) -> Result<()> {
        let bad = |error| Error::Corrupt(format!("a task of the relay ended badly: {error}"));
        let (size, caught_up) = ended.map_err(bad)?;
        self.all.take_off(size);
        if caught_up {
            self.catching_up.take_off(size);
        }
        Ok(())
    }
}

/// The result for an aggregate whose answers arrived late.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) of: AggregateOf,
    /// Events that are on the bus together with all their predecessors.
    pub(super) acknowledged: Vec<Stored>,
    /// The first event that is not, and why.
    pub(super) failed: Option<(Stored, Error)>,
    pub(super) began: Instant,
}

impl Unanswered {
    /// The first event of each aggregate, in order.
    pub(super) fn firsts(&self) -> Vec<(AggregateOf, Stored)> {
        let mut seen = std::collections::HashSet::new();
        let all = self.open.iter().filter_map(|(_, stored, _)| Some((aggregate_of(stored)?, stored)));
        all.filter(|(of, _)| seen.insert(of.clone())).map(|(of, stored)| (of, stored.clone())).collect()
    }

    /// Waits for the answers, and reports each aggregate once all of its events are answered.
    pub(super) async fn settle(self, sender: UnboundedSender<Answered>) {
        crate::crash_point!("relay.settling");
        let Unanswered { mut under_way, open } = self;
        let mut aggregates: HashMap<AggregateOf, Known> = HashMap::new();
        let mut places: HashMap<usize, AggregateOf> = HashMap::new();
        let mut missing: HashMap<AggregateOf, usize> = HashMap::new();
        for (place, stored, answer) in open {
            let Some(of) = aggregate_of(&stored) else { continue };
            if answer.is_none() {
                places.insert(place, of.clone());
                *missing.entry(of.clone()).or_default() += 1;
            }
            aggregates.entry(of).or_default().insert(place, (stored, answer));
        }
        // Wait only for the missing answers.
        under_way.places.retain(|place| places.contains_key(place));
        under_way.open = under_way.places.len();
        let (mut answers, mut judged) = (Vec::new(), 0);
        while judged < places.len() {
            under_way.next(&mut answers).await;
            for (place, answer) in &mut answers[judged..] {
                let Some(of) = places.get(place) else { continue };
                let answer = std::mem::replace(answer, Err(unanswered()));
                if let Some((_, known)) = aggregates.get_mut(of).and_then(|all| all.get_mut(place)) {
                    *known = Some(answer);
                }
                if let Some(left) = missing.get_mut(of) {
                    *left -= 1;
                    if *left == 0
                        && let Some(all) = aggregates.remove(of)
                    {
                        let _ = sender.send(judge(of.clone(), all, under_way.began));
                    }
                }
            }
            judged = answers.len();
        }
    }
}

/// Events of an aggregate by index, with their answers so far.
type Known = BTreeMap<usize, (Stored, Option<Result<Origin>>)>;

/// Splits the events at the first failure.
fn judge(of: AggregateOf, all: Known, began: Instant) -> Answered {
    let (mut acknowledged, mut failed) = (Vec::new(), None);
    for (stored, answer) in all.into_values() {
        match answer.unwrap_or_else(|| Err(unanswered())) {
            Ok(_) => acknowledged.push(stored),
            Err(error) => {
                failed = Some((stored, error));
                break;
            }
        }
    }
    Answered { of, acknowledged, failed, began }
}
