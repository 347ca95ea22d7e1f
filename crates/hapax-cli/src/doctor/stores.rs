//! What a server writes to and reads from: journal, keys, records and the read model. Makes nothing.

use std::path::Path;
use std::time::Duration;

use hapax::analytics::{STALE_AFTER, Source, Uuid};
use hapax::backend::sqlite::readable_by_others;
use hapax::config::{Config, Migrate, sqlite_path};
use hapax::open::OpenSettings;
use hapax::words::counted;

use super::{Report, Verdict};
use crate::cli::Global;
use crate::erase;
use crate::erase::places::{is_missing, there};
use crate::failure::Failure;
use crate::open;

/// The flags that select the journal, and with it keys and records.
const OF_JOURNAL: [&str; 2] = ["--data", "--journal"];
/// Keys are swept each night; after this time somebody should know that they are not.
const SWEPT_WITHIN: Duration = Duration::from_hours(72);

/// Looks at all of them.
pub(super) async fn look(report: &mut Report, global: &Global, config: &Config) {
    let flags = global.given(&OF_JOURNAL);
    if is_there(report, "journal", open::journal_path(&config.journal.url), &format!("`hapax{flags} serve`"))
    {
        match journal(config).await {
            Ok(message) => report.say(Verdict::Fine, "journal", message),
            Err(error) => fault(report, "journal", error, &flags),
        }
    }
    if is_there(report, "keys", sqlite_path(&config.keys.url), &format!("`hapax{flags} serve`")) {
        roles(report, config).await;
        match keys(config).await {
            Ok((level, message)) => report.say(level, "keys", message),
            Err(error) => fault(report, "keys", error, &flags),
        }
    }
    erasures(report, config).await;
    records(report, global, config).await;
    read_model(report, global, config).await;
    permissions(report, config);
}

/// Warns of files that everybody on this machine can read. The ledger's own is among its findings.
fn permissions(report: &mut Report, config: &Config) {
    let bus = open::embedded_file(config);
    let mut files = vec![open::journal_path(&config.journal.url), sqlite_path(&config.keys.url)];
    files.extend([config.analytics.url.as_deref().and_then(sqlite_path), bus.as_deref()]);
    let mut files: Vec<&Path> = files.into_iter().flatten().collect();
    files.sort_unstable();
    files.dedup(); // keys are in the journal's file, unless told otherwise
    for finding in files.into_iter().filter_map(readable_by_others) {
        report.add(&finding);
    }
}

/// Whether something that may be a file is there. One that is missing is not a fault: nobody has used it yet.
fn is_there(report: &mut Report, check: &str, file: Option<&Path>, makes: &str) -> bool {
    let Some(file) = file.filter(|file| !file.exists()) else { return true };
    report.say(Verdict::Fine, check, format!("{} does not exist yet; {makes} creates it", file.display()));
    false
}

/// Tells what cannot be kept from what does not answer. Tables that are not there, or of another version, are
/// made or refused by the server.
fn fault(report: &mut Report, check: &str, error: hapax::Error, flags: &str) {
    match error {
        hapax::Error::Refused { .. } => report.refuse(check, error.to_string()),
        hapax::Error::Schema(message) => {
            report.say(
                Verdict::Warning,
                check,
                format!("{message}; `hapax{flags} serve` makes what is missing"),
            );
        }
        error => report.failed(check, &error.into()),
    }
}

/// As it is: nothing is made, and nothing brought up to date.
fn as_it_is(mut settings: OpenSettings) -> OpenSettings {
    settings.migrate = Migrate::Check;
    settings.pool_max = 1;
    settings
}

async fn journal(config: &Config) -> hapax::Result<String> {
    let url = config.journal_url_shown();
    if config.journal.url == "memory:" {
        return Ok(format!("{url}: each process has its own"));
    }
    let journal =
        hapax::open::journal_with(&config.journal.url, &as_it_is(config.journal_settings())).await?;
    journal.probe().await?;
    Ok(format!("{url} takes writes ({})", journal.capabilities().backend))
}

