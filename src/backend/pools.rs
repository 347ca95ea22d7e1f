//! Pools that several backends share.

use std::sync::Arc;

#[cfg(feature = "postgres")]
use crate::error::Result;

/// Connections that everything opened with the same settings shares: one pool for each PostgreSQL URL, and so
/// for each role. The default shares nothing: every backend opens a pool of its own.
///
/// A pool is as large as its first user asks. Each of its users waits for the connections of the others, so
/// what must not wait for them keeps a pool of its own.
#[derive(Debug, Clone, Default)]
pub struct Pools(#[cfg_attr(not(feature = "postgres"), allow(dead_code))] Option<Arc<Shared>>);

#[derive(Debug, Default)]
struct Shared {
    #[cfg(feature = "postgres")]
    by_url: tokio::sync::Mutex<std::collections::HashMap<String, sqlx::PgPool>>,
}

impl Pools {
    /// Pools that are shared: clones have the same ones.
    pub fn shared() -> Self {
        Pools(Some(Arc::default()))
    }

    /// The pool for a URL; a new one if nothing is shared, or nobody asked for it before. `name` is the
    /// setting that has the URL.
    #[cfg(feature = "postgres")]
    pub async fn postgres(
        &self,
        name: &str,
        url: &str,
        pool_max: u32,
        acquire_timeout: std::time::Duration,
    ) -> Result<sqlx::PgPool> {
        use crate::backend::postgres::open_pool;
        let Some(shared) = &self.0 else { return open_pool(name, url, pool_max, acquire_timeout).await };
        let mut pools = shared.by_url.lock().await;
        if let Some(pool) = pools.get(url) {
            return Ok(pool.clone());
        }
        let pool = open_pool(name, url, pool_max, acquire_timeout).await?;
        pools.insert(url.to_owned(), pool.clone());
        Ok(pool)
    }
}
