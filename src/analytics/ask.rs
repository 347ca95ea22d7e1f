//! The front door of a read model: questions of one tenant.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use uuid::Uuid;

use super::{
    Answer, Field, Groups, ListPage, Measure, Meta, Pieces, ReadModel, ReadToken, STALE_AFTER, Selection,
    Tally,
};
use crate::error::{Error, Result};
use crate::id::Tenant;
use crate::records::{Listed, ModuleSlug, tenant_id};

/// How long a question waits for a write by default.
const WAIT_DEFAULT: Duration = Duration::from_secs(5);
/// How long between two looks for it, at first and at last.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
const LOOK_AGAIN_MAX: Duration = Duration::from_millis(500);
/// How long an answer waits for a model that has taken the place of the one it began with.
const CAUGHT_UP: Duration = Duration::from_secs(10);

/// Queries a read model on behalf of one tenant. The tenant is set once, so no query can lack it.
#[derive(Clone)]
pub struct Analytics {
    model: Arc<dyn ReadModel>,
    tenant: Uuid,
}

impl Analytics {
    /// Questions of a tenant, which is a UUID or none; see [`tenant_id`].
    pub fn new(model: Arc<dyn ReadModel>, tenant: Option<&Tenant>) -> Result<Self> {
        Ok(Analytics { tenant: tenant_id(tenant)?, model })
    }

    /// A question about the records of a module.
    pub fn records(&self, module: impl AsRef<str>) -> Result<RecordsQuery> {
        Ok(RecordsQuery {
            of: self.clone(),
            module: ModuleSlug::new(module)?,
            since: None,
            approximate: false,
            after: None,
            wait: WAIT_DEFAULT,
            tally: Tally::default(),
        })
    }
}

/// A question about the records of a module.
#[derive(Clone)]
#[must_use = "a question is asked by `list` or `tally`"]
pub struct RecordsQuery {
    of: Analytics,
    module: ModuleSlug,
    since: Option<Duration>,
    approximate: bool,
    after: Option<ReadToken>,
    wait: Duration,
    tally: Tally,
}

impl RecordsQuery {
    /// Only records that were written within this time.
    pub fn since(mut self, time: Duration) -> Self {
        self.since = Some(time);
        self
    }

    /// Accepts an answer that may count replaced and deleted versions, which is faster on some read
    /// models. The answer says what it may count wrongly.
    pub fn approximate(mut self) -> Self {
        self.approximate = true;
        self
    }

    /// Waits until a write is visible, at most [`wait`](RecordsQuery::wait). If it is not by then, the
    /// answer is a [`Conflict`](Error::Conflict) that says how far the read model is.
    pub fn after(mut self, token: ReadToken) -> Self {
        self.after = Some(token);
        self
    }

    /// How long to wait for a write; 5 s by default.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Also computes the sum of a field.
    pub fn sum(self, field: impl AsRef<str>) -> Result<Self> {
        self.measure(Measure::Sum(Field::new(field)?))
    }

    /// Also computes the least number of a field.
    pub fn min(self, field: impl AsRef<str>) -> Result<Self> {
        self.measure(Measure::Min(Field::new(field)?))
    }

    /// Also computes the greatest number of a field.
    pub fn max(self, field: impl AsRef<str>) -> Result<Self> {
        self.measure(Measure::Max(Field::new(field)?))
    }

    /// Also computes a measure.
    pub fn measure(mut self, measure: Measure) -> Result<Self> {
        self.tally.measures.push(measure);
        self.tally.check()?;
        Ok(self)
    }

    /// Counts and computes for each value of a field apart.
    pub fn group_by(mut self, field: impl AsRef<str>) -> Result<Self> {
        self.tally.group_by = Some(Field::new(field)?);
        Ok(self)
    }

    /// The records, in the order of their ids.
    pub async fn list(self, page: ListPage) -> Result<Answer<Listed>> {
        let pages = self.pages().await?;
        let listed = pages.list(page).await?;
        Ok(Answer::new(listed, pages.meta))
    }

    /// The records page by page, as one answer.
    pub async fn pages(self) -> Result<RecordsPages> {
        let asked = self.of.model.id().await?;
        let (of, meta) = self.begin().await?;
        Ok(RecordsPages { query: self, of, meta, asked: Mutex::new(asked) })
    }

    /// How many records there are, and the measures.
    pub async fn tally(self) -> Result<Answer<Groups>> {
        let model = &*self.of.model;
        loop {
            let asked = model.id().await?;
            let (of, meta) = self.begin().await?;
            let groups = model.tally(&of, &self.tally).await?;
            // A second model may have taken its place between the two: then they speak of different rows.
            if model.id().await? == asked {
                return Ok(Answer::new(groups, meta));
            }
        }
    }

