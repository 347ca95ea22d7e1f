//! A window in Redis or Valkey, shared by all processes.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use redis::aio::ConnectionManager;

use super::connect::{Doing, info, manager};
use crate::error::{Error, Result};
use crate::ledger::{Finding, Identity, Level};
use crate::window::{Window, WindowSettings, key};

/// A window that is given up on after so long: it must never cost more than the claim it saves.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A window in Redis or Valkey: one key per event, whose value is the epoch, and which the server forgets in time.
#[derive(Clone)]
pub struct RedisWindow {
    connection: ConnectionManager,
    settings: WindowSettings,
}

impl fmt::Debug for RedisWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The connection knows the password.
        f.debug_struct("RedisWindow").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl RedisWindow {
    /// A window on a server. It is connected with the first call, so a server that is away does not stop anybody here.
    pub fn new(url: &str, settings: WindowSettings) -> Result<Self> {
        settings.check()?;
        Ok(RedisWindow { connection: manager(url, TIMEOUT)?, settings })
    }

    /// The same keys as one of another epoch sees them.
    #[must_use]
    pub fn in_epoch(&self, epoch: impl Into<String>) -> Self {
        let settings = WindowSettings { epoch: epoch.into(), ..self.settings.clone() };
        RedisWindow { connection: self.connection.clone(), settings }
    }
}

#[async_trait]
impl Window for RedisWindow {
    async fn seen(&self, identities: &[Identity]) -> Result<Vec<bool>> {
        if identities.is_empty() {
            return Ok(Vec::new());
        }
        let mut get = redis::cmd("MGET");
        for identity in identities {
            get.arg(key(identity));
        }
        let values: Vec<Option<Vec<u8>>> =
            get.query_async(&mut self.connection.clone()).await.doing("looking into the window")?;
        if values.len() != identities.len() {
            return Err(Error::Corrupt(format!("{} keys had {} values", identities.len(), values.len())));
        }
        let ours = |value: &Option<Vec<u8>>| value.as_deref() == Some(self.settings.epoch.as_bytes());
        Ok(values.iter().map(ours).collect())
    }

    async fn remember(&self, identities: &[Identity]) -> Result<()> {
        if identities.is_empty() {
            return Ok(());
        }
        let mut pipe = redis::pipe();
        for identity in identities {
            let ttl_s = self.settings.ttl.as_secs();
            pipe.cmd("SET").arg(key(identity)).arg(&self.settings.epoch).arg("EX").arg(ttl_s).ignore();
        }
        pipe.query_async::<()>(&mut self.connection.clone()).await.doing("writing to the window")
    }

    async fn check(&self, redelivery: Option<Duration>) -> Vec<Finding> {
        let mut findings = vec![self.settings.check_redelivery(redelivery)];
        match info(&self.connection).await {
            Err(error) => findings.push(Finding {
                level: Level::Warning,
                check: "window.server",
                message: format!("the window does not answer: {}", error.chain()),
            }),
            Ok(info) => findings.extend(judge(&info)),
        }
        findings
    }
}

/// What the server says about itself, as far as it concerns a window.
fn judge(info: &HashMap<String, String>) -> Vec<Finding> {
    let of = |name: &str| info.get(name).map_or("unknown", String::as_str);
    let mut findings = Vec::new();
    let mut tell = |level, check, message: String| findings.push(Finding { level, check, message });
    match of("maxmemory_policy") {
        "noeviction" => tell(Level::Fine, "window.maxmemory_policy", "maxmemory-policy is noeviction".into()),
        policy => tell(
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
        tell(Level::Refusal, "window.cluster", message.into());
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
