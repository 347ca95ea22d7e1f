//! Classifies PostgreSQL errors by meaning, from the SQLSTATE and never from the text.

use super::connect::leave_servers;
use crate::error::{Error, Result, Source};

/// Why a server takes no writes.
pub(super) const READ_ONLY: &str = "the database is read-only: a standby, or default_transaction_read_only";

/// What a failed statement means for the claims in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meaning {
    /// Another transaction interfered; the same statement may succeed in a new transaction.
    Conflict,
    /// The key is taken. In a statement of hapax's own, another transaction has just inserted it,
    /// and the statement sees that when it is sent again. In a handler's, the data is at fault.
    Unique,
    /// A row was locked for longer than `lock_timeout`, or its week is being closed. Other rows of
    /// the batch are not affected.
    Locked,
    /// A partition is missing.
    NoWeek,
    /// The connection broke or the server went away: whether the statement took effect is unknown.
    Doubt,
    /// The server rejected a row's data.
    Data,
    /// The server takes no writes now: a standby that a fail-over has not promoted, or a primary that
    /// was made read-only. Nothing was changed.
    ReadOnly,
    /// The server refuses writes (privileges, disk).
    Refused,
    /// Everything else.
    Other,
}

pub(super) fn meaning(error: &sqlx::Error) -> Meaning {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => Meaning::Doubt,
        sqlx::Error::Database(error) => match error.code().as_deref().unwrap_or_default() {
            // 26000, 42P05: a pooler switched servers under a prepared statement.
            "40001" | "40P01" | "26000" | "42P05" => Meaning::Conflict,
            "23505" => Meaning::Unique,
            // 55006: an entry would be reopened in a week that is being closed.
            "55P03" | "55006" => Meaning::Locked,
            // Without a constraint: there is no partition for the row.
            "23514" if error.constraint().is_none() => Meaning::NoWeek,
            "25006" => Meaning::ReadOnly,
            "42501" | "53100" => Meaning::Refused,
            // The server ended a transaction that was idle, or open, for too long, because its
            // client stalled.
            "25P03" | "25P04" => Meaning::Doubt,
            code if code.starts_with("08") || code.starts_with("57P") || code.starts_with("53") => {
                Meaning::Doubt
            }
            // XX001: the stored state of an event contradicts itself.
            "XX001" => Meaning::Data,
            code if is_systemic(code) => Meaning::Other,
            // The row's data (22, 23; 54: a value is too large or too deep), or whatever a trigger on
            // the table raised to refuse the row, which may be a code of its own.
            _ => Meaning::Data,
        },
        _ => Meaning::Other,
    }
}

/// Whether the server itself raises a code of this class about the statement, the session or the
/// server, and not about a row. What is in none of these classes comes from a row's data or from
/// somebody's function.
fn is_systemic(code: &str) -> bool {
    const CLASSES: [&str; 19] = [
        "0A", "0B", "24", "25", "26", "28", "2D", "34", "3B", "3D", "3F", "40", "42", "55", "57", "58", "F0",
        "HV", "XX",
    ];
    code.get(..2).is_none_or(|class| CLASSES.contains(&class))
}

/// Whether an error that ends a call may be that of one row: a trigger may raise any code. Not those
/// that are about the connection, the server's state or a missing object.
pub(super) fn may_concern_one_row(error: &sqlx::Error) -> bool {
    let Some(code) = error.as_database_error().and_then(sqlx::error::DatabaseError::code) else {
        return false;
    };
    match meaning(error) {
        Meaning::Unique | Meaning::NoWeek | Meaning::Data => true,
        Meaning::Refused => code == "42501",
        Meaning::Other => missing(error).is_none() && matches!(code.get(..2), Some("0A" | "42" | "55")),
        Meaning::Conflict | Meaning::Locked | Meaning::Doubt | Meaning::ReadOnly => false,
    }
}

