//! Object stores for tests: a directory of its own, or a prefix of its own on the S3 server.

#![allow(dead_code)] // each test binary uses its part
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use hapax::backend::object::{
    AllocatorSettings, Directory, Listed, Now, ObjectJournal, ObjectSettings, Objects, S3, S3Settings,
};
use hapax::journal::{Append, Expected, Journal, Position, Stored};
use hapax::{Aggregate, Event, EventId, Tenant};

/// Where a journal of a test lies, as a word that a child process understands.
#[derive(Clone)]
pub struct Place {
    pub word: String,
    _directory: Option<Arc<tempfile::TempDir>>,
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| {
        panic!("{name} is not set: eval \"$(scripts/services env)\" after scripts/services up s3")
    })
}

/// The bucket of the tests.
pub fn s3_settings() -> S3Settings {
    let mut settings = S3Settings::new(
        variable("HAPAX_TEST_S3_BUCKET"),
        variable("HAPAX_TEST_S3_ACCESS_KEY_ID"),
        variable("HAPAX_TEST_S3_SECRET_ACCESS_KEY"),
    );
    settings.endpoint = Some(variable("HAPAX_TEST_S3_ENDPOINT"));
    settings.skew = Duration::from_millis(20); // one machine, one clock
    settings
}

impl Place {
    pub fn directory() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Place { word: format!("dir:{}", directory.path().display()), _directory: Some(Arc::new(directory)) }
    }

    pub fn s3() -> Self {
        Place { word: format!("s3:{}", uuid::Uuid::new_v4().simple()), _directory: None }
    }

    /// Waits until everybody finds what was appended so far in the past. An S3 store tells the time in whole seconds, of which each client
    /// knows half a second: a sweep may find what another one appended a moment ago still to come.
    pub async fn until_past(&self, journal: &ObjectJournal) {
        let known_to = Duration::from_secs(if self.word.starts_with("s3:") { 2 } else { 0 });
        let began = journal.now().await.unwrap();
        while journal.now().await.unwrap().minus(known_to) <= began {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub fn of(word: &str) -> Self {
        Place { word: word.to_owned(), _directory: None }
    }

    pub async fn objects(&self) -> Arc<dyn Objects> {
        match self.word.split_once(':') {
            Some(("dir", path)) => Arc::new(Directory::open(path).unwrap()),
            Some(("s3", prefix)) => {
                let mut settings = s3_settings();
                settings.prefix = format!("tests/{prefix}");
                Arc::new(S3::connect(settings).await.unwrap())
            }
            _ => panic!("{} is not a place", self.word),
        }
    }

    pub async fn open(&self) -> ObjectJournal {
        self.open_with(AllocatorSettings::default()).await
    }

    pub async fn open_with(&self, allocator: AllocatorSettings) -> ObjectJournal {
        let mut settings = ObjectSettings::default();
        settings.allocator = allocator;
        settings.grace = Duration::from_secs(1);
        ObjectJournal::open(self.objects().await, settings).await.unwrap()
    }
}

/// A client that takes the store's clock to be behind: what it appends gets an old place in the index.
#[derive(Debug)]
pub struct Behind {
    pub inner: Arc<dyn Objects>,
    pub by: Duration,
}

#[async_trait]
impl Objects for Behind {
    async fn create(&self, name: &str, body: Bytes) -> hapax::Result<bool> {
        self.inner.create(name, body).await
    }
    async fn put(&self, name: &str, body: Bytes) -> hapax::Result<()> {
        self.inner.put(name, body).await
    }
    async fn get(&self, name: &str) -> hapax::Result<Option<Bytes>> {
        self.inner.get(name).await
    }
    async fn list(&self, prefix: &str, after: &str, limit: usize) -> hapax::Result<Vec<Listed>> {
        self.inner.list(prefix, after, limit).await
    }
    async fn delete(&self, name: &str) -> hapax::Result<()> {
        self.inner.delete(name).await
    }
    async fn now(&self) -> hapax::Result<Now> {
        let Now { low, high, about } = self.inner.now().await?;
        Ok(Now { low: low.minus(self.by), high: high.minus(self.by), about: about.minus(self.by) })
    }
    fn grain_ms(&self) -> u64 {
        self.inner.grain_ms()
    }
    fn skew_ms(&self) -> u64 {
        self.inner.skew_ms()
    }
    fn durable(&self) -> bool {
        self.inner.durable()
    }
    fn about(&self) -> String {
        self.inner.about()
    }
}

/// How long something may take that shall happen.
pub const DEADLINE: Duration = Duration::from_mins(2);

pub fn aggregate(name: &str) -> Aggregate {
    Aggregate::new(name).unwrap()
}

pub fn event(id: &str) -> Event {
    Event::new(EventId::new(id).unwrap()).payload(format!("{{\"id\": \"{id}\"}}"))
}

pub fn append(of: &str, expected: Expected, ids: &[&str]) -> Append {
    Append::new(aggregate(of), expected, ids.iter().map(|id| event(id)))
}

/// Follows a journal until nothing comes any more and nobody is waited for; checks order and that nothing comes twice.
pub async fn follow(journal: &dyn Journal) -> Vec<Stored> {
    let started = std::time::Instant::now();
    let mut after = Position::START;
    let mut all: Vec<Stored> = Vec::new();
    loop {
        let batch = journal.read(&after, 7).await.unwrap();
        let (empty, at_hole) = (batch.events.is_empty(), batch.at_hole);
        all.extend(batch.events);
        after = batch.next;
        if empty && !at_hole {
            break;
        }
        assert!(started.elapsed() < DEADLINE, "the journal does not come to an end");
        if at_hole {
            journal.wait(&after, Duration::from_millis(50)).await.unwrap();
        }
    }
    let mut heads: BTreeMap<(Option<Tenant>, Aggregate), u64> = BTreeMap::new();
    let mut ids = BTreeSet::new();
    assert!(all.windows(2).all(|two| two[0].position < two[1].position));
    for stored in &all {
        let of = (stored.event.tenant.clone(), stored.event.aggregate.clone().unwrap());
        let head = heads.entry(of).or_default();
        assert_eq!(stored.seq, *head + 1, "gapless and in order: {stored:?}");
        *head += 1;
        assert!(ids.insert((stored.event.tenant.clone(), stored.event.id.clone())), "twice: {stored:?}");
    }
    for ((tenant, aggregate), head) in heads {
        assert_eq!(journal.head(tenant.as_ref(), &aggregate).await.unwrap(), head);
        let chain = journal.read_aggregate(tenant.as_ref(), &aggregate, 1, usize::MAX).await.unwrap().events;
        let followed: Vec<_> = all
            .iter()
            .filter(|s| s.event.aggregate.as_ref() == Some(&aggregate) && s.event.tenant == tenant)
            .collect();
        assert_eq!(chain.iter().collect::<Vec<_>>(), followed, "the chain and the index say the same");
    }
    all
}
