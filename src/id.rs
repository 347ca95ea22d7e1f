//! Ids and names: what identifies an event, whose effect it is, and how an id is found in a record.
//!
//! Names are validated where they enter ([`EventId::new`], [`Scope::new`] …), so the rest of the
//! crate never sees a blank or overlong name, or one with a NUL.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

use crate::error::{Error, Result};

mod find;
pub use find::{IdChain, IdSource};
pub(crate) use find::{
    Json, KIND_HEADERS, KIND_POINTERS, RECORD_KINDS, implied_kind, is_structured, look, says_structured,
    unmarked,
};

/// The maximum length of an id or name, in characters.
pub const NAME_CHARS_MAX: usize = 255;

fn validate(what: &'static str, text: &str) -> Result<()> {
    // Byte length bounds the character count, so characters are counted only for long names.
    if text.len() > NAME_CHARS_MAX {
        let chars = text.chars().count();
        if chars > NAME_CHARS_MAX {
            return Err(Error::invalid(
                what,
                format!("it has {chars} characters; the limit is {NAME_CHARS_MAX}"),
            ));
        }
    }
    if text.is_empty() {
        return Err(Error::invalid(what, format!("it is empty; it needs 1 to {NAME_CHARS_MAX} characters")));
    }
    if text.trim().is_empty() {
        return Err(Error::invalid(what, "it is blank (white space only)"));
    }
    if let Some(at) = text.bytes().position(|b| b == 0) {
        return Err(Error::invalid(what, format!("it has a NUL character at byte {at}; NUL is not allowed")));
    }
    Ok(())
}

/// The id of an event: 1 to 255 characters, not blank, no NUL; otherwise any text.
///
/// Two ids are equal if and only if their texts are the same bytes. A canonical UUID (36 lower-case
/// characters) is stored as 16 bytes; that changes its cost, never what it equals.
///
/// ```
/// use hapax::EventId;
/// let id = EventId::new("0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10").unwrap();
/// assert_eq!(id.as_str(), "0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10");
/// // Upper case is another text, so it is another id:
/// assert_ne!(id, EventId::new("0190D3A0-5B7E-7C3A-9F51-2F6F1F3B7C10").unwrap());
/// assert!(EventId::new("  ").is_err());
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(Repr);

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Repr {
    Uuid(Uuid),
    Text(Arc<str>),
}

impl EventId {
    /// Validates an id.
    pub fn new(text: impl AsRef<str>) -> Result<Self> {
        let text = text.as_ref();
        if let Some(uuid) = canonical_uuid(text) {
            return Ok(EventId(Repr::Uuid(uuid)));
        }
        validate("event id", text)?;
        Ok(EventId(Repr::Text(text.into())))
    }

    /// A new UUIDv7. Ids made by one process are strictly increasing, across threads and within a
    /// millisecond.
    pub fn now_v7() -> Self {
        EventId(Repr::Uuid(Uuid::now_v7()))
    }

    /// An id derived from its parts (UUIDv5): the same parts always give the same id, on any
    /// machine.
    ///
    /// Parts are length-prefixed, so `["ab", "c"]` and `["a", "bc"]` differ.
    ///
    /// ```
    /// use hapax::EventId;
    /// let namespace = EventId::new("invoices").unwrap();
    /// let once = EventId::derived(&namespace, ["order-17", "line-3"]);
    /// assert_eq!(once, EventId::derived(&namespace, ["order-17", "line-3"]));
    /// assert_ne!(once, EventId::derived(&namespace, ["order-1", "7line-3"]));
    /// ```
    pub fn derived<P: AsRef<[u8]>>(namespace: &EventId, parts: impl IntoIterator<Item = P>) -> Self {
        let space = match &namespace.0 {
            Repr::Uuid(uuid) => *uuid,
            Repr::Text(text) => Uuid::new_v5(&Uuid::NAMESPACE_URL, text.as_bytes()),
        };
        let mut name = Vec::new();
        for part in parts {
            let part = part.as_ref();
            name.extend_from_slice(&(part.len() as u64).to_be_bytes());
            name.extend_from_slice(part);
        }
        EventId(Repr::Uuid(Uuid::new_v5(&space, &name)))
    }

