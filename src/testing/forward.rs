//! A ledger or a journal over another: what a test changes is written down, the rest is passed on.

/// Implements [`Ledger`](crate::Ledger) for a type with a field `inner`: the methods given, and for the rest `inner`'s. Given must be:
/// claim, settle, extend, sweep, now, epoch, markers, and whatever else is not what `inner` says.
#[macro_export]
macro_rules! ledger_over {
    ($type:ty { $($own:tt)* }) => {
        #[async_trait::async_trait]
        impl $crate::Ledger for $type {
            $($own)*
            async fn get(
                &self,
                identity: &$crate::ledger::Identity,
                time: Option<$crate::Time>,
            ) -> $crate::Result<Option<$crate::ledger::Entry>> {
                self.inner.get(identity, time).await
            }
            async fn list(
                &self,
                filter: &$crate::ledger::Filter,
                after: Option<&$crate::ledger::Cursor>,
                limit: usize,
            ) -> $crate::Result<$crate::ledger::Page> {
                self.inner.list(filter, after, limit).await
            }
            async fn due(
                &self,
                scope: &$crate::Scope,
                query: &$crate::ledger::HeldQuery,
                limit: usize,
            ) -> $crate::Result<$crate::ledger::Due> {
                self.inner.due(scope, query, limit).await
            }
            async fn unpublished_dead(
                &self,
                scope: &$crate::Scope,
                query: &$crate::ledger::HeldQuery,
                limit: usize,
                reserve: Option<std::time::Duration>,
            ) -> $crate::Result<Vec<$crate::ledger::Entry>> {
                self.inner.unpublished_dead(scope, query, limit, reserve).await
            }
            async fn mark_dead_published(&self, entries: &[$crate::ledger::PublishedDead]) -> $crate::Result<()> {
                self.inner.mark_dead_published(entries).await
            }
            async fn set_markers(&self, scope: &$crate::Scope, markers: &[$crate::ledger::Marker]) -> $crate::Result<()> {
                self.inner.set_markers(scope, markers).await
            }
            async fn stat(&self) -> $crate::Result<$crate::ledger::Stat> {
                self.inner.stat().await
            }
            async fn intervene(
                &self,
                intervene: &$crate::ledger::Intervene,
            ) -> $crate::Result<$crate::ledger::Intervened> {
                self.inner.intervene(intervene).await
            }
            async fn audit(&self, limit: usize) -> $crate::Result<Vec<$crate::ledger::Audit>> {
                self.inner.audit(limit).await
            }
            async fn check(&self) -> $crate::Result<Vec<$crate::ledger::Finding>> {
                self.inner.check().await
            }
            fn capabilities(&self) -> $crate::ledger::Capabilities {
                self.inner.capabilities()
            }
            fn settings(&self) -> &$crate::ledger::Settings {
                self.inner.settings()
            }
        }
    };
}

/// Implements [`Journal`](crate::Journal) for a type with a field `inner`: the methods given, and for the rest `inner`'s. Given must be:
/// append, read_aggregate, read, find, wait, acquire_leadership, save, relays, sweep, capabilities, and whatever else has a default.
macro_rules! journal_over {
    ($type:ty { $($own:tt)* }) => {
        #[async_trait::async_trait]
        impl $crate::Journal for $type {
            $($own)*
            async fn head(
                &self,
                tenant: Option<&$crate::Tenant>,
                aggregate: &$crate::Aggregate,
            ) -> $crate::Result<u64> {
                self.inner.head(tenant, aggregate).await
            }
            async fn renew_leadership(
                &self,
                relay: &$crate::RelayName,
                token: $crate::ledger::Token,
                lease: std::time::Duration,
            ) -> $crate::Result<()> {
                self.inner.renew_leadership(relay, token, lease).await
            }
            async fn release_leadership(
                &self,
                relay: &$crate::RelayName,
                token: $crate::ledger::Token,
            ) -> $crate::Result<()> {
                self.inner.release_leadership(relay, token).await
            }
            async fn rewind(
                &self,
                relay: &$crate::RelayName,
                to: &$crate::journal::Checkpoint,
                if_token: Option<$crate::ledger::Token>,
            ) -> $crate::Result<Option<$crate::journal::Checkpoint>> {
                self.inner.rewind(relay, to, if_token).await
            }
            async fn forget_relay(
                &self,
                relay: &$crate::RelayName,
            ) -> $crate::Result<$crate::journal::RelayState> {
                self.inner.forget_relay(relay).await
            }
            async fn count_after(
                &self,
                after: &$crate::journal::Position,
                limit: u64,
            ) -> $crate::Result<u64> {
                self.inner.count_after(after, limit).await
            }
            async fn stat(&self) -> $crate::Result<$crate::journal::JournalStat> {
                self.inner.stat().await
            }
            async fn now(&self) -> $crate::Result<$crate::Time> {
                self.inner.now().await
            }
            fn id(&self) -> &str {
                self.inner.id()
            }
        }
    };
}

pub(crate) use journal_over;
