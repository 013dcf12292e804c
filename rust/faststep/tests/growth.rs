//! Nothing grows, over 5,000 steps of one trace or 500 traces. One test, because the memory is that of the process.
#![allow(clippy::unwrap_used)] // how a test fails
#![cfg(target_os = "linux")]

mod common;

use std::fs;

use common::{batch, mse, Mlp};
use faststep::{Optimizer, Optimizers, Options, Step};
use mlx_rs::{memory::active_memory, module::Module};

/// Tolerance in bytes: MLX may hand out a buffer of its cache that is larger than asked for.
const ACTIVE: usize = 4 << 10;

/// The process's resident memory in bytes.
fn resident() -> usize {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages
        .split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<usize>()
        .unwrap()
        * 4096
}

fn step(options: Options) -> Step<Mlp> {
    let optimizers = Optimizers::new(Optimizer::adamw(0.01), 1e-3);
    Step::new(Mlp::seeded(1), optimizers, mse, options).unwrap()
}

/// Active and resident bytes after each fifth of so many calls.
fn readings(
    step: &mut Step<Mlp>,
    calls: usize,
    call: impl Fn(&mut Step<Mlp>, usize),
) -> Vec<(usize, usize)> {
    let mut readings = Vec::new();
    for number in 1..=calls {
        call(step, number);
        if number % (calls / 5) == 0 {
            step.stats().unwrap(); // all flags are read
            step.synchronize().unwrap();
            readings.push((active_memory().unwrap(), resident()));
        }
    }
    readings
}

#[test]
fn nothing_grows() {
    let mut trained = step(
        Options::default()
            .max_grad_norm(1.0)
            .accumulate(2)
            .ema_decay(0.9),
    );
    let [x, y] = batch(0);
    let steps = readings(&mut trained, 5000, |step, _| {
        step.step(&[x.clone(), y.clone()]).unwrap();
    });
    assert!(steps[4].0 <= steps[0].0 + ACTIVE, "active bytes: {steps:?}");
    assert!(
        steps[4].1 < steps[0].1 + (4 << 20),
        "resident bytes: {steps:?}"
    );

    let mut changed = step(Options::default());
    let traces = readings(&mut changed, 500, |step, number| {
        step.model_mut().training_mode(number % 2 == 0);
        step.step(&[x.clone(), y.clone()]).unwrap();
    });
    assert_eq!(changed.stats().unwrap().traced, 500);
    assert!(
        traces[4].0 <= traces[0].0 + ACTIVE,
        "active bytes: {traces:?}"
    );
    assert!(
        traces[4].1 < traces[0].1 + (8 << 20),
        "resident bytes: {traces:?}"
    );
}
