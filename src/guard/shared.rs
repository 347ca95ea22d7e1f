//! The part of a guard that does not depend on its ledger: makes claims, passes on their outcomes,
//! and records spans and counters.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::{Deliverable, Delivery, GuardSettings, InTransaction};
use crate::error::{Error, Result};
use crate::event::{Event, Origin};
use crate::id::{Scope, Tenant};
use crate::ledger::{
    Batcher, Claim, ClaimRef, Claims, Grant, Identity, Layer, Ledger, Mode, Nonce, Order, Outcome, Skip,
    SkipLog, SkipReason, Token, Week,
};
use crate::sweep::Retention;
use crate::telemetry::{Meter, Telemetry, outcome_name};

/// Everything that does not depend on the ledger's type, so that it is compiled once.
#[derive(Clone)]
pub(crate) struct Core {
    shared: Arc<Shared>,
    scope: Option<(Scope, Arc<Meter>)>,
    tenant: Option<Tenant>,
}

struct Shared {
    ledger: Arc<dyn Ledger>,
    batcher: Batcher,
    settings: GuardSettings,
    telemetry: Arc<Telemetry>,
    skips: SkipLog,
    remote_skips: Noted,
    warned: AtomicBool,
    retention: Arc<Retention>,
    sweeping: AtomicBool,
}

/// How many skipped claims of callers elsewhere are remembered.
const NOTED_MAX: usize = 10_000;

/// The claims of callers elsewhere that were skipped lately: two generations, of which the older is
/// forgotten when the newer is full.
#[derive(Default)]
struct Noted(Mutex<[HashSet<(Identity, Nonce)>; 2]>);

impl Noted {
    fn is_new(&self, claim: &Claim) -> bool {
        let key = (claim.identity.clone(), claim.nonce);
        let mut generations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if generations.iter().any(|known| known.contains(&key)) {
            return false;
        }
        if generations[0].len() >= NOTED_MAX / 2 {
            generations[1] = std::mem::take(&mut generations[0]);
        }
        generations[0].insert(key)
    }
}

/// A granted claim, with what the caller needs to settle it.
pub(crate) struct Granted {
    pub(super) claim: ClaimRef,
    pub(super) grant: Grant,
    pub(super) guarded: bool,
}

/// A batch of claims to be sent to the ledger.
#[derive(Default)]
pub(crate) struct Prepared {
    /// One per event: the error, or `None` if there is a claim for it.
    refused: Vec<Option<Error>>,
    pub(crate) claims: Vec<Claim>,
    spans: Vec<tracing::Span>,
}

/// Merges the answers to the claims with the errors of events that had none, in the order of the
/// events.
fn merge<T>(refused: Vec<Option<Error>>, answers: impl IntoIterator<Item = Result<T>>) -> Vec<Result<T>> {
    let mut answers = answers.into_iter();
    let missing = || Err(Error::Corrupt("a batch had fewer answers than claims".into()));
    let answer = |refused: Option<Error>| match refused {
        Some(error) => Err(error),
        None => answers.next().unwrap_or_else(missing),
    };
    refused.into_iter().map(answer).collect()
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("scope", &self.scope.as_ref().map(|(scope, _)| scope))
            .field("tenant", &self.tenant)
            .field("settings", &self.shared.settings)
            .finish_non_exhaustive()
    }
}

impl Core {
    pub(super) fn new(ledger: Arc<dyn Ledger>, settings: GuardSettings, telemetry: Telemetry) -> Self {
        let scope = settings.scope.clone().map(|scope| {
            let meter = telemetry.meter(&scope);
            (scope, meter)
        });
        let tenant = settings.tenant.clone();
        let telemetry = Arc::new(telemetry);
        let counts = Arc::clone(&telemetry);
        let retention = Retention {
            ledger: Arc::clone(&ledger),
            telemetry: Arc::clone(&telemetry),
            stay: settings.retention,
            interval: settings.sweep_interval,
        };
        let shared = Shared {
            retention: Arc::new(retention),
            batcher: Batcher::new(Arc::clone(&ledger) as Arc<dyn Claims>),
            skips: SkipLog::observed(
                Arc::clone(&ledger),
                settings.log_skips,
                settings.value.clone(),
                Box::new(move |batch| counts.skipped(batch)),
            ),
            remote_skips: Noted::default(),
            ledger,
            settings,
            telemetry,
            warned: AtomicBool::new(false),
            sweeping: AtomicBool::new(false),
        };
        Core { shared: Arc::new(shared), scope, tenant }
    }

