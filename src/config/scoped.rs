//! `consumer.<scope>.max_attempts`: the one setting that each scope can override.

use super::file::Entry;
use super::load::{Place, Sources, Value, agreed, not_allowed, value};
use super::table::{ATTEMPTS_OF_SCOPE, Setting};
use crate::error::Result;
use crate::id::Scope;

/// Scopes with a variable of their own for the number of runs.
const WORKERS: [(&str, &str); 3] = [
    ("instance_worker", "INSTANCE_WORKER_MAX_RETRY_ATTEMPTS"),
    ("ontology_worker", "ONTOLOGY_WORKER_MAX_RETRY_ATTEMPTS"),
    ("projection_worker", "PROJECTION_WORKER_MAX_RETRIES"),
];

/// The scope in a key: `billing` in `consumer.billing.max_attempts`.
pub(super) fn scope_of(key: &str) -> Option<&str> {
    let scope = key.strip_prefix("consumer.")?.strip_suffix(".max_attempts")?;
    (!scope.trim().is_empty()).then_some(scope)
}

/// Whether a variable is `HAPAX_CONSUMER_<SCOPE>_MAX_ATTEMPTS`.
pub(super) fn is_variable(name: &str) -> bool {
    let scope = name.strip_prefix("HAPAX_CONSUMER_").and_then(|rest| rest.strip_suffix("_MAX_ATTEMPTS"));
    scope.is_some_and(|scope| !scope.is_empty())
}

/// The variable of a scope. Scopes that differ only in case or punctuation share one.
fn variable(scope: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
    format!("HAPAX_CONSUMER_{}_MAX_ATTEMPTS", scope.chars().map(plain).collect::<String>())
}

/// The values set for scopes; flags and file by scope, variables by name.
#[derive(Debug, Clone, Default)]
pub(super) struct Scoped {
    flags: Vec<(String, Value)>,
    env: Vec<(String, Value)>,
    file: Vec<(String, Value)>,
}

impl Scoped {
    /// Reads and validates everything, including scopes that are never used, so that mistakes show
    /// at once.
    pub(super) fn load(sources: &Sources, file: &[Entry]) -> Result<Self> {
        let of = |place, text: &str| value(setting(), place, text);
        let mut scoped = Scoped::default();
        for (scope, flag, text) in &sources.scoped_flags {
            let place = Place::Flag(flag.clone());
            let said = place.said(&format!("consumer.{scope}.max_attempts"));
            let value = of(place, text).map_err(|_| not_allowed(&said, setting(), text))?;
            scoped.flags.push((scope.clone(), value));
        }
        for (name, text) in &sources.env {
            if is_variable(name) || WORKERS.iter().any(|(_, older)| older == name) {
                scoped.env.push((name.clone(), of(Place::Env(name.clone()), text)?));
            }
        }
        for entry in file {
            if let Some(scope) = scope_of(&entry.key) {
                scoped.file.push((scope.to_owned(), entry.value(setting())?));
            }
        }
        Ok(scoped)
    }

    /// The value for one scope from the strongest source; variables that disagree are an error.
    pub(super) fn of(&self, scope: &Scope) -> Result<Option<Value>> {
        let named = |list: &[(String, Value)], name: &str| -> Vec<Value> {
            list.iter().filter(|(of, _)| of == name).map(|(_, value)| value.clone()).collect()
        };
        if let Some(value) = agreed(named(&self.flags, scope.as_str()).into_iter().map(Ok))? {
            return Ok(Some(value));
        }
        let mut variables = named(&self.env, &variable(scope.as_str()));
        if let Some((_, older)) = WORKERS.iter().find(|(of, _)| *of == scope.as_str()) {
            variables.extend(named(&self.env, older));
        }
        if let Some(value) = agreed(variables.into_iter().map(Ok))? {
            return Ok(Some(value));
        }
        agreed(named(&self.file, scope.as_str()).into_iter().map(Ok))
    }

    /// All values, by the key or variable that set them.
    pub(super) fn all(&self) -> impl Iterator<Item = (String, &Value)> {
        let key = |scope: &String| format!("consumer.{scope}.max_attempts");
        let scopes = self.flags.iter().chain(&self.file).map(move |(scope, value)| (key(scope), value));
        scopes.chain(self.env.iter().map(|(name, value)| (name.clone(), value)))
    }
}

fn setting() -> &'static Setting {
    &ATTEMPTS_OF_SCOPE
}
