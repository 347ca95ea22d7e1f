//! A week that is half dropped is a state of the model, and every command may meet it. The reference drops a week in one step; the
//! ledger under test stops anywhere on the way, and goes on some commands later. Meanwhile what outlives its week is the same on both
//! sides. Of all else of such a week (*gone* on the reference) the tested one may still know, or may say busy; it grants nothing.

use super::super::{Harness, kit};
use super::world::{World, secs};
use super::{Pair, settle_one};
use crate::clock::Time;
use crate::error::Error;
use crate::id::EventId;
use crate::ledger::{
    Claim, Claims as _, IdentityRule, Mode, Operations as _, Outcome, Settle, SweepSettings, Swept, Week,
};

/// How long a week stays half dropped, in commands.
const COMMANDS_MAX: u64 = 40;

/// A sweep that has stopped on the way.
#[derive(Debug)]
pub(super) struct Leaving {
    weeks: Vec<Week>,
    /// What the reference has swept, and what the tested one has so far.
    swept: (Swept, Swept),
    /// How many commands it takes until it goes on.
    commands: u64,
}

fn week_of(id: &EventId) -> Week {
    Week::route(IdentityRule::Id, id, None).unwrap()
}

fn add(mut one: Swept, other: Swept) -> Swept {
    one.rows += other.rows;
    one.lost += other.lost;
    one.held += other.held;
    one.weeks.extend(other.weeks);
    one.weeks.sort();
    one
}

fn settings() -> SweepSettings {
    SweepSettings { retention: secs(7 * 86_400 + 50), batch_max: 1000, dry_run: false }
}

fn shape(swept: &Swept) -> String {
    let weeks: Vec<_> = swept.weeks.iter().filter(|(_, entries)| *entries > 0).collect();
    format!("rows {} lost {} held {} {weeks:?}", swept.rows, swept.lost, swept.held)
}

