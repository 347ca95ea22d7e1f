//! Sends records to the bus in order, and interprets the answers.

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::answers::{InFlightPart, Unanswered, UnderWay};
use super::behind::aggregate_of;
use super::leadership::LeadershipHeartbeat;
use super::record::RecordEncoder;
use super::{End, RelaySettings};
use crate::bus::Bus;
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;
use crate::journal::{AggregateOf, Stored};

/// The result of publishing a batch.
#[derive(Debug, Default)]
pub(super) struct Flushed {
    /// Indexes of events that are on the bus together with all their predecessors in the batch.
    pub(super) acknowledged: Vec<usize>,
    /// The first failed event of each aggregate, and why it failed.
    pub(super) failed: HashMap<AggregateOf, (usize, Error)>,
    /// Sent, unanswered, and no longer waited for.
    pub(super) unanswered: Vec<Unanswered>,
    /// The aggregates of `unanswered`.
    open: HashSet<AggregateOf>,
    /// Aggregates with events that were not sent because of earlier ones.
    pub(super) skipped: HashSet<AggregateOf>,
    /// How many acknowledgements arrived, in any order.
    answered: usize,
    /// Set if nothing of a flush got through and no event was at fault.
    pub(super) outage: Option<Outage>,
}

impl Flushed {
    /// Whether no more events of an aggregate may be sent.
    fn closes(&self, of: &AggregateOf) -> bool {
        self.failed.contains_key(of) || self.open.contains(of)
    }

    fn closes_none(&self) -> bool {
        self.failed.is_empty() && self.open.is_empty()
    }
}

/// The bus accepts nothing.
#[derive(Debug)]
pub(super) struct Outage {
    pub(super) error: Error,
    /// Whether all attempted events belong to one aggregate, so that perhaps only its place on the
    /// bus is affected.
    pub(super) alone: bool,
}

/// Whether the bus refuses the event itself, so that retrying cannot help. Any other failure may
/// pass.
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
    /// Publishes events in the given order; for each aggregate, up to the first failure. Checks
    /// `leadership` before each flush. If anything is acknowledged within `patience`, leaves the rest
    /// unanswered; otherwise calls `slow` and goes on waiting.
    pub(super) async fn publish(
        &self,
        leadership: &LeadershipHeartbeat,
        events: &[Stored],
        patience: Duration,
        slow: &(dyn Fn() + Sync),
    ) -> Result<Flushed, End> {
        let mut flushed = Flushed::default();
        let mut at = 0;
        while at < events.len() {
            let (answered, failed) = (flushed.answered, flushed.failed.len());
            let part = self.next_part(events, &mut at, &mut flushed);
            leadership.hold().await?;
            crate::crash_point!("relay.before_publish");
            let mut under_way = UnderWay::begin(&self.bus, part);
            let answers = self.flush(leadership, &mut under_way, patience, slow).await?;
            let fault = answers.iter().find_map(|(_, answer)| {
                answer.as_ref().err().filter(|error| !is_poison(error)).map(Error::copy)
            });
            take(&mut flushed, events, answers, under_way);
            if let Some(error) = fault
                && flushed.answered == answered
            {
                // The rest would fail as well.
                flushed.outage = Some(Outage { error, alone: flushed.failed.len() == failed + 1 });
                break;
            }
        }
        Ok(flushed)
    }

    /// Sends the first of an aggregate's events without waiting for the answers. Returns them and
    /// their number.
    pub(super) async fn begin(
        &self,
        leadership: &LeadershipHeartbeat,
        mut events: Vec<Stored>,
    ) -> Result<(Unanswered, usize), End> {
        let mut at = 0;
        let part = self.next_part(&events, &mut at, &mut Flushed::default());
        leadership.hold().await?;
        crate::crash_point!("relay.before_publish");
        let under_way = UnderWay::begin(&self.bus, part);
        events.truncate(at);
        let open = events.into_iter().enumerate().map(|(place, stored)| (place, stored, None)).collect();
        Ok((Unanswered { under_way, open }, at))
    }

    /// The next records that may be in flight together: at most a flush, one topic per aggregate,
    /// nothing of an aggregate after a large record, and nothing of an aggregate that failed.
    fn next_part(&self, events: &[Stored], at: &mut usize, flushed: &mut Flushed) -> InFlightPart {
        let mut part = InFlightPart::default();
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
            if record.bytes() > self.settings.large_bytes {
                closed.extend(aggregate_of(stored));
            }
            if self.settings.route.is_some()
                && let Some(of) = of
            {
                last.insert(of, topic.clone());
            }
            let (places, records) = part.topics.entry(topic).or_default();
            places.push(*at);
            records.push(record);
            *at += 1;
            count += 1;
        }
        part
    }

    /// Waits for the answers to a flush: all of them, or those that arrive within `patience`. Ends
    /// early when leadership is lost, or when the flush timeout has passed since a stop was
    /// requested.
    async fn flush(
        &self,
        leadership: &LeadershipHeartbeat,
        under_way: &mut UnderWay,
        patience: Duration,
        slow: &(dyn Fn() + Sync),
    ) -> Result<Vec<(usize, Result<Origin>)>, End> {
        #[cfg(feature = "testing")]
        {
            if crate::testing::crash::is_planned("relay.after_publish") {
                tokio::time::sleep(Duration::from_millis(50)).await; // a queueing client has sent them by then
            }
            crate::crash_point!("relay.after_publish");
        }
        let mut answers = Vec::with_capacity(under_way.open);
        let mut stop = self.stop.clone();
        let (mut lost, mut stopping) =
            (pin!(leadership.lost()), pin!(stopped_for(&mut stop, self.settings.flush_timeout)));
        let mut overdue = pin!(sleep(patience));
        let (mut acknowledged, mut reported) = (false, false);
        while under_way.open > 0 {
            tokio::select! {
                () = under_way.next(&mut answers) => {
                    if !acknowledged && answers.iter().any(|(_, answer)| answer.is_ok()) {
                        acknowledged = true;
                        if reported {
                            // The bus is back: the other answers will follow.
                            overdue.as_mut().reset(Instant::now() + self.settings.flush_timeout);
                        }
                    }
                }
                end = &mut lost => return Err(end),
                () = &mut stopping => return Err(End::Stopped),
                () = &mut overdue, if !reported || acknowledged => {
                    if acknowledged {
                        break;
                    }
                    reported = true;
                    slow();
                }
            }
        }
        answers.sort_by_key(|(place, _)| *place);
        Ok(answers)
    }
}

/// Returns this long after a stop was requested.
pub(super) async fn stopped_for(stop: &mut watch::Receiver<bool>, patience: Duration) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await; // no handle is left to request a stop
    }
    tokio::time::sleep(patience).await;
}

/// Processes answers in the order of their events. An acknowledgement after a failure of the same
/// aggregate does not count, because that event is published again after the failed one. An
/// aggregate with a missing answer is judged once all have arrived.
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
