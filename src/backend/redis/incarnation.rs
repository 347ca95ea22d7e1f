//! Tracks which ledger this process works on, and which *incarnation* of it: one server process with
//! everything it acknowledged.
//!
//! A server may come back empty (`FLUSHALL`, a lost volume), older (a backup, a replica that lacked
//! the last writes), or complete (a restart). It may also get an older copy without a restart: keys
//! restored by hand, or `REPLICAOF` another server and back. Every script carries the ledger's id,
//! the incarnation it is meant for, and the last write acknowledged to this process. It refuses to run in
//! another incarnation, or if that write is missing. A refused process enters the ledger again, and the
//! first one to do so begins the next incarnation. Each process compares the end of its own incarnation with the
//! last write acknowledged to it. If a write is missing, the process stops using the ledger.

use std::sync::{MutexGuard, PoisonError};

use redis::{Script, ScriptInvocation};

use super::RedisLedger;
use super::connect::{Doing as _, send};
use super::snapshot::contended;
use crate::backend::Migrate;
use crate::error::{Error, Result};
use crate::ledger::IdentityRule;

/// The format that this build writes, and the oldest build that may work on it.
const VERSION: i64 = 1;
const ACCEPTS: i64 = 1;
/// The error code of a script that was meant for another incarnation.
const OTHER_INCARNATION: &str = "HAPAXSTALE";
/// How often a read is repeated because the server restarted meanwhile.
const INCARNATIONS_MAX: u32 = 5;

/// What this process knows of the ledger it opened.
#[derive(Debug, Default, Clone)]
pub(super) struct Incarnation {
    /// The id that the ledger got when it was created.
    ledger: String,
    /// The name of the current incarnation.
    name: String,
    /// The last write before this incarnation.
    base: i64,
    /// The last write acknowledged to this process.
    seen: i64,
    /// The highest token that this process has seen.
    token: i64,
    /// Set once acknowledged writes are missing; every call then fails with it.
    lost: Option<String>,
}

impl RedisLedger {
    fn incarnation(&self) -> MutexGuard<'_, Incarnation> {
        self.0.incarnation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the ledger, or creates it.
    pub(super) async fn enter(&self, migrate: Migrate) -> Result<()> {
        let rule = match self.0.settings.identity {
            IdentityRule::Id => "id",
            IdentityRule::IdAndTime => "id_and_time",
        };
        let answer = self.call_open(rule, migrate == Migrate::Auto).await?;
        let [_, version, accepts, stored_rule, ..] = answer.as_slice() else {
            return Err(Error::Schema(format!(
                "there is no ledger at {}; make it with `hapax ledger init`, or set ledger.migrate = auto",
                self.0.prefix
            )));
        };
        let number = |text: &String| text.parse::<i64>().unwrap_or(i64::MAX);
        if number(version) > VERSION && number(accepts) > VERSION {
            return Err(Error::Schema(format!(
                "the ledger has version {version}, which accepts builds of version {accepts} and later; this build has \
                 version {VERSION}. Use a newer hapax; nothing was changed"
            )));
        }
        if stored_rule != rule {
            return Err(Error::Config(format!(
                "the ledger's identities follow the rule `{stored_rule}`, but `{rule}` is configured (ledger.identity); a \
                 ledger keeps the rule it was made with"
            )));
        }
        self.settle_in(&answer)
    }

    async fn call_open(&self, rule: &str, may_make: bool) -> Result<Vec<String>> {
        let known = self.incarnation().clone();
        let mut open = self.0.scripts.open.key(&self.0.prefix);
        open.arg(VERSION).arg(ACCEPTS).arg(rule).arg(uuid::Uuid::new_v4().to_string());
        open.arg(i32::from(may_make));
        open.arg(known.ledger).arg(known.name).arg(known.seen).arg(known.token);
        send(&self.0.connection, &open).await.doing("opening the ledger")
    }

    /// Stores the answer of the opening script.
    fn settle_in(&self, answer: &[String]) -> Result<()> {
        let [_, _, _, _, ledger, incarnation, base] = answer else {
            return Err(Error::Corrupt("the opening script answered something else".into()));
        };
        let base =
            base.parse().map_err(|_| Error::Corrupt(format!("{base:?} is not the number of a write")))?;
        let mut own = self.incarnation();
        *own = Incarnation { ledger: ledger.clone(), name: incarnation.clone(), base, ..own.clone() };
        Ok(())
    }

