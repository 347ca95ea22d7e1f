//! `hapax consume --exec`: the sample handlers, and handlers that misbehave, on the embedded bus.

#![allow(missing_docs, clippy::unwrap_used)]

use crate::common;
use std::path::Path;
use std::process::Child;

use crate::common::consume::{Sample, consume, consume_args, count, effects, entry, produce, wait_until};
use crate::common::{Ran, hapax, run, run_with};

fn lines(events: &[(&str, &str)]) -> String {
    events.iter().fold(String::new(), |text, (id, what)| {
        text + &format!("{{\"event_id\":\"{id}\",\"do\":\"{what}\"}}\n")
    })
}

const PYTHON: &str = "effect(f\"{request['id']} {request['attempt']}\")
if do == 'retry' and request['attempt'] < 3: raise Retry('not yet', after_ms=5)
if do == 'bug' and request['attempt'] < 2: raise ValueError('oops')
if do == 'fatal': raise Fatal('no such order')";

const NODE: &str = "effect(`${request.id} ${request.attempt}`);
if (does === 'retry' && request.attempt < 3) throw new Retry('not yet', 5);
if (does === 'bug' && request.attempt < 2) throw new Error('oops');
if (does === 'fatal') throw new Fatal('no such order');";

fn done_retry_fatal(sample: Sample, body: &str) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    produce(dir, &lines(&[("a", ""), ("b", "retry"), ("c", "fatal"), ("d", "bug"), ("a", "")]));
    let command = sample.handler(dir, body);
    let ran = consume(dir, &command, &[]).code(0);
    println!("{sample:?}: {}", ran.out.trim());
    assert_eq!(
        (count(&ran, "done"), count(&ran, "dead"), count(&ran, "duplicate")),
        (3, 1, 1),
        "{}",
        ran.out
    );
    let mut seen = effects(dir);
    seen.sort();
    assert_eq!(seen, ["a 1", "b 1", "b 2", "b 3", "c 1", "d 1", "d 2"]);
    let dead = entry(dir, "c");
    assert_eq!((&dead["state"], &dead["reason"]), (&"dead".into(), &"no such order".into()));
    // The same events again, from a producer that repeats itself: nothing runs.
    produce(dir, &lines(&[("a", ""), ("b", "retry"), ("c", "fatal"), ("d", "bug")]));
    let ran = consume(dir, &command, &[]).code(0);
    assert_eq!(count(&ran, "duplicate") + count(&ran, "dead"), 4, "{}", ran.out);
    assert_eq!(effects(dir).len(), 7);
}

#[test]
fn python_done_retry_fatal() {
    done_retry_fatal(Sample::Python, PYTHON);
}

#[test]
fn node_done_retry_fatal() {
    done_retry_fatal(Sample::Node, NODE);
}

#[test]
fn the_samples_run_as_they_are() {
    for (program, file) in [("python3", "python/handler.py"), ("node", "node/handler.mjs")] {
        let dir = tempfile::tempdir().unwrap();
        produce(dir.path(), "{\"event_id\":\"a\",\"order\":17}\n");
        let command = format!("{program} {}", common::consume::clients().join(file).display());
        let ran = consume(dir.path(), &command, &[]).code(0);
        assert_eq!(count(&ran, "done"), 1, "{program}: {} {}", ran.out, ran.err);
        assert!(ran.err.contains("mail for order 17 (event a, attempt 1)"), "{}", ran.err);
    }
}

#[test]
fn a_child_that_dies_costs_an_attempt_and_is_started_again() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    produce(dir, &lines(&[("once", "once"), ("always", "always"), ("fine", "")]));
    let command = Sample::Python.handler(
        dir,
        "effect(f\"{request['id']} {request['attempt']}\")
if do == 'always' or (do == 'once' and request['attempt'] == 1): os.kill(os.getpid(), signal.SIGKILL)",
    );
    let ran = consume(dir, &command, &["--concurrency", "1"]).code(0);
    println!("{}", ran.out.trim());
    assert_eq!((count(&ran, "done"), count(&ran, "dead")), (2, 1), "{}", ran.out);
    assert_eq!(ran.json()["handler_restarts"], 6, "{}", ran.err);
    let dead = entry(dir, "always");
    assert_eq!(dead["attempts"], 5);
    // The shell tells a death by signal 9 as 137, where it has not made way for the command.
    let reason = dead["reason"].as_str().unwrap();
    assert!(reason.contains("signal: 9") || reason.contains("137"), "{dead}");
    assert_eq!(effects(dir).iter().filter(|line| line.starts_with("once")).count(), 2);
}

