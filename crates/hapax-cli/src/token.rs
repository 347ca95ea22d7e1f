//! `hapax token` and `hapax audit`: who may use the server, and who did what.

use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use hapax::access::{
    Access, Actor, ApiToken, AuditEntry, ListAudit, ListTokens, NewToken, Role, Rotation, Scopes, TokenEntry,
    TokenId, revoke_with_children,
};
use hapax::config::{Config, Migrate, sqlite_path};
use hapax::{Scope, Tenant};
use serde_json::{Value, json};

use crate::cli::{Global, between};
use crate::failure::Failure;
use crate::{open, print};

#[derive(Debug, Args)]
pub struct TokenArgs {
    #[command(subcommand)]
    command: TokenCommand,
}

#[derive(Debug, Subcommand)]
enum TokenCommand {
    /// Create a token; its secret is printed once, on standard output
    #[command(
        override_usage = "hapax token create --name <NAME> [OPTIONS]",
        after_help = "Examples:\n  \
            hapax token create --name shop --role write --expires 90d\n  \
            hapax token create --name ops --role admin > ops.token"
    )]
    Create(CreateArgs),
    /// List tokens, without their secrets
    #[command(after_help = "Example: hapax token ls --live --json")]
    Ls(LsArgs),
    /// Revoke a token for good; servers notice within seconds
    #[command(
        override_usage = "hapax token revoke <TOKEN> [OPTIONS]",
        after_help = "Example: hapax token revoke 01kz4m8q2v7xh0cd --reason 'found in a log'"
    )]
    Revoke(RevokeArgs),
    /// Give a token a new secret; its id, name and permissions stay the same
    #[command(
        override_usage = "hapax token rotate <TOKEN> [OPTIONS]",
        after_help = "Example: hapax token rotate shop --overlap 1h > shop.token"
    )]
    Rotate(RotateArgs),
    /// Print a new token and store nothing: for HAPAX_BOOTSTRAP_TOKEN_FILE
    #[command(after_help = "Example: hapax token generate > bootstrap.token")]
    Generate,
}

#[derive(Debug, Args)]
struct CreateArgs {
    /// The token's name, for people: who or what uses it
    #[arg(long, value_name = "NAME")]
    name: String,
    /// The tenant whose data the token may use; an admin without one operates all tenants [default: the default tenant]
    #[arg(long, value_name = "T")]
    tenant: Option<Tenant>,
    /// Only claims and dead letters of this scope; may be repeated [default: all]
    #[arg(long, value_name = "S")]
    scope: Vec<Scope>,
    /// read: look; write: also claim, append and write records; admin: also intervene
    #[arg(long, value_name = "ROLE", default_value = "write", value_parser = role)]
    role: Role,
    /// When the token expires, for example 90d from now [default: never]
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    expires: Option<Duration>,
    #[command(flatten)]
    by: ByArgs,
}

#[derive(Debug, Args)]
struct LsArgs {
    /// Only tokens of this tenant
    #[arg(long, value_name = "T")]
    tenant: Option<Tenant>,
    /// Only tokens that are neither expired nor revoked
    #[arg(long)]
    live: bool,
}

#[derive(Debug, Args)]
struct RevokeArgs {
    /// The token's id, or its name if only one live token has it
    token: String,
    /// Also revoke every token that this one created over HTTP, and those that they created
    #[arg(long)]
    children: bool,
    #[command(flatten)]
    by: ByArgs,
}

#[derive(Debug, Args)]
struct RotateArgs {
    /// The token's id, or its name if only one live token has it
    token: String,
    /// How long the old secret stays valid next to the new one [default: it ends at once]
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    overlap: Option<Duration>,
    #[command(flatten)]
    by: ByArgs,
}

/// What the audit row says.
#[derive(Debug, Args)]
pub struct ByArgs {
    /// The reason, for the audit row
    #[arg(long, value_name = "R", default_value = "", hide_default_value = true)]
    reason: String,
    /// The person, for the audit row [default: $USER, else the uid]
    #[arg(long, value_name = "NAME")]
    by: Option<String>,
}

