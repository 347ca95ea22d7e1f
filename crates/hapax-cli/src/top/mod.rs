//! `hapax top`: the overview of a server in a terminal.

mod figures;
mod screen;
#[cfg(unix)]
mod terminal;

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use hapax::config::Config;
use serde_json::{Value, json};

use crate::cli::{Global, duration};
use crate::failure::Failure;
use crate::http::{Request, Target, send};
use crate::print;
use crate::signal::Gate;
use figures::Samples;
use screen::Shown;

/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How wide lines are where there is no terminal.
const WIDTH: u16 = 100;

/// Watch the path of an event in the terminal: rates, lag, leases, retries, dead letters
///
/// It shows what the overview of the operator's page shows. It asks a server (`hapax serve`); one that does
/// not answer is asked again. Without a terminal it prints the numbers once.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax top
  hapax top --url http://10.0.0.7:7070 --token-file admin.token
  hapax top --json                  a line of JSON for each refresh
  hapax top --json --once           one line; exits with 3 if the server does not answer")]
pub struct TopArgs {
    /// Where the server is [default: where `hapax serve` would listen for operators]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// A file with a token that has the role admin, if the server asks for one
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// How often to ask
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    every: Duration,
    /// Print the numbers once, and end
    #[arg(long)]
    once: bool,
}

pub async fn run(global: &Global, args: &TopArgs, gate: &Gate) -> Result<u8, Failure> {
    let mut top = Top::new(&global.load()?, args)?;
    if args.once || !(global.json || std::io::stdout().is_terminal()) {
        return top.once(global.json).await;
    }
    let mut signals = gate.take_signals();
    tokio::select! {
        shown = async { if global.json { top.stream().await } else { top.show().await } } => shown.map(|()| 0),
        Some(signal) = signals.recv() => Ok(u8::try_from(signal).unwrap_or(1)),
    }
}

/// Whom it asks, and what was answered.
struct Top {
    url: String,
    request: Request,
    every: Duration,
    samples: Samples,
    /// Why the last question has no answer.
    lost: Option<String>,
}

impl Top {
    fn new(config: &Config, args: &TopArgs) -> Result<Self, Failure> {
        let url = args.url.clone().unwrap_or_else(|| {
            let mut address = config.serve.admin_listen.unwrap_or(config.serve.listen);
            if address.ip().is_unspecified() {
                address.set_ip(std::net::Ipv4Addr::LOCALHOST.into()); // all addresses of this machine
            }
            format!("http://{address}")
        });
        let url = url.trim_end_matches('/').to_owned();
        let target = Target::parse(&format!("{url}/v1/overview"))?;
        let mut headers = vec![("accept".to_owned(), "application/json".to_owned())];
        if let Some(file) = &args.token_file {
            let cannot = |e| Failure::config(format!("--token-file {}: {e}", file.display()));
            let token = std::fs::read_to_string(file).map_err(cannot)?;
            let token = token.trim();
            if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
                let message = format!("--token-file {} holds no token (hpx_…)", file.display());
                return Err(Failure::config(message));
            }
            headers.push(("authorization".to_owned(), format!("Bearer {token}")));
        }
        let request = Request { method: "GET".to_owned(), target, headers, body: String::new() };
        Ok(Top { url, request, every: args.every, samples: Samples::default(), lost: None })
    }

    async fn ask(&mut self) {
        let answer = overview(&self.request).await;
        self.answered(answer);
    }

    fn answered(&mut self, answer: Result<Value, String>) {
        self.lost = match answer {
            Ok(data) => {
                self.samples.add(Instant::now(), data);
                None
            }
            Err(reason) => Some(reason),
        };
    }

    fn shown<'s>(&'s self, figures: &'s figures::Figures) -> Shown<'s> {
        let colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Shown { url: &self.url, figures, lost: self.lost.as_deref(), colours }
    }

    fn line(&self) -> Value {
        match &self.lost {
            Some(reason) => json!({"url": self.url, "answers": false, "reason": reason}),
            None => json!({
                "url": self.url, "answers": true, "rates": self.samples.rates(), "overview": self.samples.last(),
            }),
        }
    }

    async fn once(&mut self, as_json: bool) -> Result<u8, Failure> {
        self.ask().await;
        if let Some(reason) = &self.lost {
            let message = format!("{}: {reason}; is the server running (hapax serve)?", self.url);
            return Err(Failure::dependency("unavailable", message));
        }
        if as_json {
            print::json(&self.line())?;
        } else {
            let figures = self.samples.figures();
            print::line(&screen::lines(&self.shown(&figures), WIDTH).join("\n"))?;
        }
        Ok(0)
    }

    /// A line for each refresh, for ever.
    async fn stream(&mut self) -> Result<(), Failure> {
        let mut tick = tokio::time::interval(self.every);
        loop {
            tick.tick().await;
            self.ask().await;
            print::json(&self.line())?;
        }
    }

    /// Draws until `q` is pressed.
    #[cfg(unix)]
    async fn show(&mut self) -> Result<(), Failure> {
        use ratatui_core::terminal::Terminal;

        let failed = |e: std::io::Error| Failure::dependency("output", format!("the terminal: {e}"));
        let _taken = terminal::Taken::take().map_err(failed)?;
        let mut keys = terminal::keys().map_err(failed)?;
        let mut screen = Terminal::new(terminal::Ansi::stdout()).map_err(failed)?;
        let mut tick = tokio::time::interval(self.every);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // Between answers too: the window may have another size.
        let mut redraw = tokio::time::interval(Duration::from_millis(250));
        redraw.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (sender, mut answers) = tokio::sync::mpsc::channel(1);
        let (mut is_asked, mut has_keys) = (false, true);
        loop {
            let figures = self.samples.figures();
            let shown = self.shown(&figures);
            screen.draw(|frame| screen::draw(&shown, frame.area(), frame.buffer_mut())).map_err(failed)?;
            tokio::select! {
                key = keys.recv(), if has_keys => match key {
                    Some(b'q' | b'Q') => return Ok(()),
                    Some(_) => {}
                    None => has_keys = false, // standard input has ended; Ctrl-C still ends it
                },
                _ = tick.tick(), if !is_asked => {
                    is_asked = true;
                    let (request, sender) = (self.request.clone(), sender.clone());
                    // The screen follows the window while an answer takes long.
                    tokio::spawn(async move { sender.send(overview(&request).await).await });
                }
                Some(answer) = answers.recv() => {
                    is_asked = false;
                    self.answered(answer);
                }
                _ = redraw.tick() => {}
            }
        }
    }

    #[cfg(not(unix))]
    async fn show(&mut self) -> Result<(), Failure> {
        Err(Failure::config("the screen needs a Unix terminal; --once and --json work everywhere"))
    }
}

/// The numbers; or in a sentence why there are none.
async fn overview(request: &Request) -> Result<Value, String> {
    let answer = send(request, TIMEOUT).await.map_err(|reason| print::escaped(&reason))?;
    let body: Option<Value> = serde_json::from_slice(&answer.body).ok();
    match (answer.status, body) {
        (200, Some(data)) if data["scopes"].is_array() => Ok(data),
        (200, _) => Err("the server there is not hapax".to_owned()),
        (401, _) => Err("the server asks for a token with the role admin: --token-file FILE".to_owned()),
        (status, body) => {
            let detail = body.as_ref().and_then(|body| body["detail"].as_str()).unwrap_or("without a reason");
            Err(print::escaped(&format!("it answered {status}: {detail}")))
        }
    }
}
