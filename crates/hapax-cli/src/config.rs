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
                    "seed_env": value.setting.seed_env,
                    "allowed": value.setting.kind.range(),
                    "doc": value.setting.doc,
                })
            })
            .collect();
        print::json(&json!({"settings": values, "ledger": config.ledger_url_shown()}))?;
        return Ok(0);
    }
    let rows: Vec<[String; 4]> = config
        .values()
        .iter()
        .map(|value| {
            let shown = print::escaped(&value.shown());
            let shown = if shown.is_empty() { "-".to_owned() } else { shown };
            [value.setting.key.to_owned(), shown, value.place.to_string(), value.setting.env()]
        })
        .collect();
    print::table(["setting", "value", "from", "variable"], &rows)?;
    Ok(0)
}
