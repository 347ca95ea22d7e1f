//! A journal in an object store: S3 and what speaks its protocol (feature `s3`), or a directory.
//!
//! ```text
//! meta                                    which journal this is
//! id/TENANT/ID_.N                         an intent: to which chain an id goes           1. before the commit
//! pending/MS.NONCE                        a note: an append is under way                 2. before the commit, gone at the end
//! aggregate/TENANT/AGGREGATE/SEQ.V.link   the events of one append, numbered from SEQ    3. the commit: created once
//! index/…/MS.SEQ.V.HASH.COUNT_.…          its place in the order of all                  4. after the commit
//! head/TENANT/AGGREGATE                   a hint where the chain ends, now and then
//! floor/TENANT/AGGREGATE                  a hint how far it was swept
//! collected                               a hint up to which intent sweeps have looked
//! relay/NAME/TOKEN.…                      leads and checkpoints
//! probe/…                                 tried when it is opened: is a name created once, are names listed in order?
//! ```
//!
//! The only thing that decides is that an object of a name is created once. An append looks at a chain up to its end, decides, and
//! creates the object at the next place, which it can only if nothing has changed: checked, numbered and stored in one step. Killed
//! before that, nothing was appended and no number is gone; killed after it, the event is there, and whoever reads the journal finds the
//! note and completes the index. So a link's name must never become free again: a sweep takes the events out of a link and leaves the
//! link, about 200 bytes per append, for ever. However long ago a writer has looked, it finds its place taken.
//!
//! An entry's place in the index is a time by the *store's* clock, never the event's own: later than any at which a reader can have
//! missed the note. See `read.rs` for why a reader that follows the index comes by every event. On S3 an event is therefore given
//! to readers about a third of a second after it was appended (`skew` and what is not known of the clock), in a directory at once.
//!
//! # What it costs
//!
//! | call | requests |
//! |---|---|
//! | opening | 10, or 12 of a new one (two names are tried, and removed; old ones are looked for; which journal it is) |
//! | `append` of n new events | n + 4 (an intent each, note, link, index, removal of the note); a repeat 5 per event |
//! | … the first time a process meets an aggregate | + 2 or 3 (hint, listing, last link) |
//! | … when another process was quicker | + 6 or so each time |
//! | … with the allocator in PostgreSQL | + 2 statements; the first time 1 statement instead of the hint |
//! | `head` | 1 listing, + 1 if the chain has grown |
//! | `read` of k appends | 2 listings + k; one that finds nothing 2 |
//! | `wait` | 1 listing at 50 ms, 100 ms, … 1 s |
//! | `read_aggregate` of k appends | 1 listing per thousand appends + k; if the first ones were swept 1 listing + 2 |
//! | `find` | 2 listings + 2 |
//! | `lead` | 2 listings + up to 5, `renew_leadership` 3, `save` 4 |
//! | `sweep` | 1 listing per thousand appends, per removed append 3 + 2 per event, per aggregate 1; for what is too young or held back nothing |
//! | … for intents left behind, at its end | 1 listing per thousand ids, up to ten, + 2, + about 6 for each that is older than what was swept |
//! | … the relays, at its beginning and every hundred removed appends | 1 listing + 2 per relay |
//! | `count_after` | 1 listing per thousand appends; `stat` 2, up to 100,000 |
//!
//! A listing gives up to a thousand names. In a directory a request is a file, written and synced, with its directory.
//!
//! # What it does not do
//!
//! An append that is killed may leave intents behind: small objects. A sweep removes them once the aggregate has gone on (see
//! `collect.rs`). Those of an aggregate that never went on stay: removing one would take a void that stays instead. The same
//! id must not be appended again at the very moment its event is swept.

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
