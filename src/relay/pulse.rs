//! Pulses: a leading relay says on its topic how far it is, for read models.
//!
//! ```text
//! rest ─▶ ask the journal's horizon ─▶ wait until everything up to it is on the bus ─▶ send to every partition
//!  ▲                                        └ and nothing of that is behind, parked or unanswered │
//!  └─────────────────────────────── until the interval has passed ◀───────────────────────────────┘
//! ```
//!
//! The horizon (time, position) says that whatever was acknowledged to its writer before the time
//! lies at or below the position. Once the bus has acknowledged all of that, a record published
//! from then on lies behind it, in whichever partition. That record is the pulse.
//!
//! A pulse of a relay that no longer leads is harmless. It speaks of the past only: whatever it
//! speaks of was acknowledged by the bus before the pulse was sent, and stays where it is. The new
//! leader may publish some of it again, behind the pulse, as exact repeats. For the same reason a
//! pulse that is late, or comes twice, is still true.
//!
//! Asking and sending run in a task beside the loop: they delay no event, move no checkpoint, and a
//! failure is not an outage. The horizon that is waited for stays until it is reached, however many
//! events arrive meanwhile: under constant load the relay reaches a position, but never the end.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::RelaySettings;
use super::leading::{Batch, Leading};
use super::meter::Meter;
use crate::bus::{Bus, Partition, Pulse};
use crate::clock::Time;
use crate::crash_point::mutant;
use crate::error::{Error, Result};
use crate::id::Topic;
use crate::journal::{Journal, Position};

/// The pulses of one leadership.
pub(super) struct Pulses {
    journal: Arc<dyn Journal>,
    bus: Arc<dyn Bus>,
    topic: Topic,
    meter: Arc<Meter>,
    interval: Duration,
    /// How long the journal and the bus may take to answer.
    patience: Duration,
    state: State,
    /// When to ask the journal next, at the earliest.
    due: Instant,
    /// At most one: what asks or sends.
    task: JoinSet<Answer>,
}

#[derive(Debug)]
enum State {
    Resting,
    Asking,
    Awaiting(Horizon),
    Sending,
    /// There are no pulses: nobody wants them, or the journal cannot tell.
    Off,
}

/// A horizon that the relay is to reach.
#[derive(Debug)]
struct Horizon {
    time: Time,
    position: Position,
    /// How many reads of the journal had begun when it was answered.
    reads: u64,
    /// Whether everything up to it is on the bus or behind.
    reached: bool,
}

enum Answer {
    Horizon(Result<(Time, Position)>),
    Sent(Result<()>),
}

impl Pulses {
    pub(super) fn new(
        settings: &RelaySettings,
        journal: Arc<dyn Journal>,
        bus: Arc<dyn Bus>,
        meter: Arc<Meter>,
    ) -> Self {
        Pulses {
            journal,
            bus,
            topic: settings.topic.clone(),
            meter,
            interval: settings.pulse.unwrap_or_default(),
            patience: settings.flush_timeout,
            state: if settings.pulse.is_some() { State::Resting } else { State::Off },
            due: Instant::now(),
            task: JoinSet::new(),
        }
    }

    /// Returns when there is a horizon that was not there before. `reads`: how many reads of the
    /// journal have begun. Cancel safe.
    pub(super) async fn next(&mut self, reads: u64) {
        loop {
            match self.state {
                State::Off | State::Awaiting(_) => return std::future::pending().await,
                State::Resting => {
                    tokio::time::sleep_until(self.due).await;
                    self.ask();
                }
                State::Asking | State::Sending => {
                    let answer = self.task.join_next().await.and_then(std::result::Result::ok);
                    self.take(answer, reads);
                }
            }
            if matches!(self.state, State::Awaiting(_)) {
                return;
            }
        }
    }

    /// Goes on as far as possible without waiting.
    pub(super) async fn look(&mut self, reads: u64) {
        tokio::select! {
            biased;
            () = self.next(reads) => {}
            () = std::future::ready(()) => {}
        }
    }

    fn ask(&mut self) {
        self.due = Instant::now() + self.interval;
        self.state = State::Asking;
        let (journal, patience) = (Arc::clone(&self.journal), self.patience);
        self.task.spawn(async move {
            let asking = tokio::time::timeout(patience, journal.horizon()).await;
            Answer::Horizon(asking.unwrap_or_else(|_| Err(late("the journal's horizon"))))
        });
    }

