//! `hapax serve`: ledger, journal and keys over HTTP, for programs in any language.
//!
//! One process does it all: it answers requests, publishes the journal to the bus, and sweeps.
//!
//! ```text
//! connection ─▶ listen.rs ─▶ front.rs ─▶ auth.rs ─▶ front.rs ─▶ a route ─▶ guard, journal, keys
//!               limits        host, origin,  who calls   the body is
//!                             time, span                 here: it begins
//! ```
//!
//! A route is a function with `#[utoipa::path]` in the file of its area; `routes.rs` collects them.

pub mod analytics;
mod app;
mod audit;
mod auth;
mod background;
pub mod beside;
mod checks;
mod claims;
mod counters;
mod cursor;
mod explain;
mod extract;
mod feeding;
mod front;
mod groups;
mod health;
#[cfg(test)]
mod hostile;
mod hosts;
mod journal;
mod kept;
mod keys;
mod letters;
mod listen;
mod openapi;
mod overview;
mod page;
mod pulses;
mod recent;
mod records;
mod retention;
mod routes;
mod session;
mod settle;
mod stats;
mod store;
mod stream;
mod tally;
mod tokens;
mod waiting;
mod wording;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde_json::json;
use tokio::sync::watch;

use crate::cli::Global;
use crate::exporters::Metrics;
use crate::failure::Failure;
use crate::print;
use crate::signal::Gate;
use app::{App, Shared, With};
use background::Background;

/// Serve claims, journal, records and keys over HTTP; publish the journal, and keep the read model
///
/// Without credentials it listens on this machine only. `GET /openapi.json` describes the API; a browser gets
/// the operator's page at `/`.
#[derive(Debug, Args)]
#[command(after_help = "Example: hapax serve --listen 127.0.0.1:7070 --data hapax-data")]
pub struct ServeArgs {
    /// Where to listen; port 0 picks a free one (serve.listen)
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
    /// Where to listen for operators, if apart (serve.admin_listen)
    #[arg(long, value_name = "ADDRESS:PORT")]
    admin_listen: Option<String>,
    /// Leave out what runs elsewhere; may be repeated
    #[arg(long, value_name = "PART", value_enum)]
    without: Vec<Part>,
}

/// What else runs in the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The relay, which publishes the journal to the bus
    Relay,
    /// The sweepers, which forget what is older than the retention
    Sweepers,
    /// The feed of the read model
    Analytics,
}

/// How long the relay may take to stop, besides the time for requests.
const RELAY_STOPS: Duration = Duration::from_secs(5);

/// How long files may take to close.
const CLOSES: Duration = Duration::from_secs(1);

pub async fn run(
    global: &Global,
    args: &ServeArgs,
    gate: &Gate,
    metrics: Option<&Metrics>,
) -> Result<u8, Failure> {
    let began = Instant::now();
    let config = global.load_with(&[
        ("serve.listen", "--listen", args.listen.clone()),
        ("serve.admin_listen", "--admin-listen", args.admin_listen.clone()),
    ])?;
    auth::check_addresses(global, &config).await?;
    if !config.dedup.enabled {
        return Err(Failure::config(
            "dedup.enabled is false (ENABLE_PROCESSED_EVENT_REGISTRY): a server whose claims guard nothing is not started",
        ));
    }
    // Before anything is created: another server may have the port.
    let listener = listen::bind(config.serve.listen, "--listen").await?;
    let admin_listener = match config.serve.admin_listen {
        Some(address) => Some(listen::bind(address, "--admin-listen").await?),
        None => None,
    };
    let (stop, stopping) = watch::channel(false);
    let with = With {
        relay: !args.without.contains(&Part::Relay),
        sweepers: !args.without.contains(&Part::Sweepers),
        analytics: !args.without.contains(&Part::Analytics),
    };
    let (app, bus) = App::open(global, config, metrics, stopping.clone(), with, None).await?;
    app.import_bootstrap_token().await?;
    let background = Background::start(&app, bus, with)?;

    let address = listen::address(&listener)?;
    let admin_address = admin_listener.as_ref().map(listen::address).transpose()?;
    let limits = || listen::Limits::of(&app.config.serve);
    let (main, admin) = routes::build(&app, admin_listener.is_some());
    let mut servers = tokio::task::JoinSet::new();
    servers.spawn(listen::serve(listener, main, limits(), stopping.clone()));
    if let Some(listener) = admin_listener {
        servers.spawn(listen::serve(listener, admin, limits(), stopping));
    }

    let mut signals = gate.take_signals();
    let took = began.elapsed();
    if global.json {
        print::json(&json!({
            "ready": true,
            "address": address.to_string(),
            "admin_address": admin_address.map(|address| address.to_string()),
            "url": format!("http://{address}"),
            "ms": u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        }))?;
    } else {
        let backends = app.backends();
        print::line(&format!("hapax serves http://{address} ({backends}); Ctrl-C stops it"))?;
    }

    let code = signals.recv().await.unwrap_or(143);
    app.leaving.store(true, Ordering::Release);
    // Whoever sends requests here learns from probes to send them elsewhere, while they are still taken.
    tokio::select! {
        () = tokio::time::sleep(app.config.serve.stop_delay) => {}
        _ = signals.recv() => {} // at once, then
    }
    stop.send_replace(true);
    drain(&app, servers).await;
    if tokio::time::timeout(RELAY_STOPS, background.stop()).await.is_err() {
        tracing::warn!(target: "hapax", "the relay did not stop in time; its leadership lapses");
    }
    if let Ok(Err(error)) = tokio::time::timeout(CLOSES, app.guard.skip_log().flush()).await {
        tracing::warn!(target: "hapax", error = %error.chain(), "the last skips could not be logged");
    }
    close(app).await;
    Ok(u8::try_from(code).unwrap_or(1))
}

/// Closes files and connections. A thread that still waits for a locked file is not waited for: what it was
/// asked is cut off, as if the process had been killed.
async fn close(app: Shared) {
    let closed = tokio::task::spawn_blocking(move || drop(app));
    if tokio::time::timeout(CLOSES, closed).await.is_err() {
        tracing::warn!(target: "hapax", "a file is locked by another process, and is not waited for");
    }
}

/// Waits for the requests that run, for as long as they have.
async fn drain(app: &App, mut servers: tokio::task::JoinSet<()>) {
    let limit = app.config.serve.drain;
    let finished = async {
        while servers.join_next().await.is_some() {}
        app.finished().await;
    };
    if tokio::time::timeout(limit, finished).await.is_err() {
        let drain_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        tracing::warn!(target: "hapax", drain_ms, "requests still ran when the time to finish them was over; they are cut off");
    }
}