/// Whether the server refused a COMMIT because of a deferred constraint or trigger. The transaction
/// is then rolled back.
pub(super) fn is_refusal(error: &sqlx::Error) -> bool {
    let code = match error {
        sqlx::Error::Database(error) => error.code().unwrap_or_default(),
        _ => return false,
    };
    !code.starts_with("40")
        && matches!(meaning(error), Meaning::Other | Meaning::Data | Meaning::NoWeek | Meaning::Unique)
}

/// The server's message, if a schema, table, function or column is missing.
pub(super) fn missing(error: &sqlx::Error) -> Option<String> {
    let code = error.as_database_error()?.code()?;
    matches!(&*code, "3F000" | "42P01" | "42883" | "42703").then(|| text(error))
}

/// The error for the caller. `what` says what was being done.
pub(in crate::backend) fn translate(what: &str, error: sqlx::Error) -> Error {
    if matches!(
        error,
        sqlx::Error::Decode(_) | sqlx::Error::ColumnDecode { .. } | sqlx::Error::ColumnNotFound(_)
    ) {
        return Error::Corrupt(format!("{what}: {error}"));
    }
    if let Some(message) = missing(&error) {
        return Error::Schema(format!("{message}; run `hapax ledger init`"));
    }
    let source = |error: sqlx::Error| -> Option<Source> { Some(Box::new(error)) };
    let code = match &error {
        sqlx::Error::Database(db) => db.code().map(std::borrow::Cow::into_owned).unwrap_or_default(),
        _ => String::new(),
    };
    match meaning(&error) {
        Meaning::Conflict | Meaning::Unique | Meaning::Locked | Meaning::NoWeek => {
            Error::Contended { what: what.into(), source: source(error) }
        }
        Meaning::ReadOnly => takes_no_writes(what, source(error)),
        Meaning::Refused => {
            let reason = match code.as_str() {
                "42501" => {
                    "this role lacks the privilege; the owner of the schema makes it, and `hapax ledger grants` and `hapax modules \
                     grants` print what another role needs"
                }
                _ => "the disk is full",
            };
            Error::Refused { what: format!("{reason} ({what})"), source: source(error) }
        }
        Meaning::Data if code == "XX001" => Error::Corrupt(text(&error)),
        Meaning::Data => Error::invalid("event", text(&error)),
        // The statement took too long, but the server is reachable.
        Meaning::Other if code == "57014" => Error::Contended { what: what.into(), source: source(error) },
        Meaning::Other if code.starts_with("28") || code == "3D000" => Error::Unavailable {
            what: format!("{what}: the server refused the connection"),
            source: source(error),
        },
        Meaning::Doubt | Meaning::Other => Error::Unavailable { what: what.into(), source: source(error) },
    }
}

/// The error of a server that is in use and takes no writes. It passes: during a fail-over an address
/// may lead to a standby for a while. Connections to that server would outlast the fail-over, so none
/// that is open now is used again.
pub(super) fn takes_no_writes(what: &str, source: Option<Source>) -> Error {
    leave_servers();
    Error::Unavailable { what: format!("{READ_ONLY} ({what})"), source }
}

/// Refuses a server that takes no writes, by what it says of `transaction_read_only`: nothing can be
/// opened there.
pub(super) fn refuse_read_only(read_only: &str) -> Result<()> {
    match read_only {
        "on" => Err(Error::Refused { what: READ_ONLY.into(), source: None }),
        _ => Ok(()),
    }
}

/// Makes errors of the driver read as [`reword`] says.
pub(super) fn reword_errors() {
    crate::error::reword_with(reword);
}

/// The server's message, without the line of its source code that the driver adds.
fn reword(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    match error.downcast_ref::<sqlx::Error>()? {
        sqlx::Error::Database(db) => Some(format!("error returned from database: {}", db.message())),
        _ => None,
    }
}

fn text(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Database(db) => db.message().to_owned(),
        other => other.to_string(),
    }
}

/// Whether a server does not know a prepared statement, or already knows a new one: it changed under the connection, so a
/// transaction pooler is in front.
pub(super) fn shows_pooler(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
    matches!(code.as_deref(), Some("26000" | "42P05"))
}
