//! What was deleted long ago is published again.

use std::sync::Arc;
use std::time::Duration;

use hapax::analytics::{Feed, FeedSettings, MemoryReadModel, ReadModel, Uuid, Version};
use hapax::backend::sqlite::{SqliteJournal, SqliteRecords};
use hapax::bus::{Bus, MemoryBus, TopicSettings};
use hapax::journal::{Append, Expected, Journal as _, JournalSettings};
use hapax::records::{
    Create, Delete, ModuleSlug, Modules as _, Name, Payload, Record, Records as _, Snapshot as _, tenant_id,
};
use hapax::testing::analytics::{block, change};
use hapax::{Event, Tenant};

use crate::feed::{listed, tenants, topic};
use crate::support::wait::until_so;

fn orders() -> ModuleSlug {
    ModuleSlug::new("orders").unwrap()
}

async fn create(records: &SqliteRecords, tenant: Option<&Tenant>) -> Record {
    let create = Create::new(orders(), Payload::new("{}").unwrap()).tenant(tenant.cloned());
    records.create(&create).await.unwrap()
}

async fn delete(records: &SqliteRecords, tenant: Option<&Tenant>, record: &Record) -> Record {
    let delete = Delete::new(orders(), record.id, record.seq).tenant(tenant.cloned());
    records.delete(&delete).await.unwrap()
}

/// Records were created and deleted, and retention has removed both events before the model begins. A relay that is
/// rewound publishes them again, the creation first: the model knows better.
#[tokio::test]
async fn t432_a_model_that_begins_with_a_snapshot_knows_what_was_deleted_before() {
    let dir = tempfile::tempdir().unwrap();
    let journal = SqliteJournal::open(dir.path().join("journal.db"), JournalSettings::default()).unwrap();
    let records = SqliteRecords::open(&journal).unwrap();
    records.create_module(&orders()).await.unwrap();
    let (mut gone, mut live) = (Vec::new(), Vec::new());
    for tenant in tenants() {
        let tenant = tenant.as_ref();
        for n in 0..4 {
            let record = create(&records, tenant).await;
            let name = Name { tenant: tenant_id(tenant).unwrap(), module: orders(), id: record.id };
            if n % 2 == 0 {
                live.push((name, record.seq));
            } else {
                gone.push((name, delete(&records, tenant, &record).await.seq));
            }
        }
    }
    // Not the aggregate of a record, and one of a tenant that has no records.
    for tenant in [None, Some(Tenant::new("acme").unwrap())] {
        let mut append = Append::to("orders/other", Expected::Any, [Event::of("x").unwrap()]).unwrap();
        append.tenant = tenant;
        let _ = journal.append(&append).await.unwrap();
    }
    gone.sort();
    for limit in [1, 2, 100] {
        let (mut seen, mut after) = (Vec::new(), None);
        loop {
            let page = records.gone(after.as_ref(), limit).await.unwrap();
            assert!(page.len() <= limit);
            let Some((last, _)) = page.last() else { break };
            after = Some(last.clone());
            seen.extend(page);
        }
        seen.sort();
        assert_eq!(seen, gone, "in pages of {limit}");
    }

    let bus: Arc<dyn Bus> = Arc::new(MemoryBus::default());
    bus.create_topic(&topic(), TopicSettings::new(2)).await.unwrap();
    let model: Arc<dyn ReadModel> = Arc::new(MemoryReadModel::default());
    let mut settings = FeedSettings::new(topic());
    (settings.generation, settings.linger) = (3, Duration::from_millis(5));
    let feed = Feed::new(bus, Arc::clone(&model), settings).unwrap().with_snapshot(Arc::new(records.clone()));
    let (handle, running) = (feed.handle(), tokio::spawn(feed.run()));
    until_so("the model has begun", || handle.progress().follows).await;
    for (name, seq) in gone.iter().chain(&live) {
        let version = model.version(name.tenant, &name.module, name.id).await.unwrap();
        assert_eq!(version, Some(Version::new(3, *seq).unwrap()), "{name:?}");
    }
    // The creations come again, and the deletions only later.
    let again = gone.iter().map(|(name, _)| {
        let mut of = change(name.id.as_u128(), 1, Some("{}"));
        (of.tenant, of.version) = (name.tenant, Version::new(3, 1).unwrap());
        of
    });
    model.apply(&[block(again)]).await.unwrap();
    for tenant in tenants() {
        let shown: Vec<Uuid> =
            listed(&model, tenant.as_ref()).await.0.iter().map(|record| record.id).collect();
        let of_tenant = tenant_id(tenant.as_ref()).unwrap();
        let mut expected: Vec<Uuid> =
            live.iter().filter(|(name, _)| name.tenant == of_tenant).map(|(name, _)| name.id).collect();
        expected.sort();
        assert_eq!(shown, expected, "{tenant:?}");
    }
    handle.stop();
    running.await.unwrap().unwrap();
}
