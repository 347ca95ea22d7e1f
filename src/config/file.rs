//! Reads the configuration file: keys with their line numbers.

use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::load::{Place, Value};
use super::table::Setting;
use crate::error::{Error, Result};

/// A key of the file with its value.
#[derive(Debug)]
pub(super) struct Entry {
    /// Includes the names of its tables: `ledger.url`.
    pub(super) key: String,
    path: PathBuf,
    line: usize,
    /// Its value, or what it is instead of one.
    text: std::result::Result<String, &'static str>,
}

impl Entry {
    /// An error that names the file and the line.
    pub(super) fn problem(&self, message: &str) -> Error {
        Error::Config(format!("{} line {}: {message}", self.path.display(), self.line))
    }

    /// Its value, if the setting accepts it.
    pub(super) fn value(&self, setting: &'static Setting) -> Result<Value> {
        let text = self.text.as_deref().map_err(|kind| {
            self.problem(&format!("{} is {kind}; it takes {}", self.key, setting.kind.range()))
        })?;
        super::load::value(setting, Place::File(self.path.clone(), self.key.clone(), self.line), text)
    }
}

/// Parses a file; an error names its line.
pub(super) fn entries(path: &Path, text: &str) -> Result<Vec<Entry>> {
    let line_of = |at: usize| text.get(..at).unwrap_or_default().matches('\n').count() + 1;
    let table = DeTable::parse(text).map_err(|error| {
        let line = error.span().map(|span| format!(" line {}", line_of(span.start))).unwrap_or_default();
        Error::Config(format!("{}{line}: {}", path.display(), error.message()))
    })?;
    let mut entries = Vec::new();
    flatten("", table.get_ref(), &mut |key, at, value| {
        entries.push(Entry { key, path: path.to_owned(), line: line_of(at), text: scalar(value) });
    });
    Ok(entries)
}

/// Calls `tell` for each key, with the position where it begins and its value.
fn flatten(prefix: &str, table: &DeTable<'_>, visit: &mut impl FnMut(String, usize, &DeValue<'_>)) {
    for (name, value) in table {
        let key = if prefix.is_empty() {
            name.get_ref().to_string()
        } else {
            format!("{prefix}.{}", name.get_ref())
        };
        match value.get_ref() {
            DeValue::Table(inner) => flatten(&key, inner, visit),
            value => visit(key, name.span().start, value),
        }
    }
}

fn scalar(value: &DeValue<'_>) -> std::result::Result<String, &'static str> {
    match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(number) => {
            let read = i128::from_str_radix(number.as_str(), number.radix());
            Ok(read.map_or_else(|_| number.to_string(), |number| number.to_string()))
        }
        DeValue::Boolean(truth) => Ok(truth.to_string()),
        DeValue::Float(_) => Err("a number with a fraction"),
        DeValue::Datetime(_) => Err("a date"),
        DeValue::Array(_) => Err("an array"),
        DeValue::Table(_) => Err("a table"),
    }
}
