//! `hapax keys`: the keys of writes, their answers, and those whose outcome is unknown.

mod act;
pub mod look;

use std::sync::Arc;

use clap::{Args, Subcommand};
use hapax::config::{Config, Migrate, hide_password, sqlite_path};
use hapax::keyed::{IdempotencyKey, Keys};
use hapax::{Tenant, open};
use serde_json::json;

use crate::cli::{Global, quoted};
use crate::failure::Failure;
use crate::print;

#[derive(Debug, Args)]
pub struct KeysArgs {
    /// Which store of keys: sqlite:FILE or postgres://… (keys.url)
    #[arg(long, global = true, value_name = "URL")]
    keys: Option<String>,
    #[command(subcommand)]
    command: KeysCommand,
}

#[derive(Debug, Subcommand)]
enum KeysCommand {
    /// Create the tables of the keys, or bring them up to date
    #[command(after_help = "Example: hapax keys init --keys postgres://localhost/app")]
    Init,
    /// List keys
    #[command(after_help = "Example: hapax keys ls --tenant acme --open")]
    Ls(look::ListArgs),
    /// Show one key: its state, and its answer without the body
    #[command(after_help = "Example: hapax keys show --tenant acme --body order-17")]
    Show(look::ShowArgs),
    /// Remove keys whose answers are older than the retention
    #[command(after_help = "Example: hapax keys sweep --dry-run")]
    Sweep(act::SweepArgs),
    /// Decide about a key whose outcome is unknown: run it again, or give its answer
    #[command(
        after_help = "Example: hapax keys resolve --rerun --reason 'the bank has no such payment' order-17\n         \
                      hapax keys resolve --answer 201 --body '{\"id\": 17}' --reason 'found in the bank' order-17"
    )]
    Resolve(act::ResolveArgs),
}

/// A key and whose it is.
#[derive(Debug, Args)]
struct NameArgs {
    /// The tenant that the key belongs to
    #[arg(long)]
    tenant: Option<Tenant>,
    /// The key, as the client sent it, without quotation marks
    #[arg(value_parser = key)]
    key: IdempotencyKey,
}

impl NameArgs {
    /// The key in words.
    fn shown(&self) -> String {
        match &self.tenant {
            Some(tenant) => format!("{} of {tenant}", self.key),
            None => self.key.to_string(),
        }
    }
}

fn key(text: &str) -> Result<IdempotencyKey, String> {
    IdempotencyKey::new(text).map_err(|error| error.to_string())
}

pub async fn run(global: &Global, args: KeysArgs) -> Result<u8, Failure> {
    let mut config = global.load_with(&[("keys.url", "--keys", args.keys.clone())])?;
    let of_all = args.keys.is_none() && !matches!(args.command, KeysCommand::Init);
    if let Some(url) = config.keys.maintenance_url.take().filter(|_| of_all) {
        config.keys.url = url; // another role of the same database
    }
    let of = args.keys.as_deref().map(|url| format!(" --keys {}", quoted(&hide_password(url))));
    let (flags, of) = (global.given(&["--data", "--journal"]), of.unwrap_or_default());
    let makes = format!("`hapax{flags} keys{of} init` makes one");
    match &args.command {
        KeysCommand::Init => init(global, &config).await,
        KeysCommand::Ls(of) => look::list(global, &*existing(&config, &makes).await?, of).await,
        KeysCommand::Show(of) => look::show(global, &*existing(&config, &makes).await?, of).await,
        KeysCommand::Sweep(of) => act::sweep(global, &config, existing(&config, &makes).await?, of).await,
        KeysCommand::Resolve(of) => {
            act::resolve(global, &config, &*existing(&config, &makes).await?, of).await
        }
    }
}

async fn init(global: &Global, config: &Config) -> Result<u8, Failure> {
    not_in_memory(config)?;
    crate::open::make_room(config, sqlite_path(&config.keys.url), "store of keys")?;
    let mut settings = config.keys_settings();
    settings.migrate = Migrate::Auto;
    let keys = open::keys_with(&config.keys.url, &settings).await?;
    let url = config.keys_url_shown();
    if global.json {
        print::json(&json!({"keys": url, "backend": keys.capabilities().backend, "ready": true}))?;
    } else {
        print::line(&format!("{} is ready for keys", print::escaped(&url)))?;
    }
    Ok(0)
}

/// Opens the store. A missing one is a mistake in the name, so it is not created; `makes` says what
/// would.
async fn existing(config: &Config, makes: &str) -> Result<Arc<dyn Keys>, Failure> {
    not_in_memory(config)?;
    if let Some(path) = sqlite_path(&config.keys.url)
        && !path.exists()
    {
        let message = format!("there is no store of keys at {}; {makes}", path.display());
        return Err(Failure::dependency("unavailable", message));
    }
    let mut settings = config.keys_settings();
    settings.refuse = false; // looking is always allowed
    settings.migrate = Migrate::Check;
    match open::keys_with(&config.keys.url, &settings).await {
        Err(error @ hapax::Error::Schema(_)) => {
            let failure = Failure::from(error).with_flags("");
            Err(Failure::dependency("schema", format!("{}; {makes}", failure.message())))
        }
        other => Ok(other?),
    }
}

fn not_in_memory(config: &Config) -> Result<(), Failure> {
    if config.keys.url == "memory:" {
        return Err(Failure::config(
            "keys in memory are another process's own; name a store: --keys sqlite:FILE or --keys postgres://…",
        ));
    }
    Ok(())
}