async fn keys(config: &Config) -> hapax::Result<(Verdict, String)> {
    let url = config.keys_url_shown();
    if config.keys.url == "memory:" {
        return Ok((Verdict::Fine, format!("{url}: each process has its own")));
    }
    let keys = hapax::open::keys_with(&config.keys.url, &as_it_is(config.keys_settings())).await?;
    keys.probe().await?;
    let info = keys.info().await?;
    let late = info.swept_at.filter(|at| info.now.since(*at) > SWEPT_WITHIN);
    Ok(match late {
        Some(at) => (
            Verdict::Warning,
            format!(
                "keys were last swept at {at}; `hapax serve` does it each night, `hapax keys sweep` at once"
            ),
        ),
        None => (Verdict::Fine, format!("{url} takes writes ({})", keys.capabilities().backend)),
    })
}

/// Whether the roles of the server are bound by row security, and the keys are protected by it.
#[cfg(feature = "postgres")]
async fn roles(report: &mut Report, config: &Config) {
    use hapax::backend::postgres::{check_keys, refuse_bypass};
    let settings = config.keys_settings();
    let is_postgres = |url: &str| url.starts_with("postgres:") || url.starts_with("postgresql:");
    let named = [
        Some(("keys.url", &config.keys.url)),
        config.keys.maintenance_url.as_ref().map(|url| ("keys.maintenance_url", url)),
    ];
    let mut is_bound = true;
    for (name, url) in named.into_iter().flatten().filter(|(_, url)| is_postgres(url)) {
        match refuse_bypass(name, url, settings.acquire_timeout, false).await {
            Ok(()) => {
                report.say(Verdict::Fine, "roles", format!("the role of {name} is bound by row security"));
            }
            Err(error @ hapax::Error::Refused { .. }) if config.records.accept_bypass => {
                report.say(Verdict::Warning, "roles", format!("{error} (records.accept_bypass is set)"));
                is_bound &= name != "keys.url";
            }
            Err(error) => {
                fault(report, "roles", error, "");
                is_bound &= name != "keys.url";
            }
        }
    }
    // Nothing is looked at for a role that the protection does not bind.
    if !is_postgres(&config.keys.url) || !is_bound {
        return;
    }
    let protected = async {
        let pools = hapax::open::Pools::default();
        let pool = pools.postgres("keys.url", &config.keys.url, 1, settings.acquire_timeout).await?;
        check_keys(&pool, &settings.schema, true).await
    };
    match protected.await {
        Ok(()) => {
            report.say(Verdict::Fine, "row security", "the table of keys is protected as it was made".into());
        }
        Err(error) => fault(report, "row security", error, ""),
    }
}

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn roles(_: &mut Report, _: &Config) {}

/// Whether each module is protected as it was made.
async fn records(report: &mut Report, global: &Global, config: &Config) {
    let flags = global.given(&OF_JOURNAL);
    if let Err(error) = config.records_in_one_database() {
        return report.say(Verdict::Fine, "records", format!("this server has no records: {error}"));
    }
    if sqlite_path(&config.journal.url).is_some_and(|file| !file.exists()) {
        let message = format!("there is no module yet; `hapax{flags} modules create SLUG` makes one");
        return report.say(Verdict::Fine, "records", message);
    }
    let settings = as_it_is(config.journal_settings());
    let found = match hapax::open::modules_with(&config.journal.url, &settings, &config.records.roles).await {
        Ok(modules) => modules.modules().await,
        // Nobody has made a module there.
        Err(hapax::Error::Schema(message)) => return report.say(Verdict::Fine, "records", message),
        Err(error) => Err(error),
    };
    match found {
        Ok(found) if found.is_empty() => {
            let message = format!("there is no module yet; `hapax{flags} modules create SLUG` makes one");
            report.say(Verdict::Fine, "records", message);
        }
        Ok(found) => {
            for module in found {
                let slug = &module.slug;
                if module.problems.is_empty() {
                    report.say(
                        Verdict::Fine,
                        "records",
                        format!("module {slug} is protected as it was made"),
                    );
                } else {
                    report.refuse(
                        "records",
                        format!(
                            "module {slug} is not served: {}; let its owner put back what `modules create` made \
                             (docs/records.md, Protection)",
                            module.problems.join("; ")
                        ),
                    );
                }
            }
        }
        Err(error) => report.failed("records", &error.into()),
    }
}

