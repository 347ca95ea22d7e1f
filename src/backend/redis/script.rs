//! The server-side scripts. The server runs no other command while a script runs, so what the
//! script checks still holds when it writes. Scripts are sent by hash, and in full only if the
//! server does not know them yet.

use redis::Script;

/// The server's time, in microseconds.
const SERVER_TIME: &str = "local function present()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end
";

/// A time that a test sets. The text differs, so these are other scripts: those of a real ledger
/// never read that key.
#[cfg(feature = "testing")]
const TEST_TIME: &str =
    "local function present() return tonumber(redis.call('GET', KEYS[1] .. ':test_clock')) end
";

#[derive(Debug)]
pub(super) struct Scripts {
    pub(super) open: Script,
    pub(super) now: Script,
    pub(super) read: Script,
    pub(super) waiting: Script,
    pub(super) reserve: Script,
    pub(super) write: Script,
    pub(super) forget: Script,
    pub(super) drop: Script,
    pub(super) sweep_state: Script,
}

impl Scripts {
    pub(super) fn on_server_time() -> Self {
        Scripts::with(SERVER_TIME)
    }

    #[cfg(feature = "testing")]
    pub(super) fn on_test_time() -> Self {
        Scripts::with(TEST_TIME)
    }

    fn with(present: &str) -> Self {
        let incarnation = include_str!("lua/incarnation.lua");
        let script = |text: &str| Script::new(&format!("{present}{incarnation}{text}"));
        Scripts {
            open: script(include_str!("lua/open.lua")),
            now: script("return string.format('%.0f', present())"),
            read: script(include_str!("lua/read.lua")),
            waiting: script(include_str!("lua/waiting.lua")),
            reserve: script(include_str!("lua/reserve.lua")),
            write: script(include_str!("lua/write.lua")),
            forget: script(include_str!("lua/forget.lua")),
            drop: script(include_str!("lua/drop.lua")),
            sweep_state: script(include_str!("lua/sweep_state.lua")),
        }
    }
}