    pub(super) fn in_scope(&self, scope: Scope) -> Self {
        let meter = self.shared.telemetry.meter(&scope);
        Core { scope: Some((scope, meter)), ..self.clone() }
    }

    pub(super) fn in_tenant(&self, tenant: Tenant) -> Self {
        Core { tenant: Some(tenant), ..self.clone() }
    }

    pub(crate) fn settings(&self) -> &GuardSettings {
        &self.shared.settings
    }

    pub(crate) fn telemetry(&self) -> &Telemetry {
        &self.shared.telemetry
    }

    pub(crate) fn ledger(&self) -> Arc<dyn Ledger> {
        Arc::clone(&self.shared.ledger)
    }

    pub(super) fn batcher(&self) -> &Batcher {
        &self.shared.batcher
    }

    pub(crate) fn skip_log(&self) -> &SkipLog {
        &self.shared.skips
    }

    /// Notes what a claim of a guard's user was told, if it is a skip. `counts` says that the delivery would
    /// have run without the guard.
    fn note_skip<G>(&self, claim: &Claim, outcome: &Outcome<G>, counts: bool) {
        let Some(reason) = SkipReason::of(outcome) else { return };
        // Other modes run nothing: they record how a run ended.
        if !matches!(claim.mode, Mode::Lease(_) | Mode::Once { .. } | Mode::Done) {
            return;
        }
        self.shared.skips.note(Skip {
            identity: &claim.identity,
            reason,
            origin: claim.origin.as_ref(),
            payload: claim.body.as_ref().and_then(|body| body.payload.as_deref()),
            prevented: (counts && reason == SkipReason::Duplicate && claim.mode != Mode::Done)
                .then_some(Layer::Claims),
        });
    }

    /// The same for a caller elsewhere, which repeats a claim under its nonce if the answer was lost: that is
    /// one delivery.
    pub(super) fn note_remote_skip<G>(&self, claim: &Claim, outcome: &Outcome<G>) {
        if SkipReason::of(outcome).is_some() && self.shared.remote_skips.is_new(claim) {
            self.note_skip(claim, outcome, true);
        }
    }

    pub(super) fn scope(&self) -> Result<&(Scope, Arc<Meter>)> {
        self.scope.as_ref().ok_or_else(|| {
            Error::Config(
                "no scope: set the guard's default scope (dedup.default_scope_id) or name one with in_scope"
                    .into(),
            )
        })
    }

    pub(super) fn meter(&self) -> Option<&Meter> {
        self.scope.as_ref().map(|(_, meter)| &**meter)
    }