/// Warns of erasures that wait for another run of their command: nothing else does it. A store of keys that does not
/// answer has a finding of its own.
async fn erasures(report: &mut Report, config: &Config) {
    if is_missing(&config.keys.url) {
        return;
    }
    let opened = hapax::open::access_with(&config.keys.url, &as_it_is(config.keys_settings())).await;
    let Ok(Some(access)) = there(opened) else { return };
    let Ok(waiting) = erase::trail::waiting(&*access).await else { return };
    let Some((first, at)) = waiting.first() else { return };
    let more = match waiting.len() - 1 {
        0 => String::new(),
        more => format!(", and {more} more (`hapax audit ls` has the rows erase.pass)"),
    };
    let message = format!(
        "{} not gone yet: {first}, last run at {at}{more}. Run the same `hapax erase` again once the topics' retention \
         has passed; nothing does that by itself",
        if waiting.len() == 1 { "what was erased is" } else { "some of what was erased is" }
    );
    report.say(Verdict::Warning, "erasure", message);
}

async fn read_model(report: &mut Report, global: &Global, config: &Config) {
    let flags = global.given(&["--data"]);
    let Some(url) = &config.analytics.url else {
        let message = "not configured: analytics.url is unset, and the journal or the bus is not embedded";
        return report.say(Verdict::Fine, "read model", message.into());
    };
    if !is_there(report, "read model", sqlite_path(url), &format!("`hapax{flags} serve`")) {
        return;
    }
    match synced(global, config).await {
        Ok((level, message)) => report.say(level, "read model", message),
        Err(failure) => report.failed("read model", &failure),
    }
}

/// How far the read model is, and what holds it back.
async fn synced(global: &Global, config: &Config) -> Result<(Verdict, String), Failure> {
    let model = open::existing_read_model(global, config)?;
    let wanted = config.analytics.generation;
    if let Some(found) = model.generation().await?.filter(|found| *found != wanted) {
        let message = format!(
            "it has rows of generation {found}, and analytics.generation is {wanted}, so nothing feeds it; `hapax analytics \
             rebuild` builds it again"
        );
        return Ok((Verdict::Warning, message));
    }
    let rejected = model.rejected(1000).await?;
    if !rejected.is_empty() {
        let mut message = format!(
            "{} could not be read, so its answers are not complete; `hapax query status` lists what to do",
            counted(rejected.len() as u64, "change", "changes")
        );
        // What is missing for everybody has no content, and its reason names the rebuild.
        if let Some(missing) = hapax::analytics::missing(&*model, None).await? {
            message.extend([". ", &missing.reason]);
        }
        return Ok((Verdict::Warning, message));
    }
    let status = match config.analytics.source {
        Source::Debezium => "`hapax cdc status` says whether Debezium is behind",
        _ => "`hapax relay status` says whether the relay is behind",
    };
    let (now, at) = tokio::try_join!(model.now(), model.last_sync_at(Uuid::nil()))?;
    if let Some(unfinished) = model.unfinished().await? {
        return Ok((Verdict::Warning, unfinished));
    }
    Ok(match at {
        None => (
            Verdict::Warning,
            format!("nothing is known of how far it is; a running `hapax serve` feeds it, and {status}"),
        ),
        Some(at) if now.since(at) > STALE_AFTER => {
            let behind = now.since(at).as_secs();
            let message = format!(
                "it is complete up to {at}, {behind} s ago; a running `hapax serve` feeds it, and {status}"
            );
            (Verdict::Warning, message)
        }
        Some(at) => (Verdict::Fine, format!("it is complete up to {at}")),
    })
}
