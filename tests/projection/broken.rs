//! A projection that fails for good stops its consumer, and costs no event anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use hapax::backend::memory::MemoryLedger;
use hapax::bus::Bus;
use hapax::ledger::Finding;
use hapax::projection::{
    Applied, Change, Document, MemoryProjection, Name, Projection, Projector, Rebuilding, Scanned, settings,
};
use hapax::{Consumer, Error, Result, Scope};

use crate::world::{RecordSource, topic};

/// A projection whose password is wrong, until it is mended.
#[derive(Default)]
struct Locked {
    is_mended: AtomicBool,
    inside: MemoryProjection,
}

#[async_trait]
impl Projection for Locked {
    async fn apply(&self, changes: &[Change]) -> Result<Vec<Applied>> {
        if !self.is_mended.load(Ordering::SeqCst) {
            return Err(Error::Refused { what: "the password is wrong".into(), source: None });
        }
        self.inside.apply(changes).await
    }
    async fn documents(&self, names: &[Name]) -> Result<Vec<Option<Document>>> {
        self.inside.documents(names).await
    }
    async fn scan(&self, after: Option<&str>) -> Result<Scanned> {
        self.inside.scan(after).await
    }
    async fn begin_rebuild(&self) -> Result<Box<dyn Rebuilding>> {
        self.inside.begin_rebuild().await
    }
    async fn check(&self) -> Result<Vec<Finding>> {
        self.inside.check().await
    }
    fn durable(&self) -> bool {
        self.inside.durable()
    }
    fn about(&self) -> String {
        self.inside.about()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_projection_that_refuses_everything_stops_its_consumer() {
    let world = RecordSource::new().await;
    world.write(6).await;
    world.relay("main").await;
    let (projection, ledger) = (Arc::new(Locked::default()), MemoryLedger::default());
    let consumer = || {
        let settings = settings(Scope::new("locked").unwrap(), topic());
        let bus: Arc<dyn Bus> = world.bus.clone();
        Consumer::builder(bus, ledger.clone()).settings(settings).build().unwrap()
    };
    let stopped = consumer();
    let projector = Projector::new(Arc::clone(&projection), 1).unwrap();
    let (projector, broken) = projector.stopping(stopped.handle());
    let ended =
        tokio::time::timeout(std::time::Duration::from_secs(60), stopped.leased_batch(projector)).await;
    ended.expect("it ends by itself").unwrap();
    let error = broken.take().expect("a reason");
    assert!(error.to_string().contains("the password is wrong"), "{error}");

    // Somebody mends it: every event is applied.
    projection.is_mended.store(true, Ordering::SeqCst);
    let consumer = consumer();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased_batch(Projector::new(Arc::clone(&projection), 1).unwrap()));
    crate::support::wait::until("all are applied", async || world.verify(&*projection).await.is_equal())
        .await;
    handle.stop();
    running.await.unwrap().unwrap();
    // The sums are the receipt.
    let verified = world.verify(&*projection).await;
    assert_eq!((verified.source.total().records, &verified.source), (verified.records, &verified.projection));
}
