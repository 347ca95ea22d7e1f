//! Records as the read model has them: each counted once, with the time up to which the answer is complete.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use hapax::Error;
use hapax::analytics::{
    Analytics, Answer, Field, Groups, ListPage, Measure, Meta, PartitionSync, ReadModel, ReadToken,
    RecordsQuery, Uuid,
};
use hapax::problem::Problem;
use hapax::records::{LIST_DEFAULT, LIST_MAX, Record};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::{App, Shared};
use super::auth::{Operator, Reader};
use super::extract::{Json, Named, Params, limit};
use super::records::RecordBody;
use crate::cli::duration;

/// How long a request waits for a write at most.
const WAIT_MAX: Duration = Duration::from_secs(30);

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(tally))
}

pub fn operators() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(status))
}

fn model(app: &App) -> Result<Arc<dyn ReadModel>, Problem> {
    app.reads.clone().ok_or_else(|| {
        let message = "this server has no read model; analytics.url names one";
        Error::Unsupported(message.into()).into()
    })
}

/// How current an answer is.
#[derive(Debug, Serialize, ToSchema)]
pub struct MetaBody {
    /// Every write that was acknowledged before this time is in the answer (RFC 3339, UTC, milliseconds);
    /// null: nothing is known yet.
    #[serde(rename = "lastSyncAt")]
    #[schema(format = "date-time")]
    last_sync_at: Option<String>,
    /// Whether that is unknown, or more than five seconds ago.
    stale: bool,
    /// What an approximate answer may count wrongly; null: nothing.
    approximate: Option<&'static str>,
}

impl From<Meta> for MetaBody {
    fn from(meta: Meta) -> Self {
        MetaBody { last_sync_at: meta.last_sync_text(), stale: meta.stale, approximate: meta.approximate }
    }
}

/// Which records, and how current.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListParams {
    /// Only records written within this time, as `7d`, `24h` or `90s`.
    since: Option<String>,
    /// Only records with a greater id: `next` of the page before.
    #[param(format = "uuid")]
    after: Option<String>,
    /// How many at most.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
    /// Accept an answer that may count replaced versions.
    #[serde(default)]
    approximate: bool,
    /// Wait until this write is visible: `MODULE/ID@SEQ` of its answer.
    after_write: Option<String>,
    /// How long to wait for it, in milliseconds; 5000 if it is not said.
    #[param(maximum = 30_000)]
    wait_ms: Option<u64>,
}

/// What to compute, and of which records.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct TallyParams {
    /// Only records written within this time, as `7d`, `24h` or `90s`.
    since: Option<String>,
    /// Fields to sum, as JSON pointers with commas between: `/amount,/tax`.
    sum: Option<String>,
    /// Fields whose least number is asked for.
    min: Option<String>,
    /// Fields whose greatest number is asked for.
    max: Option<String>,
    /// For each value of this field apart.
    group_by: Option<String>,
    /// Accept an answer that may count replaced versions.
    #[serde(default)]
    approximate: bool,
    /// Wait until this write is visible: `MODULE/ID@SEQ` of its answer.
    after_write: Option<String>,
    /// How long to wait for it, in milliseconds; 5000 if it is not said.
    #[param(maximum = 30_000)]
    wait_ms: Option<u64>,
}

/// What both questions have in common.
struct Common<'p> {
    since: Option<&'p str>,
    approximate: bool,
    after_write: Option<&'p str>,
    wait_ms: Option<u64>,
}

macro_rules! common {
    ($params:ident) => {
        Common {
            since: $params.since.as_deref(),
            approximate: $params.approximate,
            after_write: $params.after_write.as_deref(),
            wait_ms: $params.wait_ms,
        }
    };
}

impl Common<'_> {
    fn query(&self, app: &App, reader: &Reader, module: &str) -> Result<RecordsQuery, Problem> {
        let analytics = Analytics::new(model(app)?, reader.0.tenant.as_ref())?;
        let mut query = analytics.records(module)?;
        if let Some(since) = self.since {
            query = query.since(duration(since).map_err(|message| Error::invalid("since", message))?);
        }
        if self.approximate {
            query = query.approximate();
        }
        if let Some(token) = self.after_write {
            query = query.after(token.parse::<ReadToken>()?);
        }
        let wait = self.wait_ms.map_or(Duration::from_secs(5), Duration::from_millis);
        if wait > WAIT_MAX {
            let message = format!("it is {}; it may be up to {}", wait.as_millis(), WAIT_MAX.as_millis());
            return Err(Error::invalid("wait_ms", message).into());
        }
        Ok(query.wait(wait))
    }
}

