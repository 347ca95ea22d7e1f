//! Deliberately broken ledgers. Each makes a mistake that people make; the suite must catch every one of them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use super::{Harness, noon};
use crate::backend::memory::MemoryLedger;
use crate::clock::{Clock, ManualClock, Time};
use crate::error::Result;
use crate::id::Scope;
use crate::ledger::{
    Claim, Claims, Extend, Identity, Intervene, Intervened, Intervention, Marker, Nonce, Operations, Outcome,
    Settings, Settle, Settled, State, SweepSettings, Swept, Token, Verdict,
};
use crate::ledger_over;

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    /// Settling asks whether the owner's name fits, not whether the token does.
    OwnerInsteadOfToken,
    /// Leases are judged by the clock of whoever asks.
    ClientClock,
    /// Claims look first and write later.
    CheckThenAct,
    /// Every row counts its own tokens, from 1.
    TokenPerRow,
    /// A lost acknowledgement is resolved by looking, so whoever repeats a claim finds itself busy.
    ReadBack,
    /// Giving a lease back deletes the entry.
    ReleaseDeletes,
    /// One bad row fails its batch.
    AllOrNothing,
    /// A lapsed lease is not an attempt: attempts count only when somebody catches an error.
    DeathsUncounted,
}

/// Fresh storage with a broken ledger on it.
#[derive(Debug)]
pub struct MutantHarness {
    mutant: Mutant,
    clock: ManualClock,
    skew: Arc<AtomicI64>,
    tokens: Arc<Mutex<HashMap<Identity, Vec<Token>>>>,
    opened: AtomicUsize,
    ledger: MemoryLedger,
}

/// The ledger's clock as a client would read it: off by whatever the client is off by.
#[derive(Debug)]
struct Skewed {
    clock: ManualClock,
    skew: Arc<AtomicI64>,
}

impl Clock for Skewed {
    fn now(&self) -> Time {
        Time::from_micros(self.clock.now().as_micros() + self.skew.load(Ordering::SeqCst))
    }
}

impl MutantHarness {
    /// A fresh one.
    pub fn new(mutant: Mutant) -> Self {
        let clock = ManualClock::new(noon());
        let skew = Arc::new(AtomicI64::new(0));
        let skewed = Skewed { clock: clock.clone(), skew: Arc::clone(&skew) };
        let ledger = MemoryLedger::with_clock(Settings::default(), Arc::new(skewed));
        MutantHarness { mutant, clock, skew, tokens: Arc::default(), opened: AtomicUsize::new(0), ledger }
    }
}

#[async_trait]
impl Harness for MutantHarness {
    type Ledger = MutantLedger;

    async fn open(&self, settings: Settings) -> MutantLedger {
        // Each client is 90 s further ahead than the one before.
        let ahead = 90_000_000 * self.opened.fetch_add(1, Ordering::SeqCst) as i64;
        MutantLedger {
            mutant: self.mutant,
            inner: self.ledger.with_settings(settings),
            skew: Arc::clone(&self.skew),
            ahead: if self.mutant == Mutant::ClientClock { ahead } else { 0 },
            tokens: Arc::clone(&self.tokens),
        }
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    async fn in_transaction(
        &self,
        ledger: &MutantLedger,
        claims: &[Claim],
        commit: bool,
    ) -> Result<Vec<Result<Outcome>>> {
        let mut transaction = ledger.inner.begin();
        let outcomes = transaction.claim(claims)?;
        if commit {
            transaction.commit();
        }
        Ok(outcomes)
    }

    async fn settle_in_transaction(
        &self,
        ledger: &MutantLedger,
        settles: &[Settle],
        markers: (&Scope, &[Marker]),
        commit: bool,
    ) -> Result<Vec<Result<Settled>>> {
        let mut transaction = ledger.inner.begin();
        let answers = transaction.settle(settles)?;
        transaction.set_markers(markers.0, markers.1);
        if commit {
            transaction.commit();
        }
        Ok(answers)
    }

    async fn was_committed(&self, ledger: &MutantLedger, claim: &Claim) -> Result<bool> {
        ledger.inner.was_committed(claim)
    }
}

/// A memory ledger with a mistake in it.
#[derive(Debug, Clone)]
pub struct MutantLedger {
    mutant: Mutant,
    inner: MemoryLedger,
    skew: Arc<AtomicI64>,
    ahead: i64,
    tokens: Arc<Mutex<HashMap<Identity, Vec<Token>>>>,
}

impl MutantLedger {
    fn tokens(&self) -> std::sync::MutexGuard<'_, HashMap<Identity, Vec<Token>>> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number a row gives to a token of the ledger.
    fn of_row(&self, identity: &Identity, outcome: Outcome) -> Outcome {
        outcome.map(|mut grant| {
            let mut tokens = self.tokens();
            let tokens = tokens.entry(identity.clone()).or_default();
            if !tokens.contains(&grant.token) {
                tokens.push(grant.token);
            }
            grant.token = Token(tokens.len() as i64);
            grant
        })
    }

