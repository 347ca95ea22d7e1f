//! Resolving: which of the places a setting may come from has the say.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use super::scoped::{is_variable, scope_of};
use super::table::{ATTEMPTS_OF_SCOPE, SETTINGS, Setting, did_you_mean, setting};
use crate::error::{Error, Result};

/// Variables that begin like these belong to the tools of this repository (tests, benches, servers), not to the configuration.
const TOOLS: [&str; 9] = [
    "HAPAX_TEST_",
    "HAPAX_BENCH_",
    "HAPAX_PORT_",
    "HAPAX_CACHE",
    "HAPAX_SERVICES_DIR",
    "HAPAX_CASES",
    "HAPAX_SEED",
    "HAPAX_BLESS",
    "HAPAX_CRASH_AT",
];
/// Names the configuration file itself.
const CONFIG_ENV: &str = "HAPAX_CONFIG";
/// Read if it is there and nothing else is named.
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
    /// A key of the configuration file.
    File(PathBuf, String),
    /// Nobody said anything.
    Default,
    /// Nobody said anything, and because of this it is not what it is else.
    Because(&'static str),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Flag(flag) => write!(f, "flag {flag}"),
            Place::Env(name) => write!(f, "environment {name}"),
            Place::EnvFile(name, path) => write!(f, "environment {name} ({})", path.display()),
            Place::File(path, key) => write!(f, "{} {key}", path.display()),
            Place::Default => f.write_str("default"),
            Place::Because(why) => write!(f, "default: {why}"),
        }
    }
}

/// One resolved setting.
#[derive(Debug, Clone)]
pub struct Value {
    /// Which.
    pub setting: &'static Setting,
    /// Where it came from.
    pub place: Place,
    text: String,
}

impl Value {
    /// The value in full; a secret stays one.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Says what nothing said comes to.
    pub(super) fn comes_to(&mut self, text: String, why: &'static str) {
        if self.place == Place::Default && self.text != text {
            (self.text, self.place) = (text, Place::Because(why));
        }
    }

    /// The value as it may be printed.
    pub fn shown(&self) -> String {
        shown(self.setting, &self.text)
    }

    /// What it means that nothing was said, if that is so and has no value of its own.
    pub fn unset(&self) -> Option<&'static str> {
        self.text.is_empty().then_some(self.setting.unset)
    }
}

fn shown(setting: &Setting, text: &str) -> String {
    if setting.secret { hide_password(text) } else { text.to_owned() }
}

/// A URL with its password replaced by `***`. Hides too much rather than too little: what is no URL at all, and what
/// stands before the last `@`, might be a password.
///
/// ```
/// use hapax::config::hide_password;
/// assert_eq!(hide_password("postgres://app:s3cret@db/orders"), "postgres://app:***@db/orders");
/// assert_eq!(hide_password("postgres://db/orders?password=s3cret"), "postgres://db/orders?password=***");
/// assert_eq!(hide_password("sqlite:ledger.db"), "sqlite:ledger.db");
/// assert_eq!(hide_password("host=db password=s3cret"), "***");
/// ```
pub fn hide_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once(':') else {
        return if url.is_empty() || url == "embedded" { url.to_owned() } else { "***".to_owned() };
    };
    if !scheme.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.')) {
        return "***".to_owned();
    }
    let Some(rest) = rest.strip_prefix("//") else { return url.to_owned() };
    let (user_info, place) = match rest.rsplit_once('@') {
        Some((user_info, place)) => (Some(user_info), place),
        None => (None, rest),
    };
    let mut out = format!("{scheme}://");
    if let Some(user_info) = user_info {
        match user_info.split_once(':') {
            Some((user, _)) => out.extend([user, ":***@"]),
            None => out.extend([user_info, "@"]),
        }
    }
    let (path, query) = place.split_once('?').unwrap_or((place, ""));
    out.push_str(path);
    for (at, pair) in query.split('&').filter(|pair| !pair.is_empty()).enumerate() {
        out.push(if at == 0 { '?' } else { '&' });
        match pair.split_once('=') {
            Some((name, _)) if name.to_ascii_lowercase().contains("pass") => {
                out.extend([name, "=***"]);
            }
            _ => out.push_str(pair),
        }
    }
    out
}