/// A page of records.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReadPageAnswer {
    /// The records, by id.
    records: Vec<RecordBody>,
    /// Where the next page begins, if there may be one.
    #[schema(format = "uuid")]
    next: Option<String>,
    /// How current they are.
    meta: MetaBody,
}

/// Read the records of a module as the read model has them
///
/// Of every record the current version, once; deleted records are not there.
#[utoipa::path(
    get, path = "/v1/analytics/modules/{slug}/records", tag = "analytics", params(("slug" = String, Path, description = "The module"), ListParams),
    responses(
        (status = 200, description = "A page of records", body = ReadPageAnswer),
        (status = 409, description = "The write is not visible yet: `conflict`, with how far the read model is"),
    )
)]
async fn list(
    reader: Reader,
    State(app): State<Shared>,
    Named(slug): Named,
    Params(params): Params<ListParams>,
) -> Result<Json<ReadPageAnswer>, Problem> {
    let query = common!(params).query(&app, &reader, &slug)?;
    let after = params.after.as_deref().map(|id| {
        Uuid::try_parse(id)
            .map_err(|_| Error::invalid("after", format!("it is {id:?}; it is the id of a record")))
    });
    let page = ListPage::new(after.transpose()?, limit(params.limit, LIST_DEFAULT, LIST_MAX)?)?;
    let Answer { value, meta, .. } = query.list(page).await?;
    Ok(Json(ReadPageAnswer {
        records: value.records.into_iter().map(|record: Record| RecordBody::from(&record)).collect(),
        next: value.next.map(|id| id.to_string()),
        meta: meta.into(),
    }))
}

/// One measure of a group.
#[derive(Debug, Serialize, ToSchema)]
pub struct MeasureBody {
    /// `sum`, `min` or `max`.
    measure: &'static str,
    /// The field.
    field: String,
    /// The number, exactly; null if no record has one.
    #[schema(value_type = Option<f64>)]
    value: Option<hapax::analytics::Decimal>,
    /// How many records have something else in the field than a number that fits.
    left_out: u64,
}

/// Records that share a value.
#[derive(Debug, Serialize, ToSchema)]
pub struct GroupBody {
    /// That value; null if the field is missing, or if nothing groups.
    key: Value,
    /// How many records.
    count: u64,
    /// The measures, in the order sum, min, max.
    measures: Vec<MeasureBody>,
}

