//! Transactions of several claims: all take effect, or none.

use super::snapshot::{RedisSnapshot, contended, wants_of};
use super::want::Wants;
use super::{RedisLedger, Result};
use crate::id::Scope;
use crate::ledger::{Claim, Marker, Outcome, Settle, Settled, claim_rows, settle_rows};

/// Claims and settlings that are written together. It holds no lock: if something it read has
/// changed, or more than a second has passed, `commit` returns
/// [`Contended`](crate::Error::Contended), and the caller must repeat the whole transaction.
///
/// Effects cannot be part of it: Redis cannot roll back.
#[derive(Debug)]
pub struct RedisTransaction<'l> {
    ledger: &'l RedisLedger,
    snapshot: Option<RedisSnapshot>,
}

impl RedisLedger {
    /// Begins a transaction. Dropping it changes nothing.
    pub fn begin(&self) -> RedisTransaction<'_> {
        RedisTransaction { ledger: self, snapshot: None }
    }
}

impl RedisTransaction<'_> {
    async fn snapshot(&mut self, wants: Wants) -> Result<&mut RedisSnapshot> {
        let found = self.ledger.look(wants).await?;
        match &mut self.snapshot {
            Some(snapshot) => snapshot.add(found)?,
            none => *none = Some(RedisSnapshot::new(found)?),
        }
        self.snapshot.as_mut().ok_or_else(contended)
    }

    /// Claims events in this transaction.
    pub async fn claim(&mut self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        let settings = self.ledger.0.settings.clone();
        let snapshot = self.snapshot(Wants::claims(claims, &settings)).await?;
        claim_rows(snapshot, claims, &settings)
    }

    /// Settles claims in this transaction.
    pub async fn settle(&mut self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
        let settings = self.ledger.0.settings.clone();
        let snapshot =
            self.snapshot(wants_of(settles.iter().map(|settle| (&settle.identity, settle.week)))).await?;
        settle_rows(snapshot, settles, &settings)
    }

    /// Sets markers in this transaction; see [`set_markers`](crate::ConsumerStore::set_markers).
    pub async fn set_markers(&mut self, scope: &Scope, markers: &[Marker]) -> Result<()> {
        self.snapshot(Wants::default()).await?.set_markers(scope, markers);
        Ok(())
    }

    /// Commits the transaction.
    pub async fn commit(self) -> Result<()> {
        let Some(snapshot) = self.snapshot else { return Ok(()) };
        if self.ledger.write(&snapshot).await? { Ok(()) } else { Err(contended()) }
    }
}
