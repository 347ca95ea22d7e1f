//! Resolves settings: decides which source of a value wins.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use super::file::{self, Entry};
use super::kind::Kind;
use super::scoped::{Scoped, is_variable, scope_of};
use super::table::{SETTINGS, Setting, find, meant_variable};
use crate::error::{Error, Result};

/// Variables of this repository's tools (tests, benches, servers), which are not settings. A name
/// that ends in `_` is a prefix.
const TOOLS: [&str; 18] = [
    "HAPAX_TEST_",
    "HAPAX_BENCH_",
    "HAPAX_PORT_",
    "HAPAX_CRASH_",
    "HAPAX_CACHE",
    "HAPAX_SERVICES_",
    "HAPAX_README_RELEASE",
    "HAPAX_TESTS_AT_ONCE",
    "HAPAX_FRESH",
    "HAPAX_RACES",
    "HAPAX_RACE_DATABASES",
    "HAPAX_CASES",
    "HAPAX_SEED",
    "HAPAX_BLESS",
    "HAPAX_MUTANT",
    "HAPAX_CHILD",
    "HAPAX_FILE",
    CONFIG_ENV,
];
/// Names the configuration file.
const CONFIG_ENV: &str = "HAPAX_CONFIG";
/// The flag that sets any setting.
const SET: &str = "--set";
/// Read if it exists and no other file is named.
const CONFIG_FILE: &str = "hapax.toml";

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// A command-line flag.
    Flag(String),
    /// An environment variable.
    Env(String),
    /// A file that an environment variable names.
    EnvFile(String, PathBuf),
    /// A key of the configuration file, and its line.
    File(PathBuf, String, usize),
    /// Not set.
    Default,
    /// Not set, and for this reason not the usual default.
    Because(&'static str),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Flag(flag) => write!(f, "flag {flag}"),
            Place::Env(name) => write!(f, "environment {name}"),
            Place::EnvFile(name, path) => write!(f, "environment {name} ({})", path.display()),
            Place::File(path, key, _) => write!(f, "{} {key}", path.display()),
            Place::Default => f.write_str("default"),
            Place::Because(reason) => write!(f, "default: {reason}"),
        }
    }
}

impl Place {
    /// How a sentence about the value of a key begins: as it was given.
    pub(super) fn said(&self, key: &str) -> String {
        match self {
            Place::Flag(flag) if flag == SET => format!("{SET} {key}"),
            Place::File(path, key, line) => format!("{} line {line}: {key}", path.display()),
            place => place.to_string(),
        }
    }
}

/// One resolved setting.
#[derive(Debug, Clone)]
pub struct Value {
    /// Which setting.
    pub setting: &'static Setting,
    /// Where it came from.
    pub place: Place,
    text: String,
}

impl Value {
    /// The full value. Do not print a secret; use [`shown`](Value::shown).
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Gives an unset setting the value that follows from other settings.
    fn comes_to(&mut self, text: String, reason: &'static str) {
        if self.text == text {
            return;
        }
        self.text = text;
        if self.place == Place::Default {
            self.place = Place::Because(reason);
        }
    }

    /// The value as it may be printed: secrets hidden.
    pub fn shown(&self) -> String {
        shown(self.setting, &self.text)
    }

    /// What it means that the setting is unset, if it is.
    pub fn unset(&self) -> Option<&'static str> {
        self.text.is_empty().then_some(self.setting.unset)
    }
}

pub(super) fn shown(setting: &Setting, text: &str) -> String {
    if !setting.secret {
        return text.to_owned();
    }
    match setting.kind.normal(text) {
        // Each is a URL: none is the end of another's password.
        Some(urls) if matches!(setting.kind, Kind::Urls(_)) => {
            urls.split(' ').map(super::hide_password).collect::<Vec<_>>().join(" ")
        }
        _ => super::hide_password(text),
    }
}

