//! Redis and Valkey: a ledger, and a window in front of any ledger.
//!
//! The ledger decides in three steps. A script reads the rows of a batch, with the server's time.
//! The transition function decides in this process. A second script writes the decision, all or
//! nothing, provided that every row, head, week and scope it was based on is unchanged and at most
//! a second has passed by the server's clock. Otherwise the ledger reads and decides again.
//! `docs/decisions/0009-redis-ledger.md` says why.
//!
//! Its limits: unless `appendfsync` is `always`, the last acknowledged writes are lost with the
//! machine; [`Operations::check`] reports that. A server that is less durable is refused unless that is
//! accepted by name ([`Accept`]). A server that comes back empty or older is detected (`incarnation`).
//! Effects cannot be written in the claim's transaction.

mod accept;
mod cache;
mod check;
mod codec;
mod connect;
mod held;
mod incarnation;
mod read;
mod script;
mod snapshot;
mod sweep;
mod transaction;
mod want;
mod window;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use redis::aio::ConnectionManager;

pub use accept::Accept;
pub use cache::{CacheProjection, CacheSettings};
pub use transaction::RedisTransaction;
pub use window::RedisWindow;

use connect::{Doing as _, info, manager, send};
use incarnation::Incarnation;
use script::Scripts;
use snapshot::{RedisSnapshot, contended, wants_of};
use want::{Found, Reply, Wants};

use crate::backend::Migrate;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Scope, Topic};
use crate::ledger::{
    Audit, Capabilities, Claim, Claims, ConsumerStore, Cursor, Due, Entry, Epoch, Extend, Filter, Finding,
    HeldQuery, Identity, Intervene, Intervened, Key, Level, Marker, Nonce, Operations, Outcome, Page,
    PublishedDead, Reused, Rows, Settings, Settle, Settled, Stat, State, SweepSettings, Swept, Week,
    claim_rows, extend_rows, intervene_rows, settle_rows,
};

/// The most events per script; a larger batch takes several. The server serves no other client
/// while a script runs.
const BATCH_MAX: usize = 1000;
/// How often a decision is repeated before giving up. Only heavy contention on the same entries
/// gets there.
const ATTEMPTS_MAX: u32 = 200;

/// Settings of a Redis ledger.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RedisSettings {
    /// The settings that every backend has.
    pub ledger: Settings,
    /// The name of the ledger: its keys are `hapax:{NAME}:…`.
    pub name: String,
    /// Whether the ledger is created if it is missing.
    pub migrate: Migrate,
    /// How long to wait for a connection or an answer.
    pub timeout: Duration,
    /// Whether to refuse a server that cannot keep the guarantees. Tools that only read set it to
    /// false.
    pub refuse: bool,
    /// Weaknesses of the server to accept; also as `?accept=NAME,…` in the URL.
    pub accept: Vec<Accept>,
}

impl Default for RedisSettings {
    fn default() -> Self {
        RedisSettings {
            ledger: Settings::default(),
            name: "hapax".to_owned(),
            migrate: Migrate::default(),
            timeout: Duration::from_secs(10),
            refuse: true,
            accept: Vec::new(),
        }
    }
}

/// A ledger in Redis or Valkey. Clones share the connection.
#[derive(Clone)]
pub struct RedisLedger(Arc<Inner>);

struct Inner {
    connection: ConnectionManager,
    scripts: Scripts,
    /// `hapax:{NAME}`: the braces put all keys into one slot.
    prefix: String,
    settings: Settings,
    accept: Vec<Accept>,
    incarnation: Mutex<Incarnation>,
    /// Lets one task at a time enter the next incarnation.
    entering: tokio::sync::Mutex<()>,
    /// Tasks that must decide again take turns, so that they do not keep invalidating each other.
    deciding: tokio::sync::Mutex<()>,
}

impl fmt::Debug for RedisLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The connection holds the password.
        f.debug_struct("RedisLedger").field("prefix", &self.0.prefix).finish_non_exhaustive()
    }
}