impl<H: Harness> Pair<'_, H> {
    /// Goes on with a sweep that has stopped, when its time has come.
    pub(super) async fn go_on(&mut self, world: &World) {
        let Some(leaving) = &mut self.leaving else { return };
        self.met += 1;
        if leaving.commands == 0 {
            self.finish_sweep(world).await;
        } else {
            leaving.commands -= 1;
        }
    }

    /// Days go by, with a sweep now and then, so that weeks become old. A longer pause would be taken for a leap of the clock.
    pub(super) async fn age(&mut self, world: &World) {
        self.finish_sweep(world).await;
        for _ in 0..3 {
            self.advance(secs(3 * 86_400)).await;
            self.sweep(false, world).await;
            if self.leaving.is_some() {
                return;
            }
        }
    }

    pub(super) async fn advance(&mut self, by: std::time::Duration) {
        self.log.push(format!("advance {by:?}"));
        self.harnesses.0.advance(by).await;
        self.harnesses.1.advance(by).await;
    }

    pub(super) async fn sweep(&mut self, dry_run: bool, world: &World) {
        self.finish_sweep(world).await;
        let settings = SweepSettings { dry_run, ..settings() };
        let left = self.ledgers.0.sweep(settings).await.unwrap();
        let mut right = Swept::default();
        if !dry_run && self.rng.chance(70) {
            let steps = 1 + self.rng.below(6) as u32;
            self.log.push(format!("a sweep stops after {steps} steps"));
            right = self.harnesses.1.sweep_part(&self.ledgers.1, settings, steps).await;
            let is_there = |week: &Week| right.weeks.iter().all(|(gone, _)| gone != week);
            let weeks: Vec<Week> = left.weeks.iter().map(|(week, _)| *week).filter(is_there).collect();
            if !weeks.is_empty() {
                self.log.push(format!("half dropped: {weeks:?}"));
                let commands = self.rng.below(COMMANDS_MAX);
                self.leaving = Some(Leaving { weeks, swept: (left, right), commands });
                return self.forget_swept(world).await;
            }
        }
        right = add(right, self.ledgers.1.sweep(settings).await.unwrap());
        self.swept(dry_run, &left, &right, world).await;
    }

    /// Finishes a sweep that has stopped, if there is one.
    pub(super) async fn finish_sweep(&mut self, world: &World) {
        let Some(Leaving { swept: (left, right), .. }) = self.leaving.take() else { return };
        let left = add(left, self.ledgers.0.sweep(settings()).await.unwrap());
        let right = add(right, self.ledgers.1.sweep(settings()).await.unwrap());
        // How many entries the weeks had may differ by now: commands have changed some while they were half dropped.
        for (week, _) in &left.weeks {
            let gone = right.weeks.iter().any(|(other, _)| other == week);
            self.same(&format!("{week} is dropped"), "true", &gone.to_string());
        }
        self.forget_swept(world).await;
    }

    async fn swept(&mut self, dry_run: bool, left: &Swept, right: &Swept, world: &World) {
        self.same(&format!("sweep, dry {dry_run}"), &shape(left), &shape(right));
        self.forget_swept(world).await;
    }

    async fn forget_swept(&mut self, world: &World) {
        for event in 0..world.len() {
            let identity = world.identity(event);
            if self.ledgers.0.get(&identity, None).await.unwrap().is_none() {
                self.spec.forget(&identity);
            }
        }
    }

    /// Whether an event's week may be half dropped, and the event did not outlive it. The tested one may also drop a week that the
    /// reference has never made, since nothing came of it.
    pub(super) async fn is_gone(&self, claim: &Claim) -> bool {
        self.leaving.is_some()
            && week_of(&claim.identity.id).number() > 0
            && self.ledgers.0.get(&claim.identity, None).await.unwrap().is_none()
    }

    /// A claim on what is gone. A transaction claims like any other.
    pub(super) async fn claim_gone(&mut self, mut claim: Claim, in_transaction: bool, world: &World) {
        claim.nonce = crate::ledger::Nonce(self.rng.next() as i64); // a repeat may be told what it was told before
        if claim.mode == Mode::Refused {
            return; // it is written, whatever is known
        }
        let claims = std::slice::from_ref(&claim);
        let right = if in_transaction {
            self.harnesses.1.in_transaction(&self.ledgers.1, claims, true).await.unwrap()
        } else {
            self.ledgers.1.claim(claims).await.unwrap()
        };
        if matches!(right[0], Ok(Outcome::Busy { until: None, .. })) {
            self.log.push(format!("gone: {} is busy", claim.identity));
            return;
        }
        let left = self.ledgers.0.claim(claims).await.unwrap();
        if let (Ok(Outcome::TooOld { .. } | Outcome::Stale { .. }), Ok(answer)) = (&left[0], &right[0]) {
            let known = matches!(answer.name(), "too_old" | "duplicate" | "stale" | "mismatch");
            self.same(&format!("gone: {} {}", claim.identity, answer.name()), "true", &known.to_string());
            return;
        }
        self.compare_claims("gone", claims, &left, &right); // not gone: its week is there, or was never used
        let now = self.now().await;
        self.spec.claimed(claims, &right, now);
        if let (Ok(Outcome::First(left)), Ok(Outcome::First(right))) = (&left[0], &right[0]) {
            self.grants.push((claim.clone(), *left, *right));
        }
        self.compare_entries(&claim, world).await;
        self.claims.push(claim);
    }

    /// A settling of what is gone: nobody has a lease there. The end of an at-most-once claim may still be recorded.
    pub(super) async fn settle_gone(&mut self, claim: &Claim, settle: &Settle) {
        if !matches!(claim.mode, Mode::Once { .. }) {
            let answer = settle_one(&self.ledgers.1, settle).await.unwrap();
            let settled_before = matches!(answer, crate::ledger::Settled::Ok { at } if at < self.now().await);
            let fenced = kit::is_fenced(answer) || settled_before;
            self.same(&format!("gone: settle {}", claim.identity), "true", &fenced.to_string());
        }
    }

    /// Whether something was refused because it would open again what is in a week that is only closed: nothing was changed.
    pub(super) fn is_refused_while_closed(&mut self, error: Option<&Error>) -> bool {
        let refused = self.leaving.is_some() && matches!(error, Some(Error::Contended { .. }));
        if refused {
            self.log.push("not while its week is closed".into());
        }
        refused
    }

    async fn now(&self) -> Time {
        self.ledgers.1.now().await.unwrap()
    }

    /// An event for a transaction: a timeless one, since a transaction makes no week; or, if a week is half dropped, one of it.
    pub(super) fn any_in_transaction(&mut self, world: &World) -> Claim {
        let in_week = self.leaving.is_some() && self.rng.chance(50);
        let event =
            if in_week { world.timeless() + self.rng.below(3) } else { self.rng.below(world.timeless()) };
        let claim = world.claim(event, Mode::Done, &mut self.rng);
        let leaves =
            self.leaving.as_ref().is_some_and(|leaving| leaving.weeks.contains(&week_of(&claim.identity.id)));
        if in_week && !leaves { world.claim(0, Mode::Done, &mut self.rng) } else { claim }
    }
}
