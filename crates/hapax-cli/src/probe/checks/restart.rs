//! A service that is killed and started again, by a command of whoever probes it: keys that are only in memory
//! are forgotten with the process, and every other check finds them well.

use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::time::{Instant, sleep};

use super::{Check, SCENARIOS, Session, Verdict, check, unreachable, without_the_first_answer};
use crate::failure::Failure;
use crate::http::{Answer, HangUp, hang_up};

/// Between two looks at whether the service is back.
const STEP: Duration = Duration::from_millis(100);

/// How a service is killed and started again.
#[derive(Debug)]
pub struct Restart {
    /// For `sh -c`. It ends when the service was started; the service need not answer yet.
    pub command: String,
    /// How long the service may take until it answers again.
    pub wait: Duration,
}

impl Restart {
    /// Runs the command. Its output goes nowhere: a service that it starts would hold ours open for good.
    async fn run(&self) -> Result<(), Failure> {
        let mut command = Command::new("sh");
        command.args(["-c", &self.command]).kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let status = command
            .status()
            .await
            .map_err(|error| Failure::input(format!("--restart cannot be run: {error}")))?;
        if status.success() {
            return Ok(());
        }
        Err(Failure::input(format!("--restart: the command failed ({status}); run it by hand to see why")))
    }
}

impl Session<'_> {
    /// A write that was answered; the service is killed and started; the same request again.
    pub(super) async fn restarted(&self, restart: &Restart) -> Result<Check, Failure> {
        let (key, before) = self.begin().await?;
        let first = self.settled(&key).await?;
        restart.run().await?;
        let again = self.back(&key, restart.wait).await?;
        let course = self.course(before, &[first, again]).await?;
        let mut check = check("restart", SCENARIOS, &course);
        match check.verdict {
            Verdict::Ok => check.message = String::from("a retry after a restart finds the first write"),
            Verdict::Doubles => check.message += ": the key was forgotten with the process",
            Verdict::Differs | Verdict::Unknown => {}
        }
        Ok(check)
    }

    /// The service is killed while a request runs, whose answer is lost; the same request again.
    pub(super) async fn killed(&self, restart: &Restart) -> Result<Check, Failure> {
        let (key, before) = self.begin().await?;
        hang_up(&self.probe.with_key(&key), HangUp::AtOnce, self.probe.timeout).await.map_err(unreachable)?;
        restart.run().await?;
        let first = self.back(&key, restart.wait).await?;
        let again = self.settled(&key).await?;
        let course = self.course(before, &[first, again]).await?;
        Ok(without_the_first_answer(check("kill", SCENARIOS, &course), &course))
    }

    /// Repeats a request, as a client would, until the service and what stands before it are back.
    async fn back(&self, key: &str, wait: Duration) -> Result<Answer, Failure> {
        let begun = Instant::now();
        loop {
            let answer = self.settled(key).await;
            let is_away = answer.as_ref().map_or(true, |answer| matches!(answer.status, 502..=504));
            if !is_away || begun.elapsed() >= wait {
                return answer;
            }
            sleep(STEP).await;
        }
    }
}
