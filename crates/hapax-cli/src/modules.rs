//! `hapax modules`: makes modules of records, and says whether they are protected.

use clap::{Args, Subcommand};
use hapax::access::AuditNote;
use hapax::config::{Config, sqlite_path};
use hapax::records::{Module, ModuleSlug, Modules};
use hapax::words::counted;
use serde_json::json;

use crate::cli::Global;
use crate::failure::{self, Failure};
use crate::token::ByArgs;
use crate::{open, print};

/// The flags that select the journal.
const OF_JOURNAL: [&str; 2] = ["--data", "--journal"];

#[derive(Debug, Args)]
pub struct ModulesArgs {
    #[command(subcommand)]
    command: ModulesCommand,
}

#[derive(Debug, Subcommand)]
enum ModulesCommand {
    /// Create a module in the journal's database, with the rights of the database's owner
    #[command(after_help = "Examples:\n  \
        hapax modules create orders\n  \
        hapax modules create orders --journal postgres://owner@db/app --app-role app")]
    Create(CreateArgs),
    /// List modules, their numbers of records, and whether each is protected; exit 1 if one is not
    #[command(after_help = "Example: hapax modules ls --json")]
    Ls,
    /// Print the SQL that grants the app role and the maintenance role their rights
    #[command(
        after_help = "Example: hapax modules grants --app-role app --maintenance-role keeper | psql -U owner app"
    )]
    Grants(RoleArgs),
}

#[derive(Debug, Args)]
struct CreateArgs {
    /// The module's name: 1 to 48 of a-z, 0-9 and _, starting with a letter
    slug: String,
    #[command(flatten)]
    roles: RoleArgs,
    #[command(flatten)]
    by: ByArgs,
}

#[derive(Debug, Args)]
struct RoleArgs {
    /// The PostgreSQL role that reads and writes records, as one tenant at a time (records.app_role)
    #[arg(long, value_name = "ROLE")]
    app_role: Option<String>,
    /// The PostgreSQL role that counts records and sweeps keys of all tenants (records.maintenance_role)
    #[arg(long, value_name = "ROLE")]
    maintenance_role: Option<String>,
}

impl RoleArgs {
    fn load(&self, global: &Global) -> Result<Config, Failure> {
        global.load_with(&[
            ("records.app_role", "--app-role", self.app_role.clone()),
            ("records.maintenance_role", "--maintenance-role", self.maintenance_role.clone()),
        ])
    }
}

pub async fn run(global: &Global, args: &ModulesArgs) -> Result<u8, Failure> {
    match &args.command {
        ModulesCommand::Create(args) => {
            let slug = ModuleSlug::new(&args.slug)?;
            create(global, &args.roles.load(global)?, &slug, &args.by).await
        }
        ModulesCommand::Ls => ls(global, &global.load()?).await,
        ModulesCommand::Grants(roles) => grants(global, &roles.load(global)?).await,
    }
}

/// The modules of the journal's database. `make`: creates what is missing.
async fn modules(
    global: &Global,
    config: &Config,
    make: bool,
) -> Result<std::sync::Arc<dyn Modules>, Failure> {
    config.records_in_one_database()?;
    let file = sqlite_path(&config.journal.url);
    if make {
        open::make_room(config, file, "journal")?;
    } else if let Some(file) = file.filter(|file| !file.exists()) {
        let flags = global.given(&OF_JOURNAL);
        let message = format!(
            "there is no journal, and so no module, at {}; `hapax{flags} modules create SLUG` makes one",
            file.display()
        );
        return Err(Failure::dependency("unavailable", message));
    }
    let mut settings = config.journal_settings();
    if !make {
        settings.migrate = hapax::open::Migrate::Check;
    }
    let opened = hapax::open::modules_with(&config.journal.url, &settings, &config.records.roles).await;
    opened.map_err(|error| Failure::from(error).with_flags(&global.given(&OF_JOURNAL)))
}

async fn create(global: &Global, config: &Config, slug: &ModuleSlug, by: &ByArgs) -> Result<u8, Failure> {
    let modules = modules(global, config, true).await?;
    // Recorded before it is done, as every admin action. The keys are in the journal's database, or nothing was opened.
    let note = AuditNote::new(&by.actor()?, "modules.create", slug.as_str());
    crate::token::access(config).await?.note(&note).await?;
    let made = modules.create_module(slug).await?;
    if global.json {
        print::json(&json!({"module": slug.as_str(), "made": made}))?;
    } else if made {
        print::line(&format!("module {slug} is made: POST /v1/modules/{slug}/records"))?;
    } else {
        print::line(&format!("module {slug} is there already; nothing was changed"))?;
    }
    let postgres = config.journal.url.starts_with("postgres");
    if made && postgres && config.records.roles.app.is_none() {
        eprintln!(
            "hapax: no records.app_role is set, so only the owner has rights to it; `hapax{} modules grants --app-role ROLE` \
             prints them for another",
            global.given(&OF_JOURNAL)
        );
    }
    Ok(0)
}

fn row(module: &Module) -> [String; 3] {
    let count = module.records.map_or_else(|| "?".to_owned(), |records| records.to_string());
    let state = if module.problems.is_empty() { "protected".to_owned() } else { module.problems.join("; ") };
    [module.slug.to_string(), count, state]
}

async fn ls(global: &Global, config: &Config) -> Result<u8, Failure> {
    let found = modules(global, config, false).await?.modules().await?;
    if global.json {
        for module in &found {
            print::json(&json!({
                "module": module.slug.as_str(), "records": module.records, "problems": module.problems,
            }))?;
        }
    } else if found.is_empty() {
        let flags = global.given(&OF_JOURNAL);
        print::line(&format!("there is no module yet; `hapax{flags} modules create SLUG` makes one"))?;
    } else {
        print::table(["module", "records", "state"], &found.iter().map(row).collect::<Vec<_>>())?;
    }
    let bad = found.iter().filter(|module| !module.problems.is_empty()).count() as u64;
    if bad == 0 {
        return Ok(0);
    }
    let message = format!("{} not protected as it should be", counted(bad, "module is", "modules are"));
    Err(Failure::new(failure::BROKEN_PROMISE, "unprotected", message))
}

async fn grants(global: &Global, config: &Config) -> Result<u8, Failure> {
    if config.records.roles == hapax::records::Roles::default() {
        return Err(Failure::config(
            "no role is named; give --app-role ROLE, --maintenance-role ROLE or both (records.app_role, \
             records.maintenance_role)",
        ));
    }
    let sql = modules(global, config, false).await?.grants_sql().await?;
    print::text(global, "sql", sql.trim_end())?;
    Ok(0)
}