impl ByArgs {
    /// Who acts, and why.
    pub fn actor(&self) -> Result<Actor, Failure> {
        Ok(Actor::new(crate::who::runs(self.by.as_deref())?, &self.reason))
    }
}

fn role(text: &str) -> Result<Role, String> {
    Role::parse(text).map_err(|error| error.to_string())
}

pub async fn run(global: &Global, args: &TokenArgs) -> Result<u8, Failure> {
    if let TokenCommand::Generate = args.command {
        show_secret(global, &ApiToken::generate(), json!({}))?;
        return Ok(0);
    }
    let config = global.load()?;
    match &args.command {
        TokenCommand::Create(args) => create(global, &config, args).await,
        TokenCommand::Ls(args) => list(global, &*existing(global, &config).await?, args).await,
        TokenCommand::Revoke(args) => revoke(global, &*existing(global, &config).await?, args).await,
        TokenCommand::Rotate(args) => rotate(global, &*existing(global, &config).await?, args).await,
        TokenCommand::Generate => Ok(0),
    }
}

/// Opens the store of tokens; creates it if it is missing.
pub async fn access(config: &Config) -> Result<Arc<dyn Access>, Failure> {
    must_last(config)?;
    open::make_room(config, sqlite_path(&config.keys.url), "store of tokens")?;
    Ok(hapax::open::access_with(&config.keys.url, &config.keys_settings()).await?)
}

/// Opens the store of tokens. A missing one is a mistake in the name, so it is not created.
async fn existing(global: &Global, config: &Config) -> Result<Arc<dyn Access>, Failure> {
    must_last(config)?;
    if let Some(path) = sqlite_path(&config.keys.url)
        && !path.exists()
    {
        let flags = global.given(&["--data", "--journal"]);
        let message = format!(
            "there are no tokens at {}; `hapax{flags} token create --name NAME` makes one",
            path.display()
        );
        return Err(Failure::dependency("unavailable", message));
    }
    let mut settings = config.keys_settings();
    settings.refuse = false;
    settings.migrate = Migrate::Check;
    let opened = hapax::open::access_with(&config.keys.url, &settings).await;
    opened.map_err(|error| Failure::from(error).with_flags(&global.given(&["--data", "--journal"])))
}

fn must_last(config: &Config) -> Result<(), Failure> {
    if config.keys.url == "memory:" {
        return Err(Failure::config(
            "tokens in memory would end with this command; set keys.url to sqlite:FILE or postgres://…",
        ));
    }
    Ok(())
}

async fn create(global: &Global, config: &Config, args: &CreateArgs) -> Result<u8, Failure> {
    let by = args.by.actor()?;
    let about = NewToken::new(&args.name, args.role)
        .tenant(args.tenant.clone())
        .scopes(Scopes::of(args.scope.iter().cloned()))
        .expires_in(args.expires);
    let token = ApiToken::generate();
    let entry = access(config).await?.create(&token, &about, &by).await?;
    tell(global, &format!("token {} ({}) was made in {}", entry.id, entry.name, config.keys_url_shown()));
    tell(global, "its secret is shown only now; keep it where the client finds it");
    show_secret(global, &token, entry_json(&entry))?;
    Ok(0)
}

async fn rotate(global: &Global, store: &dyn Access, args: &RotateArgs) -> Result<u8, Failure> {
    let by = args.by.actor()?;
    let before = find(store, &args.token).await?;
    let token = ApiToken::with_secret(before.id.clone());
    let rotation = Rotation::new(before.rotations).overlap(args.overlap.unwrap_or_default());
    let entry = store.rotate(&token, &rotation, &by).await?;
    let until = entry.overlap_until.map_or_else(|| "ends now".to_owned(), |until| format!("ends at {until}"));
    tell(global, &format!("token {} ({}) has a new secret; the old one {until}", entry.id, entry.name));
    show_secret(global, &token, entry_json(&entry))?;
    Ok(0)
}

