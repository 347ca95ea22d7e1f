//! A cache of records in Redis or Valkey: each value is set only if it is newer.
//!
//! ```text
//! PREFIX:{TENANT:MODULE:ID}:version   20 digits and P (present) or D (deleted)
//! PREFIX:{TENANT:MODULE:ID}:value     JSON: version, seq, created_at, updated_at, payload
//! ```
//!
//! One script decides and writes both, so nobody comes in between. The marker outlives the value: as
//! long as an older event can come, it is there to refuse it.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use redis::Script;
use redis::aio::ConnectionManager;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::check::{appendfsync, of_appendfsync};
use super::connect::{Doing, at, info, manager, send};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::ledger::{Finding, Level};
use crate::projection::{
    Applied, Change, Content, Document, Name, Projection, Rebuilding, Scanned, Uuid, Version,
};
use crate::records::{Payload, Record};
use crate::secret::hide_password;
use crate::words::span;

/// How long the server may take to answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How many bytes go into one script call, and how many records.
const CALL_BYTES: usize = 4 << 20;
const CALL_RECORDS: usize = 200;
/// How many keys the server looks at for a page of a scan.
const SCAN_COUNT: usize = 1000;
/// What is wrong with a value that nothing compares versions with.
const NO_VERSION: &str = "it has a value and no version";

/// Settings of a [`CacheProjection`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CacheSettings {
    /// What all keys begin with: letters, digits and `:_.-`.
    pub prefix: String,
    /// How long a value is kept; `None`: until it is replaced or deleted.
    pub value_ttl: Option<Duration>,
    /// How long the version of a record is kept after its last write. At least as long as an event can
    /// be delivered again, and as the value. `hapax` compares it with the ledger's retention: a topic that
    /// is kept for longer must not be read from its beginning again without a rebuild.
    pub marker_ttl: Duration,
}

impl Default for CacheSettings {
    fn default() -> Self {
        CacheSettings {
            prefix: "hapax:cache".to_owned(),
            value_ttl: Some(Duration::from_hours(24)),
            marker_ttl: Duration::from_hours(14 * 24),
        }
    }
}

impl CacheSettings {
    /// Checks the settings against the time for which an event can be delivered again.
    pub fn check(&self, redelivery: Duration) -> Result<()> {
        let plain = |c: char| c.is_ascii_alphanumeric() || ":_.-".contains(c);
        if self.prefix.is_empty() || self.prefix.len() > 128 || !self.prefix.chars().all(plain) {
            return Err(Error::Config(format!(
                "the cache's prefix is {:?}; it needs 1 to 128 letters, digits or :_.-",
                self.prefix
            )));
        }
        let least = redelivery.max(self.value_ttl.unwrap_or_default());
        if self.marker_ttl < least || self.value_ttl.is_some_and(|ttl| ttl < Duration::from_millis(1)) {
            return Err(Error::Config(format!(
                "the cache keeps versions for {} and values for {}; versions must be kept for {} at least (as long as an event \
                 can be delivered again, and as values), and values for 1 ms",
                span(self.marker_ttl),
                self.value_ttl.map_or_else(|| "ever".to_owned(), span),
                span(least)
            )));
        }
        Ok(())
    }
}

/// How the script treats what is there, which is its first argument.
#[derive(Debug, Clone, Copy)]
enum Write {
    /// Whatever is newer counts.
    Apply = 0,
    /// So it does, and the value of the version that is marked may be put back.
    Fill = 1,
    /// A marker that is no version is older than any.
    Erase = 2,
}

/// A cache of records in Redis or Valkey. Clones share the connection.
#[derive(Clone)]
pub struct CacheProjection {
    connection: ConnectionManager,
    server: String,
    settings: CacheSettings,
    script: Arc<Script>,
    removes: Arc<Script>,
}

impl fmt::Debug for CacheProjection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The connection holds the password.
        f.debug_struct("CacheProjection").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// A value, as clients in any language read it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Value<'v> {
    version: u64,
    seq: u64,
    created_at: String,
    updated_at: String,
    #[serde(borrow)]
    payload: &'v RawValue,
}

