//! Checks what the guarantees depend on, as far as the server reports it.

use std::collections::HashMap;

use redis::aio::ConnectionManager;

use super::connect::info;
use super::{Accept, RedisLedger};
use crate::error::Result;
use crate::ledger::{Finding, Level};
use crate::words::counted;

/// Judges the server by what it reports about itself.
pub(super) async fn findings(ledger: &RedisLedger) -> Result<Vec<Finding>> {
    let info = info(&ledger.0.connection).await?;
    let fsync = appendfsync(&ledger.0.connection).await;
    Ok(judge(&info, fsync.as_deref(), &ledger.0.accept))
}

/// When a server with an append-only file writes it to disk; `None`: a managed server may not allow reading its
/// configuration.
pub(super) async fn appendfsync(connection: &ConnectionManager) -> Option<String> {
    let mut ask = redis::cmd("CONFIG");
    let found: Option<HashMap<String, String>> =
        ask.arg("GET").arg("appendfsync").query_async(&mut connection.clone()).await.ok();
    found?.remove("appendfsync")
}

/// Judges an append-only file by that. `so` says what follows from the loss of what was acknowledged last.
pub(super) fn of_appendfsync(check: &'static str, fsync: Option<&str>, so: &str) -> Finding {
    let (level, message) = match fsync {
        Some("always") => (Level::Fine, "appendfsync is always".to_owned()),
        Some(fsync) => {
            let when = if fsync == "everysec" {
                "in the last second or two"
            } else {
                "since the system last wrote to disk"
            };
            let message = format!(
                "appendfsync is {fsync}: what was acknowledged {when} is lost if the machine stops, {so}; set always"
            );
            (Level::Warning, message)
        }
        None => (
            Level::Warning,
            format!(
                "appendfsync cannot be read (CONFIG is not allowed): unless it is always, what was acknowledged last is lost if the \
                 machine stops, {so}"
            ),
        ),
    };
    Finding { level, check, message }
}

fn judge(info: &HashMap<String, String>, fsync: Option<&str>, accepted: &[Accept]) -> Vec<Finding> {
    let of = |name: &str| info.get(name).map_or("unknown", String::as_str);
    let mut findings = Vec::new();
    let mut report = |level, check, message: String| findings.push(Finding { level, check, message });
    let weak = |what: Accept, message: String| {
        if accepted.contains(&what) {
            return (Level::Warning, format!("{message} (accepted: accept={})", what.name()));
        }
        let text =
            format!("{message}, or say in the ledger's URL that this is accepted: accept={}", what.name());
        (Level::Refusal, text)
    };
    let version = info.get("valkey_version").map(|version| format!("Valkey {version}"));
    report(Level::Fine, "version", version.unwrap_or_else(|| format!("Redis {}", of("redis_version"))));
    if of("cluster_enabled") == "1" {
        report(
            Level::Refusal,
            "cluster",
            "the server is part of a Redis Cluster; this ledger has one sequence of tokens for all its keys and needs a single \
             server (a primary, with replicas if you like)"
                .into(),
        );
    }
    match of("maxmemory_policy") {
        "noeviction" => report(Level::Fine, "maxmemory_policy", "maxmemory-policy is noeviction".into()),
        policy => {
            let message = format!(
                "maxmemory-policy is {policy}: when its memory is full the server would forget what took effect; set \
                 noeviction"
            );
            let (level, message) = weak(Accept::Eviction, message);
            report(level, "maxmemory_policy", message);
        }
    }
    if of("aof_enabled") == "1" {
        let Finding { level, check, message } = of_appendfsync("durability", fsync, "and is run again");
        report(level, check, message);
    } else {
        let message = "appendonly is no: everything since the last snapshot is lost if the server stops, and is run again; set \
             appendonly yes and appendfsync always";
        let (level, message) = weak(Accept::NoAppendonly, message.into());
        report(level, "durability", message);
    }
    let replicas = of("connected_slaves");
    if of("role") == "slave" {
        report(Level::Refusal, "role", "the server is a replica; a ledger needs the primary".into());
    } else if replicas != "0" && replicas != "unknown" {
        let message = format!(
            "the server has {}, asynchronous: one that takes over may lack the last acknowledged writes, and their events are \
             run again; let none take over",
            counted(replicas.parse().unwrap_or(u64::MAX), "replica", "replicas")
        );
        let (level, message) = weak(Accept::Replicas, message);
        report(level, "replication", message);
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(changes: &[(&str, &str)], fsync: Option<&str>) -> Vec<(&'static str, Level)> {
        judged(changes, fsync, &[])
    }

    fn judged(
        changes: &[(&str, &str)],
        fsync: Option<&str>,
        accepted: &[Accept],
    ) -> Vec<(&'static str, Level)> {
        let fine = [
            ("valkey_version", "9.1.2"),
            ("maxmemory_policy", "noeviction"),
            ("cluster_enabled", "0"),
            ("aof_enabled", "1"),
            ("role", "master"),
            ("connected_slaves", "0"),
        ];
        let info = fine.iter().chain(changes).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let findings =
            judge(&info.collect(), fsync, accepted).into_iter().filter(|finding| finding.level > Level::Fine);
        findings.map(|finding| (finding.check, finding.level)).collect()
    }

    #[test]
    fn t98_one_replica_is_reported_as_one() {
        for (count, expected) in [("1", "has 1 replica,"), ("2", "has 2 replicas,")] {
            let info = [("role", "master"), ("connected_slaves", count)];
            let info = info.map(|(name, value)| (name.to_owned(), value.to_owned())).into_iter().collect();
            let findings = judge(&info, Some("always"), &[]);
            assert!(findings.iter().any(|finding| finding.message.contains(expected)), "{findings:?}");
        }
    }

    #[test]
    fn each_weakness_is_reported() {
        let always = Some("always");
        assert!(worst(&[], always).is_empty());
        assert_eq!(worst(&[("cluster_enabled", "1")], always), [("cluster", Level::Refusal)]);
        assert_eq!(
            worst(&[("maxmemory_policy", "allkeys-lru")], always),
            [("maxmemory_policy", Level::Refusal)]
        );
        assert_eq!(worst(&[], Some("everysec")), [("durability", Level::Warning)]);
        assert_eq!(worst(&[], None), [("durability", Level::Warning)]);
        assert_eq!(worst(&[("role", "slave")], always), [("role", Level::Refusal)]);
        for (weakness, check, accept) in [
            (("aof_enabled", "0"), "durability", Accept::NoAppendonly),
            (("maxmemory_policy", "allkeys-lru"), "maxmemory_policy", Accept::Eviction),
            (("connected_slaves", "2"), "replication", Accept::Replicas),
        ] {
            assert_eq!(worst(&[weakness], always), [(check, Level::Refusal)]);
            assert_eq!(judged(&[weakness], always, &[accept]), [(check, Level::Warning)]);
            let others: Vec<_> = Accept::ALL.into_iter().filter(|other| *other != accept).collect();
            assert_eq!(
                judged(&[weakness], always, &others),
                [(check, Level::Refusal)],
                "each by its own name"
            );
        }
    }
}
