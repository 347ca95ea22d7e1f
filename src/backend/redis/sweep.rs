//! Retention. It scans for old rows outside of scripts, so that no other client waits for it. Each
//! change is one script, so the next sweep finishes one that was killed.

use std::collections::{BTreeMap, BTreeSet};

use super::connect::Doing;
use super::read::{Scopes, filled, scan, weeks};
use super::snapshot::{Args, contended, index_key, index_of, is_awaited};
use super::want::{Wants, member, member_key, stamp, week_key};
use super::{RedisLedger, Result, codec};
use crate::clock::Time;
use crate::ledger::transition::Row;
use crate::ledger::{
    Claims as _, Filter, Key, Rows as _, State, SweepSettings, SweepState, Swept, Week, may_sweep,
};

pub(super) async fn sweep(ledger: &RedisLedger, settings: SweepSettings) -> Result<Swept> {
    let now = ledger.now().await?;
    let state = record_sweep(ledger, now, settings).await?;
    let cutoff = now.minus(state.apply(settings).retention);
    let numbers = Scopes::read(ledger).await?.wanted(&Filter::default());
    let mut swept = Swept { paused_until: state.paused_until, ..Swept::default() };
    swept.lost = mark_lost(ledger, now, settings).await?;
    for (_, number) in filled(ledger, [Week::TIMELESS], &numbers).await?.into_keys() {
        swept.rows +=
            forget_old(ledger, &week_key(Week::TIMELESS, number), Some(number), cutoff, settings).await?;
    }
    // Rows kept from dropped weeks are deleted once they are settled and old; the record of the
    // dropped week answers for them.
    swept.rows += forget_old(ledger, ":kept", None, cutoff, settings).await?;
    if !settings.dry_run {
        super::held::forget_markers(ledger, cutoff).await?;
    }
    for (week, (touched, noted)) in weeks(ledger).await? {
        if week.is_timeless() || touched >= cutoff || week.end() >= cutoff {
            continue;
        }
        let seen = look_at(ledger, week, &numbers).await?;
        if settings.dry_run {
            let open = seen.open.len() as u64;
            swept.weeks.push((week, seen.rows.saturating_sub(open)));
            swept.held += open;
        } else if let Some((rows, kept)) = drop_week(ledger, week, &noted, &seen).await? {
            swept.weeks.push((week, rows.saturating_sub(kept)));
            swept.held += kept;
        }
    }
    Ok(swept)
}

/// Records that a sweep begins, before it deletes anything; a dry run only reads. Two sweeps that
/// begin together record the same.
async fn record_sweep(ledger: &RedisLedger, now: Time, settings: SweepSettings) -> Result<SweepState> {
    let (swept_at, paused_until): (Option<i64>, Option<i64>) = redis::cmd("HMGET")
        .arg(ledger.key(":meta"))
        .arg(&["swept_at", "paused_until"])
        .query_async(&mut ledger.connection())
        .await
        .doing("reading when the last sweep was")?;
    let paused_until = paused_until.filter(|until| *until > 0).map(Time::from_micros);
    let before = swept_at.map(|at| SweepState { swept_at: Time::from_micros(at), paused_until });
    let next = SweepState::next(before, now, settings.retention);
    if !settings.dry_run {
        let args = |script: &mut redis::ScriptInvocation<'_>| {
            script.arg(now.as_micros()).arg(next.paused_until.map_or(0, Time::as_micros));
        };
        let noted: Option<i64> =
            ledger.call(&ledger.0.scripts.sweep_state, "noting that a sweep begins", args).await?;
        noted.ok_or_else(contended)?; // what was read belongs to another incarnation
    }
    Ok(next)
}

/// Marks at-most-once claims as lost whose end is overdue.
async fn mark_lost(ledger: &RedisLedger, now: Time, settings: SweepSettings) -> Result<u64> {
    let mut lost = 0;
    let most = settings.batch_max.max(1) as usize;
    let mut from = 0;
    loop {
        let members: Vec<Vec<u8>> = redis::cmd("ZRANGEBYSCORE")
            .arg(ledger.key(":awaited"))
            .arg("-inf")
            .arg(now.as_micros())
            .arg("LIMIT")
            .arg(from)
            .arg(most)
            .query_async(&mut ledger.connection())
            .await
            .doing("looking for overdue claims")?;
        let keys: Vec<Key> = members.iter().map(|member| member_key(member)).collect::<Result<_>>()?;
        if keys.is_empty() {
            return Ok(lost);
        }
        // A dry run leaves the rows in the index and skips them.
        from += if settings.dry_run { keys.len() } else { 0 };
        let marked = ledger
            .decide(
                || Wants::keys(&keys),
                |snapshot, _| {
                    let mut marked = 0;
                    for key in &keys {
                        let Some(mut row) = snapshot.row(key)?.filter(|row| row.is_overdue(now)) else {
                            continue;
                        };
                        row.state = State::Lost;
                        row.reason = Some("its end was never reported".into());
                        marked += 1;
                        if !settings.dry_run {
                            snapshot.put_quietly(key, &row)?;
                        }
                    }
                    Ok(marked)
                },
            )
            .await?;
        lost += marked;
        if marked == 0 && !settings.dry_run {
            return Ok(lost); // another sweep was faster
        }
    }
}