impl CacheProjection {
    /// A cache on a server. `redelivery` is the time for which an event can be delivered again. Refuses
    /// settings and a server that would forget versions before that.
    pub async fn connect(url: &str, settings: CacheSettings, redelivery: Duration) -> Result<Self> {
        settings.check(redelivery)?;
        let cache = CacheProjection {
            connection: manager(url, TIMEOUT)?,
            server: hide_password(url),
            settings,
            script: Arc::new(Script::new(include_str!("lua/project.lua"))),
            removes: Arc::new(Script::new(include_str!("lua/remove_older.lua"))),
        };
        let findings = cache.check().await.map_err(|error| at(url, error))?;
        match findings.into_iter().find(|finding| finding.level == Level::Refusal) {
            Some(refusal) => Err(Error::Unsupported(refusal.message)),
            None => Ok(cache),
        }
    }

    /// Puts a record into the cache that a reader has read from its store after a miss. The same step
    /// decides: a value that is older than what the cache knows is left out. Returns whether the cache
    /// has this version now.
    pub async fn fill(&self, tenant: Uuid, record: &Record, generation: u16) -> Result<bool> {
        let name = Name { tenant, module: record.module.clone(), id: record.id };
        let content = Content::Present {
            payload: record.payload.clone(),
            created_at: record.created_at,
            updated_at: record.updated_at,
        };
        let version = Version::new(generation, record.seq)?;
        let applied = self.set(&[(name, version, content)], Write::Fill).await?;
        Ok(applied == [Applied::Newer])
    }

    /// What the cache has of a record. [`Content::Expired`] and `None` are misses: read the record from
    /// its store, and [fill](CacheProjection::fill).
    pub async fn get(&self, name: &Name) -> Result<Option<Document>> {
        Ok(self.documents(std::slice::from_ref(name)).await?.pop().flatten())
    }

    fn marker(&self, name: &Name) -> String {
        format!("{}:{{{name}}}:version", self.settings.prefix)
    }

    fn value(&self, name: &Name) -> String {
        format!("{}:{{{name}}}:value", self.settings.prefix)
    }

    async fn set(&self, writes: &[(Name, Version, Content)], how: Write) -> Result<Vec<Applied>> {
        let mut answers = Vec::with_capacity(writes.len());
        let mut rest = writes;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |(_, _, content): &&(Name, Version, Content)| {
                bytes += size(content);
                bytes <= CALL_BYTES
            };
            let count = rest.iter().take(CALL_RECORDS).take_while(fits).count().max(1);
            let (call, after) = rest.split_at(count);
            answers.extend(self.call(call, how).await?);
            rest = after;
        }
        Ok(answers)
    }

    /// One call of the script.
    async fn call(&self, writes: &[(Name, Version, Content)], how: Write) -> Result<Vec<Applied>> {
        let mut call = self.script.prepare_invoke();
        call.arg(how as u8);
        let ms = |time: Option<Duration>| time.map_or(0, |time| time.as_millis() as u64);
        for (name, version, content) in writes {
            call.key(self.marker(name)).key(self.value(name));
            let (kind, value) = match content {
                Content::Present { payload, created_at, updated_at } => {
                    ("P", self::value(*version, payload, *created_at, *updated_at)?)
                }
                _ => ("D", String::new()),
            };
            let marker = Some(self.settings.marker_ttl);
            // The marker of a value that stays for ever does so too.
            let marker = if kind == "P" { self.settings.value_ttl.and(marker) } else { marker };
            call.arg(format!("{:020}", version.as_u64())).arg(kind);
            call.arg(ms(marker)).arg(ms(self.settings.value_ttl)).arg(value);
        }
        let replies: Vec<String> = send(&self.connection, &call).await.doing("writing to the cache")?;
        if replies.len() != writes.len() {
            return Err(Error::Corrupt(format!("{} writes had {} answers", writes.len(), replies.len())));
        }
        let applied = |reply: String| match reply.as_str() {
            "newer" => Applied::Newer,
            "stale" => Applied::Stale,
            _ => Applied::Failed { reason: format!("the cache has something else under its key: {reply}") },
        };
        Ok(replies.into_iter().map(applied).collect())
    }

    async fn get_many(&self, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let found: Vec<Option<Vec<u8>>> = redis::cmd("MGET")
            .arg(keys)
            .query_async(&mut self.connection.clone())
            .await
            .doing("reading from the cache")?;
        if found.len() != keys.len() {
            return Err(Error::Corrupt(format!("{} keys had {} values", keys.len(), found.len())));
        }
        Ok(found)
    }
}

