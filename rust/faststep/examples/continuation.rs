//! A run that goes on from a checkpoint and leaves one, as another program of the run, in Rust or Python, may have or take:
//!
//! ```sh
//! continuation CASE FROM TO BATCHES FIRST LAST
//! ```
//!
//! `FROM` and `TO` are directories as `Step::save` writes them; `BATCHES` a safetensors file with `x` `[count, rows, 8]` and
//! `y` `[count, rows, 4]`, of which those from `FIRST` to below `LAST` are taken. It prints the loss of each, one a line.
//! `tests/rust/test_rust_continuation.py` has the same model and cases in Python, and compares.
use std::{env, error::Error};

use faststep::{
    optimizers::AdamW,
    schedulers::{cosine_decay, exponential_decay, join_schedules, linear_schedule, step_decay},
    Optimizer, Optimizers, Options, Step,
};
use mlx_rs::{
    builder::Builder,
    error::Exception,
    macros::ModuleParameters,
    module::Module,
    nn::{BatchNorm, Dropout, DropoutBuilder, Linear},
    ops::{indexing::IndexOp, tanh},
    Array, Dtype,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

#[derive(Debug, ModuleParameters)]
struct Net {
    #[param]
    first: Linear,
    #[param]
    norm: BatchNorm,
    #[param]
    layers: Vec<Linear>,
    dropout: Dropout,
    noisy: bool,
}

impl Net {
    fn new(noisy: bool) -> Outcome<Self> {
        let mut layers = Vec::new();
        for _ in 0..11 {
            layers.push(Linear::new(16, 16)?);
        }
        layers.push(Linear::new(16, 4)?);
        Ok(Self {
            first: Linear::new(8, 16)?,
            norm: BatchNorm::new(16)?,
            layers,
            dropout: DropoutBuilder::new().p(0.25).build()?,
            noisy,
        })
    }

    fn forward(&mut self, x: &Array) -> Result<Array, Exception> {
        let mut x = tanh(self.first.forward(x)?)?; // [rows, 16]
        if self.noisy {
            x = self.norm.forward(&x)?;
            x = self.dropout.forward(&x)?;
        }
        for layer in &mut self.layers {
            x = layer.forward(&tanh(&x)?)?;
        }
        Ok(x) // [rows, 4]
    }
}

fn mean_squared_error(model: &mut Net, batch: &[Array]) -> Result<Array, Exception> {
    let error = model.forward(&batch[0])?.subtract(&batch[1])?;
    error.square()?.mean(None)
}

fn case(name: &str) -> Outcome<(Optimizers, Options)> {
    let adamw = AdamW {
        bias_correction: true,
        ..AdamW::default()
    };
    let decay = cosine_decay(1e-3, 20, 1e-4);
    let warm_up = join_schedules(linear_schedule(0.0, 1e-3, 4), vec![(4, decay)]);
    let options = Options::default().max_grad_norm(0.05).accumulate(3);
    Ok(match name {
        "window" => (Optimizers::new(adamw, 1e-2), options),
        "noisy" => (
            Optimizers::new(Optimizer::lion(0.1), warm_up),
            options.accumulate(1),
        ),
        "masters" => (
            Optimizers::new(adamw, 1e-3),
            options.compute_dtype(Dtype::Bfloat16).ema_decay(0.9),
        ),
        "scaled" => (
            Optimizers::new(Optimizer::sgd(0.9), 1e-2),
            options.compute_dtype(Dtype::Float16),
        ),
        "several" => (
            Optimizers::new(adamw, step_decay(1e-3, 0.5, 2)).with(
                Optimizer::muon(),
                exponential_decay(0.02, 0.9),
                |_, array| array.ndim() == 2,
            ),
            options,
        ),
        other => return Err(format!("expected the name of a case, got {other:?}").into()),
    })
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [name, from, to, batches, first, last] = arguments.as_slice() else {
        return Err("expected CASE FROM TO BATCHES FIRST LAST".into());
    };
    let (optimizers, options) = case(name)?;
    let model = Net::new(name == "noisy")?;
    let mut step = Step::new(model, optimizers, mean_squared_error, options)?;
    step.load(from)?;
    let batches = Array::load_safetensors(batches)?;
    for number in first.parse::<i32>()?..last.parse()? {
        let batch = ["x", "y"].map(|name| batches[name].index(number));
        println!("{}", step.step(&batch)?.loss.try_item_cast::<f32>()?);
    }
    step.save(to)?;
    Ok(())
}