    /// The id of an event whose own id is unique only within its source, such as a CloudEvent's.
    /// The same source and id always give the same result. A UUIDv7 gives a UUIDv7 of the same
    /// millisecond, so it stays in its week; any other id gives a UUIDv5.
    ///
    /// ```
    /// use hapax::EventId;
    /// let id = EventId::new("17").unwrap();
    /// assert_eq!(EventId::sourced("/orders", &id), EventId::sourced("/orders", &id));
    /// assert_ne!(EventId::sourced("/orders", &id), EventId::sourced("/invoices", &id));
    /// ```
    pub fn sourced(source: &str, id: &EventId) -> Self {
        let namespace = EventId(Repr::Text("cloudevents".into()));
        let derived = EventId::derived(&namespace, [source, &*id.as_str()]);
        let (Repr::Uuid(mixed), Some(_), Repr::Uuid(own)) = (&derived.0, id.v7_millis(), &id.0) else {
            return derived;
        };
        let mut bytes = *mixed.as_bytes();
        bytes[..6].copy_from_slice(&own.as_bytes()[..6]); // the time
        bytes[6] = 0x70 | (bytes[6] & 0x0f); // the version; the variant is that of every UUIDv5
        EventId(Repr::Uuid(Uuid::from_bytes(bytes)))
    }

    /// The id as text.
    pub fn as_str(&self) -> Cow<'_, str> {
        match &self.0 {
            Repr::Uuid(uuid) => Cow::Owned(uuid.hyphenated().to_string()),
            Repr::Text(text) => Cow::Borrowed(text),
        }
    }

    /// The UUID, if the id is a canonical one.
    pub fn as_uuid(&self) -> Option<Uuid> {
        match &self.0 {
            Repr::Uuid(uuid) => Some(*uuid),
            Repr::Text(_) => None,
        }
    }

    /// The bytes that a ledger uses as key: 16 for a UUID, the text otherwise. A text of exactly 16
    /// bytes gets a trailing NUL, which no id contains, so the two kinds never collide.
    pub fn key(&self) -> Cow<'_, [u8]> {
        match &self.0 {
            Repr::Uuid(uuid) => Cow::Borrowed(uuid.as_bytes().as_slice()),
            Repr::Text(text) if text.len() == 16 => {
                let mut key = text.as_bytes().to_vec();
                key.push(0);
                Cow::Owned(key)
            }
            Repr::Text(text) => Cow::Borrowed(text.as_bytes()),
        }
    }

    /// The id with this [`key`](EventId::key).
    pub fn from_key(key: &[u8]) -> Result<Self> {
        if let Ok(bytes) = <[u8; 16]>::try_from(key) {
            return Ok(EventId(Repr::Uuid(Uuid::from_bytes(bytes))));
        }
        let text = if key.len() == 17 && key[16] == 0 { &key[..16] } else { key };
        std::str::from_utf8(text)
            .ok()
            .and_then(|text| EventId::new(text).ok())
            .ok_or_else(|| Error::Corrupt(format!("an id key of {} bytes that is not an id", key.len())))
    }

    /// The milliseconds since 1970 that a UUIDv7 carries.
    pub fn v7_millis(&self) -> Option<i64> {
        let bytes = match &self.0 {
            Repr::Uuid(uuid) => uuid.as_bytes(),
            Repr::Text(_) => return None,
        };
        if bytes[6] >> 4 != 7 || bytes[8] >> 6 != 0b10 {
            return None;
        }
        let mut millis = [0; 8];
        millis[2..].copy_from_slice(&bytes[..6]);
        Some(i64::from_be_bytes(millis))
    }
}