/// The sources of settings, strongest first: flags, `HAPAX_*`, the older variables, `hapax.toml`,
/// defaults.
///
/// Only [`Sources::of_process`] reads the process's environment, so that it does not affect tests.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    flags: Vec<(&'static Setting, String, String)>,
    /// Each for one scope: scope, flag, value.
    pub(super) scoped_flags: Vec<(String, String, String)>,
    pub(super) env: Vec<(String, String)>,
    file: Option<(PathBuf, String)>,
    /// Errors of a source itself: a flag for no setting, a file that cannot be read.
    problems: Vec<String>,
}

impl Sources {
    /// No sources: defaults only.
    pub fn new() -> Self {
        Sources::default()
    }

    /// A flag, by the key (or an older name) of its setting. `flag` is what the user typed, for
    /// messages. If there is no such setting, [`Config::load`](super::Config::load) fails.
    #[must_use]
    pub fn flag(mut self, key: &str, flag: &str, value: impl Into<String>) -> Self {
        if let Some(scope) = scope_of(key) {
            self.scoped_flags.push((scope.to_owned(), flag.to_owned(), value.into()));
            return self;
        }
        match find(key) {
            Ok(setting) => self.flags.push((setting, flag.to_owned(), value.into())),
            Err(problem) => self.problems.push(problem),
        }
        self
    }

    /// A mistake in what the user typed, to be reported with the other problems.
    #[must_use]
    pub fn problem(mut self, message: impl Into<String>) -> Self {
        self.problems.push(message.into());
        self
    }

    /// Environment variables; unrelated ones are ignored.
    #[must_use]
    pub fn env<N: Into<String>, V: Into<String>>(mut self, vars: impl IntoIterator<Item = (N, V)>) -> Self {
        self.env.extend(vars.into_iter().map(|(name, value)| (name.into(), value.into())));
        self
    }

    /// The text of a configuration file, and its name for messages.
    #[must_use]
    pub fn toml(mut self, path: impl Into<PathBuf>, text: impl Into<String>) -> Self {
        self.file = Some((path.into(), text.into()));
        self
    }

    /// A configuration file, which must exist.
    #[must_use]
    pub fn toml_file(self, path: &Path) -> Self {
        match std::fs::read_to_string(path) {
            Ok(text) => self.toml(path, text),
            Err(e) => self.problem(format!("{} cannot be read: {e}", path.display())),
        }
    }

    /// This process's environment, and the configuration file: the one given, else the one that
    /// `HAPAX_CONFIG` names, else `hapax.toml` in the current directory if it exists.
    #[must_use]
    pub fn of_process(mut self, config: Option<&Path>) -> Self {
        let mut vars = Vec::new();
        for (name, value) in std::env::vars_os() {
            let Ok(name) = name.into_string() else { continue };
            match value.into_string() {
                Ok(value) => vars.push((name, value)),
                Err(_) if is_ours(&name) => {
                    self.problems.push(format!("the value of {name} is not UTF-8"));
                }
                Err(_) => {}
            }
        }
        let named = vars.iter().find(|(name, _)| name == CONFIG_ENV).map(|(_, value)| PathBuf::from(value));
        let sources = self.env(vars);
        match config.map(Path::to_owned).or(named) {
            Some(path) => sources.toml_file(&path),
            None if Path::new(CONFIG_FILE).exists() => sources.toml_file(Path::new(CONFIG_FILE)),
            None => sources,
        }
    }

    /// Resolves every setting of the table, in order, or returns the first problem.
    pub(super) fn resolve(&self) -> Result<Vec<Value>> {
        let (values, problems) = self.values();
        problems.into_iter().next().map_or(Ok(values), Err)
    }

    /// Every setting, as far as it can be resolved, and all problems, for diagnosis.
    pub fn values(&self) -> (Vec<Value>, Vec<Error>) {
        let mut problems: Vec<_> = self.problems.iter().cloned().map(Error::Config).collect();
        problems.extend(self.unknown_variables());
        let entries = self.entries().unwrap_or_else(|error| {
            problems.push(error);
            Vec::new()
        });
        let file = file_values(&entries, &mut problems);
        let mut values = Vec::new();
        for setting in SETTINGS {
            let found = self.resolve_one(setting, &file).unwrap_or_else(|error| {
                problems.push(error);
                let place = Place::Because("what was given cannot be used");
                Value { setting, place, text: setting.default.to_owned() }
            });
            values.push(found);
        }
        problems.extend(Scoped::load(self, &entries).err());
        derive(&mut values);
        (values, problems)
    }

