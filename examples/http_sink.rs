//! Effects in another service: leased events go out over HTTP with an `Idempotency-Key`, and the
//! service dedups on it.
//!
//! `cargo run --features http --example http_sink` needs no server: it starts a small service of its
//! own, which loses the answer to every third request after it has done the work.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus as _, Record, TopicSettings};
use hapax::consumer::Handled;
use hapax::guard::Run;
use hapax::sink::{Effect, HttpSink, Sink as _};
use hapax::{Consumer, Event, Topic};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::Mutex;

/// A handler with state is a type.
struct Notify(HttpSink);

impl hapax::consumer::LeasedHandler for Notify {
    async fn handle(&self, event: &Event, run: &Run) -> Handled {
        self.0.apply(Effect::leased(event.clone(), run, Duration::from_secs(5))).await
    }
}

/// The service: it remembers which keys it has done, in the same place as the effect.
async fn serve(listener: TcpListener, done: Arc<Mutex<BTreeSet<String>>>, asked: Arc<AtomicU32>) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let mut request = Vec::new();
        // The body is one JSON object.
        while !request.ends_with(b"}") && stream.read_buf(&mut request).await.is_ok_and(|n| n > 0) {}
        let text = String::from_utf8_lossy(&request).to_lowercase();
        let key = text.lines().find_map(|line| line.strip_prefix("idempotency-key: "));
        let Some(key) = key else { continue };
        done.lock().await.insert(key.to_owned());
        if asked.fetch_add(1, Ordering::Relaxed) % 3 != 2 {
            let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n").await;
        } // else the answer is lost, and the event comes again under the same key
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/notify", listener.local_addr()?);
    let (done, asked) = (Arc::<Mutex<BTreeSet<String>>>::default(), Arc::<AtomicU32>::default());
    tokio::spawn(serve(listener, Arc::clone(&done), Arc::clone(&asked)));

    let (bus, topic) = (Arc::new(MemoryBus::default()), Topic::new("orders")?);
    bus.create_topic(&topic, TopicSettings::new(4)).await?;
    let record = |n: u32| Record {
        payload: Some(format!(r#"{{"event_id":"order-{n}-paid"}}"#).into()),
        ..Record::default()
    };
    bus.publish(&topic, &(0..20).chain(0..20).map(record).collect::<Vec<_>>()).await?;

    let consumer = Consumer::builder(bus, MemoryLedger::default())
        .scope("notifier")
        .topic("orders")
        .with(|settings| {
            settings.attempts_max = 100;
            settings.backoff_base = Duration::from_millis(10);
        })
        .build()?;
    let handle = consumer.handle();
    let consuming = tokio::spawn(consumer.leased(Notify(HttpSink::new(&url)?)));
    while handle.progress().passed.values().sum::<u64>() < 40 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    handle.stop();
    consuming.await??;
    let (done, asked) = (done.lock().await.len(), asked.load(Ordering::Relaxed));
    println!("40 deliveries, {asked} requests, {done} notifications sent");
    if done == 20 { Ok(()) } else { Err("20 were expected".into()) }
}
