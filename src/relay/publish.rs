//! Handing records to the bus, in order, and what their answers mean.

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::answers::{Chunk, Unanswered, UnderWay};
use super::behind::aggregate_of;
use super::leadership::LeadershipHeartbeat;
use super::record::{RecordEncoder, bytes_of};
use super::{End, RelaySettings};
use crate::bus::Bus;
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;
use crate::journal::{AggregateOf, Stored};

/// What came of publishing.
#[derive(Debug, Default)]
pub(super) struct Flushed {
    /// Events (by their place in the batch) that are on the bus, with everything before them of their aggregate.
    pub(super) acknowledged: Vec<usize>,
    /// The first event of each aggregate that is not, and why.
    pub(super) failed: HashMap<AggregateOf, (usize, Error)>,
    /// What is with the bus, not yet answered and not waited for any longer.
    pub(super) unanswered: Vec<Unanswered>,
    /// The aggregates of that.
    open: HashSet<AggregateOf>,
    /// Aggregates of which events were not even handed over, because of those before them.
    pub(super) skipped: HashSet<AggregateOf>,
    /// How many answers were acknowledgements, in whatever order.
    answered: usize,
    /// Nothing of a flush got through although that was no event's fault.
    pub(super) outage: Option<Outage>,
}

impl Flushed {
    /// Whether nothing more of an aggregate may be handed over.
    fn closes(&self, of: &AggregateOf) -> bool {
        self.failed.contains_key(of) || self.open.contains(of)
    }

    fn closes_none(&self) -> bool {
        self.failed.is_empty() && self.open.is_empty()
    }
}

/// The bus takes nothing.
#[derive(Debug)]
pub(super) struct Outage {
    pub(super) error: Error,
    /// Whether all that was tried is of one aggregate, so that it may be the aggregate's place on the bus only.
    pub(super) alone: bool,
}

/// Whether it is the event that the bus refuses, so that trying again is in vain. Anything else may be better in a while.
pub(super) fn is_poison(error: &Error) -> bool {
    matches!(error, Error::Invalid { .. })
}

/// Publishes for one relay.
pub(super) struct Publisher {
    pub(super) bus: Arc<dyn Bus>,
    pub(super) settings: Arc<RelaySettings>,
    pub(super) encoder: RecordEncoder,
    pub(super) stop: watch::Receiver<bool>,
}

impl Publisher {
    /// Publishes events in the order given, of each aggregate only as far as all goes well. `lead` is looked at before each flush.
    /// What is not answered within `patience` is left, if anything else is; `slow` is called if nothing is.
    pub(super) async fn publish(
        &self,
        lead: &LeadershipHeartbeat,
        events: &[Stored],
        patience: Duration,
        slow: &(dyn Fn() + Sync),
    ) -> Result<Flushed, End> {
        let mut flushed = Flushed::default();
        let mut at = 0;
        while at < events.len() {
            let (answered, failed) = (flushed.answered, flushed.failed.len());
            let chunk = self.chunk(events, &mut at, &mut flushed);
            lead.hold().await?;
            crate::crash_point!("relay.before_publish");
            let mut under_way = UnderWay::begin(&self.bus, chunk);
            let answers = self.flush(lead, &mut under_way, patience, slow).await?;
            let fault = answers.iter().find_map(|(_, answer)| {
                answer.as_ref().err().filter(|error| !is_poison(error)).map(Error::copy)
            });
            take(&mut flushed, events, answers, under_way);
            if let Some(error) = fault
                && flushed.answered == answered
            {
                // The rest would fare no better.
                flushed.outage = Some(Outage { error, alone: flushed.failed.len() == failed + 1 });
                break;
            }
        }
        Ok(flushed)
    }

    /// Hands over the first of an aggregate's events without waiting for their answers: those, and how many there are.
    pub(super) async fn begin(
        &self,
        lead: &LeadershipHeartbeat,
        mut events: Vec<Stored>,
    ) -> Result<(Unanswered, usize), End> {
        let mut at = 0;
        let chunk = self.chunk(&events, &mut at, &mut Flushed::default());
        lead.hold().await?;
        crate::crash_point!("relay.before_publish");
        let under_way = UnderWay::begin(&self.bus, chunk);
        events.truncate(at);
        let open = events.into_iter().enumerate().map(|(place, stored)| (place, stored, None)).collect();
        Ok((Unanswered { under_way, open }, at))
    }

