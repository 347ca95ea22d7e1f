//! The documents say what is there.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use hapax::Error;

#[test]
fn every_error_has_a_page() {
    let pages = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/errors");
    let codes: Vec<&str> =
        Error::CODES.into_iter().chain(hapax::keyed::PROBLEMS).chain(hapax::problem::CODES).collect();
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

/// The modules that everything is made of.
const NAMES: [&str; 8] = ["clock", "error", "event", "exact", "id", "secret", "words", "crash_point"];

/// The table in ARCHITECTURE.md: what a module (or one file of it) may import.
fn rooms() -> BTreeMap<String, BTreeSet<String>> {
    let page =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("ARCHITECTURE.md")).unwrap();
    let section = page.split("## Rooms").nth(1).unwrap().split("\n## ").next().unwrap();
    let quoted = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let mut rooms = BTreeMap::new();
    for row in section.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> = row.split('|').collect();
        for module in quoted(cells[1]) {
            assert!(rooms.insert(module, quoted(cells[2]).into_iter().collect()).is_none(), "twice: {row}");
        }
    }
    rooms.extend(NAMES.map(|name| (name.to_owned(), BTreeSet::new())));
    rooms
}

/// A module that imports itself through others, if one does: the path.
fn cycle(rooms: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    fn walk(
        rooms: &BTreeMap<String, BTreeSet<String>>,
        path: &mut Vec<String>,
        over: &mut BTreeSet<String>,
    ) -> Option<Vec<String>> {
        let at = path.last()?.clone();
        for next in rooms.get(&at).into_iter().flatten() {
            if let Some(start) = path.iter().position(|room| room == next) {
                return Some(path[start..].to_vec());
            }
            if over.contains(next) {
                continue;
            }
            path.push(next.clone());
            if let Some(cycle) = walk(rooms, path, over) {
                return Some(cycle);
            }
            path.pop();
        }
        over.insert(at);
        None
    }
    let mut over = BTreeSet::new();
    rooms.keys().find_map(|room| walk(rooms, &mut vec![room.clone()], &mut over))
}

/// T552: dependencies point one way. The rows of single files are the exceptions, and lead to these only.
#[test]
fn t552_no_two_rooms_import_each_other() {
    let (files, rooms): (BTreeMap<_, _>, BTreeMap<_, _>) =
        rooms().into_iter().partition(|(name, _)| name.contains('/'));
    assert_eq!(cycle(&rooms), None);
    let allowed = ["backend", "testing"].map(str::to_owned);
    let others: Vec<_> = files.values().flatten().filter(|import| !allowed.contains(*import)).collect();
    assert!(others.is_empty(), "rows of single files lead to {others:?}");
    let pair = [("a", "b"), ("b", "a"), ("c", "a")];
    let pair = pair.map(|(from, to)| (from.to_owned(), BTreeSet::from([to.to_owned()])));
    assert_eq!(cycle(&pair.into()), Some(vec!["a".to_owned(), "b".to_owned()]));
}

/// The code of every source file, by its path in `src`: without comments and unit tests.
fn sources() -> Vec<(String, String)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut files, mut dirs) = (Vec::new(), vec![src.clone()]);
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
                continue;
            }
            let name = path.strip_prefix(&src).unwrap().to_str().unwrap().replace('\\', "/");
            if name.ends_with("tests.rs") || path.extension().is_none_or(|end| end != "rs") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap().lines();
            let code = code.map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n");
            let code = code.replace("$crate::", ""); // a macro is expanded where it is used
            files.push((name, code));
        }
    }
    files
}

/// The walk of a Kafka record says how each run of a delivery can end, and no ending more.
#[test]
fn the_walk_names_every_ending() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = std::fs::read_to_string(root.join("src/consumer/arrival.rs")).unwrap();
    let (_, variants) = source.split_once("pub enum Ending {").expect("the endings");
    let (variants, _) = variants.split_once("\n}").unwrap();
    let variants = variants.lines().map(str::trim).filter(|line| line.starts_with(char::is_uppercase));
    let variants: BTreeSet<_> = variants.map(|line| line.trim_end_matches(',')).collect();
    let variants: BTreeSet<_> = variants.into_iter().map(|line| line.split('(').next().unwrap()).collect();
    let page = std::fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let (_, walk) = page.split_once("## A Kafka record, from the bus to the commit").expect("the walk");
    let (walk, _) = walk.split_once("\n## ").unwrap();
    let named: BTreeSet<_> =
        walk.lines().filter_map(|line| line.strip_prefix("   - `")?.split('`').next()).collect();
    assert_eq!(named, variants);
}

/// CONTRIBUTING.md has a row for each program of tests, and says how many there are.
#[test]
fn every_program_of_tests_is_listed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("CONTRIBUTING.md")).unwrap();
    let mut count = 0;
    for folder in ["tests", "crates/hapax-cli/tests"] {
        for entry in std::fs::read_dir(root.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if path.is_dir() && !path.join("main.rs").exists() {
                continue; // what the programs share
            }
            let slash = if path.is_dir() { "/" } else { "" };
            assert!(page.contains(&format!("`{folder}/{name}{slash}`")), "no row for {folder}/{name}");
            count += 1;
        }
    }
    assert!(page.contains(&format!("There are {count} programs of tests")), "there are {count}");
}

