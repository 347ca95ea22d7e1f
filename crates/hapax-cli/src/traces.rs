//! Exports spans to an OpenTelemetry collector, as the `OTEL_*` variables of its specification say:
//! over HTTP with protobuf, in batches, from a thread of its own.

use crate::failure::Failure;

/// Whether the environment asks for traces.
fn wanted(variable: impl Fn(&str) -> Option<String>) -> Result<bool, Failure> {
    let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
    if variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
        return Ok(false);
    }
    let wanted = match variable("OTEL_TRACES_EXPORTER").as_deref() {
        Some("otlp") => true,
        Some("none") => false,
        Some(other) => {
            return Err(Failure::config(format!(
                "OTEL_TRACES_EXPORTER is {other:?}; it can be otlp or none"
            )));
        }
        None => ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"]
            .into_iter()
            .any(|name| variable(name).is_some()),
    };
    // The variable for traces comes first, as everywhere in the specification.
    for name in ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"] {
        match variable(name).as_deref() {
            None => {}
            Some("http/protobuf") => break,
            Some(other) if wanted => {
                return Err(Failure::config(format!(
                    "{name} is {other:?}; traces are sent as http/protobuf only, which every collector takes on port 4318"
                )));
            }
            Some(_) => break,
        }
    }
    Ok(wanted)
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

#[cfg(not(feature = "otel"))]
mod built {
    use tracing_subscriber::{Layer, Registry};

    use super::Failure;

    /// Not built in, so there are none.
    pub enum Traces {}

    impl Traces {
        /// Without the feature there is nothing to send; whoever asks for traces gets a sentence.
        pub fn from_environment() -> Result<Option<Self>, Failure> {
            if super::wanted(super::variable)? {
                let missing = Failure::not_built_in("sending traces (OTEL_…)", "otel");
                eprintln!("hapax: no traces: {}", missing.message());
            }
            Ok(None)
        }

        pub fn layer(&self) -> Box<dyn Layer<Registry> + Send + Sync> {
            match *self {}
        }

        pub fn end(self) {
            match self {}
        }
    }
}

