//! A crash point kills its process at the hit it is told to, and does nothing otherwise.
#![cfg(all(feature = "testing", unix))]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

/// Set in the child, which is this very test in another process.
const CHILD: &str = "HAPAX_CRASH_POINT_CHILD";

fn child(crash_at: Option<&str>) -> (ExitStatus, String) {
    let mut command = crate::support::this::test("dies_at_the_hit_it_is_told_to");
    command.env(CHILD, "1");
    command.env_remove(hapax::testing::crash::VARIABLE);
    if let Some(at) = crash_at {
        command.env(hapax::testing::crash::VARIABLE, at);
    }
    let output = command.output().unwrap();
    (output.status, String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn dies_at_the_hit_it_is_told_to() {
    if std::env::var_os(CHILD).is_some() {
        for hit in 1..=3 {
            println!("before {hit}");
            hapax::crash_point!("test.other");
            hapax::crash_point!("test.point");
            println!("after {hit}");
        }
        return;
    }
    for hit in 1..=3 {
        let (status, printed) = child(Some(&format!("test.point:{hit}")));
        assert_eq!(status.signal(), Some(9), "{printed}");
        assert!(printed.contains(&format!("before {hit}")) && !printed.contains(&format!("after {hit}")));
    }
    for clean in [None, Some("test.point:4"), Some("test.nowhere:1"), Some("nonsense")] {
        let (status, printed) = child(clean);
        assert!(status.success() && printed.contains("after 3"), "{clean:?}: {printed}");
    }
}
