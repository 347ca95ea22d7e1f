//! Failures of commands: a sentence, a stable code, and an exit code.

use std::process::ExitCode;

use serde_json::{Value, json};

/// A promise or verification failed.
pub const BROKEN_PROMISE: u8 = 1;
/// Wrong usage or configuration.
pub const USAGE: u8 = 2;
/// A dependency is unavailable.
pub const DEPENDENCY: u8 = 3;
/// Input was rejected.
pub const INPUT: u8 = 4;

/// Why a command failed.
#[derive(Debug)]
pub struct Failure {
    exit: u8,
    code: &'static str,
    message: String,
    /// The expected and the actual value, for tools.
    conflict: Option<(Value, Value)>,
    quiet: bool,
}

impl Failure {
    /// A failure with the given exit code.
    pub fn new(exit: u8, code: &'static str, message: impl Into<String>) -> Self {
        Failure { exit, code, message: message.into(), conflict: None, quiet: false }
    }

    /// The configuration or the flags are wrong.
    pub fn config(message: impl Into<String>) -> Self {
        Failure::new(USAGE, "config", message)
    }

    /// This binary was built without a feature; names the commands that build one with it.
    pub fn not_built_in(what: &str, feature: &str) -> Self {
        Failure::new(
            USAGE,
            "not-built-in",
            format!(
                "{what} is not built into this binary; build one that has it with \
                 `cargo run --release --features full -- …` in the repository, or with \
                 `cargo install --path crates/hapax-cli --features full` (`{feature}` instead of `full`: only that)"
            ),
        )
    }

    /// The user was asked, and did not say yes. `nothing` says what was not done.
    pub fn declined(nothing: &str) -> Self {
        Failure::new(USAGE, "declined", nothing)
    }

    /// The input is wrong.
    pub fn input(message: impl Into<String>) -> Self {
        Failure::new(INPUT, "invalid", message)
    }

    /// A dependency failed.
    pub fn dependency(code: &'static str, message: impl Into<String>) -> Self {
        Failure::new(DEPENDENCY, code, message)
    }

    /// Prefixes the message with what it is about.
    #[must_use]
    pub fn about(self, what: &str) -> Self {
        Failure { message: format!("{what}: {}", self.message), ..self }
    }

    /// Repeats the flags that were given in the commands that the message names, and says of a schema
    /// only what is the matter.
    #[must_use]
    pub fn with_flags(self, flags: &str) -> Self {
        let message = self.message.strip_prefix("schema: ").unwrap_or(&self.message);
        Failure { message: message.replace("`hapax ", &format!("`hapax{flags} ")), ..self }
    }

    /// Changes the exit code.
    #[must_use]
    pub fn exits(self, exit: u8) -> Self {
        Failure { exit, ..self }
    }

    /// Whether a dependency cannot be reached.
    pub fn is_dependency(&self) -> bool {
        self.exit == DEPENDENCY
    }

    /// The stable code.
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// Whether something is not there.
    pub fn is_missing(&self) -> bool {
        self.code == "not-found"
    }

    /// The message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Writing to standard output failed. A closed pipe is not a failure, because no reader is left
    /// to inform.
    pub fn output(error: &std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Failure { quiet: true, ..Failure::new(0, "broken-pipe", "") };
        }
        Failure::dependency("output", format!("standard output cannot be written: {error}"))
    }

    /// Reports the failure to people and tools, and returns the exit code.
    pub fn report(&self, json: bool) -> ExitCode {
        if !self.quiet {
            eprintln!("hapax: {}", crate::print::escaped(&self.message));
            if json {
                let mut error = json!({"code": self.code, "message": self.message});
                if let Some((expected, actual)) = &self.conflict {
                    (error["expected"], error["actual"]) = (expected.clone(), actual.clone());
                }
                eprintln!("{}", crate::print::visible_json(&json!({"error": error}).to_string()));
            }
        }
        ExitCode::from(self.exit)
    }
}

impl From<hapax::Error> for Failure {
    fn from(error: hapax::Error) -> Self {
        use hapax::Error;
        let exit = match &error {
            Error::NotBuiltIn { what, feature } => return Failure::not_built_in(what, feature),
            Error::Config(_) | Error::Unsupported(_) => USAGE,
            Error::Invalid { .. } | Error::NotFound(_) | Error::Conflict { .. } => INPUT,
            Error::Fenced { .. } | Error::Mismatch { .. } | Error::Corrupt(_) => BROKEN_PROMISE,
            _ => DEPENDENCY,
        };
        let conflict = match &error {
            Error::Conflict { expected, actual } => Some(sides(expected, actual)),
            _ => None,
        };
        Failure { conflict, ..Failure::new(exit, error.code(), error.chain()) }
    }
}

/// Both sides of a conflict: numbers if it is about seqs, otherwise sentences.
fn sides(expected: &str, actual: &str) -> (Value, Value) {
    let seq = |text: &str| text.strip_prefix("seq ")?.split(' ').next()?.parse::<u64>().ok();
    match (seq(expected), seq(actual)) {
        (Some(expected), Some(actual)) => (expected.into(), actual.into()),
        _ => (expected.into(), actual.into()),
    }
}

/// Reports an error from clap. Help and version are not failures.
pub fn usage(error: &clap::Error) -> ExitCode {
    // If even this cannot be printed, there is no way to report it.
    let _ = error.print();
    if !error.use_stderr() {
        return ExitCode::SUCCESS;
    }
    if std::env::args_os().any(|arg| arg == "--json") {
        let text = error.to_string();
        let message = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        eprintln!("{}", json!({"error": {"code": "usage", "message": message}}));
    }
    ExitCode::from(USAGE)
}
