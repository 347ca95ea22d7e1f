//! The scripts that tests stand on.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::process::{Command, Output};

fn run(script: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(format!("{}/scripts/{script}", env!("CARGO_MANIFEST_DIR")));
    if let Some(cache) = std::env::var_os("HAPAX_TEST_CACHE") {
        command.env("HAPAX_CACHE", cache);
    }
    command.args(arguments).output().expect("the script runs")
}

fn assert_fine(output: &Output) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
}

/// Servers that hang, that leave children behind or whose first thread has ended: `down` leaves nothing of them, `up` replaces them.
#[test]
fn t90_services_that_hang_are_replaced_and_gone_when_told() {
    assert_fine(&run("services-check", &[]));
}

#[test]
fn t90_readers_that_leave_a_pipe_early_are_found() {
    assert_fine(&run("check-pipes", &["--self-test"]));
}