/// Eight are in hand when one of them kills the child: that one is dead after its attempts, and the other seven, and those
/// behind them, are done without one having been counted against them.
#[test]
fn an_event_that_kills_its_child_takes_no_neighbour_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let ids: Vec<_> = (0..20).map(|n| format!("e-{n}")).collect();
    let events: Vec<_> = ids.iter().map(|id| (id.as_str(), if id == "e-3" { "kill" } else { "" })).collect();
    produce(dir, &lines(&events));
    // The first eight are all in hand when it strikes: the seven cannot end before.
    let command = Sample::Python.handler(
        dir,
        "struck = os.path.exists('struck')
effect(f\"{request['id']} {request['attempt']}\")
if do == 'kill':
    while len(open('effects').readlines()) < 8: time.sleep(0.005)
    open('struck', 'w').close()
    os.kill(os.getpid(), signal.SIGKILL)
if not struck: time.sleep(3600)",
    );
    let more = ["--concurrency", "8", "--workers", "1", "--timeout", "20m", "--set", "retry.attempts_max=3"];
    let ran = consume(dir, &command, &more).code(0);
    println!("{}", ran.out.trim());
    assert_eq!((count(&ran, "done"), count(&ran, "dead")), (19, 1), "{} {}", ran.out, ran.err);
    for id in &ids {
        let entry = entry(dir, id);
        let (state, attempts) = if id == "e-3" { ("dead", 3) } else { ("done", 1) };
        assert_eq!((&entry["state"], &entry["attempts"]), (&state.into(), &attempts.into()), "{entry}");
    }
    let runs = |id: &str| effects(dir).iter().filter(|line| line.starts_with(&format!("{id} "))).count();
    assert_eq!(runs("e-0"), 2, "it was in hand");
    assert_eq!(runs("e-3"), 4, "once beside others, which did not count, and three times alone");
}

#[test]
fn one_child_has_several_requests_and_answers_out_of_order() {
    let dir = tempfile::tempdir().unwrap();
    produce(dir.path(), &lines(&[("first", "wait"), ("second", "")]));
    // The first can only end after the second has been answered by the same child.
    let command = Sample::Python.handler(
        dir.path(),
        "if do == 'wait': wait_for('second-done')
effect(request['id'])
if do != 'wait': open('second-done', 'w').close()",
    );
    let ran = consume(dir.path(), &command, &["--workers", "1"]).code(0);
    assert_eq!(count(&ran, "done"), 2);
    assert_eq!(effects(dir.path()), ["second", "first"]);
}

/// The plainest handler there is: a loop over standard input, one event after the other.
fn plain_loop(dir: &Path, body: &str) -> String {
    let body: Vec<_> = body.lines().map(|line| format!("    {line}\n")).collect();
    let script = format!(
        "import json, os, sys, time\n\
         def effect(text):\n    with open('effects', 'a') as file:\n        file.write(str(text) + '\\n')\n\
         for line in sys.stdin:\n    request = json.loads(line)\n    if 'cancel' in request: continue\n\
         {}    print(json.dumps({{'id': request['id'], 'token': request['token'], 'done': True}}), flush=True)\n",
        body.concat()
    );
    std::fs::write(dir.join("plain.py"), script).unwrap();
    "python3 plain.py".to_owned()
}