async fn revoke(global: &Global, store: &dyn Access, args: &RevokeArgs) -> Result<u8, Failure> {
    let by = args.by.actor()?;
    let id = find(store, &args.token).await?.id;
    let revoked = if args.children {
        revoke_with_children(store, &id, &by).await?
    } else {
        vec![store.revoke(&id, &by).await?]
    };
    let mut left = Vec::new();
    if !args.children {
        let which = ListTokens { made_by: Some(id), live_only: true, limit: 1000, ..ListTokens::default() };
        left = store.list(&which).await?;
    }
    if global.json {
        let mut value = revoked.first().map(entry_json).unwrap_or_default();
        let children = revoked.iter().skip(1).chain(&left).map(entry_json);
        value["children"] = children.collect();
        print::json(&value)?;
        return Ok(0);
    }
    for entry in &revoked {
        let at = entry.revoked_at.map_or_else(String::new, |at| format!(" at {at}"));
        print::line(&format!("token {} ({}) was revoked{at}", entry.id, print::escaped(&entry.name)))?;
    }
    for entry in &left {
        print::line(&format!(
            "token {} ({}), which it made, is still live; --children ends it too",
            entry.id,
            print::escaped(&entry.name)
        ))?;
    }
    Ok(0)
}

async fn list(global: &Global, store: &dyn Access, args: &LsArgs) -> Result<u8, Failure> {
    let tenant = args.tenant.clone().map(Some);
    let entries = all(store, tenant, args.live).await?;
    if global.json {
        let entries: Vec<_> = entries.iter().map(entry_json).collect();
        print::json(&json!({"tokens": entries}))?;
        return Ok(0);
    }
    let time = |time: Option<hapax::Time>| time.map_or_else(|| "-".to_owned(), |time| time.to_string());
    let rows: Vec<_> = entries
        .iter()
        .map(|entry| {
            let tenant = entry.tenant.as_ref().map_or("-", Tenant::as_str);
            [
                entry.id.to_string(),
                entry.name.clone(),
                entry.role.to_string(),
                entry.state.to_string(),
                tenant.to_owned(),
                scopes_text(&entry.scopes),
                entry.made_by.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string),
                time(entry.expires_at),
                time(entry.last_used_at),
            ]
        })
        .collect();
    print::table(
        ["id", "name", "role", "state", "tenant", "scopes", "made by", "expires", "last used"],
        &rows,
    )?;
    Ok(0)
}

/// All tokens, page by page.
#[allow(clippy::option_option)] // all tokens, those of no tenant, or those of one, as in the store's list
async fn all(
    store: &dyn Access,
    tenant: Option<Option<Tenant>>,
    live_only: bool,
) -> Result<Vec<TokenEntry>, Failure> {
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let which =
            ListTokens { tenant: tenant.clone(), live_only, after, limit: 1000, ..ListTokens::default() };
        let page = store.list(&which).await?;
        let Some(last) = page.last() else { return Ok(found) };
        after = Some(last.id.clone());
        found.extend(page);
    }
}

/// The token with this id, or the only live one with this name.
async fn find(store: &dyn Access, text: &str) -> Result<TokenEntry, Failure> {
    if let Ok(token) = ApiToken::parse(text) {
        let id = token.id();
        return Err(Failure::input(format!(
            "that is a whole token, which nobody should see; name it by its id: {id}"
        )));
    }
    if let Ok(id) = TokenId::new(text)
        && let Some(entry) = store.get(&id).await?
    {
        return Ok(entry);
    }
    let mut named = all(store, None, true).await?;
    named.retain(|entry| entry.name == text);
    match named.len() {
        1 => Ok(named.remove(0)),
        0 => {
            let message = format!(
                "no token has the id {text:?}, and no live one has that name; `hapax token ls` lists them"
            );
            Err(Failure::new(crate::failure::INPUT, "not-found", message))
        }
        count => Err(Failure::input(format!("{count} live tokens are named {text:?}; name one by its id"))),
    }
}

