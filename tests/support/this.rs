//! This test program once more, as another process.
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::process::Command;

/// A command that runs one test of this program, and nothing else. The test is named without its
/// module, so that a test finds itself wherever its file is.
pub fn test(name: &str) -> Command {
    let program = std::env::current_exe().expect("this program has a path");
    let list = Command::new(&program).args(["--list", "--format=terse"]).output().expect("the program runs");
    let list = String::from_utf8(list.stdout).expect("names of tests");
    let is_it = |path: &&str| *path == name || path.ends_with(&format!("::{name}"));
    let found: Vec<&str> =
        list.lines().filter_map(|line| line.strip_suffix(": test")).filter(is_it).collect();
    // Of equal names the outermost is meant; an inner one is named with its module.
    let depth = |path: &&&str| path.matches("::").count();
    let least = found.iter().map(|path| depth(&path)).min();
    let outermost: Vec<_> = found.iter().filter(|path| Some(depth(path)) == least).collect();
    let [path] = outermost[..] else {
        panic!("`{name}` names {} tests of this program: {found:?}", found.len())
    };
    let mut command = Command::new(program);
    command.args([*path, "--exact", "--nocapture"]);
    command
}
