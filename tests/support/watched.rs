//! An object store that counts its requests, holds some up, and loses answers.
#![allow(dead_code)] // each test binary uses its part
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use hapax::backend::object::{Listed, Now, ObjectJournal, ObjectSettings, Objects};
use hapax::journal::{Append, Appended, Journal as _};
use hapax::{Error, Result};
use tokio::sync::watch;

#[derive(Debug)]
pub struct Watched {
    inner: Arc<dyn Objects>,
    requests: AtomicUsize,
    /// Creations of names with this in them wait.
    held: watch::Sender<Option<String>>,
    /// Writes over names with this in them wait.
    held_put: watch::Sender<Option<String>>,
    waiting: watch::Sender<usize>,
    /// The answer to the next write of a name with this in it is lost, after it was done.
    lost: Mutex<Option<String>>,
    /// The next reads of a name with this in it find nothing: it was replaced since it was listed.
    missed: Mutex<Option<(String, usize)>>,
    /// Of so many requests one fails; 0: none.
    one_in: AtomicU64,
    random: AtomicU64,
    failed: AtomicUsize,
}

impl Watched {
    pub fn new(inner: Arc<dyn Objects>) -> Arc<Self> {
        Arc::new(Watched {
            inner,
            requests: AtomicUsize::new(0),
            held: watch::Sender::new(None),
            held_put: watch::Sender::new(None),
            waiting: watch::Sender::new(0),
            lost: Mutex::default(),
            missed: Mutex::default(),
            one_in: AtomicU64::new(0),
            random: AtomicU64::new(0),
            failed: AtomicUsize::new(0),
        })
    }

    /// How many requests there were since it was asked last.
    pub fn requests(&self) -> usize {
        self.requests.swap(0, Ordering::SeqCst)
    }

    pub fn hold(&self, name: Option<&str>) {
        self.held.send_replace(name.map(str::to_owned));
    }

    pub fn hold_put(&self, name: Option<&str>) {
        self.held_put.send_replace(name.map(str::to_owned));
    }

    /// Waits until a write over a name is held up.
    pub async fn is_held(&self) {
        self.waiting.subscribe().wait_for(|waiting| *waiting > 0).await.unwrap();
    }

    pub fn lose(&self, name: &str) {
        *self.lost.lock().unwrap() = Some(name.to_owned());
    }

    pub fn miss(&self, name: &str, times: usize) {
        *self.missed.lock().unwrap() = Some((name.to_owned(), times));
    }

    /// From now on one of so many requests fails, half of them before anything is done and half behind it.
    pub fn fail(&self, one_in: u64, seed: u64) {
        self.random.store(seed, Ordering::SeqCst);
        self.one_in.store(one_in, Ordering::SeqCst);
    }

    /// How many have failed.
    pub fn failed(&self) -> usize {
        self.failed.load(Ordering::SeqCst)
    }

    async fn perhaps<T>(&self, request: impl Future<Output = Result<T>>) -> Result<T> {
        let one_in = self.one_in.load(Ordering::SeqCst);
        let step = self.random.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::SeqCst); // SplitMix64
        let mixed = (step ^ (step >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let fails = one_in > 0 && (mixed >> 1).is_multiple_of(one_in);
        if !fails {
            return request.await;
        }
        self.failed.fetch_add(1, Ordering::SeqCst);
        if mixed >> 63 == 0 {
            let _ = request.await;
        }
        Err(Error::Unavailable { what: "this request fails".into(), source: None })
    }

    /// How often something is still to be missed.
    pub fn to_miss(&self) -> usize {
        self.missed.lock().unwrap().as_ref().map_or(0, |(_, times)| *times)
    }

    fn is_missed(&self, name: &str) -> bool {
        match self.missed.lock().unwrap().as_mut() {
            Some((part, times)) if *times > 0 && name.contains(part.as_str()) => {
                *times -= 1;
                true
            }
            _ => false,
        }
    }

    fn counted(&self) {
        self.requests.fetch_add(1, Ordering::SeqCst);
    }

    fn answered<T>(&self, name: &str, done: Result<T>) -> Result<T> {
        let mut lost = self.lost.lock().unwrap();
        if lost.as_ref().is_some_and(|part| name.contains(part.as_str())) {
            *lost = None;
            return Err(Error::Unavailable { what: format!("the answer to {name} was lost"), source: None });
        }
        done
    }
}

#[async_trait]
impl Objects for Watched {
    async fn create(&self, name: &str, body: Bytes) -> Result<bool> {
        let mut held = self.held.subscribe();
        held.wait_for(|held| !held.as_ref().is_some_and(|part| name.contains(part.as_str()))).await.unwrap();
        self.counted();
        let done = self.perhaps(self.inner.create(name, body)).await;
        self.answered(name, done)
    }

    async fn put(&self, name: &str, body: Bytes) -> Result<()> {
        let mut held = self.held_put.subscribe();
        let is_held = |held: &Option<String>| held.as_ref().is_some_and(|part| name.contains(part.as_str()));
        if is_held(&held.borrow()) {
            self.waiting.send_modify(|waiting| *waiting += 1);
        }
        held.wait_for(|held| !is_held(held)).await.unwrap();
        self.counted();
        let done = self.perhaps(self.inner.put(name, body)).await;
        self.answered(name, done)
    }

    async fn get(&self, name: &str) -> Result<Option<Bytes>> {
        self.counted();
        if self.is_missed(name) {
            return Ok(None);
        }
        self.perhaps(self.inner.get(name)).await
    }

    async fn list(&self, prefix: &str, after: &str, limit: usize) -> Result<Vec<Listed>> {
        self.counted();
        self.perhaps(self.inner.list(prefix, after, limit)).await
    }

    async fn delete(&self, name: &str) -> Result<()> {
        self.counted();
        let done = self.perhaps(self.inner.delete(name)).await;
        self.answered(name, done)
    }

    async fn now(&self) -> Result<Now> {
        self.inner.now().await
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

pub async fn open_watched(store: &Arc<Watched>, grace: Duration) -> ObjectJournal {
    let mut settings = ObjectSettings::default();
    settings.grace = grace;
    ObjectJournal::open(Arc::clone(store) as Arc<dyn Objects>, settings).await.unwrap()
}

/// Starts an append to `slow` that does not get to its commit.
pub async fn held_up(
    store: &Arc<Watched>,
    journal: &ObjectJournal,
    append: Append,
) -> tokio::task::JoinHandle<Result<Appended>> {
    store.hold(Some("aggregate/-/slow/"));
    let writer = journal.clone();
    let slow = tokio::spawn(async move { writer.append(&append).await });
    while store.list("pending/", "pending/", 1).await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    slow
}
