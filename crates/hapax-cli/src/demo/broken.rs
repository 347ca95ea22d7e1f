//! `--break`: a ledger that forgets one of its checks, to show that the witness would notice. What the read
//! model may forget is in `by_arrival`.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use clap::ValueEnum;
use hapax::backend::sqlite::{SqliteLedger, SqliteTransaction};
use hapax::error::Source;
use hapax::ledger::{
    Audit, Capabilities, Claim, Claims, ConsumerStore, Cursor, Due, Entry, Epoch, Extend, Filter, Finding,
    Grant, HeldQuery, Identity, Intervene, Intervened, Logged, Marker, Operations, Outcome, Page,
    PreventedDays, PublishedDead, Settings, Settle, Settled, SkipBatch, Stat, SweepSettings, Swept, Token,
    TransactionalLedger, Week,
};
use hapax::{EventId, Result, Scope, Tenant, Time, Topic};

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Break {
    /// All leases have the same token, so nobody can tell a late writer from the current one
    Token,
    /// An event that was done before is claimed as if it were new
    Claim,
    /// The read model keeps the change that arrived last, whatever its version
    Version,
}

impl Break {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Break::Token => "token",
            Break::Claim => "claim",
            Break::Version => "version",
        }
    }
}

/// A ledger without one of its checks.
#[derive(Debug, Clone)]
pub struct Broken {
    pub inner: SqliteLedger,
    pub what: Break,
}

/// The token that everybody gets.
const SAME: Token = Token(0);

impl Broken {
    /// The current token of an entry, whatever token the caller has.
    async fn current(&self, identity: &Identity, given: Token) -> Result<Token> {
        if self.what != Break::Token {
            return Ok(given);
        }
        Ok(self.inner.get(identity, None).await?.map_or(given, |entry| entry.token))
    }

    async fn under_current_tokens(&self, settles: &[Settle]) -> Result<Vec<Settle>> {
        let mut settles = settles.to_vec();
        for settle in &mut settles {
            settle.token = self.current(&settle.identity, settle.token).await?;
        }
        Ok(settles)
    }
}

#[async_trait]
impl Claims for Broken {
    async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        let mut outcomes = self.inner.claim(claims).await?;
        for outcome in outcomes.iter_mut().filter(|_| self.what == Break::Token) {
            if let Ok(Outcome::First(grant)) = outcome {
                grant.token = SAME;
            }
        }
        Ok(outcomes)
    }
    async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
        let settles = self.under_current_tokens(settles).await?;
        self.inner.settle(&settles).await
    }
    async fn extend(&self, extends: &[Extend]) -> Result<Vec<Result<Settled>>> {
        let mut extends = extends.to_vec();
        for extend in &mut extends {
            extend.token = self.current(&extend.identity, extend.token).await?;
        }
        self.inner.extend(&extends).await
    }

    // The rest is passed on.
    async fn get(&self, identity: &Identity, time: Option<Time>) -> Result<Option<Entry>> {
        self.inner.get(identity, time).await
    }
    async fn now(&self) -> Result<Time> {
        self.inner.now().await
    }
    async fn epoch(&self) -> Result<Epoch> {
        self.inner.epoch().await
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn settings(&self) -> &Settings {
        self.inner.settings()
    }
}

#[async_trait]
impl ConsumerStore for Broken {
    async fn due(&self, scope: &Scope, query: &HeldQuery, limit: usize) -> Result<Due> {
        self.inner.due(scope, query, limit).await
    }
    async fn unpublished_dead(
        &self,
        scope: &Scope,
        query: &HeldQuery,
        limit: usize,
        reserve: Option<Duration>,
    ) -> Result<Vec<Entry>> {
        self.inner.unpublished_dead(scope, query, limit, reserve).await
    }
    async fn mark_dead_published(&self, entries: &[PublishedDead]) -> Result<()> {
        self.inner.mark_dead_published(entries).await
    }
    async fn set_markers(&self, scope: &Scope, markers: &[Marker]) -> Result<()> {
        self.inner.set_markers(scope, markers).await
    }
    async fn markers(&self, scope: &Scope, topic: &Topic, partitions: &[i32]) -> Result<Vec<Marker>> {
        self.inner.markers(scope, topic, partitions).await
    }
}

