//! Counts and logs a request, wherever its end is seen: the connection that waits for the answer, or the
//! task that goes on without it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::http::Method;
use tracing::Span;

use super::app::Shared;

/// The status under which a request is counted that nobody answered because its client hung up. It is
/// never sent.
const HUNG_UP: u16 = 499;

/// A request, from its head to its end.
pub struct Tally {
    app: Shared,
    method: Method,
    route: String,
    span: Span,
    began: Instant,
    counted: AtomicBool,
    /// Whether its client has gone.
    left: AtomicBool,
    gauge: metrics::Gauge,
}

impl Tally {
    pub fn new(app: &Shared, method: Method, route: String, span: Span) -> Arc<Self> {
        let gauge = metrics::gauge!(prefixed(&app.config.telemetry_prefix, "http_requests_in_flight"));
        gauge.increment(1.0);
        Arc::new(Tally {
            app: Arc::clone(app),
            method,
            route,
            span,
            began: Instant::now(),
            counted: AtomicBool::new(false),
            left: AtomicBool::new(false),
            gauge,
        })
    }

    /// Its client has gone; what it asked for may go on.
    pub fn left(&self) {
        self.left.store(true, Ordering::Release);
    }

    /// It has an answer. The first one counts: what is answered because time is over may end later.
    pub fn answered(&self, status: u16) {
        let ms = self.began.elapsed().as_secs_f64() * 1000.0;
        let first = !self.counted.swap(true, Ordering::AcqRel);
        if first {
            self.span.record("http.status", status);
            count(&self.app, &self.method, &self.route, status, self.began.elapsed());
        }
        self.span.in_scope(|| match (first, self.left.load(Ordering::Acquire)) {
            (false, _) => tracing::info!(target: "hapax", status, ms, "ended after its time was over"),
            (true, false) => tracing::info!(target: "hapax", status, ms, "answered"),
            (true, true) => tracing::info!(target: "hapax", status, ms, "ended after its client hung up"),
        });
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        if !self.counted.load(Ordering::Acquire) {
            self.answered(if std::thread::panicking() { 500 } else { HUNG_UP });
        }
        self.gauge.decrement(1.0);
    }
}

fn prefixed(prefix: &str, name: &str) -> String {
    if prefix.is_empty() { name.to_owned() } else { format!("{prefix}_{name}") }
}

/// Counts a request. The labels are bounded: the route as it is written, not as it was called.
fn count(app: &Shared, method: &Method, route: &str, status: u16, took: Duration) {
    let name = |name: &str| prefixed(&app.config.telemetry_prefix, name);
    // Anybody can invent methods.
    let method = match method.as_str() {
        known @ ("GET" | "HEAD" | "POST" | "PUT" | "PATCH" | "DELETE" | "OPTIONS") => known.to_owned(),
        _ => "other".to_owned(),
    };
    let labels = [("method", method), ("route", route.to_owned()), ("status", status.to_string())];
    metrics::counter!(name("http_requests_total"), &labels).increment(1);
    metrics::histogram!(name("http_request_duration_seconds"), &labels[..2]).record(took.as_secs_f64());
}
