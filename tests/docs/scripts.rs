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

/// A command runs beside the hogs, and its status is theirs; nothing is left of them.
#[test]
fn hogs_are_there_with_the_command_and_gone_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let hogs = format!("{}/scripts/hogs", env!("CARGO_MANIFEST_DIR"));
    // The command ends as soon as the disk is written to.
    let command = "until [ -s \"$TMPDIR\"/hapax-hogs.*/file ]; do sleep 0.02; done; exit 7";
    let ran = Command::new(&hogs)
        .args(["-n", "1", "-s", "120", "sh", "-c", command])
        .env("TMPDIR", dir.path())
        .output()
        .unwrap();
    assert_eq!(ran.status.code(), Some(7), "{}", String::from_utf8_lossy(&ran.stderr));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "no file is left");
    let ours = format!("TMPDIR={}", dir.path().display()).into_bytes();
    let left = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let of = entry.unwrap().path();
        let environment = std::fs::read(of.join("environ")).ok()?;
        environment.split(|byte| *byte == 0).any(|variable| variable == ours).then_some(of)
    });
    assert_eq!(left.collect::<Vec<_>>(), Vec::<std::path::PathBuf>::new(), "no process is left");
    for wrong in [&[][..], &["-n", "x", "true"], &["-z", "true"]] {
        assert_eq!(Command::new(&hogs).args(wrong).output().unwrap().status.code(), Some(2), "{wrong:?}");
    }
}

/// A node that the clients do not work with is refused before anything is started, and all say the same number.
#[test]
fn t90_a_node_that_is_too_old_is_refused() {
    let root = env!("CARGO_MANIFEST_DIR");
    let dir = tempfile::tempdir().unwrap();
    let node = dir.path().join("node");
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
    for (version, is_fine) in
        [("v18.19.0", false), ("v20.3.1", false), ("v20.4.0", true), ("v20.20.2", true), ("v22.1.0", true)]
    {
        std::fs::write(&node, format!("#!/bin/sh\necho {version}\n")).unwrap();
        std::fs::set_permissions(&node, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let ran = Command::new("bash")
            .args(["-c", ". scripts/lib.sh; need_node"])
            .current_dir(root)
            .env("PATH", &path)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.success(), is_fine, "{version}: {said}");
        assert!(is_fine || said.contains("20.4 or later"), "{said}");
    }
    for (file, says) in [
        ("clients/typescript/package.json", "\">=20.4\""),
        ("scripts/test", "node >= 20.4 with npm"),
        ("README.md", "node >= 20.4 with npm"),
    ] {
        assert!(std::fs::read_to_string(format!("{root}/{file}")).unwrap().contains(says), "{file}");
    }
}

#[test]
fn wide_lines_of_prose_are_found_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("page.md");
    let checked = |text: &str| {
        std::fs::write(&page, text).unwrap();
        run("check-prose", &[page.to_str().unwrap()])
    };
    let wide = "word ".repeat(21);
    let url = format!("https://example.org/{}", "x".repeat(100));
    let allowed =
        format!("short\n\n| {wide} |\n\n```sh\n{wide}\n```\n\n- [a page]({url})\n{}\n", "x".repeat(120));
    assert_fine(&checked(&allowed));
    for prose in [&wide, &format!("- {wide}"), &format!("see [a page]({url})")] {
        let output = checked(&format!("{allowed}\n{prose}\n"));
        let out = String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success() && out.contains("columns of prose"), "{prose}: {out}");
    }
}