    /// The next records that may be under way at once: at most a flush, of each aggregate only in one topic, nothing of an aggregate behind
    /// a large record, and nothing of one that has failed.
    fn chunk(&self, events: &[Stored], at: &mut usize, flushed: &mut Flushed) -> Chunk {
        let mut chunk = Chunk::default();
        let mut last: HashMap<AggregateOf, Topic> = HashMap::new();
        let mut closed: Vec<AggregateOf> = Vec::new();
        let mut count = 0;
        while count < self.settings.flush() && *at < events.len() {
            let stored = &events[*at];
            let watched = self.settings.route.is_some() || !closed.is_empty() || !flushed.closes_none();
            let of = if watched { aggregate_of(stored) } else { None };
            if let Some(of) = &of
                && flushed.closes(of)
            {
                flushed.skipped.insert(of.clone());
                *at += 1;
                continue;
            }
            let topic = self.settings.topic_of(stored);
            if let Some(of) = &of
                && (closed.contains(of) || last.get(of).is_some_and(|before| *before != topic))
            {
                break;
            }
            let record = self.encoder.record(stored);
            if bytes_of(&record) > self.settings.large_bytes {
                closed.extend(aggregate_of(stored));
            }
            if self.settings.route.is_some()
                && let Some(of) = of
            {
                last.insert(of, topic.clone());
            }
            let (places, records) = chunk.topics.entry(topic).or_default();
            places.push(*at);
            records.push(record);
            *at += 1;
            count += 1;
        }
        chunk
    }

    /// Awaits the answers of what is under way: all of them, or as many as patience allows; not longer than the lead is ours, nor, once
    /// a stop is wanted, than the flush timeout.
    async fn flush(
        &self,
        lead: &LeadershipHeartbeat,
        under_way: &mut UnderWay,
        patience: Duration,
        slow: &(dyn Fn() + Sync),
    ) -> Result<Vec<(usize, Result<Origin>)>, End> {
        #[cfg(feature = "testing")]
        {
            if crate::testing::crash::is_planned("relay.after_publish") {
                tokio::time::sleep(Duration::from_millis(50)).await; // a client that queues has sent them by then
            }
            crate::crash_point!("relay.after_publish");
        }
        let mut answers = Vec::with_capacity(under_way.open);
        let mut stop = self.stop.clone();
        let (mut lost, mut stopping) =
            (pin!(lead.lost()), pin!(stopped_for(&mut stop, self.settings.flush_timeout)));
        let mut overdue = pin!(sleep(patience));
        let (mut acknowledged, mut told) = (false, false);
        while under_way.open > 0 {
            tokio::select! {
                () = under_way.next(&mut answers) => {
                    if !acknowledged && answers.iter().any(|(_, answer)| answer.is_ok()) {
                        acknowledged = true;
                        if told {
                            // It is back: the others' answers are on their way.
                            overdue.as_mut().reset(Instant::now() + self.settings.flush_timeout);
                        }
                    }
                }
                end = &mut lost => return Err(end),
                () = &mut stopping => return Err(End::Stopped),
                () = &mut overdue, if !told || acknowledged => {
                    if acknowledged {
                        break;
                    }
                    told = true;
                    slow();
                }
            }
        }
        answers.sort_by_key(|(place, _)| *place);
        Ok(answers)
    }
}

/// Ends so long after a stop was asked for.
pub(super) async fn stopped_for(stop: &mut watch::Receiver<bool>, patience: Duration) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await; // nobody is left who could ask
    }
    tokio::time::sleep(patience).await;
}

/// Goes through answers in the order of their events. What was acknowledged behind a failure of its aggregate does not count: it is
/// published again after it. An aggregate of which an answer is missing is judged when all are there.
fn take(
    flushed: &mut Flushed,
    events: &[Stored],
    answers: Vec<(usize, Result<Origin>)>,
    under_way: UnderWay,
) {
    let mut open: HashMap<usize, Option<Result<Origin>>> = HashMap::new();
    if under_way.open > 0 {
        let known: HashSet<usize> = answers.iter().map(|(place, _)| *place).collect();
        let missing: Vec<usize> =
            under_way.places.iter().copied().filter(|place| !known.contains(place)).collect();
        flushed.open.extend(missing.iter().filter_map(|&place| aggregate_of(&events[place])));
        open.extend(missing.into_iter().map(|place| (place, None)));
    }
    for (place, answer) in answers {
        flushed.answered += usize::from(answer.is_ok());
        let of = if flushed.closes_none() && answer.is_ok() { None } else { aggregate_of(&events[place]) };
        match (of, answer) {
            (Some(of), answer) if flushed.open.contains(&of) => {
                open.insert(place, Some(answer));
            }
            (Some(of), Err(error)) => {
                flushed.failed.entry(of).or_insert((place, error));
            }
            (Some(of), Ok(_)) if flushed.failed.contains_key(&of) => {}
            (_, Ok(_)) => flushed.acknowledged.push(place),
            (None, Err(_)) => {} // every stored event has an aggregate
        }
    }
    if !open.is_empty() {
        let mut open: Vec<_> =
            open.into_iter().map(|(place, answer)| (place, events[place].clone(), answer)).collect();
        open.sort_by_key(|(place, _, _)| *place);
        flushed.unanswered.push(Unanswered { under_way, open });
    }
}