/// The places settings come from, strongest first: flags, `HAPAX_*`, the older variables, `hapax.toml`, defaults.
///
/// Nothing here reads the process's own environment but [`Sources::of_process`], so tests are not disturbed by it.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    flags: Vec<(&'static Setting, String, String)>,
    /// Of one scope each: scope, flag, value.
    pub(super) scoped_flags: Vec<(String, String, String)>,
    pub(super) env: Vec<(String, String)>,
    file: Option<(PathBuf, String)>,
}

impl Sources {
    /// No sources at all: defaults only.
    pub fn new() -> Self {
        Sources::default()
    }

    /// A flag, by the key (or an older name) of its setting. `flag` is what the user typed, for messages.
    pub fn flag(mut self, key: &str, flag: &str, value: impl Into<String>) -> Result<Self> {
        if let Some(scope) = scope_of(key) {
            self.scoped_flags.push((scope.to_owned(), flag.to_owned(), value.into()));
            return Ok(self);
        }
        self.flags.push((setting(key)?, flag.to_owned(), value.into()));
        Ok(self)
    }

    /// Environment variables; those that concern nobody here are ignored.
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

    /// A configuration file, which must be there.
    pub fn toml_file(self, path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| Error::Config(format!("{} cannot be read: {e}", path.display())))?;
        Ok(self.toml(path, text))
    }

    /// This process's environment, and the configuration file: the one given, else the one `HAPAX_CONFIG` names, else
    /// `hapax.toml` here if there is one.
    pub fn of_process(self, config: Option<&Path>) -> Result<Self> {
        let mut vars = Vec::new();
        for (name, value) in std::env::vars_os() {
            let Ok(name) = name.into_string() else { continue };
            match value.into_string() {
                Ok(value) => vars.push((name, value)),
                Err(_) if is_ours(&name) => {
                    return Err(Error::Config(format!("the value of {name} is not UTF-8")));
                }
                Err(_) => {}
            }
        }
        let named = vars.iter().find(|(name, _)| name == CONFIG_ENV).map(|(_, value)| PathBuf::from(value));
        let sources = self.env(vars);
        match config.map(Path::to_owned).or(named) {
            Some(path) => sources.toml_file(&path),
            None if Path::new(CONFIG_FILE).exists() => sources.toml_file(Path::new(CONFIG_FILE)),
            None => Ok(sources),
        }
    }

    /// Resolves every setting of the table, in its order.
    pub(super) fn resolve(&self) -> Result<Vec<Value>> {
        self.check_env()?;
        let file = self.file_values()?;
        SETTINGS.iter().map(|setting| self.resolve_one(setting, &file)).collect()
    }

    /// Every setting as far as it can be told, and what is wrong with the rest: for whoever looks for a mistake.
    pub fn values(&self) -> (Vec<Value>, Vec<Error>) {
        let mut problems: Vec<_> = self.check_env().err().into_iter().collect();
        let file = self.file_values().unwrap_or_else(|error| {
            problems.push(error);
            BTreeMap::new()
        });
        let mut values = Vec::new();
        for setting in SETTINGS {
            let found = self.resolve_one(setting, &file).unwrap_or_else(|error| {
                problems.push(error);
                Value { setting, place: Place::Default, text: setting.default.to_owned() }
            });
            values.push(found);
        }
        (values, problems)
    }

    fn resolve_one(&self, setting: &'static Setting, file: &BTreeMap<&'static str, Value>) -> Result<Value> {
        let flags = self.flags.iter().filter(|(s, ..)| s.key == setting.key);
        let flags = flags.map(|(_, flag, text)| value(setting, Place::Flag(flag.clone()), text));
        if let Some(value) = agreed(flags)? {
            return Ok(value);
        }
        // Both kinds of variables are looked at even if one has the say: a difference is a mistake somewhere.
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

    /// A misspelt variable would otherwise be a setting that silently does nothing.
    fn check_env(&self) -> Result<()> {
        for (name, _) in self.env.iter().filter(|(name, _)| is_ours(name)) {
            let known = SETTINGS.iter().any(|setting| {
                let own = setting.env();
                *name == own
                    || setting.older_env.contains(&name.as_str())
                    || (setting.secret && name.strip_suffix("_FILE") == Some(&own))
            });
            if !known && !is_variable(name) {
                let hint = if name.ends_with("_FILE") { "; only secrets come from *_FILE" } else { "" };
                let names: Vec<_> = SETTINGS
                    .iter()
                    .flat_map(|s| {
                        std::iter::once(s.env()).chain(s.older_env.iter().map(|&older| older.to_owned()))
                    })
                    .collect();
                let near = did_you_mean(name, names.iter().map(String::as_str));
                return Err(Error::Config(format!(
                    "the environment variable {name} is unknown{hint}; {near}`hapax config show` lists them all"
                )));
            }
        }
        Ok(())
    }

    fn file_values(&self) -> Result<BTreeMap<&'static str, Value>> {
        let Some((path, text)) = &self.file else { return Ok(BTreeMap::new()) };
        let table = parsed(path, text)?;
        let mut flat = Vec::new();
        flatten("", &table, &mut flat);
        let mut values: BTreeMap<&'static str, Value> = BTreeMap::new();
        for (key, raw) in flat {
            if scope_of(&key).is_some() {
                continue; // of one scope: `scoped_file` reads it
            }
            let found = setting(&key).map_err(|e| Error::Config(format!("{}: {e}", path.display())))?;
            let text = scalar(raw).ok_or_else(|| no_scalar(path, &key, raw, found))?;
            let new = value(found, Place::File(path.clone(), key), &text)?;
            let both = values.remove(found.key).into_iter().chain([new]).map(Ok);
            if let Some(value) = agreed(both)? {
                values.insert(found.key, value);
            }
        }
        Ok(values)
    }
}

