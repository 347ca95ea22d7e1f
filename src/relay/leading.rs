//! The loop of a leading relay: `read → select_unpublished → publish → acknowledge → save`, batch
//! by batch.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::answers::{Answered, Awaited};
use super::backoff::ReadBackoff;
use super::behind::Waiters;
use super::leadership::LeadershipHeartbeat;
use super::lookback::Lookback;
use super::meter::Meter;
use super::publish::{Flushed, Publisher, is_poison};
use super::pulse::Pulses;
use super::{End, RelaySettings};
use crate::clock::Time;
use crate::crash_point::mutant;
use crate::error::{Error, Result};
use crate::journal::{AggregateOf, Behind, Checkpoint, Journal, Position, ReadBatch, Stored};

/// The longest pause between two attempts during an outage of the bus.
const OUTAGE_PAUSE_MAX: Duration = Duration::from_secs(5);
/// How long to wait for the answers of a flush while part of the bus is known not to answer.
const SHORT_PATIENCE: Duration = Duration::from_millis(250);
/// After this many attempts, the only aggregate of a batch is left behind if the bus has accepted
/// others.
const ATTEMPTS_ALONE: u32 = 3;

pub(super) struct Leading {
    pub(super) journal: Arc<dyn Journal>,
    pub(super) settings: Arc<RelaySettings>,
    pub(super) publisher: Publisher,
    pub(super) leadership: LeadershipHeartbeat,
    pub(super) stop: watch::Receiver<bool>,
    pub(super) meter: Arc<Meter>,
    /// The position up to which every event is on the bus or behind.
    pub(super) position: Position,
    /// The positions of the acknowledged events of a batch that will be retried.
    pub(super) acknowledged: HashSet<Position>,
    pub(super) waiters: Waiters,
    /// For journals that may show events late.
    pub(super) lookback: Option<Lookback>,
    pub(super) backoff: ReadBackoff,
    pub(super) ahead: Option<Ahead>,
    /// How many attempts at the current batch have failed.
    pub(super) attempts: u32,
    /// Whether the bus has accepted anything since a lone aggregate was last left behind.
    pub(super) proved: bool,
    /// When the bus last accepted something.
    pub(super) taken: Instant,
    /// Sent to the bus and not waited for.
    pub(super) awaited: Awaited,
    /// The last answer from `awaited` that arrived during a wait.
    pub(super) last_answer: Option<Answered>,
    pub(super) pulses: Pulses,
    /// How many reads of the journal have begun.
    pub(super) reads: u64,
}

/// A batch that is read while the previous one is published.
pub(super) struct Ahead {
    after: Position,
    /// Which read it is.
    number: u64,
    task: JoinHandle<Result<ReadBatch>>,
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A sifted batch.
pub(super) struct Batch {
    /// The events to publish, in order.
    events: Vec<Stored>,
    pub(super) next: Position,
    /// Whether the journal returned no events.
    empty: bool,
    /// Whether more follows.
    pub(super) more: bool,
    pub(super) at_hole: bool,
    /// Which read of the journal it is from.
    pub(super) number: u64,
}

impl Leading {
    /// Leads until something ends it.
    pub(super) async fn run(&mut self) -> End {
        loop {
            match self.step().await {
                Ok(()) => {}
                Err(End::Stopped) => return self.finish().await.err().unwrap_or(End::Stopped),
                Err(end) => return end,
            }
        }
    }

    async fn step(&mut self) -> Result<(), End> {
        self.go_on().await?;
        self.catch_up().await?;
        if self.waiters.tried() > self.settings.behind_max || self.awaited.is_full() {
            self.meter.full(self.settings.behind_max);
            return self.wait_for_room().await;
        }
        self.pulses.look(self.reads).await;
        let (batch, number) = self.read().await?;
        let batch = self.select_unpublished(batch, number);
        if batch.empty {
            self.position = batch.next.clone();
            self.pulse(&batch);
            return self.wait(batch.at_hole).await;
        }
        self.backoff.reset();
        self.meter.no_hole();
        self.read_ahead(&batch);
        if mutant!("checkpoint before ack") {
            self.save(&batch.next).await?;
        }
        if mutant!("pulse before ack") {
            self.pulse_too_early(&batch);
        }
        if batch.events.is_empty() && self.takes_nothing() {
            // Every event that was read waits behind another, and the bus accepts none of those
            // either.
            self.meter.away("nothing that waits is acknowledged");
        }
        if !self.publish(&batch).await? {
            if let Some(lookback) = &mut self.lookback {
                lookback.look_again();
            }
            return Ok(()); // retry the same batch
        }
        self.acknowledged.clear();
        self.meter.flows();
        self.save(&batch.next).await?;
        self.pulse(&batch);
        let newest: Option<Time> = batch.events.last().map(|stored| stored.at);
        self.meter.oldest(newest.filter(|_| batch.more));
        self.meter.refresh();
        Ok(())
    }

    /// Whether aggregates wait and the bus has accepted nothing for a whole flush timeout.
    fn takes_nothing(&self) -> bool {
        self.waiters.tried() > 0 && self.taken.elapsed() >= self.settings.flush_timeout
    }

