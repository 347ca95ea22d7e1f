//! `hapax demo --page`: the operator's page on the files of the demo, while it runs.

use std::sync::Arc;

use hapax::Topic;
use hapax::bus::Bus;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::view::Shared;
use super::world::{PARCELS, PAYMENTS, RELAY, World};
use crate::cli::Global;
use crate::failure::Failure;
use crate::serve::beside::{Asked, Beside, Demo, Watched};

/// How much of the news is on the page.
const NEWS: usize = 8;

/// Starts the server.
pub async fn start(
    global: &Global,
    world: &World,
    port: u16,
    bus: Arc<dyn Bus>,
    shown: Shared,
    asks: mpsc::Sender<Asked>,
) -> Result<Beside, Failure> {
    let watched = Watched { bus, topics: vec![Topic::new(PAYMENTS)?, Topic::new(PARCELS)?] };
    let look = Arc::new(move || look(&shown));
    Beside::start(&of(global, world, port), watched, Demo { asks, look }).await
}

/// The flags of a server on these files, whatever else is configured on this machine.
fn of(global: &Global, world: &World, port: u16) -> Global {
    let file = |path: std::path::PathBuf| path.display().to_string();
    let set = [
        ("ledger.url", format!("sqlite:{}", file(world.ledger()))),
        ("journal.url", format!("sqlite:{}", file(world.journal()))),
        ("bus.url", format!("embedded:{}", file(world.bus()))),
        ("keys.url", format!("sqlite:{}", file(world.dir().join("keys.db")))),
        ("analytics.url", format!("sqlite:{}", file(world.reads()))),
        ("relay.name", RELAY.to_owned()),
        ("relay.topic", PAYMENTS.to_owned()),
        ("serve.listen", format!("127.0.0.1:{port}")),
    ];
    Global {
        data: Some(world.dir().display().to_string()),
        ledger: None,
        journal: None,
        bus: None,
        set: set.into_iter().map(|(key, value)| format!("{key}={value}")).collect(),
        ..global.clone()
    }
}

/// How far the demo is.
fn look(shown: &Shared) -> Value {
    let elapsed = shown.elapsed().as_secs_f64();
    shown.get(|shown| {
        let news = shown.news.iter().rev().take(NEWS);
        let news: Vec<_> = news.map(|(at, said)| json!({"at_s": at.as_secs_f64(), "said": said})).collect();
        json!({
            "elapsed_s": elapsed, "events": shown.events, "effects": shown.effects, "kills": shown.kills,
            "frozen": shown.frozen, "fenced": shown.fenced, "copied": shown.copied, "retried": shown.retried,
            "caught": shown.retried + shown.window() + shown.ledger(), "news": news,
        })
    })
}
