//! Pages bound the memory that reading takes, however large the events are.

use super::Stored;
use crate::event::Event;

/// The default maximum number of bytes on a page
/// ([`JournalSettings::page_bytes_max`](super::JournalSettings)).
pub const PAGE_BYTES_MAX: usize = 16 << 20;

/// What an event counts in addition to its payload and headers, so that a page of empty events is
/// bounded too.
pub const EVENT_BYTES: usize = 256;

/// Events of a journal, in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Page {
    /// The events.
    pub events: Vec<Stored>,
    /// Whether the page ends because it is full, by count or by bytes, so that there may be more.
    /// If false, there are no more events.
    pub more: bool,
}

impl Page {
    /// A page.
    pub fn new(events: Vec<Stored>, more: bool) -> Self {
        Page { events, more }
    }
}

/// A page being filled. The event that reaches the limit of events or bytes completes it, so a page
/// has at least one event, however large.
#[derive(Debug, Clone)]
pub struct Filling {
    events: Vec<Stored>,
    bytes: usize,
    limit: usize,
    bytes_max: usize,
}

impl Filling {
    /// An empty page for at most this many events and bytes.
    pub fn new(limit: usize, bytes_max: usize) -> Self {
        Filling { events: Vec::new(), bytes: 0, limit, bytes_max }
    }

    /// Adds an event. Returns false, without adding it, if the page is full.
    pub fn take(&mut self, stored: Stored) -> bool {
        if self.is_full() {
            return false;
        }
        self.bytes = self.bytes.saturating_add(bytes_of(&stored.event));
        self.events.push(stored);
        true
    }

    /// Whether the page is full.
    pub fn is_full(&self) -> bool {
        self.events.len() >= self.limit || (!self.events.is_empty() && self.bytes >= self.bytes_max)
    }

    /// The number of events on it.
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether it has no events.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// The finished page. A full page without events means that the limit was zero: not `more`.
    pub fn done(self) -> Page {
        let more = self.is_full() && !self.is_empty();
        Page { events: self.events, more }
    }
}

/// How many bytes an event counts on a page.
pub fn bytes_of(event: &Event) -> usize {
    let headers: usize = event.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    EVENT_BYTES + event.payload.len() + headers
}

/// The maximum number of events on a page of this many bytes.
#[cfg(feature = "postgres")]
pub(crate) fn events_max(bytes_max: usize) -> usize {
    bytes_max / EVENT_BYTES + 1
}
