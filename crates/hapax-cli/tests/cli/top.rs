//! `hapax top`: the overview of a server in a terminal.

#![allow(missing_docs, clippy::unwrap_used)]
#![cfg(unix)]

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::common::serve::Server;
use crate::common::{hapax, port, run};

/// A name that would clear the screen, set its title and turn the text around.
const HOSTILE: &str = "mail\u{1b}[2J\u{1b}]0;pwned\u{7}\u{202e}er";

fn claim(server: &Server, scope: &str, id: &str) {
    let body = json!({"scope": scope, "id": id, "mode": "at_most_once"});
    server.post("/v1/claims", &body).is(200);
}

/// Runs a command on a terminal of its own, of a size; presses a key or sends a signal when a text is there. Prints
/// as JSON: what was shown, the exit code, and whether the terminal's modes are as before.
const ON_A_TERMINAL: &str = r#"
import fcntl, json, os, pty, select, signal, struct, sys, termios, time
width, height, wanted, press, *command = sys.argv[1:]
master, slave = pty.openpty()
fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", int(height), int(width), 0, 0))
before = termios.tcgetattr(slave)
pid = os.fork()
if pid == 0:
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for fd in range(3):
        os.dup2(slave, fd)
    os.environ["TERM"] = "xterm"
    os.execv(command[0], command)
shown, pressed, end = b"", False, time.time() + 120
while time.time() < end:
    if select.select([master], [], [], 0.2)[0]:
        shown += os.read(master, 65536)
    if not pressed and wanted.encode() in shown:
        os.write(master, press.encode().decode("unicode_escape").encode())
        pressed = True
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        break
else:
    os.kill(pid, signal.SIGKILL)
    sys.exit("it did not end: " + repr(shown))
while select.select([master], [], [], 0.2)[0]:
    shown += os.read(master, 65536)
after = termios.tcgetattr(slave)
print(json.dumps({"shown": shown.decode("utf-8", "replace"), "code": os.waitstatus_to_exitcode(status), "restored": before == after}))
"#;

fn on_a_terminal(dir: &Path, size: (u16, u16), wanted: &str, press: &str, args: &[&str]) -> Value {
    let (width, height) = (size.0.to_string(), size.1.to_string());
    let ran = Command::new("python3")
        .args(["-c", ON_A_TERMINAL, &width, &height, wanted, press, env!("CARGO_BIN_EXE_hapax")])
        .args(args)
        .current_dir(dir)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    serde_json::from_slice(&ran.stdout).unwrap()
}

#[test]
fn top_prints_the_numbers_once_where_there_is_no_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), &[]);
    claim(&server, HOSTILE, "e-1");
    let url = format!("http://{}", server.address);
    let text = run(dir.path(), &["top", "--url", &url]).code(0).out;
    assert!(text.contains("Keyed write") && text.contains("data as of "), "{text}");
    assert!(text.contains(r"mail\u{1b}[2J") && text.contains('…'), "{text}");
    assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{text:?}");
    let json = run(dir.path(), &["top", "--url", &format!("{url}/"), "--json", "--once"]).code(0).json();
    assert_eq!(
        (&json["answers"], &json["overview"]["scopes"][0]["scope"]),
        (&json!(true), &json!(HOSTILE)),
        "{json}"
    );
    assert!(json["rates"]["done_per_s"].is_null(), "{json}");
}

#[test]
fn top_without_a_server_says_so_and_finds_it_when_it_is_there() {
    let dir = tempfile::tempdir().unwrap();
    // A port that nobody has.
    let free = format!("127.0.0.1:{}", port::free());
    let url = format!("http://{free}");
    let ran = run(dir.path(), &["top", "--url", &url, "--once"]).code(3);
    assert!(ran.err.contains(&url) && ran.err.contains("hapax serve"), "{}", ran.err);
    let mut child = hapax(dir.path(), &["top", "--url", &url, "--json", "--every", "50ms"]).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|line| {
        let line = line.unwrap();
        serde_json::from_str::<Value>(&line).unwrap_or_else(|e| panic!("{e}: {line}"))
    });
    let first = lines.next().unwrap();
    assert!(first["answers"] == false && first["reason"].is_string(), "{first}");
    let mut server = hapax(dir.path(), &["serve", "--listen", &free]).spawn().unwrap();
    let found = lines.take(10_000).any(|line| line["answers"] == true);
    for child in [&mut child, &mut server] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(found, "it never found the server");
}

#[test]
fn top_gives_the_terminal_back_after_q_and_after_ctrl_c() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), &[]);
    claim(&server, HOSTILE, "e-1");
    let url = format!("http://{}", server.address);
    for (size, press, code) in [((100, 30), "q", 0), ((40, 12), "q", 0), ((80, 24), "\\x03", 130)] {
        let ran = on_a_terminal(dir.path(), size, "Effects", press, &["top", "--url", &url]);
        assert_eq!((&ran["code"], &ran["restored"]), (&json!(code), &json!(true)), "{ran}");
        let shown = ran["shown"].as_str().unwrap();
        assert!(
            shown.starts_with("\u{1b}[?1049h") && shown.contains("\u{1b}[?25h\u{1b}[?1049l"),
            "{shown:?}"
        );
        // The name is on the screen, and only as text.
        assert!(shown.contains(r"mail\u{1b}") || size.0 < 80, "{shown:?}");
        assert!(
            !shown.contains("\u{1b}]0;") && !shown.contains('\u{202e}') && !shown.contains('\u{7}'),
            "{shown:?}"
        );
    }
    let ran = on_a_terminal(dir.path(), (60, 20), "asking", "q", &["top", "--url", "http://127.0.0.1:1"]);
    assert_eq!((&ran["code"], &ran["restored"]), (&json!(0), &json!(true)), "{ran}");
}

#[test]
fn top_takes_a_token_from_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let made = run(dir.path(), &["token", "create", "--name", "ops", "--role", "admin", "--by", "t"]).code(0);
    std::fs::write(dir.path().join("admin.token"), &made.out).unwrap();
    std::fs::write(dir.path().join("empty"), "\n").unwrap();
    let server = Server::start(dir.path(), &[]);
    let url = format!("http://{}", server.address);
    let ran = run(dir.path(), &["top", "--url", &url, "--once"]).code(3);
    assert!(ran.err.contains("--token-file"), "{}", ran.err);
    run(dir.path(), &["top", "--url", &url, "--once", "--token-file", "admin.token"]).code(0);
    for file in ["empty", "nowhere"] {
        let ran = run(dir.path(), &["top", "--url", &url, "--once", "--token-file", file]).code(2);
        assert!(ran.err.contains("--token-file"), "{}", ran.err);
    }
    let ran = run(dir.path(), &["top", "--url", "https://h", "--once"]).code(2);
    assert!(ran.err.contains("https"), "{}", ran.err);
}
