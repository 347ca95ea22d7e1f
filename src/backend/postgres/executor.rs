//! Sends statements, and decides what to do about one that fails: send it again, send its batch in
//! parts, or give up. Batches of the ledger and the journal run in an [`Executor`]; a statement or
//! transaction that stands alone (keys, tokens, erasure, a doubt) asks a [`Repeat`] before it is sent again.
//! No other module of this backend decides how often, and when, what failed is sent again. Two loops
//! elsewhere count something else: how often another relay took and released a leadership between
//! two statements that succeeded (`journal/relay.rs`), and how often a consumer runs a batch again, on
//! any ledger, whose handler and claims met a lock (`consumer/transactional/batch.rs`).
//!
//! What an executor does about an error:
//!
//! - *A row is locked, bad or refused* (55P03, 55006, 22…, any error that a trigger raises): the
//!   batch is split until that row is alone, and the error concerns only that row. Batches that
//!   [wait for locks](Locked::IsSentAgain) send a locked row again, after the others; each time
//!   counts as a conflict.
//! - *Another transaction was in the way* (40001, 40P01, 23505, a missing week): the statement is
//!   sent again. The call gives up after [`CONFLICTS_MAX`] conflicts.
//! - *The connection was lost*: it is unknown whether the statement took effect. It is sent again,
//!   which is safe because claims carry nonces, settlings tokens and appends ids. The call gives up
//!   after [`LOST_MAX`] lost connections. A lock that it meets from then on may be that of its own
//!   first try, which the server is still running: a batch for which a lock is an
//!   [answer](Locked::IsAnswer) waits for it like for any conflict, and if it gives up, the call
//!   fails. "Busy" would let the caller forget a claim that may yet be granted.
//! - Any other error ends the call.
//!
//! All statements of one call share its [`Executor`], and so its budget, however often its batch is
//! split. In a caller's transaction nothing is sent again: only the caller can repeat the
//! transaction.

use std::future::Future;
use std::ops::Range;
use std::time::Duration;

use sqlx::PgConnection;

use super::database::{BEGIN, Database, Decoded, Select, begin};
use super::error::{Meaning, may_concern_one_row, meaning, translate};
use crate::error::{Error, Result};

/// After this many conflicts with other transactions, a call gives up.
const CONFLICTS_MAX: u32 = 20;
/// After this many lost connections, a call gives up. It need not be more than the pool has: after
/// the first, statements run on new connections.
const LOST_MAX: u32 = 3;
/// The pause before a statement is sent again grows by this much each time; the first is none.
const PAUSE_STEP: Duration = Duration::from_millis(10);
/// How many parts a batch is split into when something in it is locked or bad.
const SPLIT: usize = 8;

/// What becomes of a row that another transaction holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Locked {
    /// That is the answer to it.
    IsAnswer,
    /// It fails, and its caller sends it again.
    Fails,
    /// It is sent again: other statements of hapax hold locks for a short time only.
    IsSentAgain,
}

/// Rows that are sent together, and apart where one of them is locked or bad.
pub(super) trait Batch: Send + Sync {
    /// What becomes of a row that is locked.
    const LOCKED: Locked;

    /// One row of an answer.
    type Answer: Send;

    fn len(&self) -> usize;

    /// Sends a part in one statement.
    fn send(
        &self,
        executor: &mut Executor<'_>,
        part: Range<usize>,
    ) -> impl Future<Output = sqlx::Result<Vec<Self::Answer>>> + Send;

    /// A part was answered.
    fn answered(&mut self, part: Range<usize>, answers: Vec<Self::Answer>) -> Result<()>;

    /// One row is locked or bad.
    fn failed(&mut self, at: usize, meaning: Meaning, error: Error);

    /// A week of a part does not exist. `own`: not in a caller's transaction.
    fn week_missing(&self, _part: Range<usize>, _own: bool) -> impl Future<Output = Result<()>> + Send {
        std::future::ready(Ok(()))
    }

    /// The error for the caller.
    fn error(&self, error: sqlx::Error) -> Error;
}

/// Sends the statements of one call.
pub(super) struct Executor<'c> {
    database: &'c Database,
    caller: Option<&'c mut PgConnection>,
    conflicts: u32,
    lost: u32,
}

