//! Redis and Valkey: a window in front of any ledger.

mod connect;
mod window;

pub use window::RedisWindow;
