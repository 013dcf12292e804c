//! The step of an mlx-rs module: it trains, sees what is changed, and leaves everything as it was on an error.
#![allow(clippy::unwrap_used, clippy::panic)] // how a test fails, and a loss

mod common;

use std::{
    cell::Cell,
    panic::{catch_unwind, AssertUnwindSafe},
    rc::Rc,
    time::Duration,
};

use common::{adamw, batch, equal, losses, mse, values, Mlp};
use faststep::{Error, LearningRate, Loss, Nonfinite, Optimizer, Optimizers, Options, Step};
use mlx_rs::{
    error::Exception,
    module::{Module, ModuleParameters, Param},
    ops::block_masked_mm,
    stop_gradient, with_device, Array, Device, Dtype,
};

fn step(options: Options) -> Step<Mlp> {
    Step::new(Mlp::seeded(1), adamw(), mse, options).unwrap()
}

#[test]
fn the_loss_falls_and_is_traced_once() {
    let calls = Rc::new(Cell::new(0));
    let counted = calls.clone();
    let loss = move |model: &mut Mlp, batch: &[Array]| {
        counted.set(counted.get() + 1);
        mse(model, batch)
    };
    let mut step = Step::new(Mlp::seeded(1), adamw(), loss, Options::default()).unwrap();
    let losses = losses(&mut step, 0..50);
    assert!(losses[49] < 0.5 * losses[0], "{losses:?}");
    let stats = step.stats().unwrap();
    assert_eq!(
        (calls.get(), stats.traced, stats.steps, stats.updates),
        (1, 1, 50, 50)
    );
    assert_eq!(stats.traces[0].cause, "first call");
    assert!(stats.compiled);
    assert!(stats.seconds["evaluate"] > 0.0);
    assert_eq!(stats.bytes["optimizer"], 2 * stats.bytes["parameters"] + 12);
}

#[test]
fn uncompiled_is_the_same() {
    let mut compiled = step(Options::default());
    let mut plain = step(Options::default().compile(false));
    assert_eq!(losses(&mut compiled, 0..5), losses(&mut plain, 0..5));
    assert_eq!(values(&compiled.model()), values(&plain.model()));
    assert!(!plain.stats().unwrap().compiled);
}

#[test]
fn another_shape_is_another_trace() {
    let mut step = step(Options::default());
    let [x, y] = batch(0);
    step.step(&[x.clone(), y.clone()]).unwrap();
    let half = |array: &Array| array.split_equal(2, 0).unwrap().remove(0);
    step.step(&[half(&x), half(&y)]).unwrap();
    step.step(&[x, y]).unwrap();
    let stats = step.stats().unwrap();
    assert_eq!(stats.traced, 2);
    assert_eq!(
        stats.traces[1].cause,
        "batch[0]: Float32 [16, 8] -> Float32 [8, 8]"
    );
}

#[test]
fn what_is_changed_is_seen() {
    let mut step = step(Options::default());
    losses(&mut step, 0..2);
    let zeros = Array::zeros::<f32>(&[4]).unwrap();
    step.model_mut().second.bias.value = Some(zeros.clone());
    let with_zeros = values(&step.model());
    losses(&mut step, 2..3);
    assert_ne!(values(&step.model()), with_zeros);

    step.model_mut().first.freeze_parameters(true);
    let frozen = step.model().first.weight.value.clone();
    losses(&mut step, 3..5);
    assert!(equal(&step.model().first.weight.value, &frozen));
    assert_eq!(step.gradients(&batch(0)).unwrap().1.len(), 2);

    step.model_mut().first.unfreeze_parameters(true);
    losses(&mut step, 5..7);
    assert!(!equal(&step.model().first.weight.value, &frozen));
    assert_eq!(step.stats().unwrap().traces.len(), 1);
}

