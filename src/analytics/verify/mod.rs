//! Compares a read model with the records that it was made from, while both are in use.
//!
//! ```text
//! both sides: sums per tenant, module and bucket of ids ─▶ buckets that differ, row by row ─▶ look again, until settled
//! ```
//!
//! Both sides are read once in pages. Equal buckets are equal rows. The others are read again and compared row by row, and
//! what may still be on its way is looked at again: only if the model lacks what was seen in the source before
//! `lastSyncAt`, something is wrong. Nothing is paused and nothing is written.

mod judge;
mod sums;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

pub use judge::Difference;
use judge::{Look, Note, Verdict, judge};
pub use sums::{Sum, Sums, TenantModule};

use super::{ReadModel, Row, STALE_AFTER, Version};
use crate::clock::Time;
use crate::error::Result;
use crate::records::{ModuleSlug, Name, Scan, Snapshot};

/// How many rows are read at once.
const PAGE: usize = 5000;
/// The pause before the next look.
const PAUSE: Duration = Duration::from_millis(200);
/// Up to so many records of a tenant and module are looked at one by one; for more, their buckets are read.
const SINGLE_MAX: usize = 50;

/// What is compared, and for how long.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerifySettings {
    /// Only records of this tenant; the nil UUID means no tenant.
    pub tenant: Option<Uuid>,
    /// Only records of this module.
    pub module: Option<ModuleSlug>,
    /// The generation of the source; see [`Version`].
    pub generation: u16,
    /// How long to look again at what may be on its way.
    pub wait: Duration,
}

impl Default for VerifySettings {
    /// All records, of generation 1; 30 s.
    fn default() -> Self {
        VerifySettings { tenant: None, module: None, generation: 1, wait: Duration::from_secs(30) }
    }
}

/// The result of a comparison.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Verified {
    /// The sums of the records, as they were when they were read.
    pub source: Sums,
    /// The sums of the read model. They may differ by what was on its way.
    pub model: Sums,
    /// What is wrong, by record.
    pub differences: BTreeMap<Name, Difference>,
    /// How many records changed so often that they were never seen equal. The model has followed them.
    pub moving: u64,
}

/// Compares a read model with its records. They must be those that it is fed from.
pub async fn verify(
    model: &dyn ReadModel,
    source: &dyn Snapshot,
    settings: &VerifySettings,
) -> Result<Verified> {
    let (mut of_source, mut of_model) = (Sums::default(), Sums::default());
    let all = Scan::new(PAGE).tenant(settings.tenant).module(settings.module.clone());
    tokio::try_join!(
        each_record(source, settings.generation, all.clone(), |row, _| of_source.add(&row)),
        each_row(model, all, |row| of_model.add(&row)),
    )?;
    let differing = of_source.differing(&of_model).into_iter();
    let mut wanted: BTreeMap<TenantModule, Wanted> =
        differing.map(|(group, buckets)| (group, Wanted::Buckets(buckets))).collect();
    let mut verified = Verified { source: of_source, model: of_model, ..Verified::default() };
    let mut open: BTreeMap<Name, (Note, Difference)> = BTreeMap::new();
    let end = Instant::now() + settings.wait;
    loop {
        let (is_over, is_last) = (Instant::now() >= end, Instant::now() >= end + STALE_AFTER);
        let (mut still, mut follows) = (BTreeMap::new(), false);
        for (group, wanted) in &wanted {
            let seen = see(model, source, settings.generation, group, wanted).await?;
            for name in seen.names(group, wanted) {
                match judge(seen.look(&name), open.get(&name).map(|(note, _)| note)) {
                    Verdict::Equal => {}
                    Verdict::Differs(difference) => {
                        verified.differences.insert(name, difference);
                    }
                    Verdict::Open(note, last) => {
                        follows |= seen.follows();
                        still.insert(name, (note, last));
                    }
                }
            }
        }
        open = still;
        // The next pulse of a model that follows decides, so it is worth more than the wait.
        if open.is_empty() || is_last || (is_over && !follows) {
            break;
        }
        wanted = BTreeMap::new();
        for name in open.keys() {
            let ids = wanted.entry((name.tenant, name.module.clone())).or_insert_with(Wanted::no_ids);
            ids.add(name.id);
        }
        tokio::time::sleep(PAUSE).await;
    }
    for (name, (note, last)) in open {
        if note.moves {
            verified.moving += 1;
        } else {
            verified.differences.insert(name, last);
        }
    }
    Ok(verified)
}

/// Which rows of a tenant and module to look at.
enum Wanted {
    Buckets(BTreeSet<u8>),
    Ids(BTreeSet<Uuid>),
}

