//! Maps SQLite's result codes to errors. It decides by code, never by text.

use rusqlite::ErrorCode;

use crate::error::{Error, Result};

/// Turns a driver's error into an [`Error`].
pub(crate) trait Doing<T> {
    /// `what` says what was being done.
    fn doing(self, what: &str) -> Result<T>;
}

impl<T> Doing<T> for rusqlite::Result<T> {
    fn doing(self, what: &str) -> Result<T> {
        self.map_err(|error| meaning(what, error))
    }
}

/// Maps a driver's error to its meaning.
pub(crate) fn meaning(what: &str, error: rusqlite::Error) -> Error {
    let says = |reason: &str| format!("{what}: {reason}");
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::FileLockingProtocolFailed) => {
            Error::Contended {
                what: says("another connection is writing to the file"),
                source: Some(Box::new(error)),
            }
        }
        Some(
            ErrorCode::ReadOnly | ErrorCode::PermissionDenied | ErrorCode::AuthorizationForStatementDenied,
        ) => refused(
            says("the file, its directory or this connection is read-only; nothing was changed"),
            error,
        ),
        Some(ErrorCode::DiskFull) => {
            refused(says("the disk is full, or the file may not grow further; nothing was changed"), error)
        }
        Some(ErrorCode::SystemIoFailure) => {
            refused(says("the disk failed to read or write (is it full?); the transaction was undone"), error)
        }
        Some(ErrorCode::CannotOpen) => Error::unavailable(
            says("the file cannot be opened (its directory must exist and be accessible)"),
            error,
        ),
        Some(ErrorCode::NotADatabase) => Error::Corrupt(says("the file is not an SQLite database")),
        Some(ErrorCode::DatabaseCorrupt) => Error::Corrupt(says(&format!("the file is damaged ({error})"))),
        Some(ErrorCode::TooBig) => Error::invalid("entry", "it is larger than SQLite can store"),
        Some(ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch) => {
            Error::Corrupt(says(&error.to_string()))
        }
        Some(_) => Error::unavailable(what, error),
        // Without a code the error did not come from SQLite: a stored value has the wrong type.
        None => Error::Corrupt(says(&error.to_string())),
    }
}

fn refused(what: String, error: rusqlite::Error) -> Error {
    Error::Refused { what, source: Some(Box::new(error)) }
}
