//! Opens a window by its URL.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::secret::hide_password;
use crate::window::{MemoryWindow, Window, WindowSettings};

pub(super) fn open(url: &str, settings: WindowSettings) -> Result<Arc<dyn Window>> {
    match url.split_once(':') {
        Some(("memory", "")) => Ok(Arc::new(MemoryWindow::new(settings, MemoryWindow::ENTRIES_MAX)?)),
        Some(("redis" | "rediss" | "valkey" | "valkeys", _)) => open_redis(url, settings),
        _ => Err(Error::Config(format!(
            "{:?} is not the URL of a window; use memory: or redis://HOST:PORT",
            hide_password(url)
        ))),
    }
}

#[cfg(feature = "redis")]
fn open_redis(url: &str, settings: WindowSettings) -> Result<Arc<dyn Window>> {
    Ok(Arc::new(crate::backend::redis::RedisWindow::new(url, settings)?))
}

#[cfg(not(feature = "redis"))]
fn open_redis(_url: &str, _settings: WindowSettings) -> Result<Arc<dyn Window>> {
    Err(Error::NotBuiltIn { what: "Redis", feature: "redis" })
}
