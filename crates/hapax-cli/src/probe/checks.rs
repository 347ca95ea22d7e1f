//! What is asked of a service, and what its answers show.

mod restart;

use std::time::Duration;

use hapax::keyed::IdempotencyKey;
use tokio::time::Instant;

use super::count::Count;
use super::effects::{Shown, Signal};
use crate::failure::Failure;
use crate::http::{Answer, HangUp, Request, hang_up, send};
pub use restart::Restart;

/// How many requests with one key are sent at once.
const AT_ONCE: usize = 20;
/// How often a request is repeated that is answered with "later".
const REPEATS: usize = 100;
/// The same for a service that has shown that its "later" is for good.
const REPEATS_IN_VAIN: usize = 10;
const SCENARIOS: &str = "Idempotency Enforcement Scenarios";

/// What a check has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Nothing is doubled, but the draft says otherwise, or a client may be misled.
    Differs,
    /// One write took effect more than once.
    Doubles,
    /// The answers do not show it.
    Unknown,
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Ok => "ok",
            Verdict::Differs => "differs",
            Verdict::Doubles => "doubles",
            Verdict::Unknown => "unknown",
        }
    }
}

/// One check and what it has shown.
#[derive(Debug)]
pub struct Check {
    pub name: &'static str,
    /// The section of the draft that it is about.
    pub draft: &'static str,
    pub verdict: Verdict,
    pub message: String,
}

/// How a key is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// As the draft says: a string of RFC 8941.
    Quoted,
    /// As most services take it.
    Bare,
}

impl Form {
    fn write(self, key: &IdempotencyKey) -> String {
        match self {
            Form::Quoted => key.to_header(),
            Form::Bare => key.as_str().to_owned(),
        }
    }
}

/// A service to probe.
#[derive(Debug)]
pub struct Probe {
    pub request: Request,
    /// A body that asks for something else.
    pub other_body: Option<String>,
    /// Another path of the service that takes the same body.
    pub other: Option<Request>,
    /// How the service is killed and started again.
    pub restart: Option<Restart>,
    pub count: Option<Count>,
    pub timeout: Duration,
}

/// What a few requests with one key came to.
struct Course {
    /// What the successes show.
    shown: Shown,
    /// Whether any request succeeded.
    succeeded: bool,
    /// The status of the last answer, if it is a refusal.
    refused: Option<u16>,
    /// How many effects the service counts; `None` if it is not asked.
    counted: Option<u64>,
}

/// A service that answers: what is known of it, and what was found so far.
struct Session<'a> {
    probe: &'a Probe,
    count: Option<Count>,
    form: Form,
    signal: Signal,
    repeats: usize,
}

impl Probe {
    /// All checks, in order. What was found is in `checks` also if it is ended early.
    pub async fn run(mut self, checks: &mut Vec<Check>) -> Result<(), Failure> {
        let mut count = self.count.take();
        let (form, signal) = match self.begin(&mut count).await? {
            (form, signal, Ok(())) => (form, signal),
            // What was written before the probe may be counted by now: how long that takes is known.
            (_, _, Err(_)) => {
                let (form, signal, agrees) = self.begin(&mut count).await?;
                agrees?;
                (form, signal)
            }
        };
        let mut session = Session { probe: &self, count, form, signal, repeats: REPEATS };
        checks.push(session.retry().await?);
        checks.push(session.at_once().await?);
        for (name, place) in [
            ("hang-up at once", HangUp::AtOnce),
            ("hang-up at the answer", HangUp::AtTheAnswer),
            ("hang-up in the body", HangUp::InTheBody),
        ] {
            checks.push(session.hung_up(name, place).await?);
        }
        checks.push(session.other_body().await?);
        checks.push(match form {
            Form::Quoted => session.bare().await?,
            Form::Bare => session.quoted().await?,
        });
        checks.push(session.without_key().await?);
        if let Some(other) = &self.other {
            checks.push(session.other_path(other).await?);
        }
        // The last ones: a service that does not come back has shown everything else by then.
        if let Some(restart) = &self.restart {
            checks.push(session.restarted(restart).await?);
            checks.push(session.killed(restart).await?);
        }
        Ok(())
    }

