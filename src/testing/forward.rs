//! A ledger or a journal over another: what a test changes is written down, the rest is passed on.

/// Implements the parts of a [`Ledger`](crate::Ledger) for a type with a field `inner`: the methods given, and for the rest
/// `inner`'s. Given must be: claim, settle, extend, now and epoch; markers; sweep; and whatever else has a default.
#[macro_export]
macro_rules! ledger_over {
    ($type:ty {
        Claims { $($claims:tt)* }
        ConsumerStore { $($store:tt)* }
        Operations { $($operations:tt)* }
    }) => {
        #[async_trait::async_trait]
        impl $crate::ledger::Claims for $type {
            $($claims)*
            async fn get(
                &self,
                identity: &$crate::ledger::Identity,
                time: Option<$crate::Time>,
            ) -> $crate::Result<Option<$crate::ledger::Entry>> {
                $crate::ledger::Claims::get(&self.inner, identity, time).await
            }
            fn capabilities(&self) -> $crate::ledger::Capabilities {
                $crate::ledger::Claims::capabilities(&self.inner)
            }
            fn settings(&self) -> &$crate::ledger::Settings {
                $crate::ledger::Claims::settings(&self.inner)
            }
        }

        #[async_trait::async_trait]
        impl $crate::ledger::ConsumerStore for $type {
            $($store)*
            async fn due(
                &self,
                scope: &$crate::Scope,
                query: &$crate::ledger::HeldQuery,
                limit: usize,
            ) -> $crate::Result<$crate::ledger::Due> {
                $crate::ledger::ConsumerStore::due(&self.inner, scope, query, limit).await
            }
            async fn unpublished_dead(
                &self,
                scope: &$crate::Scope,
                query: &$crate::ledger::HeldQuery,
                limit: usize,
                reserve: Option<std::time::Duration>,
            ) -> $crate::Result<Vec<$crate::ledger::Entry>> {
                $crate::ledger::ConsumerStore::unpublished_dead(&self.inner, scope, query, limit, reserve).await
            }
            async fn mark_dead_published(&self, entries: &[$crate::ledger::PublishedDead]) -> $crate::Result<()> {
                $crate::ledger::ConsumerStore::mark_dead_published(&self.inner, entries).await
            }
            async fn set_markers(&self, scope: &$crate::Scope, markers: &[$crate::ledger::Marker]) -> $crate::Result<()> {
                $crate::ledger::ConsumerStore::set_markers(&self.inner, scope, markers).await
            }
        }

        #[async_trait::async_trait]
        impl $crate::ledger::Operations for $type {
            $($operations)*
            async fn list(
                &self,
                filter: &$crate::ledger::Filter,
                after: Option<&$crate::ledger::Cursor>,
                limit: usize,
            ) -> $crate::Result<$crate::ledger::Page> {
                $crate::ledger::Operations::list(&self.inner, filter, after, limit).await
            }
            async fn stat(&self) -> $crate::Result<$crate::ledger::Stat> {
                $crate::ledger::Operations::stat(&self.inner).await
            }
            async fn scopes(&self) -> $crate::Result<std::collections::BTreeSet<$crate::Scope>> {
                $crate::ledger::Operations::scopes(&self.inner).await
            }
            async fn intervene(
                &self,
                intervene: &$crate::ledger::Intervene,
            ) -> $crate::Result<$crate::ledger::Intervened> {
                $crate::ledger::Operations::intervene(&self.inner, intervene).await
            }
            async fn audit(&self, limit: usize) -> $crate::Result<Vec<$crate::ledger::Audit>> {
                $crate::ledger::Operations::audit(&self.inner, limit).await
            }
            async fn audit_of(
                &self,
                entries: &[$crate::ledger::Identity],
                limit: usize,
            ) -> $crate::Result<Vec<$crate::ledger::Audit>> {
                $crate::ledger::Operations::audit_of(&self.inner, entries, limit).await
            }
            async fn check(&self) -> $crate::Result<Vec<$crate::ledger::Finding>> {
                $crate::ledger::Operations::check(&self.inner).await
            }
        }
    };
}

/// Implements [`Journal`](crate::Journal) and [`RelayStore`](crate::journal::RelayStore) for a type with a field `inner`: the methods
/// given, and for the rest `inner`'s. Given must be, of the journal: append, read_aggregate, read, find, wait, sweep, horizon, capabilities, and
/// whatever else has a default; of the store: acquire_leadership, save, relays.
macro_rules! journal_over {
    ($type:ty { $($own:tt)* } { $($relays:tt)* }) => {
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

        #[async_trait::async_trait]
        impl $crate::journal::RelayStore for $type {
            $($relays)*
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
        }
    };
}

pub(crate) use journal_over;
