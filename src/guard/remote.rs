//! Claims for callers outside of this process, such as the clients of an HTTP server.
//!
//! Such a caller has no [`Lease`](super::Lease) that is extended while it lives and released when it
//! is dropped. It has a token, and says itself how its run ended. Its claims carry the nonce that it
//! chose and go to the ledger as they are: a claim in doubt is repeated by its own caller, and never
//! taken over by the claim of another.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Place;
use std::fmt;

use super::{Core, Guard, reason_of};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::Record;
use crate::ledger::{
    Claim, Extend, FailureSettings, Identity, Ledger, Metadata, Outcome, Settle, Settled, State, Token,
    Verdict, Week,
};
use crate::telemetry::Meter;

/// A run, as a caller outside of this process names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteRun {
    /// The event's identity.
    pub identity: Identity,
    /// The event's time, where the ledger's identity includes it.
    pub time: Option<Time>,
    /// The token that the claim was granted with.
    pub token: Token,
}

/// How a run ended, or did not begin.
#[derive(Debug, Clone)]
pub enum RemoteEnd {
    /// It took effect. Ends leased and at-most-once runs alike.
    Done {
        /// JSON to store, replacing that of the claim.
        metadata: Option<Metadata>,
    },
    /// It failed. A leased event runs again after a stored pause, or is dead when its attempts are
    /// used up; an at-most-once event is lost.
    Failed {
        /// Why it failed.
        reason: String,
        /// The event's bytes, for the dead letter.
        body: Option<Record>,
        /// How many runs the event gets before it is dead; `None`: as many as the guard's settings say.
        /// Say the same as in the claim.
        attempts_max: Option<u32>,
    },
    /// It failed for good. A leased event is dead, an at-most-once event is lost.
    Dead {
        /// Why it failed.
        reason: String,
        /// The event's bytes, for the dead letter.
        body: Option<Record>,
    },
    /// It was not run: the event may be claimed again at once.
    Released,
}

/// What a run was settled as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteSettled {
    /// The state of the event.
    pub state: State,
    /// Since when, or when a retry is due; by the ledger's clock.
    pub at: Time,
}

impl<L: Ledger> Guard<L> {
    /// Claims as the caller says, under its own nonces; each claim has its own outcome. The scopes
    /// are those of the claims. Of equal claims (the same event under the same nonce) one is made: if the
    /// event is claimed, the others are `Busy`, for each outcome is one permission to run it.
    ///
    /// `Busy` without an end means that an open transaction holds the event. If a claim was sent before
    /// and its answer was lost, that transaction may be its own first try: nothing is decided yet, and
    /// whoever forgets the claim may lose the event. Send it again. (Where the connection was lost during
    /// this very call, the answer is an error that says so.)
    ///
    /// ```
    /// use std::time::Duration;
    /// use hapax::backend::memory::MemoryLedger;
    /// use hapax::guard::{RemoteEnd, RemoteRun};
    /// use hapax::ledger::{Claim, Identity, LeaseSettings, Mode, Outcome};
    /// use hapax::{EventId, Guard, Scope};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// let guard = Guard::new(MemoryLedger::default());
    /// let identity = Identity::new(Scope::new("mailer")?, EventId::new("order-17-paid")?);
    /// let settings = LeaseSettings { lease: Duration::from_secs(60), attempts_max: 5, alone: true };
    /// let claim = Claim::new(identity.clone(), Mode::Lease(settings));
    /// let Some(Ok(Outcome::First(grant))) = guard.claim_remote(vec![claim]).await.pop() else { panic!() };
    /// let run = RemoteRun { identity, time: None, token: grant.token };
    /// guard.settle_remote(&run, RemoteEnd::Done { metadata: None }).await?;
    /// # Ok(()) }
    /// ```
    pub async fn claim_remote(&self, claims: Vec<Claim>) -> Vec<Result<Outcome>> {
        if let Err(error) = self.core.check_remote() {
            return claims.iter().map(|_| Err(error.copy())).collect();
        }
        let asked: Vec<_> =
            claims.iter().map(|claim| self.core.in_scope(claim.identity.scope.clone())).collect();
        let spans: Vec<_> = asked.iter().zip(&claims).map(|(core, claim)| core.claim_span(claim)).collect();
        let mut asked_for: Vec<Asked> = Vec::with_capacity(claims.len());
        let mut sound: Vec<Claim> = Vec::with_capacity(claims.len());
        let mut places = HashMap::with_capacity(claims.len());
        for claim in claims {
            asked_for.push(match self.ledger.settings().check(&claim) {
                Err(error) => Asked::Refused(error),
                Ok(week) => match places.entry((claim.identity.clone(), week, claim.nonce)) {
                    Place::Occupied(first) => Asked::Again(*first.get()),
                    Place::Vacant(place) => {
                        place.insert(sound.len());
                        sound.push(claim);
                        Asked::Sent(sound.len() - 1)
                    }
                },
            });
        }
        let outcomes = self.core.batcher().claim_as_sent(&sound).await;
        let answers: Vec<_> = asked_for.into_iter().map(|asked| asked.answer(&outcomes)).collect();
        for ((core, span), answer) in asked.iter().zip(&spans).zip(&answers) {
            core.saw(span, answer.as_ref().ok());
        }
        for (claim, answer) in sound.iter().zip(&outcomes) {
            if let Ok(outcome) = answer {
                self.core.note_remote_skip(claim, outcome);
            }
        }
        answers
    }

