//! `hapax keys sweep` and `hapax keys resolve`.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::Args;
use hapax::access::{Actor, AuditNote};
use hapax::config::Config;
use hapax::keyed::{Answer, Decided, KeyEntry, KeyLease, KeyState, KeySweep, Keys, Resolution};
use hapax::words::counted;
use serde_json::json;

use super::NameArgs;
use super::look::entry_json;
use crate::cli::{Global, between};
use crate::failure::Failure;
use crate::print;

#[derive(Debug, Args)]
pub struct SweepArgs {
    /// How long to keep answers after they were stored, at least 1d [default: keys.retention_days]
    #[arg(long, value_name = "TIME", value_parser = retention)]
    retention: Option<Duration>,
    /// Say what would be removed, change nothing
    #[arg(long)]
    dry_run: bool,
}

/// A retention that a sweep takes.
fn retention(text: &str) -> Result<Duration, String> {
    let retention = crate::cli::duration(text)?;
    if retention < Duration::from_hours(24) {
        return Err("keys are kept for at least 1d".to_owned());
    }
    Ok(retention)
}

pub async fn sweep(
    global: &Global,
    config: &Config,
    keys: Arc<dyn Keys>,
    args: &SweepArgs,
) -> Result<u8, Failure> {
    if !args.dry_run {
        let actor = Actor::new(crate::who::runs(None)?, "hapax keys sweep");
        let kept = args.retention.unwrap_or(config.keys.retention);
        crate::who::note(
            config,
            &AuditNote::new(&actor, "keys.sweep", format!("kept for {} s", kept.as_secs())),
        )
        .await?;
    }
    let progress = Arc::new(AtomicU64::new(0));
    let mut settings = KeySweep::new(args.retention.unwrap_or(config.keys.retention));
    settings.dry_run = args.dry_run;
    settings.progress = Some(Arc::clone(&progress));
    let shown = std::io::stderr().is_terminal() && !global.json;
    let sweep = async { keys.sweep(&settings).await };
    let swept = tokio::select! {
        swept = sweep => swept,
        never = watch(&progress, shown) => match never {},
    };
    if shown {
        eprint!("\r\x1b[K");
    }
    let swept = swept?;
    let horizon = keys.info().await?.horizon.map(|at| at.to_string());
    if global.json {
        print::json(&json!({
            "dry_run": args.dry_run, "keys": swept.keys, "skipped": swept.skipped, "horizon": horizon,
            "paused_until": swept.paused_until.map(|until| until.to_string()),
        }))?;
        return Ok(0);
    }
    if swept.skipped {
        print::line("another sweep is under way; nothing was done here")?;
        return Ok(0);
    }
    let verb = if args.dry_run { "would forget" } else { "forgot" };
    print::line(&format!("{verb} {}", counted(swept.keys, "key", "keys")))?;
    if let Some(until) = swept.paused_until {
        print::line(&format!(
            "the store's clock advanced by more than half the retention since the last sweep; in case it jumped, nothing is \
             deleted before {until}"
        ))?;
    }
    Ok(0)
}

/// Shows how far a sweep is, for as long as it takes.
async fn watch(progress: &AtomicU64, shown: bool) -> std::convert::Infallible {
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        if shown {
            eprint!("\r{}", counted(progress.load(Ordering::Relaxed), "key", "keys"));
        }
    }
}

#[derive(Debug, Args)]
pub struct ResolveArgs {
    /// The write did not happen: the next request with the key runs it
    #[arg(long, conflicts_with = "answer")]
    rerun: bool,
    /// The write happened, and its answer has this status
    #[arg(long, value_name = "STATUS", value_parser = between::<u16>(200, 599))]
    answer: Option<u16>,
    /// The body of the write's answer
    #[arg(long, requires = "answer", default_value = "")]
    body: String,
    /// The Content-Type of the write's answer
    #[arg(long, requires = "answer", value_name = "TYPE", default_value = "application/json")]
    content_type: String,
    /// The reason; it is stored with the key
    #[arg(long, alias = "why", value_name = "R")]
    reason: String,
    /// The person; stored with the key [default: $USER, else the uid]
    #[arg(long, value_name = "NAME")]
    by: Option<String>,
    /// Say what would happen, change nothing
    #[arg(long)]
    dry_run: bool,
    /// Do not ask for confirmation
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    name: NameArgs,
}

pub async fn resolve(
    global: &Global,
    config: &Config,
    keys: &dyn Keys,
    args: &ResolveArgs,
) -> Result<u8, Failure> {
    let name = args.name.shown();
    if args.reason.trim().is_empty() {
        return Err(Failure::config("--reason is blank; what is decided needs a reason"));
    }
    let how = resolution(args)?;
    let entry = keys.entry(args.name.tenant.as_ref(), &args.name.key).await?;
    let entry = entry.ok_or_else(|| {
        let message = format!("there is no key {name} (a key belongs to a tenant: --tenant)");
        hapax::Error::NotFound(message)
    })?;
    if entry.state != KeyState::OutcomeUnknown {
        let message = format!("{name} is {}, not outcome-unknown; there is nothing to decide", entry.state);
        return Err(Failure::input(message));
    }
    let plan = match &how {
        Resolution::Rerun => "runs again with the next request".to_owned(),
        Resolution::Answer(answer) => format!("is answered with {} from now on", answer.status),
    };
    if args.dry_run {
        report(global, &entry, &format!("{name} would be decided: it {plan}"), true)?;
        return Ok(0);
    }
    let who = Decided::new(crate::who::runs(args.by.as_deref())?, args.reason.clone());
    if !args.yes {
        print::can_ask("this decides about a request")?;
        let question = format!("{} began at {}. It {plan}?", print::escaped(&name), entry.begun_at);
        if !print::asked(&question)? {
            return Err(Failure::declined("nothing was changed"));
        }
    }
    let actor = Actor::new(crate::who::runs(args.by.as_deref())?, &args.reason);
    crate::who::note(config, &AuditNote::new(&actor, "keys.resolve", &name).details(&plan)).await?;
    // Under the token that was looked at: if the key changed meanwhile, nothing is decided.
    let lease = KeyLease { tenant: entry.tenant.clone(), key: entry.key.clone(), token: entry.token };
    keys.resolve(&lease, &how, &who).await?;
    let after = keys.entry(args.name.tenant.as_ref(), &args.name.key).await?.unwrap_or(entry);
    report(global, &after, &format!("{name} {plan}"), false)?;
    Ok(0)
}

fn resolution(args: &ResolveArgs) -> Result<Resolution, Failure> {
    let Some(status) = args.answer else {
        if !args.rerun {
            return Err(Failure::config("give --rerun or --answer STATUS: did it happen?"));
        }
        return Ok(Resolution::Rerun);
    };
    let answer = Answer::new(status, args.body.clone());
    if args.body.is_empty() {
        return Ok(Resolution::Answer(answer));
    }
    if !args.content_type.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) {
        return Err(Failure::config("--content-type has a character that no header may have"));
    }
    Ok(Resolution::Answer(answer.header("content-type", args.content_type.clone())))
}

fn report(global: &Global, entry: &KeyEntry, message: &str, dry_run: bool) -> Result<(), Failure> {
    if global.json {
        let mut value = entry_json(entry);
        value["dry_run"] = json!(dry_run);
        return print::json(&value);
    }
    print::line(&print::escaped(message))
}
