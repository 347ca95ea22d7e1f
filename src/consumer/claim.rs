//! Claiming: what every guarantee does with an outcome other than "first".

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::ConsumerSettings;
use super::Passed;
use super::arrival::{Arrival, Delivered, Ending, Key, Queued, Source, Undecodable};
use crate::bus::{Bus, Partition, Received};
use crate::error::{Error, Result};
use crate::event::{Event, Fingerprint};
use crate::guard::{Core, reason_of};
use crate::id::{EventId, Tenant};
use crate::ledger::{
    Claim, Epoch, FailureSettings, Identity, Layer, LeaseSettings, Ledger, Mode, Nonce, Outcome, Skip,
    SkipReason, Week,
};
use crate::window::Sighting;

/// What every part needs: the guard's core, the ledger, the bus, the settings.
#[derive(Clone)]
pub struct ConsumerContext {
    pub(crate) core: Core,
    pub(crate) bus: Arc<dyn Bus>,
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) settings: Arc<ConsumerSettings>,
    pub(crate) group: Arc<str>,
}

/// The longest pause before claiming an event again that another process holds.
const BUSY_PAUSE_MAX: Duration = Duration::from_secs(1);
const PAUSE_MIN: Duration = Duration::from_millis(10);

impl ConsumerContext {
    /// What an outcome other than "first" means for a delivery. Notes it if it is a skip.
    pub(crate) async fn unclaimed<G>(&self, outcome: Outcome<G>, arrival: &mut Arrival) -> Ending {
        if let Some(reason) = SkipReason::of(&outcome) {
            // Not one that ran here, whose own settling may have been recorded without an answer; nor one
            // that the ledger delivered; nor one that would not have run.
            let repeats = reason == SkipReason::Duplicate
                && !(arrival.ran || arrival.is_held())
                && self.settings.wants.matches(&arrival.event);
            self.note_skip(arrival, reason, repeats.then_some(Layer::Claims));
        }
        self.ended(outcome, arrival).await
    }

    /// Notes a skipped delivery.
    pub(crate) fn note_skip(&self, arrival: &Arrival, reason: SkipReason, prevented: Option<Layer>) {
        self.core.skip_log().note(Skip {
            identity: &self.identity_of(arrival),
            reason,
            origin: Some(&arrival.received.origin),
            payload: Some(&arrival.event.payload),
            prevented,
        });
    }

    /// The same without a note.
    pub(crate) async fn ended<G>(&self, outcome: Outcome<G>, arrival: &mut Arrival) -> Ending {
        match outcome {
            Outcome::First(_) => Ending::Later(PAUSE_MIN), // not reached: a first claim is run by the worker
            Outcome::Duplicate(_) => Ending::Passed(Passed::Duplicate),
            Outcome::Stale { .. } => Ending::Passed(Passed::Stale),
            Outcome::Dead { .. } => Ending::Passed(Passed::Dead),
            Outcome::Parked { .. } => Ending::Passed(Passed::Parked),
            // Another member was faster. If it fails, the event is due again.
            Outcome::Busy { .. } if arrival.is_held() => Ending::Passed(Passed::Left),
            Outcome::Busy { until, .. } => match until {
                Some(until) => match self.left(until).await {
                    Ok(left) => Ending::Later(left.clamp(PAUSE_MIN, BUSY_PAUSE_MAX)),
                    Err(error) => away(error),
                },
                None => Ending::Later(PAUSE_MIN * 10),
            },
            Outcome::RetryLater { at, .. } => match self.retry_later(at, arrival).await {
                Ok(ending) => ending,
                Err(error) => away(error),
            },
            Outcome::Wait { .. } => {
                let since = *arrival.waits.get_or_insert_with(Instant::now);
                // Soon at first, because the predecessor is probably running right now.
                Ending::Later((since.elapsed() / 4).clamp(PAUSE_MIN, BUSY_PAUSE_MAX))
            }
            Outcome::Mismatch(prior) => {
                let reason = format!(
                    "its id was used before for something else, which is {} since {}",
                    prior.state, prior.at
                );
                self.refuse(arrival, &reason).await
            }
            Outcome::TooOld { week } => {
                let reason = format!("its week ({week}) was dropped, so whether it took effect is unknown");
                match self.refuse(arrival, &reason).await {
                    Ending::Passed(_) => Ending::Passed(Passed::TooOld),
                    other => other,
                }
            }
        }
    }