    /// Takes an answer. `None`: the task ended without one.
    fn take(&mut self, answer: Option<Answer>, reads: u64) {
        self.state = State::Resting;
        match answer {
            Some(Answer::Horizon(Ok((time, position)))) => {
                self.state = State::Awaiting(Horizon { time, position, reads, reached: false });
            }
            Some(Answer::Sent(Ok(()))) => self.meter.pulsed(),
            Some(Answer::Horizon(Err(error)) | Answer::Sent(Err(error))) => {
                if matches!(error, Error::Unsupported(_)) {
                    self.meter.no_pulses(&error);
                    self.state = State::Off;
                } else {
                    self.meter.pulse_failed(&error);
                }
            }
            None => {}
        }
    }

    /// Everything up to `position` is on the bus or behind. `to_the_end`: and everything that the
    /// journal had when that read began, which was the n-th.
    fn reach(&mut self, position: &Position, to_the_end: Option<u64>) {
        if let State::Awaiting(horizon) = &mut self.state {
            // A read that began after the horizon was answered sees whatever was acknowledged
            // before it. The last positions may be those of transactions that were rolled back,
            // where no event ever lies.
            let saw_all = to_the_end.is_some_and(|read| read > horizon.reads);
            horizon.reached |= saw_all || *position >= horizon.position;
        }
    }

    /// The position of the horizon that was reached, if any.
    fn reached(&self) -> Option<&Position> {
        match &self.state {
            State::Awaiting(horizon) if horizon.reached => Some(&horizon.position),
            _ => None,
        }
    }

    /// Sends the pulse whose horizon was reached, if any.
    fn send(&mut self) {
        let State::Awaiting(Horizon { time, reached: true, .. }) = &self.state else { return };
        let at = *time;
        self.state = State::Sending;
        let (bus, topic, patience) = (Arc::clone(&self.bus), self.topic.clone(), self.patience);
        self.task.spawn(async move {
            let sending = publish(bus, &topic, at);
            let sent = tokio::time::timeout(patience, sending).await;
            Answer::Sent(sent.unwrap_or_else(|_| Err(late("a partition's answer to a pulse"))))
        });
    }
}

/// Publishes a pulse to every partition of a topic. They are counted anew for each: whatever the pulse
/// speaks of is on the bus by now, so its partitions are among them, also one that was added just now.
async fn publish(bus: Arc<dyn Bus>, topic: &Topic, at: Time) -> Result<()> {
    let pulse = Pulse { at, partitions: partitions(&*bus, topic).await? };
    let mut all = JoinSet::new();
    for number in 0..pulse.partitions {
        let (bus, partition) = (Arc::clone(&bus), Partition { topic: topic.clone(), number });
        all.spawn(async move {
            let answers = bus.publish_to(&partition, &[pulse.record()]).await?;
            answers.into_iter().collect::<Result<Vec<_>>>()
        });
    }
    while let Some(published) = all.join_next().await {
        published.map_err(|error| Error::unavailable("publishing a pulse", error))??;
    }
    Ok(())
}

async fn partitions(bus: &dyn Bus, topic: &Topic) -> Result<i32> {
    let info = bus.topic(topic).await?.ok_or_else(|| Error::NotFound(format!("topic {topic}")))?;
    if info.compacted {
        let reason = "it is compacted: a pulse has no key, and compaction would remove all but the last";
        return Err(Error::Unsupported(format!("the topic {topic} takes no pulses, because {reason}")));
    }
    Ok(info.partitions)
}

fn late(what: &str) -> Error {
    Error::Unavailable { what: format!("{what} did not come in time"), source: None }
}

impl Leading {
    /// After a batch, which is on the bus or behind: sends the pulse that waits for it, unless
    /// something up to its horizon is behind. An aggregate that is parked, or awaits an answer, is
    /// among the waiters until that is over. What is behind beyond the horizon does not matter: under
    /// constant load a busy aggregate that fell behind goes on there for long, one batch late.
    pub(super) fn pulse(&mut self, batch: &Batch) {
        let is_end = !batch.more && (!batch.at_hole || mutant!("pulse past a hole"));
        self.pulses.reach(&self.position, is_end.then_some(batch.number));
        let is_all_there = |position| self.waiters.are_beyond(position);
        if self.pulses.reached().is_some_and(is_all_there) || mutant!("pulse despite what is behind") {
            self.pulses.send();
        }
    }

    /// What a mutant does before a batch is on the bus.
    pub(super) fn pulse_too_early(&mut self, batch: &Batch) {
        self.pulses.reach(&batch.next, None);
        self.pulses.send();
    }
}
