//! A lone claim: one small function, tried first. It grants a claim that is the first of its id.
//! Otherwise it changes nothing, and the claim goes through the full state machine.

use std::sync::Arc;

use sqlx::AssertSqlSafe;

use super::Inner;
use super::claim::{Answer, Ready, Terms};
use crate::ledger::Metadata;

pub(super) const SQL: &str = "select o_token, o_at from {s}.claim_lone($1, $2, $3, $4, $5, $6, $7::text::\"char\", $8, $9, $10, $11, \
     $12, $13::text::jsonb)";

/// Whether `claim_lone` can take a claim: one that writes nothing but its row.
pub(super) fn is_plain(one: &Ready<'_>) -> bool {
    Terms::of(one.claim).flags & 2 == 0
}

/// Tries the claim. `None` if it is not, or might not be, the first of its id.
pub(super) async fn first(inner: &Inner, one: &Ready<'_>) -> sqlx::Result<Option<Answer>> {
    let terms = Terms::of(one.claim);
    let claim = one.claim;
    let origin = claim.origin.as_ref();
    let state = match terms.mode {
        "L" => "L",
        "O" => "C",
        _ => "D",
    };
    let (token, at): (Option<i64>, Option<i64>) = sqlx::query_as(AssertSqlSafe(Arc::clone(&inner.sql.lone)))
        .bind(terms.lasting_us)
        .bind(claim.nonce.0)
        .bind(one.scope)
        .bind(inner.owner)
        .bind(one.week.number())
        .bind(terms.flags)
        .bind(state)
        .bind(&*one.key)
        .bind(claim.fingerprint.as_ref().map(|fingerprint| &fingerprint.0[..]))
        .bind(origin.map(|origin| origin.topic.as_str()))
        .bind(origin.map(|origin| origin.partition))
        .bind(origin.map(|origin| origin.offset))
        .bind(claim.metadata.as_ref().map(Metadata::as_str))
        .fetch_one(&inner.pool)
        .await?;
    Ok(token.map(|token| {
        (0, 1, Some(token), at, Some(1), Some(state.to_owned()), None, None, Some(false), Some(false))
    }))
}