#[cfg(feature = "otel")]
mod built {
    use std::fmt;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use hapax::TraceContext;
    use opentelemetry::trace::{
        SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState, TracerProvider as _,
    };
    use opentelemetry_otlp::WithHttpConfig as _;
    use opentelemetry_sdk::Resource;
    use opentelemetry_sdk::error::OTelSdkResult;
    use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, SpanData, SpanExporter};
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing_opentelemetry::OpenTelemetryLayer;
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::layer::Context;
    use tracing_subscriber::{Layer, Registry};

    use super::Failure;

    /// How long the end of the process waits for the last spans.
    const END_WAIT: Duration = Duration::from_secs(2);

    /// Sends spans until it is ended.
    pub struct Traces(SdkTracerProvider);

    impl Traces {
        /// Sends spans if the environment asks for it.
        pub fn from_environment() -> Result<Option<Self>, Failure> {
            if !super::wanted(super::variable)? {
                return Ok(None);
            }
            let refused = |error: &dyn fmt::Display| {
                Failure::config(format!("traces cannot be sent as OTEL_EXPORTER_OTLP_… says: {error}"))
            };
            // Whichever provider was installed first is used.
            let _ = rustls::crypto::ring::default_provider().install_default();
            // The headers may hold a key, which is for this address alone.
            let client = reqwest::blocking::Client::builder().redirect(reqwest::redirect::Policy::none());
            let client = client.build().map_err(|error| refused(&error))?;
            let exporter = opentelemetry_otlp::SpanExporter::builder()
                .with_http()
                .with_http_client(client)
                .build()
                .map_err(|error| refused(&error))?;
            // OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first.
            let mut resource = Resource::builder();
            if super::variable("OTEL_SERVICE_NAME").is_none_or(|name| name.is_empty()) {
                resource = resource.with_service_name("hapax");
            }
            let provider = SdkTracerProvider::builder()
                .with_resource(resource.build())
                .with_batch_exporter(Reported { exporter, failing: AtomicBool::new(false) })
                .build();
            Ok(Some(Traces(provider)))
        }

        /// The layer that turns spans into the collector's. `--log` does not concern it.
        pub fn layer(&self) -> Box<dyn Layer<Registry> + Send + Sync> {
            let layer = tracing_opentelemetry::layer().with_tracer(self.0.tracer("hapax"));
            let ours = Targets::new().with_target("hapax", LevelFilter::INFO);
            Parented(layer.with_location(false).with_threads(false)).with_filter(ours).boxed()
        }

        /// Sends what is left, for a short time.
        pub fn end(self) {
            // A collector that is away was reported when it went away.
            let _ = self.0.shutdown_with_timeout(END_WAIT);
        }
    }

    /// Logs when the collector goes away and when it is back, not every batch in between.
    #[derive(Debug)]
    struct Reported<E> {
        exporter: E,
        failing: AtomicBool,
    }

    impl<E: SpanExporter> SpanExporter for Reported<E> {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            let done = self.exporter.export(batch).await;
            let before = self.failing.swap(done.is_err(), Ordering::Relaxed);
            match &done {
                Err(error) if !before => {
                    tracing::warn!(target: "hapax", %error, "traces cannot be sent; spans are dropped until the collector answers");
                }
                Ok(()) if before => tracing::warn!(target: "hapax", "traces are sent again"),
                _ => {}
            }
            done
        }

        fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
            self.exporter.shutdown_with_timeout(timeout)
        }

        fn force_flush(&self) -> OTelSdkResult {
            self.exporter.force_flush()
        }

        fn set_resource(&mut self, resource: &Resource) {
            self.exporter.set_resource(resource);
        }
    }

    /// Continues the producer's or the client's trace: a span without a parent here is a child of the one
    /// in its field `trace.parent`.
    struct Parented(OpenTelemetryLayer<Registry, SdkTracer>);

    /// The trace that a span says it belongs to.
    #[derive(Default)]
    struct Parent(Option<TraceContext>);

    impl Visit for Parent {
        fn record_str(&mut self, field: &Field, value: &str) {
            if field.name() == "trace.parent" {
                self.0 = TraceContext::parse(value.as_bytes()).ok();
            }
        }

        fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
            if field.name() == "trace.parent" {
                self.record_str(field, &format!("{value:?}"));
            }
        }
    }

    fn remote(trace: TraceContext) -> SpanContext {
        SpanContext::new(
            TraceId::from(trace.trace_id),
            SpanId::from(trace.span_id),
            TraceFlags::new(trace.flags),
            true,
            TraceState::NONE,
        )
    }

    impl Layer<Registry> for Parented {
        fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, Registry>) {
            let mut parent = Parent::default();
            if context.span(id).is_some_and(|span| span.parent().is_none()) {
                attributes.record(&mut parent);
            }
            // The layer takes the current context for the parent of a span that has none.
            let _current = parent.0.map(|trace| {
                opentelemetry::Context::current().with_remote_span_context(remote(trace)).attach()
            });
            self.0.on_new_span(attributes, id, context);
        }

        fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, Registry>) {
            self.0.on_record(id, values, context);
        }

        fn on_follows_from(&self, id: &Id, follows: &Id, context: Context<'_, Registry>) {
            self.0.on_follows_from(id, follows, context);
        }

        fn on_event(&self, event: &tracing::Event<'_>, context: Context<'_, Registry>) {
            self.0.on_event(event, context);
        }

        fn on_enter(&self, id: &Id, context: Context<'_, Registry>) {
            self.0.on_enter(id, context);
        }

        fn on_exit(&self, id: &Id, context: Context<'_, Registry>) {
            self.0.on_exit(id, context);
        }

        fn on_close(&self, id: Id, context: Context<'_, Registry>) {
            self.0.on_close(id, context);
        }
    }
}

pub use built::Traces;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_decides() {
        let asks = |set: &[(&str, &str)]| {
            let found =
                |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            wanted(found).map_err(|failure| failure.message().to_owned())
        };
        let at = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318");
        assert_eq!(asks(&[]), Ok(false));
        assert_eq!(asks(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "")]), Ok(false));
        assert_eq!(asks(&[at]), Ok(true));
        assert_eq!(asks(&[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://localhost/v1/traces")]), Ok(true));
        assert_eq!(asks(&[("OTEL_TRACES_EXPORTER", "otlp")]), Ok(true));
        assert_eq!(asks(&[at, ("OTEL_TRACES_EXPORTER", "none")]), Ok(false));
        assert_eq!(asks(&[at, ("OTEL_SDK_DISABLED", "true")]), Ok(false));
        let refused = asks(&[("OTEL_TRACES_EXPORTER", "zipkin")]).unwrap_err();
        assert!(refused.contains("zipkin") && refused.contains("otlp or none"), "{refused}");
        let refused = asks(&[at, ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]).unwrap_err();
        assert!(
            refused.contains("OTEL_EXPORTER_OTLP_PROTOCOL") && refused.contains("http/protobuf"),
            "{refused}"
        );
        let both = [
            at,
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ];
        assert_eq!(asks(&both), Ok(true));
        assert_eq!(asks(&[("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]), Ok(false), "grpc is another program's");
    }
}
