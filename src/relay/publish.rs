//! Handing records to the bus, in order, and what their answers mean.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::behind::aggregate_of;
use super::lead::Keeper;
use super::record::{Scribe, bytes_of};
use super::{End, RelaySettings};
use crate::bus::{Bus, Record};
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;
use crate::journal::{AggregateOf, Stored};

type Answers = Result<Vec<Result<Origin>>>;

/// What came of a flush.
#[derive(Debug, Default)]
pub(super) struct Flushed {
    /// Events (by their place in the batch) that are on the bus, with everything before them of their aggregate.
    pub(super) acknowledged: Vec<usize>,
    /// The first event of each aggregate that is not, and why.
    pub(super) failed: HashMap<AggregateOf, (usize, Error)>,
    /// How many answers were acknowledgements, in whatever order.
    answered: usize,
    /// Nothing of a flush got through although that was no event's fault.
    pub(super) outage: Option<Outage>,
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
    pub(super) scribe: Scribe,
    pub(super) stop: watch::Receiver<bool>,
}

/// Part of a batch that may be under way together.
struct Chunk {
    topics: HashMap<Topic, (Vec<usize>, Vec<Record>)>,
}

impl Publisher {
    /// Publishes events in the order given, of each aggregate only as far as all goes well. `lead` is looked at before each flush.
    /// `slow` is called when acknowledgements take too long.
    pub(super) async fn publish(
        &self,
        lead: &Keeper,
        events: &[Stored],
        slow: &(dyn Fn() + Sync),
    ) -> Result<Flushed, End> {
        let mut flushed = Flushed::default();
        let mut at = 0;
        while at < events.len() {
            let (answered, failed) = (flushed.answered, flushed.failed.len());
            let chunk = self.chunk(events, &mut at, &flushed);
            lead.hold().await?;
            crate::crash_point!("relay.before_publish");
            let answers = self.flush(lead, chunk, slow).await?;
            let fault = answers.iter().find_map(|(_, answer)| {
                answer.as_ref().err().filter(|error| !is_poison(error)).map(Error::copy)
            });
            take(&mut flushed, events, answers);
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

    /// The next records that may be under way at once: at most a flush, of each aggregate only in one topic, nothing of an aggregate behind
    /// a large record, and nothing of one that has failed.
    fn chunk(&self, events: &[Stored], at: &mut usize, flushed: &Flushed) -> Chunk {
        let mut chunk = Chunk { topics: HashMap::new() };
        let mut last: HashMap<AggregateOf, Topic> = HashMap::new();
        let mut closed: Vec<AggregateOf> = Vec::new();
        let mut count = 0;
        while count < self.settings.flush() && *at < events.len() {
            let stored = &events[*at];
            let watched = self.settings.route.is_some() || !closed.is_empty() || !flushed.failed.is_empty();
            let of = if watched { aggregate_of(stored) } else { None };
            if let Some(of) = &of
                && flushed.failed.contains_key(of)
            {
                *at += 1;
                continue;
            }
            let topic = self.settings.topic_of(stored);
            if let Some(of) = &of
                && (closed.contains(of) || last.get(of).is_some_and(|before| *before != topic))
            {
                break;
            }
            let record = self.scribe.record(stored);
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

    /// Hands a chunk over and awaits its answers, for as long as the bus takes; not longer than the lead is ours, nor, once a stop is
    /// wanted, than the flush timeout.
    async fn flush(
        &self,
        lead: &Keeper,
        chunk: Chunk,
        slow: &(dyn Fn() + Sync),
    ) -> Result<Vec<(usize, Result<Origin>)>, End> {
        let mut answering = pin!(answers(Arc::clone(&self.bus), chunk));
        #[cfg(feature = "testing")]
        {
            // One step on: the records are with the bus, and nobody has heard of them.
            let mut early = None;
            let step = std::future::poll_fn(|context| {
                if let std::task::Poll::Ready(answers) = answering.as_mut().poll(context) {
                    early = Some(answers);
                }
                std::task::Poll::Ready(())
            });
            step.await;
            if crate::testing::crash::is_planned("relay.after_publish") {
                tokio::time::sleep(Duration::from_millis(50)).await; // a client that queues has sent them by then
            }
            crate::crash_point!("relay.after_publish");
            if let Some(answers) = early {
                return Ok(answers);
            }
        }
        let mut stop = self.stop.clone();
        let patience = Instant::now() + self.settings.flush_timeout;
        let mut told = false;
        loop {
            let overdue = if told { patience + Duration::from_hours(24) } else { patience };
            tokio::select! {
                answers = &mut answering => return Ok(answers),
                end = lead.lost() => return Err(end),
                () = sleep_until(overdue) => {
                    told = true;
                    slow();
                }
                () = stopped_for(&mut stop, self.settings.flush_timeout) => return Err(End::Stopped),
            }
        }
    }
}

/// Ends so long after a stop was asked for.
pub(super) async fn stopped_for(stop: &mut watch::Receiver<bool>, patience: Duration) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await; // nobody is left who could ask
    }
    tokio::time::sleep(patience).await;
}

/// The answers of all topics, by place.
async fn answers(bus: Arc<dyn Bus>, chunk: Chunk) -> Vec<(usize, Result<Origin>)> {
    let mut topics: Vec<_> = chunk.topics.into_iter().collect();
    if topics.len() == 1
        && let Some((topic, (places, records))) = topics.pop()
    {
        return answers_of(places, bus.publish(&topic, &records).await);
    }
    let mut running = JoinSet::new();
    for (topic, (places, records)) in topics {
        let bus = Arc::clone(&bus);
        running.spawn(async move { answers_of(places, bus.publish(&topic, &records).await) });
    }
    let mut all: Vec<_> = running.join_all().await.into_iter().flatten().collect();
    all.sort_by_key(|(place, _)| *place);
    all
}

fn answers_of(places: Vec<usize>, answers: Answers) -> Vec<(usize, Result<Origin>)> {
    match answers {
        Ok(answers) => places.into_iter().zip(answers).collect(),
        Err(error) => places.into_iter().map(|place| (place, Err(error.copy()))).collect(),
    }
}

/// Goes through answers in the order of their events. What was acknowledged behind a failure of its aggregate does not count: it is
/// published again after it.
fn take(flushed: &mut Flushed, events: &[Stored], answers: Vec<(usize, Result<Origin>)>) {
    for (place, answer) in answers {
        match answer {
            Ok(_) => {
                flushed.answered += 1;
                let failed = |of: AggregateOf| flushed.failed.contains_key(&of);
                if flushed.failed.is_empty() || !aggregate_of(&events[place]).is_some_and(failed) {
                    flushed.acknowledged.push(place);
                }
            }
            Err(error) => {
                if let Some(of) = aggregate_of(&events[place]) {
                    flushed.failed.entry(of).or_insert((place, error));
                }
            }
        }
    }
}
