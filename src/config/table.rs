//! The one table of settings: `load` resolves its rows and `hapax config show` prints them.

use super::analytics::OF_ANALYTICS;
use super::cdc::OF_CDC;
use super::kind::Kind;
use super::projection::OF_PROJECTION;
use super::serve::OF_SERVER;
use crate::error::{Error, Result};
use crate::guard::ATTEMPTS_MAX;
use crate::words::nearest;

/// One setting.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Setting {
    /// Its key: `table.key` in `hapax.toml`.
    pub key: &'static str,
    /// Older keys for it, accepted in `hapax.toml` and with `--set`.
    pub aliases: &'static [&'static str],
    /// Older environment variables for it.
    pub older_env: &'static [&'static str],
    /// Its command-line flag besides `--set KEY=VALUE`.
    pub flag: Option<&'static str>,
    /// What it accepts.
    pub kind: Kind,
    /// Its default value; empty means unset.
    pub default: &'static str,
    /// What it means when it is unset.
    pub unset: &'static str,
    /// Whether it may contain a secret: then it can also come from `…_FILE` and is never printed in
    /// full.
    pub secret: bool,
    /// A one-line description.
    pub doc: &'static str,
}

impl Setting {
    /// Its environment variable: `HAPAX_` and the key in capitals.
    ///
    /// ```
    /// let url = hapax::config::setting("ledger.url").unwrap();
    /// assert_eq!(url.env(), "HAPAX_LEDGER_URL");
    /// ```
    pub fn env(&self) -> String {
        format!("HAPAX_{}", self.key.replace('.', "_").to_ascii_uppercase())
    }
}

pub(super) const fn row(key: &'static str, kind: Kind, default: &'static str, doc: &'static str) -> Setting {
    Setting {
        key,
        aliases: &[],
        older_env: &[],
        flag: None,
        kind,
        default,
        unset: "none",
        secret: false,
        doc,
    }
}

const fn also(setting: Setting, older_env: &'static [&'static str]) -> Setting {
    Setting { older_env, ..setting }
}

/// Sets what it means that the setting is unset.
pub(super) const fn unset(means: &'static str, setting: Setting) -> Setting {
    Setting { unset: means, ..setting }
}

const LEDGERS: Kind = Kind::Url(&[
    ("memory", "memory:"),
    ("sqlite", "sqlite:FILE"),
    ("postgres", "postgres://USER@HOST/DATABASE"),
    ("redis", "redis://HOST:PORT"),
    ("postgresql", ""),
    ("rediss", ""),
    ("valkey", ""),
    ("valkeys", ""),
]);
const JOURNALS: Kind = Kind::Url(&[
    ("memory", "memory:"),
    ("sqlite", "sqlite:FILE"),
    ("postgres", "postgres://USER@HOST/DATABASE"),
    ("s3", "s3://BUCKET/PREFIX"),
    ("dir", "dir:PATH"),
    ("postgresql", ""),
]);
const KEYS: Kind = Kind::Url(&[
    ("memory", "memory:"),
    ("sqlite", "sqlite:FILE"),
    ("postgres", "postgres://USER@HOST/DATABASE"),
    ("postgresql", ""),
]);
const WINDOWS: Kind = Kind::Url(&[
    ("memory", "memory:"),
    ("redis", "redis://HOST:PORT"),
    ("rediss", ""),
    ("valkey", ""),
    ("valkeys", ""),
]);
const BUSES: Kind = Kind::Url(&[
    ("embedded", "embedded"),
    ("embedded", "embedded:FILE"),
    ("kafka", "kafka://HOST:PORT[,HOST:PORT]"),
    ("memory", ""),
]);
pub(super) const DATABASES: Kind =
    Kind::Url(&[("postgres", "postgres://USER@HOST/DATABASE"), ("postgresql", "")]);

pub(super) const fn int(min: u64, max: u64) -> Kind {
    Kind::Int { min, max }
}

/// Just under a century: longer than anyone needs, short enough for every clock.
const DAYS_MAX: u64 = 36_500;

/// All settings, in the order in which they are shown.
pub const SETTINGS: &[Setting] = &joined::<
    { OF_EVENTS.len() + OF_ANALYTICS.len() + OF_CDC.len() + OF_PROJECTION.len() + OF_SERVER.len() },
