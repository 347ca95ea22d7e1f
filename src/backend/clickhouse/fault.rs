//! What an exception of ClickHouse means, by its number.

use super::http::Server;
use crate::error::Error;

/// How many characters of the server's message an error carries.
const MESSAGE_CHARS_MAX: usize = 300;

/// Meanings of exceptions.
enum Meaning {
    /// It passes without anybody changing hapax: the same request is sent again.
    Passes(&'static str),
    /// The server does not let this user do it.
    Refuses(&'static str),
    /// There is no such table, column or database.
    Missing,
    /// Rows of another generation than the table takes.
    OfAnother,
    /// The request took too long.
    TooLong,
    Other,
}

fn meaning(code: i32) -> Meaning {
    match code {
        243 => Meaning::Passes("its disk is full"),
        241 => Meaning::Passes("it has not enough memory"),
        252 => Meaning::Passes("the table has too many parts; merges are behind"),
        202 | 439 => Meaning::Passes("it is busy with too many queries"),
        242 => Meaning::Passes("the table is read-only at the moment"),
        // Files, sockets, replication and what the C++ library throws: the machine, not the request.
        74..=76 | 198 | 209 | 210 | 225 | 236 | 319 | 394 | 999 | 1000 | 1001 => {
            Meaning::Passes("it is in trouble")
        }
        192..=194 | 516 => Meaning::Refuses("the user or the password is wrong"),
        164 => Meaning::Refuses("the user may not change settings (profile readonly)"),
        291 | 497 => Meaning::Refuses("the user has not the rights"),
        60 | 81 | 16 | 47 => Meaning::Missing,
        469 => Meaning::OfAnother,
        159 => Meaning::TooLong,
        _ => Meaning::Other,
    }
}

/// The error for an answer that reports a failure.
pub(super) fn of(what: &str, server: &Server, status: u16, code: Option<i32>, said: &str) -> Error {
    let place = format!("{what}: ClickHouse at {}", server.place());
    let said = said.trim();
    let end = said.char_indices().nth(MESSAGE_CHARS_MAX).map_or(said.len(), |(end, _)| end);
    let source = Some(said[..end].to_owned().into());
    match code.map(meaning) {
        Some(Meaning::Passes(reason)) => Error::Unavailable { what: format!("{place}: {reason}"), source },
        Some(Meaning::Refuses(reason)) => Error::Refused { what: format!("{place}: {reason}"), source },
        Some(Meaning::Missing) => Error::Schema(format!(
            "{place}: a table of the read model in database {} is gone or was changed by somebody else ({})",
            server.database(),
            &said[..end]
        )),
        Some(Meaning::OfAnother) => Error::Schema(format!(
            "{place}: table {} takes rows of another generation than analytics.generation says ({})",
            server.records(),
            &said[..end]
        )),
        Some(Meaning::TooLong) => {
            Error::Unavailable { what: format!("{place}: the statement ran for too long"), source }
        }
        Some(Meaning::Other) => {
            Error::Refused { what: format!("{place}: the statement was refused"), source }
        }
        // A proxy, or a server that is just starting or ending.
        None if status >= 500 || status == 429 => {
            Error::Unavailable { what: format!("{place}: HTTP status {status}"), source }
        }
        None => {
            let message = format!("{place}: HTTP status {status}; is that ClickHouse's HTTP port?");
            Error::Refused { what: message, source }
        }
    }
}