/// A child that says nothing of itself gets one event at a time, and the time of an event begins when it is sent. 64 events are
/// claimed at once, two children need 0.5 s for each, and each may take 10 s: sent all at once, the last of them would have waited
/// for 16 s behind the others, and be dead of it.
///
/// Another size by hand: `HAPAX_TEST_EXEC_EVENTS=500 HAPAX_TEST_EXEC_SLEEP_S=1 HAPAX_TEST_EXEC_WORKERS=1` is one plain child that
/// sleeps for a second over each of 500 events; it takes a bit more than eight minutes.
#[test]
fn t77_time_in_the_queue_is_not_charged_to_the_event() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let sized = |name: &str, default: &str| std::env::var(name).unwrap_or_else(|_| default.to_owned());
    let events: u64 = sized("HAPAX_TEST_EXEC_EVENTS", "100").parse().unwrap();
    let sleep_s: f64 = sized("HAPAX_TEST_EXEC_SLEEP_S", "0.5").parse().unwrap();
    let workers: usize = sized("HAPAX_TEST_EXEC_WORKERS", "2").parse().unwrap();
    let ids: Vec<_> = (0..events).map(|n| format!("e-{n}")).collect();
    produce(dir, &lines(&ids.iter().map(|id| (id.as_str(), "")).collect::<Vec<_>>()));
    let seen = "{os.getpid()} {request['attempt']} {request['timeout_ms']}";
    let command = plain_loop(dir, &format!("effect(f\"{seen}\")\ntime.sleep({sleep_s})"));
    let more = ["--workers", &workers.to_string(), "--timeout", "10s", "--set", "retry.attempts_max=2"];
    let ran = consume(dir, &command, &more).code(0);
    println!("{}", ran.out.trim());
    assert_eq!((count(&ran, "done"), count(&ran, "dead")), (events, 0), "{} {}", ran.out, ran.err);
    assert_eq!(ran.json()["handler_restarts"], 0, "{}", ran.err);
    let seen = effects(dir);
    assert_eq!(seen.len() as u64, events, "no event ran twice");
    assert!(
        seen.iter().all(|line| line.ends_with(" 1 10000")),
        "first attempts, with all their time: {seen:?}"
    );
    let children: std::collections::BTreeSet<_> = seen.iter().map(|line| line.split(' ').next()).collect();
    assert_eq!(children.len(), workers, "every child works");
}

/// What was cancelled takes up its place until the child has reacted: the next event is not sent behind it.
#[test]
fn t77_a_child_that_is_late_gets_nothing_until_it_has_replied() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    produce(dir, &lines(&[("slow", "slow"), ("next", "")]));
    let command = plain_loop(
        dir,
        "effect(request['id'])\nif request['event']['payload']['do'] == 'slow' and request['attempt'] == 1: time.sleep(10)",
    );
    let ran = consume(dir, &command, &["--timeout", "6s", "--set", "consumer.cancel_grace_ms=60000"]).code(0);
    assert_eq!((count(&ran, "done"), count(&ran, "dead")), (2, 0), "{} {}", ran.out, ran.err);
    assert_eq!(entry(dir, "next")["attempts"], 1, "it was not charged for the time of the other");
    let mut seen = effects(dir);
    seen.sort();
    assert_eq!(seen, ["next", "slow", "slow"]);
}

/// On a signal what waits for a child is given back at once, and what a child has may end.
#[test]
fn t77_a_stop_does_not_wait_for_what_was_not_sent() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    produce(dir, &lines(&[("a", ""), ("b", ""), ("c", "")]));
    let command = plain_loop(dir, "effect(request['id'])\nwhile not os.path.exists('go'): time.sleep(0.01)");
    let child = hapax(dir, &consume_args(&command, &[])).spawn().unwrap();
    wait_until("the first one began", || !effects(dir).is_empty());
    let running = effects(dir)[0].clone();
    let leased = || {
        let counts = run(dir, &["ledger", "stat", "--json"]).code(0).json()["counts"].clone();
        let leased = counts.as_array().unwrap().iter().find(|count| count["state"] == "leased").cloned();
        leased.map_or(0, |leased| leased["count"].as_u64().unwrap())
    };
    wait_until("all are claimed", || leased() == 3);
    kill(&child, "-TERM");
    wait_until("the others are given back", || leased() == 1);
    std::fs::write(dir.join("go"), "").unwrap();
    let ran: Ran = child.wait_with_output().unwrap().into();
    let ran = ran.code(143);
    assert_eq!((count(&ran, "done"), effects(dir)), (1, vec![running]), "{}", ran.out);
}

