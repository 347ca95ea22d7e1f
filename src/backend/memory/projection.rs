//! A projection in the memory of this process, for tests.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use async_trait::async_trait;

use crate::error::Result;
use crate::ledger::Finding;
use crate::projection::{Applied, Change, Content, Document, Name, Projection, Rebuilding, Scanned};

/// How many records a page of a scan has.
const PAGE: usize = 100;

type Documents = BTreeMap<Name, Document>;

/// A projection in memory. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct MemoryProjection(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    documents: Documents,
    /// A rebuild that takes the writes.
    fresh: Option<Arc<Mutex<Documents>>>,
    /// The last rebuild that was begun; it ends with whoever runs it.
    begun: Weak<Mutex<Documents>>,
}

impl MemoryProjection {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn locked(documents: &Mutex<Documents>) -> MutexGuard<'_, Documents> {
    documents.lock().unwrap_or_else(PoisonError::into_inner)
}

fn apply(documents: &mut Documents, change: &Change) -> Applied {
    let newer = Document::new(change.version, Content::of(change));
    match documents.get_mut(&Name::of(change)) {
        Some(document) if document.version >= newer.version => Applied::Stale,
        Some(document) => {
            *document = newer;
            Applied::Newer
        }
        None => {
            documents.insert(Name::of(change), newer);
            Applied::Newer
        }
    }
}

#[async_trait]
impl Projection for MemoryProjection {
    async fn apply(&self, changes: &[Change]) -> Result<Vec<Applied>> {
        let mut inner = self.inner();
        if let Some(fresh) = &inner.fresh {
            let mut fresh = locked(fresh);
            for change in changes {
                apply(&mut fresh, change);
            }
        }
        Ok(changes.iter().map(|change| apply(&mut inner.documents, change)).collect())
    }

    async fn documents(&self, names: &[Name]) -> Result<Vec<Option<Document>>> {
        let documents = &self.inner().documents;
        Ok(names.iter().map(|name| documents.get(name).cloned()).collect())
    }

    async fn scan(&self, after: Option<&str>) -> Result<Scanned> {
        let from = match after {
            Some(text) => Bound::Excluded(text.parse::<Name>()?),
            None => Bound::Unbounded,
        };
        let documents = &self.inner().documents;
        let page = documents.range((from, Bound::Unbounded)).take(PAGE);
        let found: Vec<_> = page.map(|(name, document)| (name.clone(), document.version)).collect();
        let next = found.last().filter(|_| found.len() == PAGE).map(|(name, _)| name.to_string());
        Ok(Scanned::new(found, next))
    }

    async fn begin_rebuild(&self) -> Result<Box<dyn Rebuilding>> {
        let documents = Arc::default();
        self.inner().begun = Arc::downgrade(&documents);
        Ok(Box::new(Fresh { of: self.clone(), documents }))
    }

    async fn unfinished(&self) -> Result<Option<String>> {
        let inner = self.inner();
        let is_under_way = inner.fresh.is_some() || inner.begun.strong_count() > 0;
        Ok(is_under_way.then(|| "a rebuild in memory has not switched".to_owned()))
    }

    async fn check(&self) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }

    fn durable(&self) -> bool {
        false
    }

    fn about(&self) -> String {
        "memory".to_owned()
    }
}

/// A projection that is being made anew.
struct Fresh {
    of: MemoryProjection,
    documents: Arc<Mutex<Documents>>,
}

#[async_trait]
impl Rebuilding for Fresh {
    async fn apply(&self, changes: &[Change]) -> Result<Vec<Applied>> {
        let mut documents = locked(&self.documents);
        Ok(changes.iter().map(|change| apply(&mut documents, change)).collect())
    }

    async fn take_writes(&self) -> Result<()> {
        self.of.inner().fresh = Some(Arc::clone(&self.documents));
        Ok(())
    }

    async fn switch(&self) -> Result<()> {
        let mut inner = self.of.inner();
        inner.documents = std::mem::take(&mut *locked(&self.documents));
        (inner.fresh, inner.begun) = (None, Weak::new());
        Ok(())
    }
}