#[async_trait]
impl Operations for Broken {
    async fn list(&self, filter: &Filter, after: Option<&Cursor>, limit: usize) -> Result<Page> {
        self.inner.list(filter, after, limit).await
    }
    async fn stat(&self) -> Result<Stat> {
        self.inner.stat().await
    }
    async fn scopes(&self) -> Result<BTreeSet<Scope>> {
        self.inner.scopes().await
    }
    async fn intervene(&self, intervene: &Intervene) -> Result<Intervened> {
        self.inner.intervene(intervene).await
    }
    async fn audit(&self, limit: usize) -> Result<Vec<Audit>> {
        self.inner.audit(limit).await
    }
    async fn audit_of(&self, entries: &[Identity], limit: usize) -> Result<Vec<Audit>> {
        self.inner.audit_of(entries, limit).await
    }
    async fn sweep(&self, settings: SweepSettings) -> Result<Swept> {
        self.inner.sweep(settings).await
    }
    async fn check(&self) -> Result<Vec<Finding>> {
        self.inner.check().await
    }
    async fn note_skips(&self, batch: &SkipBatch) -> Result<()> {
        self.inner.note_skips(batch).await
    }
    async fn skips(&self, tenant: Option<&Tenant>, ids: &[EventId]) -> Result<Vec<Logged>> {
        self.inner.skips(tenant, ids).await
    }
    async fn prevented(&self, since_day: i32) -> Result<PreventedDays> {
        self.inner.prevented(since_day).await
    }
}

#[async_trait]
impl TransactionalLedger for Broken {
    type Transaction = SqliteTransaction;

    async fn claim_in(&self, tx: &mut SqliteTransaction, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        let mut outcomes = TransactionalLedger::claim_in(&self.inner, tx, claims).await?;
        for (outcome, claim) in outcomes.iter_mut().zip(claims).filter(|_| self.what == Break::Claim) {
            if let Ok(Outcome::Duplicate(prior)) = outcome {
                let week = Week::route(self.settings().identity, &claim.identity.id, claim.time)?;
                let again = Grant { token: SAME, week, until: prior.at, attempt: 1, suspect: false };
                *outcome = Ok(Outcome::First(again));
            }
        }
        Ok(outcomes)
    }

    // The rest is passed on.
    async fn begin(&self, time_max: Duration, statement_max: Duration) -> Result<SqliteTransaction> {
        self.inner.begin(time_max, statement_max).await
    }
    async fn settle_in(
        &self,
        tx: &mut SqliteTransaction,
        settles: &[Settle],
    ) -> Result<Vec<Result<Settled>>> {
        let settles = self.under_current_tokens(settles).await?;
        TransactionalLedger::settle_in(&self.inner, tx, &settles).await
    }
    async fn set_markers_in(
        &self,
        tx: &mut SqliteTransaction,
        scope: &Scope,
        markers: &[Marker],
    ) -> Result<()> {
        TransactionalLedger::set_markers_in(&self.inner, tx, scope, markers).await
    }
    async fn is_sound(&self, tx: &mut SqliteTransaction) -> Result<bool> {
        self.inner.is_sound(tx).await
    }
    fn is_contention(&self, error: &(dyn std::error::Error + 'static)) -> bool {
        self.inner.is_contention(error)
    }
    fn is_doubt(&self, error: &(dyn std::error::Error + 'static)) -> bool {
        self.inner.is_doubt(error)
    }
    async fn is_lost(&self, tx: &mut SqliteTransaction) -> bool {
        self.inner.is_lost(tx).await
    }
    async fn commit(&self, tx: SqliteTransaction) -> Result<Result<(), Source>> {
        self.inner.commit(tx).await
    }
    async fn roll_back(&self, tx: SqliteTransaction) {
        self.inner.roll_back(tx).await;
    }
    async fn was_committed(&self, claim: &Claim) -> Result<bool> {
        TransactionalLedger::was_committed(&self.inner, claim).await
    }
}