impl RedisLedger {
    /// Opens a ledger, creating it if it is missing and `migrate` allows. Refuses a Redis Cluster.
    /// Also refuses a server that may lose acknowledged writes (it evicts keys, has no append-only
    /// file, or has replicas that may take over without them), unless that is accepted by name
    /// ([`Accept`]).
    ///
    /// If the server comes back empty or older, every call fails with [`Error::Conflict`] from then
    /// on.
    pub async fn connect(url: &str, settings: RedisSettings) -> Result<Self> {
        RedisLedger::on(url, settings, Scripts::on_server_time()).await
    }

    /// Opens a ledger that takes its time, in microseconds, from the key `hapax:{NAME}:test_clock`.
    #[cfg(feature = "testing")]
    pub async fn connect_on_test_clock(url: &str, settings: RedisSettings) -> Result<Self> {
        RedisLedger::on(url, settings, Scripts::on_test_time()).await
    }

    async fn on(url: &str, settings: RedisSettings, scripts: Scripts) -> Result<Self> {
        check_name(&settings.name)?;
        let (url, mut accept) = accept::from_url(url)?;
        accept.extend(settings.accept);
        let inner = Inner {
            connection: manager(&url, settings.timeout)?,
            scripts,
            prefix: format!("hapax:{{{}}}", settings.name),
            settings: settings.ledger,
            accept,
            incarnation: Mutex::default(),
            entering: tokio::sync::Mutex::default(),
            deciding: tokio::sync::Mutex::default(),
        };
        let ledger = RedisLedger(Arc::new(inner));
        if settings.refuse {
            let findings = check::findings(&ledger).await.map_err(|error| connect::at(&url, error))?;
            if let Some(finding) = findings.into_iter().find(|finding| finding.level == Level::Refusal) {
                return Err(Error::Unsupported(finding.message));
            }
        }
        ledger.enter(settings.migrate).await.map_err(|error| connect::at(&url, error))?;
        Ok(ledger)
    }

    fn connection(&self) -> ConnectionManager {
        self.0.connection.clone()
    }

    /// The full name of a key of this ledger.
    fn key(&self, rest: &str) -> String {
        format!("{}{rest}", self.0.prefix)
    }

    /// Reads what is wanted, in one snapshot.
    async fn look(&self, wants: Wants) -> Result<Found> {
        let args = |script: &mut redis::ScriptInvocation<'_>| wants.put(script);
        let reply: Reply = self.ask(&self.0.scripts.read, "reading from the ledger", args).await?;
        wants.found(reply)
    }