>(&[OF_EVENTS, OF_ANALYTICS, OF_CDC, OF_PROJECTION, OF_SERVER]);

/// Joins lists; `N` is the length of all.
const fn joined<const N: usize>(lists: &[&[Setting]]) -> [Setting; N] {
    let mut all = [lists[0][0]; N];
    let (mut at, mut list, mut place) = (0, 0, 0);
    while at < N {
        if place == lists[list].len() {
            list += 1;
            place = 0;
            continue;
        }
        all[at] = lists[list][place];
        at += 1;
        place += 1;
    }
    all
}

/// The settings of everything but the read model and the server.
const OF_EVENTS: &[Setting] = &[
    Setting {
        flag: Some("--data"),
        ..row("data.dir", Kind::Text, "hapax-data", "where embedded data lives")
    },
    Setting {
        flag: Some("--ledger"),
        secret: true,
        ..row(
            "ledger.url",
            LEDGERS,
            "",
            "memory:, sqlite:FILE, postgres://… or redis://…; unset: sqlite:ledger.db in data.dir",
        )
    },
    row(
        "ledger.schema",
        Kind::Identifier,
        "hapax",
        "the PostgreSQL schema of the ledger; in Redis, its name",
    ),
    row(
        "ledger.migrate",
        Kind::Choice(&["auto", "check"]),
        "auto",
        "auto: bring the schema up to date at start; check: refuse to start if it is not",
    ),
    row("ledger.pool_max", int(1, 10_000), "50", "connections at most"),
    row("ledger.acquire_timeout_ms", int(1, 3_600_000), "10000", "how long to wait for a connection"),
    row("ledger.retention_days", int(1, DAYS_MAX), "7", "how long entries stay after they were settled"),
    row(
        "ledger.identity",
        Kind::Choice(&["id", "id_and_time"]),
        "id",
        "what makes an identity: the id alone, or with the week of the event's time",
    ),
    row(
        "ledger.mismatch",
        Kind::Choice(&["error", "warn"]),
        "error",
        "what to do about an id that is reused for different content",
    ),
    row("ledger.metadata_bytes_max", int(2, 64 * 1024 * 1024), "16384", "the largest metadata of an entry"),
    row("ledger.sweep", Kind::Bool, "true", "whether a guard sweeps in the background"),
    row("ledger.sweep_interval_s", int(1, 7 * 86_400), "3600", "how often the sweeper runs"),
    row("ledger.log_skips", Kind::Bool, "true", "whether skips are logged and prevented repeats counted"),
    row(
        "ledger.value",
        Kind::Name,
        "",
        "where an event's value is in its payload, as /amount: prevented repeats sum it",
    ),
    Setting {
        aliases: &["im2be.dedup.default-scope-id"],
        ..also(
            row(
                "dedup.default_scope_id",
                Kind::Name,
                "",
                "the scope of claims that name none (blank: unset)",
            ),
            &["IM2BE_DEDUP_DEFAULT_SCOPE_ID"],
        )
    },
    also(
        row(
            "dedup.enabled",
            Kind::Bool,
            "true",
            "false: leased and at-most-once work runs unguarded, transactional work refuses to start",
        ),
        &["ENABLE_PROCESSED_EVENT_REGISTRY"],
    ),
    also(
        row("lease.timeout_s", int(1, 7 * 86_400), "900", "how long a lease lasts unless extended"),
        &["PROCESSED_EVENT_LEASE_TIMEOUT_SECONDS"],
    ),
    also(
        row(
            "lease.heartbeat_s",
            int(1, 7 * 86_400 - 1),
            "30",
            "how often a lease is extended; shorter than the lease",
        ),
        &["PROCESSED_EVENT_HEARTBEAT_INTERVAL_SECONDS"],
    ),
    unset(
        "host and process",
        also(
            row("lease.owner", Kind::Name, "", "who holds the leases, for humans (blank: host and process)"),
            &["PROCESSED_EVENT_OWNER"],
        ),
    ),
    row(
        "retry.attempts_max",
        int(1, ATTEMPTS_MAX as u64),
        "5",
        "how many runs an event gets before it is dead",
    ),
    row("retry.backoff_base_ms", int(1, 86_400_000), "1000", "the pause after the first failure; it doubles"),
    row("retry.backoff_max_ms", int(1, 30 * 86_400_000), "300000", "the longest pause"),
    Setting {
        secret: true,
        ..row(
            "window.url",
            WINDOWS,
            "",
            "memory: or redis://HOST:PORT, a filter in front of the ledger; unset: none",
        )
    },
    also(
        row("window.ttl_hours", int(1, 720), "24", "how long the window remembers what is done"),
        &["EVENT_DEDUP_TTL_HOURS"],
    ),
    row(
        "window.epoch",
        Kind::Name,
        "1",
        "change this after restoring the ledger's files from a copy; the window then starts empty. Other resets are detected automatically",
    ),
    row(
        "window.outage",
        Kind::Choice(&["pass_through", "pause"]),
        "pass_through",
        "while the window is away: let everything pass to the ledger (counted), or wait until it is back",
    ),
    Setting {
        flag: Some("--journal"),
        secret: true,
        ..row(
            "journal.url",
            JOURNALS,
            "",
            "memory:, sqlite:FILE, postgres://…, s3://BUCKET/PREFIX or dir:PATH; unset: sqlite:journal.db in data.dir",
        )
    },
    row("journal.schema", Kind::Identifier, "hapax", "the PostgreSQL schema of the journal"),
    row(
        "journal.migrate",
        Kind::Choice(&["auto", "check"]),
        "auto",
        "auto: bring the schema up to date at start; check: refuse to start if it is not",
    ),
    also(
        row(
            "journal.mismatch",
            Kind::Choice(&["error", "warn"]),
            "error",
            "what to do about an id that is reused for different content; warn keeps and returns the original",
        ),
        &["EVENT_STORE_IDEMPOTENCY_MISMATCH_MODE"],
    ),
    row(
        "journal.event_bytes_max",
        int(1, 256 * 1024 * 1024),
        "983040",
        "the largest event, payload and headers; buses take 1 MiB by default, and the relay needs some of it",
    ),
    also(
        row(
            "journal.allocator",
            Kind::Choice(&["postgres", "s3", "legacy", "off"]),
            "postgres",
            "who numbers the events of an object store: a table in PostgreSQL, the store itself (s3, legacy; also if no PostgreSQL is named), or the caller (off)",
        ),
        &["EVENT_STORE_SEQUENCE_ALLOCATOR_MODE"],
    ),
    Setting {
        secret: true,
        unset: "ledger.url, if that is PostgreSQL",
        ..row(
            "journal.allocator_url",
            DATABASES,
            "",
            "the PostgreSQL that numbers (unset: ledger.url, if that is one)",
        )
    },
    also(
        row("journal.allocator_schema", Kind::Identifier, "spice_event_registry", "the schema of its table"),
        &["EVENT_STORE_SEQUENCE_SCHEMA"],
    ),
    also(
        row("journal.allocator_prefix", Kind::Name, "write_side", "what its rows are filed under"),
        &["EVENT_STORE_SEQUENCE_HANDLER_PREFIX"],
    ),
    Setting {
        secret: true,
        ..row(
            "keys.url",
            KEYS,
            "",
            "memory:, sqlite:FILE or postgres://…: the keys of writes, and what the server itself stores; unset: the journal's database, or sqlite:server.db in data.dir if that has no transactions",
        )
    },
    Setting {
        secret: true,
        ..unset(
            "keys.url",
            row(
                "keys.maintenance_url",
                DATABASES,
                "",
                "keys.url with the role that sweeps and lists the keys of all tenants",
            ),
        )
    },
    also(
        row("keys.retention_days", int(1, DAYS_MAX), "30", "how long the answer to a keyed write is kept"),
        &["DATA_IDEMPOTENCY_KEY_RETENTION_DAYS"],
    ),
    unset(
        "the owner",
        row("records.app_role", Kind::Name, "", "the PostgreSQL role that reads and writes records"),
    ),
    unset(
        "the owner",
        row(
            "records.maintenance_role",
            Kind::Name,
            "",
            "the PostgreSQL role that counts records and sweeps keys of all tenants",
        ),
    ),
    row(
        "records.accept_bypass",
        Kind::Bool,
        "false",
        "for development: whether a role that bypasses row security may use records",
    ),
    row("relay.name", Kind::Name, "relay", "which relay: one of a name leads at a time"),
    row("relay.topic", Kind::Name, "events", "where it publishes"),
    row(
        "relay.lease_ms",
        int(100, 3_600_000),
        "15000",
        "how long the lead lasts unless it is kept; a killed relay is succeeded after that",
    ),
    also(
        row(
            "relay.lookback_s",
            int(0, 86_400),
            "600",
            "object stores: how far back the relay looks for events that appear late; 0: not at all",
        ),
        &["EVENT_PUBLISHER_LOOKBACK_SECONDS"],
    ),
    also(
        row(
            "relay.lookback_max",
            int(0, 100_000),
            "50",
            "object stores: how many events it looks at per batch; 0: none",
        ),
        &["EVENT_PUBLISHER_LOOKBACK_MAX_KEYS"],
    ),
    also(
        row(
            "relay.dedup_max",
            int(0, 10_000_000),
            "10000",
            "object stores: how many published events the relay remembers; 0: none, and no lookback",
        ),
        &["EVENT_PUBLISHER_DEDUP_MAX_EVENTS"],
    ),
    also(
        row(
            "relay.dedup_checkpoint_max",
            int(0, 100_000),
            "2000",
            "object stores: how many of them its checkpoint keeps over a restart; 0: none",
        ),
        &["EVENT_PUBLISHER_DEDUP_CHECKPOINT_MAX_EVENTS"],
    ),
    also(
        row("relay.batch_max", int(1, 100_000), "1000", "how many events it reads and publishes at once"),
        &["EVENT_PUBLISHER_BATCH_SIZE"],
    ),
    also(
        row(
            "relay.flush_max",
            int(0, 100_000),
            "0",
            "after how many events it waits for acknowledgement; 0: as relay.batch_max",
        ),
        &["EVENT_PUBLISHER_KAFKA_FLUSH_BATCH_SIZE"],
    ),
    also(
        row("relay.flush_timeout_s", int(1, 3600), "10", "how long it waits for acknowledgement"),
        &["EVENT_PUBLISHER_KAFKA_FLUSH_TIMEOUT_SECONDS"],
    ),
    also(
        row("relay.log_interval_s", int(0, 86_400), "30", "how often it logs what it did; 0: never"),
        &["EVENT_PUBLISHER_METRICS_LOG_INTERVAL_SECONDS"],
    ),
    row(
        "relay.behind_max",
        int(1, 100_000),
        "1000",
        "how many aggregates may be behind before it pauses, parked ones not counted",
    ),
    row(
        "relay.large_bytes",
        int(1, 1 << 30),
        "262144",
        "a record of more bytes is the last of its aggregate in its flush; lower it if the topic takes less",
    ),
    row("relay.poll_ms", int(1, 3_600_000), "1000", "how long a journal that says nothing is left alone"),
    row(
        "relay.backoff_base_ms",
        int(1, 3_600_000),
        "200",
        "the pause after a first failure; doubles with each",
    ),
    row("relay.backoff_max_ms", int(1, 86_400_000), "60000", "the longest pause"),
    row(
        "relay.pulse_ms",
        int(0, 3_600_000),
        "0",
        "how often it tells read models, on every partition, up to when everything is there; 0: never",
    ),
    unset(
        "the journal's id",
        row(
            "relay.source",
            Kind::Text,
            "",
            "the CloudEvents source of what it publishes (unset: the journal's id)",
        ),
    ),
    row(
        "relay.schema",
        Kind::Text,
        "",
        "where the payloads' schema is described (CloudEvents dataschema), for events that do not say",
    ),
    Setting {
        flag: Some("--bus"),
        secret: true,
        ..row(
            "bus.url",
            BUSES,
            "embedded",
            "embedded (a file in data.dir), embedded:FILE or kafka://HOST:PORT[,HOST:PORT][?property=value]",
        )
    },
    row("consumer.concurrency", int(1, 100_000), "64", "how many events are handled at once"),
    row("consumer.workers", int(1, 1000), "1", "how many children `consume --exec` runs"),
    row(
        "consumer.cancel_grace_ms",
        int(1, 3_600_000),
        "5000",
        "a child of `consume --exec` that does not react to a cancel for so long is killed",
    ),
    row("consumer.handler_timeout_ms", int(1, 86_400_000), "30000", "how long handling one event may take"),
    row("consumer.lease_s", int(1, 86_400), "30", "how long a consumer's lease lasts unless extended"),
    row("consumer.heartbeat_s", int(1, 86_399), "10", "how often a consumer's lease is extended"),
    row(
        "consumer.in_flight_max",
        int(1, 10_000_000),
        "4096",
        "how many deliveries of a partition are in memory at once; beyond it the partition pauses",
    ),
    row(
        "consumer.hold_ms_max",
        int(0, 86_400_000),
        "30000",
        "a retry further away than this waits in the ledger, and its offset is passed",
    ),
    row(
        "consumer.held_max",
        int(1, 1_000_000_000),
        "100000",
        "how many events a scope may hold in the ledger; at the cap partitions pause",
    ),
    row("consumer.held_interval_ms", int(1, 3_600_000), "500", "how often the ledger is asked what is due"),
    row("consumer.commit_interval_ms", int(1, 3_600_000), "500", "how often offsets are committed"),
    row("consumer.drain_ms", int(0, 3_600_000), "20000", "how long a stop waits for what runs"),
    row(
        "consumer.session_timeout_ms",
        int(100, 3_600_000),
        "45000",
        "after this long without a sign of life a member's partitions go to others",
    ),
    row(
        "consumer.gap_timeout_ms",
        int(1, 86_400_000),
        "60000",
        "strict order: how long to wait for a missing seq before the aggregate is parked",
    ),
    row(
        "consumer.outage",
        Kind::Choice(&["pause", "fail_fast", "dead_letter"]),
        "pause",
        "while the ledger is away: wait, end with the error, or copy what arrives to the dead-letter topic",
    ),
    unset(
        "<topic>.dead",
        row(
            "consumer.dead_topic",
            Kind::Name,
            "",
            "where dead letters are copied to (blank: <topic>.dead; a lone hyphen: nowhere)",
        ),
    ),
    row("telemetry.prefix", Kind::Text, "", "put before the names of spans and metrics"),
];

