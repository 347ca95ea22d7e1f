//! Names of objects: tenants, aggregates and ids as parts of a name, slots of a chain, entries of
//! the index.

use sha2::{Digest, Sha256};

use super::store::Listed;
use crate::error::{Error, Result};
use crate::id::{EventId, RelayName, Tenant};
use crate::journal::{AggregateOf, Position};

/// The longest part made from a text. With everything around it a name stays below the 255 bytes of
/// a file system and, with its prefix, below the 1024 of S3.
const PART_MAX: usize = 80;

/// The longest prefix of a journal within its bucket.
#[cfg(feature = "s3")]
pub(super) const PREFIX_MAX: usize = 500;

/// Separates two parts. No part contains it: an underscore in a part is followed by two digits or
/// another underscore.
const BETWEEN: &str = "_.";

/// The last millisecond that has thirteen digits: in the year 2286.
const MS_MAX: u64 = 9_999_999_999_999;

pub(super) const META: &str = "meta";
pub(super) const PENDING: &str = "pending/";
pub(super) const CHAINS: &str = "aggregate/";
pub(super) const INDEX: &str = "index/";
pub(super) const RELAYS: &str = "relay/";
pub(super) const INTENTS: &str = "id/";
pub(super) const COLLECTED: &str = "collected";

/// Encodes a text as part of a name: everything but `[A-Za-z0-9.-]` becomes `_` and two hexadecimal
/// digits, so different texts get different parts. A long text ends in a hash instead; the object
/// contains the full text, which is compared.
pub(super) fn part(text: &str) -> String {
    use std::fmt::Write as _;
    let mut out = String::with_capacity(text.len());
    for (at, byte) in text.bytes().enumerate() {
        if byte.is_ascii_alphanumeric() || byte == b'-' || (byte == b'.' && at > 0) {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "_{byte:02X}"); // writing to a String cannot fail
        }
    }
    if out.len() > PART_MAX {
        let hash = hash_of(text.as_bytes(), 16);
        out.truncate(PART_MAX - hash.len() - 2);
        out.push_str("__");
        out.push_str(&hash);
    }
    out
}

