//! Handlers that several tests use.

use hapax::Event;
use hapax::backend::postgres::PgTx;
use hapax::consumer::{Handled, TransactionalHandler};
use sqlx::AssertSqlSafe;

/// Inserts the id of each event into a table.
#[derive(Clone)]
pub struct Insert {
    table: String,
}

impl Insert {
    pub fn into(table: &str) -> Self {
        Insert { table: table.to_owned() }
    }

    /// All of them in one statement.
    pub async fn insert_all(&self, tx: &mut PgTx, events: &[Event]) -> Handled {
        let ids: Vec<_> = events.iter().map(|event| event.id.to_string()).collect();
        let insert = format!("insert into {} (id) select unnest($1::text[])", self.table);
        sqlx::query(AssertSqlSafe(insert)).bind(ids).execute(&mut **tx).await?;
        Ok(())
    }
}

impl TransactionalHandler<PgTx> for Insert {
    async fn handle(&self, tx: &mut PgTx, event: &Event) -> Handled {
        let insert = format!("insert into {} (id) values ($1)", self.table);
        sqlx::query(AssertSqlSafe(insert)).bind(event.id.to_string()).execute(&mut **tx).await?;
        Ok(())
    }
}
