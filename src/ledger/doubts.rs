//! Claims whose result is unknown: their connection was lost, and no answer has decided them since.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Claim, Identity, Mode};

/// How many events with claims in doubt are remembered; any others wait for their lease to lapse.
const DOUBTS_MAX: usize = 10_000;
/// How many claims in doubt are remembered per event: any of its deliveries may have won.
const DOUBTS_PER_EVENT_MAX: usize = 4;

/// Claims whose result is unknown, by identity.
#[derive(Default)]
pub(super) struct Doubts {
    count: AtomicUsize,
    claims: Mutex<HashMap<Identity, Vec<Doubt>>>,
}

struct Doubt {
    /// Without its bytes: repeating it only asks whether it was granted.
    claim: Claim,
    /// Whether a caller is asking for it right now. Nobody else may: both would be granted it.
    asked: bool,
}

impl Doubts {
    fn lock(&self) -> MutexGuard<'_, HashMap<Identity, Vec<Doubt>>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Gives a claim the nonce of the oldest claim in doubt on the same event in the same mode.
    /// Returns whether there was one. It stays in doubt until [`decided`](Doubts::decided).
    pub(super) fn ask(&self, claim: &mut Claim) -> bool {
        if self.is_empty() {
            return false;
        }
        let mut claims = self.lock();
        let Some(doubts) = claims.get_mut(&claim.identity) else { return false };
        let Some(doubt) = doubts.iter_mut().find(|one| !one.asked && one.claim.mode == claim.mode) else {
            return false;
        };
        doubt.asked = true;
        claim.nonce = doubt.claim.nonce;
        true
    }

    /// Whether a claim is in doubt.
    pub(super) fn has(&self, claim: &Claim) -> bool {
        let is = |doubts: &Vec<Doubt>| doubts.iter().any(|one| one.claim.nonce == claim.nonce);
        !self.is_empty() && self.lock().get(&claim.identity).is_some_and(is)
    }

    /// A claim is in doubt, and nobody asks for it.
    pub(super) fn note(&self, claim: &Claim) {
        if !matches!(claim.mode, Mode::Lease(_) | Mode::Once { .. }) {
            return;
        }
        let mut claims = self.lock();
        if claims.len() >= DOUBTS_MAX && !claims.contains_key(&claim.identity) {
            return;
        }
        let doubts = claims.entry(claim.identity.clone()).or_default();
        if let Some(known) = doubts.iter_mut().find(|one| one.claim.nonce == claim.nonce) {
            known.asked = false;
        } else if doubts.len() < DOUBTS_PER_EVENT_MAX {
            let claim = Claim { body: None, hold: false, ..claim.clone() };
            doubts.push(Doubt { claim, asked: false });
        }
        self.count.store(claims.len(), Ordering::Relaxed);
    }

    /// A claim was answered.
    pub(super) fn decided(&self, claim: &Claim) {
        if self.is_empty() {
            return;
        }
        let mut claims = self.lock();
        let Some(doubts) = claims.get_mut(&claim.identity) else { return };
        doubts.retain(|one| one.claim.nonce != claim.nonce);
        if doubts.is_empty() {
            claims.remove(&claim.identity);
        }
        self.count.store(claims.len(), Ordering::Relaxed);
    }

    /// Takes all that nobody asks for.
    pub(super) fn take(&self) -> Vec<Claim> {
        let mut claims = self.lock();
        let mut taken = Vec::new();
        for doubts in claims.values_mut() {
            taken.extend(doubts.extract_if(.., |one| !one.asked).map(|doubt| doubt.claim));
        }
        claims.retain(|_, doubts| !doubts.is_empty());
        self.count.store(claims.len(), Ordering::Relaxed);
        taken
    }
}
