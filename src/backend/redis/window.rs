//! A window in Redis or Valkey, shared by all processes.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use redis::aio::ConnectionManager;
use sha2::{Digest as _, Sha256};

use super::connect::{Doing, info, manager};
use crate::error::{Error, Result};
use crate::event::Fingerprint;
use crate::ledger::{Epoch, Finding, Level};
use crate::secret::hide_password;
use crate::window::{Sighting, Window, WindowSettings, key};

/// How long the window may take to answer: it must never cost more than the claim it saves.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A window in Redis or Valkey: one key per event, which the server expires. The value is an
/// integer, so it takes no more room than the key does: 40 bits for the epoch, 24 for the
/// fingerprint.
#[derive(Clone)]
pub struct RedisWindow {
    connection: ConnectionManager,
    /// Its URL, without the password.
    server: String,
    settings: WindowSettings,
}

impl fmt::Debug for RedisWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The connection holds the password.
        f.debug_struct("RedisWindow").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl RedisWindow {
    /// A window on a server. It connects with the first call, so an unreachable server does not
    /// prevent the start.
    pub fn new(url: &str, settings: WindowSettings) -> Result<Self> {
        settings.check()?;
        Ok(RedisWindow { connection: manager(url, TIMEOUT)?, server: hide_password(url), settings })
    }

    /// The same keys under another epoch.
    #[must_use]
    pub fn in_epoch(&self, epoch: impl Into<String>) -> Self {
        let settings = WindowSettings { epoch: epoch.into(), ..self.settings.clone() };
        RedisWindow { connection: self.connection.clone(), server: self.server.clone(), settings }
    }
}

#[async_trait]
impl Window for RedisWindow {
    async fn seen(&self, sightings: &[Sighting]) -> Result<Vec<bool>> {
        if sightings.is_empty() {
            return Ok(Vec::new());
        }
        let mut get = redis::cmd("MGET");
        for sighting in sightings {
            get.arg(key(&sighting.identity));
        }
        let values: Vec<Option<Vec<u8>>> =
            get.query_async(&mut self.connection.clone()).await.doing("looking into the window")?;
        if values.len() != sightings.len() {
            return Err(Error::Corrupt(format!("{} keys had {} values", sightings.len(), values.len())));
        }
        let by_hand = epoch_bits(&self.settings.epoch);
        let seen = |(sighting, value): (&Sighting, &Option<Vec<u8>>)| {
            let number = value.as_deref().and_then(|value| std::str::from_utf8(value).ok()?.parse().ok());
            number.is_some_and(|number| is_same(number, value_of(by_hand, sighting)))
        };
        Ok(sightings.iter().zip(&values).map(seen).collect())
    }

    async fn remember(&self, sightings: &[Sighting]) -> Result<()> {
        if sightings.is_empty() {
            return Ok(());
        }
        let mut pipe = redis::pipe();
        let (by_hand, ttl_s) = (epoch_bits(&self.settings.epoch), self.settings.ttl.as_secs());
        for sighting in sightings {
            let value = value_of(by_hand, sighting);
            pipe.cmd("SET").arg(key(&sighting.identity)).arg(value).arg("EX").arg(ttl_s).ignore();
        }
        pipe.query_async::<()>(&mut self.connection.clone()).await.doing("writing to the window")
    }

    async fn check(&self, redelivery: Option<Duration>) -> Vec<Finding> {
        let mut findings = vec![self.settings.check_redelivery(redelivery)];
        match info(&self.connection).await {
            Err(error) => findings.push(Finding {
                level: Level::Warning,
                check: "window.server",
                message: format!("the window at {} does not answer: {}", self.server, error.chain()),
            }),
            Ok(info) => findings.extend(judge(&info)),
        }
        findings
    }
}

/// How many bits of a value hold the fingerprint; 0 means none.
const PRINT_BITS: u32 = 24;
const PRINT_MASK: i64 = (1 << PRINT_BITS) - 1;

/// The bits of a configured epoch. Two epochs collide with a probability of one in 2^40.
fn epoch_bits(epoch: &str) -> i64 {
    high_bits(&Sha256::digest(epoch.as_bytes()))
}

fn high_bits(random: &[u8]) -> i64 {
    random.iter().take(5).fold(0, |bits, byte| (bits << 8) | i64::from(*byte)) << PRINT_BITS
}

/// The value of a key. The ledger's epoch is effectively random, so the two epochs can share the
/// same bits by XOR.
fn value_of(by_hand: i64, sighting: &Sighting) -> i64 {
    let print = sighting
        .fingerprint
        .map_or(0, |Fingerprint([a, b, c, ..])| i64::from(u32::from_be_bytes([0, a, b, c])).max(1));
    let of_ledger = |epoch: Epoch| high_bits(epoch.as_bytes());
    (by_hand ^ sighting.epoch.map_or(0, of_ledger)) | print
}

/// Whether two values have the same epoch and, if both have a fingerprint, the same fingerprint.
fn is_same(one: i64, other: i64) -> bool {
    let (print, other_print) = (one & PRINT_MASK, other & PRINT_MASK);
    one >> PRINT_BITS == other >> PRINT_BITS && (print == 0 || other_print == 0 || print == other_print)
}

/// Judges what the server reports about itself, as far as it matters to a window.
fn judge(info: &HashMap<String, String>) -> Vec<Finding> {
    let of = |name: &str| info.get(name).map_or("unknown", String::as_str);
    let mut findings = Vec::new();
    let mut report = |level, check, message: String| findings.push(Finding { level, check, message });
    match of("maxmemory_policy") {
        "noeviction" => {
            report(Level::Fine, "window.maxmemory_policy", "maxmemory-policy is noeviction".into());
        }
        policy => report(
            Level::Warning,
            "window.maxmemory_policy",
            format!(
                "maxmemory-policy is {policy}: when its memory is full the server forgets keys before their time, and those \
                 events pass to the ledger; set noeviction, or accept that"
            ),
        ),
    }
    if of("cluster_enabled") == "1" {
        let message = "the server is part of a Redis Cluster; a window needs a single server";
        report(Level::Refusal, "window.cluster", message.into());
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eviction_is_a_warning_and_a_cluster_a_refusal() {
        let judged = |policy: &str, cluster: &str| {
            let pairs = [("maxmemory_policy", policy), ("cluster_enabled", cluster)];
            let info = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            judge(&info).iter().map(|finding| finding.level).collect::<Vec<_>>()
        };
        assert_eq!(judged("noeviction", "0"), [Level::Fine]);
        assert_eq!(judged("allkeys-lru", "0"), [Level::Warning]);
        assert_eq!(judged("noeviction", "1"), [Level::Fine, Level::Refusal]);
    }
}
