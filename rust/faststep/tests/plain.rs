//! The step beside a hand-written mlx-rs loop: the same losses and parameters.
#![allow(clippy::unwrap_used)] // how a test fails

mod common;

use common::{batch, mse, values, Mlp};
use faststep::{Optimizer, Optimizers, Options, Step};
use mlx_rs::{
    builder::Builder,
    module::{FlattenedModuleParam, ModuleParameters},
    nn,
    optimizers::{self, clip_grad_norm, LionBuilder},
    transforms::{eval, eval_params},
    utils::Updatable,
    Array,
};

/// One update of mlx-rs, with gradients clipped to a norm of 1, and everything evaluated.
fn plain(
    model: &mut Mlp,
    optimizer: &mut impl PlainOptimizer,
    (x, y): (&Array, &Array),
) -> (f32, f32) {
    let loss = |model: &mut Mlp, (x, y): (&Array, &Array)| mse(model, &[x.clone(), y.clone()]);
    let (loss, gradients) = nn::value_and_grad(loss)(model, (x, y)).unwrap();
    let (clipped, norm) = clip_grad_norm(&gradients, 1.0).unwrap();
    let clipped: FlattenedModuleParam = clipped
        .into_iter()
        .map(|(k, v)| (k, v.into_owned()))
        .collect();
    optimizer.apply(model, &clipped);
    eval_params(model.parameters()).unwrap();
    (loss.item_exact::<f32>(), norm)
}

trait PlainOptimizer {
    fn apply(&mut self, model: &mut Mlp, gradients: &FlattenedModuleParam);
}

impl<O: optimizers::Optimizer + Updatable> PlainOptimizer for O {
    fn apply(&mut self, model: &mut Mlp, gradients: &FlattenedModuleParam) {
        self.update(model, gradients).unwrap();
        let state = self.state_projection().unwrap();
        eval(state.values()).unwrap();
    }
}

fn compare(rule: Optimizer, rate: f64, mut optimizer: impl PlainOptimizer) {
    let options = Options::default().max_grad_norm(1.0);
    let mut step = Step::new(Mlp::seeded(1), Optimizers::new(rule, rate), mse, options).unwrap();
    let mut model = Mlp::seeded(1);
    let mut clipped = 0;
    for number in 0..20 {
        let [x, y] = batch(number);
        let x = if number % 2 == 0 {
            x.multiply(Array::from_f32(8.0)).unwrap()
        } else {
            x
        };
        let (loss, norm) = plain(&mut model, &mut optimizer, (&x, &y));
        let output = step.step(&[x, y]).unwrap();
        clipped += usize::from(norm > 1.0);
        let ours = output.loss.item_exact::<f32>();
        assert!(
            (ours - loss).abs() <= 1e-4 * loss,
            "{number}: {ours} {loss}"
        );
        let ours = output.grad_norm.unwrap().item_exact::<f32>();
        assert!(
            (ours - norm).abs() <= 1e-4 * norm,
            "{number}: {ours} {norm}"
        );
    }
    assert!(
        (1..20).contains(&clipped),
        "some gradients have to be clipped, and some not: {clipped}"
    );
    for (ours, plain) in values(&step.model()).iter().zip(values(&model)) {
        assert!(
            (ours - plain).abs() <= 1e-4 * plain.abs() + 1e-4,
            "{ours} {plain}"
        );
    }
}

#[test]
fn sgd_is_that_of_mlx_rs() {
    compare(Optimizer::sgd(0.0), 0.05, optimizers::Sgd::new(0.05));
}

#[test]
fn adamw_is_that_of_mlx_rs() {
    compare(Optimizer::adamw(0.01), 1e-2, optimizers::AdamW::new(1e-2));
}

#[test]
fn lion_is_that_of_mlx_rs() {
    compare(
        Optimizer::lion(0.0),
        1e-3,
        LionBuilder::new(1e-3).betas((0.9, 0.99)).build().unwrap(),
    );
}

#[test]
fn rmsprop_is_that_of_mlx_rs() {
    compare(
        Optimizer::rmsprop(),
        1e-3,
        optimizers::RmsProp::new(1e-3).unwrap(),
    );
}
