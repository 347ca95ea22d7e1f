//! A consumer that is killed, and the one that takes over. The witness counts effects and never asks the ledger.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::bus::{Bus, MemoryBus, Partition, Record, TopicSettings};
use hapax::clock::ManualClock;
use hapax::consumer::{Consumer, ConsumerBuilder, Failed, Handled};
use hapax::guard::Run;
use hapax::ledger::{Claims as _, Intervene, Intervention, Operations as _, Settings};
use hapax::testing::relay::{FaultyBus, away};
use hapax::window::{MemoryWindow, Window, WindowSettings};
use hapax::{Event, Time, Topic};
use tokio::task::JoinHandle;

const COMMIT_INTERVAL: Duration = Duration::from_millis(5);
/// Longer than anything here takes; virtual time, so a busy machine does not need more.
const PATIENCE: Duration = Duration::from_secs(20);

/// A topic, a ledger, and who counts the effects.
struct Scene {
    bus: Arc<FaultyBus>,
    clock: ManualClock,
    ledger: MemoryLedger,
    effects: Arc<Mutex<BTreeMap<String, usize>>>,
}

fn partition(topic: &str) -> Partition {
    Partition { topic: Topic::new(topic).unwrap(), number: 0 }
}

/// Waits until something is so. Returns whether it came.
async fn comes(is: impl AsyncFn() -> bool) -> bool {
    let end = tokio::time::Instant::now() + PATIENCE;
    while tokio::time::Instant::now() < end {
        if is().await {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    false
}

impl Scene {
    async fn new(events: usize) -> Self {
        let bus = MemoryBus::default();
        for topic in ["orders", "orders.dead"] {
            bus.create_topic(&Topic::new(topic).unwrap(), TopicSettings::new(1)).await.unwrap();
        }
        for n in 0..events {
            let payload = serde_json::json!({"event_id": format!("e-{n}")}).to_string();
            let record = Record { payload: Some(payload.into()), ..Record::default() };
            bus.publish(&Topic::new("orders").unwrap(), &[record]).await.unwrap().remove(0).unwrap();
        }
        let clock = ManualClock::new(Time::parse("2026-01-02T03:04:05Z").unwrap());
        let ledger = MemoryLedger::with_clock(Settings::default(), Arc::new(clock.clone()));
        Scene { bus: Arc::new(FaultyBus::new(Arc::new(bus))), clock, ledger, effects: Arc::default() }
    }

    fn consumer(&self) -> ConsumerBuilder<MemoryLedger> {
        let builder =
            Consumer::builder(self.bus.clone(), self.ledger.clone()).scope("mailer").topic("orders");
        builder.with(|settings| settings.commit_interval = COMMIT_INTERVAL)
    }

    /// A process: an event of `hangs` never ends, every other one takes effect.
    fn process(&self, builder: ConsumerBuilder<MemoryLedger>, hangs: &'static str) -> JoinHandle<()> {
        let effects = Arc::clone(&self.effects);
        let handler = move |event: &Event, _: &Run| {
            let (id, effects) = (event.id.to_string(), Arc::clone(&effects));
            async move {
                if id == hangs {
                    std::future::pending::<()>().await;
                }
                *effects.lock().unwrap().entry(id).or_default() += 1;
                Ok(())
            }
        };
        let consumer = builder.build().unwrap();
        tokio::spawn(async move { consumer.leased(handler).await.map(drop).unwrap() })
    }

    fn count(&self) -> usize {
        self.effects.lock().unwrap().values().sum()
    }

    /// Nothing more happens in a process for a while: all that it commits and remembers it has by then.
    async fn settles_down(&self) {
        tokio::time::sleep(COMMIT_INTERVAL * 100).await;
    }

    /// kill -9. Its leases lapse before anybody takes over.
    async fn kill(&self, process: JoinHandle<()>) {
        process.abort();
        assert!(process.await.unwrap_err().is_cancelled());
        self.clock.advance(Duration::from_secs(3600));
    }

    /// What the witness has seen of so many events.
    async fn every_event_takes_effect_once(&self, events: usize) {
        comes(async || self.count() >= events).await;
        let seen = self.effects.lock().unwrap().clone();
        let lost: BTreeSet<_> =
            (0..events).map(|n| format!("e-{n}")).filter(|id| !seen.contains_key(id)).collect();
        assert!(lost.is_empty(), "lost: {lost:?}");
        assert!(seen.values().all(|count| *count == 1), "doubled: {seen:?}");
    }
}

/// The first of ten never ends while the others do, and then its process dies.
async fn dies_with_one_unfinished(window: Option<Arc<dyn Window>>) {
    let scene = Scene::new(10).await;
    let builder = || match &window {
        Some(window) => scene.consumer().window(Arc::clone(window)),
        None => scene.consumer(),
    };
    let first = scene.process(builder(), "e-0");
    assert!(comes(async || scene.count() == 9).await, "the others take effect");
    scene.settles_down().await;
    scene.kill(first).await;
    let heir = scene.process(builder(), "");
    scene.every_event_takes_effect_once(10).await;
    heir.abort();
}

#[tokio::test(start_paused = true)]
async fn a_process_that_dies_loses_nothing_unfinished() {
    dies_with_one_unfinished(None).await;
}

#[tokio::test(start_paused = true)]
async fn a_window_hides_nothing_unfinished() {
    let window = MemoryWindow::new(WindowSettings::new("1"), 1000).unwrap();
    dies_with_one_unfinished(Some(Arc::new(window))).await;
}

/// A run fails to notice that its lease has lapsed, and says that it is done although it did nothing; whoever took over
/// dies. What the late one says must not count: the event would be done without an effect.
#[tokio::test(start_paused = true)]
async fn a_run_that_was_taken_over_settles_nothing() {
    use hapax::ledger::{Claim, Identity, LeaseSettings, Mode, Outcome, Settle, Verdict};
    let scene = Scene::new(1).await;
    let identity = Identity::new("mailer".parse().unwrap(), "e-0".parse().unwrap());
    let settings = LeaseSettings { lease: Duration::from_secs(30), attempts_max: 5, alone: false };
    let mut grants = Vec::new();
    for _ in 0..2 {
        let claim = Claim::new(identity.clone(), Mode::Lease(settings));
        let outcome = scene.ledger.claim(&[claim]).await.unwrap().remove(0).unwrap();
        let Outcome::First(grant) = outcome else { panic!("{outcome:?}") };
        grants.push(grant);
        scene.clock.advance(Duration::from_secs(60));
    }
    let late = Settle {
        identity,
        week: grants[0].week,
        token: grants[0].token,
        verdict: Verdict::Done { metadata: None },
        order: None,
        advance_to: None,
    };
    let _ = scene.ledger.settle(&[late]).await.unwrap().remove(0).unwrap();
    let heir = scene.process(scene.consumer(), "");
    scene.every_event_takes_effect_once(1).await;
    heir.abort();
}

/// The bus refuses a dead letter, and then the process that wanted to publish it dies.
#[tokio::test(start_paused = true)]
async fn every_dead_letter_reaches_its_topic() {
    let scene = Scene::new(1).await;
    let refused = Arc::new(Mutex::new(0));
    let count = Arc::clone(&refused);
    scene.bus.fail(move |record| {
        let is_letter = record.headers.iter().any(|(name, _)| name.starts_with("hapax-dead-"));
        *count.lock().unwrap() += usize::from(is_letter);
        is_letter.then(away)
    });
    let process = || {
        let consumer = scene.consumer().build().unwrap();
        tokio::spawn(async move {
            let broken = async |_: &Event, _: &Run| Handled::Err(Failed::fatal("broken"));
            consumer.leased(broken).await.unwrap();
        })
    };
    let first = process();
    assert!(comes(async || *refused.lock().unwrap() > 0).await, "it is refused");
    scene.kill(first).await;
    scene.bus.heal();
    let heir = process();
    let letters = async || scene.bus.range(&partition("orders.dead")).await.unwrap().1;
    assert!(comes(async || letters().await > 0).await, "a dead letter that is nowhere");
    heir.abort();
}

/// A run that an operator took away fails for good, and may no longer say so: the run after it succeeds.
#[tokio::test(start_paused = true)]
async fn only_what_is_dead_is_a_dead_letter() {
    let scene = Scene::new(1).await;
    let consumer = scene.consumer().build().unwrap();
    let handle = consumer.handle();
    let (ledger, taken) = (scene.ledger.clone(), Arc::new(Mutex::new(false)));
    let running = tokio::spawn(consumer.leased(move |_: &Event, run: &Run| {
        let identity = run.key().clone();
        let (ledger, first) = (ledger.clone(), !std::mem::replace(&mut *taken.lock().unwrap(), true));
        async move {
            if first {
                let what = Intervention::Release;
                let release = Intervene {
                    identity,
                    time: None,
                    what,
                    by: "operator".into(),
                    reason: "it hangs".into(),
                    dry_run: false,
                    out_of_order: false,
                    token: None,
                };
                ledger.intervene(&release).await.unwrap();
                return Err(Failed::fatal("broken"));
            }
            Ok(())
        }
    }));
    assert!(comes(async || handle.progress().passed.get("done") == Some(&1)).await, "it is done");
    handle.stop();
    running.await.unwrap().unwrap();
    let letters = scene.bus.range(&partition("orders.dead")).await.unwrap();
    assert_eq!(letters, (0, 0), "a copy of what is not dead");
}