    fn resolve_one(&self, setting: &'static Setting, file: &BTreeMap<&'static str, Value>) -> Result<Value> {
        let flags = self.flags.iter().filter(|(s, ..)| s.key == setting.key);
        let flags = flags.map(|(_, flag, text)| value(setting, Place::Flag(flag.clone()), text));
        if let Some(value) = agreed(flags)? {
            return Ok(value);
        }
        // Both kinds of variables are checked even though one would win: a difference is a mistake.
        let own = self.env_values(setting, &setting.env());
        let older = setting.older_env.iter().flat_map(|name| self.env_values(setting, name));
        if let Some(value) = agreed(own.into_iter().chain(older))? {
            return Ok(value);
        }
        if let Some(value) = file.get(setting.key) {
            return Ok(value.clone());
        }
        value(setting, Place::Default, setting.default)
    }

    /// The values of one variable and, for a secret, of the file that `…_FILE` names.
    fn env_values(&self, setting: &'static Setting, name: &str) -> Vec<Result<Value>> {
        let get = |name: &str| self.env.iter().rfind(|(n, _)| n == name).map(|(_, value)| value);
        let mut values = Vec::new();
        if let Some(text) = get(name) {
            values.push(value(setting, Place::Env(name.to_owned()), text));
        }
        let file_name = format!("{name}_FILE");
        if setting.secret
            && let Some(path) = get(&file_name)
        {
            let read = std::fs::read_to_string(path)
                .map_err(|e| Error::Config(format!("{file_name} names {path}, which cannot be read: {e}")));
            let place = Place::EnvFile(file_name, PathBuf::from(path));
            values.push(read.and_then(|text| value(setting, place, text.trim_end_matches(['\r', '\n']))));
        }
        values
    }

    /// Reports unknown variables: a misspelt one would silently do nothing.
    fn unknown_variables(&self) -> impl Iterator<Item = Error> {
        let known = |name: &str| {
            SETTINGS.iter().any(|setting| {
                let own = setting.env();
                let is = |name: &str| name == own || setting.older_env.contains(&name);
                is(name) || (setting.secret && name.strip_suffix("_FILE").is_some_and(is))
            })
        };
        let names = self.env.iter().map(|(name, _)| name).filter(|name| is_ours(name));
        names.filter(move |name| !known(name) && !is_variable(name)).map(|name| {
            let hint = if name.ends_with("_FILE") { "; only secrets come from *_FILE" } else { "" };
            let meant = meant_variable(name);
            Error::Config(format!(
                "the environment variable {name} is unknown{hint}; {meant}`hapax config show` lists them all"
            ))
        })
    }

    /// The keys of the configuration file.
    pub(super) fn entries(&self) -> Result<Vec<Entry>> {
        self.file.as_ref().map_or(Ok(Vec::new()), |(path, text)| file::entries(path, text))
    }
}

/// The values of the configuration file, except those for single scopes, which `Scoped` reads.
fn file_values(entries: &[Entry], problems: &mut Vec<Error>) -> BTreeMap<&'static str, Value> {
    let mut values: BTreeMap<&'static str, Value> = BTreeMap::new();
    for entry in entries.iter().filter(|entry| scope_of(&entry.key).is_none()) {
        let new = find(&entry.key)
            .map_err(|problem| entry.problem(&problem))
            .and_then(|setting| entry.value(setting));
        let added = new.and_then(|new| {
            let key = new.setting.key;
            let both = values.get(key).cloned().into_iter().chain([new]).map(Ok);
            if let Some(value) = agreed(both)? {
                values.insert(key, value);
            }
            Ok(())
        });
        problems.extend(added.err());
    }
    values
}