    /// Writes a decision; false if something has changed since it was read.
    async fn write(&self, snapshot: &RedisSnapshot) -> Result<bool> {
        let Some(args) = snapshot.writes() else { return Ok(true) };
        let args = |script: &mut redis::ScriptInvocation<'_>| {
            for arg in &args {
                script.arg(arg.as_slice());
            }
        };
        let answer = self.call_in_incarnation(&self.0.scripts.write, "writing to the ledger", args).await?;
        let answer: Option<(String, Vec<String>)> = answer;
        let Some((incarnation, answer)) = answer else { return Ok(false) };
        let Some(number) = answer.get(1) else { return Ok(false) };
        let number =
            number.parse().map_err(|_| Error::Corrupt(format!("{number:?} is not the number of a write")))?;
        self.wrote(&incarnation, number, snapshot.last_token())?;
        Ok(true)
    }

    /// Reads, decides and writes until nothing has changed in between.
    async fn decide<T>(
        &self,
        wants: impl Fn() -> Wants + Send + Sync,
        decide: impl Fn(&mut RedisSnapshot, &Settings) -> Result<T> + Send + Sync,
    ) -> Result<T>
    where
        T: Send,
    {
        let mut deciding = None;
        for attempt in 0..ATTEMPTS_MAX {
            let mut snapshot = RedisSnapshot::new(self.look(wants()).await?)?;
            // Count reuses only for the decision that is written.
            let settings = Settings { reused: Reused::default(), ..self.0.settings.clone() };
            let answer = decide(&mut snapshot, &settings)?;
            if self.write(&snapshot).await? {
                for _ in 0..settings.reused.take() {
                    self.0.settings.reused.note();
                }
                return Ok(answer);
            }
            if deciding.is_none() {
                deciding = Some(self.0.deciding.lock().await);
            } else {
                // The contention comes from other processes.
                let most_us = u64::from(attempt.min(20)) * 500;
                let pause_us = (Nonce::random().0 as u64) % (most_us + 1);
                tokio::time::sleep(Duration::from_micros(pause_us)).await;
            }
        }
        Err(contended())
    }

    async fn claim_some(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        let wants = || Wants::claims(claims, &self.0.settings);
        if wants().is_empty() {
            // Every claim is invalid, so there is nothing to read.
            let refusal = |claim| Err(self.0.settings.check(claim).err().unwrap_or_else(contended));
            return Ok(claims.iter().map(refusal).collect());
        }
        self.decide(wants, |snapshot, settings| claim_rows(snapshot, claims, settings)).await
    }

    async fn known_some(&self, identities: &[Identity]) -> Result<Vec<bool>> {
        let route = |identity: &Identity| Week::route(self.0.settings.identity, &identity.id, None);
        let weeks: Vec<Week> = identities.iter().map(route).collect::<Result<_>>()?;
        let wants = wants_of(identities.iter().zip(weeks.iter().copied()));
        let mut snapshot = RedisSnapshot::new(self.look(wants).await?)?;
        let known = |(identity, week): (&Identity, &Week)| {
            let scope = snapshot.known_scope(identity.tenant.as_ref(), &identity.scope)?;
            let Some(scope) = scope else { return Ok(false) };
            let row = snapshot.row(&Key { week: *week, scope, id: identity.id.key().into_owned() })?;
            Ok(row.is_some_and(|row| matches!(row.state, State::Done | State::Finished)))
        };
        identities.iter().zip(&weeks).map(known).collect()
    }

    /// Whether a claim made in a transaction was committed, for a caller that did not get the
    /// answer. "No" is final: an earlier decision that is still under way can no longer be written.
    pub async fn was_committed(&self, claim: &Claim) -> Result<bool> {
        let week = self.0.settings.check(claim)?;
        let is_there = |snapshot: &mut RedisSnapshot, _: &Settings| {
            let is_there = snapshot.has_nonce(claim.nonce);
            if !is_there {
                snapshot.fence();
            }
            Ok(is_there)
        };
        self.decide(|| wants_of([(&claim.identity, week)]), is_there).await
    }
}

fn check_name(name: &str) -> Result<()> {
    let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'));
    if plain && !name.is_empty() && name.len() <= 63 {
        return Ok(());
    }
    Err(Error::Config(format!(
        "the ledger's name is {name:?}; it takes 1 to 63 of the characters A-Z a-z 0-9 _ - ."
    )))
}

