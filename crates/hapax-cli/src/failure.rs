//! What ends a command early: a sentence, a stable word, and an exit code.

use std::process::ExitCode;

use serde_json::json;

/// A promise or verification failed.
pub const BROKEN_PROMISE: u8 = 1;
/// Usage or configuration.
pub const USAGE: u8 = 2;
/// A dependency is unavailable.
pub const DEPENDENCY: u8 = 3;
/// Input rejected.
pub const INPUT: u8 = 4;

/// Why a command could not do its work.
#[derive(Debug)]
pub struct Failure {
    exit: u8,
    code: &'static str,
    message: String,
    quiet: bool,
}

impl Failure {
    /// A failure with an exit code of its own.
    pub fn new(exit: u8, code: &'static str, message: impl Into<String>) -> Self {
        Failure { exit, code, message: message.into(), quiet: false }
    }

    /// The configuration or the flags are wrong.
    pub fn config(message: impl Into<String>) -> Self {
        Failure::new(USAGE, "config", message)
    }

    /// The input is wrong.
    pub fn input(message: impl Into<String>) -> Self {
        Failure::new(INPUT, "invalid", message)
    }

    /// Something outside does not work.
    pub fn dependency(code: &'static str, message: impl Into<String>) -> Self {
        Failure::new(DEPENDENCY, code, message)
    }

    /// The same failure, with what it is about.
    #[must_use]
    pub fn about(self, what: &str) -> Self {
        Failure { message: format!("{what}: {}", self.message), ..self }
    }

    /// Whether something outside cannot be reached.
    pub fn is_dependency(&self) -> bool {
        self.exit == DEPENDENCY
    }

    /// The sentence.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Writing to standard output failed. A reader that left is no failure: there is nobody to tell.
    pub fn output(error: &std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Failure { exit: 0, code: "broken-pipe", message: String::new(), quiet: true };
        }
        Failure::dependency("output", format!("standard output cannot be written: {error}"))
    }

    /// Tells people and tools, and gives the exit code.
    pub fn report(&self, json: bool) -> ExitCode {
        if !self.quiet {
            eprintln!("hapax: {}", self.message);
            if json {
                eprintln!("{}", json!({"error": {"code": self.code, "message": self.message}}));
            }
        }
        ExitCode::from(self.exit)
    }
}

impl From<hapax::Error> for Failure {
    fn from(error: hapax::Error) -> Self {
        use hapax::Error;
        let exit = match &error {
            Error::Config(_) | Error::Unsupported(_) => USAGE,
            Error::Invalid { .. } | Error::NotFound(_) => INPUT,
            Error::Fenced { .. } | Error::Conflict { .. } | Error::Mismatch { .. } | Error::Corrupt(_) => {
                BROKEN_PROMISE
            }
            _ => DEPENDENCY,
        };
        Failure::new(exit, error.code(), error.chain())
    }
}

/// Reports what clap found. Help and version are no failures.
pub fn usage(error: &clap::Error) -> ExitCode {
    // Nothing can be said if even this cannot be printed.
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
