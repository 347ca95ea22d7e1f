//! A lone claim: one small function, tried first. It grants a claim that is the first of its id.
//! Otherwise it changes nothing, and the claim goes through the full state machine.

use std::sync::Arc;

use sqlx::AssertSqlSafe;

use super::Inner;
use super::claim::{Answer, ClaimSettings, Ready};
use super::codes::TRACKED;
use crate::ledger::{Metadata, Mode, State};

/// Answers as `claim_batch` does for a claim that is first; without a row if it might not be.
pub(super) const SQL: &str = "select 0 as o_i, 1 as o_kind, o_token, o_at, 1 as o_attempts, $7::text as o_state, \
     null::text as o_owner, null::bigint as o_seq, false as o_suspect, false as o_reused \
     from {s}.claim_lone($1, $2, $3, $4, $5, $6, $7::text::\"char\", $8, $9, $10, $11, $12, $13::text::jsonb) \
     where o_token is not null";

/// Whether `claim_lone` can take a claim: one that writes nothing but its row.
pub(super) fn is_plain(one: &Ready<'_>) -> bool {
    ClaimSettings::of(one.claim).flags & TRACKED == 0
}

/// Tries the claim. No answer: it is not, or might not be, the first of its id.
pub(super) async fn first(inner: &Inner, one: &Ready<'_>) -> sqlx::Result<Vec<Answer>> {
    let settings = ClaimSettings::of(one.claim);
    let claim = one.claim;
    let origin = claim.origin.as_ref();
    let state = match claim.mode {
        Mode::Lease(_) => State::Leased,
        Mode::Once { .. } => State::Claimed,
        _ => State::Done,
    };
    let query = sqlx::query_as(AssertSqlSafe(Arc::clone(&inner.sql.lone)))
        .bind(settings.lasting_us)
        .bind(claim.nonce.0)
        .bind(one.scope)
        .bind(inner.owner)
        .bind(one.week.number())
        .bind(settings.flags)
        .bind(state)
        .bind(&*one.key)
        .bind(claim.fingerprint.as_ref().map(|fingerprint| &fingerprint.0[..]))
        .bind(origin.map(|origin| origin.topic.as_str()))
        .bind(origin.map(|origin| origin.partition))
        .bind(origin.map(|origin| origin.offset))
        .bind(claim.metadata.as_ref().map(Metadata::as_str));
    inner.database.fetch_all(query).await
}
