//! `hapax completions`: what a shell needs to complete commands and flags.

use clap::{Args, Command, CommandFactory as _};
use clap_complete::Shell;

use crate::cli::{Cli, Global};
use crate::failure::Failure;
use crate::print;

/// Print the completions of a shell
///
/// Write them to where your shell looks for completions, or load them in its start-up file. Make them
/// again after an upgrade.
#[derive(Debug, Args)]
#[command(after_help = "Examples: hapax completions bash > /etc/bash_completion.d/hapax\n          \
                        hapax completions zsh > ~/.zfunc/_hapax\n          \
                        hapax completions fish > ~/.config/fish/completions/hapax.fish")]
pub struct CompletionsArgs {
    /// Which shell
    #[arg(value_enum)]
    shell: Shell,
}

/// The command with what its help shows. A hidden command is for our own processes.
fn offered(whole: &Command) -> Command {
    let shown = whole.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let about = whole.get_about().cloned().unwrap_or_default();
    Command::new("hapax")
        .about(about)
        .version(env!("CARGO_PKG_VERSION"))
        .args(whole.get_arguments().cloned())
        .subcommands(shown)
}

pub fn run(global: &Global, args: &CompletionsArgs) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut offered(&Cli::command()), "hapax", &mut script);
    print::text(global, "script", String::from_utf8_lossy(&script).trim_end())?;
    Ok(0)
}