    /// Two writes: how they are distinguished, and whether they are counted as two.
    async fn begin(&self, count: &mut Option<Count>) -> Result<(Form, Signal, Result<(), Failure>), Failure> {
        let before = match count {
            None => 0,
            Some(count) => count.at_rest(0).await?,
        };
        let begun = Instant::now();
        let (form, key, first) = self.first().await?;
        if let Some(count) = count {
            count.follow(begun, before, 1).await?;
        }
        let (other_key, begun) = (IdempotencyKey::now_v7(), Instant::now());
        let second = self.keyed(&form.write(&other_key)).await?;
        let agrees = match count {
            None => Ok(()),
            Some(count) => {
                count.follow(begun, before, 2).await?;
                count.agrees(before, 2).await
            }
        };
        Ok((form, Signal::of((key.as_str(), &first), (other_key.as_str(), &second)), agrees))
    }

    /// The first write, and the form of the key that the service takes.
    async fn first(&self) -> Result<(Form, IdempotencyKey, Answer), Failure> {
        let mut refused = None;
        for form in [Form::Quoted, Form::Bare] {
            let key = IdempotencyKey::now_v7();
            let answer = self.keyed(&form.write(&key)).await?;
            if answer.is_success() {
                return Ok((form, key, answer));
            }
            let is_refused = (400..500).contains(&answer.status);
            let first = refused.get_or_insert(answer);
            if !is_refused {
                return Err(not_probed(first));
            }
        }
        Err(refused.map_or_else(|| Failure::input("nothing was asked"), |answer| not_probed(&answer)))
    }

    fn with_key(&self, key: &str) -> Request {
        keyed(&self.request, key)
    }

    async fn keyed(&self, key: &str) -> Result<Answer, Failure> {
        send(&self.with_key(key), self.timeout).await.map_err(unreachable)
    }
}

