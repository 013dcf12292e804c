//! A model with buffers and noise: it is looked at and called between steps, and draws anew in each.
#![allow(clippy::unwrap_used, clippy::panic)] // how a test fails, and a look

mod common;

use std::{
    cell::RefCell,
    panic::{catch_unwind, AssertUnwindSafe},
};

use common::{adamw, batch, equal, losses, mse, values, Mlp};
use faststep::{Error, Options, Step};
use mlx_rs::{
    error::Exception,
    module::{Module, ModuleParameters},
    nn::{BatchNorm, Dropout},
    transforms::vjp,
    Array, Dtype,
};

#[derive(Clone, Debug, mlx_rs::macros::ModuleParameters)]
struct Noisy {
    #[param]
    mlp: Mlp,
    #[param]
    norm: BatchNorm,
    dropout: Dropout,
}

fn noisy(model: &mut Noisy, batch: &[Array]) -> Result<(Array, Vec<Array>), Exception> {
    let mask = model.dropout.forward(&Array::ones::<f32>(&[64])?)?;
    let x = model.norm.forward(&batch[0])?;
    let x = x.multiply(model.dropout.forward(&Array::ones::<f32>(&[8])?)?)?;
    let loss = mse(&mut model.mlp, &[x, batch[1].clone()])?;
    Ok((loss, vec![mask]))
}

fn new_noisy() -> Step<Noisy> {
    mlx_rs::random::seed(3).unwrap();
    let model = Noisy {
        mlp: Mlp::seeded(1),
        norm: BatchNorm::new(8).unwrap(),
        dropout: Dropout::new(),
    };
    Step::new(model, adamw(), noisy, Options::default()).unwrap()
}

fn numbers(array: &Array) -> Vec<f32> {
    array.to_vec_exact::<f32>().unwrap()
}

// the changes that a validation makes to a model, and more
fn validate(model: &mut Noisy) -> Vec<f32> {
    model.norm.training_mode(false);
    model.dropout.training_mode(false);
    let (loss, _) = noisy(model, &batch(0)).unwrap();
    model.norm.running_mean.value = Some(Array::zeros::<f32>(&[8]).unwrap());
    model.mlp.first.bias.value = Some(Array::zeros::<f32>(&[16]).unwrap());
    numbers(&loss)
}

#[test]
fn a_model_is_looked_at_and_called_between_steps_and_the_step_goes_on_as_without() {
    let train = |step: &mut Step<Noisy>, i| {
        let parts = if i < 4 { 1 } else { 2 }; // at last a new trace
        let part = batch(i).map(|array| array.split_equal(parts, 0).unwrap().remove(0));
        numbers(&step.step(&part).unwrap().loss)
    };
    let (mut straight, mut looked) = (new_noisy(), new_noisy());
    for i in 0..6 {
        assert_eq!(train(&mut straight, i), train(&mut looked, i));
        let mut model = looked.to_model();
        let names = looked.parameters();
        let flat = model.parameters().flatten();
        assert_eq!(names.len(), flat.len());
        assert!(flat.iter().all(|(name, array)| equal(array, &names[name])));
        assert!(equal(
            &names["norm.running_mean"],
            &straight.parameters()["norm.running_mean"]
        ));
        let losses = [validate(&mut model), looked.with_model(validating).unwrap()];
        assert_eq!(losses[0], losses[1]);
        assert_ne!(losses[0], [0.0]);
    }
    assert_eq!(looked.stats().unwrap().traced, 2);
    let models = [straight.to_model(), looked.to_model()];
    let [a, b] = [0, 1].map(|i| models[i].parameters().flatten());
    assert!(a.iter().all(|(name, array)| equal(array, b[name])));
}

// the same, but for the modes, which it puts back
fn validating(model: &mut Noisy) -> Vec<f32> {
    let loss = validate(model);
    model.norm.training_mode(true);
    model.dropout.training_mode(true);
    loss
}

#[test]
fn a_look_sees_what_has_been_changed_and_forgets_its_own_changes() {
    let mut step = Step::new(Mlp::seeded(1), adamw(), mse, Options::default()).unwrap();
    losses(&mut step, 0..2);
    let ones = Array::ones::<f32>(&[4]).unwrap();
    step.model_mut().second.bias.value = Some(ones.clone());
    assert!(equal(&step.parameters()["second.bias"], &ones));
    assert!(equal(
        step.to_model().second.bias.value.as_ref().unwrap(),
        &ones
    ));
    let before = values(&step.to_model());
    let seen = step.with_model(|model| {
        let seen = values(model);
        model.second.bias.value = Some(Array::zeros::<f32>(&[4]).unwrap());
        seen
    });
    assert_eq!(seen.unwrap(), before);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        step.with_model(|model| {
            model.second.bias.value = Some(Array::zeros::<f32>(&[4]).unwrap());
            panic!("no look");
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(values(&step.model()), before);
    assert_eq!(
        step.into_model().map(|model| values(&model)).unwrap(),
        before
    );
}

#[test]
fn buffers_move_and_draws_are_new_ones_in_each_step() {
    let (mut step, mut again) = (new_noisy(), new_noisy());
    let take = |step: &mut Step<Noisy>| {
        step.seed(11).unwrap();
        let outputs = (0..3).map(|i| step.step(&batch(i)).unwrap().aux[0].clone());
        outputs
            .map(|mask| mask.to_vec_exact::<f32>().unwrap())
            .collect::<Vec<_>>()
    };
    let masks = take(&mut step);
    assert!(masks[0] != masks[1] && masks[1] != masks[2], "{masks:?}");
    assert_eq!(take(&mut again), masks);
    let mean = step.model().norm.running_mean.value.clone().unwrap();
    assert!(mean.abs().unwrap().max(None).unwrap().item_exact::<f32>() > 1e-3);
    assert!(!step
        .optimizer_state()
        .unwrap()
        .keys()
        .any(|name| name.contains("running")));
    let key = mlx_rs::random::key(11).unwrap();
    let (_, draw) = mlx_rs::random::split(&key, 2).unwrap();
    let first = mlx_rs::random::bernoulli(&Array::from_f32(0.5), &[64], &draw).unwrap();
    let first = first
        .as_dtype(Dtype::Float32)
        .unwrap()
        .multiply(Array::from_f32(2.0))
        .unwrap();
    assert_eq!(first.to_vec_exact::<f32>().unwrap(), masks[0]);
}

#[test]
fn a_step_inside_of_a_transformation_changes_nothing() {
    let new = || Step::new(Mlp::seeded(1), adamw(), mse, Options::default()).unwrap();
    let (step, mut plain) = (RefCell::new(new()), new());
    let one = Array::from_f32(1.0);
    for number in 0..2 {
        let given = batch(number);
        let inside = |inputs: &[Array]| {
            let refused = step.borrow_mut().step(&given);
            assert!(matches!(refused, Err(Error::Transformed)));
            inputs.to_vec()
        };
        vjp(
            inside,
            std::slice::from_ref(&one),
            std::slice::from_ref(&one),
        )
        .unwrap();
        let next = number..number + 1;
        let got = losses(&mut step.borrow_mut(), next.clone());
        assert_eq!(got, losses(&mut plain, next));
    }
}
