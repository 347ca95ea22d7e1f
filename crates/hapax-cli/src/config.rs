//! `hapax config`: the settings and their sources, and an example of the file.

use clap::{Args, Subcommand};
use hapax::config::{Config, Value};
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
    /// Show every setting, its value and its source; passwords are hidden
    ///
    /// A value in parentheses is the behaviour when the setting is unset. If the configuration has
    /// mistakes, the rest is listed anyway, and every mistake is reported at the end.
    #[command(after_help = "Example: hapax config show --set lease.timeout_s=60")]
    Show,
    /// Print a hapax.toml with every setting, commented out at its default
    ///
    /// Each setting has its description, what it takes, its variables and its flag.
    #[command(after_help = "Example: hapax config example > hapax.toml")]
    Example,
}

pub fn run(global: &Global, args: &ConfigArgs) -> Result<u8, Failure> {
    if let ConfigCommand::Example = args.command {
        return print::text(global, "toml", hapax::config::example().trim_end()).map(|()| 0);
    }
    let sources = global.sources(&[]);
    match Config::load(&sources) {
        Ok(config) => {
            let scoped: Vec<_> = config.scoped_values().map(|(key, value)| (key, value.clone())).collect();
            show(global, config.values(), &scoped, Some(&config))?;
            Ok(0)
        }
        // Mistakes are reported after the list, in which the user can look up the right names.
        Err(error) => {
            let (values, mut problems) = sources.values();
            show(global, &values, &[], None)?;
            let last = problems.pop().unwrap_or(error);
            for problem in problems {
                eprintln!("hapax: {}", print::escaped(&problem.to_string()));
            }
            Err(last.into())
        }
    }
}

fn show(
    global: &Global,
    values: &[Value],
    scoped: &[(String, Value)],
    config: Option<&Config>,
) -> Result<(), Failure> {
    if global.json {
        let values: Vec<_> = values
            .iter()
            .map(|value| {
                json!({
                    "key": value.setting.key,
                    "value": value.shown(),
                    "unset": value.unset(),
                    "from": value.place.to_string(),
                    "default": value.setting.default,
                    "env": value.setting.env(),
                    "older_env": value.setting.older_env,
                    "allowed": value.setting.kind.range(),
                    "doc": value.setting.doc,
                })
            })
            .collect();
        let scoped: Vec<_> = scoped
            .iter()
            .map(|(key, value)| json!({"key": key, "value": value.shown(), "from": value.place.to_string()}))
            .collect();
        let ledger = config.map(Config::ledger_url_shown);
        return print::json(&json!({"settings": values, "scopes": scoped, "ledger": ledger}));
    }
    let mut rows: Vec<[String; 4]> = values
        .iter()
        .map(|value| {
            let shown = value.unset().map_or_else(|| value.shown(), |means| format!("({means})"));
            let variables = [&[&*value.setting.env()], value.setting.older_env].concat().join(", ");
            [value.setting.key.to_owned(), shown, value.place.to_string(), variables]
        })
        .collect();
    rows.extend(
        scoped
            .iter()
            .map(|(key, value)| [key.clone(), value.shown(), value.place.to_string(), "-".to_owned()]),
    );
    print::table(["setting", "value", "from", "variables"], &rows)
}
