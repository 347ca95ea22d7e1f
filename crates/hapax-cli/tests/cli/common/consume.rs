//! What tests of consumers share: a topic on the embedded bus, and handlers made of the samples.

#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Ran, run, run_with};

/// Pauses so short that a test does not notice them.
pub const QUICK: [&str; 4] = ["--set", "retry.backoff_base_ms=10", "--set", "retry.backoff_max_ms=20"];

pub fn clients() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients")
}

/// Which sample a handler is made of.
#[derive(Debug, Clone, Copy)]
pub enum Sample {
    Python,
    Node,
}

impl Sample {
    /// Writes a handler with this body of `handle` (of `request`, `cancelled` or `signal`, and `effect(text)`, which notes it in
    /// `effects`), and gives the command that runs it.
    pub fn handler(self, dir: &Path, body: &str) -> String {
        let (program, file, text) = match self {
            Sample::Python => ("python3", "test_handler.py", python(body)),
            Sample::Node => ("node", "test_handler_node.mjs", node(body)),
        };
        let found = Command::new(program).arg("--version").output();
        assert!(
            found.is_ok_and(|out| out.status.success()),
            "{program} is missing: the samples cannot be tested"
        );
        std::fs::write(dir.join(file), text).unwrap();
        format!("{program} {file}")
    }
}

fn python(body: &str) -> String {
    let indented: Vec<_> = body.lines().map(|line| format!("    {line}")).collect();
    format!(
        "import json, os, signal, subprocess, sys, threading, time\n\
         sys.path.insert(0, {:?})\n\
         from handler import Fatal, Handler, Retry\n\
         lock = threading.Lock()\n\
         def effect(text):\n    with lock, open('effects', 'a') as file:\n        file.write(str(text) + '\\n')\n\
         def wait_for(name):\n    while not os.path.exists(name):\n        time.sleep(0.005)\n\
         def handle(request, cancelled):\n    do = request['event']['payload'].get('do')\n{}\n\
         Handler(handle).run()\n",
        clients().join("python").display().to_string(),
        indented.join("\n"),
    )
}

fn node(body: &str) -> String {
    format!(
        "import {{ appendFileSync, existsSync }} from 'node:fs';\n\
         import {{ Fatal, Retry, run }} from {:?};\n\
         const effect = (text) => appendFileSync('effects', text + '\\n');\n\
         await run(async (request, signal) => {{\nconst does = request.event.payload.do;\n{body}\n}});\n",
        clients().join("node/handler.mjs").display().to_string(),
    )
}

/// What took effect, in order.
pub fn effects(dir: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(dir.join("effects")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// Puts events into the topic `orders`, which has one partition.
pub fn produce(dir: &Path, lines: &str) {
    run_with(dir, &["produce", "--topic", "orders", "--create", "1"], lines.as_bytes()).code(0);
}

pub fn consume_args<'a>(command: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let fixed = ["consume", "--topic", "orders", "--scope", "mailer", "--exec", command, "--json"];
    [&fixed[..], &QUICK, more].concat()
}

/// Consumes until nothing has come for a second.
pub fn consume(dir: &Path, command: &str, more: &[&str]) -> Ran {
    run(dir, &[&consume_args(command, more)[..], &["--until-idle", "1"]].concat())
}

/// How many deliveries came to this.
pub fn count(ran: &Ran, word: &str) -> u64 {
    ran.json()["deliveries"][word].as_u64().unwrap_or(0)
}

/// An entry of the scope `mailer`.
pub fn entry(dir: &Path, id: &str) -> serde_json::Value {
    run(dir, &["ledger", "show", "--json", "--scope", "mailer", id]).code(0).json()
}

/// Waits until something is so; two minutes are for ever.
#[track_caller]
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !is_so() {
        assert!(began.elapsed().as_secs() < 120, "still not so: {what}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}
