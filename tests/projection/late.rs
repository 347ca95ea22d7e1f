//! What a projection lacks because its consumer has not read so far is late, and not lost.

use std::sync::Arc;
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::bus::embedded::{EmbeddedBus, EmbeddedSettings};
use hapax::bus::{Bus, Partition};
use hapax::clock::SystemClock;
use hapax::projection::{
    Difference, MemoryProjection, Name, Projection, Projector, Reading, Verified, settings, verify,
};
use hapax::records::Payload;
use hapax::{Consumer, RelayName, Scope};

use crate::support::wait::until;
use crate::world::{RecordSource, topic};

const GROUP: &str = "follower";
/// Of 40 records seven are deleted.
const LIVE: usize = 33;

/// What `hapax project verify` does.
async fn verified(world: &RecordSource, projection: &dyn Projection) -> Verified {
    let history = world.history().await;
    let mut verified = verify(projection, &history, Duration::ZERO).await.unwrap();
    let reading = Reading::new(&*world.bus, topic(), GROUP, RelayName::new("main").unwrap());
    verified.recheck(projection, &history, &reading, Duration::from_millis(200)).await.unwrap();
    verified
}

fn kinds(of: &Verified) -> (usize, usize) {
    let late = of.differences.values().filter(|one| matches!(one, Difference::Late { .. })).count();
    let lost = of.differences.values().filter(|one| matches!(one, Difference::Missing { .. })).count();
    assert_eq!(late + lost, of.differences.len(), "{of:?}");
    (late, lost)
}

/// Runs the projection's consumer until it has read and committed everything.
async fn follow(world: &RecordSource, projection: &Arc<MemoryProjection>) {
    let bus = Arc::clone(&world.bus) as Arc<dyn Bus>;
    let settings = settings(Scope::new(GROUP).unwrap(), topic());
    let consumer = Consumer::builder(bus, MemoryLedger::default()).settings(settings).build().unwrap();
    let handle = consumer.handle();
    let projector = Projector::new(Arc::clone(projection) as Arc<dyn Projection>, 1).unwrap();
    let running = tokio::spawn(consumer.leased_batch(projector));
    for number in 0..2 {
        let partition = Partition { topic: topic(), number };
        let (start, end) = world.bus.range(&partition).await.unwrap();
        until("committed", async || {
            world.bus.committed(GROUP, &partition).await.unwrap().unwrap_or(start) >= end
        })
        .await;
    }
    handle.stop();
    running.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t523_what_a_consumer_has_not_read_is_late_and_not_lost() {
    let world = RecordSource::new().await;
    let projection = Arc::new(MemoryProjection::default());
    world.write(40).await;
    assert_eq!(kinds(&verified(&world, &*projection).await), (LIVE, 0), "nothing is published");
    world.relay("main").await;
    let plain = verify(&*projection, &world.history().await, Duration::ZERO).await.unwrap();
    assert_eq!(kinds(&plain), (0, LIVE), "the records alone do not say why");
    let late = verified(&world, &*projection).await;
    assert_eq!(kinds(&late), (LIVE, 0), "nothing is read");
    let said = late.differences.values().next().unwrap().to_string();
    assert!(said.starts_with("late: is missing; it should have 2"), "{said}");
    follow(&world, &projection).await;
    assert!(verified(&world, &*projection).await.is_equal());

    // One that is behind is late too, and only where its own partition is not read.
    let changed = world.update_one().await;
    world.relay("main").await;
    let late = verified(&world, &*projection).await;
    let differs: Vec<(&Name, String)> =
        late.differences.iter().map(|(name, what)| (name, what.to_string())).collect();
    assert_eq!(
        differs,
        [(&changed, "late: has seq 2; it should have 3, which its consumer has not read yet".to_owned())]
    );
    let empty = MemoryProjection::default();
    let (late, lost) = kinds(&verified(&world, &empty).await);
    assert!(
        late > 0 && lost > 0 && late + lost == LIVE,
        "{late} in the partition of the change, {lost} in the other"
    );

    // What the consumer has read and the projection does not have is lost.
    follow(&world, &projection).await;
    assert!(verified(&world, &*projection).await.is_equal());
    assert_eq!(kinds(&verified(&world, &empty).await), (0, LIVE));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t524_an_event_that_the_bus_refuses_makes_no_other_late() {
    let world = RecordSource::new().await;
    world.write(40).await;
    let large = Payload::new(format!("{{\"large\":\"{}\"}}", "x".repeat(100_000))).unwrap();
    let parked = world.update_with(large).await;
    let mut small = EmbeddedSettings::default();
    small.record_bytes_max = 50_000;
    let bus = EmbeddedBus::open_with(world.dir.path().join("bus.db"), small, Arc::new(SystemClock)).unwrap();
    world.relay_to("main", Arc::new(bus)).await;
    let projection = Arc::new(MemoryProjection::default());
    follow(&world, &projection).await;
    // What the bus does not have is late; what is on it and was read is lost.
    let found = verified(&world, &MemoryProjection::default()).await;
    assert_eq!(kinds(&found), (1, LIVE - 1));
    assert!(matches!(found.differences[&parked], Difference::Late { .. }), "{found:?}");
}
