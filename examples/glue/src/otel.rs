//! Spans and metrics of lockstream for OpenTelemetry, on standard output.
//!
//! ```sh
//! cargo run -p lockstream-glue --bin otel
//! ```
//!
//! The library writes spans to `tracing` and, with its feature `metrics`, counts for the facade `metrics`. Both have well-kept
//! bridges to OpenTelemetry: `tracing-opentelemetry` and `metrics-opentelemetry`. For a collector, replace the two exporters
//! of `opentelemetry-stdout` by those of `opentelemetry-otlp`. Nothing here is about a store: it runs on one in memory.

use std::error::Error;
use std::time::Duration;

use lockstream::prelude::*;
use lockstream::store::MemoryStore;
use metrics_opentelemetry::{OpenTelemetryMetrics, OpenTelemetryRecorder};
use opentelemetry::metrics::MeterProvider;
use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::metrics::{PeriodicReader, SdkMeterProvider};
use opentelemetry_sdk::trace::SdkTracerProvider;
use tokio::time::sleep;
use tracing::instrument;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// To be shut down at the end: what was not exported by then is exported.
struct Telemetry {
    spans: SdkTracerProvider,
    metrics: SdkMeterProvider,
}

impl Telemetry {
    /// Sets the process's subscriber of `tracing` and its recorder of `metrics`. Before the first registry is made, which
    /// describes its metrics to the recorder.
    fn install() -> Result<Self, Box<dyn Error>> {
        let resource = Resource::builder().with_service_name("till").build();

        let spans = SdkTracerProvider::builder()
            .with_resource(resource.clone())
            .with_simple_exporter(opentelemetry_stdout::SpanExporter::default())
            .build();
        let layer = tracing_opentelemetry::layer().with_tracer(spans.tracer("till"));
        tracing_subscriber::registry().with(layer).try_init()?;

        let reader = PeriodicReader::builder(opentelemetry_stdout::MetricExporter::default());
        let metrics = SdkMeterProvider::builder()
            .with_resource(resource)
            .with_reader(reader.with_interval(Duration::from_secs(30)).build())
            .build();
        let recorder = OpenTelemetryMetrics::new(metrics.meter("till"));
        let mut recorder = OpenTelemetryRecorder::new(recorder);
        // By default the buckets are for milliseconds.
        recorder.set_histogram_bounds_mut(
            ["lockstream_wait_seconds", "lockstream_hold_seconds"].into_iter(),
            &[0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0],
        );
        metrics::set_global_recorder(recorder)?;
        Ok(Self { spans, metrics })
    }

    fn shutdown(&self) -> Result<(), Box<dyn Error>> {
        self.spans.shutdown()?;
        self.metrics.shutdown()?;
        Ok(())
    }
}

/// The lock's own span, with key and token, is between these two.
#[instrument(skip(locks))]
async fn checkout(locks: &LockRegistry, order: u32) -> Result<(), LockError> {
    charge(order).with_lock(locks.obtain("till")).await
}

#[instrument]
async fn charge(order: u32) {
    sleep(Duration::from_millis(20)).await;
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let telemetry = Telemetry::install()?;
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store).prefix("shop").build()?;

    // Three at once: two of them wait.
    tokio::try_join!(
        checkout(&locks, 1),
        checkout(&locks, 2),
        checkout(&locks, 3)
    )?;
    // A lease of 200 ms is lost by work that takes longer.
    let brief = locks.obtain("till").ttl(Duration::from_millis(200));
    let lost = sleep(Duration::from_secs(5)).with_lock(brief).await;
    assert!(lost.is_err_and(|error| error.is_lost()));

    locks.shutdown().await;
    // It blocks until everything is exported.
    tokio::task::spawn_blocking(move || telemetry.shutdown().map_err(|error| error.to_string()))
        .await??;
    Ok(())
}
