//! The `hapax` command: consumes and produces events, catches duplicates in the shell, inspects a
//! ledger, makes and reads ids.
//!
//! Each group of commands has its own file or folder; `cli` has the shared flags, `failure` the
//! errors that end a command.

mod analytics;
mod cdc;
mod cli;
mod completions;
mod config;
mod consume;
#[cfg(unix)]
mod demo;
mod doctor;
mod erase;
mod explain;
mod exporters;
mod failure;
mod filter;
mod http;
mod id;
mod journal;
mod keys;
mod ledger;
mod letters;
mod lines;
mod modules;
mod open;
mod plan;
mod print;
mod probe;
mod produce;
mod project;
mod query;
mod reasons;
mod relay;
mod select;
mod serve;
mod signal;
mod stats;
mod token;
mod top;
mod traces;
mod verify;
mod who;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};
use failure::Failure;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return failure::usage(&error),
    };
    let json = cli.global.json;
    match run(cli) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => failure.report(json),
    }
}

fn run(cli: Cli) -> Result<u8, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| Failure::dependency("runtime", format!("no threads for the runtime: {e}")))?;
    let gate = signal::listen(&runtime)?;
    let global = &cli.global;
    let traces = traces::Traces::from_environment()?;
    exporters::log(
        global.log,
        global.log_format.map_or(global.json, |format| format == exporters::LogFormat::Json),
        traces.as_ref(),
    );
    let metrics = global.metrics.as_deref().map(exporters::Metrics::collect).transpose()?;
    let serves = matches!(cli.command, Command::Serve(_));
    let code = match cli.command {
        #[cfg(unix)]
        Command::Demo(args) => runtime.block_on(demo::run(global, &args, &gate)),
        #[cfg(unix)]
        Command::DemoWorker(args) => runtime.block_on(demo::run_worker(&args)),
        Command::Consume(args) => runtime.block_on(consume::run(global, &args, &gate, metrics.as_ref())),
        Command::Project(args) => runtime.block_on(project::run(global, &args, &gate, metrics.as_ref())),
        Command::Produce(args) => runtime.block_on(produce::run(global, &args)),
        Command::Journal(args) => runtime.block_on(journal::run(global, &args)),
        Command::Modules(args) => runtime.block_on(modules::run(global, &args)),
        Command::Relay(args) => runtime.block_on(relay::run(global, &args, &gate, metrics.as_ref())),
        Command::Serve(args) => runtime.block_on(serve::run(global, &args, &gate, metrics.as_ref())),
        Command::Top(args) => runtime.block_on(top::run(global, &args, &gate)),
        Command::Plan(args) => plan::run(global, &args),
        Command::Probe(args) => runtime.block_on(probe::run(global, &args)),
        Command::Cdc(args) => runtime.block_on(cdc::run(global, &args)),
        Command::Verify(args) => runtime.block_on(verify::run(global, &args)),
        Command::Analytics(args) => runtime.block_on(analytics::run(global, &args)),
        Command::Query(args) => runtime.block_on(query::run(global, &args)),
        Command::Erase(args) => runtime.block_on(erase::run(global, &args)),
        Command::Explain(args) => runtime.block_on(explain::run(global, &args)),
        Command::Stats(args) => runtime.block_on(stats::run(global, &args)),
        Command::Dead(args) => runtime.block_on(letters::dead(global, &args)),
        Command::Parked(args) => runtime.block_on(letters::parked(global, &args)),
        Command::Doctor(args) => runtime.block_on(doctor::run(global, &args)),
        Command::Filter(args) => filter::run(global, &args, &runtime, &gate),
        Command::Id(args) => id::run(global, &args),
        Command::Config(args) => config::run(global, &args),
        Command::Keys(args) => runtime.block_on(keys::run(global, *args)),
        Command::Token(args) => runtime.block_on(token::run(global, &args)),
        Command::Audit(args) => runtime.block_on(token::audit(global, &args)),
        Command::Completions(args) => completions::run(global, &args),
        Command::Ledger(args) => runtime.block_on(ledger::run(global, args)),
    };
    if let Some(traces) = traces {
        traces.end();
    }
    let written = metrics.map_or(Ok(()), |metrics| metrics.write());
    if serves {
        // It has drained; whatever is left must not keep the process from ending.
        runtime.shutdown_background();
    }
    match (code, written) {
        (Ok(0), written) => written.map(|()| 0),
        (code, Ok(())) => code,
        // The command's own failure comes first.
        (code, Err(unwritten)) => {
            let _ = unwritten.report(global.json);
            code
        }
    }
}