    async fn go_on(&self) -> Result<(), End> {
        if *self.stop.borrow() {
            return Err(End::Stopped);
        }
        self.leadership.hold().await
    }

    // --- in: read → select_unpublished ----------------------------------------------------------------------

    /// The next batch, and which read of the journal it is from.
    async fn read(&mut self) -> Result<(ReadBatch, u64), End> {
        self.meter.looked();
        let (mut batch, number) = match self.ahead.take() {
            Some(mut ahead) if ahead.after == self.position => {
                let read = tokio::select! {
                    read = &mut ahead.task => read,
                    end = self.leadership.lost() => return Err(end),
                };
                match read {
                    Ok(Ok(batch)) => (batch, ahead.number),
                    Ok(Err(_)) | Err(_) => self.read_now().await?,
                }
            }
            _ => self.read_now().await?,
        };
        if mutant!("skip a hole at once") && batch.at_hole {
            batch.next = Position::of(batch.next.number() + 1);
        }
        let mut attempts = 0;
        loop {
            let Leading { lookback: Some(lookback), journal, waiters, position, leadership, .. } = &mut *self
            else {
                return Ok((batch, number));
            };
            let completed = tokio::select! {
                completed = lookback.complete(&**journal, waiters, position, batch.clone()) => completed,
                end = leadership.lost() => return Err(end),
            };
            match completed {
                Err(error) if error.is_retryable() => {
                    self.try_again("looking for late events", &error, &mut attempts).await?;
                }
                other => return other.map(|batch| (batch, number)).map_err(End::from),
            }
        }
    }

    async fn read_now(&mut self) -> Result<(ReadBatch, u64), End> {
        self.reads += 1;
        let (journal, max) = (&self.journal, self.settings.batch_max);
        let batch = self.insist("reading the journal", || journal.read(&self.position, max)).await?;
        Ok((batch, self.reads))
    }

    /// Leaves out events that are behind or already on the bus.
    fn select_unpublished(&mut self, batch: ReadBatch, number: u64) -> Batch {
        let ReadBatch { events, next, at_hole, more } = batch;
        let empty = events.is_empty();
        let mut batch =
            Batch { events: Vec::with_capacity(events.len()), next, empty, more, at_hole, number };
        let mut suppressed = 0;
        for stored in events {
            if self.waiters.hold_back(&stored) {
                continue;
            }
            if self.waiters.is_past(&stored)
                || self.acknowledged.contains(&stored.position)
                || self.lookback.as_ref().is_some_and(|lookback| lookback.knows(&stored))
            {
                suppressed += 1;
                continue;
            }
            batch.events.push(stored);
        }
        if mutant!("publish out of order") {
            batch.events.reverse();
        }
        self.meter.suppressed(suppressed);
        self.meter.oldest(batch.events.iter().map(|stored| stored.at).min());
        batch
    }

    fn read_ahead(&mut self, batch: &Batch) {
        if !batch.more || batch.at_hole {
            return;
        }
        let (journal, after, max) = (Arc::clone(&self.journal), batch.next.clone(), self.settings.batch_max);
        let from = after.clone();
        self.reads += 1;
        let number = self.reads;
        self.ahead =
            Some(Ahead { after, number, task: tokio::spawn(async move { journal.read(&from, max).await }) });
    }

    // --- out: publish → acknowledge → save -----------------------------------------------------------------------

    /// Publishes a batch. Returns false if all or part of it must be retried from the checkpoint.
    async fn publish(&mut self, batch: &Batch) -> Result<bool, End> {
        if batch.events.is_empty() {
            self.attempts = 0; // the failed events are behind by now
            return Ok(true);
        }
        let mut flushed = self.flush(&batch.events).await?;
        crate::crash_point!("relay.after_ack");
        for &place in &flushed.acknowledged {
            self.acknowledged.insert(batch.events[place].position.clone());
        }
        if !flushed.unanswered.is_empty() {
            self.leave_unanswered(&mut flushed);
        }
        if let Some(outage) = &flushed.outage {
            self.attempts += 1;
            if !(outage.alone && self.proved && self.attempts >= ATTEMPTS_ALONE) {
                self.meter.away(&outage.error.chain());
                self.meter.refresh();
                let pause = self.settings.backoff(self.attempts).min(OUTAGE_PAUSE_MAX);
                self.pause(pause).await?;
                return Ok(false);
            }
            self.proved = false;
        }
        self.attempts = 0;
        let all_fit = self.leave_behind(&batch.events, std::mem::take(&mut flushed.failed));
        if !all_fit {
            self.save_begin(&batch.events).await?;
            self.meter.full(self.settings.behind_max);
            self.pause(self.settings.backoff(5).min(OUTAGE_PAUSE_MAX)).await?;
            return Ok(false);
        }
        Ok(flushed.outage.is_none())
    }

