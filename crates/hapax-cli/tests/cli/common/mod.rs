//! Runs the binary with an environment that holds nothing of ours.

#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::format_push_string)]

pub mod consume;
#[path = "../../../../../tests/support/port.rs"]
pub mod port;
#[cfg(feature = "postgres")]
pub mod roles;
pub mod serve;

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The binary, in a folder of its own.
pub fn hapax(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hapax"));
    command.args(args).current_dir(dir).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for (name, _) in std::env::vars_os() {
        let ours = name.to_string_lossy();
        if ours.starts_with("HAPAX_")
            || ours.starts_with("PROCESSED_EVENT_")
            || ours.starts_with("IM2BE_")
            || ours.starts_with("OTEL_")
        {
            command.env_remove(name);
        }
    }
    command.env_remove("ENABLE_PROCESSED_EVENT_REGISTRY").env("USER", "tester");
    command
}

pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    #[track_caller]
    pub fn code(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout: {}\nstderr: {}", self.out, self.err);
        self
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(self.out.trim()).unwrap_or_else(|e| panic!("{e}: {}", self.out))
    }

    /// The last line of standard error.
    pub fn err_json(&self) -> serde_json::Value {
        let last = self.err.lines().last().unwrap_or_default();
        serde_json::from_str(last).unwrap_or_else(|e| panic!("{e}: {}", self.err))
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Ran {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

pub fn run(dir: &Path, args: &[&str]) -> Ran {
    hapax(dir, args).output().unwrap().into()
}

pub fn run_with(dir: &Path, args: &[&str], input: &[u8]) -> Ran {
    let mut child = hapax(dir, args).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // A thread, as the child may stop reading or fill its output first.
    let writer = std::thread::spawn(move || {
        let _ = stdin.write_all(&input);
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output.into()
}

/// Many events, each `copies` times, in rounds.
pub fn events(count: usize, copies: usize) -> String {
    let mut text = String::new();
    for _ in 0..copies {
        for n in 0..count {
            text.push_str(&format!("{{\"event_id\":\"e-{n}\",\"pad\":\"{}\"}}\n", "x".repeat(100)));
        }
    }
    text
}

/// The ids of whole lines.
pub fn ids(text: &str) -> Vec<String> {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let id = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        value["event_id"].as_str().unwrap().to_owned()
    };
    whole.lines().map(id).collect()
}
