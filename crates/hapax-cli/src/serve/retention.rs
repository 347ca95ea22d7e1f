//! What is kept for how long, and what goes next.

use std::collections::BTreeMap;

use axum::extract::State;
use hapax::ledger::{SweepSettings, Week, WeekSize};
use hapax::problem::Problem;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::Shared;
use super::auth::Operator;
use super::extract::Json;

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(retention))
}

/// A week of the ledger.
#[derive(Debug, Serialize, ToSchema)]
pub struct WeekAnswer {
    /// The Monday on which it begins; `timeless` is that of ids without a time, which go one by one.
    week: String,
    /// The Monday before which it ends.
    ends_at: Option<String>,
    /// It goes with the first sweep after this time, unless something in it was settled later.
    drops_after: Option<String>,
    /// How many entries a sweep would remove with it now; none: it stays.
    removes: Option<u64>,
    /// How many entries it has.
    entries: u64,
    /// What they and their index occupy, if the store can tell.
    bytes: Option<u64>,
}

/// A week that is gone.
#[derive(Debug, Serialize, ToSchema)]
pub struct DroppedWeek {
    /// The Monday on which it began.
    week: String,
    /// When it was dropped.
    dropped_at: String,
}

/// What is kept for how long.
#[derive(Debug, Serialize, ToSchema)]
pub struct RetentionAnswer {
    /// The ledger's clock.
    now: String,
    /// How long an entry stays after it was settled, in seconds (ledger.retention_days).
    ledger_retention_s: u64,
    /// How long the answer to a keyed write is kept, in seconds (keys.retention_days).
    key_retention_s: u64,
    /// How long audit rows are kept, in seconds (serve.audit_retention_days).
    audit_retention_s: u64,
    /// The weeks that the ledger has, the oldest first.
    weeks: Vec<WeekAnswer>,
    /// The weeks that it dropped, the latest first.
    dropped: Vec<DroppedWeek>,
    /// How many entries it has.
    entries: u64,
    /// How many of them it holds with their bytes, which outlive their week.
    held: u64,
    /// How many entries a sweep would remove now.
    sweep_removes: u64,
    /// How many of them are in no week.
    sweep_timeless: u64,
    /// Set if the clock leapt: nothing is removed before this time.
    sweep_paused_until: Option<String>,
    /// When keys were last swept.
    keys_swept_at: Option<String>,
    /// How long ago the entries were counted, in seconds.
    age_s: f64,
    /// When the oldest event of the journal was appended. The journal is never swept by the server.
    journal_oldest_at: Option<String>,
}

/// What is kept for how long, and what a sweep would remove now
///
/// It is about all tenants, so it needs a token without a tenant and for all scopes.
#[utoipa::path(
    get, path = "/v1/retention", tag = "server",
    responses((status = 200, description = "Weeks, and what goes when", body = RetentionAnswer))
)]
async fn retention(
    Operator(caller): Operator,
    State(app): State<Shared>,
) -> Result<Json<RetentionAnswer>, Problem> {
    caller.needs_all_tenants()?;
    let config = &app.config;
    let rehearsal = SweepSettings { dry_run: true, ..config.sweep_settings() };
    let counted = app.counted.ledger(&app).await?;
    let stat = &counted.value;
    let (swept, keys, journal) =
        tokio::try_join!(app.ledger.sweep(rehearsal), app.kept_keys.info(), app.journal.stat())?;
    let keeps = config.ledger.retention;
    let removes: BTreeMap<Week, u64> = swept.weeks.iter().copied().collect();
    let sizes: BTreeMap<Week, WeekSize> = stat.week_sizes.iter().map(|size| (size.week, *size)).collect();
    let week = |week: Week| WeekAnswer {
        week: week.to_string(),
        ends_at: (!week.is_timeless()).then(|| week.end().to_string()),
        drops_after: (!week.is_timeless()).then(|| week.end().plus(keeps).to_string()),
        removes: removes.get(&week).copied(),
        entries: sizes.get(&week).map_or(0, |size| size.entries),
        bytes: sizes.get(&week).and_then(|size| size.bytes),
    };
    let mut weeks = stat.weeks.clone();
    weeks.sort();
    let mut dropped = stat.dropped.clone();
    dropped.sort_by_key(|(_, at)| std::cmp::Reverse(*at));
    Ok(Json(RetentionAnswer {
        now: stat.now.to_string(),
        age_s: counted.age().as_secs_f64(),
        ledger_retention_s: keeps.as_secs(),
        key_retention_s: config.keys.retention.as_secs(),
        audit_retention_s: config.serve.audit_retention.as_secs(),
        weeks: weeks.into_iter().map(week).collect(),
        dropped: dropped
            .into_iter()
            .take(20)
            .map(|(week, at)| DroppedWeek { week: week.to_string(), dropped_at: at.to_string() })
            .collect(),
        entries: stat.counts.iter().map(|(.., count)| count).sum(),
        held: stat.held,
        sweep_removes: swept.entries(),
        sweep_timeless: swept.rows,
        sweep_paused_until: swept.paused_until.map(|until| until.to_string()),
        keys_swept_at: keys.swept_at.map(|at| at.to_string()),
        journal_oldest_at: journal.oldest_at.map(|at| at.to_string()),
    }))
}
