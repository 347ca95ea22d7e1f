//! A journal in an object store: S3 and what speaks its protocol (feature `s3`), or a directory.
//!
//! ```text
//! meta                                    which journal this is
//! id/TENANT/ID_.N                         an intent: to which chain an id goes           1. before the commit
//! pending/MS.NONCE                        a pending append                               2. before the commit, gone at the end
//! aggregate/TENANT/AGGREGATE/SEQ.V.link   the events of one append, numbered from SEQ    3. the commit: created once
//! index/…/MS.SEQ.V.HASH.COUNT_.…          its place in the order of all                  4. after the commit
//! head/TENANT/AGGREGATE                   a hint where the chain ends, now and then
//! floor/TENANT/AGGREGATE                  a hint how far it was swept
//! collected                               a hint up to which intent sweeps have looked
//! relay/NAME/TOKEN.…                      leads and checkpoints
//! probe/…                                 tried when it is opened: is a name created once, are names listed in order?
//! ```
//!
//! Everything rests on one operation: creating an object under a name succeeds only once. An append
//! reads a chain to its end, decides, and creates the object at the next slot, which succeeds only
//! if nothing has changed. So checking, numbering and storing are one atomic step. An append killed
//! before that has changed nothing and used up no number. If it is killed afterwards, the event is
//! in the journal, and the next reader finds the pending append and completes the index. A link's name must
//! therefore never become free again: a sweep removes the events from a link but keeps the link,
//! about 200 bytes per append, for ever. However long ago a writer has looked, it finds its slot
//! taken.
//!
//! An entry's position in the index is a time of the *store's* clock, never the event's own time.
//! It is later than any moment at which a reader can have missed the pending append. `read.rs` explains why a
//! reader that follows the index gets every event. On S3, readers therefore get an event about a
//! third of a second after it was appended (`skew` plus the uncertainty of the clock); in a
//! directory they get it at once. If clocks differ by more than `skew`, an entry can appear behind a
//! reader; the relay looks back for it.
//!
//! # What it costs
//!
//! | call | requests |
//! |---|---|
//! | opening | 10, or 12 for a new one (test two names and remove them, look for old ones, read the id) |
//! | `append` of n new events | n + 4 (an intent each, `pending/`, link, index, removal of `pending/`); a repeat 5 per event |
//! | … the first time in a process for an aggregate | + 2 or 3 (hint, listing, last link) |
//! | … when another process was faster | + about 6 each time |
//! | … with the allocator in PostgreSQL | + 2 statements; the first time 1 statement instead of the hint |
//! | `head` | 1 listing, + 1 if the chain has grown |
//! | `read` of k appends | 2 listings + k; 2 if it finds nothing |
//! | `wait` | 1 listing at 50 ms, 100 ms, … 1 s |
//! | `read_aggregate` of k appends | 1 listing per thousand appends + k; + 1 listing + 2 if the first ones were swept |
//! | `find` | 2 listings + 2 |
//! | `acquire_leadership` | 2 listings + up to 5; `renew_leadership` 3, `save` 4 |
//! | `sweep` | 1 listing per thousand appends, 3 per removed append + 2 per event, 1 per aggregate; nothing for young or held-back ones |
//! | … for abandoned intents, at its end | up to 10 listings of a thousand ids, + 2, + about 6 per intent older than what was swept |
//! | … for relays, at its start and every hundred removed appends | 1 listing + 2 per relay |
//! | `count_after` | 1 listing per thousand appends; `stat` 2, up to 100,000 |
//!
//! A listing returns up to a thousand names. In a directory a request is a file operation; writes
//! sync the file and its directory.
//!
//! # What it does not do
//!
//! A killed append may leave intents behind: small objects. A sweep removes them once the aggregate
//! has later appends (see `collect.rs`). Without later appends they stay: removing one would take a
//! void, which stays as well. Do not append an id again at the very moment its event is swept.

pub mod allocator;
#[cfg(feature = "postgres")]
mod allocator_postgres;
mod append;
mod chain;
#[cfg(feature = "s3")]
mod clock;
mod collect;
mod directory;
mod ids;
mod journal;
mod name;
mod probe;
mod read;
mod relay;
#[cfg(feature = "s3")]
mod s3;
#[cfg(feature = "s3")]
mod s3_settings;
mod store;
mod sweep;

pub use allocator::{AllocatorMode, AllocatorSettings};
pub use directory::Directory;
pub use journal::{ObjectJournal, ObjectSettings};
pub(crate) use probe::must_keep_a_journal;
#[cfg(feature = "s3")]
pub use s3::S3;
#[cfg(feature = "s3")]
pub use s3_settings::S3Settings;
pub use store::{Listed, Now, Objects};
