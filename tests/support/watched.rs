//! An object store that counts its requests, holds some up, and loses answers.
#![allow(dead_code)] // each test binary uses its part
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use hapax::backend::object::{Listed, Now, Objects};
use hapax::{Error, Result};
use tokio::sync::watch;

#[derive(Debug)]
pub struct Watched {
    inner: Arc<dyn Objects>,
    requests: AtomicUsize,
    /// Creations of names with this in them wait.
    held: watch::Sender<Option<String>>,
    /// The answer to the next write of a name with this in it is lost, after it was done.
    lost: Mutex<Option<String>>,
}

impl Watched {
    pub fn new(inner: Arc<dyn Objects>) -> Arc<Self> {
        Arc::new(Watched {
            inner,
            requests: AtomicUsize::new(0),
            held: watch::Sender::new(None),
            lost: Mutex::default(),
        })
    }

    /// How many requests there were since it was asked last.
    pub fn requests(&self) -> usize {
        self.requests.swap(0, Ordering::SeqCst)
    }

    pub fn hold(&self, name: Option<&str>) {
        self.held.send_replace(name.map(str::to_owned));
    }

    pub fn lose(&self, name: &str) {
        *self.lost.lock().unwrap() = Some(name.to_owned());
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
        let done = self.inner.create(name, body).await;
        self.answered(name, done)
    }

    async fn put(&self, name: &str, body: Bytes) -> Result<()> {
        self.counted();
        let done = self.inner.put(name, body).await;
        self.answered(name, done)
    }

    async fn get(&self, name: &str) -> Result<Option<Bytes>> {
        self.counted();
        self.inner.get(name).await
    }

    async fn list(&self, prefix: &str, after: &str, limit: usize) -> Result<Vec<Listed>> {
        self.counted();
        self.inner.list(prefix, after, limit).await
    }

    async fn delete(&self, name: &str) -> Result<()> {
        self.counted();
        let done = self.inner.delete(name).await;
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
