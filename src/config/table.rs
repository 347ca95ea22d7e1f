//! The one table of settings: `load` resolves its rows and `hapax config show` prints them.

use super::analytics::OF_ANALYTICS;
use super::cdc::OF_CDC;
use super::consumer::OF_CONSUMER;
use super::journal::OF_RELAY;
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

pub(super) const fn also(setting: Setting, older_env: &'static [&'static str]) -> Setting {
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
pub const SETTINGS: &[Setting] =
    &joined::<
        {
            OF_STORES.len()
                + OF_RELAY.len()
                + OF_CONSUMER.len()
                + OF_ANALYTICS.len()
                + OF_CDC.len()
                + OF_PROJECTION.len()
                + OF_SERVER.len()
        },
    >(&[OF_STORES, OF_RELAY, OF_CONSUMER, OF_ANALYTICS, OF_CDC, OF_PROJECTION, OF_SERVER]);

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

/// The settings of ledger, window, journal, keys, records and bus, and of telemetry.
const OF_STORES: &[Setting] = &[
    Setting {
        flag: Some("--data"),
        ..row(
            "data.dir",
            Kind::Text,
            "hapax-data",
            "the directory where embedded data lives: ledger, journal, bus and read model",
        )
    },
    Setting {
        flag: Some("--ledger"),
        secret: true,
        ..row(
            "ledger.url",
            LEDGERS,
            "",
            "the ledger: memory:, sqlite:FILE, postgres://… or redis://…; unset: sqlite:ledger.db in data.dir",
        )
    },
    row(
        "ledger.schema",
        Kind::Identifier,
        "hapax",
        "the PostgreSQL schema of the ledger; in Redis, the name of the ledger",
    ),
    row(
        "ledger.migrate",
        Kind::Choice(&["auto", "check"]),
        "auto",
        "what a start does about the ledger's schema: auto brings it up to date, check refuses to start if it is not",
    ),
    row("ledger.pool_max", int(1, 10_000), "50", "how many connections a pool to PostgreSQL has at most"),
    row(
        "ledger.acquire_timeout_ms",
        int(1, 3_600_000),
        "10000",
        "how long a statement waits for a connection from the pool",
    ),
    row(
        "ledger.retention_days",
        int(1, DAYS_MAX),
        "7",
        "how long the ledger keeps entries after they were settled",
    ),
    row(
        "ledger.identity",
        Kind::Choice(&["id", "id_and_time"]),
        "id",
        "what identifies an event in the ledger: its id alone, or its id and the week of its time",
    ),
    row(
        "ledger.mismatch",
        Kind::Choice(&["error", "warn"]),
        "error",
        "what the ledger does when an event's id is reused for other content: error reports it, warn counts it and keeps the original",
    ),
    row(
        "ledger.metadata_bytes_max",
        int(2, 64 * 1024 * 1024),
        "16384",
        "the largest metadata that the ledger stores with an entry",
    ),
    row("ledger.sweep", Kind::Bool, "true", "whether a guard sweeps the ledger in the background"),
    row("ledger.sweep_interval_s", int(1, 7 * 86_400), "3600", "how often a guard sweeps the ledger"),
    row(
        "ledger.log_skips",
        Kind::Bool,
        "true",
        "whether the ledger logs skipped deliveries and counts prevented repeats",
    ),
    row(
        "ledger.value",
        Kind::Name,
        "",
        "where an event's value is in its payload, as /amount: the values of prevented repeats are summed",
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
            "whether events are claimed; false: leased and at-most-once work runs unguarded, transactional work refuses to start",
        ),
        &["ENABLE_PROCESSED_EVENT_REGISTRY"],
    ),
    also(
        row(
            "lease.timeout_s",
            int(1, 7 * 86_400),
            "900",
            "how long a guard's lease lasts unless it is extended",
        ),
        &["PROCESSED_EVENT_LEASE_TIMEOUT_SECONDS"],
    ),
    also(
        row(
            "lease.heartbeat_s",
            int(1, 7 * 86_400 - 1),
            "30",
            "how often a guard extends its lease; shorter than lease.timeout_s",
        ),
        &["PROCESSED_EVENT_HEARTBEAT_INTERVAL_SECONDS"],
    ),
    unset(
        "host and process",
        also(
            row(
                "lease.owner",
                Kind::Name,
                "",
                "the name under which leases are held, for people who look at them (blank: host and process)",
            ),
            &["PROCESSED_EVENT_OWNER"],
        ),
    ),
    row(
        "retry.attempts_max",
        int(1, ATTEMPTS_MAX as u64),
        "5",
        "how many runs an event gets before it is a dead letter",
    ),
    row(
        "retry.backoff_base_ms",
        int(1, 86_400_000),
        "1000",
        "the pause after an event's first failure; it doubles with each further one",
    ),
    row(
        "retry.backoff_max_ms",
        int(1, 30 * 86_400_000),
        "300000",
        "the longest pause after an event's failure",
    ),
    Setting {
        secret: true,
        ..row(
            "window.url",
            WINDOWS,
            "",
            "the window, a filter in front of the ledger: memory: or redis://HOST:PORT; unset: none",
        )
    },
    also(
        row("window.ttl_hours", int(1, 720), "24", "how long the window remembers events that are done"),
        &["EVENT_DEDUP_TTL_HOURS"],
    ),
    row(
        "window.epoch",
        Kind::Name,
        "1",
        "the window's epoch: change it after restoring the ledger's files from a copy, and the window starts empty; it detects other resets by itself",
    ),
    row(
        "window.outage",
        Kind::Choice(&["pass_through", "pause"]),
        "pass_through",
        "what a consumer does while the window is away: let everything pass to the ledger (counted), or wait until it is back",
    ),
    Setting {
        flag: Some("--journal"),
        secret: true,
        ..row(
            "journal.url",
            JOURNALS,
            "",
            "the journal: memory:, sqlite:FILE, postgres://…, s3://BUCKET/PREFIX or dir:PATH; unset: sqlite:journal.db in data.dir",
        )
    },
    row("journal.schema", Kind::Identifier, "hapax", "the PostgreSQL schema of the journal"),
    row(
        "journal.migrate",
        Kind::Choice(&["auto", "check"]),
        "auto",
        "what a start does about the journal's schema: auto brings it up to date, check refuses to start if it is not",
    ),
    also(
        row(
            "journal.mismatch",
            Kind::Choice(&["error", "warn"]),
            "error",
            "what the journal does when an event's id is reused for other content: error refuses it, warn keeps and returns the original",
        ),
        &["EVENT_STORE_IDEMPOTENCY_MISMATCH_MODE"],
    ),
    row(
        "journal.event_bytes_max",
        int(1, 256 * 1024 * 1024),
        "983040",
        "the largest event that the journal takes, payload and headers; buses take 1 MiB by default, and the relay needs some of it",
    ),
    also(
        row(
            "journal.allocator",
            Kind::Choice(&["postgres", "s3", "legacy", "off"]),
            "postgres",
            "who numbers the events of a journal in an object store: a table in PostgreSQL, the store itself (s3, legacy; also if no PostgreSQL is named), or the caller (off)",
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
            "the PostgreSQL database that numbers the events of a journal in an object store (unset: ledger.url, if that is PostgreSQL)",
        )
    },
    also(
        row(
            "journal.allocator_schema",
            Kind::Identifier,
            "spice_event_registry",
            "the PostgreSQL schema of the table that numbers the events of a journal in an object store",
        ),
        &["EVENT_STORE_SEQUENCE_SCHEMA"],
    ),
    also(
        row(
            "journal.allocator_prefix",
            Kind::Name,
            "write_side",
            "the prefix of a journal's name in the table that numbers its events",
        ),
        &["EVENT_STORE_SEQUENCE_HANDLER_PREFIX"],
    ),
    Setting {
        secret: true,
        ..row(
            "keys.url",
            KEYS,
            "",
            "the keys of writes, and what the server itself stores: memory:, sqlite:FILE or postgres://…; unset: the journal's database, or sqlite:server.db in data.dir if that has no transactions",
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
                "the database of keys.url with the role that sweeps and lists the keys of all tenants",
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
        "whether a role that bypasses row security may use records, for development",
    ),
    Setting {
        flag: Some("--bus"),
        secret: true,
        ..row(
            "bus.url",
            BUSES,
            "embedded",
            "the bus: embedded (a file in data.dir), embedded:FILE or kafka://HOST:PORT[,HOST:PORT][?property=value]",
        )
    },
    row("telemetry.prefix", Kind::Text, "", "the prefix of the names of spans and metrics"),
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
