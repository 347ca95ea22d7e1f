//! Read-only commands: `check`, `stat`, `ls`, `show`.

use clap::Args;
use hapax::ledger::{Cursor, Entry, Filter, Finding, Identity, Level, State};
use hapax::{Aggregate, EventId, Ledger, Scope, Tenant, Time, Topic};
use serde_json::{Value, json};

use crate::cli::Global;
use crate::failure::{self, Failure};
use crate::print;

/// Selects entries.
#[derive(Debug, Clone, Args)]
pub struct FilterArgs {
    /// Only this state; may be repeated (leased, done, retry, dead, claimed, finished, lost, parked, stale)
    #[arg(long)]
    pub state: Vec<State>,
    #[command(flatten)]
    pub which: WhichArgs,
}

/// Selects entries in any state.
#[derive(Debug, Clone, Default, Args)]
pub struct WhichArgs {
    /// Only this scope
    #[arg(long)]
    pub scope: Option<Scope>,
    /// Only this tenant
    #[arg(long)]
    pub tenant: Option<Tenant>,
    /// Only entries without a tenant [default: of all tenants]
    #[arg(long, conflicts_with = "tenant")]
    pub no_tenant: bool,
    /// Only this aggregate
    #[arg(long)]
    pub aggregate: Option<Aggregate>,
    /// Only from this topic
    #[arg(long)]
    pub topic: Option<Topic>,
    /// Only from this partition
    #[arg(long, value_name = "N")]
    pub partition: Option<i32>,
    /// Only entries first seen at or after this time: RFC 3339, or a time ago (24h)
    #[arg(long, value_name = "TIME")]
    pub since: Option<When>,
    /// Only entries first seen before this time: RFC 3339, or a time ago (24h)
    #[arg(long, value_name = "TIME")]
    pub until: Option<When>,
    /// Only entries with this pair at the top level of their metadata
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub meta: Option<(String, String)>,
}

impl WhichArgs {
    /// Whether it selects everything.
    pub fn is_empty(&self) -> bool {
        self.scope.is_none()
            && self.tenant.is_none()
            && self.aggregate.is_none()
            && self.topic.is_none()
            && self.partition.is_none()
            && self.since.is_none()
            && self.until.is_none()
            && self.meta.is_none()
    }

    /// Converts to the ledger's filter; times ago count from the ledger's current time.
    pub async fn filter(&self, ledger: &dyn Ledger, states: &[State]) -> hapax::Result<Filter> {
        let now = match (&self.since, &self.until) {
            (None, None) => Time::default(),
            _ => ledger.now().await?,
        };
        Ok(Filter {
            tenant: (self.no_tenant || self.tenant.is_some()).then(|| self.tenant.clone()),
            scope: self.scope.clone(),
            scopes: None,
            id: None,
            states: states.to_vec(),
            since: self.since.map(|when| when.at(now)),
            until: self.until.map(|when| when.at(now)),
            metadata: self.meta.clone(),
            aggregate: self.aggregate.clone(),
            topic: self.topic.clone(),
            partition: self.partition,
        })
    }
}

/// A point in time, or a time ago.
#[derive(Debug, Clone, Copy)]
pub enum When {
    At(Time),
    Ago(std::time::Duration),
}

impl When {
    fn at(self, now: Time) -> Time {
        match self {
            When::At(time) => time,
            When::Ago(ago) => now.minus(ago),
        }
    }
}

impl std::str::FromStr for When {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(ago) = crate::cli::duration(text) {
            return Ok(When::Ago(ago));
        }
        Time::parse(text).map(When::At).map_err(|e| e.to_string())
    }
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    filter: FilterArgs,
    #[command(flatten)]
    page: PageArgs,
}

/// Which page of a listing.
#[derive(Debug, Args)]
pub struct PageArgs {
    /// List at most this many
    #[arg(long, default_value_t = 100)]
    pub limit: usize,
    /// Continue after a page, with the cursor printed as `next`
    #[arg(long, value_name = "CURSOR")]
    pub after: Option<Cursor>,
}

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// The scope (whose effect)
    #[arg(long)]
    scope: Scope,
    /// The tenant (whose data)
    #[arg(long)]
    tenant: Option<Tenant>,
    /// The event's time, if the ledger's identity includes it
    #[arg(long, value_parser = Time::parse)]
    time: Option<Time>,
    /// Print the payload too, if the event is held with its bytes
    #[arg(long)]
    payload: bool,
    /// The event
    id: EventId,
}