impl<'c> Executor<'c> {
    /// Each statement is a transaction of its own.
    pub(super) fn new(database: &'c Database) -> Self {
        Executor { database, caller: None, conflicts: 0, lost: 0 }
    }

    /// Statements run in the caller's transaction, each in a savepoint.
    pub(super) fn in_transaction(database: &'c Database, caller: &'c mut PgConnection) -> Self {
        Executor { caller: Some(caller), ..Executor::new(database) }
    }

    pub(super) fn is_own(&self) -> bool {
        self.caller.is_none()
    }

    /// The connection of the caller's transaction, if there is one.
    pub(super) fn caller(&mut self) -> Option<&mut PgConnection> {
        self.caller.as_deref_mut()
    }

    /// Sends a statement once.
    pub(super) async fn fetch_all<T: Decoded>(&mut self, query: Select<'_, T>) -> sqlx::Result<Vec<T>> {
        match &mut self.caller {
            None => self.database.fetch_all(query).await,
            Some(caller) => in_savepoint(caller, query.persistent(!self.database.pooled())).await,
        }
    }

    /// Runs a batch in as few statements as locks and bad rows allow. Its parts run in order. An
    /// error means that the rows without an answer were not sent, or that nothing is known of them.
    pub(super) async fn run<B: Batch>(&mut self, batch: &mut B) -> Result<()> {
        let mut parts = vec![0..batch.len()];
        while let Some(part) = parts.pop().filter(|part| !part.is_empty()) {
            let error = match batch.send(self, part.clone()).await {
                Ok(answers) => {
                    batch.answered(part, answers)?;
                    continue;
                }
                Err(error) => error,
            };
            match meaning(&error) {
                Meaning::Locked if B::LOCKED == Locked::IsAnswer && self.is_in_doubt() => {
                    if !self.may_send_again(&error).await {
                        return Err(self.given_up(batch.error(error)));
                    }
                    // At first as a whole: that is how the first try holds it.
                    if part.len() > 1 && self.conflicts > CONFLICTS_MAX / 2 {
                        split(&part, &mut parts);
                    } else {
                        parts.push(part);
                    }
                }
                Meaning::Locked | Meaning::Data if part.len() > 1 => split(&part, &mut parts),
                meaning @ (Meaning::Locked | Meaning::Data) => {
                    let waits = meaning == Meaning::Locked && B::LOCKED == Locked::IsSentAgain;
                    if waits && self.may_send_again(&error).await {
                        parts.insert(0, part);
                    } else {
                        batch.failed(part.start, meaning, self.given_up(batch.error(error)));
                    }
                }
                meaning => {
                    if meaning == Meaning::NoWeek {
                        batch.week_missing(part.clone(), self.is_own()).await?;
                    }
                    if self.may_send_again(&error).await {
                        parts.push(part);
                    } else if !self.is_own() || !may_concern_one_row(&error) {
                        return Err(self.given_up(batch.error(error)));
                    } else if part.len() > 1 {
                        split(&part, &mut parts);
                    } else {
                        batch.failed(part.start, meaning, self.given_up(batch.error(error)));
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether a statement of the call was sent again after its connection was lost. What its first
    /// try did, or is still doing, is unknown.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.lost > 0
    }

    /// Runs one statement with one row as its answer, in a transaction of hapax's own. `what` says
    /// what is being done.
    pub(super) async fn run_one<'q, T: Decoded>(
        &mut self,
        what: &str,
        query: impl Fn() -> Select<'q, T> + Send + Sync,
    ) -> Result<T> {
        loop {
            let once = async {
                let mut tx = begin(self.database.pool(), BEGIN).await?;
                let row = query().persistent(!self.database.pooled()).fetch_one(&mut *tx).await?;
                tx.commit().await.map(|()| row)
            };
            match once.await {
                Ok(row) => return Ok(row),
                Err(error) if meaning(&error) != Meaning::Locked && self.may_send_again(&error).await => {}
                Err(error) => return Err(self.given_up(translate(what, error))),
            }
        }
    }

    /// Whether a statement that failed may be sent again; waits until then.
    async fn may_send_again(&mut self, error: &sqlx::Error) -> bool {
        self.database.note_pooler(error);
        if self.caller.is_some() {
            return false;
        }
        let (spent, max) = match (error, meaning(error)) {
            (_, Meaning::Conflict | Meaning::Unique | Meaning::NoWeek | Meaning::Locked) => {
                (&mut self.conflicts, CONFLICTS_MAX)
            }
            // The pool had no connection for as long as its timeout: that was waiting enough.
            (sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed, _) => return false,
            (_, Meaning::Doubt) => {
                if self.lost == 0 {
                    self.database.close_idle();
                }
                (&mut self.lost, LOST_MAX)
            }
            _ => return false,
        };
        *spent += 1;
        if *spent >= max {
            return false;
        }
        // Gives other transactions time to end, or the server time to come back.
        tokio::time::sleep(PAUSE_STEP * (*spent - 1)).await;
        true
    }

    /// Adds to an error how often the statement was sent.
    fn given_up(&self, error: Error) -> Error {
        match error {
            Error::Contended { what, source } if self.conflicts >= CONFLICTS_MAX => Error::Contended {
                what: format!("{what}: gave up after {} lock conflicts", self.conflicts),
                source,
            },
            Error::Unavailable { what, source } if self.lost >= LOST_MAX => Error::Unavailable {
                what: format!("{what}: gave up after {} lost connections", self.lost),
                source,
            },
            error => error,
        }
    }
}

/// How often a statement or transaction that stands alone is sent again, and after which pauses. Its
/// caller knows which errors it may be repeated after, because that depends on what it changes.
#[derive(Debug)]
pub(super) struct Repeat {
    /// How often it was sent again.
    repeats: u32,
    repeats_max: u32,
    pause: fn(u32) -> Duration,
}

impl Repeat {
    /// For a statement that others were in the way of, or whose answer was lost.
    pub(super) fn statement() -> Self {
        Repeat { repeats: 0, repeats_max: 4, pause: |repeats| Duration::from_millis(20) * repeats }
    }

    /// For a batch that waits for writers, which may hold their locks for seconds.
    pub(super) fn behind_writers() -> Self {
        Repeat { repeats: 0, repeats_max: 8, pause: |repeats| Duration::from_millis(20 << repeats) }
    }

    /// For a question about a transaction in doubt: the server needs time to notice that a client is
    /// gone. Forty repeats take a second.
    pub(super) fn in_doubt(repeats_max: u32) -> Self {
        Repeat { repeats: 0, repeats_max, pause: |_| Duration::from_millis(25) }
    }

    /// Waits before it is sent again. False: it was sent often enough.
    pub(super) async fn again(&mut self) -> bool {
        if self.repeats == self.repeats_max {
            return false;
        }
        self.repeats += 1;
        tokio::time::sleep((self.pause)(self.repeats)).await;
        true
    }
}

/// Runs a statement in a caller's transaction. If it fails, the transaction is as it was before.
pub(super) async fn in_savepoint<T: Decoded>(
    caller: &mut PgConnection,
    query: Select<'_, T>,
) -> sqlx::Result<Vec<T>> {
    sqlx::raw_sql("savepoint hapax").execute(&mut *caller).await?;
    let answer = query.fetch_all(&mut *caller).await;
    let end = match &answer {
        Ok(_) => "release savepoint hapax",
        Err(_) => "rollback to savepoint hapax; release savepoint hapax",
    };
    sqlx::raw_sql(end).execute(caller).await?;
    answer
}

fn split(part: &Range<usize>, parts: &mut Vec<Range<usize>>) {
    let step = part.len().div_ceil(SPLIT);
    let starts: Vec<usize> = part.clone().step_by(step).collect();
    // In reverse, because the last part pushed runs first.
    parts.extend(starts.into_iter().rev().map(|start| start..(start + step).min(part.end)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_keeps_every_row_and_their_order() {
        for length in 2..100 {
            let mut parts = Vec::new();
            split(&(7..7 + length), &mut parts);
            assert!(parts.len() > 1 && parts.len() <= SPLIT, "{length}: {parts:?}");
            assert!(parts.iter().rev().cloned().flatten().eq(7..7 + length), "{length}: {parts:?}");
        }
    }
}