fn writes_of(changes: &[Change]) -> Vec<(Name, Version, Content)> {
    changes.iter().map(|one| (Name::of(one), one.version, Content::of(one))).collect()
}

fn size(content: &Content) -> usize {
    match content {
        Content::Present { payload, .. } => payload.as_str().len() + 512,
        _ => 512,
    }
}

fn value(version: Version, payload: &Payload, created_at: Time, updated_at: Time) -> Result<String> {
    let raw = serde_json::from_str(payload.as_str());
    let value = Value {
        version: version.as_u64(),
        seq: version.seq(),
        created_at: created_at.to_string(),
        updated_at: updated_at.to_string(),
        payload: raw.map_err(|error| Error::Corrupt(format!("a payload is not JSON: {error}")))?,
    };
    serde_json::to_string(&value).map_err(|error| Error::Corrupt(format!("not JSON: {error}")))
}

/// Reads a marker. The error says why it is none.
fn marked(marker: &[u8]) -> std::result::Result<(Version, bool), String> {
    let shown = String::from_utf8_lossy(marker);
    let bad = || format!("its version is {:?}", shown.chars().take(40).collect::<String>());
    let (digits, kind) = shown.split_at_checked(20).ok_or_else(bad)?;
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.parse().ok().filter(|_| is_number).ok_or_else(bad)?;
    let version = Version::from_u64(number).map_err(|_| bad())?;
    match kind {
        "P" => Ok((version, true)),
        "D" => Ok((version, false)),
        _ => Err(bad()),
    }
}

fn document(marker: Option<&[u8]>, value: Option<&[u8]>) -> Option<Document> {
    let Some(marker) = marker else { return value.map(|_| Document::unreadable(None, NO_VERSION)) };
    let (version, present) = match marked(marker) {
        Ok(read) => read,
        Err(reason) => return Some(Document::unreadable(None, reason)),
    };
    Some(match (value, present) {
        (None, false) => Document::new(version, Content::Deleted),
        (None, true) => Document::new(version, Content::Expired),
        (Some(_), false) => Document::unreadable(Some(version), "it is deleted and has a value"),
        (Some(value), true) => match content(version, value) {
            Ok(content) => Document::new(version, content),
            Err(reason) => Document::unreadable(Some(version), reason),
        },
    })
}

/// What a value says. The error says what was not written so.
fn content(version: Version, value: &[u8]) -> std::result::Result<Content, String> {
    let value: Value<'_> =
        serde_json::from_slice(value).map_err(|error| format!("its value is damaged: {error}"))?;
    if value.version != version.as_u64() || value.seq != version.seq() {
        return Err(format!(
            "its version is {}, that of seq {}, and its value is of version {} and seq {}",
            version.as_u64(),
            version.seq(),
            value.version,
            value.seq
        ));
    }
    let time = |field: &str, text: &str| Time::parse(text).map_err(|_| format!("its {field} is {text:?}"));
    Ok(Content::Present {
        payload: Payload::stored(value.payload.get()).map_err(|error| error.to_string())?,
        created_at: time("created_at", &value.created_at)?,
        updated_at: time("updated_at", &value.updated_at)?,
    })
}

#[async_trait]
impl Projection for CacheProjection {
    async fn apply(&self, changes: &[Change]) -> Result<Vec<Applied>> {
        self.set(&writes_of(changes), Write::Apply).await
    }