#[test]
fn frozen_parameters_keep_their_moments() {
    let mut step = step(Options::default().ema_decay(0.9));
    losses(&mut step, 0..3);
    let before = step.optimizer_state().unwrap()["first.weight.m"].clone();
    step.model_mut().first.freeze_parameters(true);
    losses(&mut step, 3..5);
    assert!(equal(
        &step.optimizer_state().unwrap()["first.weight.m"],
        &before
    ));
    assert_eq!(step.average().unwrap().len(), 2);
    step.model_mut().first.unfreeze_parameters(true);
    losses(&mut step, 5..6);
    assert!(!equal(
        &step.optimizer_state().unwrap()["first.weight.m"],
        &before
    ));
    assert_eq!(step.average().unwrap().len(), 4);
    assert_eq!(
        step.optimizer_state().unwrap()["step"].item_exact::<u64>(),
        6
    );
}

#[test]
fn the_model_can_be_read_between_steps_without_another_trace() {
    let mut step = step(Options::default());
    losses(&mut step, 0..1);
    let shown = values(&step.model());
    losses(&mut step, 1..2);
    assert_ne!(values(&step.model()), shown);
    assert_eq!(step.stats().unwrap().traced, 1);
    let [x, _] = batch(0);
    step.model_mut().forward(&x).unwrap();
    losses(&mut step, 2..3);
    assert_eq!(step.stats().unwrap().traced, 2);
    let mut model = step.into_model().unwrap();
    model.forward(&x).unwrap().eval().unwrap();
}

#[test]
fn gradients_change_nothing() {
    let mut step = step(Options::default());
    let before = values(&step.model());
    let (loss, gradients) = step.gradients(&batch(0)).unwrap();
    assert!(loss.item_exact::<f32>() > 0.0);
    for (name, array) in step.model().parameters().flatten() {
        assert_eq!(gradients[&name].shape(), array.shape(), "{name}");
    }
    assert_eq!(values(&step.model()), before);
    assert_eq!(step.stats().unwrap().steps, 0);
}

#[test]
fn a_window_is_one_update() {
    let mut step = step(Options::default().accumulate(2).max_grad_norm(1.0));
    let before = values(&step.model());
    let first = step.step(&batch(0)).unwrap();
    assert!(!first.updated().unwrap() && first.grad_norm.is_none());
    assert_eq!(values(&step.model()), before);
    let second = step.step(&batch(1)).unwrap();
    assert!(second.updated().unwrap() && second.grad_norm.is_some());
    assert_ne!(values(&step.model()), before);
    assert!(!step.flush().unwrap());
    step.step(&batch(2)).unwrap();
    assert_eq!(step.batches(), 1);
    assert!(step.flush().unwrap());
    assert_eq!(step.batches(), 0);
    assert_eq!(step.stats().unwrap().updates, 2);
}

#[test]
fn an_open_window_can_get_another_length() {
    let mut changed = step(Options::default().accumulate(3));
    let mut plain = step(Options::default().accumulate(2));
    changed.step(&batch(0)).unwrap();
    changed.set_accumulate(2).unwrap();
    assert!(changed.step(&batch(1)).unwrap().updated().unwrap());
    losses(&mut plain, 0..2);
    assert_eq!(values(&changed.model()), values(&plain.model()));
    assert!(matches!(changed.set_accumulate(0), Err(Error::Invalid(_))));
    assert_eq!(changed.options().accumulate, 2);
    losses(&mut changed, 2..4); // two in a window of two: none is open
    changed.step(&batch(4)).unwrap();
    changed.set_accumulate(1).unwrap();
    assert!(changed.step(&batch(5)).unwrap().updated().unwrap());
    losses(&mut plain, 2..6);
    assert_eq!(values(&changed.model()), values(&plain.model()));
}

#[test]
fn sums_belong_to_their_window() {
    let sgd = Optimizers::new(Optimizer::sgd(0.0), 1.0);
    let options = Options::default().accumulate(2);
    let nan = [
        Array::from_f32(f32::NAN).multiply(&batch(0)[0]).unwrap(),
        batch(0)[1].clone(),
    ];
    for opens in [&batch(2), &nan] {
        let mut step = Step::new(Mlp::seeded(1), sgd.clone(), mse, options).unwrap();
        step.step(&batch(0)).unwrap();
        step.model_mut().first.freeze_parameters(true);
        step.step(&batch(1)).unwrap();
        let before = step.model().first.weight.value.clone();
        step.step(opens).unwrap(); // of another window: nothing of the layer that is frozen is in it
        step.model_mut().first.unfreeze_parameters(true);
        step.step(&nan).unwrap();
        assert!(equal(&step.model().first.weight.value, &before));
    }
}