/// The promise of the README: a newcomer reads it in one go.
#[test]
fn the_readme_is_short() {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let lines = page.lines().count();
    assert!(lines < 150, "README.md has {lines} lines");
}

#[test]
fn t552_every_room_imports_only_what_it_may() {
    let rooms = rooms();
    let of = |name: &str| rooms.get(name).cloned().unwrap_or_default();
    let mut used = BTreeSet::new();
    for (file, code) in sources() {
        let room = file.split('/').next().unwrap().trim_end_matches(".rs");
        if ["lib", "testing"].contains(&room) {
            continue; // these may import anything
        }
        assert!(rooms.contains_key(room), "src/{file}: ARCHITECTURE.md (Rooms) has no row for `{room}`");
        assert!(
            !code.contains("use crate::{"),
            "src/{file}: one `use` per module, so that this test can read it"
        );
        let imports = code.split("crate::").skip(1).map(|rest| {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            &rest[..end]
        });
        for import in imports.filter(|import| import.starts_with(|c: char| c.is_ascii_lowercase())) {
            if import == room || NAMES.contains(&import) {
                continue;
            }
            let allowed = of(room).contains(import) || of(&file).contains(import);
            assert!(allowed, "src/{file} imports `{import}`, which ARCHITECTURE.md (Rooms) does not allow");
            used.extend([(room.to_owned(), import.to_owned()), (file.clone(), import.to_owned())]);
        }
    }
    for (room, imports) in &rooms {
        for import in imports {
            assert!(used.contains(&(room.clone(), import.clone())), "`{room}` does not import `{import}`");
        }
    }
}

#[test]
fn only_backends_name_a_driver() {
    for (file, code) in sources() {
        let may = ["backend/", "testing/", "guard/sqlite.rs", "guard/postgres.rs"];
        if may.iter().any(|place| file.starts_with(place)) {
            continue;
        }
        for driver in ["sqlx", "rusqlite", "redis", "object_store"] {
            let path = format!("{driver}::");
            let mut before = code.match_indices(&path).map(|(at, _)| code[..at].chars().next_back());
            let named = before.any(|c| !c.is_some_and(|c| c == ':' || c == '_' || c.is_ascii_alphanumeric()));
            assert!(!named, "src/{file} names {driver}");
        }
    }
}

/// Each view of the operator's page is shown in light and in dark, by pictures that do not make a clone large.
#[test]
fn pictures_of_the_page_are_there_and_small() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/page");
    let page = std::fs::read_to_string(folder.with_extension("md")).unwrap();
    let (mut bytes, mut wanted) = (0, BTreeSet::new());
    for view in ["overview", "event", "dead", "aggregates", "retention", "doctor"] {
        for scheme in ["light", "dark"] {
            let name = format!("{view}-{scheme}.webp");
            let picture = std::fs::read(folder.join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(picture.starts_with(b"RIFF") && picture[8..].starts_with(b"WEBP"), "{name} is not WebP");
            assert!(picture.len() <= 100_000, "{name} has {} bytes", picture.len());
            assert!(page.contains(&format!("(page/{name})")), "docs/page.md does not show {name}");
            bytes += picture.len();
            wanted.insert(name);
        }
    }
    assert!(bytes < 1_000_000, "{bytes} bytes of pictures");
    let there = std::fs::read_dir(&folder).unwrap();
    let there: BTreeSet<_> = there.map(|one| one.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(there, wanted);
}

/// T426: the page and the commands hide the same characters.
#[test]
fn t426_the_page_hides_what_the_commands_hide() {
    let text =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("ui/src/text.tsx")).unwrap();
    let (_, class) = text.split_once("const HIDDEN = /[").expect("text.tsx says what is hidden");
    let (class, _) = class.split_once("]/gu;").expect("it is a class of characters");
    let number = |text: &str| {
        let hex = text.strip_prefix("u{").and_then(|text| text.strip_suffix('}')).expect(text);
        u32::from_str_radix(hex, 16).unwrap()
    };
    let mut hidden = BTreeSet::new();
    let ranges = class.replace("}-\\u{", "}-u{");
    for range in ranges.split('\\').filter(|range| !range.is_empty()) {
        let (from, to) = range
            .split_once("}-")
            .map_or((range, range), |(_, to)| (&range[..=range.find('}').unwrap()], to));
        hidden.extend(number(from)..=number(to));
    }
    for c in '\0'..=char::MAX {
        let shown = hapax::id::Visible(c.encode_utf8(&mut [0; 4])).to_string();
        let is_hidden = shown.chars().ne([c]);
        assert_eq!(hidden.contains(&u32::from(c)), is_hidden, "U+{:04X}", u32::from(c));
    }
}
