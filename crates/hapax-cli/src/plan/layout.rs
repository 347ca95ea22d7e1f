//! How many bytes a row of PostgreSQL's ledger takes: what its columns and its index entry occupy on a page.
//!
//! PostgreSQL's own rules (a tuple's header, alignment, item pointers, the size of `jsonb`) give the size of a
//! row. How full pages get was measured, by filling a ledger; a test fills one again and compares.

/// The start of every row: its header and the bitmap of its nulls, aligned.
const HEADER: usize = 32;
/// The item pointer of a row or of an index entry.
const POINTER: usize = 4;
/// Times, token, nonce, scope, owner, week, attempts, flags and state.
const FIXED: usize = 47;
/// A page, and what of it holds rows.
const PAGE: f64 = 8192.0;
const PAGE_ROWS: f64 = 8168.0;
/// What of a page holds index entries.
const PAGE_ENTRIES: f64 = 8152.0;
/// How full the pages of an index get with ids that come about in the order of time, and in any order.
const FILL_BY_TIME: f64 = 0.66;
const FILL_AT_RANDOM: f64 = 0.70;
/// The metadata of a leased run: how long it took. One key, two entries, a number. Other runs have none.
const METADATA: usize = 4 + 2 * 4 + 18 + 10;
/// How much more than its last version a leased row takes: its first one stays until its page is needed.
const LEASED: f64 = 2.2;

/// What is known of the events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// UUIDs, which are stored in 16 bytes, in the order of time; else the length of other ids.
    pub id_bytes: Option<usize>,
    /// Whether a consumer claims them, with what it knows of them.
    pub consumed: bool,
    /// The length of topic and aggregate; no aggregate: events are not ordered.
    pub topic_bytes: usize,
    pub aggregate_bytes: Option<usize>,
    /// Whether a claim is a row of its own, which is changed when it is settled.
    pub leased: bool,
}

fn aligned(bytes: usize, to: usize) -> usize {
    bytes.div_ceil(to) * to
}

/// A text or bytes, with their length.
fn text(at: usize, bytes: usize) -> usize {
    if bytes < 127 { at + 1 + bytes } else { aligned(at, 4) + 4 + bytes }
}

impl Shape {
    fn id(&self) -> usize {
        self.id_bytes.unwrap_or(16)
    }

    /// A row of the table.
    fn row(&self) -> usize {
        let mut at = text(FIXED, self.id());
        if self.consumed {
            at = text(at, 16); // the fingerprint
            if let Some(aggregate) = self.aggregate_bytes {
                at = text(aligned(at, 8) + 8, aggregate);
            }
            at = aligned(aligned(at, 4) + 4, 8) + 8; // partition and offset
            at = text(at, self.topic_bytes);
            if self.leased {
                at = text(at, METADATA);
            }
        }
        aligned(HEADER + at, 8) + POINTER
    }

    /// Its entry in the index.
    fn entry(&self) -> usize {
        aligned(8 + text(4, self.id()), 8) + POINTER
    }

    /// Bytes on disk for each row, with its index.
    pub fn bytes(&self) -> f64 {
        let table = self.row() as f64 * PAGE / PAGE_ROWS;
        // Ids without a time are in a partition that keeps a tenth of its pages free.
        let table = if self.id_bytes.is_some() { table / 0.9 } else { table };
        let fill = if self.id_bytes.is_none() { FILL_BY_TIME } else { FILL_AT_RANDOM };
        let index = self.entry() as f64 * PAGE / PAGE_ENTRIES / fill;
        if self.leased { table * LEASED + index } else { table + index }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_claim_takes_what_the_bench_measured() {
        let bare =
            Shape { id_bytes: None, consumed: false, topic_bytes: 0, aggregate_bytes: None, leased: false };
        // docs/benchmarks.md: 158.8 bytes a claim, 264.4 with lease and done.
        assert!((bare.bytes() / 158.8 - 1.0).abs() < 0.1, "{}", bare.bytes());
        let leased = Shape { leased: true, ..bare };
        assert!((leased.bytes() / 264.4 - 1.0).abs() < 0.1, "{}", leased.bytes());
        assert!(Shape { id_bytes: Some(200), ..bare }.bytes() > 2.0 * bare.bytes());
    }
}