/// Prints a secret on standard output, for the one time.
fn show_secret(global: &Global, token: &ApiToken, mut entry: Value) -> Result<(), Failure> {
    if !global.json {
        return print::line(token.expose());
    }
    entry["id"] = token.id().as_str().into();
    entry["token"] = token.expose().into();
    print::json(&entry)
}

/// Tells people, who see standard error while standard output goes into a file.
fn tell(global: &Global, text: &str) {
    if !global.json {
        eprintln!("hapax: {}", print::escaped(text));
    }
}

fn scopes_text(scopes: &Scopes) -> String {
    match scopes {
        Scopes::All => "all".to_owned(),
        Scopes::Only(scopes) => scopes.iter().map(Scope::as_str).collect::<Vec<_>>().join(" "),
    }
}

fn entry_json(entry: &TokenEntry) -> Value {
    let time = |time: Option<hapax::Time>| time.map(|time| time.to_string());
    let scopes = match &entry.scopes {
        Scopes::All => None,
        Scopes::Only(scopes) => Some(scopes.iter().map(Scope::as_str).collect::<Vec<_>>()),
    };
    json!({
        "id": entry.id.as_str(), "name": entry.name, "role": entry.role.as_str(), "state": entry.state.label(),
        "tenant": entry.tenant.as_ref().map(Tenant::as_str), "scopes": scopes, "rotations": entry.rotations,
        "made_by": entry.made_by.as_ref().map(TokenId::as_str),
        "created_at": entry.created_at.to_string(), "expires_at": time(entry.expires_at),
        "overlap_until": time(entry.overlap_until), "last_used_at": time(entry.last_used_at),
        "revoked_at": time(entry.revoked_at),
    })
}

#[derive(Debug, Args)]
pub struct AuditArgs {
    #[command(subcommand)]
    command: AuditCommand,
}

#[derive(Debug, Subcommand)]
enum AuditCommand {
    /// List who did what, newest first: tokens, and admin requests to the server
    #[command(after_help = "Example: hapax audit ls --action token. --limit 20")]
    Ls(AuditLsArgs),
}

#[derive(Debug, Args)]
struct AuditLsArgs {
    /// Only actions whose names start with this, for example token.
    #[arg(long, value_name = "WORD")]
    action: Option<String>,
    /// Only rows before this number, for the next page
    #[arg(long, value_name = "NUMBER")]
    before: Option<i64>,
    /// List at most this many
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = between::<u16>(1, 1000))]
    limit: u16,
}

pub async fn audit(global: &Global, args: &AuditArgs) -> Result<u8, Failure> {
    let AuditCommand::Ls(args) = &args.command;
    let store = existing(global, &global.load()?).await?;
    let which = ListAudit { before: args.before, action: args.action.clone(), limit: args.limit.into() };
    let rows = store.audit(&which).await?;
    let next = rows.last().filter(|_| rows.len() == usize::from(args.limit)).map(|row| row.number);
    if global.json {
        let rows: Vec<_> = rows.iter().map(row_json).collect();
        print::json(&json!({"audit": rows, "next_before": next}))?;
        return Ok(0);
    }
    let cells: Vec<_> = rows
        .into_iter()
        .map(|row| {
            [
                row.number.to_string(),
                row.at.to_string(),
                row.who,
                row.action,
                row.target,
                row.reason,
                row.details,
            ]
        })
        .collect();
    print::table(["number", "at", "who", "action", "target", "reason", "details"], &cells)?;
    if let Some(next) = next {
        tell(global, &format!("there may be more: --before {next}"));
    }
    Ok(0)
}

fn row_json(row: &AuditEntry) -> Value {
    json!({
        "number": row.number, "at": row.at.to_string(), "who": row.who, "action": row.action,
        "target": row.target, "reason": row.reason, "details": row.details,
    })
}