/// Accepts only the exact text as which a UUID is printed, because only that is the same id.
fn canonical_uuid(text: &str) -> Option<Uuid> {
    let bytes = text.as_bytes();
    if bytes.len() != 36 {
        return None;
    }
    let mut out = [0u8; 16];
    let mut nibbles = 0;
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 8 | 13 | 18 | 23) {
            if *byte != b'-' {
                return None;
            }
            continue;
        }
        let value = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            _ => return None,
        };
        out[nibbles / 2] |= if nibbles % 2 == 0 { value << 4 } else { value };
        nibbles += 1;
    }
    Some(Uuid::from_bytes(out))
}

/// The id as [`EventId::as_str`] returns it: parsing the output gives the same id. Use [`Visible`]
/// on a terminal or in a log line.
impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Repr::Uuid(uuid) => uuid.hyphenated().fmt(f),
            Repr::Text(text) => f.pad(text),
        }
    }
}

impl fmt::Debug for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EventId({})", Visible(&self.as_str()))
    }
}

impl std::str::FromStr for EventId {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        EventId::new(text)
    }
}

impl From<Uuid> for EventId {
    fn from(uuid: Uuid) -> Self {
        EventId(Repr::Uuid(uuid))
    }
}

/// Untrusted text for a terminal or a log line. Escapes control characters and those that are
/// invisible or change the writing direction, so that a hostile id cannot rewrite its surroundings.
/// Everything else is unchanged. For humans only: two texts may look the same.
///
/// ```
/// use hapax::id::Visible;
/// assert_eq!(Visible("DOM\\user-17").to_string(), "DOM\\user-17");
/// assert_eq!(Visible("a\n\u{1b}[2J").to_string(), "a\\n\\u{1b}[2J");
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Visible<'t>(pub &'t str);

impl fmt::Display for Visible<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write as _;
        for c in self.0.chars() {
            let hidden = c.is_control()
                || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
                || matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}');
            if hidden { write!(f, "{}", c.escape_debug())? } else { f.write_char(c)? }
        }
        Ok(())
    }
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Validates a name: 1 to 255 characters, not blank, no NUL.
            pub fn new(text: impl AsRef<str>) -> Result<Self> {
                let text = text.as_ref();
                validate($what, text)?;
                Ok(Self(text.into()))
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        /// The name as text; use [`Visible`] on a terminal or in a log line.
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), Visible(&self.0))
            }
        }

        impl std::str::FromStr for $name {
            type Err = Error;
            fn from_str(text: &str) -> Result<Self> {
                Self::new(text)
            }
        }
    };
}

name!(
    /// Whose effect a claim guards: a handler, or one pod of a broadcast. Part of an event's
    /// identity.
    #[doc(alias = "consumer_scope_id")]
    Scope, "scope");
name!(
    /// Whose data an event is. Part of an event's identity: equal scopes and ids of two tenants
    /// never collide.
    Tenant, "tenant");
name!(
    /// What kind of fact an event is.
    Kind, "kind");
name!(
    /// The topic a record came from.
    Topic, "topic");
name!(
    /// The name of a lease holder, for humans. Tokens decide, never this.
    Owner, "owner");
name!(
    /// The name of a relay of a journal: one relay per name leads at a time, and relays of
    /// different names publish independently.
    RelayName, "relay");
name!(
    /// The thing whose events are ordered. Compared as bytes: no case folding, no trimming.
    Aggregate, "aggregate");

impl Aggregate {
    /// The aggregate as it appears in keys: everything but `[A-Za-z0-9._~-]` is percent-encoded.
    /// Injective, so two aggregates never share a key.
    ///
    /// ```
    /// use hapax::Aggregate;
    /// assert_eq!(Aggregate::new("Order/7 ").unwrap().key(), "Order%2F7%20");
    /// assert_ne!(Aggregate::new("order").unwrap().key(), Aggregate::new("Order").unwrap().key());
    /// ```
    pub fn key(&self) -> String {
        const PLAIN: percent_encoding::AsciiSet =
            percent_encoding::NON_ALPHANUMERIC.remove(b'.').remove(b'_').remove(b'~').remove(b'-');
        percent_encoding::utf8_percent_encode(&self.0, &PLAIN).to_string()
    }
}

#[cfg(test)]
mod tests;