impl Sources {
    /// What the configuration file says of single scopes: scope, place, value.
    pub(super) fn scoped_file(&self) -> Result<Vec<(String, Place, String)>> {
        let Some((path, text)) = &self.file else { return Ok(Vec::new()) };
        let table = parsed(path, text)?;
        let mut flat = Vec::new();
        flatten("", &table, &mut flat);
        let mut found = Vec::new();
        for (key, raw) in flat {
            let Some(scope) = scope_of(&key) else { continue };
            let text = scalar(raw).ok_or_else(|| no_scalar(path, &key, raw, &ATTEMPTS_OF_SCOPE))?;
            found.push((scope.to_owned(), Place::File(path.clone(), key.clone()), text));
        }
        Ok(found)
    }
}

/// Reads a file; a mistake is told with its line.
fn parsed(path: &Path, text: &str) -> Result<toml::Table> {
    text.parse().map_err(|error: toml::de::Error| {
        let before = error.span().and_then(|span| text.get(..span.start));
        let line =
            before.map(|before| format!(" line {}", before.matches('\n').count() + 1)).unwrap_or_default();
        Error::Config(format!("{}{line}: {}", path.display(), error.message()))
    })
}

fn scalar(raw: &toml::Value) -> Option<String> {
    match raw {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Boolean(truth) => Some(truth.to_string()),
        _ => None,
    }
}

fn no_scalar(path: &Path, key: &str, raw: &toml::Value, setting: &Setting) -> Error {
    let range = setting.kind.range();
    Error::Config(format!("{}: {key} is a {}; it takes {range}", path.display(), raw.type_str()))
}

fn is_ours(name: &str) -> bool {
    if name.starts_with("PROCESSED_EVENT_") {
        return true;
    }
    name.starts_with("HAPAX_") && !TOOLS.iter().any(|tool| name.starts_with(tool)) && name != CONFIG_ENV
}

fn flatten<'t>(prefix: &str, table: &'t toml::Table, out: &mut Vec<(String, &'t toml::Value)>) {
    for (key, value) in table {
        let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            toml::Value::Table(inner) => flatten(&key, inner, out),
            value => out.push((key, value)),
        }
    }
}

pub(super) fn value(setting: &'static Setting, place: Place, text: &str) -> Result<Value> {
    match setting.kind.normal(text) {
        Some(text) => Ok(Value { setting, place, text }),
        None => Err(Error::Config(format!(
            "{place} = {:?} is not allowed: {} takes {}",
            shown(setting, text),
            setting.key,
            setting.kind.range()
        ))),
    }
}

/// The first of several values, which must all be the same.
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
