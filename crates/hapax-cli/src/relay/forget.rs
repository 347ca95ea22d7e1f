//! `hapax relay forget`.

use hapax::Journal;
use hapax::config::Config;
use hapax::journal::RelayState;
use hapax::words::counted;
use serde_json::json;

use super::{COUNT_MAX, ForgetArgs, behind_json, named, note};
use crate::cli::Global;
use crate::failure::Failure;
use crate::print;

/// Forgets a relay without a leader, and reports what it held back.
pub(super) async fn forget(
    global: &Global,
    config: &Config,
    journal: &dyn Journal,
    args: &ForgetArgs,
) -> Result<u8, Failure> {
    let name = &config.relay.name;
    let relays = journal.relays().await?;
    let position =
        |state: &RelayState| state.checkpoint.as_ref().map(|checkpoint| checkpoint.position.clone());
    let state = relays.iter().find(|state| state.relay == *name);
    let its = state.and_then(position).unwrap_or_default();
    let others = relays.iter().filter(|state| state.relay != *name);
    let others = others.map(|state| position(state).unwrap_or_default()).min();
    // Events that no other relay needs: a sweep will now remove them.
    let held_back = match &others {
        Some(others) if state.is_some() && *others > its => {
            let after = journal.count_after(&its, COUNT_MAX).await?;
            after.saturating_sub(journal.count_after(others, COUNT_MAX).await?)
        }
        _ => 0,
    };
    let holds = match &others {
        Some(_) => format!("it holds back {} from being swept", counted(held_back, "event", "events")),
        None => "no other relay follows the journal, so nothing is swept without it".to_owned(),
    };
    if state.is_some() && !args.yes {
        print::can_ask(&format!("this forgets relay {name} at position {its} ({holds})"))?;
        let question = format!("forget relay {name} at position {its} for good? ({holds})");
        if !print::asked(&question)? {
            return Err(Failure::declined("nothing was changed"));
        }
    }
    if state.is_some() {
        note(config, &args.by, "relay.forget", &format!("at position {its}: {holds}")).await?;
    }
    let was = journal.forget_relay(name).await?;
    let behind = was.checkpoint.as_ref().map(|checkpoint| &checkpoint.behind[..]).unwrap_or_default();
    if global.json {
        print::json(&json!({
            "relay": name.as_str(), "position": position(&was).map(|position| position.to_string()),
            "saved_at": was.saved_at.map(|at| at.to_string()), "held_back": held_back,
            "last_relay": others.is_none(), "behind": behind.iter().map(behind_json).collect::<Vec<_>>(),
        }))?;
        return Ok(0);
    }
    let held = holds.replace("holds back", "held back");
    print::line(&format!("relay {name} is forgotten at position {its}: {held}"))?;
    for behind in behind {
        print::line(&format!("it had left {} behind at seq {}", named(behind), behind.next))?;
    }
    Ok(0)
}
