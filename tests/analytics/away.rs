//! A feed waits for a read model that is away, wherever it was when it went.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use hapax::analytics::{
    Block, Feed, FeedSettings, Groups, ListPage, MemoryReadModel, PartitionSync, ReadModel, RejectedEntry,
    Row, Selection, Source, Tally, Uuid, Version,
};
use hapax::bus::{Bus, MemoryBus, Partition, Record, TopicSettings};
use hapax::records::{Listed, ModuleSlug, Scan};
use hapax::{Error, Result, Time, Topic};

use crate::support::wait::until_so;

/// A read model that does not answer while it is away.
#[derive(Default)]
struct Away {
    model: MemoryReadModel,
    begins: AtomicBool,
    places: AtomicBool,
}

fn answers(away: &AtomicBool) -> Result<()> {
    if away.load(Ordering::SeqCst) {
        return Err(Error::Unavailable { what: "the model is away".into(), source: None });
    }
    Ok(())
}

#[async_trait]
impl ReadModel for Away {
    async fn expect(&self, topic: &Topic, partitions: i32) -> Result<()> {
        answers(&self.begins)?;
        self.model.expect(topic, partitions).await
    }
    async fn partitions(&self) -> Result<Vec<PartitionSync>> {
        answers(&self.places)?;
        self.model.partitions().await
    }
    async fn apply(&self, blocks: &[Block]) -> Result<()> {
        self.model.apply(blocks).await
    }
    async fn list(&self, of: &Selection, page: ListPage) -> Result<Listed> {
        self.model.list(of, page).await
    }
    async fn tally(&self, of: &Selection, what: &Tally) -> Result<Groups> {
        self.model.tally(of, what).await
    }
    async fn scan(&self, scan: &Scan) -> Result<Vec<Row>> {
        self.model.scan(scan).await
    }
    async fn last_sync_at(&self, tenant: Uuid) -> Result<Option<Time>> {
        self.model.last_sync_at(tenant).await
    }
    async fn version(&self, tenant: Uuid, module: &ModuleSlug, id: Uuid) -> Result<Option<Version>> {
        self.model.version(tenant, module, id).await
    }
    async fn rejected(&self, limit: usize) -> Result<Vec<RejectedEntry>> {
        self.model.rejected(limit).await
    }
    async fn drop_rejected(&self, partition: &Partition, offset: i64) -> Result<bool> {
        self.model.drop_rejected(partition, offset).await
    }
    async fn id(&self) -> Result<Option<Uuid>> {
        self.model.id().await
    }
    async fn now(&self) -> Result<Time> {
        self.model.now().await
    }
    fn durable(&self) -> bool {
        self.model.durable()
    }
}

#[tokio::test]
async fn a_feed_waits_for_a_model_that_is_away_at_its_start() {
    let topic = Topic::new("records").unwrap();
    let (bus, model) = (Arc::new(MemoryBus::default()), Arc::new(Away::default()));
    bus.create_topic(&topic, TopicSettings::new(1)).await.unwrap();
    let feed = || {
        let (bus, model) = (Arc::<MemoryBus>::clone(&bus), Arc::<Away>::clone(&model));
        let mut settings = FeedSettings::new(topic.clone());
        settings.source = Source::Debezium; // which rejects whatever is not a change
        Feed::new(bus, model, settings).unwrap()
    };

    model.begins.store(true, Ordering::SeqCst);
    let stopped = feed();
    let handle = stopped.handle();
    let running = tokio::spawn(stopped.run());
    until_so("it waits", || handle.progress().away.is_some()).await;
    handle.stop();
    assert!(!running.await.unwrap().unwrap().follows, "a feed that waits can be stopped");

    let begins = feed();
    let handle = begins.handle();
    let running = tokio::spawn(begins.run());
    until_so("it waits again", || handle.progress().away.is_some()).await;
    assert!(!handle.progress().follows);
    // The model answers, and goes away again before it has said where to go on.
    model.places.store(true, Ordering::SeqCst);
    model.begins.store(false, Ordering::SeqCst);
    until_so("it has a partition, and waits", || {
        let progress = handle.progress();
        progress.follows && progress.away.is_some()
    })
    .await;
    // What is published meanwhile is read afterwards; nothing reads it as a change.
    let record = Record { payload: Some(b"no change".to_vec().into()), ..Record::default() };
    bus.publish(&topic, &[record]).await.unwrap().remove(0).unwrap();
    model.places.store(false, Ordering::SeqCst);
    until_so("it reads on", || {
        let progress = handle.progress();
        progress.away.is_none() && progress.rejected == 1
    })
    .await;
    handle.stop();
    running.await.unwrap().unwrap();
}
