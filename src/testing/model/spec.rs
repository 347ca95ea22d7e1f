//! What must hold whatever the state machine says: a handful of invariants, written without looking at it.

use std::collections::HashMap;

use crate::clock::Time;
use crate::id::{Aggregate, Scope};
use crate::ledger::{
    Claim, Grant, Identity, Intervened, Mode, Nonce, Outcome, Settle, Settled, Token, Verdict,
};

/// Watches one ledger's answers.
#[derive(Debug, Default)]
pub(crate) struct Spec {
    identities: HashMap<Identity, Known>,
    last: HashMap<(Scope, Aggregate), u64>,
    granted: HashMap<Nonce, Token>,
    token_max: Option<Token>,
}

#[derive(Debug, Default, Clone)]
struct Known {
    live: Option<(Token, Time)>,
    over: bool,
    unordered: bool,
}

impl Spec {
    /// A batch of claims was answered at `now`.
    pub(crate) fn claimed(&mut self, claims: &[Claim], outcomes: &[crate::Result<Outcome>], now: Time) {
        let before = self.token_max;
        for (claim, outcome) in claims.iter().zip(outcomes) {
            match outcome {
                Ok(Outcome::First(grant)) => self.first(claim, grant, now, before),
                Ok(Outcome::Stale { last }) => self.stale(claim, *last),
                _ => {}
            }
        }
    }

    fn first(&mut self, claim: &Claim, grant: &Grant, now: Time, before: Option<Token>) {
        let name = &claim.identity;
        if self.granted.get(&claim.nonce) == Some(&grant.token) {
            // The same claim again. It begins a lease anew only while that lease is the current one.
            let known = self.identities.entry(name.clone()).or_default();
            if let Some((token, until)) = &mut known.live {
                assert_eq!(*token, grant.token, "{name}: a repeat was granted beside another lease");
                *until = grant.until;
            }
            return;
        }
        assert!(Some(grant.token) > before, "{name}: token {} after {before:?}", grant.token);
        self.token_max = self.token_max.max(Some(grant.token));
        self.granted.insert(claim.nonce, grant.token);
        let known = self.identities.entry(name.clone()).or_default();
        assert!(!known.over, "{name}: granted although it took effect before");
        if let Some((token, until)) = known.live {
            assert!(until <= now, "{name}: granted while {token} holds it until {until}, at {now}");
        }
        known.live = matches!(claim.mode, Mode::Lease(_)).then_some((grant.token, grant.until));
        known.over = !matches!(claim.mode, Mode::Lease(_));
        if let Some(order) = claim.order.as_ref().filter(|_| !known.unordered) {
            let last = self.last.get(&(name.scope.clone(), order.aggregate.clone())).copied();
            assert!(
                last.is_none_or(|last| order.seq > last),
                "{name}: granted seq {} after {last:?}",
                order.seq
            );
            if known.over {
                self.moved(claim, order.seq);
            }
        }
    }

    fn stale(&mut self, claim: &Claim, answered: u64) {
        let Some(order) = &claim.order else { return };
        let key = (claim.identity.scope.clone(), order.aggregate.clone());
        let last = self.last.get(&key).copied();
        assert!(
            last.is_none_or(|last| answered >= last),
            "{key:?}: last seq went from {last:?} to {answered}"
        );
        self.last.insert(key, answered);
    }

    fn moved(&mut self, claim: &Claim, seq: u64) {
        if let Some(order) = &claim.order {
            let last = self.last.entry((claim.identity.scope.clone(), order.aggregate.clone())).or_default();
            *last = seq.max(*last);
        }
    }

    /// A settling was answered.
    pub(crate) fn settled(&mut self, claim: &Claim, settle: &Settle, answer: Settled) {
        let known = self.identities.entry(settle.identity.clone()).or_default();
        if !matches!(answer, Settled::Ok { .. }) {
            return;
        }
        if known.live.is_some_and(|(token, _)| token == settle.token) {
            known.live = None;
        }
        match settle.verdict {
            Verdict::Done { .. } => {
                known.over = true;
                let order = claim.order.as_ref().map_or(0, |order| order.seq);
                self.moved(claim, order);
            }
            Verdict::Retry { .. } => known.over = false, // an at-most-once claim was given back
            _ => {}
        }
    }

    /// A lease was extended.
    pub(crate) fn extended(&mut self, identity: &Identity, token: Token, answer: Settled) {
        let known = self.identities.entry(identity.clone()).or_default();
        if let (Settled::Ok { at }, Some((live, until))) = (answer, &mut known.live) {
            assert_eq!(*live, token, "{identity}: a stale token extended");
            *until = at;
        }
    }

    /// A person intervened: what was known of the entry no longer binds. One that was brought back out of order has none
    /// from then on.
    pub(crate) fn intervened(&mut self, done: &Intervened) {
        let identity = &done.before.identity;
        self.forget(identity);
        if done.after.as_ref().is_some_and(|after| after.order.is_none()) {
            self.identities.entry(identity.clone()).or_default().unordered = true;
        }
    }

    /// A sweep forgot the entry.
    pub(crate) fn forget(&mut self, identity: &Identity) {
        self.identities.remove(identity);
    }
}