    /// All records as one Parquet file, piece by piece, with how current it is. Not every read model writes
    /// them; see [`ReadModel::export_parquet`].
    pub async fn export_parquet(self, to: Pieces<'_>) -> Result<Meta> {
        let model = &*self.of.model;
        let asked = model.id().await?;
        let (of, meta) = self.begin().await?;
        model.export_parquet(&of, to).await?;
        if model.id().await? != asked {
            return Err(replaced("it was replaced while the file was written; export it again"));
        }
        Ok(meta)
    }

    /// The steps before the rows are read: waits for a write, and reads `last_sync_at`.
    async fn begin(&self) -> Result<(Selection, Meta)> {
        let (model, tenant) = (&*self.of.model, self.of.tenant);
        if let Some(token) = &self.after {
            self.visible(token).await?;
        }
        let last_sync_at = model.last_sync_at(tenant).await?;
        let now = model.now().await?;
        let meta = Meta {
            last_sync_at,
            stale: last_sync_at.is_none_or(|at| now.since(at) > STALE_AFTER),
            approximate: model.approximate().filter(|_| self.approximate),
        };
        let since = self.since.map(|time| now.minus(time));
        let module = self.module.clone();
        Ok((Selection { tenant, module, since, approximate: self.approximate }, meta))
    }

    async fn visible(&self, token: &ReadToken) -> Result<()> {
        if token.module != self.module {
            let message = format!(
                "it names a write of module {}, and the question is about {}",
                token.module, self.module
            );
            return Err(Error::invalid("token", message));
        }
        let (model, tenant) = (&*self.of.model, self.of.tenant);
        let (end, mut looks) = (tokio::time::Instant::now() + self.wait, 0);
        loop {
            let version = model.version(tenant, &token.module, token.id).await?;
            if token.is_shown_by(version) {
                return Ok(());
            }
            if tokio::time::Instant::now() >= end {
                let at = version
                    .map_or_else(|| "not there".to_owned(), |version| format!("at seq {}", version.seq()));
                let synced = model.last_sync_at(tenant).await?;
                let synced = synced.map_or_else(|| "at no known time".to_owned(), |at| format!("at {at}"));
                return Err(Error::Conflict {
                    expected: format!("{token} to be visible"),
                    actual: format!("a read model in which the record is {at}, last synced {synced}"),
                });
            }
            // At the end once more: it may become visible in the last pause.
            tokio::time::sleep_until(end.min(tokio::time::Instant::now() + look_again(looks))).await;
            looks += 1;
        }
    }
}

/// The pause before the next look. Most writes are visible soon; a long wait must not query all the
/// time.
fn look_again(looks: u32) -> Duration {
    (LOOK_AGAIN * 2_u32.saturating_pow(looks.min(10))).min(LOOK_AGAIN_MAX)
}

/// Pages of one answer. Each page shows the records as of when it is read. All of them have the
/// same limit of [`since`](RecordsQuery::since), and [`meta`](RecordsPages::meta) holds for the
/// whole answer.
#[must_use = "`list` reads a page"]
pub struct RecordsPages {
    query: RecordsQuery,
    of: Selection,
    meta: Meta,
    /// The id of the model that has what `meta` says.
    asked: Mutex<Option<Uuid>>,
}

impl RecordsPages {
    /// How current the first page is at least. A later page may be more current, and the answer is not.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// The records of a page, in the order of their ids.
    pub async fn list(&self, page: ListPage) -> Result<Listed> {
        let model = &*self.query.of.model;
        loop {
            let asked = *self.asked();
            let listed = model.list(&self.of, page).await?;
            let now = model.id().await?;
            if now == asked {
                return Ok(listed);
            }
            self.caught_up(model).await?;
            *self.asked() = now;
        }
    }

    fn asked(&self) -> MutexGuard<'_, Option<Uuid>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A second model has taken the place of the first. Waits until it has what the answer says.
    async fn caught_up(&self, model: &dyn ReadModel) -> Result<()> {
        if let Some(token) = &self.query.after {
            self.query.visible(token).await?;
        }
        let end = tokio::time::Instant::now() + CAUGHT_UP;
        while model.last_sync_at(self.of.tenant).await? < self.meta.last_sync_at {
            if tokio::time::Instant::now() >= end {
                return Err(replaced("it was replaced by one that is not as far; ask again"));
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }
}

fn replaced(problem: &str) -> Error {
    Error::Unavailable { what: format!("the read model: {problem}"), source: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A write that is visible soon is found soon; whoever waits for half a minute asks some sixty times.
    #[test]
    fn who_waits_for_long_asks_seldom() {
        let pauses = (0..).map(look_again).scan(Duration::ZERO, |waited, pause| {
            *waited += pause;
            (*waited < Duration::from_secs(30)).then_some(pause)
        });
        let pauses: Vec<Duration> = pauses.collect();
        assert_eq!(pauses[0], LOOK_AGAIN);
        assert!(
            pauses.is_sorted() && pauses.last() == Some(&LOOK_AGAIN_MAX) && pauses.len() < 70,
            "{pauses:?}"
        );
    }
}