    /// Whether to park the delivery with its bytes instead of letting it wait in memory any longer.
    pub(crate) fn holds(&self, arrival: &Arrival) -> bool {
        arrival.may_be_held() && arrival.waits.is_some_and(|since| since.elapsed() >= self.settings.hold_max)
    }

    async fn left(&self, until: crate::clock::Time) -> Result<Duration> {
        Ok(until.since(self.ledger.now().await?))
    }

    /// Handles a stored retry time: a near one waits in memory, a far one in the ledger, if that
    /// has the bytes.
    async fn retry_later(&self, at: crate::clock::Time, arrival: &Arrival) -> Result<Ending> {
        let left = self.left(at).await?;
        if left <= self.settings.hold_max || !arrival.may_be_held() {
            return Ok(Ending::Later(left.max(PAUSE_MIN)));
        }
        let delivery = arrival.delivery();
        let time = delivery.time;
        let entry = self.ledger.get(&self.core.identity(delivery)?, time).await?;
        let held = entry.is_some_and(|entry| entry.body.is_some());
        Ok(if held { Ending::Passed(Passed::Held) } else { Ending::Later(left.min(self.settings.hold_max)) })
    }

    /// Records an event that cannot run as a dead letter, under its location.
    pub(crate) async fn refuse(&self, arrival: &Arrival, reason: &str) -> Ending {
        self.refuse_delivered(arrival, arrival.event.tenant.clone(), reason).await
    }

    /// The same for a record that is not an event.
    pub(crate) async fn refuse_undecodable(&self, undecodable: &Undecodable) -> Ending {
        self.refuse_delivered(&undecodable.delivered, None, &undecodable.reason).await
    }

    async fn refuse_delivered(&self, arrival: &Delivered, tenant: Option<Tenant>, reason: &str) -> Ending {
        match self.try_refuse(arrival, tenant, reason).await {
            Ok(()) => Ending::Passed(Passed::Refused),
            Err(error) => away(error),
        }
    }

    async fn try_refuse(&self, arrival: &Delivered, tenant: Option<Tenant>, reason: &str) -> Result<()> {
        let scope = self.settings.scope.clone();
        let held = arrival.is_held();
        let identity = Identity { tenant, scope, id: arrival.place_id()? };
        // A redriven record that still cannot be read has an entry already, which must die again.
        let mode = if held {
            Mode::Failed(FailureSettings { attempts_max: 1, ..self.failure_settings() })
        } else {
            Mode::Refused
        };
        let mut claim = Claim::new(identity, mode);
        // If the identity includes a time: a location has none, so the entry goes to the timeless
        // week.
        claim.time = Some(match &arrival.source {
            Source::Held(_, week) => week.moment(),
            Source::Bus(_) => Week::TIMELESS.moment(),
        });
        claim.reason = Some(reason_of(reason));
        claim.body = Some(arrival.body());
        claim.origin = Some(arrival.received.origin.clone());
        let print = Fingerprint::of(None, None, None, arrival.body().payload.as_deref().unwrap_or_default());
        claim.fingerprint = Some(print);
        let outcome = self.core.claim_raw(claim.clone()).await?;
        if held || matches!(outcome, Outcome::Dead { .. }) {
            return Ok(());
        }
        // Another record is stored under this location (a topic that was created again, an id that
        // looks like one). A hash of the bytes tells them apart.
        claim.identity.id = EventId::derived(&claim.identity.id, [&print.0[..]]);
        claim.nonce = Nonce::random();
        self.core.claim_raw(claim).await.map(drop)
    }

