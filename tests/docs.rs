//! The documents say what is there.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::path::Path;

use hapax::Error;

#[test]
fn every_error_has_a_page() {
    let pages = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/errors");
    let codes: Vec<&str> = Error::CODES.into_iter().chain(hapax::keyed::PROBLEMS).collect();
    for code in &codes {
        let page = std::fs::read_to_string(pages.join(format!("{code}.md"))).unwrap_or_default();
        assert!(
            page.starts_with(&format!("# `{code}`")),
            "docs/errors/{code}.md is missing or has another title"
        );
    }
    assert_eq!(std::fs::read_dir(&pages).unwrap().count(), codes.len(), "a page without an error");
    // The list is whole: a code that is not in it would have no page.
    let sample = [
        Error::Config(String::new()),
        Error::Schema(String::new()),
        Error::Unsupported(String::new()),
        Error::NotBuiltIn { what: "", feature: "" },
        Error::Corrupt(String::new()),
        Error::NotFound(String::new()),
        Error::invalid("x", ""),
        Error::unavailable("x", "y"),
        Error::Contended { what: String::new(), source: None },
        Error::WeekMissing { monday: String::new() },
        Error::Fenced { what: String::new() },
        Error::Conflict { expected: String::new(), actual: String::new() },
        Error::Refused { what: String::new(), source: None },
    ];
    assert!(sample.iter().all(|error| Error::CODES.contains(&error.code())));
}

#[test]
fn decisions_are_numbered_without_gaps() {
    let pages = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/decisions");
    let mut numbers: Vec<u32> = std::fs::read_dir(pages)
        .unwrap()
        .map(|page| page.unwrap().file_name().to_string_lossy()[..4].parse().unwrap())
        .collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (1..=numbers.len() as u32).collect::<Vec<_>>());
}
