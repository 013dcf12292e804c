//! The latency of a step, by model: this crate's, and that of the loop that a user of mlx-rs writes.
#![allow(clippy::unwrap_used, missing_docs)] // criterion's macros document nothing

mod common;

use common::{block, config, CASES};
use criterion::{criterion_group, criterion_main, Criterion, SamplingMode};

fn step(criterion: &mut Criterion) {
    for (name, new_case) in CASES {
        let mut case = new_case();
        let mut group = criterion.benchmark_group(format!("step {name}"));
        group.sampling_mode(SamplingMode::Flat);
        for (way, step) in &mut case.ways {
            group.bench_function(*way, |b| {
                b.iter_custom(|count| block(step, &case.batches, count));
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = config();
    targets = step
}
criterion_main!(benches);