    /// Leaves failed aggregates behind: poison always, because it must never block the others; of
    /// the rest the first ones, up to `behind_max`. Returns false if some did not fit.
    fn leave_behind(&mut self, events: &[Stored], failed: HashMap<AggregateOf, (usize, Error)>) -> bool {
        let mut failed: Vec<_> = failed.into_iter().collect();
        failed.sort_by_key(|(_, (place, _))| *place);
        let mut all_fit = true;
        for (of, (place, error)) in failed {
            if !is_poison(&error) && self.waiters.tried() >= self.settings.behind_max {
                all_fit = false;
                continue;
            }
            let behind = self.left_behind(&events[place], &error, false);
            self.waiters.add(of, behind, &self.settings);
        }
        all_fit
    }

    /// Leaves unanswered aggregates behind. The bus already has their events, so they are not
    /// retried, however many there are.
    fn leave_unanswered(&mut self, flushed: &mut Flushed) {
        let (mut aggregates, time) = (0, self.patience());
        let reason = format!("no acknowledgement within {time:?}");
        for part in std::mem::take(&mut flushed.unanswered) {
            for (of, first) in part.firsts() {
                aggregates += 1;
                let more = flushed.skipped.contains(&of);
                let behind = Behind::at(&first, &reason, false, self.meter.now());
                self.waiters.add_asked(of, behind, part.under_way.began, more);
            }
            self.awaited.add(part, false);
        }
        self.meter.left_unanswered(aggregates, time);
    }

    /// How long to wait for answers. A part of the bus that is known to be slow must not delay
    /// every flush.
    fn patience(&self) -> Duration {
        let time = self.settings.flush_timeout;
        if self.waiters.unanswered_for(time) { time.min(SHORT_PATIENCE) } else { time }
    }

    /// Saves a checkpoint at the part of the batch, from its start, that is on the bus or behind.
    async fn save_begin(&mut self, events: &[Stored]) -> Result<(), End> {
        let is_done = |stored: &&Stored| {
            self.acknowledged.contains(&stored.position) || self.waiters.holds_back(stored)
        };
        let open = events.iter().filter(|stored| !is_done(stored)).map(|stored| &stored.position).min();
        let done = events.iter().map(|stored| &stored.position);
        let last = done.filter(|position| open.is_none_or(|open| *position < open)).max();
        let position = last.unwrap_or(&self.position).max(&self.position).clone();
        self.save(&position).await
    }

    /// Sends events to the bus and notes which are on it.
    async fn flush(&mut self, events: &[Stored]) -> Result<Flushed, End> {
        let span = tracing::info_span!(
            target: "hapax",
            "relay.publish",
            otel.name = self.meter.span_name(),
            otel.kind = "producer",
            relay.name = %self.settings.name,
            relay.events = events.len(),
            relay.acknowledged = tracing::field::Empty,
        );
        let began = Instant::now();
        let meter = Arc::clone(&self.meter);
        let slow = || meter.away("acknowledgements take longer than flush_timeout");
        let publishing = self.publisher.publish(&self.leadership, events, self.patience(), &slow);
        let flushed = publishing.instrument(span.clone()).await?;
        span.record("relay.acknowledged", flushed.acknowledged.len());
        self.note(flushed.acknowledged.iter().map(|&place| &events[place]), began);
        Ok(flushed)
    }

    /// Notes events that are on the bus.
    pub(super) fn note<'e>(&mut self, events: impl Iterator<Item = &'e Stored>, began: Instant) {
        let mut count = 0;
        for stored in events {
            count += 1;
            if let Some(lookback) = &mut self.lookback {
                lookback.published(stored);
            }
        }
        if count > 0 {
            (self.proved, self.taken) = (true, Instant::now());
        }
        self.meter.published(count, began.elapsed());
    }

    pub(super) fn left_behind(&self, stored: &Stored, error: &Error, again: bool) -> Behind {
        let poison = is_poison(error);
        let aggregate = stored.aggregate().map(ToString::to_string).unwrap_or_default();
        self.meter.left_behind(&aggregate, stored.seq, poison, again, error);
        Behind::at(stored, error.chain(), poison, self.meter.now())
    }

    pub(super) async fn save(&mut self, position: &Position) -> Result<(), End> {
        let mut checkpoint = Checkpoint::start(self.journal.id());
        checkpoint.position = position.clone();
        checkpoint.behind = self.waiters.list();
        if let Some(lookback) = &self.lookback {
            checkpoint.recent = lookback.recent();
        }
        let (journal, relay, token) = (&self.journal, &self.settings.name, self.leadership.token);
        let checkpoint = &checkpoint;
        self.insist("saving the checkpoint", || async move {
            let mut saving = journal.save(relay, token, checkpoint);
            #[cfg(feature = "testing")]
            {
                // Polls once: the request is sent, but its outcome is unknown.
                let mut early = None;
                std::future::poll_fn(|context| {
                    if let std::task::Poll::Ready(saved) = saving.as_mut().poll(context) {
                        early = Some(saved);
                    }
                    std::task::Poll::Ready(())
                })
                .await;
                crate::crash_point!("relay.during_checkpoint");
                if let Some(saved) = early {
                    return saved;
                }
            }
            saving.as_mut().await
        })
        .await?;
        crate::crash_point!("relay.after_checkpoint");
        self.position = position.clone();
        self.meter.saved(checkpoint);
        Ok(())
    }
}
