//! The name of a record, and which records to scan.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::ModuleSlug;
use crate::error::{Error, Result};

/// Names a record: `TENANT:MODULE:ID`. A tenant and an id are UUIDs and a module has no colon, so two
/// records never share a name; it has at most 122 bytes.
///
/// ```
/// use hapax::records::Name;
/// let text = "00000000-0000-0000-0000-000000000000:orders:0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10";
/// assert_eq!(text.parse::<Name>()?.to_string(), text);
/// # Ok::<(), hapax::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// Whose record; the nil UUID means no tenant.
    pub tenant: Uuid,
    /// Its module.
    pub module: ModuleSlug,
    /// Its id.
    pub id: Uuid,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.tenant.hyphenated(), self.module, self.id.hyphenated())
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::invalid("record", format!("{text:?} is not TENANT:MODULE:ID, with two UUIDs"));
        let mut parts = text.split(':');
        let (Some(tenant), Some(module), Some(id), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(bad());
        };
        let uuid = |part: &str| Uuid::try_parse(part).map_err(|_| bad());
        let name = Name { tenant: uuid(tenant)?, module: ModuleSlug::new(module)?, id: uuid(id)? };
        // A UUID can be written in several ways; a name in one.
        if name.to_string() == text { Ok(name) } else { Err(bad()) }
    }
}

/// Which records to scan: those of all tenants and modules, or some.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Scan {
    /// Only of this tenant; the nil UUID means no tenant.
    pub tenant: Option<Uuid>,
    /// Only of this module.
    pub module: Option<ModuleSlug>,
    /// Only what comes after this record.
    pub after: Option<Name>,
    /// How many at most. There are fewer if they reach [`LIST_BYTES_MAX`](super::LIST_BYTES_MAX).
    pub limit: usize,
    /// Only records whose ids are in these [buckets](Scan::bucket). A store that cannot filter by
    /// bucket shows the others, too.
    pub buckets: Option<BTreeSet<u8>>,
}

impl Scan {
    /// The first records of all.
    pub fn new(limit: usize) -> Self {
        Scan { tenant: None, module: None, after: None, limit, buckets: None }
    }

    /// The bucket of an id: the first byte of the SHA-256 of its text, which databases can compute, too. Ids may
    /// count up, so their own bits would not do.
    pub fn bucket(id: Uuid) -> u8 {
        let text = id.hyphenated();
        Sha256::digest(text.encode_lower(&mut Uuid::encode_buffer()).as_bytes())[0]
    }

    /// Only records of some buckets, where a store can filter by them.
    #[must_use]
    pub fn buckets(mut self, buckets: Option<BTreeSet<u8>>) -> Self {
        self.buckets = buckets;
        self
    }

    /// The buckets for a statement, if they are asked for: numbers and commas.
    #[cfg(any(feature = "clickhouse", feature = "postgres"))]
    pub(crate) fn buckets_text(&self) -> Option<String> {
        let buckets = self.buckets.as_ref()?;
        let numbers: Vec<String> = buckets.iter().map(u8::to_string).collect();
        Some(if numbers.is_empty() { "-1".to_owned() } else { numbers.join(", ") })
    }

    /// Only those of a tenant.
    #[must_use]
    pub fn tenant(mut self, tenant: Option<Uuid>) -> Self {
        self.tenant = tenant;
        self
    }

    /// Only those of a module.
    #[must_use]
    pub fn module(mut self, module: Option<ModuleSlug>) -> Self {
        self.module = module;
        self
    }

    /// Only what comes after a record.
    #[must_use]
    pub fn after(mut self, after: Option<Name>) -> Self {
        self.after = after;
        self
    }

    /// One record. A scan of a tenant and a module is in the order of ids, so it is the first after the id
    /// before its own.
    pub(crate) fn one(name: &Name) -> Self {
        let before = name.id.as_u128().checked_sub(1).map(Uuid::from_u128);
        Scan::new(1)
            .tenant(Some(name.tenant))
            .module(Some(name.module.clone()))
            .after(before.map(|id| Name { id, ..name.clone() }))
    }
}