/// Gives unset settings the values that follow from other settings.
fn derive(values: &mut [Value]) {
    let text = |key: &str| {
        let found = values.iter().find(|value| value.setting.key == key);
        found.map(|value| value.text.clone()).unwrap_or_default()
    };
    let data = PathBuf::from(text("data.dir"));
    let in_data = |file: &str| format!("sqlite:{}", data.join(file).display());
    let postgres = !text("journal.allocator_url").is_empty() || text("ledger.url").starts_with("postgres");
    let allocator = if postgres { "postgres" } else { "s3" };
    let journal =
        Some(text("journal.url")).filter(|url| !url.is_empty()).unwrap_or_else(|| in_data("journal.db"));
    let journal_is_file = journal.starts_with("sqlite:");
    let (keys, keys_because) = if journal.starts_with("sqlite:") || journal.starts_with("postgres") {
        (journal, "the journal's database")
    } else {
        (in_data("server.db"), "in data.dir")
    };
    let embedded = journal_is_file && text("bus.url").starts_with("embedded");
    let reads = if embedded { in_data("reads.db") } else { String::new() };
    let derived = [
        ("journal.allocator", allocator.to_owned(), "no PostgreSQL is named"),
        ("ledger.url", in_data("ledger.db"), "in data.dir"),
        ("journal.url", in_data("journal.db"), "in data.dir"),
        ("keys.url", keys, keys_because),
        ("analytics.url", reads, "in data.dir"),
        ("relay.flush_max", text("relay.batch_max"), "as relay.batch_max"),
    ];
    for (key, text, reason) in derived {
        let unset = |value: &&mut Value| match key {
            "journal.allocator" => value.place == Place::Default,
            "relay.flush_max" => value.text == "0",
            _ => value.text.is_empty() && !text.is_empty(),
        };
        if let Some(value) = values.iter_mut().find(|value| value.setting.key == key).filter(unset) {
            value.comes_to(text, reason);
        }
    }
}

fn is_ours(name: &str) -> bool {
    if name.starts_with("PROCESSED_EVENT_") {
        return true;
    }
    let of_tools = |tool: &str| name == tool || (tool.ends_with('_') && name.starts_with(tool));
    name.starts_with("HAPAX_") && !TOOLS.into_iter().any(of_tools)
}

pub(super) fn value(setting: &'static Setting, place: Place, text: &str) -> Result<Value> {
    match setting.kind.normal(text) {
        Some(text) => Ok(Value { setting, place, text }),
        None => Err(not_allowed(&place.said(setting.key), setting, text)),
    }
}

/// The error for a value that a setting does not accept; `said` names its source.
pub(super) fn not_allowed(said: &str, setting: &Setting, text: &str) -> Error {
    let range = setting.kind.range();
    // What names the key already does not repeat it.
    let key = if said.ends_with(setting.key) { "it" } else { setting.key };
    let is = |text: &str| if said.starts_with(SET) { format!("={text}") } else { format!(" = {text:?}") };
    if let Some(url) = setting.kind.url_of_file(text) {
        let is = is(text);
        return Error::Config(format!("{said}{is} is not allowed: did you mean {url}? {key} takes {range}"));
    }
    let shown = match shown(setting, text).as_str() {
        "***" => " (not shown: it may be a password)".to_owned(),
        shown => is(shown),
    };
    Error::Config(format!("{said}{shown} is not allowed: {key} takes {range}"))
}

/// The first of several values, which must all be equal.
pub(super) fn agreed(values: impl Iterator<Item = Result<Value>>) -> Result<Option<Value>> {
    let mut first: Option<Value> = None;
    for value in values {
        let value = value?;
        match &first {
            None => first = Some(value),
            Some(before) if before.text == value.text => {}
            Some(before) => {
                return Err(Error::Config(format!(
                    "{} = {:?} and {} = {:?} disagree about {}; remove one",
                    before.place,
                    before.shown(),
                    value.place,
                    value.shown(),
                    value.setting.key
                )));
            }
        }
    }
    Ok(first)
}
