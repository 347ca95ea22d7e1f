//! `hapax ledger`: inspects and maintains a ledger.

pub mod act;
mod import;
pub mod look;

use std::sync::Arc;

use clap::{Args, Subcommand};
use hapax::Ledger;
use hapax::config::{Config, Migrate, sqlite_path};
use hapax::ledger::Intervention;
use hapax::open;
use serde_json::json;

use crate::cli::Global;
use crate::failure::Failure;
use crate::print;

#[derive(Debug, Args)]
pub struct LedgerArgs {
    #[command(subcommand)]
    command: LedgerCommand,
}

#[derive(Debug, Subcommand)]
enum LedgerCommand {
    /// Create the ledger, or bring its schema up to date
    #[command(after_help = "Example: hapax ledger init --ledger sqlite:ledger.db")]
    Init,
    /// Print the SQL that creates the schema, for a DBA to review and run
    #[command(after_help = "Example: hapax ledger schema --ledger postgres://localhost/app > schema.sql")]
    Schema,
    /// Print the SQL that grants a role what a service needs
    #[command(
        after_help = "Example: hapax ledger grants --ledger postgres://localhost/app --app-role app | psql -U owner app"
    )]
    Grants {
        /// The PostgreSQL role of the service
        #[arg(long, value_name = "ROLE")]
        app_role: String,
    },
    /// Check what the promises depend on; exit 1 if one cannot be kept
    #[command(after_help = "Example: hapax ledger check --ledger sqlite:ledger.db")]
    Check,
    /// Count entries by scope and state
    #[command(after_help = "Example: hapax ledger stat --json")]
    Stat,
    /// List entries
    #[command(after_help = "Example: hapax ledger ls --state dead --scope billing --since 24h")]
    Ls(look::ListArgs),
    /// Show one entry
    #[command(after_help = "Example: hapax ledger show --scope billing order-17-paid")]
    Show(look::ShowArgs),
    /// List the latest interventions: who did what to which entry, and why
    #[command(after_help = "Example: hapax ledger audit --limit 20")]
    Audit(look::AuditArgs),
    /// Remove entries that are older than the retention
    #[command(after_help = "Example: hapax ledger sweep --retention 7d --dry-run")]
    Sweep(act::SweepArgs),
    /// Run events again now: dead ones with attempts reset, and those that are lost, parked or
    /// waiting for a retry
    #[command(
        after_help = "Example: hapax ledger retry --scope billing --reason 'fixed in 1.4.2' order-17-paid"
    )]
    Retry(act::ActArgs),
    /// Take leases away from their holders
    #[command(
        after_help = "Example: hapax ledger release --scope billing --reason 'pod is gone' order-17-paid"
    )]
    Release(act::ActArgs),
    /// Mark events that have not run yet as dead
    #[command(after_help = "Example: hapax ledger kill --scope billing --reason 'test data' order-17-paid")]
    Kill(act::ActArgs),
    /// Remove entries: the next delivery counts as the first, or is stale if its aggregate has
    /// moved past it
    #[command(
        after_help = "Example: hapax ledger forget --scope billing --reason 'replay wanted' order-17-paid"
    )]
    Forget(act::ActArgs),
    /// Record what another table says was processed, so that nothing of it runs again
    #[command(
        override_usage = "hapax ledger import --from <TABLE> --scope <SCOPE>\n       [OPTIONS]",
        after_help = "Example: hapax ledger import --from processed_events --scope billing --dry-run\n\nIt may be killed and run again, and the old service may go on meanwhile; docs/migrate.md has the steps."
    )]
    Import(Box<import::ImportArgs>),
}

pub async fn run(global: &Global, args: LedgerArgs) -> Result<u8, Failure> {
    let config = global.load()?;
    match args.command {
        LedgerCommand::Init => init(global, &config).await,
        LedgerCommand::Schema => {
            let sql = open::ledger_schema(&config.ledger.url, &config.ledger.schema)?;
            print::text(global, "sql", sql.trim_end())?;
            Ok(0)
        }
        LedgerCommand::Grants { app_role } => {
            let sql = open::ledger_grants(&config.ledger.url, &config.ledger.schema, &app_role)?;
            print::text(global, "sql", sql.trim_end())?;
            Ok(0)
        }
        LedgerCommand::Check => look::check(global, &*open(global, &config).await?).await,
        LedgerCommand::Stat => look::stat(global, &*open(global, &config).await?).await,
        LedgerCommand::Ls(args) => look::list(global, &*open(global, &config).await?, &args).await,
        LedgerCommand::Show(args) => look::show(global, &*open(global, &config).await?, &args).await,
        LedgerCommand::Audit(args) => look::audit(global, &*open(global, &config).await?, &args).await,
        LedgerCommand::Sweep(args) => act::sweep(global, &config, open(global, &config).await?, &args).await,
        LedgerCommand::Retry(args) => {
            act::act(global, &*open(global, &config).await?, Intervention::Retry, &args).await
        }
        LedgerCommand::Release(args) => {
            act::act(global, &*open(global, &config).await?, Intervention::Release, &args).await
        }
        LedgerCommand::Kill(args) => {
            act::act(global, &*open(global, &config).await?, Intervention::Kill, &args).await
        }
        LedgerCommand::Forget(args) => {
            act::act(global, &*open(global, &config).await?, Intervention::Forget, &args).await
        }
        LedgerCommand::Import(args) => {
            import::import(global, &config, open(global, &config).await?, &args).await
        }
    }
}

async fn init(global: &Global, config: &Config) -> Result<u8, Failure> {
    crate::open::make_room(config, sqlite_path(&config.ledger.url), "ledger")?;
    let ledger = open::init_ledger(&config.ledger.url, &config.open_settings()).await?;
    let url = config.ledger_url_shown();
    if global.json {
        print::json(&json!({"ledger": url, "backend": ledger.capabilities().backend, "ready": true}))?;
    } else {
        print::line(&format!("{url} is ready"))?;
    }
    Ok(0)
}

/// Opens the ledger. A missing one is a mistake in the name, so it is not created.
pub async fn open(global: &Global, config: &Config) -> Result<Arc<dyn Ledger>, Failure> {
    if let Some(path) = sqlite_path(&config.ledger.url)
        && !path.exists()
    {
        let flags = global.given(&["--data", "--ledger"]);
        let message =
            format!("there is no ledger at {}; `hapax{flags} ledger init` makes one", path.display());
        return Err(Failure::dependency("unavailable", message));
    }
    // `check` reports problems with the server, and reading is always allowed.
    let mut settings = config.open_settings();
    settings.refuse = false;
    settings.migrate = Migrate::Check;
    Ok(open::ledger_with(&config.ledger.url, &settings).await?)
}
