//! Runs one delivery alone: under a lease, so that a death of the process is recorded, and settled
//! in the transaction of its effect.

use super::batch::{PAUSE, TransactionalWorker};
use super::{BatchHandler, TransactionalLedger};
use crate::consumer::arrival::{Arrival, Ending};
use crate::consumer::claim::away;
use crate::consumer::leased::{release_lease, settle_failure};
use crate::consumer::{Failed, Passed};
use crate::error::{Error, Result};
use crate::guard::Lease;
use crate::ledger::{Outcome, Settled, Verdict};

impl<L: TransactionalLedger, H: BatchHandler<L>> TransactionalWorker<L, H> {
    /// Runs a delivery that no marker covers: the last of the suspects, or a held one. Its start is
    /// committed as a lease, so that a death of the process is recorded. Effect and settle are
    /// still one transaction.
    pub(super) async fn one(&self, arrival: &mut Arrival) -> Ending {
        if !self.context.settings.wants.matches(&arrival.event) {
            return self.context.step_past(arrival).await;
        }
        let settings = self.context.lease_settings(arrival);
        match self.context.core.lease_on(arrival.delivery(), settings, self.context.holds(arrival)).await {
            // The answer took longer than the lease lasts. Nothing was started, and nothing counts.
            Ok(Outcome::First(lease)) if lease.is_lost() => release_lease(lease, Ending::Later(PAUSE)).await,
            Ok(Outcome::First(lease)) if lease.suspect() && !arrival.alone => {
                release_lease(lease, Ending::Alone).await
            }
            Ok(Outcome::First(lease)) => {
                arrival.ran = true;
                self.run(lease, arrival).await
            }
            Ok(other) => self.context.unclaimed(other, arrival).await,
            Err(error @ Error::Invalid { .. }) => self.context.refuse(arrival, &error.to_string()).await,
            Err(error) => away(error),
        }
    }

    /// Runs it in a transaction that settles the lease first. From then on the transaction holds
    /// the entry: another process that finds the lease lapsed meets the lock, and waits. So the
    /// lease needs no heartbeat, which would change the entry under a transaction that reads from a
    /// snapshot, and could not write to a SQLite file that this transaction writes to. If the
    /// process dies, the server rolls back, and the event is free when its lease lapses.
    async fn run(&self, lease: Lease, arrival: &Arrival) -> Ending {
        crate::crash_point!("consumer.after-claim");
        let mut tx = match self.begin().await {
            Ok(tx) => tx,
            Err(error) => return release_lease(lease, away(error)).await, // it did not run
        };
        match self.settle(&mut tx, &lease, arrival).await {
            Ok(Settled::Ok { .. }) => {}
            Ok(Settled::Fenced { .. }) => {
                self.ledger.roll_back(tx).await;
                lease.leave_open(); // another process has it
                return Ending::Later(PAUSE);
            }
            Err(error) => {
                self.ledger.roll_back(tx).await;
                return release_lease(lease, away(error)).await;
            }
        }
        let handled = tokio::select! {
            handled = self.handle(&mut tx, std::slice::from_ref(&arrival.event)) => handled,
            () = arrival.cancelled() => {
                self.undo(tx, std::future::ready(())).await;
                return release_lease(lease, Ending::Cancelled).await;
            }
        };
        let failed = match handled {
            Ok(()) => return self.commit_one(tx, lease, arrival).await,
            Err(failed) => failed,
        };
        let transient = self.transient(&mut tx, &failed).await;
        self.undo(tx, arrival.cancelled()).await;
        match transient {
            Some(error) => release_lease(lease, away(error)).await,
            None => settle_failure(&self.context, lease, &failed, arrival).await,
        }
    }

    async fn settle(&self, tx: &mut L::Transaction, lease: &Lease, arrival: &Arrival) -> Result<Settled> {
        let verdict = Verdict::Done { metadata: arrival.metadata(self.context.group_apart(), None) };
        let mut answers = self.ledger.settle_in(tx, &[lease.settling(verdict)]).await?;
        answers.pop().unwrap_or_else(|| Err(Error::Corrupt("a settling without an answer".into())))
    }

    /// Commits effect and settle. If that fails, the lease is released without counting an attempt.
    /// The release also resolves a doubt about the commit: a transaction that committed has settled
    /// the lease, so it can no longer be released. One that did not commit can never do so later,
    /// because its server had to give up the row first.
    async fn commit_one(&self, tx: L::Transaction, lease: Lease, arrival: &Arrival) -> Ending {
        crate::crash_point!("consumer.before-settle");
        match self.ledger.commit(tx).await {
            Ok(Ok(())) => {
                lease.leave_open(); // the transaction settled it
                Ending::Passed(Passed::Done)
            }
            Ok(Err(rejected)) => {
                settle_failure(&self.context, lease, &Failed::retryable(rejected), arrival).await
            }
            Err(error) => release_lease(lease, away(error)).await,
        }
    }
}