impl GroupBody {
    /// The value that the records share, for people.
    pub fn key_text(&self) -> String {
        match &self.key {
            Value::Null => "-".to_owned(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        }
    }

    /// How many records.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The numbers.
    pub fn values(&self) -> impl Iterator<Item = Option<&hapax::analytics::Decimal>> {
        self.measures.iter().map(|measure| measure.value.as_ref())
    }

    /// How many values are in no number.
    pub fn left_out(&self) -> u64 {
        self.measures.iter().map(|measure| measure.left_out).sum()
    }
}

/// Numbers about records.
#[derive(Debug, Serialize, ToSchema)]
pub struct TallyAnswer {
    /// The groups, by their values; one if nothing groups.
    groups: Vec<GroupBody>,
    /// Whether there are more groups than these.
    more: bool,
    /// How current they are.
    meta: MetaBody,
}

/// Each group with its measures, for the API and for `hapax query`.
pub fn groups_of(groups: Groups, measures: &[Measure]) -> Vec<GroupBody> {
    let body = |(measure, found): (&Measure, &hapax::analytics::Measured)| MeasureBody {
        measure: measure.name(),
        field: measure.field().to_string(),
        value: found.value,
        left_out: found.left_out,
    };
    groups
        .groups
        .into_iter()
        .map(|group| GroupBody {
            key: group.key.and_then(|key| serde_json::from_str(&key).ok()).unwrap_or(Value::Null),
            count: group.count,
            measures: measures.iter().zip(&group.measures).map(body).collect(),
        })
        .collect()
}

/// The measures of some fields.
pub fn measures_of(sum: &[Field], min: &[Field], max: &[Field]) -> Vec<Measure> {
    let sums = sum.iter().cloned().map(Measure::Sum);
    let least = min.iter().cloned().map(Measure::Min);
    sums.chain(least).chain(max.iter().cloned().map(Measure::Max)).collect()
}

/// Count records, and compute sums, least and greatest numbers of their fields
///
/// Sums are exact decimals of up to 28 digits before the point and 9 after it.
#[utoipa::path(
    get, path = "/v1/analytics/modules/{slug}/tally", tag = "analytics", params(("slug" = String, Path, description = "The module"), TallyParams),
    responses(
        (status = 200, description = "The numbers", body = TallyAnswer),
        (status = 409, description = "The write is not visible yet: `conflict`, with how far the read model is"),
    )
)]
async fn tally(
    reader: Reader,
    State(app): State<Shared>,
    Named(slug): Named,
    Params(params): Params<TallyParams>,
) -> Result<Json<TallyAnswer>, Problem> {
    let mut query = common!(params).query(&app, &reader, &slug)?;
    let fields = |list: &Option<String>| -> hapax::Result<Vec<Field>> {
        list.as_deref().map_or_else(|| Ok(Vec::new()), |list| list.split(',').map(Field::new).collect())
    };
    let measures = measures_of(&fields(&params.sum)?, &fields(&params.min)?, &fields(&params.max)?);
    for measure in &measures {
        query = query.measure(measure.clone())?;
    }
    if let Some(field) = &params.group_by {
        query = query.group_by(field)?;
    }
    let Answer { value, meta, .. } = query.tally().await?;
    let more = value.more;
    Ok(Json(TallyAnswer { groups: groups_of(value, &measures), more, meta: meta.into() }))
}

/// How far a partition was applied.
#[derive(Debug, Serialize, ToSchema)]
pub struct PartitionBody {
    /// The topic.
    topic: String,
    /// The partition.
    partition: i32,
    /// The offset after the last record that was applied.
    offset: Option<i64>,
    /// The last pulse: everything acknowledged before it is applied.
    #[schema(format = "date-time")]
    pulse: Option<String>,
}

impl From<PartitionSync> for PartitionBody {
    fn from(sync: PartitionSync) -> Self {
        PartitionBody {
            topic: sync.partition.topic.to_string(),
            partition: sync.partition.number,
            offset: sync.offset,
            pulse: sync.pulse.map(|pulse| pulse.to_string()),
        }
    }
}

/// A change that could not be read.
#[derive(Debug, Serialize, ToSchema)]
pub struct RejectedBody {
    /// The topic.
    topic: String,
    /// The partition.
    partition: i32,
    /// The offset.
    offset: i64,
    /// Whose it is; null: unknown, or no tenant's.
    tenant: Option<String>,
    /// Why it could not be read.
    reason: String,
}

/// How far the read model is.
#[derive(Debug, Serialize, ToSchema)]
pub struct StatusAnswer {
    /// Each partition.
    partitions: Vec<PartitionBody>,
    /// What could not be read, and holds `lastSyncAt` back; a hundred at most.
    rejected: Vec<RejectedBody>,
}

/// How far the read model is, for operators
#[utoipa::path(
    get, path = "/v1/analytics/status", tag = "analytics",
    responses((status = 200, description = "Each partition, and what could not be read", body = StatusAnswer))
)]
async fn status(
    Operator(caller): Operator,
    State(app): State<Shared>,
) -> Result<Json<StatusAnswer>, Problem> {
    caller.needs_all_tenants()?; // partitions hold the records of all tenants
    let model = model(&app)?;
    let (partitions, rejected) = tokio::try_join!(model.partitions(), model.rejected(100))?;
    Ok(Json(StatusAnswer {
        partitions: partitions.into_iter().map(Into::into).collect(),
        rejected: rejected
            .into_iter()
            .map(|entry| RejectedBody {
                topic: entry.rejected.origin.topic.to_string(),
                partition: entry.rejected.origin.partition,
                offset: entry.rejected.origin.offset,
                tenant: entry
                    .rejected
                    .tenant
                    .filter(|tenant| !tenant.is_nil())
                    .map(|tenant| tenant.to_string()),
                reason: entry.rejected.reason,
            })
            .collect(),
    }))
}
