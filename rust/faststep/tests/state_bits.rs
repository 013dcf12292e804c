//! Moments in 8 bits and weights rounded by chance, by the builder's methods.
#![allow(clippy::unwrap_used)] // how a test fails

use std::{env, fs, process};

use faststep::{Error, Optimizer, Optimizers, Options, Step};
use mlx_rs::{
    error::Exception,
    module::{Module, ModuleParameters as _},
    nn::Linear,
    random, Array, Dtype,
};

fn loss(model: &mut Linear, batch: &[Array]) -> Result<Array, Exception> {
    model
        .forward(&batch[0])?
        .subtract(&batch[1])?
        .square()?
        .mean(None)
}

fn step(options: Options, dtype: Dtype) -> Step<Linear> {
    random::seed(3).unwrap();
    let mut model = Linear::new(64, 128).unwrap();
    for array in model.parameters_mut().flatten().values_mut() {
        **array = array.as_dtype(dtype).unwrap();
    }
    Step::new(
        model,
        Optimizers::new(Optimizer::adamw(0.01), 1e-2),
        loss,
        options,
    )
    .unwrap()
}

fn losses(step: &mut Step<Linear>, steps: usize, dtype: Dtype) -> Vec<f32> {
    let key = random::key(5).unwrap();
    let x = random::normal::<f32>(&[32, 64], None, None, Some(&key)).unwrap();
    let y = x.sum_axis(1, true).unwrap();
    let batch = [x, y].map(|array| array.as_dtype(dtype).unwrap());
    let one = |_| step.step(&batch).unwrap().loss.item_cast::<f32>();
    (0..steps).map(one).collect()
}

#[test]
fn a_run_in_8_bits_goes_on_to_the_bit_and_in_float32() {
    let coded = || {
        step(
            Options::default().state_bits(8).max_grad_norm(10.0),
            Dtype::Float32,
        )
    };
    let mut first = coded();
    let before = losses(&mut first, 30, Dtype::Float32);
    assert!(before[29] < 0.5 * before[0], "{before:?}");
    let state = first.optimizer_state().unwrap();
    assert_eq!(state["weight.m_codes"].dtype(), Dtype::Int8);
    assert_eq!(state["weight.v_codes"].shape(), [32, 256]);
    assert_eq!(state["weight.v_scales"].shape(), [32, 1]);
    assert_eq!(state["bias.m"].dtype(), Dtype::Float32);

    let folder = env::temp_dir().join(format!("faststep-bits-{}", process::id()));
    first.save(&folder).unwrap();
    let wanted = losses(&mut first, 10, Dtype::Float32);
    let mut second = coded();
    second.load(&folder).unwrap();
    assert_eq!(losses(&mut second, 10, Dtype::Float32), wanted);

    let mut wide = step(Options::default().max_grad_norm(10.0), Dtype::Float32);
    wide.load(&folder).unwrap();
    let found = losses(&mut wide, 10, Dtype::Float32);
    for (found, wanted) in found.iter().zip(&wanted) {
        assert!((found - wanted).abs() < 0.05 * wanted, "{found} {wanted}");
    }
    let state = wide.optimizer_state().unwrap();
    assert!(state.contains_key("weight.m") && !state.contains_key("weight.m_codes"));
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn small_updates_of_bfloat16_add_up() {
    let options = Options::default().state_bits(8).stochastic_rounding(true);
    let mut step = step(options, Dtype::Bfloat16);
    let found = losses(&mut step, 100, Dtype::Bfloat16);
    assert!(found[99] < 0.5 * found[0], "{found:?}");
}

#[test]
fn other_rules_are_refused_by_name() {
    let model = Linear::new(64, 128).unwrap();
    let lion = Optimizers::new(Optimizer::lion(0.01), 1e-3);
    let refused = Step::new(model, lion, loss, Options::default().state_bits(8));
    let Err(Error::Invalid(message)) = refused else {
        unreachable!("a step with Lion and 8 bits");
    };
    assert!(
        message.contains("expected Adam or AdamW, got Lion"),
        "{message}"
    );
}
