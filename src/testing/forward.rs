//! A ledger over another: what a test changes is written down, the rest is passed on.

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
                share: &$crate::ledger::Share,
                limit: usize,
            ) -> $crate::Result<$crate::ledger::Due> {
                self.inner.due(scope, share, limit).await
            }
            async fn outlet(
                &self,
                scope: &$crate::Scope,
                share: &$crate::ledger::Share,
                limit: usize,
            ) -> $crate::Result<Vec<$crate::ledger::Entry>> {
                self.inner.outlet(scope, share, limit).await
            }
            async fn copied(&self, entries: &[$crate::ledger::Copied]) -> $crate::Result<()> {
                self.inner.copied(entries).await
            }
            async fn mark(&self, scope: &$crate::Scope, markers: &[$crate::ledger::Marker]) -> $crate::Result<()> {
                self.inner.mark(scope, markers).await
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