    async fn erase(&self, deletions: &[Change]) -> Result<Vec<Applied>> {
        self.set(&writes_of(deletions), Write::Erase).await
    }

    async fn documents(&self, names: &[Name]) -> Result<Vec<Option<Document>>> {
        // In one command, so that a marker and its value belong together.
        let keys: Vec<String> = names.iter().flat_map(|name| [self.marker(name), self.value(name)]).collect();
        let found = self.get_many(&keys).await?;
        Ok(found.chunks(2).map(|pair| document(pair[0].as_deref(), pair[1].as_deref())).collect())
    }

    async fn scan(&self, after: Option<&str>) -> Result<Scanned> {
        let before = format!("{}:{{", self.settings.prefix);
        let (next, keys): (String, Vec<Vec<u8>>) = redis::cmd("SCAN")
            .arg(after.unwrap_or("0"))
            .arg("MATCH")
            .arg(format!("{before}*"))
            .arg("COUNT")
            .arg(SCAN_COUNT)
            .query_async(&mut self.connection.clone())
            .await
            .doing("scanning the cache")?;
        let (mut names, mut foreign) = (BTreeSet::new(), Vec::new());
        for key in keys {
            let key = String::from_utf8_lossy(&key);
            let name = key.strip_prefix(&before).and_then(|rest| {
                rest.strip_suffix("}:version").or_else(|| rest.strip_suffix("}:value"))?.parse::<Name>().ok()
            });
            match name {
                Some(name) => _ = names.insert(name),
                None => foreign.push((key.into_owned(), "no record has such a key".to_owned())),
            }
        }
        let names: Vec<Name> = names.into_iter().collect();
        let keys: Vec<String> = names.iter().map(|name| self.marker(name)).collect();
        let mut found = Vec::with_capacity(names.len());
        for (name, marker) in names.into_iter().zip(self.get_many(&keys).await?) {
            let read = marker.and_then(|bytes| marked(&bytes).ok());
            found.push((name, read.map_or(Version::LOWEST, |(version, _)| version)));
        }
        Ok(Scanned::new(found, Some(next).filter(|next| next != "0")).foreign(foreign))
    }

    async fn begin_rebuild(&self) -> Result<Box<dyn Rebuilding>> {
        Ok(Box::new(Refill(self.clone())))
    }

    async fn check(&self) -> Result<Vec<Finding>> {
        let info = info(&self.connection).await?;
        Ok(judge(&info, appendfsync(&self.connection).await.as_deref()))
    }

    fn forgets_after(&self) -> Option<Duration> {
        self.settings.value_ttl.map(|_| self.settings.marker_ttl)
    }

    fn durable(&self) -> bool {
        true
    }

    fn about(&self) -> String {
        format!("the cache at {}", self.server)
    }
}

/// A rebuild: versions decide, so changes are applied where they belong.
struct Refill(CacheProjection);

#[async_trait]
impl Rebuilding for Refill {
    async fn apply(&self, changes: &[Change]) -> Result<Vec<Applied>> {
        self.0.apply(changes).await
    }

    async fn switch(&self) -> Result<()> {
        Ok(())
    }

    /// Looks at every key, and removes what is old in the same step that compares: who writes in between stays.
    async fn remove_older(&self, generation: u16) -> Result<u64> {
        let (cache, lowest) = (&self.0, Version::new(generation, 1)?);
        let (mut removed, mut after) = (0, None);
        loop {
            let page = cache.scan(after.as_deref()).await?;
            let older: Vec<Name> =
                page.found.into_iter().filter(|(_, found)| *found < lowest).map(|(name, _)| name).collect();
            for names in older.chunks(CALL_RECORDS) {
                let mut call = cache.removes.prepare_invoke();
                call.arg(format!("{:020}", lowest.as_u64()));
                for name in names {
                    call.key(cache.marker(name)).key(cache.value(name));
                }
                let count: u64 =
                    send(&cache.connection, &call).await.doing("removing what is older from the cache")?;
                removed += count;
            }
            after = page.next;
            if after.is_none() {
                return Ok(removed);
            }
        }
    }
}

