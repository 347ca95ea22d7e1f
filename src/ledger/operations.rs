//! The part of a ledger that operators and maintenance use.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;

use super::{
    Audit, Cursor, Filter, Finding, Identity, Intervene, Intervened, Logged, Page, PreventedDays, SkipBatch,
    Stat, SweepSettings, Swept,
};
use crate::error::{Error, Result};
use crate::id::{EventId, Scope, Tenant};

/// Lists and counts entries, intervenes in them, forgets them after the retention and checks the
/// database. The sweeper, the checks at a start and the commands of an operator call it; handling
/// an event needs none of it. The contract of [`Ledger`](super::Ledger) applies.
#[async_trait]
pub trait Operations: Send + Sync + 'static {
    /// Lists entries in key order, at most `limit` a page, and about
    /// [`LIST_BYTES_MAX`](super::LIST_BYTES_MAX) bytes. A cursor is made from an entry that the filter matches, and from no other.
    async fn list(&self, filter: &Filter, after: Option<&Cursor>, limit: usize) -> Result<Page>;

    /// Counts entries, weeks and held events.
    async fn stat(&self) -> Result<Stat>;

    /// The scopes that were ever claimed in, whoever's, also those that have no entries any more.
    async fn scopes(&self) -> Result<BTreeSet<Scope>>;

    /// Applies an operator's intervention to an entry and writes an audit row.
    async fn intervene(&self, intervene: &Intervene) -> Result<Intervened>;

    /// The latest audit rows, newest first.
    async fn audit(&self, limit: usize) -> Result<Vec<Audit>>;

    /// The latest audit rows of these entries, also of those that are gone, newest first. It reads
    /// the whole audit, however many rows others have. Rows of an earlier build, whose entry cannot
    /// be told for certain, are left out.
    async fn audit_of(&self, entries: &[Identity], limit: usize) -> Result<Vec<Audit>>;

    /// Forgets entries older than the retention.
    async fn sweep(&self, settings: SweepSettings) -> Result<Swept>;

    /// Prepares what will be needed soon, such as the coming week, so that no claim has to wait for
    /// it.
    async fn make_ahead(&self) -> Result<()> {
        Ok(())
    }

    /// Checks the preconditions of the guarantees.
    async fn check(&self) -> Result<Vec<Finding>>;

    /// Logs skips and adds to the daily counts, all or nothing. It locks nothing that a claim needs.
    /// After an error it may have happened all the same, so never repeat it: counts must not be
    /// too high. [`SkipLog`](super::SkipLog) calls it.
    async fn note_skips(&self, _batch: &SkipBatch) -> Result<()> {
        Err(no_skips())
    }

    /// What the log of skips has of these events of a tenant, in every scope.
    async fn skips(&self, _tenant: Option<&Tenant>, _ids: &[EventId]) -> Result<Vec<Logged>> {
        Err(no_skips())
    }

    /// Effects that were not done twice, by day, from this [day](super::day_of) on.
    async fn prevented(&self, _since_day: i32) -> Result<PreventedDays> {
        Err(no_skips())
    }
}

fn no_skips() -> Error {
    Error::Unsupported("this ledger keeps no log of skips".into())
}

#[async_trait]
impl<L: Operations + ?Sized> Operations for Arc<L> {
    async fn list(&self, filter: &Filter, after: Option<&Cursor>, limit: usize) -> Result<Page> {
        (**self).list(filter, after, limit).await
    }
    async fn stat(&self) -> Result<Stat> {
        (**self).stat().await
    }
    async fn scopes(&self) -> Result<BTreeSet<Scope>> {
        (**self).scopes().await
    }
    async fn intervene(&self, intervene: &Intervene) -> Result<Intervened> {
        (**self).intervene(intervene).await
    }
    async fn audit(&self, limit: usize) -> Result<Vec<Audit>> {
        (**self).audit(limit).await
    }
    async fn audit_of(&self, entries: &[Identity], limit: usize) -> Result<Vec<Audit>> {
        (**self).audit_of(entries, limit).await
    }
    async fn sweep(&self, settings: SweepSettings) -> Result<Swept> {
        (**self).sweep(settings).await
    }
    async fn make_ahead(&self) -> Result<()> {
        (**self).make_ahead().await
    }
    async fn check(&self) -> Result<Vec<Finding>> {
        (**self).check().await
    }
    async fn note_skips(&self, batch: &SkipBatch) -> Result<()> {
        (**self).note_skips(batch).await
    }
    async fn skips(&self, tenant: Option<&Tenant>, ids: &[EventId]) -> Result<Vec<Logged>> {
        (**self).skips(tenant, ids).await
    }
    async fn prevented(&self, since_day: i32) -> Result<PreventedDays> {
        (**self).prevented(since_day).await
    }
}