#[test]
fn stray_stale_and_unparsable_lines_are_ignored_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    produce(dir.path(), &lines(&[("a", ""), ("b", "")]));
    let command = Sample::Python.handler(
        dir.path(),
        "token = request['token']
with lock:
    print('hello world')
    print(json.dumps({'id': 'somebody else', 'token': token, 'done': True}))
    print(json.dumps({'id': request['id'], 'token': token - 1000, 'fatal': True}))
    print('x' * 2000000, flush=True)
effect(request['id'])",
    );
    let ran = consume(dir.path(), &command, &[]).code(0);
    assert_eq!(count(&ran, "done"), 2, "{}", ran.out);
    assert_eq!(ran.json()["replies_ignored"], 8, "{}", ran.out);
    assert_eq!(ran.err.matches("was ignored").count(), 1, "expected once: {}", ran.err);
}

#[test]
fn a_reply_that_makes_no_sense_is_a_failed_attempt() {
    let dir = tempfile::tempdir().unwrap();
    produce(dir.path(), &lines(&[("a", "")]));
    let script = "import json,sys\nfor line in sys.stdin:\n    r=json.loads(line)\n    print(json.dumps({'id':r['id'],'token':r['token'],'ok':1}),flush=True)\n";
    std::fs::write(dir.path().join("odd.py"), script).unwrap();
    let ran = consume(dir.path(), "python3 odd.py", &[]).code(0);
    assert_eq!(count(&ran, "dead"), 1, "{}", ran.out);
    let reason = entry(dir.path(), "a")["reason"].to_string();
    assert!(reason.contains("not exactly one of done, retry and fatal"), "{reason}");
}

fn is_alive(pid: &str) -> bool {
    // A zombie has no command line.
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

#[test]
fn what_times_out_is_cancelled_and_a_child_that_does_not_react_is_killed_with_all_it_started() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    produce(dir, &lines(&[("stuck", "hang"), ("polite", "cancel")]));
    let command = Sample::Python.handler(
        dir,
        "if do == 'hang' and request['attempt'] == 1:
    sleeper = subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL)
    effect(f'sleeper {sleeper.pid}')
    cancelled.wait()
    effect('expected to cancel')
    sleeper.wait()
if do == 'cancel' and request['attempt'] == 1:
    cancelled.wait()
    effect('polite')
    raise Retry('cancelled')
effect(f\"{request['id']} done\")",
    );
    let more = ["--timeout", "3s", "--set", "consumer.cancel_grace_ms=1000"];
    let ran = consume(dir, &command, &more).code(0);
    println!("{}", ran.out.trim());
    assert_eq!(count(&ran, "done"), 2, "{} {}", ran.out, ran.err);
    assert_eq!(ran.json()["handler_restarts"], 1, "{}", ran.err);
    assert!(ran.err.contains("did not react to a cancel"), "{}", ran.err);
    let effects = effects(dir);
    for text in ["expected to cancel", "polite", "stuck done", "polite done"] {
        assert!(effects.iter().any(|effect| effect == text), "{text}: {effects:?}");
    }
    let sleeper = effects.iter().find_map(|line| line.strip_prefix("sleeper ")).unwrap();
    wait_until("what the child started is gone", || !is_alive(sleeper));
    assert!(ran.json()["replies_ignored"].as_u64().unwrap() >= 1, "the reply after the cancel is stale");
}

/// A consumer that is in the middle of an event that does not end by itself.
fn in_the_middle(dir: &Path, more: &[&str]) -> Child {
    produce(dir, &lines(&[("a", "")]));
    let command =
        Sample::Python.handler(dir, "effect(f'began {os.getpid()}')\nwait_for('go')\neffect('ended')");
    let child = hapax(dir, &consume_args(&command, more)).spawn().unwrap();
    wait_until("the handler began", || !effects(dir).is_empty());
    child
}