/// The index entries to remove with a row.
fn indexes_left(key: &Key, row: &Row) -> impl Iterator<Item = (String, Vec<u8>)> {
    let held = index_of(row).map(|index| (index_key(index, key.scope), member(key)));
    let awaited = is_awaited(row).then(|| (":awaited".to_owned(), member(key)));
    held.into_iter().chain(awaited)
}

/// Removes settled rows of a hash that are older than the cutoff, one batch per script. Returns how
/// many were removed, or would be.
async fn forget_old(
    ledger: &RedisLedger,
    hash: &str,
    scope: Option<i32>,
    cutoff: Time,
    settings: SweepSettings,
) -> Result<u64> {
    let mut old: BTreeMap<Vec<u8>, [Vec<u8>; 3]> = BTreeMap::new();
    scan(ledger, hash, |field, stored| {
        if codec::state(&stored)?.is_open() {
            return Ok(());
        }
        let row = codec::row(&stored)?;
        if may_sweep(&row, cutoff) {
            let key = match scope {
                Some(scope) => Key { week: Week::TIMELESS, scope, id: field.clone() },
                None => member_key(&field)?,
            };
            // The row is not in `:awaited`: an overdue claim was marked as lost before.
            let (index, member) = indexes_left(&key, &row).next().unwrap_or_default();
            old.insert(field, [stamp(&stored), index.into_bytes(), member]);
        }
        Ok(())
    })
    .await?;
    if settings.dry_run {
        return Ok(old.len() as u64);
    }
    let mut gone = 0;
    let old: Vec<_> = old.into_iter().collect();
    for batch in old.chunks(settings.batch_max.max(1) as usize) {
        let args = |script: &mut redis::ScriptInvocation<'_>| {
            for (field, [stamp, index, member]) in batch {
                script.arg(hash).arg(field.as_slice()).arg(stamp.as_slice());
                script.arg(index.as_slice()).arg(member.as_slice());
            }
        };
        let batch: Option<u64> =
            ledger.call(&ledger.0.scripts.forget, "forgetting old entries", args).await?;
        gone += batch.ok_or_else(contended)?;
    }
    Ok(gone)
}

/// What a scan of a week found.
#[derive(Default)]
struct Seen {
    rows: u64,
    open: BTreeSet<(i32, Vec<u8>)>,
    leaving: Vec<(String, Vec<u8>)>,
}

async fn look_at(ledger: &RedisLedger, week: Week, numbers: &[i32]) -> Result<Seen> {
    let mut seen = Seen::default();
    for ((_, number), rows) in filled(ledger, [week], numbers).await? {
        seen.rows += rows;
        scan(ledger, &week_key(week, number), |id, stored| {
            if codec::state(&stored)?.is_open() {
                seen.open.insert((number, id));
            } else {
                let key = Key { week, scope: number, id };
                seen.leaving.extend(indexes_left(&key, &codec::row(&stored)?));
            }
            Ok(())
        })
        .await?;
    }
    Ok(seen)
}

/// Drops a week that has not changed since it was scanned. Every write makes a week younger than
/// the cutoff, and it then stays.
async fn drop_week(
    ledger: &RedisLedger,
    week: Week,
    noted: &[u8],
    seen: &Seen,
) -> Result<Option<(u64, u64)>> {
    let mut args = Args::default();
    args.text(week.number().to_string()).bytes(noted.to_vec()).text(seen.open.len().to_string());
    for (scope, id) in &seen.open {
        args.text(scope.to_string()).bytes(id.clone());
    }
    for (index, member) in &seen.leaving {
        args.text(index).bytes(member.clone());
    }
    let args = |script: &mut redis::ScriptInvocation<'_>| {
        for arg in &args.0 {
            script.arg(arg.as_slice());
        }
    };
    let counts: Option<Vec<u64>> = ledger.call(&ledger.0.scripts.drop, "dropping a week", args).await?;
    Ok(match counts.ok_or_else(contended)?.as_slice() {
        [rows, kept] => Some((*rows, *kept)),
        _ => None,
    })
}