    /// Whether the guard is on; warns once if it is not.
    pub(super) fn guarded(&self) -> bool {
        if self.shared.settings.enabled {
            self.sweep_in_background();
            return true;
        }
        self.shared.telemetry.unguarded();
        if !self.shared.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!("the guard is switched off: events run unguarded, duplicates take effect again");
        }
        false
    }

    /// Starts the sweeper on first use, so that no ledger grows forever because its user forgot to
    /// sweep.
    fn sweep_in_background(&self) {
        if !self.shared.settings.sweep || self.shared.sweeping.load(Ordering::Relaxed) {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if self.begin_sweeping() {
            runtime.spawn(crate::sweep::sweep_on(Arc::downgrade(self.retention())));
        }
    }

    pub(super) fn retention(&self) -> &Arc<Retention> {
        &self.shared.retention
    }

    /// Returns true on the first call only.
    pub(super) fn begin_sweeping(&self) -> bool {
        !self.shared.sweeping.swap(true, Ordering::Relaxed)
    }

    /// Same-transaction claims guarantee exactly once, so they cannot be switched off.
    pub(crate) fn check_transactional(&self) -> Result<()> {
        if self.guarded() {
            return Ok(());
        }
        Err(Error::Config(
            "the guard is switched off (ENABLE_PROCESSED_EVENT_REGISTRY=false); a same-transaction claim cannot do \
             without it"
                .into(),
        ))
    }

    fn tenant(&self, given: Option<Tenant>) -> Result<Option<Tenant>> {
        match (&self.tenant, given) {
            (Some(own), Some(given)) if *own != given => {
                Err(Error::invalid("tenant", format!("the event is of {given}, but this guard is for {own}")))
            }
            (own, given) => Ok(given.or_else(|| own.clone())),
        }
    }

    pub(crate) fn identity(&self, delivery: Delivery) -> Result<Identity> {
        let scope = self.scope()?.0.clone();
        Ok(Identity { tenant: self.tenant(delivery.tenant)?, scope, id: delivery.id })
    }

    /// The claim for a delivery, with the bytes to store if the event dies.
    pub(crate) fn prepare(&self, mut delivery: Delivery, mode: Mode) -> Result<Claim> {
        let body = delivery.body.take();
        let (time, fingerprint) = (delivery.time, delivery.fingerprint);
        let origin = delivery.origin.take();
        let metadata = delivery.metadata.take();
        let order = delivery
            .order
            .take()
            .zip(self.settings().order)
            .map(|((aggregate, seq), (policy, on_dead))| Order { aggregate, seq, policy, on_dead });
        let claim = Claim::new(self.identity(delivery)?, mode);
        Ok(Claim { time, fingerprint, order, origin, metadata, body, ..claim })
    }

    /// Claims through the batcher, and records span and counter.
    pub(super) async fn claim(
        &self,
        delivery: Delivery,
        mode: Mode,
        reason: Option<Arc<str>>,
    ) -> Result<Outcome<Granted>> {
        let mut claim = self.prepare(delivery, mode)?;
        claim.reason = reason;
        self.claim_noting(claim, true).await
    }

    /// Claims what was prepared elsewhere. The caller notes skips, because it knows what they mean.
    pub(crate) async fn claim_raw(&self, claim: Claim) -> Result<Outcome<Granted>> {
        self.claim_noting(claim, false).await
    }

    async fn claim_noting(&self, claim: Claim, notes: bool) -> Result<Outcome<Granted>> {
        if !self.guarded() {
            return Ok(Outcome::First(self.unguarded(claim)));
        }
        let span = self.claim_span(&claim);
        let answer = match self.batcher().claim(claim) {
            Ok(pending) => pending.answer().await,
            Err(error) => Err(error),
        };
        self.saw(&span, answer.as_ref().ok().map(|(_, outcome)| outcome));
        let (claim, outcome) = answer?;
        if notes {
            self.note_skip(&claim, &outcome, true);
        }
        Ok(outcome.map(|grant| Granted { claim, grant, guarded: true }))
    }

    /// Claims a batch, each event with its own outcome.
    pub(super) async fn claim_many<D: Deliverable>(
        &self,
        events: impl IntoIterator<Item = D>,
        mode: Mode,
    ) -> Result<Vec<Result<Outcome<Granted>>>> {
        let Prepared { refused, claims, spans } = self.prepare_many(events, mode)?;
        if !self.guarded() {
            let granted = claims.into_iter().map(|claim| Ok(Outcome::First(self.unguarded(claim))));
            return Ok(merge(refused, granted));
        }
        let answers = self.batcher().claim_many(claims).await;
        let answers = answers.into_iter().zip(spans).map(|(answer, span)| {
            self.saw(&span, answer.as_ref().ok().map(|(_, outcome)| outcome));
            answer.map(|(claim, outcome)| {
                self.note_skip(&claim, &outcome, true);
                outcome.map(|grant| Granted { claim, grant, guarded: true })
            })
        });
        Ok(merge(refused, answers))
    }

    /// The claims for a batch. An event that cannot be claimed at all fails here, and only itself.
    pub(crate) fn prepare_many<D: Deliverable>(
        &self,
        events: impl IntoIterator<Item = D>,
        mode: Mode,
    ) -> Result<Prepared> {
        self.scope()?;
        let mut prepared = Prepared::default();
        for event in events {
            match event.delivery().and_then(|delivery| self.prepare(delivery, mode)) {
                Ok(claim) => {
                    prepared.spans.push(self.claim_span(&claim));
                    prepared.claims.push(claim);
                    prepared.refused.push(None);
                }
                Err(error) => prepared.refused.push(Some(error)),
            }
        }
        Ok(prepared)
    }

    /// The outcomes of a same-transaction batch; records spans and counters.
    pub(crate) fn answer_many(
        &self,
        prepared: Prepared,
        answers: Vec<Result<Outcome>>,
    ) -> Vec<Result<Outcome<InTransaction>>> {
        let asked = prepared.claims.into_iter().zip(prepared.spans);
        let answers = answers.into_iter().zip(asked).map(|(answer, (claim, span))| {
            self.saw(&span, answer.as_ref().ok());
            if let Ok(outcome) = &answer {
                // Not counted: the caller may undo its transaction and ask again.
                self.note_skip(&claim, outcome, false);
            }
            answer.map(|outcome| outcome.map(|grant| InTransaction::new(claim, &grant)))
        });
        merge(prepared.refused, answers)
    }

    /// The grant of a guard that is switched off: its token settles nothing.
    fn unguarded(&self, claim: Claim) -> Granted {
        let grant = Grant {
            token: Token(0),
            week: Week::TIMELESS,
            until: crate::clock::Time::default(),
            attempt: 1,
            suspect: false,
        };
        Granted { claim: ClaimRef::alone(self.batcher(), claim), grant, guarded: false }
    }

    /// The span of a claim. Its fields are evaluated only if a subscriber is interested.
    pub(crate) fn claim_span(&self, claim: &Claim) -> tracing::Span {
        let origin = claim.origin.as_ref();
        tracing::info_span!(
            target: "hapax",
            "dedup.try_claim",
            otel.name = self.telemetry().span_name(0),
            consumer.scope_id = claim.identity.scope.as_str(),
            event.id = %claim.identity.id,
            event.week_start = %self.week(claim),
            kafka.topic = origin.map(|origin| origin.topic.as_str()),
            kafka.partition = origin.map(|origin| origin.partition),
            kafka.offset = origin.map(|origin| origin.offset),
            dedup.outcome = tracing::field::Empty,
        )
    }

    /// The span of a delivery from its arrival to its end, linked to the producer's trace.
    pub(crate) fn delivery_span(&self, event: Option<&Event>, origin: &Origin) -> tracing::Span {
        tracing::info_span!(
            target: "hapax",
            "consumer.delivery",
            otel.name = self.telemetry().span_name(3),
            otel.kind = "consumer",
            consumer.scope_id = self.scope.as_ref().map(|(scope, _)| scope.as_str()),
            event.id = event.map(|event| tracing::field::display(&event.id)),
            kafka.topic = origin.topic.as_str(),
            kafka.partition = origin.partition,
            kafka.offset = origin.offset,
            trace.parent = event.and_then(|event| event.trace).map(tracing::field::display),
            consumer.ending = tracing::field::Empty,
        )
    }

    fn week(&self, claim: &Claim) -> Week {
        let rule = self.batcher().ledger().settings().identity;
        Week::route(rule, &claim.identity.id, claim.time).unwrap_or(Week::TIMELESS)
    }

    /// Records the outcome of a claim; `None` means an error.
    pub(crate) fn saw<G>(&self, span: &tracing::Span, outcome: Option<&Outcome<G>>) {
        span.record("dedup.outcome", outcome_name(outcome));
        if let Some(meter) = self.meter() {
            meter.claimed(outcome);
        }
        let reused = self.batcher().ledger().settings().reused.take();
        if reused > 0 {
            self.telemetry().reused(reused);
        }
    }

    /// Records how long a consumer's handler ran.
    pub(crate) fn handled(&self, took: std::time::Duration, success: bool) {
        if let Some(meter) = self.meter() {
            meter.processed(took, if success { "success" } else { "failed" });
        }
    }
}

/// The maximum length of a stored reason.
const REASON_BYTES_MAX: usize = 4096;

/// An error as it is stored: truncated, and without NUL, which PostgreSQL's text cannot hold.
pub(crate) fn reason_of(error: impl fmt::Display) -> Arc<str> {
    let mut text = error.to_string();
    if text.contains('\0') {
        text = text.replace('\0', "\\0");
    }
    text.truncate(text.floor_char_boundary(REASON_BYTES_MAX));
    text.into()
}

#[cfg(test)]
mod tests {
    use super::reason_of;

    #[test]
    fn reasons_are_bounded_and_have_no_nul() {
        assert_eq!(&*reason_of("a\0b"), "a\\0b");
        assert_eq!(reason_of("ü".repeat(5000)).len(), 4096);
    }
}
