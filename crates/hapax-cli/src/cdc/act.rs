//! `hapax cdc config`, `apply` and `remove`.

use std::time::Duration;

use hapax::backend::postgres::PgCdc;
use hapax::backend::postgres::cdc::Endpoint;
use hapax::bus::{Bus, Partition};
use hapax::config::Config;
use hapax::ledger::Level;
use hapax::{Error, Topic};
use reqwest::Url;
use serde_json::json;
use tokio::time::Instant;

use super::connect::{self, Connect, PAUSE};
use super::connector::{self, Properties};
use super::streams::{self, Watch};
use super::{ApplyArgs, RemoveArgs};
use crate::cli::Global;
use crate::failure::{self, Failure};
use crate::{open, print, who};

/// How long a slot is waited for that its reader has just left.
const LEAVES: Duration = Duration::from_secs(60);

pub(super) async fn database(config: &Config) -> Result<PgCdc, Failure> {
    let (url, timeout) = (&config.journal.url, config.journal_settings().acquire_timeout);
    Ok(PgCdc::connect(url, &config.journal.schema, timeout).await?)
}

/// The same with Debezium's role, which may replicate: only such a role removes a slot. Where its password
/// is known to Connect alone, the journal's role may do.
async fn database_of_debezium(config: &Config) -> Result<PgCdc, Failure> {
    let ((name, url), timeout) = (config.cdc_database_url(), config.journal_settings().acquire_timeout);
    let mut url =
        Url::parse(url).map_err(|error| Failure::config(format!("{name} is not a URL: {error}")))?;
    let password = &config.cdc.password;
    if url.password().is_none() && !password.is_empty() {
        if connector::is_reference(password) {
            return database(config).await;
        }
        let _ = url.set_password(Some(password)); // it has a host, so it takes one
    }
    let connected = PgCdc::connect(url.as_str(), &config.journal.schema, timeout).await;
    connected.map_err(|error| Failure::from(error).about(name))
}

pub(super) fn endpoint(config: &Config) -> Result<Endpoint, Failure> {
    let (name, url) = config.cdc_database_url();
    Ok(Endpoint::of(name, url)?)
}

pub(super) fn connect(config: &Config) -> Result<Connect, Failure> {
    let (Some(url), Some(shown)) = (&config.cdc.connect_url, config.cdc_connect_url_shown()) else {
        return Err(Failure::config(
            "there is no Kafka Connect: name its REST API with --connect http://HOST:PORT",
        ));
    };
    Connect::new(url, &shown, &config.cdc.connector)
}

async fn properties(config: &Config, cdc: &PgCdc, with: &[(String, String)]) -> Result<Properties, Failure> {
    Ok(connector::properties(config, &endpoint(config)?, cdc.has_failover_slots().await?, with))
}

pub async fn config(config: &Config, with: &[(String, String)]) -> Result<u8, Failure> {
    let properties = connector::shown(&properties(config, &database(config).await?, with).await?);
    let whole = json!({"name": config.cdc.connector, "config": properties});
    let text = serde_json::to_string_pretty(&whole);
    print::line(&text.map_err(|error| Failure::from(Error::Corrupt(error.to_string())))?)?;
    Ok(0)
}