    /// Settles a run by its token. `Fenced`: the token does not hold the event, and nothing was
    /// changed. The same call again has the same answer.
    pub async fn settle_remote(&self, run: &RemoteRun, end: RemoteEnd) -> Result<RemoteSettled> {
        self.core.check_remote()?;
        let core = self.core.in_scope(run.identity.scope.clone());
        match end {
            RemoteEnd::Done { metadata } => {
                let verdict = Verdict::Done { metadata: metadata.clone() };
                match core.settle_token(self.settling(run, verdict)?).await? {
                    // The token decides whether this run is the at-most-once run that it ends.
                    Settled::Fenced { state: Some(State::Claimed | State::Finished) } => {
                        self.settle_as(&core, run, Verdict::Finished { metadata }).await
                    }
                    settled => settled_as(settled, run, State::Done),
                }
            }
            RemoteEnd::Released => self.settle_as(&core, run, Verdict::release()).await,
            RemoteEnd::Failed { reason, body, attempts_max } => {
                let mut settings = self.core.settings().failure_settings();
                settings.attempts_max = attempts_max.unwrap_or(settings.attempts_max);
                let verdict = self.failed_verdict(run, &reason, body, Some(settings)).await?;
                self.settle_as(&core, run, verdict).await
            }
            RemoteEnd::Dead { reason, body } => {
                let verdict = self.failed_verdict(run, &reason, body, None).await?;
                self.settle_as(&core, run, verdict).await
            }
        }
    }

    /// Settles many runs as done, each with its own answer.
    pub async fn done_remote(&self, runs: Vec<(RemoteRun, Option<Metadata>)>) -> Vec<Result<RemoteSettled>> {
        let mut sound = Vec::with_capacity(runs.len());
        let mut answers: Vec<Option<Result<RemoteSettled>>> = Vec::with_capacity(runs.len());
        for (run, metadata) in &runs {
            let checked = self.core.check_remote().and_then(|()| {
                let settle = self.settling(run, Verdict::Done { metadata: metadata.clone() })?;
                self.ledger.settings().check_settle(&settle)?;
                Ok(settle)
            });
            answers.push(checked.map(|settle| sound.push(settle)).err().map(Err));
        }
        let mut settled = self.core.batcher().settle_many(&sound).await.into_iter();
        let mut all = Vec::with_capacity(runs.len());
        for ((run, metadata), answer) in runs.into_iter().zip(answers) {
            let answer = match answer {
                Some(refused) => refused,
                None => match settled.next() {
                    Some(Ok(Settled::Fenced { state: Some(State::Claimed | State::Finished) })) => {
                        self.settle_remote(&run, RemoteEnd::Done { metadata }).await
                    }
                    Some(Ok(settled)) => settled_as(settled, &run, State::Done),
                    Some(Err(error)) => Err(error),
                    None => Err(Error::Corrupt("a batch had fewer answers than settlings".into())),
                },
            };
            all.push(answer);
        }
        all
    }

    /// Extends a lease to `lease` from now, by the ledger's clock; returns its end.
    pub async fn extend_remote(&self, run: &RemoteRun, lease: std::time::Duration) -> Result<Time> {
        self.core.check_remote()?;
        let extend =
            Extend { identity: run.identity.clone(), week: self.week_of(run)?, token: run.token, lease };
        self.core.batcher().extend(extend).await?.ok_or_fenced(&run.identity, run.token)
    }

