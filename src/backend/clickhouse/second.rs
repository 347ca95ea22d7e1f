//! A second table of rows, which is filled while the first one serves and then takes its name.
//!
//! ```text
//! CREATE data_records_next_A ─▶ filled by a feed ─▶ EXCHANGE TABLES data_records AND data_records_next_A ─▶ DROP
//! ```
//!
//! ClickHouse has no locks, and an exchange that is repeated undoes itself. So each process has a name of its own for
//! the second table, and takes a table that is there by renaming it: of two processes one does, and the other's
//! name is gone, with which every later statement of it fails. Which of two tables is the newer one is in their
//! comments, which travel with the tables: a process that was killed after the exchange leaves the older build
//! under a second name, and the next process only has to drop it.

use std::sync::Arc;

use async_trait::async_trait;
use uuid::Uuid;

use super::ClickHouseReadModel;
use super::http::{Server, Statement};
use super::schema::{Found, NEXT, REJECTED, SYNC, found, of_rows, table_of_rows};
use crate::analytics::{ReadModel, Second, SecondModel};
use crate::error::{Error, Result};

const WHAT: &str = "building a read model again";

struct Filling {
    /// With the table that serves.
    first: Server,
    /// With the table that is filled.
    second: Server,
    model: Arc<ClickHouseReadModel>,
}

/// The second tables that are there.
async fn seconds(server: &Server) -> Result<Vec<Found>> {
    Ok(found(server).await?.into_iter().filter(|table| table.name.starts_with(NEXT)).collect())
}

/// Takes over the second table that is there, or makes one.
pub(super) async fn begin(first: &Server, generation: u16, anew: bool) -> Result<Second> {
    let own = first.with_table(format!("{NEXT}{}", Uuid::now_v7().simple()));
    let (mut is_taken, mut is_finished) = (false, false);
    for table in seconds(first).await? {
        let about = table.about(first)?;
        let build = of_rows(first).await?.about(first)?.build;
        if is_taken || anew || about.build <= build || about.generation != Some(generation) {
            is_finished |= about.build <= build;
            remove(first, &table.name).await?;
            continue;
        }
        let sql = format!("RENAME TABLE {}.{} TO {}", first.database(), table.name, own.records());
        first.ask(WHAT, Statement::new(sql)).await?;
        is_taken = true;
        crate::crash_point!("analytics.rebuild.taken");
    }
    let first_build = of_rows(first).await?.about(first)?.build;
    if is_taken && of_rows(&own).await?.about(first)?.build <= first_build {
        // Whoever had it exchanged the tables before it was taken.
        remove(first, own.table()).await?;
        (is_taken, is_finished) = (false, true);
    }
    if is_finished && !is_taken && !anew {
        return Ok(Second::Finished);
    }
    if !is_taken {
        let sql = table_of_rows(&own.records(), Some(generation), first_build + 1);
        first.ask(WHAT, Statement::new(sql)).await?;
        crate::crash_point!("analytics.rebuild.made");
    }
    let model = Arc::new(ClickHouseReadModel::new(own.clone(), true, Some(generation)));
    Ok(Second::Filling(Box::new(Filling { first: first.clone(), second: own, model })))
}

/// What a rebuild that did not end has left.
pub(super) async fn unfinished(first: &Server) -> Result<Option<String>> {
    let build = of_rows(first).await?.about(first)?.build;
    let Some(table) = seconds(first).await?.into_iter().next() else { return Ok(None) };
    let name = format!("{}.{}", first.database(), table.name);
    Ok(Some(if table.about(first)?.build > build {
        format!(
            "table {name} is filled by a rebuild; if none runs, `hapax analytics rebuild` goes on with it"
        )
    } else {
        format!("table {name} was replaced by a rebuild; `hapax analytics rebuild` removes it")
    }))
}

/// Drops a second table, however large it is.
async fn remove(server: &Server, name: &str) -> Result<()> {
    let sql = format!("DROP TABLE IF EXISTS {}.{name} SYNC", server.database());
    server.ask(WHAT, Statement::new(sql).set("max_table_size_to_drop", "0")).await?;
    Ok(())
}

#[async_trait]
impl SecondModel for Filling {
    fn model(&self) -> Arc<dyn ReadModel> {
        Arc::<ClickHouseReadModel>::clone(&self.model)
    }

    async fn exchange(&self) -> Result<()> {
        let (first, second) = (of_rows(&self.first).await?, of_rows(&self.second).await?);
        if second.about(&self.first)?.build <= first.about(&self.first)?.build {
            return Err(Error::Conflict {
                expected: format!("table {} as it was when this rebuild began", self.first.records()),
                actual: "a table that another rebuild has put there".into(),
            });
        }
        let sql = format!("EXCHANGE TABLES {} AND {}", self.first.records(), self.second.records());
        self.first.ask(WHAT, Statement::new(sql)).await?;
        crate::crash_point!("analytics.rebuild.exchanged");
        remove(&self.first, self.second.table()).await?;
        crate::crash_point!("analytics.rebuild.removed");
        // What is left of the first model holds nothing back any more, but has contents.
        for table in [SYNC, REJECTED] {
            let sql =
                format!("ALTER TABLE {}.{table} DELETE WHERE model = {{model:UUID}}", self.first.database());
            let statement = Statement::new(sql).bind("model", first.uuid).set("mutations_sync", "2");
            self.first.ask(WHAT, statement).await?;
        }
        Ok(())
    }
}
