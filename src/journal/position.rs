//! The place of an event in the order of its journal.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, Result};

/// A place in the order of a whole journal. Positions compare only within one journal and may have
/// gaps.
///
/// If a database assigns positions, a position is a number. In an object store it is a time in
/// milliseconds plus the rest of an object's name, which distinguishes objects of the same
/// millisecond.
///
/// ```
/// use hapax::journal::Position;
/// let position: Position = "17".parse().unwrap();
/// assert!(position > Position::START && position < Position::of(18));
/// assert_eq!("17/a".parse::<Position>().unwrap().to_string(), "17/a");
/// assert!("seventeen".parse::<Position>().is_err());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Position {
    number: u64,
    name: Option<Arc<str>>,
}

impl Position {
    /// Before the first event.
    pub const START: Position = Position { number: 0, name: None };

    /// The position with this number.
    pub const fn of(number: u64) -> Self {
        Position { number, name: None }
    }

    /// The position with this number, and a name that distinguishes it from others with the same
    /// number.
    pub fn named(number: u64, name: impl Into<Arc<str>>) -> Self {
        Position { number, name: Some(name.into()) }
    }

    /// Its number, which grows.
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// Its name, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{}/{name}", self.number),
            None => self.number.fmt(f),
        }
    }
}

impl FromStr for Position {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            Error::invalid("position", format!("{text:?} is not a whole number from 0 on, nor NUMBER/NAME"))
        };
        let (number, name) = match text.split_once('/') {
            Some((_, "")) => return Err(bad()),
            Some((number, name)) => (number, Some(name)),
            None => (text, None),
        };
        Ok(Position { number: number.parse().map_err(|_| bad())?, name: name.map(Into::into) })
    }
}

impl Serialize for Position {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Position {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}