#[test]
fn a_weighted_window_is_the_mean_over_all() {
    let weighted = |model: &mut Mlp, batch: &[Array]| -> Result<Loss, Exception> {
        let rows = f32::from(u16::try_from(batch[0].dim(0)).unwrap());
        Ok(Loss::new(mse(model, batch)?).weighted(Array::from_f32(rows)))
    };
    let sgd = Optimizers::new(Optimizer::sgd(0.0), 0.1);
    let [x, y] = batch(0);
    let mut whole = Step::new(Mlp::seeded(1), sgd.clone(), mse, Options::default()).unwrap();
    whole.step(&[x.clone(), y.clone()]).unwrap();
    let options = Options::default().accumulate(2);
    let mut parts = Step::new(Mlp::seeded(1), sgd, weighted, options).unwrap();
    let (xs, ys) = (
        x.split_at_indices(&[4], 0).unwrap(),
        y.split_at_indices(&[4], 0).unwrap(),
    );
    for (x, y) in xs.into_iter().zip(ys) {
        parts.step(&[x, y]).unwrap();
    }
    for (a, b) in values(&whole.model()).iter().zip(values(&parts.model())) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }
}

#[test]
fn what_is_no_number_is_not_taken() {
    let nan = Array::from_f32(f32::NAN);
    for nonfinite in [Nonfinite::Skip, Nonfinite::Raise] {
        let mut step = step(Options::default().nonfinite(nonfinite));
        losses(&mut step, 0..1);
        let before = values(&step.model());
        let [x, y] = batch(1);
        let output = step.step(&[x.multiply(&nan).unwrap(), y]);
        match (nonfinite, output) {
            (Nonfinite::Raise, Err(Error::Nonfinite(message))) => {
                assert!(
                    message.starts_with("the gradient of first.bias has NaN"),
                    "{message}"
                );
            }
            (_, Ok(output)) => assert!(output.skipped().unwrap() && !output.updated().unwrap()),
            (_, Err(error)) => panic!("{error}"),
        }
        assert_eq!(values(&step.model()), before);
        losses(&mut step, 2..3);
        assert_eq!(
            step.optimizer_state().unwrap()["step"].item_exact::<u64>(),
            2
        );
    }
}

fn no_loss_today() -> Exception {
    Exception::custom("no loss today")
}

#[test]
fn an_error_or_a_panic_in_the_loss_changes_nothing() {
    let fails = Rc::new(Cell::new(0));
    let how = fails.clone();
    let loss = move |model: &mut Mlp, batch: &[Array]| match how.get() {
        1 => Err(no_loss_today()),
        2 => panic!("no loss at all"),
        3 => Ok(Array::from_f32(mse(model, batch)?.item_cast::<f32>())),
        4 => {
            let loss = mse(model, batch)?;
            let scale = loss.try_item_cast::<f32>().unwrap_or(2.0); // the error is dropped
            loss.multiply(Array::from_f32(scale))
        }
        _ => mse(model, batch),
    };
    let options = Options::default()
        .accumulate(3)
        .compute_dtype(Dtype::Bfloat16);
    let mut step = Step::new(Mlp::seeded(1), adamw(), loss, options).unwrap();
    let mut straight = Step::new(Mlp::seeded(1), adamw(), mse, options).unwrap();
    losses(&mut step, 0..2);
    losses(&mut straight, 0..2);
    let [x, y] = batch(5);
    let wide = [
        x.split_equal(2, 0).unwrap().remove(0),
        y.split_equal(2, 0).unwrap().remove(0),
    ]; // a new trace
    fails.set(1);
    let error = step.step(&wide);
    let Err(Error::Trace(error)) = error else {
        panic!("{error:?}");
    };
    assert_eq!(error.what(), "no loss today");
    let place = no_loss_today();
    assert_eq!(error.location(), place.location()); // of its own, in this file
    fails.set(2);
    let panicked = catch_unwind(AssertUnwindSafe(|| step.step(&wide)));
    assert_eq!(
        panicked.unwrap_err().downcast_ref(),
        Some(&"no loss at all")
    );
    for reads in [3, 4] {
        fails.set(reads);
        let error = step.step(&wide);
        assert!(matches!(error, Err(Error::Untraceable)), "{error:?}");
    }
    fails.set(0);
    assert_eq!(step.batches(), 2);
    assert_eq!(losses(&mut step, 2..8), losses(&mut straight, 2..8));
    assert_eq!(values(&step.model()), values(&straight.model()));
}

