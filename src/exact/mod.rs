//! Exact numbers, and where in a payload they are.
//!
//! Pure: it is given text and payloads, and touches no store, clock or network. Guards find an
//! event's value with it, and ledgers add the values of prevented repeats without rounding.

mod decimal;
mod field;

pub use decimal::Decimal;
pub use field::Field;
#[cfg(feature = "clickhouse")]
pub(crate) use field::{DEPTH_MAX, FIELD_MAX};
