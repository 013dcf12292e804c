//! `--naive`: the order of problem P1, in a plain mlx-rs loop that evaluates nothing.
//!
//! Each update only adds to the graph of the parameters: those of step 100 are a graph of 100 forward and backward passes,
//! which nobody has computed. The process grows by its nodes, and the first value that is read waits for all of it. One
//! `eval` of parameters and optimizer state after each update is what is missing. A loop that happens to read the loss, or
//! the norm as mlx-rs's own `clip_grad_norm` does, is saved by that: until the day on which somebody takes the line out.
use std::time::Instant;

use faststep::{engine::array::operations, openblas};
use mlx_rs::{
    error::Exception,
    module::FlattenedModuleParam,
    nn, ops,
    optimizers::{AdamW, Optimizer},
    random, Array,
};

use crate::{
    batches::Batches,
    failure::Failure,
    loss::weighted_loss,
    memory::Memory,
    model::Decoder,
    options::Options,
    train::{number, MAX_GRAD_NORM},
};

/// Steps between two looks at the graph: each of them goes through all of it.
const LOOK_EVERY: u32 = 5;

// clip_grad_norm on the device, without a wait
fn clip(mut gradients: FlattenedModuleParam) -> Result<FlattenedModuleParam, Exception> {
    let mut squares = Array::from_f32(0.0);
    for gradient in gradients.values() {
        squares = squares.add(gradient.square()?.sum(None)?)?;
    }
    let norm = squares.sqrt()?.add(Array::from_f32(1e-6))?;
    #[allow(clippy::cast_possible_truncation)] // to float32, as the gradients
    let scale = Array::from_f32(MAX_GRAD_NORM as f32).divide(norm)?;
    let scale = ops::minimum(scale, Array::from_f32(1.0))?;
    for gradient in gradients.values_mut() {
        *gradient = gradient.multiply(&scale)?;
    }
    Ok(gradients)
}

/// Train in the broken order, until all steps are made or the graph has grown too much: then nobody waits for it.
pub fn train(options: &Options, batches: &Batches) -> Result<(), Failure> {
    // as `Step::new` does, so that only the order is another one
    if let Err(error) = openblas::bind() {
        eprintln!("MLX keeps its own products: {error}");
    }
    random::seed(options.run.seed)?;
    let mut model = Decoder::new(&options.run)?;
    #[allow(clippy::cast_possible_truncation)] // to float32, as the parameters
    let mut optimizer = AdamW::new(options.run.learning_rate as f32);
    let mut value_and_grad = nn::value_and_grad(weighted_loss);
    let limit = options.graph_limit as usize;
    let mut last = None;
    for steps in 1..=options.run.steps {
        let (loss, gradients) = value_and_grad(&mut model, &batches.batch(steps - 1))?;
        optimizer.update(&mut model, clip(gradients)?)?;
        let reports = options.reports(steps);
        let looks = reports || steps.is_multiple_of(LOOK_EVERY);
        let graph = if looks { operations(&loss) } else { 0 };
        last = Some(loss);
        if reports || graph > limit {
            let memory = Memory::now()?;
            println!("naive step {steps:>6}: {graph} operations put off; {memory}");
        }
        if graph > limit {
            println!("stopped: the loss waits for more than --graph-limit {limit} operations, and grows with each step");
            return Ok(());
        }
    }
    last.map_or(Ok(()), |loss| wait(&loss))
}

// the lazy work of all the steps
fn wait(loss: &Array) -> Result<(), Failure> {
    println!("reading the last loss, which waits for all steps");
    let started = Instant::now();
    let (loss, seconds) = (number(loss)?, started.elapsed().as_secs_f64());
    println!("loss {loss:.4} after {seconds:.2} s; {}", Memory::now()?);
    Ok(())
}