impl Session<'_> {
    /// The same request again gets the first answer.
    async fn retry(&mut self) -> Result<Check, Failure> {
        let (key, before) = self.begin().await?;
        let first = self.settled(&key).await?;
        let again = self.settled(&key).await?;
        let replayed = ["idempotency-replayed", "idempotent-replayed", "x-idempotent-replayed"]
            .into_iter()
            .find(|name| again.header(name).is_some());
        if first.is_success() && !again.is_success() {
            self.repeats = REPEATS_IN_VAIN;
        }
        let is_replay = first.body == again.body;
        let course = self.course(before, &[first, again]).await?;
        let mut check = check("retry", SCENARIOS, &course);
        if check.verdict == Verdict::Ok {
            let answer = if is_replay { "the first answer" } else { "an answer about the first write" };
            let header =
                replayed.map_or_else(|| "no header says so".to_owned(), |name| format!("{name} says so"));
            check.message = format!("a retry gets {answer}; {header}");
        }
        Ok(check)
    }

    /// Of many requests with one key at once, one takes effect.
    async fn at_once(&self) -> Result<Check, Failure> {
        let (key, before) = self.begin().await?;
        let mut sending = tokio::task::JoinSet::new();
        for _ in 0..AT_ONCE {
            let (request, timeout) = (self.probe.with_key(&key), self.probe.timeout);
            sending.spawn(async move { send(&request, timeout).await });
        }
        let mut answers = Vec::new();
        while let Some(answer) = sending.join_next().await {
            // One without an answer counts by what the next request finds.
            answers.extend(answer.ok().and_then(Result::ok));
        }
        answers.push(self.settled(&key).await?);
        let course = self.course(before, &answers).await?;
        let mut check = check("parallel", SCENARIOS, &course);
        if check.verdict == Verdict::Ok {
            check.message = match course.counted {
                Some(_) => format!("of {AT_ONCE} requests at once with one key, one took effect"),
                None => format!("{AT_ONCE} requests at once with one key: all that succeeded got one answer"),
            };
        }
        Ok(check)
    }

    /// A client hangs up, and comes back with the same key.
    async fn hung_up(&self, name: &'static str, place: HangUp) -> Result<Check, Failure> {
        let (key, before) = self.begin().await?;
        hang_up(&self.probe.with_key(&key), place, self.probe.timeout).await.map_err(unreachable)?;
        let first = self.settled(&key).await?;
        let again = self.settled(&key).await?;
        let course = self.course(before, &[first, again]).await?;
        let check = check(name, SCENARIOS, &course);
        Ok(if place == HangUp::InTheBody { check } else { without_the_first_answer(check, &course) })
    }

    /// The key with another body is refused.
    async fn other_body(&self) -> Result<Check, Failure> {
        let (name, draft) = ("other body", "Error Scenarios");
        let Some(body) = &self.probe.other_body else {
            let message = "the body has no number to change; --other-body gives one".to_owned();
            return Ok(Check { name, draft, verdict: Verdict::Unknown, message });
        };
        let key = self.key();
        let first = self.settled(&key).await?;
        let request = Request { body: body.clone(), ..self.probe.with_key(&key) };
        let answer = send(&request, self.probe.timeout).await.map_err(unreachable)?;
        let (verdict, message) = match answer.status {
            422 => (Verdict::Ok, "a key with another body is refused with 422".to_owned()),
            status if !answer.is_success() => (
                Verdict::Differs,
                format!("a key with another body is refused with {status}; the draft says 422"),
            ),
            _ if self.signal.is_same(&first, &answer) => (
                Verdict::Differs,
                "a key with another body gets the first answer; the draft says 422".to_owned(),
            ),
            status => (
                Verdict::Differs,
                format!("a key with another body is answered with {status}; the draft says 422"),
            ),
        };
        Ok(Check { name, draft, verdict, message })
    }

    /// The quoted form of the draft and the bare one that most services take.
    async fn bare(&self) -> Result<Check, Failure> {
        let key = IdempotencyKey::now_v7();
        let before = self.counted(0).await?;
        let first = self.settled(&Form::Quoted.write(&key)).await?;
        let bare = self.settled(&Form::Bare.write(&key)).await?;
        let (name, draft) = ("bare key", "Syntax");
        if !bare.is_success() {
            let message = format!("a key without quotation marks is refused with {}", bare.status);
            let verdict = if bare.status == 400 { Verdict::Ok } else { Verdict::Differs };
            return Ok(Check { name, draft, verdict, message });
        }
        let course = self.course(before, &[first, bare]).await?;
        let mut check = check(name, draft, &course);
        check.message = match check.verdict {
            Verdict::Ok => "with and without quotation marks it is the same key".to_owned(),
            Verdict::Doubles => {
                "with and without quotation marks it is two keys: a client that changes the form writes twice"
                    .to_owned()
            }
            _ => check.message,
        };
        Ok(check)
    }

    /// A service that takes only the bare form.
    async fn quoted(&self) -> Result<Check, Failure> {
        let answer = self.probe.keyed(&Form::Quoted.write(&IdempotencyKey::now_v7())).await?;
        let message = format!(
            "a key in quotation marks, as the draft writes it, is answered with {}; the other checks used bare keys",
            answer.status
        );
        Ok(Check { name: "quoted key", draft: "Syntax", verdict: Verdict::Differs, message })
    }

    async fn without_key(&self) -> Result<Check, Failure> {
        let answer = send(&self.probe.request, self.probe.timeout).await.map_err(unreachable)?;
        let (verdict, message) = match answer.status {
            400 => (Verdict::Ok, "a request without a key is refused with 400".to_owned()),
            status if answer.is_success() => {
                (Verdict::Ok, format!("the key is optional ({status} without one)"))
            }
            status => (
                Verdict::Differs,
                format!("a request without a key is answered with {status}; the draft says 400"),
            ),
        };
        Ok(Check { name: "no key", draft: "Error Scenarios", verdict, message })
    }

    /// A key on another path must not replay the answer of the first one.
    async fn other_path(&self, other: &Request) -> Result<Check, Failure> {
        let key = self.key();
        let first = self.settled(&key).await?;
        let answer = send(&keyed(other, &key), self.probe.timeout).await.map_err(unreachable)?;
        let (verdict, message) = if self.signal == Signal::Nothing && answer.is_success() {
            (Verdict::Unknown, "writes with different keys are answered alike".to_owned())
        } else if self.signal.is_same(&first, &answer) {
            (Verdict::Differs, "the key on another path gets the answer of the first one".to_owned())
        } else {
            (Verdict::Ok, format!("the key on another path is answered with {}", answer.status))
        };
        Ok(Check { name: "other path", draft: "Idempotency Fingerprint", verdict, message })
    }

    fn key(&self) -> String {
        self.form.write(&IdempotencyKey::now_v7())
    }

    /// A new key, and how many effects there are before it is used.
    async fn begin(&self) -> Result<(String, Option<u64>), Failure> {
        Ok((self.key(), self.counted(0).await?))
    }

    /// Sends until the answer is not "later": another request with the key may run.
    async fn settled(&self, key: &str) -> Result<Answer, Failure> {
        let mut answer = self.probe.keyed(key).await?;
        for _ in 0..self.repeats {
            if !matches!(answer.status, 409 | 425 | 429 | 503) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            answer = self.probe.keyed(key).await?;
        }
        Ok(answer)
    }

    async fn course(&self, before: Option<u64>, answers: &[Answer]) -> Result<Course, Failure> {
        let all: Vec<&Answer> = answers.iter().collect();
        let refused = answers.last().filter(|answer| !answer.is_success()).map(|answer| answer.status);
        let counted = match before {
            None => None,
            Some(before) => {
                let after = self.counted(before.saturating_add(1)).await?;
                after.map(|after| after.saturating_sub(before))
            }
        };
        let succeeded = answers.iter().any(Answer::is_success);
        Ok(Course { shown: self.signal.shown(&all), succeeded, refused, counted })
    }

    /// How many effects there are, when their number has come to rest.
    async fn counted(&self, least: u64) -> Result<Option<u64>, Failure> {
        match &self.count {
            None => Ok(None),
            Some(count) => count.at_rest(least).await.map(Some),
        }
    }
}

