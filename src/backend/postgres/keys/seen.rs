//! What row security lets a transaction see: the keys of one tenant, or all of them for maintenance.
//!
//! The SQL functions name their tenant themselves. Statements on the table get theirs here.

use std::sync::Arc;

use sqlx::Row as _;

use super::Inner;
use crate::backend::postgres::PgTx;
use crate::error::{Error, Result};

/// How no tenant is called in `hapax.tenant`; the empty text means that none is set.
const NO_TENANT: &str = "00000000-0000-0000-0000-000000000000";

/// What a transaction sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Seen {
    /// No key, or what a function asks for.
    Nothing,
    /// The keys of a tenant, as it is called in `hapax.tenant`.
    Tenant(String),
    /// All keys.
    All,
}

impl Seen {
    /// The keys of a tenant, as it is stored.
    pub(super) fn tenant(stored: &str) -> Self {
        Seen::Tenant(if stored.is_empty() { NO_TENANT } else { stored }.to_owned())
    }

    /// What a list sees. A role that may see one tenant only gets an error instead of an empty list.
    pub(super) async fn by(inner: &Inner, stored: Option<&str>) -> Result<Self> {
        if let Some(stored) = stored {
            return Ok(Seen::tenant(stored));
        }
        let sql: Arc<str> = format!("select {}.keys_maintains()", inner.settings.schema).into();
        let rows = inner.run("looking at this role's rights", || inner.query(&sql)).await?;
        if rows.first().is_some_and(|row| row.try_get(0).unwrap_or(false)) {
            return Ok(Seen::All);
        }
        Err(Error::Refused {
            what: "this role may not see the keys of all tenants; name a tenant, or connect with the role for maintenance \
                   (it has DELETE on the keys)"
                .into(),
            source: None,
        })
    }

    /// Sets it in a transaction. `pooled`: the statement must not be kept prepared.
    pub(super) async fn apply(&self, tx: &mut PgTx, pooled: bool) -> sqlx::Result<()> {
        let (name, value) = match self {
            Seen::Nothing => return Ok(()),
            Seen::Tenant(tenant) => ("hapax.tenant", tenant.as_str()),
            Seen::All => ("hapax.maintenance", "on"),
        };
        let sql = "select pg_catalog.set_config($1, $2, true)";
        sqlx::query(sql).persistent(!pooled).bind(name).bind(value).execute(&mut **tx).await?;
        Ok(())
    }
}
