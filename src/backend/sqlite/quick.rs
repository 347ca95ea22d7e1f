//! The fast path of most claims: a new id in an existing week takes one INSERT, with no read before
//! it.
//!
//! The transition function decides what to insert, given that there is no entry. If the INSERT
//! finds one, nothing is written and the engine decides the claim.

use rusqlite::CachedStatement;

use super::codec::{self, Names};
use super::fault::Doing;
use super::ledger_tx::{LedgerTx, insert_sql};
use crate::clock::Time;
use crate::error::Result;
use crate::ledger::transition::{self, Head, Row, Situation};
use crate::ledger::{Claim, Outcome, Rows, Settings, State, Token, Week, claim_rows};

/// Claims in order, like [`claim_rows`].
pub(super) fn claim(
    ledger_tx: &mut LedgerTx<'_>,
    claims: &[Claim],
    settings: &Settings,
) -> Result<Vec<Result<Outcome>>> {
    let token = ledger_tx.token()?;
    ledger_tx.one_token(token);
    let mut insert: Option<Insert<'_>> = None;
    let mut answers = Vec::with_capacity(claims.len());
    for claim in claims {
        match first(ledger_tx, &mut insert, claim, token, settings)? {
            Some(outcome) => answers.push(Ok(outcome)),
            None => answers.append(&mut claim_rows(ledger_tx, std::slice::from_ref(claim), settings)?),
        }
    }
    if let Some(insert) = insert {
        insert.end(ledger_tx)?;
    }
    ledger_tx.fresh_tokens();
    Ok(answers)
}

/// The outcome, if the claim is the first of its identity. `None` leaves the claim to the engine.
fn first<'c>(
    ledger_tx: &mut LedgerTx<'c>,
    insert: &mut Option<Insert<'c>>,
    claim: &Claim,
    token: Token,
    settings: &Settings,
) -> Result<Option<Outcome>> {
    if claim.order.is_some() {
        return Ok(None);
    }
    let Ok(week) = settings.check(claim) else { return Ok(None) };
    let now = ledger_tx.now();
    let (scope, _) = ledger_tx.scope(claim.identity.tenant.as_ref(), &claim.identity.scope)?;
    let Some(insert) = Insert::of(ledger_tx, insert, week)? else { return Ok(None) };
    let situation = Situation {
        row: None,
        head: &Head::default(),
        dropped: None,
        week,
        now,
        token,
        owner: settings.owner.as_ref(),
        mismatch: settings.mismatch,
    };
    let step = transition::claim(claim, situation);
    let Some(row) = step.row else { return Ok(None) };
    let names = ledger_tx.names(&row)?;
    if !insert.run(scope, &claim.identity.id.key(), &row, names).doing("claiming")? {
        return Ok(None);
    }
    insert.touched = Some(now);
    Ok(Some(step.answer))
}

/// The INSERT for a week, and the values already bound to it: neighbouring rows share most of them.
struct Insert<'c> {
    week: Week,
    statement: CachedStatement<'c>,
    scope: Option<i32>,
    common: Option<(State, Token, u32, i64, Option<i64>)>,
    rest_bound: bool,
    touched: Option<Time>,
}

impl<'c> Insert<'c> {
    /// Returns the current statement if it is for this week, else prepares another; `None` if the
    /// week has no table or was dropped before.
    fn of<'a>(
        ledger_tx: &mut LedgerTx<'c>,
        at_hand: &'a mut Option<Self>,
        week: Week,
    ) -> Result<Option<&'a mut Self>> {
        if at_hand.as_ref().is_none_or(|insert| insert.week != week) {
            if let Some(before) = at_hand.take() {
                before.end(ledger_tx)?;
            }
            if !ledger_tx.is_plain(week)? {
                return Ok(None);
            }
            let statement = ledger_tx.conn.prepare_cached(&insert_sql(week)).doing("claiming")?;
            let fresh =
                Insert { week, statement, scope: None, common: None, rest_bound: false, touched: None };
            *at_hand = Some(fresh);
        }
        Ok(at_hand.as_mut())
    }

    /// Inserts a row; returns false if the key exists.
    fn run(&mut self, scope: i32, id: &[u8], row: &Row, names: Names) -> rusqlite::Result<bool> {
        if self.scope.replace(scope) != Some(scope) {
            self.statement.raw_bind_parameter(1, scope)?;
        }
        self.statement.raw_bind_parameter(2, id)?;
        let common = codec::common(row, names);
        if self.common.replace(common) != Some(common) {
            codec::bind_common(&mut self.statement, row, names)?;
        }
        codec::bind_own(&mut self.statement, row)?;
        let rest = codec::has_rest(row);
        if rest || self.rest_bound {
            codec::bind_rest(&mut self.statement, row, names)?;
        }
        self.rest_bound = rest;
        Ok(self.statement.raw_execute()? > 0)
    }

    /// Notes that the week was written to.
    fn end(self, ledger_tx: &mut LedgerTx<'c>) -> Result<()> {
        self.touched.map_or(Ok(()), |now| ledger_tx.touch(self.week, now))
    }
}