fn kill(child: &Child, signal: &str) {
    let sent = std::process::Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

#[test]
fn sigterm_drains() {
    let dir = tempfile::tempdir().unwrap();
    let child = in_the_middle(dir.path(), &[]);
    kill(&child, "-TERM");
    std::fs::write(dir.path().join("go"), "").unwrap();
    let ran: Ran = child.wait_with_output().unwrap().into();
    let ran = ran.code(143);
    assert_eq!(count(&ran, "done"), 1, "{}", ran.out);
    assert_eq!(effects(dir.path()).len(), 2);
    assert_eq!(entry(dir.path(), "a")["state"], "done");
}

#[test]
fn what_does_not_end_before_the_deadline_is_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let child = in_the_middle(dir.path(), &["--set", "consumer.drain_ms=200"]);
    kill(&child, "-TERM");
    let ran: Ran = child.wait_with_output().unwrap().into();
    let ran = ran.code(143);
    assert_eq!(count(&ran, "done"), 0, "{}", ran.out);
    let entry = entry(dir.path(), "a");
    assert_eq!(
        (&entry["state"], &entry["attempts"]),
        (&"retry".into(), &0.into()),
        "given back, not failed: {entry}"
    );
}

#[test]
fn a_second_signal_ends_at_once_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let child = in_the_middle(dir.path(), &[]);
    let handler = effects(dir.path())[0].strip_prefix("began ").unwrap().to_owned();
    kill(&child, "-INT");
    kill(&child, "-INT");
    let ran: Ran = child.wait_with_output().unwrap().into();
    let ran = ran.code(130);
    assert_eq!(count(&ran, "done"), 0, "{}", ran.out);
    wait_until("the handler is gone", || !is_alive(&handler));
    assert_ne!(entry(dir.path(), "a")["state"], "done");
}

#[test]
fn a_process_killed_with_9_leaves_its_events_to_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let events = (0..200)
        .fold(String::new(), |text, n| text + &format!("{{\"event_id\":\"e-{n}\",\"k\":{}}}\n", n % 20));
    let create = ["produce", "--topic", "orders", "--create", "4", "--key", "/k"];
    run_with(dir, &create, events.as_bytes()).code(0);
    let command = Sample::Python.handler(dir, "time.sleep(0.02)\neffect(request['id'])");
    // Quick enough for a test, and longer than a busy machine stands still: who loses a lease runs its events again.
    let quick = ["consumer.lease_s=10", "consumer.heartbeat_s=1", "consumer.session_timeout_ms=10000"];
    let quick: Vec<_> = quick.iter().flat_map(|pair| ["--set", pair]).chain(["--concurrency", "4"]).collect();
    let start = || hapax(dir, &consume_args(&command, &quick)).spawn().unwrap();
    let (mut killed, other) = (start(), start());
    wait_until("a part is done", || effects(dir).len() >= 40);
    killed.kill().unwrap();
    killed.wait().unwrap();
    let done = || {
        let answer = run(dir, &["ledger", "stat", "--json"]).code(0).json();
        let counts = answer["counts"].as_array().unwrap().clone();
        counts
            .iter()
            .filter(|count| count["state"] == "done")
            .map(|count| count["count"].as_u64().unwrap())
            .sum::<u64>()
    };
    wait_until("all is done", || done() == 200);
    kill(&other, "-TERM");
    let ran: Ran = other.wait_with_output().unwrap().into();
    let ran = ran.code(143);
    let (all, distinct) = (effects(dir), effects(dir).into_iter().collect::<std::collections::BTreeSet<_>>());
    println!(
        "{} effects, {} repeated; the survivor: {}",
        all.len(),
        all.len() - distinct.len(),
        ran.out.trim()
    );
    assert_eq!(distinct.len(), 200, "nothing is lost");
    assert!(all.len() - distinct.len() <= 4, "only what was in flight runs again");
}