/// The setting that each scope can override; `<scope>` is the name of a scope.
pub static ATTEMPTS_OF_SCOPE: Setting = row(
    "consumer.<scope>.max_attempts",
    int(1, ATTEMPTS_MAX as u64),
    "",
    "how many runs an event of this scope gets (unset: retry.attempts_max)",
);

/// The setting with this key or alias.
pub fn setting(name: &str) -> Result<&'static Setting> {
    find(name).map_err(Error::Config)
}

/// Like [`setting`], but returns the error as text.
pub(super) fn find(name: &str) -> std::result::Result<&'static Setting, String> {
    SETTINGS.iter().find(|s| s.key == name || s.aliases.contains(&name)).ok_or_else(|| {
        let keys = SETTINGS.iter().flat_map(|s| std::iter::once(s.key).chain(s.aliases.iter().copied()));
        let meant = of_flag(name).map(|setting| setting.key).or_else(|| nearest(name, keys));
        let meant = meant.map_or_else(String::new, |meant| format!("did you mean {meant}? "));
        format!("{name:?} is not a setting; {meant}`hapax config show` lists them all")
    })
}

/// `did you mean …? `, if an unknown variable resembles a known one.
pub(super) fn meant_variable(name: &str) -> String {
    let names: Vec<_> = SETTINGS
        .iter()
        .flat_map(|s| std::iter::once(s.env()).chain(s.older_env.iter().map(|&older| older.to_owned())))
        .collect();
    let own = name.strip_prefix("HAPAX_");
    let meant = own
        .and_then(of_flag)
        .map(Setting::env)
        .or_else(|| nearest(name, names.iter().map(String::as_str)).map(str::to_owned));
    // `HAPAX_ATTEMPTS_MAX`: the end of a name behind the common prefix.
    let meant = meant.or_else(|| {
        let ends = names.iter().filter_map(|name| name.strip_prefix("HAPAX_"));
        nearest(own?, ends).map(|end| format!("HAPAX_{end}"))
    });
    meant.map_or_else(String::new, |meant| format!("did you mean {meant}? "))
}

/// The setting whose flag has this name: `ledger` and `LEDGER` match `--ledger`.
fn of_flag(name: &str) -> Option<&'static Setting> {
    let is = |flag: &str| flag.trim_start_matches('-').eq_ignore_ascii_case(name);
    SETTINGS.iter().find(|setting| setting.flag.is_some_and(is))
}