pub async fn check(global: &Global, ledger: &dyn Ledger) -> Result<u8, Failure> {
    findings(global, &ledger.check().await?)
}

/// Prints findings; exit code 1 if one is a refusal.
pub fn findings(global: &Global, findings: &[Finding]) -> Result<u8, Failure> {
    let word = |level| match level {
        Level::Fine => "fine",
        Level::Warning => "warning",
        Level::Refusal => "refusal",
    };
    if global.json {
        let list =
            findings.iter().map(|f| json!({"level": word(f.level), "check": f.check, "message": f.message}));
        print::json(&json!({"findings": list.collect::<Vec<_>>()}))?;
    } else if findings.is_empty() {
        print::line("no findings: everything is in order")?;
    } else {
        let rows: Vec<_> = findings
            .iter()
            .map(|f| [word(f.level).to_owned(), f.check.to_owned(), print::escaped(&f.message)])
            .collect();
        print::table(["level", "check", "finding"], &rows)?;
    }
    let refused = findings.iter().any(|f| f.level == Level::Refusal);
    Ok(if refused { failure::BROKEN_PROMISE } else { 0 })
}

pub async fn stat(global: &Global, ledger: &dyn Ledger) -> Result<u8, Failure> {
    let stat = ledger.stat().await?;
    if global.json {
        let counts = stat.counts.iter().map(|(tenant, scope, state, count)| {
            json!({"tenant": tenant.as_ref().map(Tenant::as_str), "scope": scope.as_str(),
                   "state": state.name(), "count": count})
        });
        let dropped =
            stat.dropped.iter().map(|(week, at)| json!({"week": week.to_string(), "at": at.to_string()}));
        print::json(&json!({
            "backend": ledger.capabilities().backend,
            "now": stat.now.to_string(),
            "counts": counts.collect::<Vec<_>>(),
            "weeks": stat.weeks.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "week_sizes": stat.week_sizes.iter().map(|size| json!({
                "week": size.week.to_string(), "entries": size.entries, "bytes": size.bytes,
            })).collect::<Vec<_>>(),
            "dropped": dropped.collect::<Vec<_>>(),
            "held": stat.held,
        }))?;
        return Ok(0);
    }
    let rows: Vec<_> = stat
        .counts
        .iter()
        .map(|(tenant, scope, state, count)| {
            [or_dash(tenant.as_ref()), scope.to_string(), state.to_string(), count.to_string()]
        })
        .collect();
    print::table(["tenant", "scope", "state", "count"], &rows)?;
    let weeks: Vec<_> = stat.weeks.iter().map(ToString::to_string).collect();
    print::line(&format!("weeks: {}; held: {}; ledger time: {}", weeks.join(", "), stat.held, stat.now))?;
    Ok(0)
}

pub async fn list(global: &Global, ledger: &dyn Ledger, args: &ListArgs) -> Result<u8, Failure> {
    let filter = args.filter.which.filter(ledger, &args.filter.state).await?;
    list_page(global, ledger, &filter, &args.page).await
}

/// Lists a page of the entries that match a filter.
pub async fn list_page(
    global: &Global,
    ledger: &dyn Ledger,
    filter: &Filter,
    args: &PageArgs,
) -> Result<u8, Failure> {
    let page = ledger.list(filter, args.after.as_ref(), args.limit).await?;
    if global.json {
        let entries: Vec<_> = page.entries.iter().map(|entry| entry_json(entry, false)).collect();
        let next = page.next.as_ref().map(ToString::to_string);
        print::json(&json!({"entries": entries, "next": next}))?;
        return Ok(0);
    }
    let rows: Vec<_> = page
        .entries
        .iter()
        .map(|e| {
            [
                or_dash(e.identity.tenant.as_ref()),
                e.identity.scope.to_string(),
                e.identity.id.to_string(),
                e.state.to_string(),
                e.attempts.to_string(),
                e.first_at.to_string(),
                e.at.to_string(),
                e.reason.as_deref().map_or_else(|| "-".to_owned(), print::escaped),
            ]
        })
        .collect();
    print::table(["tenant", "scope", "id", "state", "attempts", "first seen", "at", "reason"], &rows)?;
    if let Some(next) = &page.next {
        print::line(&format!("more: --after {next}"))?;
    }
    Ok(0)
}