#[test]
fn uncompiled_a_loss_may_read_values() {
    let loss = |model: &mut Mlp, batch: &[Array]| {
        let loss = mse(model, batch)?;
        let large = loss.item_exact::<f32>() > 0.1;
        loss.multiply(Array::from_f32(if large { 2.0 } else { 1.0 }))
    };
    let options = Options::default().compile(false);
    let mut step = Step::new(Mlp::seeded(1), adamw(), loss, options).unwrap();
    let losses = losses(&mut step, 0..30);
    assert!(
        losses[0] > 0.4 && losses[29] < 0.5 * losses[0],
        "{losses:?}"
    );
}

#[test]
fn a_loss_may_not_assign_another_shape() {
    let loss = |model: &mut Mlp, batch: &[Array]| {
        let loss = mse(model, batch)?;
        model.first.bias.value = Some(Array::zeros::<f32>(&[3])?);
        Ok(loss)
    };
    let mut step = Step::new(Mlp::seeded(1), adamw(), loss, Options::default()).unwrap();
    let before = values(&step.model());
    let error = step.step(&batch(0)).unwrap_err().to_string();
    assert!(
        error.contains("first.bias: expected Float32 [16]"),
        "{error}"
    );
    assert_eq!(values(&step.model()), before);
}

#[test]
fn a_device_that_fails_changes_nothing() {
    // MLX's CPU refuses this product when it is to compute it
    let loss = |model: &mut Mlp, batch: &[Array]| -> Result<Array, Exception> {
        let loss = mse(model, batch)?;
        let Some(half) = batch.get(2) else {
            return Ok(loss);
        };
        let mask = Array::ones::<bool>(&[1, 1])?;
        let product = block_masked_mm(half, half, 32, &mask, None, None)?;
        loss.add(product.sum(None)?)
    };
    let mut step = Step::new(Mlp::seeded(1), adamw(), loss, Options::default()).unwrap();
    losses(&mut step, 0..2);
    let before = values(&step.model());
    let [x, y] = batch(2);
    let half = Array::ones::<half::f16>(&[32, 32]).unwrap();
    let error = with_device(Device::cpu(), || step.step(&[x, y, half]));
    assert!(
        matches!(&error, Err(Error::FirstEvaluation(e)) if e.what().contains("BlockMaskedMM")),
        "{error:?}"
    );
    let text = error.unwrap_err().to_string(); // without a path of the machine that built it
    assert!(!text.contains(" at ") && !text.contains(".cargo"), "{text}");
    assert_eq!(values(&step.model()), before);
    losses(&mut step, 2..3);
    assert_eq!(step.stats().unwrap().updates, 3);
}

#[test]
fn a_learning_rate_can_be_another_one() {
    let mut step = step(Options::default());
    losses(&mut step, 0..1);
    step.set_learning_rate(0.0).unwrap();
    let before = values(&step.model());
    losses(&mut step, 1..2);
    assert_eq!(values(&step.model()), before);
    assert_eq!(step.stats().unwrap().traced, 1);
    step.set_learning_rate(LearningRate::schedule(|step| {
        step.as_dtype(Dtype::Float32)?
            .multiply(Array::from_f32(0.5))
    }))
    .unwrap();
    losses(&mut step, 2..4);
    let rate = step.learning_rate(0).unwrap().item_exact::<f32>();
    assert!((rate - 1.5).abs() < 1e-6, "{rate}");
    assert_eq!(step.stats().unwrap().traced, 2);
}