/// Judges what the server reports about itself, as far as it matters to a cache.
fn judge(info: &HashMap<String, String>, fsync: Option<&str>) -> Vec<Finding> {
    let of = |name: &str| info.get(name).map_or("unknown", String::as_str);
    let mut findings = Vec::new();
    let mut report = |level, check, message: String| findings.push(Finding { level, check, message });
    match of("maxmemory_policy") {
        "noeviction" => report(Level::Fine, "cache.maxmemory_policy", "maxmemory-policy is noeviction".into()),
        "unknown" => report(
            Level::Warning,
            "cache.maxmemory_policy",
            "maxmemory-policy cannot be read: unless it is noeviction, an old value can come back when memory is full".into(),
        ),
        policy => report(
            Level::Refusal,
            "cache.maxmemory_policy",
            format!(
                "maxmemory-policy is {policy}: when its memory is full the server would forget versions before their time, and an \
                 old event could bring an old value back; set noeviction, and bound the memory by the TTL of values"
            ),
        ),
    }
    if of("cluster_enabled") == "1" {
        let message = "the server is part of a Redis Cluster; a cache needs a single server";
        report(Level::Refusal, "cache.cluster", message.into());
    }
    if of("role") == "slave" {
        report(Level::Refusal, "cache.role", "the server is a replica; a cache needs the primary".into());
    }
    if of("aof_enabled") == "0" {
        let message = "appendonly is no: after a restart the cache is what its last snapshot was, and its consumer does not repeat \
                       what was done since; set appendonly yes, or rebuild it then";
        report(Level::Warning, "cache.durability", message.into());
    } else {
        let so = "and its consumer does not repeat it (then rebuild the cache)";
        findings.push(of_appendfsync("cache.durability", fsync, so));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t320_eviction_of_versions_is_refused() {
        let judged = |changes: &[(&str, &str)]| {
            let fine = [("maxmemory_policy", "noeviction"), ("cluster_enabled", "0"), ("aof_enabled", "1")];
            let pairs = fine.iter().chain(changes);
            let info = pairs.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            let worse =
                judge(&info, Some("always")).into_iter().filter(|finding| finding.level > Level::Fine);
            worse.map(|finding| (finding.check, finding.level)).collect::<Vec<_>>()
        };
        assert_eq!(judged(&[]), []);
        for policy in ["allkeys-lru", "allkeys-random", "volatile-lru", "volatile-ttl"] {
            let found = judged(&[("maxmemory_policy", policy)]);
            assert_eq!(found, [("cache.maxmemory_policy", Level::Refusal)], "{policy}");
        }
        assert_eq!(judged(&[("cluster_enabled", "1")]), [("cache.cluster", Level::Refusal)]);
        assert_eq!(judged(&[("role", "slave")]), [("cache.role", Level::Refusal)]);
        assert_eq!(judged(&[("aof_enabled", "0")]), [("cache.durability", Level::Warning)]);
    }

    #[test]
    fn versions_are_kept_as_long_as_events_come_and_values_are_kept() {
        let hour = Duration::from_hours(1);
        let with =
            |value_ttl, marker_ttl| CacheSettings { value_ttl, marker_ttl, ..CacheSettings::default() };
        assert!(with(Some(hour), 2 * hour).check(2 * hour).is_ok());
        assert!(with(None, 2 * hour).check(2 * hour).is_ok());
        for (value_ttl, marker_ttl, redelivery) in
            [(Some(hour), hour, 2 * hour), (Some(3 * hour), 2 * hour, hour)]
        {
            let message = with(value_ttl, marker_ttl).check(redelivery).unwrap_err().to_string();
            assert!(message.contains("versions must be kept"), "{message}");
        }
        let odd = CacheSettings { prefix: "a*".to_owned(), ..CacheSettings::default() };
        assert!(odd.check(hour).unwrap_err().to_string().contains("a*"));
    }
}
