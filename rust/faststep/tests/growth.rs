//! Nothing grows over 5,000 steps. One test, because the memory is that of the process.
#![allow(clippy::unwrap_used)] // how a test fails
#![cfg(target_os = "linux")]

mod common;

use std::fs;

use common::{batch, mse, Mlp};
use faststep::{Optimizer, Optimizers, Options, Step};
use mlx_rs::memory::active_memory;

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

#[test]
fn nothing_grows_over_5000_steps() {
    let options = Options {
        max_grad_norm: Some(1.0),
        accumulate: 2,
        ema_decay: Some(0.9),
        ..Options::default()
    };
    let optimizers = Optimizers::new(Optimizer::adamw(0.01), 1e-3);
    let mut step = Step::new(Mlp::seeded(1), optimizers, mse, options).unwrap();
    let batch = batch(0);
    let mut readings = Vec::new();
    for number in 1..=5000 {
        step.step(&batch).unwrap();
        if number % 1000 == 0 {
            step.stats().unwrap(); // all flags are read
            step.synchronize().unwrap();
            readings.push((active_memory().unwrap(), resident()));
        }
    }
    let (first, last) = (readings[0], readings[4]);
    assert_eq!(first.0, last.0, "active bytes: {readings:?}");
    assert!(last.1 < first.1 + (4 << 20), "resident bytes: {readings:?}");
}
