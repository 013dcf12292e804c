//! The training loop.
use faststep::{
    optimizers::AdamW,
    schedulers::{cosine_decay, join_schedules, linear_schedule},
    LearningRate, Optimizers, Step, StepOutput,
};
use mlx_rs::{error::Exception, Array};

use crate::{
    batches::Batches,
    checkpoints::Checkpoints,
    failure::Failure,
    loss::weighted_loss,
    memory::Memory,
    model::{Decoder, Projection},
    options::{Options, Run},
    report::{Record, Report},
};

/// Gradients are clipped to this global norm.
pub const MAX_GRAD_NORM: f64 = 1.0;

fn learning_rate(run: &Run) -> LearningRate {
    let peak = run.learning_rate;
    let warm_up = linear_schedule(0.0, peak, run.warm_up);
    let decay = cosine_decay(peak, run.steps.saturating_sub(run.warm_up), peak / 20.0);
    join_schedules(warm_up, vec![(run.warm_up, decay)])
}

/// The step of a model.
pub fn new_step<P: Projection>(run: &Run, model: Decoder<P>) -> Result<Step<Decoder<P>>, Failure> {
    let adamw = AdamW {
        betas: (0.9, 0.99),
        bias_correction: true,
        weight_decay: 0.1,
        ..AdamW::default()
    };
    let optimizers = Optimizers::new(adamw, learning_rate(run));
    let options = faststep::Options::default().max_grad_norm(MAX_GRAD_NORM);
    Ok(Step::new(model, optimizers, weighted_loss, options)?)
}

/// Train a new model, or the one of the last checkpoint.
pub fn train<P: Projection>(
    options: &Options,
    batches: &Batches,
    mut step: Step<Decoder<P>>,
) -> Result<(), Failure> {
    let checkpoints = Checkpoints::open(options, batches)?;
    let mut done = 0;
    if let Some(all) = &checkpoints {
        all.create()?;
        done = all.load(&mut step)?;
    }
    let mut report = Report::new(options, done)?;
    let mut outputs = Vec::new();
    for number in done..options.run.steps {
        outputs.push(step.step(&batches.batch(number))?);
        report.advance();
        let steps = number + 1;
        let (reports, saves) = (options.reports(steps), options.saves(steps));
        if reports || saves {
            report.add(&read(&mut outputs, steps, reports)?)?;
        }
        if let Some(all) = checkpoints.as_ref().filter(|_| saves) {
            all.save(&mut step, steps)?;
        }
    }
    Ok(())
}

// the only place that waits for the steps
fn read(outputs: &mut Vec<StepOutput>, steps: u32, shows: bool) -> Result<Vec<Record>, Failure> {
    let mut records = Vec::new();
    for (output, step) in outputs.drain(..).rev().zip((0..=steps).rev()) {
        records.push(Record {
            step,
            loss: number(&output.loss)?,
            grad_norm: output.grad_norm.as_ref().map_or(Ok(f32::NAN), number)?,
            memory: None,
        });
    }
    records.reverse();
    if let Some(last) = records.last_mut().filter(|_| shows) {
        last.memory = Some(Memory::now()?);
    }
    Ok(records)
}

/// A scalar; waits for it.
pub fn number(array: &Array) -> Result<f32, Exception> {
    array
        .try_item_cast::<f32>()
        .map_err(|error| Exception::custom(error.to_string()))
}
