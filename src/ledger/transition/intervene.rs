//! What an operator may do to an entry outside its normal course.

use super::{Head, Row};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::ledger::{Intervene, Intervention, OnDead, State, Token};

/// Refuses an entry that has changed since it was previewed.
fn is_as_previewed(intervene: &Intervene, row: &Row) -> Result<()> {
    match intervene.token {
        Some(token) if token != row.token => Err(Error::Conflict {
            expected: format!("the entry as previewed (token {})", token.0),
            actual: format!("one that has changed since (token {})", row.token.0),
        }),
        _ => Ok(()),
    }
}

/// Decides an intervention. `None` for the row means that the entry is deleted.
pub fn intervene(
    intervene: &Intervene,
    row: &Row,
    head: &Head,
    now: Time,
    token: Token,
) -> Result<(Option<Row>, Option<Head>)> {
    let what = intervene.what;
    fits(what, row, now)?;
    is_as_previewed(intervene, row)?;
    let mut next = Row { token, at: now, ..row.clone() };
    let mut head = head.clone();
    let seq = row.order.as_ref().map(|(_, seq)| *seq);
    match what {
        Intervention::Redrive | Intervention::Retry | Intervention::Release => {
            next.state = State::Retry;
            if what != Intervention::Release {
                next.attempts = 0;
            }
            if let Some(seq) = seq {
                if what != Intervention::Release && head.is_past(seq) {
                    moved_on(intervene, seq, &head)?;
                    next.order = None;
                    next.unordered = true;
                    return Ok((Some(next), None));
                }
                head.end_lease(seq, Some(row.token));
                head.must_run_first(seq);
            }
        }
        Intervention::Kill => {
            next.state = State::Dead;
            next.reason = Some(intervene.reason.as_str().into());
            if let Some(seq) = seq {
                head.die(seq, Some(row.token), OnDead::Park);
            }
        }
        Intervention::Drop => {
            next.state = State::Lost;
            next.body = None;
            next.reason = Some(format!("dropped by {}: {}", intervene.by, intervene.reason).into());
            if let Some(seq) = seq {
                head.pass(seq);
            }
        }
        Intervention::Skip => {
            let behind = head.parked.filter(|parked| seq.is_some_and(|seq| seq > *parked));
            let behind = behind.ok_or_else(|| Error::Conflict {
                expected: "an aggregate that is parked behind a dead or missing seq below this entry".into(),
                actual: "one that is not (a missing seq parks it once a consumer has waited the gap timeout for it)"
                    .into(),
            })?;
            head.pass(behind);
            next.reason = Some(
                format!("its aggregate was sent past seq {behind} by {}: {}", intervene.by, intervene.reason)
                    .into(),
            );
        }
        Intervention::Forget => {
            if let Some(seq) = seq {
                head.end_lease(seq, Some(row.token));
                head.retrying.remove(&seq);
                head.parked = head.parked.filter(|parked| *parked != seq);
            }
            return Ok((None, seq.map(|_| head)));
        }
    }
    Ok((Some(next), seq.map(|_| head)))
}

fn fits(what: Intervention, row: &Row, now: Time) -> Result<()> {
    let (fits, meant) = match what {
        Intervention::Redrive => (row.state == State::Dead, "redriven (a dead one)"),
        Intervention::Retry => (
            matches!(row.state, State::Retry | State::Lost | State::Parked) || row.is_overdue(now),
            "retried (one in retry, lost or parked)",
        ),
        Intervention::Release => (row.state == State::Leased, "released (a leased one)"),
        Intervention::Kill => (
            matches!(row.state, State::Leased | State::Retry | State::Parked),
            "killed (a leased, retrying or parked one)",
        ),
        Intervention::Drop => (row.state == State::Dead, "dropped (a dead one)"),
        Intervention::Skip => (row.state == State::Parked, "let past (a parked one)"),
        Intervention::Forget => (true, "forgotten"),
    };
    if fits {
        return Ok(());
    }
    Err(Error::Conflict {
        expected: format!("an entry that can be {meant}"),
        actual: format!("one that is {}", row.state),
    })
}

/// An event may leave its order only with explicit permission.
fn moved_on(intervene: &Intervene, seq: u64, head: &Head) -> Result<()> {
    if intervene.out_of_order {
        return Ok(());
    }
    Err(Error::Conflict {
        expected: format!("an aggregate that waits for seq {seq}, or leave to run it out of order"),
        actual: format!("one that has moved on to {}", head.last.unwrap_or(seq)),
    })
}
