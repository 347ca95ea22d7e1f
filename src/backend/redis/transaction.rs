//! Several claims that become true at once, or not at all.

use super::desk::{Desk, contended, wants_of};
use super::want::Wants;
use super::{RedisLedger, Result};
use crate::id::Scope;
use crate::ledger::{Claim, Marker, Outcome, Settle, Settled, claim_rows, settle_rows};

/// Claims and settlings that are written together. It holds no lock: if what it read has changed, or more than a second has
/// passed, committing says [`Contended`](crate::Error::Contended), and the whole of it is to be done again.
///
/// Effects cannot be part of it: Redis cannot undo half of what it was told.
#[derive(Debug)]
pub struct RedisTransaction<'l> {
    ledger: &'l RedisLedger,
    desk: Option<Desk>,
}

impl RedisLedger {
    /// Opens a transaction; dropped, it leaves nothing.
    pub fn begin(&self) -> RedisTransaction<'_> {
        RedisTransaction { ledger: self, desk: None }
    }
}

impl RedisTransaction<'_> {
    async fn desk(&mut self, wants: Wants) -> Result<&mut Desk> {
        let found = self.ledger.look(wants).await?;
        match &mut self.desk {
            Some(desk) => desk.add(found)?,
            none => *none = Some(Desk::new(found)?),
        }
        self.desk.as_mut().ok_or_else(contended)
    }

    /// Claims events in this transaction.
    pub async fn claim(&mut self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        let settings = self.ledger.0.settings.clone();
        let desk = self.desk(Wants::claims(claims, &settings)).await?;
        claim_rows(desk, claims, &settings)
    }

    /// Settles claims in this transaction.
    pub async fn settle(&mut self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
        let settings = self.ledger.0.settings.clone();
        let desk = self.desk(wants_of(settles.iter().map(|settle| (&settle.identity, settle.week)))).await?;
        settle_rows(desk, settles, &settings)
    }

    /// Notes markers in this transaction; see [`Ledger::mark`](crate::Ledger::mark).
    pub async fn mark(&mut self, scope: &Scope, markers: &[Marker]) -> Result<()> {
        self.desk(Wants::default()).await?.mark(scope, markers);
        Ok(())
    }

    /// Makes it so.
    pub async fn commit(self) -> Result<()> {
        let Some(desk) = self.desk else { return Ok(()) };
        if self.ledger.write(&desk).await? { Ok(()) } else { Err(contended()) }
    }
}
