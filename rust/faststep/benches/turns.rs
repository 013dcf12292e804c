//! This crate's step and the mlx-rs loop side by side: they take their turns in one process, on the same batches from the
//! same weights, and each ratio is taken within a round, so that what disturbs the machine disturbs both sides of it.
//!
//! `cargo bench --bench turns -- gpt24` measures one model. The times go to `tmp/turns.json` in the target directory, for
//! `benches/rust.py`.
#![allow(clippy::unwrap_used)] // how a benchmark fails

mod common;

use std::{collections::BTreeMap, env, fs, time::Duration};

use common::{block, Case, Named, CASES, FASTSTEP, PLAIN};
use serde_json::{json, Value};

const ROUNDS: usize = 24;
/// Wanted duration of a block of steps.
const BLOCK: Duration = Duration::from_millis(60);
/// Enough for steps in flight to overlap.
const LEAST: u32 = 4;
/// Tolerance of differences, relative to the largest loss.
const TOLERANCE: f32 = 1e-3;
const FILE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/turns.json");

/// Milliseconds a step by round, of each way.
type Times = BTreeMap<&'static str, Vec<f64>>;

fn main() {
    let named: Vec<String> = env::args().collect();
    let is_named = |(name, _): &&Named| named.iter().any(|argument| argument == name);
    let all = !CASES.iter().any(|case| is_named(&case));
    let mut results = BTreeMap::new();
    for (name, new_case) in CASES.iter().filter(|case| all || is_named(case)) {
        results.insert(*name, measure(name, new_case()));
    }
    fs::write(FILE, serde_json::to_string(&results).unwrap()).unwrap();
}

fn measure(name: &str, mut case: Case) -> Value {
    let gap = largest_gap(&mut case);
    let two = block(&mut case.ways[1].1, &case.batches, 2);
    let wanted = 2 * BLOCK.as_micros() / two.as_micros().max(1);
    let count = LEAST.max(wanted.try_into().unwrap());
    let mut times = Times::new();
    for round in 0..ROUNDS {
        for turn in 0..2 {
            let (way, step) = &mut case.ways[(round + turn) % 2];
            let time = block(step, &case.batches, count.into()).as_secs_f64();
            times
                .entry(way)
                .or_default()
                .push(1e3 * time / f64::from(count));
        }
    }
    let ratios = times[PLAIN].iter().zip(&times[FASTSTEP]);
    println!(
        "{name}: {PLAIN} {} ms a step, {FASTSTEP} {} ms; ratio {}",
        spread(times[PLAIN].clone()),
        spread(times[FASTSTEP].clone()),
        spread(ratios.map(|(plain, ours)| plain / ours).collect()),
    );
    json!({
        "title": case.title,
        "parameters": case.bytes,
        "largest loss difference": gap,
        "steps in a block": count,
        "ms": times,
    })
}

// between the losses of the first steps
fn largest_gap(case: &mut Case) -> f32 {
    let mut losses = case.ways.iter_mut().map(|(_, step)| {
        let losses = case
            .batches
            .iter()
            .map(|batch| step(batch).item_exact::<f32>());
        losses.collect::<Vec<f32>>()
    });
    let (ours, plain) = (losses.next().unwrap(), losses.next().unwrap());
    let gaps = ours.iter().zip(&plain).map(|(a, b)| (a - b).abs());
    let gap = gaps.fold(0.0, f32::max);
    let largest = plain.iter().copied().fold(0.0, f32::max);
    assert!(
        gap <= TOLERANCE * largest,
        "{}: not the same is computed, the losses are {ours:?} and {plain:?}",
        case.title
    );
    gap
}

// median [quartiles]
fn spread(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    let at = |quarter: usize| values[quarter * (values.len() - 1) / 4];
    format!("{:.3} [{:.3}, {:.3}]", at(2), at(1), at(3))
}
