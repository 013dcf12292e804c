//! Models that the tests of the step train.
#![allow(dead_code, missing_docs, clippy::unwrap_used)] // each test program takes its part

use std::ops::Range;

use faststep::{Optimizer, Optimizers, Step};
use mlx_rs::{
    error::Exception,
    macros::ModuleParameters,
    module::{Module, ModuleParameters as _, Param},
    nn::{self, Linear},
    random, Array, Dtype,
};

/// Two layers, 8 -> 16 -> 4.
#[derive(Clone, Debug, ModuleParameters)]
pub struct Mlp {
    #[param]
    pub first: Linear,
    #[param]
    pub second: Linear,
}

fn linear(input: i32, output: i32, seed: u64) -> Linear {
    let key = random::key(seed).unwrap();
    let weight = random::uniform::<_, f32>(-0.3, 0.3, &[output, input], Some(&key)).unwrap();
    let bias = Array::zeros::<f32>(&[output]).unwrap();
    Linear {
        weight: Param::new(weight),
        bias: Param::new(Some(bias)),
    }
}

impl Mlp {
    pub fn seeded(seed: u64) -> Self {
        Self {
            first: linear(8, 16, seed),
            second: linear(16, 4, seed + 1),
        }
    }
}

impl Module<&Array> for Mlp {
    type Output = Array;
    type Error = Exception;

    fn forward(&mut self, x: &Array) -> Result<Array, Exception> {
        self.second.forward(&nn::relu(self.first.forward(x)?)?)
    }

    fn training_mode(&mut self, _: bool) {}
}

/// The mean squared error of `batch`: `x` `[rows, 8]`, `y` `[rows, 4]`.
pub fn mse(model: &mut Mlp, batch: &[Array]) -> Result<Array, Exception> {
    model
        .forward(&batch[0])?
        .subtract(&batch[1])?
        .square()?
        .mean(None)
}

/// The batch of that number, 16 rows.
pub fn batch(number: u64) -> [Array; 2] {
    let key = random::key(1000 + number).unwrap();
    let x = random::normal::<f32>(&[16, 8], None, None, Some(&key)).unwrap();
    let y = x.split_equal(2, 1).unwrap().remove(0).sin().unwrap();
    [x, y]
}

/// The losses of the batches of these numbers.
pub fn losses(step: &mut Step<Mlp>, numbers: Range<u64>) -> Vec<f32> {
    let loss = |i| step.step(&batch(i)).unwrap().loss.item_cast::<f32>();
    numbers.map(loss).collect()
}

/// All parameters, in the order of their names.
pub fn values(model: &Mlp) -> Vec<f32> {
    let mut all: Vec<_> = model.parameters().flatten().into_iter().collect();
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    all.iter()
        .flat_map(|(_, array)| {
            array
                .as_dtype(Dtype::Float32)
                .unwrap()
                .to_vec_exact::<f32>()
                .unwrap()
        })
        .collect()
}

/// The optimizer of most tests.
pub fn adamw() -> Optimizers {
    Optimizers::new(Optimizer::adamw(0.01), 1e-2)
}

/// Whether two arrays have the same values.
pub fn equal(a: &Array, b: &Array) -> bool {
    a.eq_values(b).unwrap()
}