#[test]
fn at_most_once_loses_what_fails_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    produce(dir.path(), &lines(&[("a", ""), ("b", "fail")]));
    let command = Sample::Python.handler(
        dir.path(),
        "assert request['key'] is None
effect(request['id'])
if do == 'fail': raise Retry('later')",
    );
    let ran = consume(dir.path(), &command, &["--at-most-once"]).code(0);
    assert_eq!((count(&ran, "finished"), count(&ran, "lost")), (1, 1), "{}", ran.out);
    assert_eq!(entry(dir.path(), "b")["state"], "lost");
    let ran = consume(dir.path(), &command, &["--at-most-once"]).code(0);
    assert_eq!(ran.json()["deliveries"], serde_json::json!({}));
    assert_eq!(effects(dir.path()).len(), 2);
}

#[test]
fn only_the_kinds_that_are_wanted_run() {
    let dir = tempfile::tempdir().unwrap();
    produce(
        dir.path(),
        "{\"event_id\":\"a\",\"event_type\":\"paid\"}\n{\"event_id\":\"b\",\"event_type\":\"seen\"}\n",
    );
    let command = Sample::Python.handler(dir.path(), "effect(request['event']['kind'])");
    let ran = consume(dir.path(), &command, &["--kind", "paid"]).code(0);
    assert_eq!((count(&ran, "done"), count(&ran, "unwanted")), (1, 1), "{}", ran.out);
    assert_eq!(effects(dir.path()), ["paid"]);
}

#[test]
fn producers_may_have_names_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let line =
        |n: u32| format!("{{\"ref\":\"r-{n}\",\"o\":{{\"id\":\"order-1\",\"n\":{n}}},\"what\":\"paid\"}}\n");
    let produce = ["produce", "--topic", "orders", "--create", "1", "--id", "/ref", "--header", "who=acme"];
    run_with(dir, &produce, [line(2), line(1), line(2)].concat().as_bytes()).code(0);
    let command = Sample::Python.handler(
        dir,
        "event = request['event']
effect(f\"{request['tenant']} {request['id']} {event['kind']} {event['aggregate']} {event['seq']}\")",
    );
    let places = ["--id-at", "/ref", "--aggregate-at", "/o/id", "--seq-at", "/o/n", "--kind-at", "/what"];
    let order = ["--tenant-at", "header:who", "--order", "strict", "--on-dead", "park", "--first-seq", "1"];
    // What came too early waits in memory for so long before it lets the one behind it pass.
    let soon = ["--set", "consumer.hold_ms_max=100"];
    let ran = consume(dir, &command, &[&places[..], &order, &soon].concat()).code(0);
    assert_eq!(effects(dir), ["acme r-1 paid order-1 1", "acme r-2 paid order-1 2"], "{}", ran.out);
    for (flag, place) in [("--seq-at", "n"), ("--id-at", "n"), ("--aggregate-at", "header:")] {
        let ran = consume(dir, "cat", &[flag, place]).code(2);
        assert!(ran.err.contains(flag), "{}", ran.err);
    }
}

