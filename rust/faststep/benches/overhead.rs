//! Overhead of the engine itself: a step of a model whose forward pass costs nothing, by the number of its tensors.
//!
//! The loss is the mean of the batch, so that no gradient has to be computed: all are the same zeros. What is left is what
//! a step does beside forward and backward: clipping, `AdamW`, evaluation, and the handling of many arrays.
#![allow(clippy::unwrap_used, missing_docs)] // criterion's macros document nothing

mod common;

use common::{block, config, faststep, StepFn};
use criterion::{
    criterion_group, criterion_main, AxisScale, BenchmarkId, Criterion, PlotConfiguration,
    SamplingMode, Throughput,
};
use mlx_rs::{error::Exception, macros::ModuleParameters, nn::Embedding, Array};

/// A model of tensors float32 `[4, 4]`.
#[derive(Debug, ModuleParameters)]
struct Tensors {
    #[param]
    parts: Vec<Embedding>,
}

impl Tensors {
    fn new(count: u64) -> Result<Self, Exception> {
        let parts = (0..count).map(|_| Embedding::new(4, 4));
        Ok(Self {
            parts: parts.collect::<Result<_, _>>()?,
        })
    }
}

fn overhead(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("overhead");
    group.sampling_mode(SamplingMode::Flat);
    group.plot_config(PlotConfiguration::default().summary_scale(AxisScale::Logarithmic));
    let batches = [[Array::ones::<f32>(&[4]).unwrap()]];
    for tensors in [10, 100, 1_000, 10_000] {
        let mut step = None; // made when it is measured: MLX takes seconds to compile the largest
        group.throughput(Throughput::Elements(tensors));
        group.bench_function(BenchmarkId::from_parameter(tensors), |b| {
            let step = step.get_or_insert_with(|| new_step(tensors, &batches[0]));
            b.iter_custom(|count| block(step, &batches, count));
        });
    }
    group.finish();
}

// traced, which is no part of what is measured
fn new_step(tensors: u64, batch: &[Array]) -> StepFn {
    let loss = |_: &mut Tensors, batch: &[Array]| batch[0].mean(None);
    let mut step = faststep(Tensors::new(tensors).unwrap(), loss);
    step(batch);
    step
}

criterion_group! {
    name = benches;
    config = config();
    targets = overhead
}
criterion_main!(benches);