#[test]
fn options_and_parameters_are_checked() {
    let refused = |options: Options| {
        let error = Step::new(Mlp::seeded(1), adamw(), mse, options).err();
        assert!(
            matches!(error, Some(Error::Invalid(_))),
            "{options:?}: {error:?}"
        );
    };
    let base = Options::default();
    refused(base.max_grad_norm(-1.0));
    refused(base.max_loss(1.0).nonfinite(Nonfinite::Allow));
    refused(base.compute_dtype(Dtype::Int32));
    refused(
        base.compute_dtype(Dtype::Float16)
            .nonfinite(Nonfinite::Raise),
    );
    refused(base.ema_decay(1.0));
    refused(base.accumulate(0));
    refused(base.max_traces(1));

    let mut frozen = Mlp::seeded(1);
    frozen.freeze_parameters(true);
    let error = Step::new(frozen, adamw(), mse, base).err();
    assert!(matches!(error, Some(Error::NoParameters)), "{error:?}");

    let mut whole = Mlp::seeded(1);
    whole.first.bias = Param::new(Some(Array::from_slice(&[0i32; 16], &[16])));
    let error = Step::new(whole, adamw(), mse, base).err();
    assert!(
        matches!(&error, Some(Error::Invalid(m)) if m.starts_with("first.bias: expected")),
        "{error:?}"
    );
}

#[test]
fn several_rules_take_their_parameters() {
    let optimizers = adamw().with(Optimizer::sgd(0.9), 0.1, |name, array| {
        array.ndim() == 2 && name.starts_with("first")
    });
    let mut step = Step::new(Mlp::seeded(1), optimizers, mse, Options::default()).unwrap();
    losses(&mut step, 0..2);
    let names: Vec<String> = step.optimizer_state().unwrap().into_keys().collect();
    assert_eq!(
        names,
        [
            "states.0.first.weight.v",
            "states.0.learning_rate",
            "states.0.step",
            "states.1.first.bias.m",
            "states.1.first.bias.v",
            "states.1.learning_rate",
            "states.1.second.bias.m",
            "states.1.second.bias.v",
            "states.1.second.weight.m",
            "states.1.second.weight.v",
            "states.1.step",
        ]
    );
}

type MlpLoss = fn(&mut Mlp, &[Array]) -> Result<Array, Exception>;

#[test]
fn a_diagnosis_names_the_first_part_that_fails() {
    let patience = Duration::from_secs(90);
    let batches: Vec<Vec<Array>> = (0..4).map(|number| batch(number).to_vec()).collect();
    let diagnosed = |loss: MlpLoss, rate: f64| {
        let optimizers = Optimizers::new(Optimizer::adamw(0.01), rate);
        let step = Step::new(Mlp::seeded(1), optimizers, loss, Options::default()).unwrap();
        step.diagnose(&batches, patience)
    };
    let healthy = diagnosed(mse, 1e-2);
    assert!(healthy.is_healthy(), "{healthy}");
    assert_eq!(healthy.rungs.len(), 6);
    assert!(healthy.rungs[3].operations > Some(100), "{healthy}");
    let faults: [(MlpLoss, f64, &str, &str, usize); 5] = [
        (
            |model, batch| mse(model, batch)?.multiply(Array::from_f32(f32::NAN)),
            1e-2,
            "not-finite",
            "the loss of batch 0 is NaN",
            2,
        ),
        (
            |model, batch| {
                mse(model, batch)?.add(
                    model
                        .second
                        .bias
                        .value
                        .as_ref()
                        .unwrap()
                        .abs()?
                        .sqrt()?
                        .sum(None)?,
                )
            },
            1e-2,
            "not-finite",
            "the gradient of second.bias in batch 0",
            3,
        ),
        (
            |model, batch| {
                model
                    .second
                    .forward(&stop_gradient(model.first.forward(&batch[0])?)?)?
                    .square()?
                    .mean(None)
            },
            1e-2,
            "zero-gradient",
            "the gradient of first.bias, first.weight is zero in all of 4 batches",
            3,
        ),
        (
            mse,
            0.0,
            "nothing-moves",
            "no parameter has changed in 30 steps",
            6,
        ),
        (
            |_, _| Err(Exception::custom("out of labels")),
            1e-2,
            "error",
            "forward: out of labels",
            2,
        ),
    ];
    for (loss, rate, name, text, rungs) in faults {
        let found = diagnosed(loss, rate);
        assert_eq!(
            (found.findings[0].name, found.rungs.len()),
            (name, rungs),
            "{found}"
        );
        assert!(found.findings[0].text.starts_with(text), "{found}");
    }
}