    /// The token under which a settling or an extension really goes.
    async fn token(&self, identity: &Identity, given: Token) -> Result<Token> {
        match self.mutant {
            Mutant::OwnerInsteadOfToken => {
                let entry = self.inner.get(identity, None).await?;
                let mine = entry.filter(|entry| entry.owner == self.inner.settings().owner);
                Ok(mine.map_or(given, |entry| entry.token))
            }
            Mutant::TokenPerRow => {
                let tokens = self.tokens();
                let at = usize::try_from(given.0 - 1).ok();
                Ok(at.and_then(|at| tokens.get(identity)?.get(at).copied()).unwrap_or(given))
            }
            _ => Ok(given),
        }
    }

    async fn check_then_act(&self, claim: &Claim) -> Result<Outcome> {
        let now = self.inner.now().await?;
        let seen = self.inner.get(&claim.identity, claim.time).await?;
        for _ in 0..8 {
            tokio::task::yield_now().await; // the round trip between looking and writing
        }
        if seen.is_none_or(|entry| entry.state == State::Leased && entry.at <= now) {
            let _ = self.forget(&claim.identity).await;
        }
        self.inner.claim(std::slice::from_ref(claim)).await?.remove(0)
    }

    async fn forget(&self, identity: &Identity) -> Result<Intervened> {
        let forget = Intervene {
            identity: identity.clone(),
            time: None,
            what: Intervention::Forget,
            by: "mutant".into(),
            reason: String::new(),
            out_of_order: false,
            token: None,
            dry_run: false,
        };
        self.inner.intervene(&forget).await
    }

    /// Runs with the clock of this client.
    fn skewed(&self) -> Unskew<'_> {
        self.skew.store(self.ahead, Ordering::SeqCst);
        Unskew(&self.skew)
    }
}

struct Unskew<'a>(&'a AtomicI64);

impl Drop for Unskew<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::SeqCst);
    }
}

ledger_over!(MutantLedger {
    Claims {
        async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
            let _skewed = self.skewed();
            match self.mutant {
                Mutant::CheckThenAct => {
                    let mut outcomes = Vec::new();
                    for claim in claims {
                        outcomes.push(self.check_then_act(claim).await);
                    }
                    Ok(outcomes)
                }
                Mutant::ReadBack => {
                    let fresh: Vec<_> =
                        claims.iter().map(|claim| Claim { nonce: Nonce::random(), ..claim.clone() }).collect();
                    self.inner.claim(&fresh).await
                }
                Mutant::TokenPerRow => {
                    let outcomes = self.inner.claim(claims).await?;
                    let with = claims.iter().zip(outcomes);
                    Ok(with.map(|(claim, outcome)| Ok(self.of_row(&claim.identity, outcome?))).collect())
                }
                Mutant::AllOrNothing => {
                    self.inner.claim(claims).await?.into_iter().map(|one| Ok(Ok(one?))).collect()
                }
                Mutant::DeathsUncounted => {
                    let beside: Vec<_> = claims
                        .iter()
                        .cloned()
                        .map(|mut claim| {
                            if let crate::ledger::Mode::Lease(settings) = &mut claim.mode {
                                settings.alone = false;
                            }
                            claim
                        })
                        .collect();
                    self.inner.claim(&beside).await
                }
                _ => self.inner.claim(claims).await,
            }
        }
        async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
            let mut settles = settles.to_vec();
            for settle in &mut settles {
                settle.token = self.token(&settle.identity, settle.token).await?;
            }
            let answers = self.inner.settle(&settles).await?;
            for (settle, answer) in settles.iter().zip(&answers) {
                let given_back = matches!(&settle.verdict, Verdict::Retry { counted: false, .. })
                    && matches!(answer, Ok(Settled::Ok { .. }));
                if self.mutant == Mutant::ReleaseDeletes && given_back {
                    let _ = self.forget(&settle.identity).await;
                }
            }
            Ok(answers)
        }
        async fn extend(&self, extends: &[Extend]) -> Result<Vec<Result<Settled>>> {
            let mut extends = extends.to_vec();
            for extend in &mut extends {
                extend.token = self.token(&extend.identity, extend.token).await?;
            }
            let _skewed = self.skewed();
            self.inner.extend(&extends).await
        }
        async fn now(&self) -> Result<Time> {
            self.inner.now().await
        }
        async fn epoch(&self) -> Result<crate::ledger::Epoch> {
            self.inner.epoch().await
        }
    }
    ConsumerStore {
        async fn markers(
            &self,
            scope: &crate::Scope,
            topic: &crate::Topic,
            partitions: &[i32],
        ) -> Result<Vec<crate::ledger::Marker>> {
            self.inner.markers(scope, topic, partitions).await
        }
    }
    Operations {
        async fn sweep(&self, settings: SweepSettings) -> Result<Swept> {
            self.inner.sweep(settings).await
        }
    }
});
