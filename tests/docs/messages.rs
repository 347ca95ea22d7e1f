//! What the compiler says about a wrong handler.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The library that cargo built for this program: the newest one beside it. An older one is of other
/// features or another source.
fn library(beside: &Path) -> PathBuf {
    let is_hapax = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libhapax-") && path.extension().is_some_and(|end| end == "rlib")
    };
    let built = std::fs::read_dir(beside).unwrap().map(|entry| entry.unwrap().path()).filter(is_hapax);
    built.max_by_key(|path| path.metadata().unwrap().modified().unwrap()).expect("cargo built the library")
}

/// T551: each wrong handler gets a sentence of hapax's, and each right one compiles.
#[test]
fn t551_the_compiler_says_in_our_words_what_a_handler_must_be() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = root.join("tests/docs/messages/wrong_handlers.rs");
    let program = std::env::current_exe().unwrap();
    let dependencies = program.parent().unwrap();
    let out = tempfile::tempdir().unwrap();
    // The compiler that built the library: only that one reads it.
    let rustc = Path::new(env!("CARGO")).with_file_name(format!("rustc{}", std::env::consts::EXE_SUFFIX));
    let rustc = if rustc.exists() { rustc } else { "rustc".into() };
    let compiled = Command::new(rustc)
        .args(["--edition", "2024", "--crate-type", "lib", "--emit", "metadata", "--error-format", "json"])
        .arg("--extern")
        .arg(format!("hapax={}", library(dependencies).display()))
        .arg("-L")
        .arg(format!("dependency={}", dependencies.display()))
        .arg("--out-dir")
        .arg(out.path())
        .arg(&source)
        .output()
        .expect("rustc is there");

    let mut errors: BTreeMap<u64, String> = BTreeMap::new();
    for line in String::from_utf8(compiled.stderr).unwrap().lines() {
        let said: serde_json::Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        let spans = said["spans"].as_array().unwrap();
        if said["level"] != "error" || spans.is_empty() && said["code"].is_null() {
            continue; // a warning, or the number of errors
        }
        let at = spans.iter().find(|span| span["is_primary"] == true);
        let at = at.and_then(|span| span["line_start"].as_u64()).unwrap_or_default();
        errors.entry(at).or_default().push_str(said["rendered"].as_str().unwrap());
    }
    let text = std::fs::read_to_string(&source).unwrap();
    let wanted: BTreeMap<u64, &str> = (1..)
        .zip(text.lines())
        .filter_map(|(number, line)| Some((number, line.split_once(" //~ ")?.1)))
        .collect();
    assert!(wanted.len() > 15, "{wanted:?}");
    let others = errors.iter().filter(|(line, _)| !wanted.contains_key(line));
    let others: Vec<_> = others.map(|(_, said)| said.as_str()).collect();
    assert!(others.is_empty(), "errors on other lines:\n{}", others.concat());
    for (line, sentence) in &wanted {
        let said = errors.get(line).unwrap_or_else(|| panic!("line {line} compiles"));
        assert!(said.contains(sentence), "line {line}: {sentence:?} is not in\n{said}");
    }
}
