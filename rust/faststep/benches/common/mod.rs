//! Shared parts of the step's benchmarks: models, and the ways of training them.
#![allow(dead_code, clippy::unwrap_used)] // each program takes its part; how a benchmark fails

mod models;

use std::time::{Duration, Instant};

use criterion::Criterion;
use faststep::{Optimizer, Optimizers, Options, Step};
use mlx_rs::{
    builder::Builder,
    error::Exception,
    module::{FlattenedModuleParam, ModuleParameters},
    nn::value_and_grad,
    ops::indexing::IndexOp,
    optimizers::{clip_grad_norm, AdamW, AdamWBuilder, Optimizer as _},
    random,
    transforms::eval,
    Array,
};

use models::{loss, Gpt, Mlp, Model, Shape, CLASSES};

/// Takes a step and returns its loss, which may be lazy.
pub type StepFn = Box<dyn FnMut(&[Array]) -> Array>;

/// The step of this crate.
pub const FASTSTEP: &str = "faststep::Step";
/// The loop that a user of mlx-rs writes.
pub const PLAIN: &str = "mlx-rs";

/// Criterion's configuration: warm-up and measuring time.
pub fn config() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(4))
}

const MAX_GRAD_NORM: f32 = 1.0;
const LEARNING_RATE: f32 = 1e-3;
const WEIGHT_DECAY: f32 = 0.1;
const BATCHES: usize = 8;

/// One model: its batches, and each way of training it, from the same weights.
pub struct Case {
    pub title: String,
    /// The bytes of its parameters.
    pub bytes: usize,
    pub batches: Vec<[Array; 2]>,
    pub ways: [(&'static str, StepFn); 2],
}

/// A case by the name that it has in `benches/cases.py`.
pub type Named = (&'static str, fn() -> Case);

/// The models that are measured, by name.
pub const CASES: [Named; 3] = [("mlp", mlp), ("gpt24", gpt24), ("gpt4", gpt4)];

fn mlp() -> Case {
    random::seed(0).unwrap();
    let batch = || {
        let x = random::normal::<f32>(&[64, 128], None, None, None).unwrap();
        let y = random::randint::<_, i32>(0, CLASSES, &[64], None).unwrap();
        [x, y]
    };
    let title = "MLP, 4 layers x 128, batch 64".into();
    case(title, &Mlp::new(4, 128).unwrap(), batch)
}

fn gpt24() -> Case {
    gpt(Shape {
        layers: 24,
        width: 64,
        heads: 4,
        batch: 1,
        seq: 16,
        vocab: 256,
    })
}

fn gpt4() -> Case {
    gpt(Shape {
        layers: 4,
        width: 128,
        heads: 4,
        batch: 4,
        seq: 64,
        vocab: 256,
    })
}

fn gpt(shape: Shape) -> Case {
    random::seed(0).unwrap();
    let Shape {
        layers,
        width,
        heads,
        batch,
        seq,
        vocab,
    } = shape;
    let title = format!("GPT, {layers} layers x {width}, {heads} heads, vocabulary {vocab}, batch {batch}, sequence {seq}");
    case(title, &Gpt::new(shape).unwrap(), || {
        let tokens = random::randint::<_, i32>(0, vocab, &[batch, seq + 1], None).unwrap();
        [tokens.index((.., ..seq)), tokens.index((.., 1..))]
    })
}

fn case(title: String, model: &impl Model, batch: impl FnMut() -> [Array; 2]) -> Case {
    let batches: Vec<_> = std::iter::repeat_with(batch).take(BATCHES).collect();
    let parameters = model.parameters().flatten();
    eval(batches.iter().flatten().chain(parameters.values().copied())).unwrap();
    Case {
        title,
        bytes: parameters.values().map(|array| array.nbytes()).sum(),
        ways: [
            (FASTSTEP, faststep(model.clone(), loss)),
            (PLAIN, plain(model.clone())),
        ],
        batches,
    }
}

/// The step of this crate, with its defaults.
pub fn faststep<M, F>(model: M, loss: F) -> StepFn
where
    M: ModuleParameters + 'static,
    F: FnMut(&mut M, &[Array]) -> Result<Array, Exception> + 'static,
{
    let options = Options::default().max_grad_norm(f64::from(MAX_GRAD_NORM));
    let rule = Optimizer::adamw(WEIGHT_DECAY.into());
    let optimizers = Optimizers::new(rule, f64::from(LEARNING_RATE));
    let mut step = Step::new(model, optimizers, loss, options).unwrap();
    Box::new(move |batch| step.step(batch).unwrap().loss)
}

fn plain<M: Model>(mut model: M) -> StepFn {
    let mut optimizer = AdamWBuilder::new(LEARNING_RATE)
        .weight_decay(WEIGHT_DECAY)
        .build()
        .unwrap();
    Box::new(move |batch| plain_step(&mut model, &mut optimizer, batch).unwrap())
}

// the loop that the documentation of mlx-rs teaches, with one evaluation of all that has changed
fn plain_step<M: Model>(
    model: &mut M,
    optimizer: &mut AdamW,
    batch: &[Array],
) -> Result<Array, Exception> {
    let (loss, gradients) = value_and_grad(loss::<M>)(model, batch)?;
    let (clipped, _norm) = clip_grad_norm(&gradients, MAX_GRAD_NORM)?;
    let clipped = clipped.into_iter().map(|(k, v)| (k, v.into_owned()));
    optimizer.update(model, clipped.collect::<FlattenedModuleParam>())?;
    let moments = optimizer.state.values().flat_map(|(m, v)| [m, v]);
    eval(model.parameters().flatten().into_values().chain(moments))?;
    Ok(loss)
}

/// Take one step more than so many, wait until all is done, and return the time of the others.
///
/// The first step has to bring its data back into the processor's caches after the turns of others.
pub fn block<B: AsRef<[Array]>>(step: &mut StepFn, batches: &[B], count: u64) -> Duration {
    wait(&step(batches[0].as_ref()));
    let start = Instant::now();
    let mut last = None;
    for (_, batch) in (0..count).zip(batches.iter().cycle()) {
        last = Some(step(batch.as_ref()));
    }
    last.iter().for_each(wait);
    start.elapsed()
}

// a stream computes in order: when the sum is there, so is all that was handed to the device before
fn wait(loss: &Array) {
    eval([loss]).unwrap();
    eval([&loss.add(loss).unwrap()]).unwrap();
}
