//! What docs/security.md says: its tests exist, and what it says of the build is so.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// The Rust files below some folders, with their paths.
fn sources(folders: &[&str]) -> Vec<(PathBuf, String)> {
    let mut dirs: Vec<_> = folders.iter().map(|folder| root().join(folder)).collect();
    let mut files = Vec::new();
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                files.push((path, text));
            }
        }
    }
    files
}

/// The functions under `#[test]` and the like, the cases of suites, and the properties.
fn tests() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (_, text) in sources(&["tests", "src", "crates/hapax-cli/src", "crates/hapax-cli/tests"]) {
        for line in text.lines() {
            let line = line.trim_start().trim_start_matches("pub ").trim_start_matches("async ");
            if let Some(name) = line.strip_prefix("fn ") {
                let end = name.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(name.len());
                names.insert(name[..end].to_owned());
            }
        }
    }
    names
}

/// Every line of the list names a test that is there, or says that it is untested.
#[test]
fn every_line_of_the_security_list_names_its_test() {
    let (page, tests) = (read("docs/security.md"), tests());
    let list = page.split("\n## The list\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let lines: Vec<&str> = list.split("\n- ").skip(1).collect();
    assert!(lines.len() >= 15, "{} lines", lines.len());
    for line in lines {
        let named = line.split('`').skip(1).step_by(2);
        // A name of a test has a few words; a setting has a dot or a dash.
        let named: Vec<_> = named
            .map(|name| name.split("::").last().unwrap())
            .filter(|name| name.matches('_').count() >= 3 && !name.contains(['.', '-', '=', ' ', '/']))
            .collect();
        for name in &named {
            assert!(tests.contains(*name), "docs/security.md names {name}, which is not a test");
        }
        assert!(!named.is_empty() || line.contains("*untested*"), "no test, and it does not say so: {line}");
    }
}

/// A redirect would take a request, with what it carries, to an address that nobody configured.
#[test]
fn no_client_of_ours_follows_a_redirect() {
    let mut clients = 0;
    for (path, text) in sources(&["src", "crates/hapax-cli/src"]) {
        if !text.contains("reqwest") {
            continue;
        }
        for (at, _) in text.match_indices("Client::builder()") {
            clients += 1;
            let build = text[at..].find(';').map_or(&text[at..], |end| &text[at..at + end]);
            let none = "redirect(reqwest::redirect::Policy::none())";
            assert!(build.contains(none), "{}: {build}", path.display());
        }
        assert!(!text.contains("Client::new()"), "{}: a client that follows redirects", path.display());
    }
    assert!(clients >= 7, "only {clients} clients were found: this test no longer finds them");
}

/// The feature that compiles crash points and mutants in is none of the binary's, and no other feature implies it.
#[test]
fn no_build_for_production_has_crash_points_or_mutants() {
    let library: toml::Table = read("Cargo.toml").parse().unwrap();
    for (name, implies) in library["features"].as_table().unwrap() {
        let implies = implies.as_array().unwrap().iter().map(|one| one.as_str().unwrap());
        assert!(
            implies.clone().all(|one| one != "testing"),
            "{name} implies testing: {:?}",
            implies.collect::<Vec<_>>()
        );
    }
    let binary: toml::Table = read("crates/hapax-cli/Cargo.toml").parse().unwrap();
    for section in ["features", "dependencies"] {
        let section = &binary[section];
        assert!(
            !section.to_string().contains("testing"),
            "the binary can be built with `testing`: {section}"
        );
    }
    let macros = read("src/crash_point.rs");
    let without: Vec<_> = macros.split("#[cfg(not(feature = \"testing\"))]").skip(1).collect();
    assert_eq!(without.len(), 2, "one of each macro for other builds");
    assert!(without[0].contains("($name:literal) => {};"), "a crash point is nothing: {}", without[0]);
    assert!(without[1].contains("        false\n"), "a mutant never is: {}", without[1]);
    let dockerfile = read("deploy/Dockerfile");
    let build = dockerfile.lines().find(|line| line.contains("cargo build")).unwrap();
    assert!(
        build.contains("--locked") && !build.contains("all-features") && !build.contains("testing"),
        "{build}"
    );
}

/// Each dependency is one version from crates.io, with the checksum of what was looked at.
#[test]
fn the_lock_file_pins_every_dependency() {
    let lock: toml::Table = read("Cargo.lock").parse().unwrap();
    let packages = lock["package"].as_array().unwrap();
    let mut ours = BTreeSet::new();
    for package in packages {
        let name = package["name"].as_str().unwrap();
        match package.get("source").map(|source| source.as_str().unwrap()) {
            None => assert!(ours.insert(name), "{name} twice"),
            Some(source) => {
                assert_eq!(source, "registry+https://github.com/rust-lang/crates.io-index", "{name}");
                assert_eq!(package["checksum"].as_str().unwrap().len(), 64, "{name}");
            }
        }
    }
    assert_eq!(ours.into_iter().collect::<Vec<_>>(), ["hapax", "hapax-bench", "hapax-cli"]);
    assert!(packages.len() > 100, "{} packages", packages.len());
}

/// A core dump is the memory of a process, with every secret.
#[test]
fn what_is_deployed_writes_no_core_dump() {
    assert!(read("deploy/hapax.service").lines().any(|line| line == "LimitCORE=0"), "the unit");
    let compose = read("deploy/compose/compose.yaml");
    let ours = compose.split("x-hapax: &hapax").nth(1).unwrap().split("\n\n").next().unwrap();
    assert!(ours.contains("ulimits: { core: 0 }"), "the containers: {ours}");
}
