//! How values are stored: states and modes as letters, outcomes as numbers, facts about an entry as
//! bits. Only this module and the SQL know them; elsewhere they have names.

use std::time::Duration;

use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArgumentBuffer, PgHasArrayType, PgTypeInfo, PgValueRef};
use sqlx::{Decode, Encode, Postgres, Type};

use crate::error::Result;
use crate::id::Tenant;
use crate::ledger::{Mode, State};

/// A run that counts as an attempt even if its process dies, because it ran alone.
pub(super) const ALONE: i16 = 1;
/// An at-most-once claim whose end is awaited.
pub(super) const TRACKED: i16 = 2;
/// The entry's bytes are in `held`.
pub(super) const HELD: i16 = 4;
/// A run before this one never ended.
pub(super) const SUSPECT: i16 = 8;
/// The entry left the order of its aggregate.
pub(super) const UNORDERED: i16 = 16;

/// A duration in microseconds, as SQL takes it.
pub(super) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// A count in the type that SQL takes.
pub(super) fn count(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A tenant as stored: no tenant is the empty text.
pub(super) fn tenant_text(tenant: Option<&Tenant>) -> &str {
    tenant.map_or("", Tenant::as_str)
}

/// A tenant from its stored text.
pub(super) fn tenant(stored: String) -> Result<Option<Tenant>> {
    if stored.is_empty() { Ok(None) } else { Tenant::new(stored).map(Some) }
}

fn letter(state: State) -> &'static str {
    match state {
        State::Leased => "L",
        State::Done => "D",
        State::Retry => "R",
        State::Dead => "X",
        State::Claimed => "C",
        State::Finished => "F",
        State::Lost => "O",
        State::Parked => "P",
        State::Stale => "S",
    }
}

/// States as a list in SQL.
pub(super) fn list(states: impl IntoIterator<Item = State>) -> String {
    let letters: Vec<String> = states.into_iter().map(|state| format!("'{}'", letter(state))).collect();
    format!("({})", letters.join(", "))
}

/// The states that must outlive their week, as a list in SQL.
pub(super) fn open_states() -> String {
    list(State::ALL.into_iter().filter(|state| state.is_open()))
}

/// SQL for the state of the row `row`, as text. The end of an at-most-once claim may be overdue
/// before a sweep records that it is lost.
pub(super) fn current_state(schema: &str, row: &str) -> String {
    let (claimed, lost) = (letter(State::Claimed), letter(State::Lost));
    format!(
        "(case when {row}.state = '{claimed}' and ({row}.flags & {TRACKED}) <> 0 and {row}.at <= {schema}.ledger_now() \
         then '{lost}' else {row}.state::text end)"
    )
}

/// The mode of a claim, for SQL.
pub(super) fn mode_letter(mode: Mode) -> &'static str {
    match mode {
        Mode::Lease(_) => "L",
        Mode::Once { .. } => "O",
        Mode::Done => "D",
        Mode::Refused => "X",
        Mode::Failed(_) => "F",
    }
}

impl Type<Postgres> for State {
    fn type_info() -> PgTypeInfo {
        <&str as Type<Postgres>>::type_info()
    }
}

impl PgHasArrayType for State {
    fn array_type_info() -> PgTypeInfo {
        <&str as PgHasArrayType>::array_type_info()
    }
}

impl Encode<'_, Postgres> for State {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> std::result::Result<IsNull, BoxDynError> {
        <&str as Encode<'_, Postgres>>::encode_by_ref(&letter(*self), buffer)
    }
}

impl<'r> Decode<'r, Postgres> for State {
    fn decode(value: PgValueRef<'r>) -> std::result::Result<Self, BoxDynError> {
        let stored = <&str as Decode<'_, Postgres>>::decode(value)?;
        let state = State::ALL.into_iter().find(|state| letter(*state) == stored);
        state.ok_or_else(|| format!("no state is stored as {stored:?}").into())
    }
}

/// Declares a struct that is read from a row: each field from the column of its name, perhaps with a
/// prefix.
macro_rules! from_row {
    ($(#[$attr:meta])* $vis:vis struct $($rest:tt)*) => {
        $crate::backend::postgres::codes::from_row! { "", $(#[$attr])* $vis struct $($rest)* }
    };
    ($prefix:literal, $(#[$attr:meta])* $vis:vis struct $name:ident {
        $($(#[$doc:meta])* $field_vis:vis $field:ident: $type:ty),* $(,)?
    }) => {
        $(#[$attr])*
        $vis struct $name { $($(#[$doc])* $field_vis $field: $type,)* }

        impl<'r> sqlx::FromRow<'r, sqlx::postgres::PgRow> for $name {
            fn from_row(row: &'r sqlx::postgres::PgRow) -> sqlx::Result<Self> {
                use sqlx::Row as _;
                Ok($name { $($field: row.try_get(concat!($prefix, stringify!($field)))?,)* })
            }
        }
    };
}

/// Declares an enum that SQL returns as a number.
macro_rules! numbered {
    ($(#[$attr:meta])* $vis:vis enum $name:ident { $($(#[$doc:meta])* $variant:ident = $number:literal,)* }) => {
        $(#[$attr])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        $vis enum $name { $($(#[$doc])* $variant,)* }

        impl sqlx::Type<sqlx::Postgres> for $name {
            fn type_info() -> sqlx::postgres::PgTypeInfo {
                <i32 as sqlx::Type<sqlx::Postgres>>::type_info()
            }
        }

        impl<'r> sqlx::Decode<'r, sqlx::Postgres> for $name {
            fn decode(
                value: sqlx::postgres::PgValueRef<'r>,
            ) -> std::result::Result<Self, sqlx::error::BoxDynError> {
                match <i32 as sqlx::Decode<'r, sqlx::Postgres>>::decode(value)? {
                    $($number => Ok($name::$variant),)*
                    number => Err(format!("{number} is not a {}", stringify!($name)).into()),
                }
            }
        }
    };
}

pub(super) use {from_row, numbered};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_has_a_letter_of_its_own() {
        let letters: std::collections::HashSet<&str> = State::ALL.into_iter().map(letter).collect();
        assert_eq!(letters.len(), State::ALL.len());
    }
}
