//! The way most claims go: a new id in a week that is there. One INSERT, nothing read before it.
//!
//! What to insert is the transition function's decision about an entry that is not there; if the INSERT finds one
//! that is, nothing was written and the claim goes the engine's way.

use rusqlite::CachedStatement;

use super::codec;
use super::desk::{Desk, insert_sql};
use super::fault::Doing;
use crate::error::Result;
use crate::ledger::transition::{self, Head, Situation};
use crate::ledger::{Claim, Outcome, Rows, Settings, Token, Week, claim_rows};

/// Claims in order, like [`claim_rows`].
pub(super) fn claim(
    desk: &mut Desk<'_>,
    claims: &[Claim],
    settings: &Settings,
) -> Result<Vec<Result<Outcome>>> {
    let token = desk.token()?;
    desk.one_token(token);
    let mut insert = Insert::default();
    let mut answers = Vec::with_capacity(claims.len());
    for claim in claims {
        match insert.first(desk, claim, token, settings)? {
            Some(outcome) => answers.push(Ok(outcome)),
            None => answers.append(&mut claim_rows(desk, std::slice::from_ref(claim), settings)?),
        }
    }
    desk.fresh_tokens();
    Ok(answers)
}

/// The statement at hand and what is still bound to it.
#[derive(Default)]
struct Insert<'c> {
    statement: Option<(Week, CachedStatement<'c>)>,
    rest_bound: bool,
}

impl<'c> Insert<'c> {
    /// The outcome, if the claim is the first of its identity; none sends it the engine's way.
    fn first(
        &mut self,
        desk: &mut Desk<'c>,
        claim: &Claim,
        token: Token,
        settings: &Settings,
    ) -> Result<Option<Outcome>> {
        if claim.order.is_some() {
            return Ok(None);
        }
        let Ok(week) = settings.check(claim) else { return Ok(None) };
        let now = desk.now();
        let (scope, _) = desk.scope(claim.identity.tenant.as_ref(), &claim.identity.scope)?;
        if !desk.is_plain(week)? {
            return Ok(None);
        }
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
        let names = desk.names(&row)?;
        let rest = codec::has_rest(&row);
        let bind_rest = rest || self.rest_bound;
        self.rest_bound = rest;
        let statement = self.statement(desk, week)?;
        let mut run = || -> rusqlite::Result<usize> {
            statement.raw_bind_parameter(1, scope)?;
            statement.raw_bind_parameter(2, &claim.identity.id.key()[..])?;
            codec::bind_common(statement, &row, names)?;
            if bind_rest {
                codec::bind_rest(statement, &row, names)?;
            }
            statement.raw_execute()
        };
        if run().doing("claiming")? == 0 {
            return Ok(None);
        }
        desk.touch(week, now)?;
        Ok(Some(step.answer))
    }

    fn statement(&mut self, desk: &Desk<'c>, week: Week) -> Result<&mut CachedStatement<'c>> {
        let at_hand = match self.statement.take() {
            Some((of, statement)) if of == week => statement,
            _ => desk.conn.prepare_cached(&insert_sql(week)).doing("claiming")?,
        };
        Ok(&mut self.statement.insert((week, at_hand)).1)
    }
}
