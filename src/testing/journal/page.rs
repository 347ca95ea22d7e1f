//! Clause 13: pages are bounded by bytes, and say whether there may be more.

use bytes::Bytes;
use tokio::time::Instant;

use super::JournalHarness;
use super::kit::{DEADLINE, aggregate, event, write};
use crate::event::{Event, Headers};
use crate::journal::{Append, EVENT_BYTES, Expected, Journal, JournalSettings, Position, bytes_of};

/// More than there are.
const MANY: usize = 1000;
/// A page takes three of the plain events.
const BYTES_MAX: usize = 3 * (EVENT_BYTES + 1000);

async fn bounded<H: JournalHarness>(harness: &H, page_bytes_max: usize) -> H::Journal {
    harness.open(JournalSettings { page_bytes_max, ..JournalSettings::default() }).await
}

fn plain(name: &str) -> Event {
    event(name).payload(vec![7; 1000])
}

/// Alone and several together, with headers that count, one that is larger than a page, small ones, none.
async fn fill(journal: &impl Journal) -> Vec<Event> {
    let mut headers = plain("headers").payload("");
    headers.headers = [("name", Bytes::from(vec![7; 998])), ("other", Bytes::from(vec![7; 1500]))]
        .into_iter()
        .collect::<Headers>();
    let appends = [
        vec![plain("one")],
        vec![plain("two"), plain("three"), plain("four"), plain("five"), plain("six")],
        vec![headers, event("empty").payload("")],
        vec![plain("seven"), event("large").payload(vec![7; 20_000]), plain("eight")],
        (0..40).map(|n| event(&format!("small-{n}")).payload("")).collect(),
        vec![plain("nine")],
    ];
    for events in &appends {
        write(journal, &Append::new(aggregate("a"), Expected::Any, events.clone())).await;
    }
    appends.concat()
}

/// The ids of each page, as they should be.
fn pages(events: &[Event], limit: usize, bytes_max: usize) -> Vec<Vec<String>> {
    let (mut pages, mut page, mut bytes) = (Vec::new(), Vec::new(), 0);
    for event in events {
        page.push(event.id.to_string());
        bytes += bytes_of(event);
        if page.len() == limit || bytes >= bytes_max {
            pages.push(std::mem::take(&mut page));
            bytes = 0;
        }
    }
    pages.push(page);
    pages.retain(|page| !page.is_empty());
    pages
}

async fn read_aggregate(journal: &impl Journal, limit: usize) -> Vec<Vec<String>> {
    let (mut pages, mut from) = (Vec::new(), 1);
    loop {
        let page = journal.read_aggregate(None, &aggregate("a"), from, limit).await.unwrap();
        assert!(!page.more || !page.events.is_empty(), "an empty page is the last");
        if let Some(last) = page.events.last() {
            from = last.seq + 1;
            pages.push(page.events.iter().map(|stored| stored.event.id.to_string()).collect());
        }
        if !page.more {
            return pages;
        }
    }
}

async fn follow(journal: &impl Journal, limit: usize) -> Vec<Vec<String>> {
    let (mut pages, mut after, started) = (Vec::new(), Position::START, Instant::now());
    loop {
        let batch = journal.read(&after, limit).await.unwrap();
        assert!(!(batch.more && batch.at_hole), "it ends for one cause");
        if let Some(last) = batch.events.last() {
            assert!(!batch.more || batch.next == last.position, "what is next was not given");
            pages.push(batch.events.iter().map(|stored| stored.event.id.to_string()).collect());
        }
        after = batch.next;
        if !batch.more && !batch.at_hole {
            return pages;
        }
        assert!(started.elapsed() < DEADLINE, "it comes to an end");
    }
}

/// By bytes, by count, and whichever is first.
pub async fn j13_a_page_of_an_aggregate_ends_at_so_many_bytes<H: JournalHarness>(harness: &H) {
    let journal = bounded(harness, BYTES_MAX).await;
    let events = fill(&journal).await;
    for limit in [1, 2, 5, MANY, usize::MAX] {
        let wanted = pages(&events, limit, BYTES_MAX);
        assert_eq!(read_aggregate(&journal, limit).await, wanted, "at most {limit}");
    }
}

/// The same for whoever follows.
pub async fn j13_a_page_that_is_followed_ends_at_so_many_bytes<H: JournalHarness>(harness: &H) {
    let journal = bounded(harness, BYTES_MAX).await;
    let events = fill(&journal).await;
    for limit in [1, 2, 5, MANY, usize::MAX] {
        assert_eq!(follow(&journal, limit).await, pages(&events, limit, BYTES_MAX), "at most {limit}");
    }
}

/// However little a page takes.
pub async fn j13_a_page_has_at_least_one_event<H: JournalHarness>(harness: &H) {
    let journal = bounded(harness, 0).await;
    let events = fill(&journal).await;
    let single = pages(&events, 1, usize::MAX);
    assert_eq!(read_aggregate(&journal, MANY).await, single);
    assert_eq!(follow(&journal, MANY).await, single);
}

/// What fits on one page is not followed by an empty one.
pub async fn j13_a_page_that_is_not_full_is_the_last<H: JournalHarness>(harness: &H) {
    let journal = bounded(harness, 1 << 20).await;
    let events = fill(&journal).await;
    let page = journal.read_aggregate(None, &aggregate("a"), 1, MANY).await.unwrap();
    assert_eq!((page.events.len(), page.more), (events.len(), false));
    assert_eq!(follow(&journal, MANY).await, pages(&events, MANY, 1 << 20));
    let none = journal.read_aggregate(None, &aggregate("nobody"), 1, MANY).await.unwrap();
    assert_eq!((none.events.len(), none.more), (0, false));
}
