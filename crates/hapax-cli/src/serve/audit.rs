//! What operators do through the server.

use hapax::access::{Actor, AuditNote};
use hapax::problem::Problem;

use super::app::App;
use super::auth::Caller;

/// Records what an operator is about to do: who, what, to which thing, and why. If it cannot be
/// recorded, it must not be done. The ledger has an audit row of its own for each entry that it changes.
pub async fn audit(
    app: &App,
    caller: &Caller,
    action: &str,
    target: &str,
    reason: &str,
) -> Result<(), Problem> {
    tracing::info!(
        target: "hapax", principal = caller.principal, tenant = caller.tenant.as_ref().map(hapax::Tenant::as_str),
        action, entry = target, reason, "audit"
    );
    let tenant = caller.tenant.as_ref().map_or_else(String::new, |tenant| format!("tenant {tenant}"));
    let note = AuditNote::new(&Actor::new(caller.who(), reason), action, target).details(tenant);
    Ok(app.access.store().note(&note).await?)
}