/// The verdict on requests with one key that should have had one effect.
fn check(name: &'static str, draft: &'static str, course: &Course) -> Check {
    let text = |text: &str| text.to_owned();
    let (verdict, message) = match (course.counted, course.shown, course.refused) {
        (Some(count @ 2..), ..) => (Verdict::Doubles, format!("one key took effect {count} times")),
        (Some(0), ..) if course.succeeded => {
            (Verdict::Unknown, text("a request with the key succeeds, and no effect is counted"))
        }
        (Some(0), ..) => (Verdict::Differs, text("no request with the key succeeds, and none takes effect")),
        (Some(_), _, Some(status)) => {
            (Verdict::Differs, format!("one effect, and the retry is refused with {status}"))
        }
        (Some(_), Shown::One | Shown::Nothing, None) => (Verdict::Ok, text("one effect")),
        (Some(_), Shown::Several(_) | Shown::Unclear, None) => {
            (Verdict::Differs, text("one effect, and answers that differ"))
        }
        (None, Shown::Several(count), _) => {
            (Verdict::Doubles, format!("one key got answers about {count} writes"))
        }
        (None, _, Some(status)) if !course.succeeded => (
            Verdict::Unknown,
            format!("every answer refuses ({status}): --count tells how many effects there are"),
        ),
        (None, _, Some(status)) => (Verdict::Differs, format!("the retry is refused with {status}")),
        (None, Shown::Nothing, None) => (
            Verdict::Unknown,
            text(
                "answers to different writes are alike or repeat the key: --count tells how many effects there are",
            ),
        ),
        (None, Shown::Unclear, None) => (
            Verdict::Unknown,
            text("the answers differ, and name no write: --count tells how many effects there are"),
        ),
        (None, Shown::One, None) => (Verdict::Ok, text("all got one answer")),
    };
    Check { name, draft, verdict, message }
}

/// Answers that agree do not show what the lost one was about; a count does.
fn without_the_first_answer(mut check: Check, course: &Course) -> Check {
    if check.verdict == Verdict::Ok && course.counted.is_none() {
        check.verdict = Verdict::Unknown;
        check.message =
            String::from("what the lost answer was is not known: --count tells how many effects there are");
    }
    check
}

fn not_probed(answer: &Answer) -> Failure {
    let body = String::from_utf8_lossy(&answer.body);
    let start: String = body.chars().take(200).filter(|c| !c.is_control()).collect();
    Failure::input(format!(
        "the service answers {} to a first request with a key, so nothing can be probed: {start}",
        answer.status
    ))
}

fn keyed(request: &Request, key: &str) -> Request {
    let mut request = request.clone();
    request.headers.push(("idempotency-key".to_owned(), key.to_owned()));
    request
}

pub fn unreachable(mut message: String) -> Failure {
    message.insert_str(0, "the service gives no answer: ");
    Failure::dependency("unavailable", message)
}
