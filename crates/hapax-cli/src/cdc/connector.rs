//! The configuration of the connector.

use std::collections::BTreeMap;

use hapax::backend::postgres::cdc::{Endpoint, PUBLICATION};
use hapax::config::Config;

/// The properties of the connector: each is a text.
pub type Properties = BTreeMap<String, String>;

/// The class of the connector.
pub const CLASS: &str = "io.debezium.connector.postgresql.PostgresConnector";
/// The property that says which topic it publishes to.
pub const TOPIC: &str = "transforms.route.replacement";
const JSON: &str = "org.apache.kafka.connect.json.JsonConverter";
/// The largest record as Debezium writes it: the row before and after, its JSON escaped.
const REQUEST_BYTES_MAX: u32 = 16 << 20;

/// The connector's configuration. `failover`: the server can keep slots on standbys.
pub fn properties(config: &Config, at: &Endpoint, failover: bool, with: &[(String, String)]) -> Properties {
    let (cdc, schema) = (&config.cdc, &config.journal.schema);
    let prefix = &cdc.connector;
    let mut all = Properties::new();
    let mut set = |key: &str, value: &str| drop(all.insert(key.to_owned(), value.to_owned()));
    set("connector.class", CLASS);
    set("tasks.max", "1");
    set("plugin.name", "pgoutput");
    set("database.hostname", &at.host);
    set("database.port", &at.port.to_string());
    set("database.user", &at.user);
    set("database.dbname", &at.database);
    set("database.sslmode", at.ssl_mode);
    if !cdc.password.is_empty() {
        set("database.password", &cdc.password);
    }
    // Row security would hide the records of all tenants from a snapshot, without a word.
    set("database.initial.statements", "SET hapax.maintenance = 'on'");
    set("topic.prefix", prefix);
    // Modules and pulses, whatever else is published: keys, answers and tokens never leave.
    set("table.include.list", &format!(r"{schema}\.record_pulse,module_[a-z0-9_]+\.records"));
    set("publication.name", PUBLICATION);
    set("publication.autocreate.mode", "disabled");
    set("slot.name", &cdc.slot);
    // Kept on standbys, so that a failover does not lose it.
    set("slot.failover", if failover { "true" } else { "false" });
    // A slot that was made anew fails, instead of leaving a gap that nobody sees.
    set("offset.mismatch.strategy", "trust_offset");
    set("snapshot.mode", "initial");
    // A truncate must arrive: it stops the read model.
    set("skipped.operations", "none");
    set("tombstones.on.delete", "false");
    set("unavailable.value.placeholder", "__debezium_unavailable_value");
    set("poll.interval.ms", "50");
    // The key decides the partition. Its bytes must stay the same, whatever the worker's defaults are.
    for side in ["key", "value"] {
        set(&format!("{side}.converter"), JSON);
        set(&format!("{side}.converter.schemas.enable"), "false");
    }
    set("transforms", "route");
    set("transforms.route.type", "org.apache.kafka.connect.transforms.RegexRouter");
    set("transforms.route.regex", &format!(r"{}\..*", prefix.replace('.', r"\.")));
    set(TOPIC, cdc.topic.as_str());
    set("producer.override.max.request.size", &REQUEST_BYTES_MAX.to_string());
    // The row before and after are mostly the same text.
    set("producer.override.compression.type", "zstd");
    for (key, value) in with {
        set(key, value);
    }
    all
}

/// What the name of a property with a secret contains.
const SECRETS: [&str; 8] = [
    "password",
    "secret",
    "token",
    "jaas",
    "user.info",
    "keystore.key",
    "truststore.certificates",
    "credential",
];

/// Whether a value names a secret instead of being one.
pub fn is_reference(value: &str) -> bool {
    value.starts_with("${") && value.ends_with('}')
}

/// The same for people: a secret that is not a reference is not shown.
pub fn shown(properties: &Properties) -> Properties {
    let mut shown = properties.clone();
    for (key, value) in &mut shown {
        let key = key.to_ascii_lowercase();
        if SECRETS.iter().any(|secret| key.contains(secret)) && !is_reference(value) {
            "***".clone_into(value);
        }
    }
    shown
}