    /// Decodes a received record.
    pub(crate) fn decode(
        &self,
        received: Received,
        source: Source,
        cancel: watch::Receiver<bool>,
        epoch: Option<Epoch>,
    ) -> Queued {
        let ordered = self.settings.order.is_some();
        let event = self.settings.decoder.decode_for(&received, ordered);
        let key = match &event {
            _ if crate::crash_point::mutant!("claim before order") => None,
            Ok(Event { aggregate: Some(aggregate), seq: Some(_), tenant, .. }) if ordered => {
                Some(Key::Aggregate(tenant.clone(), aggregate.clone()))
            }
            _ => received.record.key.clone().filter(|_| matches!(source, Source::Bus(_))).map(|key| {
                let origin = &received.origin;
                Key::Record(Partition { topic: origin.topic.clone(), number: origin.partition }, key)
            }),
        };
        let span = self.core.delivery_span(event.as_ref().ok(), &received.origin);
        let delivered = Delivered { received, source, key, cancel, span };
        match event {
            Ok(event) => Queued::Event(Arrival {
                event,
                delivered,
                print: OnceLock::new(),
                epoch,
                waits: None,
                unordered: false,
                alone: false,
                ran: false,
                suspects_max: None,
                apart: false,
            }),
            Err(error) => Queued::Undecodable(Box::new(Undecodable { delivered, reason: error.to_string() })),
        }
    }

    /// The group, unless it has the scope's name: then an entry says it already.
    pub(crate) fn group_apart(&self) -> Option<&str> {
        Some(&*self.group).filter(|group| *group != self.settings.scope.as_str())
    }

    /// The identity of an event in the ledger.
    pub(crate) fn identity_of(&self, arrival: &Arrival) -> Identity {
        let Event { tenant, id, .. } = &arrival.event;
        Identity { tenant: tenant.clone(), scope: self.settings.scope.clone(), id: id.clone() }
    }

    /// The identity of a delivery in the window, or `None` if there is no event or no ledger epoch.
    pub(crate) fn sighting_of(&self, queued: &Queued) -> Option<Sighting> {
        let arrival = queued.arrival()?;
        let epoch = Some(arrival.epoch?);
        Some(Sighting { identity: self.identity_of(arrival), fingerprint: arrival.fingerprint(), epoch })
    }

    /// Steps a strict order past an unwanted event by recording it as done.
    pub(crate) async fn step_past(&self, arrival: &mut Arrival) -> Ending {
        let claim = self
            .core
            .prepare(arrival.delivery(), Mode::Done)
            .map(|claim| Claim { hold: self.holds(arrival), ..claim });
        match async { self.core.claim_raw(claim?).await }.await {
            Ok(Outcome::First(_)) => Ending::Passed(Passed::Unwanted),
            // A process of the scope wants it after all. It stays held, and is not stepped past
            // when it is due.
            Ok(Outcome::RetryLater { .. } | Outcome::Busy { .. }) if arrival.is_held() => {
                Ending::Passed(Passed::Left)
            }
            // Nothing runs here, so nothing is kept from running twice.
            Ok(other) => self.ended(other, arrival).await,
            Err(error @ Error::Invalid { .. }) => self.refuse(arrival, &error.to_string()).await,
            Err(error) => away(error),
        }
    }

    /// How failures are counted.
    pub(crate) fn failure_settings(&self) -> FailureSettings {
        self.core.settings().failure_settings()
    }

    /// How an event is leased.
    pub(crate) fn lease_settings(&self, arrival: &Arrival) -> LeaseSettings {
        let ConsumerSettings { lease, attempts_max, .. } = *self.settings;
        LeaseSettings { lease, attempts_max, alone: arrival.alone }
    }
}

/// Maps a ledger error: contention, an outage, or a permanent error.
pub(crate) fn away(error: Error) -> Ending {
    if is_contention(&error) {
        tracing::debug!(target: "hapax", error = %error.chain(), "retrying a delivery");
        Ending::Contended(PAUSE_MIN * 10)
    } else if error.is_retryable() {
        Ending::Unavailable(error)
    } else {
        Ending::Stop(error)
    }
}

/// Whether the ledger is available but asks to be called again soon, which is not an outage.
pub(crate) fn is_contention(error: &Error) -> bool {
    matches!(error, Error::Contended { .. } | Error::WeekMissing { .. })
}