pub async fn show(global: &Global, ledger: &dyn Ledger, args: &ShowArgs) -> Result<u8, Failure> {
    show_if(global, ledger, args, None).await
}

/// Shows an entry, if it is in the given state.
pub async fn show_if(
    global: &Global,
    ledger: &dyn Ledger,
    args: &ShowArgs,
    state: Option<State>,
) -> Result<u8, Failure> {
    let identity = Identity { tenant: args.tenant.clone(), scope: args.scope.clone(), id: args.id.clone() };
    let entry = ledger.get(&identity, args.time).await?;
    let entry = entry.ok_or_else(|| hapax::Error::NotFound(format!("no entry for {identity}")))?;
    if let Some(state) = state.filter(|state| *state != entry.state) {
        let message = format!("{identity} is {}, not {state}; `hapax ledger show` shows it", entry.state);
        return Err(hapax::Error::NotFound(message).into());
    }
    let value = entry_json(&entry, args.payload);
    print::fields(global.json, &value)?;
    Ok(0)
}

#[derive(Debug, Args)]
pub struct AuditArgs {
    /// List at most this many
    #[arg(long, default_value_t = 100)]
    limit: usize,
}

pub async fn audit(global: &Global, ledger: &dyn Ledger, args: &AuditArgs) -> Result<u8, Failure> {
    let audit = ledger.audit(args.limit).await?;
    if global.json {
        let rows = audit.iter().map(|row| {
            json!({"at": row.at.to_string(), "by": row.by, "what": row.what, "entry": row.identity, "reason": row.reason})
        });
        print::json(&json!({"audit": rows.collect::<Vec<_>>()}))?;
        return Ok(0);
    }
    let rows: Vec<_> = audit
        .iter()
        .map(|row| {
            let text = |text: &str| print::escaped(text);
            [row.at.to_string(), text(&row.by), text(&row.what), text(&row.identity), text(&row.reason)]
        })
        .collect();
    print::table(["at", "by", "what", "entry", "reason"], &rows)?;
    Ok(0)
}

/// An entry as JSON, for tools. Includes the payload only on request: it may be large or private.
pub fn entry_json(entry: &Entry, payload: bool) -> Value {
    let metadata = entry.metadata.as_ref();
    let body = entry.body.as_ref();
    json!({
        "tenant": entry.identity.tenant.as_ref().map(Tenant::as_str),
        "scope": entry.identity.scope.as_str(),
        "id": entry.identity.id.as_str(),
        "state": entry.state.name(),
        "week": entry.week.to_string(),
        "token": entry.token.0,
        "attempts": entry.attempts,
        "first_at": entry.first_at.to_string(),
        "at": entry.at.to_string(),
        "owner": entry.owner.as_ref().map(hapax::Owner::as_str),
        "fingerprint": entry.fingerprint.map(|f| f.to_string()),
        "aggregate": entry.order.as_ref().map(|(aggregate, _)| aggregate.as_str()),
        "seq": entry.order.as_ref().map(|(_, seq)| seq),
        "topic": entry.origin.as_ref().map(|o| o.topic.as_str()),
        "partition": entry.origin.as_ref().map(|o| o.partition),
        "offset": entry.origin.as_ref().map(|o| o.offset),
        "metadata": metadata.map(|m| serde_json::from_str::<Value>(m.as_str()).unwrap_or_default()),
        "reason": entry.reason.as_deref(),
        "tracked": entry.tracked,
        "payload_bytes": body.and_then(|b| b.payload.as_deref()).map(<[u8]>::len),
        "headers": body.filter(|_| payload).map(|b| headers_json(&b.headers)),
        "payload": body.filter(|_| payload).and_then(|b| b.payload.as_deref()).map(String::from_utf8_lossy),
    })
}

fn headers_json(headers: &hapax::Headers) -> Value {
    headers.iter().map(|(name, value)| (name.to_owned(), json!(String::from_utf8_lossy(value)))).collect()
}

pub fn or_dash(value: Option<&impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), ToString::to_string)
}