    async fn settle_as(&self, core: &Core, run: &RemoteRun, verdict: Verdict) -> Result<RemoteSettled> {
        let state = verdict.state();
        settled_as(core.settle_token(self.settling(run, verdict)?).await?, run, state)
    }

    /// The verdict on a failed run; without settings it failed for good. The number of a run does not change
    /// while its token is the current one, and the settling that follows carries the token.
    async fn failed_verdict(
        &self,
        run: &RemoteRun,
        reason: impl fmt::Display,
        body: Option<Record>,
        settings: Option<FailureSettings>,
    ) -> Result<Verdict> {
        let reason = reason_of(reason);
        let entry = match self.ledger.get(&run.identity, run.time).await? {
            Some(entry) if entry.token == run.token => entry,
            other => return Err(fenced(run, other.map(|entry| entry.state))),
        };
        Ok(match (entry.state, settings) {
            (State::Claimed | State::Finished | State::Lost, _) if body.is_some() => {
                return Err(Error::invalid(
                    "payload",
                    format!(
                        "{} was claimed at most once and never runs again, so its content is not kept; \
                         send the failure without it",
                        run.identity
                    ),
                ));
            }
            (State::Claimed | State::Finished | State::Lost, _) => Verdict::Lost { reason },
            (State::Dead, _) | (_, None) => Verdict::Dead { reason, body },
            (_, Some(settings)) if entry.attempts >= settings.attempts_max => Verdict::Dead { reason, body },
            (_, Some(settings)) => {
                let after = settings.pause(entry.attempts);
                Verdict::Retry { after, counted: true, reason: Some(reason), body: None }
            }
        })
    }

    fn settling(&self, run: &RemoteRun, verdict: Verdict) -> Result<Settle> {
        Ok(Settle {
            identity: run.identity.clone(),
            week: self.week_of(run)?,
            token: run.token,
            verdict,
            order: None,
            advance_to: None,
        })
    }

    fn week_of(&self, run: &RemoteRun) -> Result<Week> {
        Week::route(self.ledger.settings().identity, &run.identity.id, run.time)
    }
}

/// What became of a claim on its way to the ledger.
enum Asked {
    /// It was not sent.
    Refused(Error),
    /// It was sent, in this place.
    Sent(usize),
    /// It is the same claim as the one in this place.
    Again(usize),
}

impl Asked {
    fn answer(self, outcomes: &[Result<Outcome>]) -> Result<Outcome> {
        let of = |place: usize| match outcomes.get(place) {
            Some(Ok(outcome)) => Ok(outcome.clone()),
            Some(Err(error)) => Err(error.copy()),
            None => Err(Error::Corrupt("a batch had fewer answers than claims".into())),
        };
        match self {
            Asked::Refused(error) => Err(error),
            Asked::Sent(place) => of(place),
            Asked::Again(place) => Ok(match of(place)? {
                Outcome::First(grant) => Outcome::Busy { until: Some(grant.until), owner: None },
                other => other,
            }),
        }
    }
}

fn settled_as(settled: Settled, run: &RemoteRun, state: State) -> Result<RemoteSettled> {
    settled.ok_or_fenced(&run.identity, run.token).map(|at| RemoteSettled { state, at })
}

fn fenced(run: &RemoteRun, state: Option<State>) -> Error {
    match (Settled::Fenced { state }).ok_or_fenced(&run.identity, run.token) {
        Err(error) => error,
        Ok(_) => Error::Fenced { what: run.identity.to_string() },
    }
}

impl Core {
    /// A caller outside of this process cannot be told that its claim guards nothing.
    fn check_remote(&self) -> Result<()> {
        if self.guarded() {
            return Ok(());
        }
        Err(Error::Config(
            "the guard is switched off (dedup.enabled = false); claims of other processes cannot do without it".into(),
        ))
    }

    async fn settle_token(&self, settle: Settle) -> Result<Settled> {
        let verdict = Meter::verdict(&settle.verdict);
        let answer = self.batcher().settle(settle).await;
        if let Some(meter) = self.meter() {
            meter.settled(verdict, &answer);
        }
        answer
    }
}