#[test]
fn wrong_configuration_is_a_sentence_and_an_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    produce(dir, "{}\n");
    let consume = ["consume", "--topic", "orders", "--until-idle", "1"];
    let long = "g".repeat(256);
    let cases: [(&[&str], i32, &str); 19] = [
        (&["--scope", "s", "--exec", "cat", "--topic", "nope"], 2, "there is no topic nope"),
        (&["--scope", "s", "--exec", "no-such-command-here"], 2, "127"),
        (&["--scope", "s", "--exec", "true"], 2, "does not work"),
        (&["--scope", "s", "--exec", " "], 2, "--exec is blank"),
        (&["--scope", "s"], 2, "--http <URL>|--exec <CMD>"),
        (&["--scope", "s", "--exec", "cat", "--http", "http://x"], 2, "cannot be used with"),
        (&["--exec", "cat"], 2, "--scope is missing"),
        (
            &["--exec", "cat", "--broadcast", "--set", "dedup.default_scope_id=x"],
            2,
            "--broadcast needs a --scope",
        ),
        (&["--scope", "s", "--http", "ftp://host"], 2, "http or https"),
        (&["--scope", "s", "--http", "no url"], 2, "URL"),
        (&["--scope", "s", "--exec", "cat", "--bus", "memory:"], 2, "--bus embedded"),
        (&["--scope", "s", "--exec", "cat", "--bus", "amqp://me:secret@h"], 2, "bus.url takes embedded, "),
        (&["--scope", "s", "--exec", "cat", "--group", &long], 2, "255"),
        (&["--scope", "s", "--exec", "cat", "--concurrency", "0"], 2, "1 to 100000"),
        (&["--scope", "s", "--exec", "cat", "--workers", "5000"], 2, "1 to 1000"),
        (&["--scope", "s", "--exec", "cat", "--order", "latest"], 2, "--on-dead"),
        (&["--scope", "s", "--exec", "cat", "--outage", "ignore"], 2, "pause, fail_fast, dead_letter"),
        (&["--scope", "s", "--exec", "cat", "--set", "consumer.heartbeat_s=30"], 2, "must be shorter than"),
        (
            &[
                "--scope",
                "s",
                "--exec",
                "cat",
                "--ledger",
                "postgres://127.0.0.1:1/x",
                "--set",
                "ledger.acquire_timeout_ms=300",
            ],
            3,
            "unavailable",
        ),
    ];
    for (args, code, expected) in cases {
        let ran = run(dir, &[&consume[..], args].concat());
        println!("{args:?}: {}", ran.err.lines().last().unwrap_or_default());
        let ran = ran.code(code);
        assert!(ran.err.contains(expected), "{args:?}: {}", ran.err);
        assert!(!ran.err.contains("panicked") && !ran.err.contains("secret"), "{}", ran.err);
    }
}

#[test]
fn produce_finds_or_makes_ids_and_names_broken_lines() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let args = ["produce", "--topic", "orders", "--json"];
    let ran = run_with(dir, &args, b"{}\n").code(2);
    assert!(ran.err.contains("--create PARTITIONS"), "{}", ran.err);
    let create = [&args[..], &["--create", "3", "--key", "/k"]].concat();
    let ran = run_with(dir, &create, b"{\"k\":1}\n\n{\"k\":\"x\",\"eventId\":\"e\"}\n").code(0).json();
    assert_eq!((&ran["published"], &ran["ids_made"]), (&2.into(), &1.into()));
    for (line, expected) in [
        ("{\"k\":1}\nnot json\n", "line 2: it is not JSON"),
        ("{\"k\":1}\n{}\n", "line 2: it has no /k"),
        ("{\"k\":1}\n{\"k\":1,\"event_id\":{}}\n", "line 2: "),
        ("{\"k\":1}\n{\"k\":1,\"event_id\":\"\"}\n", "line 2: "),
    ] {
        let ran = run_with(dir, &create, line.as_bytes()).code(4);
        assert!(ran.err.contains(expected), "{}", ran.err);
        assert_eq!(ran.json()["published"], 1, "what came before the broken line is published");
    }
    let named = [&create[..], &["--id", "/order/id", "--header", "source=test"]].concat();
    run_with(dir, &named, b"{\"k\":1,\"order\":{\"id\":\"o-1\"}}\n").code(0);
    let ran = run_with(dir, &named, b"{\"k\":1}\n").code(4);
    assert!(ran.err.contains("line 1: ") && ran.err.contains("/order/id"), "{}", ran.err);
    assert_eq!(run(dir, &[&create[..], &["missing.jsonl"]].concat()).code(4).json_absent(), "");
    // Ids that were made are ids to whoever consumes.
    let command = Sample::Python
        .handler(dir, "effect(request['id'] + ' ' + request['event']['headers'].get('source', '-'))");
    let ran = consume(dir, &command, &[]).code(0);
    assert_eq!(count(&ran, "done"), 7, "{}", ran.out);
    assert!(effects(dir).contains(&"o-1 test".to_owned()));
}

trait JsonAbsent {
    fn json_absent(&self) -> &str;
}

impl JsonAbsent for Ran {
    fn json_absent(&self) -> &str {
        self.out.trim()
    }
}