    /// Enters the incarnation after `left`. Fails if a write acknowledged to this process is missing.
    async fn enter_again(&self, left: &str) -> Result<()> {
        let _entering = self.0.entering.lock().await;
        if self.incarnation().name != left {
            return Ok(()); // another task has done so
        }
        let answer = self.call_open("", false).await?;
        match answer.first().map(String::as_str) {
            Some("ok") => {
                tracing::warn!(
                    target: "hapax",
                    ledger = %self.0.prefix,
                    "the ledger's server restarted or failed over; it still has everything that it acknowledged to this process"
                );
                self.settle_in(&answer)
            }
            Some("older") => {
                Err(self.lose("an older copy, which lacks writes that were acknowledged to this process"))
            }
            _ => Err(self.lose("no ledger, or another one: the server came back empty, or was flushed")),
        }
    }

    /// Records that acknowledged writes are missing: every call fails from now on.
    fn lose(&self, found: &str) -> Error {
        let mut own = self.incarnation();
        own.lost = Some(found.to_owned());
        lost(&own.ledger, found)
    }

    /// Runs a script in the current incarnation. `None` if that incarnation is over and the next was entered:
    /// nothing was done, and earlier decisions are void.
    pub(super) async fn call<T: redis::FromRedisValue>(
        &self,
        script: &Script,
        what: &str,
        args: impl Fn(&mut ScriptInvocation<'_>) + Send + Sync,
    ) -> Result<Option<T>> {
        Ok(self.call_in_incarnation(script, what, args).await?.map(|(_, answer)| answer))
    }

    /// Like [`call`](RedisLedger::call), and returns the incarnation's name.
    pub(super) async fn call_in_incarnation<T: redis::FromRedisValue>(
        &self,
        script: &Script,
        what: &str,
        args: impl Fn(&mut ScriptInvocation<'_>) + Send + Sync,
    ) -> Result<Option<(String, T)>> {
        let (ledger, incarnation, seen) = {
            let own = self.incarnation();
            if let Some(found) = &own.lost {
                return Err(lost(&own.ledger, found));
            }
            (own.ledger.clone(), own.name.clone(), own.seen)
        };
        let mut call = script.key(&self.0.prefix);
        call.arg(&ledger).arg(&incarnation).arg(seen);
        args(&mut call);
        match send(&self.0.connection, &call).await {
            Err(error) if error.code() == Some(OTHER_INCARNATION) => {
                self.enter_again(&incarnation).await.map(|()| None)
            }
            answer => answer.doing(what).map(|answer| Some((incarnation, answer))),
        }
    }

    /// Runs a script that changes nothing, in whichever incarnation is current.
    pub(super) async fn ask<T: redis::FromRedisValue>(
        &self,
        script: &Script,
        what: &str,
        args: impl Fn(&mut ScriptInvocation<'_>) + Send + Sync,
    ) -> Result<T> {
        for _ in 0..INCARNATIONS_MAX {
            if let Some(answer) = self.call(script, what, &args).await? {
                return Ok(answer);
            }
        }
        Err(contended())
    }

    /// Records an acknowledged write. Fails if its incarnation is over and the current one began without
    /// that write.
    pub(super) fn wrote(&self, incarnation: &str, number: i64, token: i64) -> Result<()> {
        let mut own = self.incarnation();
        own.token = own.token.max(token);
        if own.name != incarnation && number > own.base {
            drop(own);
            return Err(self.lose("an older copy, which lacks writes that were acknowledged to this process"));
        }
        own.seen = own.seen.max(number);
        Ok(())
    }
}

fn lost(ledger: &str, found: &str) -> Error {
    Error::Conflict {
        expected: format!("the ledger {ledger} with everything that it acknowledged"),
        actual: format!(
            "{found}. Events that took effect since then run again. This process does nothing more with it; stop all that use it, \
             restore the server's latest state if there is one, then start them again"
        ),
    }
}
