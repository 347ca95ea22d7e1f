//! Pages: reading takes a bounded amount of memory, however large the events are.

use super::Stored;
use crate::event::Event;

/// The most bytes on a page, unless a journal is told otherwise ([`JournalSettings::page_bytes_max`](super::JournalSettings)).
pub const PAGE_BYTES_MAX: usize = 16 << 20;

/// What an event counts besides its payload and headers: so a page is bounded also where there are none.
pub const EVENT_BYTES: usize = 256;

/// Some events of a journal, in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Page {
    /// They.
    pub events: Vec<Stored>,
    /// Whether it ends because it is full, by count or by bytes: there may be more. False: that was all.
    pub more: bool,
}

impl Page {
    /// A page.
    pub fn new(events: Vec<Stored>, more: bool) -> Self {
        Page { events, more }
    }
}

/// A page that is being filled. It is full with the event that brings it to its number of events or of bytes; so there is at
/// least one on it, however large that is.
#[derive(Debug, Clone)]
pub struct Filling {
    events: Vec<Stored>,
    bytes: usize,
    limit: usize,
    bytes_max: usize,
}

impl Filling {
    /// An empty page for so many events and bytes.
    pub fn new(limit: usize, bytes_max: usize) -> Self {
        Filling { events: Vec::new(), bytes: 0, limit, bytes_max }
    }

    /// Takes an event; false if the page is full and it was not taken.
    pub fn take(&mut self, stored: Stored) -> bool {
        if self.is_full() {
            return false;
        }
        self.bytes = self.bytes.saturating_add(bytes_of(&stored.event));
        self.events.push(stored);
        true
    }

    /// Whether it takes no more.
    pub fn is_full(&self) -> bool {
        self.events.len() >= self.limit || (!self.events.is_empty() && self.bytes >= self.bytes_max)
    }

    /// How many it has.
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// The page. What is full with nothing on it was asked for nothing.
    pub fn done(self) -> Page {
        let more = self.is_full() && !self.is_empty();
        Page { events: self.events, more }
    }
}

/// What an event counts on a page.
pub fn bytes_of(event: &Event) -> usize {
    let headers: usize = event.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    EVENT_BYTES + event.payload.len() + headers
}

/// So many events fit on a page of so many bytes at most.
#[cfg(feature = "postgres")]
pub(crate) fn events_max(bytes_max: usize) -> usize {
    bytes_max / EVENT_BYTES + 1
}