impl Wanted {
    fn no_ids() -> Self {
        Wanted::Ids(BTreeSet::new())
    }

    fn add(&mut self, id: Uuid) {
        match self {
            Wanted::Buckets(buckets) => buckets.insert(Scan::bucket(id)),
            Wanted::Ids(ids) => ids.insert(id),
        };
    }

    fn has(&self, id: Uuid) -> bool {
        match self {
            Wanted::Buckets(buckets) => buckets.contains(&Scan::bucket(id)),
            Wanted::Ids(ids) => ids.contains(&id),
        }
    }

    /// What to read of both sides.
    fn scans(&self, (tenant, module): &TenantModule) -> Vec<Scan> {
        let buckets = match self {
            Wanted::Ids(ids) if ids.len() <= SINGLE_MAX => {
                let name = |id| Name { tenant: *tenant, module: module.clone(), id };
                return ids.iter().map(|id| Scan::one(&name(*id))).collect();
            }
            Wanted::Ids(ids) => ids.iter().map(|id| Scan::bucket(*id)).collect(),
            Wanted::Buckets(buckets) => buckets.clone(),
        };
        let all = Scan::new(PAGE).tenant(Some(*tenant)).module(Some(module.clone()));
        vec![all.buckets(Some(buckets))]
    }
}

/// What both sides have for the rows in question.
struct Seen {
    last_sync_at: Option<Time>,
    model: BTreeMap<Uuid, Row>,
    source: BTreeMap<Uuid, (Row, Time)>,
    at: Time,
}

impl Seen {
    fn names(&self, (tenant, module): &TenantModule, wanted: &Wanted) -> Vec<Name> {
        let mut ids: BTreeSet<Uuid> = self.model.keys().chain(self.source.keys()).copied().collect();
        if let Wanted::Ids(wanted) = wanted {
            ids.extend(wanted);
        }
        ids.into_iter().map(|id| Name { tenant: *tenant, module: module.clone(), id }).collect()
    }

    /// Whether the model was in step a moment ago.
    fn follows(&self) -> bool {
        self.last_sync_at.is_some_and(|at| self.at.since(at) <= STALE_AFTER)
    }

    fn look(&self, name: &Name) -> Look<'_> {
        Look {
            last_sync_at: self.last_sync_at,
            model: self.model.get(&name.id),
            source: self.source.get(&name.id).map(|(row, written)| (row, *written)),
            at: self.at,
        }
    }
}

/// Looks at the wanted rows. The order decides what a difference proves: whatever was in the source before
/// `lastSyncAt` is in the model, and whatever is in the model was in the source.
async fn see(
    model: &dyn ReadModel,
    source: &dyn Snapshot,
    generation: u16,
    group: &TenantModule,
    wanted: &Wanted,
) -> Result<Seen> {
    let last_sync_at = model.last_sync_at(group.0).await?;
    let (mut of_model, mut of_source) = (BTreeMap::new(), BTreeMap::new());
    for scan in wanted.scans(group) {
        each_row(model, scan, |row| {
            if wanted.has(row.name.id) {
                of_model.insert(row.name.id, row);
            }
        })
        .await?;
    }
    for scan in wanted.scans(group) {
        each_record(source, generation, scan, |row, written| {
            if wanted.has(row.name.id) {
                of_source.insert(row.name.id, (row, written));
            }
        })
        .await?;
    }
    Ok(Seen { last_sync_at, model: of_model, source: of_source, at: source.now().await? })
}

/// Reads the rows of a scan, page by page; a scan of one is one page.
async fn each_row(model: &dyn ReadModel, mut scan: Scan, mut with: impl FnMut(Row)) -> Result<()> {
    loop {
        let page = model.scan(&scan).await?;
        let Some(last) = page.last() else { return Ok(()) };
        scan.after = Some(last.name.clone());
        page.into_iter().for_each(&mut with);
        if scan.limit == 1 {
            return Ok(());
        }
    }
}

/// The same of the source, with the time of each write.
async fn each_record(
    source: &dyn Snapshot,
    generation: u16,
    mut scan: Scan,
    mut with: impl FnMut(Row, Time),
) -> Result<()> {
    loop {
        let page = source.snapshot(&scan).await?;
        let Some(last) = page.last() else { return Ok(()) };
        scan.after = Some(last.name());
        for of in page {
            let version = Version::new(generation, of.record.seq)?;
            let times = (of.record.created_at, of.record.updated_at);
            let row = Row::new(of.name(), version, times, of.record.payload.as_str().as_bytes())?;
            with(row, of.record.updated_at);
        }
        if scan.limit == 1 {
            return Ok(());
        }
    }
}