#[async_trait]
impl Claims for RedisLedger {
    async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        let mut outcomes = Vec::with_capacity(claims.len());
        for claims in claims.chunks(BATCH_MAX) {
            outcomes.append(&mut self.claim_some(claims).await?);
        }
        Ok(outcomes)
    }

    async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
        let mut answers = Vec::with_capacity(settles.len());
        for settles in settles.chunks(BATCH_MAX) {
            let wants = || wants_of(settles.iter().map(|settle| (&settle.identity, settle.week)));
            let decide =
                |snapshot: &mut RedisSnapshot, settings: &Settings| settle_rows(snapshot, settles, settings);
            answers.append(&mut self.decide(wants, decide).await?);
        }
        Ok(answers)
    }

    async fn extend(&self, extends: &[Extend]) -> Result<Vec<Result<Settled>>> {
        let mut answers = Vec::with_capacity(extends.len());
        for extends in extends.chunks(BATCH_MAX) {
            let wants = || wants_of(extends.iter().map(|extend| (&extend.identity, extend.week)));
            let some = self.decide(wants, |snapshot, _| extend_rows(snapshot, extends)).await?;
            answers.extend(some.into_iter().map(Ok));
        }
        Ok(answers)
    }

    async fn get(&self, identity: &Identity, time: Option<Time>) -> Result<Option<Entry>> {
        let week = Week::route(self.0.settings.identity, &identity.id, time)?;
        let snapshot = RedisSnapshot::new(self.look(wants_of([(identity, week)])).await?)?;
        Ok(snapshot.rows_read().next().map(|(_, row)| row.entry(identity.clone(), week)))
    }

    async fn known(&self, identities: &[Identity]) -> Result<Vec<bool>> {
        let mut known = Vec::with_capacity(identities.len());
        for identities in identities.chunks(BATCH_MAX) {
            known.append(&mut self.known_some(identities).await?);
        }
        Ok(known)
    }

    async fn now(&self) -> Result<Time> {
        let script = self.0.scripts.now.key(&self.0.prefix);
        let now: i64 = send(&self.0.connection, &script).await.doing("asking for the time")?;
        Ok(Time::from_micros(now))
    }

    async fn epoch(&self) -> Result<Epoch> {
        let mut get = redis::cmd("HMGET");
        get.arg(self.key(":meta")).arg("ledger").arg("life");
        let (id, incarnation): (Option<String>, Option<String>) =
            get.query_async(&mut self.connection()).await.doing("reading the ledger's epoch")?;
        // A restarted server may have lost what it had not written to disk; a replica that took
        // over may lack writes that it had not received. The first has a new run id, the second a
        // new replication id. The incarnation changes as soon as a process misses a write.
        let info = info(&self.0.connection).await?;
        let of = |name: &str| info.get(name).map_or("", String::as_str);
        Ok(Epoch::of([
            id.as_deref().unwrap_or_default(),
            incarnation.as_deref().unwrap_or_default(),
            of("run_id"),
            of("master_replid"),
        ]))
    }

    fn capabilities(&self) -> Capabilities {
        // Depends on the server's configuration: `check` says what is missing.
        Capabilities { backend: "redis", durable: false, shared: true, transactional: false, skips: false }
    }

    fn settings(&self) -> &Settings {
        &self.0.settings
    }

    fn parallel_batches(&self) -> usize {
        2
    }
}

#[async_trait]
impl ConsumerStore for RedisLedger {
    async fn due(&self, scope: &Scope, query: &HeldQuery, limit: usize) -> Result<Due> {
        held::due(self, scope, query, limit).await
    }

    async fn unpublished_dead(
        &self,
        scope: &Scope,
        query: &HeldQuery,
        limit: usize,
        reserve: Option<Duration>,
    ) -> Result<Vec<Entry>> {
        held::unpublished_dead(self, scope, query, limit, reserve).await
    }

    async fn mark_dead_published(&self, entries: &[PublishedDead]) -> Result<()> {
        held::mark_dead_published(self, entries).await
    }

    async fn set_markers(&self, scope: &Scope, markers: &[Marker]) -> Result<()> {
        held::set_markers(self, scope, markers).await
    }

    async fn markers(&self, scope: &Scope, topic: &Topic, partitions: &[i32]) -> Result<Vec<Marker>> {
        held::markers(self, scope, topic, partitions).await
    }
}

#[async_trait]
impl Operations for RedisLedger {
    async fn list(&self, filter: &Filter, after: Option<&Cursor>, limit: usize) -> Result<Page> {
        read::list(self, filter, after, limit).await
    }

    async fn stat(&self) -> Result<Stat> {
        read::stat(self).await
    }

    async fn scopes(&self) -> Result<BTreeSet<Scope>> {
        Ok(read::Scopes::read(self).await?.names())
    }

    async fn intervene(&self, intervene: &Intervene) -> Result<Intervened> {
        let week = Week::route(self.0.settings.identity, &intervene.identity.id, intervene.time)?;
        let wants = || wants_of([(&intervene.identity, week)]);
        self.decide(wants, |snapshot, settings| intervene_rows(snapshot, intervene, settings)).await
    }

    async fn audit(&self, limit: usize) -> Result<Vec<Audit>> {
        read::audit(self, 0, limit).await
    }

    async fn audit_of(&self, entries: &[Identity], limit: usize) -> Result<Vec<Audit>> {
        read::audit_of(self, entries, limit).await
    }

    async fn sweep(&self, settings: SweepSettings) -> Result<Swept> {
        sweep::sweep(self, settings).await
    }

    async fn check(&self) -> Result<Vec<Finding>> {
        check::findings(self).await
    }
}