pub async fn apply(global: &Global, config: &Config, args: &ApplyArgs) -> Result<u8, Failure> {
    let connect = connect(config)?;
    let (cdc, topic) = (database(config).await?, &config.cdc.topic);
    let properties = properties(config, &cdc, &args.config.with).await?;
    if connect.debezium().await?.is_none() {
        let message = format!(
            "this Kafka Connect has no Debezium for PostgreSQL ({}): add it to plugin.path",
            connector::CLASS
        );
        return Err(Failure::dependency("unavailable", message));
    }
    // Nothing is made that could not work.
    let findings = cdc.check(&config.cdc.slot, &endpoint(config)?.user).await?;
    let refusals: Vec<_> = findings
        .into_iter()
        .filter(|finding| finding.level == Level::Refusal)
        .map(|finding| finding.message)
        .collect();
    if !refusals.is_empty() {
        return Err(Failure::new(failure::BROKEN_PROMISE, "refused", refusals.join("; ")));
    }
    let details = format!("slot {}, topic {topic}", config.cdc.slot);
    who::acts(config, &args.by, "cdc.apply", &config.cdc.connector, &details).await?;
    let bus = open::bus_with(config, topic, args.create).await?;
    let info = bus.topic(topic).await?.ok_or_else(|| Error::NotFound(format!("topic {topic}")))?;
    if info.compacted {
        let message = format!(
            "the topic {topic} is compacted, which removes all but the last change of a record: use another"
        );
        return Err(Failure::config(message));
    }
    let before = connect.config().await?;
    let done = match &before {
        None => "made",
        Some(before) if *before == properties => "same",
        Some(_) => "changed",
    };
    if done != "same" && cdc.slot(&config.cdc.slot).await?.is_some() {
        begins(&*bus, topic, info.partitions, config, before.as_ref()).await?;
    }
    cdc.prepare(&config.records.roles).await?;
    // A snapshot must have the pulses: what is streamed follows them.
    cdc.pulse(cdc.now().await?, info.partitions, Duration::ZERO).await?;
    let prefix = properties.get("topic.prefix").map_or("", String::as_str);
    let watch = Watch::new(&*bus, topic, info.partitions, prefix).await?;
    let state = connect.state().await?;
    let failure = state.as_ref().and_then(connect::State::failure);
    if done != "same" {
        connect.put(&properties).await?;
    }
    if state.is_some_and(|state| state.is_stopped()) {
        connect.resume().await?;
    }
    if failure.is_some() {
        connect.restart_failed().await?;
    }
    watch.wait(&cdc, &connect, failure, args.wait).await?;
    if global.json {
        let report = json!({"connector": config.cdc.connector, "done": done, "topic": topic.as_str(), "partitions": info.partitions});
        print::json(&report)?;
    } else {
        let done = if done == "same" { "as it was" } else { done };
        let (name, partitions) = (&config.cdc.connector, info.partitions);
        print::line(&format!(
            "connector {name} is {done}, and streams to the {partitions} partitions of {topic}"
        ))?;
    }
    Ok(0)
}

/// Refuses a topic that the connector did not begin with. A slot that is there goes on from where it is, so
/// such a topic would have no snapshot and lack everything before.
async fn begins(
    bus: &dyn Bus,
    topic: &Topic,
    partitions: i32,
    config: &Config,
    before: Option<&Properties>,
) -> Result<(), Failure> {
    let other =
        before.and_then(|before| before.get(connector::TOPIC)).filter(|other| *other != topic.as_str());
    let mut is_empty = true;
    for number in 0..partitions {
        let partition = Partition { topic: topic.clone(), number };
        is_empty &= streams::end_of(bus, &partition).await? == 0;
    }
    if other.is_none() && !is_empty {
        return Ok(());
    }
    let slot = &config.cdc.slot;
    let message = match other {
        Some(other) => format!("the connector publishes to {other} now"),
        None => format!("the topic {topic} is empty"),
    };
    Err(Failure::config(format!(
        "{message}, and the replication slot {slot} goes on from where it is: {topic} would lack everything before. Run `hapax cdc \
         remove --slot` first; then the connector begins with a snapshot"
    )))
}

pub async fn remove(global: &Global, config: &Config, args: &RemoveArgs) -> Result<u8, Failure> {
    let (connect, name) = (connect(config)?, &config.cdc.slot);
    let cdc = if args.slot { Some(database_of_debezium(config).await?) } else { None };
    let details = if args.slot { format!("with slot {name}") } else { String::new() };
    who::acts(config, &args.by, "cdc.remove", &config.cdc.connector, &details).await?;
    if let Some(cdc) = &cdc {
        connect.forget_offsets(&properties(config, cdc, &[]).await?).await?;
    }
    let connector = connect.remove().await?;
    let mut dropped = None;
    if let Some(cdc) = &cdc {
        let end = Instant::now() + LEAVES;
        // Its reader leaves some moments after the connector.
        while cdc.slot(name).await?.is_some_and(|slot| slot.active) && Instant::now() < end {
            tokio::time::sleep(PAUSE).await;
        }
        dropped = Some(cdc.drop_slot(name).await?);
    }
    if global.json {
        print::json(&json!({"connector": connector, "slot": dropped}))?;
        return Ok(0);
    }
    let word = |there| if there { "is removed" } else { "was not there" };
    print::line(&format!("connector {} {}", config.cdc.connector, word(connector)))?;
    match dropped {
        Some(there) => print::line(&format!("replication slot {name} {}", word(there)))?,
        None => print::line(&format!(
            "replication slot {name} stays, and keeps the log: `hapax cdc apply` goes on, `hapax cdc remove --slot` removes it"
        ))?,
    }
    Ok(0)
}
