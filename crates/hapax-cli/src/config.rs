//! `hapax config`: what is configured, and who said so.

use clap::{Args, Subcommand};
use serde_json::json;

use crate::cli::Global;
use crate::failure::Failure;
use crate::print;

#[derive(Debug, Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Every setting, its value and where it came from; passwords are hidden
    #[command(after_help = "Example: hapax config show --set lease.timeout_s=60")]
    Show,
}

pub fn run(global: &Global, args: &ConfigArgs) -> Result<u8, Failure> {
    let ConfigCommand::Show = args.command;
    let config = global.load()?;
    if global.json {
        let values: Vec<_> = config
            .values()
            .iter()
            .map(|value| {
                json!({
                    "key": value.setting.key,
                    "value": value.shown(),
                    "from": value.place.to_string(),
                    "default": value.setting.default,
                    "env": value.setting.env(),
                    "older_env": value.setting.older_env,
                    "allowed": value.setting.kind.range(),
                    "doc": value.setting.doc,
                })
            })
            .collect();
        let scoped: Vec<_> = config
            .scoped_values()
            .map(|(key, value)| json!({"key": key, "value": value.shown(), "from": value.place.to_string()}))
            .collect();
        print::json(&json!({"settings": values, "scopes": scoped, "ledger": config.ledger_url_shown()}))?;
        return Ok(0);
    }
    let mut rows: Vec<[String; 4]> = config
        .values()
        .iter()
        .map(|value| {
            let shown = print::escaped(&value.shown());
            let shown = if shown.is_empty() { "-".to_owned() } else { shown };
            let variables = [&[&*value.setting.env()], value.setting.older_env].concat().join(", ");
            [value.setting.key.to_owned(), shown, value.place.to_string(), variables]
        })
        .collect();
    rows.extend(
        config.scoped_values().map(|(key, value)| {
            [key, print::escaped(&value.shown()), value.place.to_string(), "-".to_owned()]
        }),
    );
    print::table(["setting", "value", "from", "variables"], &rows)?;
    Ok(0)
}