fn hash_of(bytes: &[u8], len: usize) -> String {
    use std::fmt::Write as _;
    Sha256::digest(bytes).iter().take(len).fold(String::new(), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

fn tenant(tenant: Option<&Tenant>) -> String {
    tenant.map_or_else(|| "-".to_owned(), |tenant| format!("t-{}", part(tenant.as_str())))
}

/// A slot in an aggregate's chain: the next seq there, and how many voids with that seq come before
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Slot {
    pub(super) seq: u64,
    pub(super) void: u32,
}

impl Slot {
    pub(super) const FIRST: Slot = Slot { seq: 1, void: 0 };

    /// Sorts right before the name of the object at this slot, and after the previous one.
    fn text(self) -> String {
        format!("{:020}.{:04}", self.seq, self.void)
    }

    fn parse(text: &str) -> Option<Slot> {
        let (seq, void) = text.split_once('.')?;
        Some(Slot { seq: seq.parse().ok()?, void: void.parse().ok()? })
    }
}

/// The prefix of an aggregate's chain.
pub(super) fn chain(of: &AggregateOf) -> String {
    format!("{CHAINS}{}/{}/", tenant(of.tenant.as_ref()), part(of.aggregate.as_str()))
}

/// The name of the object at a slot.
pub(super) fn link(of: &AggregateOf, slot: Slot) -> String {
    format!("{}{}.link", chain(of), slot.text())
}

/// The name after which a listing of the chain starts at this slot.
pub(super) fn chain_from(of: &AggregateOf, slot: Slot) -> String {
    format!("{}{}", chain(of), slot.text())
}

/// The slot of an object of a chain.
pub(super) fn slot_of(name: &str) -> Result<Slot> {
    let file = name.rsplit('/').next().unwrap_or(name);
    file.strip_suffix(".link").and_then(Slot::parse).ok_or_else(|| foreign(name))
}

/// The hint from which a process without a cache looks for an aggregate's head.
pub(super) fn head(of: &AggregateOf) -> String {
    format!("head/{}/{}", tenant(of.tenant.as_ref()), part(of.aggregate.as_str()))
}

/// The hint up to which a chain was swept.
pub(super) fn floor(chain: &str) -> String {
    format!("floor/{}", chain.strip_prefix(CHAINS).unwrap_or(chain).trim_end_matches('/'))
}

/// The prefix of an id's intents, ordered by number.
pub(super) fn intents(of: Option<&Tenant>, id: &EventId) -> String {
    format!("id/{}/{}{BETWEEN}", tenant(of), part(&id.as_str()))
}

pub(super) fn intent(of: Option<&Tenant>, id: &EventId, number: u32) -> String {
    format!("{}{number:06}", intents(of, id))
}

/// The common prefix of all intents of the same id.
pub(super) fn intents_of(name: &str) -> Result<&str> {
    name.rfind(BETWEEN).map(|at| &name[..at + BETWEEN.len()]).ok_or_else(|| foreign(name))
}

pub(super) fn intent_number(name: &str) -> Result<u32> {
    name.rsplit_once(BETWEEN).and_then(|(_, number)| number.parse().ok()).ok_or_else(|| foreign(name))
}

/// A pending append, since this millisecond at the earliest.
pub(super) fn pending(since_ms: u64, nonce: &str) -> String {
    format!("{PENDING}{since_ms:013}.{nonce}")
}

pub(super) fn pending_since(name: &str) -> Result<u64> {
    let text = name.strip_prefix(PENDING).and_then(|rest| rest.split_once('.'));
    text.and_then(|(ms, _)| ms.parse().ok()).ok_or_else(|| foreign(name))
}

/// An append's entry in the index, as encoded in its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) ms: u64,
    pub(super) slot: Slot,
    /// A hash of tenant and aggregate.
    pub(super) hash: String,
    pub(super) count: u64,
    /// How many of the first events were swept.
    pub(super) gone: u64,
    /// The prefix of its chain.
    pub(super) chain: String,
}

impl Entry {
    pub(super) fn new(of: &AggregateOf, slot: Slot, ms: u64, count: u64) -> Self {
        let chain = chain(of);
        Entry { ms, slot, hash: hash_of(chain.as_bytes(), 8), count, gone: 0, chain }
    }

    /// The indexes, from 0, of the remaining events after a position.
    pub(super) fn left_after(&self, after: &Position) -> impl Iterator<Item = u64> {
        (self.gone..self.count).filter(move |nth| self.position(*nth) > *after)
    }

    /// Its name. The first digits of the millisecond form a directory, which spans about a quarter
    /// of an hour.
    pub(super) fn name(&self) -> String {
        let places: Vec<&str> = self.chain.trim_end_matches('/').split('/').skip(1).collect();
        format!(
            "{}.{:06}.{:06}{BETWEEN}{}",
            from(self.ms, &format!("{}.{}", self.slot.text(), self.hash)),
            self.count,
            self.gone,
            places.join(BETWEEN)
        )
    }

    pub(super) fn parse(name: &str) -> Result<Self> {
        Self::read(name).ok_or_else(|| foreign(name))
    }

    fn read(name: &str) -> Option<Self> {
        let file = name.rsplit('/').next()?;
        let mut parts = file.split(BETWEEN);
        let mut fields = parts.next()?.split('.');
        let ms = fields.next()?.parse().ok()?;
        let slot = Slot { seq: fields.next()?.parse().ok()?, void: fields.next()?.parse().ok()? };
        let hash = fields.next()?.to_owned();
        let count = fields.next()?.parse().ok()?;
        let gone = fields.next()?.parse().ok()?;
        let chain = format!("{CHAINS}{}/{}/", parts.next()?, parts.next()?);
        Some(Entry { ms, slot, hash, count, gone, chain })
    }

    pub(super) fn link(&self) -> String {
        format!("{}{}.link", self.chain, self.slot.text())
    }

    /// The position of its n-th event, from 0.
    pub(super) fn position(&self, nth: u64) -> Position {
        Position::named(self.ms, format!("{}.{}.{nth:06}", self.slot.text(), self.hash))
    }
}

/// The entries of a listing. An append that was swept in part may briefly have two: the later one
/// counts.
pub(super) fn entries(listed: &[Listed]) -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = Vec::with_capacity(listed.len());
    for object in listed {
        let entry = Entry::parse(&object.name)?;
        if entries.last().is_some_and(|last| last.link() == entry.link() && last.ms == entry.ms) {
            entries.pop();
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn from(ms: u64, rest: &str) -> String {
    let ms = format!("{ms:013}");
    format!("{INDEX}{}/{ms}.{rest}", &ms[..7])
}

/// The name after which the index continues from a position: right before the position's entry.
pub(super) fn index_after(position: &Position) -> Result<String> {
    let Some(name) = position.name() else {
        return Ok(from(position.number().min(MS_MAX), ""));
    };
    let (entry, nth) = name.rsplit_once('.').unwrap_or_default();
    let plain = |text: &str| text.bytes().all(|b| b.is_ascii_hexdigit() || b == b'.');
    if entry.is_empty() || nth.parse::<u64>().is_err() || !plain(entry) || position.number() > MS_MAX {
        return Err(Error::invalid(
            "position",
            format!("{position} is not a position of an object store's journal"),
        ));
    }
    Ok(from(position.number(), entry))
}

/// The prefix of a relay's leadership and checkpoint objects.
pub(super) fn relay(relay: &RelayName) -> String {
    format!("{RELAYS}{}/", part(relay.as_str()))
}

/// A number that distinguishes relays.
pub(super) fn relay_number(relay: &RelayName) -> u32 {
    let hash = Sha256::digest(relay.as_str().as_bytes());
    u32::from_be_bytes([hash[0], hash[1], hash[2], hash[3]])
}

fn foreign(name: &str) -> Error {
    Error::Corrupt(format!("an object that is not part of a journal lies in one: {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Aggregate;

    fn of(tenant: Option<&str>, aggregate: &str) -> AggregateOf {
        let tenant = tenant.map(|tenant| Tenant::new(tenant).unwrap());
        AggregateOf { tenant, aggregate: Aggregate::new(aggregate).unwrap() }
    }

    #[test]
    fn two_texts_never_make_the_same_part() {
        let long = "ä".repeat(255);
        let texts = [
            "a",
            "A",
            "a ",
            "a_",
            "a__",
            "_61",
            "a.b",
            ".",
            "..",
            "-",
            "a/b",
            "a%2Fb",
            "ä",
            &long,
            &long[2..],
        ];
        let parts: std::collections::HashSet<_> = texts.iter().map(|text| part(text)).collect();
        assert_eq!(parts.len(), texts.len());
        for part in parts {
            assert!(part.len() <= PART_MAX && !part.starts_with('.') && !part.contains(BETWEEN), "{part}");
        }
        assert_ne!(chain(&of(None, "a")), chain(&of(Some("-"), "a")));
    }

    #[test]
    fn an_entry_is_known_by_its_name_and_names_sort_as_positions() {
        let long = "ü".repeat(255);
        let entry =
            |ms, seq, aggregate: &str| Entry::new(&of(Some(&long), aggregate), Slot { seq, void: 3 }, ms, 17);
        let entries = [
            entry(1_700_000_000_000, 9, "b"),
            entry(1_700_000_000_001, 1, &long),
            entry(1_700_000_000_001, 2, "a"),
        ];
        for entry in &entries {
            assert_eq!(Entry::parse(&entry.name()).unwrap(), *entry);
            assert!(entry.name().rsplit('/').next().unwrap().len() < 255, "{}", entry.name().len());
            assert_eq!(entry.link(), format!("{}{}.link", entry.chain, entry.slot.text()));
            let after = index_after(&entry.position(3)).unwrap();
            assert!(after < entry.name());
        }
        for two in entries.windows(2) {
            assert!(two[0].name() < two[1].name() && two[0].position(16) < two[1].position(0));
            assert!(two[0].name() < index_after(&two[1].position(0)).unwrap());
        }
        assert!(index_after(&Position::named(1, "../x")).is_err());
    }

    #[test]
    fn places_sort_as_they_follow_each_other() {
        let a = of(None, "a");
        let slots =
            [Slot::FIRST, Slot { seq: 1, void: 1 }, Slot { seq: 2, void: 0 }, Slot { seq: 10, void: 0 }];
        for two in slots.windows(2) {
            assert!(link(&a, two[0]) < chain_from(&a, two[1]) && chain_from(&a, two[1]) < link(&a, two[1]));
            assert_eq!(slot_of(&link(&a, two[1])).unwrap(), two[1]);
        }
    }
}
