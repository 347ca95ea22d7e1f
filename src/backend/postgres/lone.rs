//! A lone claim: one plain statement without a function, tried first. It answers a claim that is the first of its id; in all
//! other cases it changes nothing, and the claim goes through the function with the whole rule book.

use std::sync::Arc;

use sqlx::AssertSqlSafe;

use super::Inner;
use super::claim::{Answer, Ready, Terms};
use crate::ledger::Metadata;

/// The `lock_timeout` of a function's SET clause is set by hand, for this transaction alone. The touch comes after the write and
/// looks at the clock then, as in `touch_weeks`.
pub(super) fn sql(lock_timeout: &str) -> String {
    format!(
        "with e as ( \
           insert into {{s}}.entry (first_at, at, token, nonce, scope, owner, week, attempts, flags, state, id, fingerprint, \
             topic, partition, \"offset\", metadata) \
           select n.now, n.now + $1 * interval '1 microsecond', nextval('{{s}}.token'), $2, $3, $4, $5, 1, $6, $7::text::\"char\", \
                  $8, $9, $10, $11, $12, $13::text::jsonb \
             from (select {{s}}.ledger_now() as now, set_config('lock_timeout', '{lock_timeout}', true) as timeout offset 0) n \
            where n.timeout is not null and not exists (select from {{s}}.dropped d where d.week = $5) \
           on conflict do nothing returning week, token, at), \
         t as ( \
           insert into {{s}}.touch (week, at) \
           select e.week, n.now from e cross join lateral (select {{s}}.ledger_now() as now where e.week > 0 offset 0) n \
            where not exists (select from {{s}}.touch t where t.week = e.week and t.at > n.now - interval '1 hour')) \
         select token, {{s}}.us(at) from e"
    )
}

/// Whether a claim can be tried so: nothing but its row is written.
pub(super) fn is_plain(one: &Ready<'_>) -> bool {
    Terms::of(one.claim).flags & 2 == 0
}

/// Tries it; none: it is not the first, or may not be.
pub(super) async fn first(inner: &Inner, one: &Ready<'_>) -> sqlx::Result<Option<Answer>> {
    let terms = Terms::of(one.claim);
    let claim = one.claim;
    let origin = claim.origin.as_ref();
    let state = match terms.mode {
        "L" => "L",
        "O" => "C",
        _ => "D",
    };
    let first: Option<(i64, i64)> = sqlx::query_as(AssertSqlSafe(Arc::clone(&inner.sql.lone)))
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
        .fetch_optional(&inner.pool)
        .await?;
    Ok(first.map(|(token, at)| {
        (0, 1, Some(token), Some(at), Some(1), Some(state.to_owned()), None, None, Some(false), Some(false))
    }))
}
