//! `hapax doctor` over HTTP.

use std::time::Duration;

use axum::extract::State;
use hapax::problem::Problem;
use serde::Serialize;
use tokio::sync::Mutex;
use tokio::time::Instant;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::{App, Shared};
use super::auth::Operator;
use super::extract::Json;
use crate::doctor;

/// How long the findings are remembered: the checks open connections of their own.
const REMEMBERED: Duration = Duration::from_secs(5);

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(checks))
}

/// What one check found.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct CheckAnswer {
    /// `fine`, `warning`, `refusal` (a promise cannot be kept) or `unreachable`.
    level: &'static str,
    /// What was checked.
    check: String,
    /// What was found, in a sentence.
    message: String,
}

/// What the checks found.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct DoctorAnswer {
    /// Each check.
    findings: Vec<CheckAnswer>,
    /// When the checks were made.
    checked_at: String,
}

/// What the checks found lately.
#[derive(Default)]
pub struct Checked(Mutex<Option<(Instant, DoctorAnswer)>>);

impl Checked {
    async fn get(&self, app: &App) -> DoctorAnswer {
        use hapax::clock::{Clock as _, SystemClock};
        // Others wait for the answer to the first.
        let mut last = self.0.lock().await;
        if let Some((at, answer)) = &*last
            && at.elapsed() < REMEMBERED
        {
            return answer.clone();
        }
        let topics = app.bus.as_ref().map(|_| app.config.relay.topic.clone());
        let in_memory = app.ledger.clone();
        let ledger = (app.config.ledger.url == "memory:").then_some(in_memory);
        let report = doctor::examine(&app.global, &app.config, &Vec::from_iter(topics), None, ledger).await;
        let findings = report.looked.into_iter().map(|looked| CheckAnswer {
            level: looked.verdict.label(),
            check: looked.check,
            message: looked.message,
        });
        let answer = DoctorAnswer { findings: findings.collect(), checked_at: SystemClock.now().to_string() };
        *last = Some((Instant::now(), answer.clone()));
        answer
    }
}

/// Checks everything the server works with, as `hapax doctor` does
///
/// It names addresses of the server's stores, so it needs a token without a tenant and for all scopes.
#[utoipa::path(
    get, path = "/v1/doctor", tag = "server",
    responses((status = 200, description = "What each check found", body = DoctorAnswer))
)]
async fn checks(
    Operator(caller): Operator,
    State(app): State<Shared>,
) -> Result<Json<DoctorAnswer>, Problem> {
    caller.needs_all_tenants()?;
    Ok(Json(app.checked.get(&app).await))
}
