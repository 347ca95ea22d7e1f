//! Sums of hashes: what two sides are compared by before anybody looks at rows.

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;

use crate::analytics::Row;
use crate::records::{ModuleSlug, Scan};

/// A tenant and a module.
pub type TenantModule = (Uuid, ModuleSlug);

/// How many rows there are, and the sum of their hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Sum {
    /// How many rows.
    pub records: u64,
    /// The sum of their hashes, modulo 2¹²⁸: no order of the rows is another sum.
    pub hash: u128,
}

impl Sum {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: Sum) -> Sum {
        Sum { records: self.records + other.records, hash: self.hash.wrapping_add(other.hash) }
    }
}

/// The sums of one side: for each tenant and module, and in it for each bucket of ids. A bucket without
/// rows is not there.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sums(BTreeMap<TenantModule, BTreeMap<u8, Sum>>);

impl Sums {
    pub(crate) fn add(&mut self, row: &Row) {
        let group = (row.name.tenant, row.name.module.clone());
        let one = Sum { records: 1, hash: u128::from_be_bytes(row.hash.0) };
        let sum = self.0.entry(group).or_default().entry(Scan::bucket(row.name.id)).or_default();
        *sum = sum.plus(one);
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&TenantModule, u8, Sum)> {
        self.0.iter().flat_map(|(group, buckets)| buckets.iter().map(move |(b, sum)| (group, *b, *sum)))
    }

    /// The sum of a bucket.
    pub fn bucket(&self, group: &TenantModule, bucket: u8) -> Sum {
        self.0.get(group).and_then(|buckets| buckets.get(&bucket)).copied().unwrap_or_default()
    }

    /// The sum of a tenant and module.
    pub fn group(&self, group: &TenantModule) -> Sum {
        let buckets = self.0.get(group).into_iter().flat_map(BTreeMap::values);
        buckets.fold(Sum::default(), |all, sum| all.plus(*sum))
    }

    /// The sum of everything.
    pub fn total(&self) -> Sum {
        self.iter().fold(Sum::default(), |all, (_, _, sum)| all.plus(sum))
    }

    /// The tenants and modules that one side has, or both.
    pub fn groups(&self, other: &Sums) -> BTreeSet<TenantModule> {
        self.0.keys().chain(other.0.keys()).cloned().collect()
    }

    /// The buckets in which the sides differ.
    pub(super) fn differing(&self, other: &Sums) -> BTreeMap<TenantModule, BTreeSet<u8>> {
        let mut differing: BTreeMap<TenantModule, BTreeSet<u8>> = BTreeMap::new();
        for (group, bucket, _) in self.iter().chain(other.iter()) {
            if self.bucket(group, bucket) != other.bucket(group, bucket) {
                differing.entry(group.clone()).or_default().insert(bucket);
            }
        }
        differing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_every_kind_fill_all_buckets() {
        for id in [Uuid::from_u128, |n: u128| Uuid::from_u128(n << 64), |n| Uuid::from_u128(n << 96)] {
            let filled: BTreeSet<u8> = (0..10_000).map(|n| Scan::bucket(id(n))).collect();
            assert_eq!(filled.len(), 256);
        }
    }
}
