//! The engine with a loss in Rust: it trains, fails without a trace, and keeps its buffers apart.
#![allow(clippy::unwrap_used)] // how a test fails

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use faststep::{
    engine::{
        Call, CallTraces, Compiled, Engine, Guard, Host, Layout, LossCall, LossOutput, Nonfinite,
        Options, Outputs, Part, Recipe, Rule, Rules, Task, Tensor, Trace, UpdateCall, UpdateOutput,
    },
    optimizers::{AdamW, Sgd},
    Error, Optimizer,
};
use mlx_rs::{
    error::{Exception, Result as MlxResult},
    Array, Dtype,
};

/// Mean squared error of `x w + b`; counts its calls, and fails when told to.
#[derive(Default)]
struct Regression {
    calls: Cell<usize>,
    fails: Cell<bool>,
    seen: RefCell<Vec<Tensor>>,
}

impl Host for Regression {
    fn loss(&self, call: LossCall) -> MlxResult<LossOutput> {
        self.calls.set(self.calls.get() + 1);
        self.seen
            .replace(call.parameters.iter().map(Tensor::of).collect());
        if self.fails.get() {
            return Err(Exception::custom("no loss today"));
        }
        let ([w, b], [x, y]) = (call.parameters, call.batch) else {
            return Err(Exception::custom("expected w, b and x, y"));
        };
        let error = x.matmul(w)?.add(b)?.subtract(y)?;
        Ok(LossOutput {
            aux: vec![error.clone()],
            ..LossOutput::new(error.square()?.mean(None)?)
        })
    }

    fn learning_rate(&self, _: usize, _: &Array) -> MlxResult<Option<Array>> {
        Ok(None)
    }

    fn update(&self, _: UpdateCall) -> MlxResult<UpdateOutput> {
        Err(Exception::custom("the update is native"))
    }
}

struct Run {
    host: Rc<Regression>,
    engine: Engine,
    trace: Trace,
}

const SGD: Optimizer = Optimizer::Sgd(Sgd {
    momentum: 0.0,
    weight_decay: 0.0,
    dampening: 0.0,
    nesterov: false,
});

impl Run {
    fn new(rule: Optimizer, max_grad_norm: Option<f64>, compiled: bool) -> Self {
        Self::with(rule, max_grad_norm, None, compiled)
    }

    fn guarded(rule: Optimizer, max_loss: f64) -> Self {
        let max_loss = Some(max_loss);
        Self::with(rule, None, Some(Guard { max_loss }), true)
    }

    fn with(
        rule: Optimizer,
        max_grad_norm: Option<f64>,
        guard: Option<Guard>,
        compiled: bool,
    ) -> Self {
        let parameters = vec![
            Array::from_slice(&[0.5f32, -0.25, 0.125], &[3, 1]),
            Array::from_slice(&[0.0f32], &[1]),
        ];
        let tensors: Vec<Tensor> = parameters.iter().map(Tensor::of).collect();
        let rules = Rules::one(rule, tensors.len());
        let layout = Rc::new(rules.layout(tensors, &[]));
        let mut state = vec![
            Array::from_slice(&[0u64], &[]),
            Array::from_f32(0.1), // the learning rate
        ];
        // [3, 1] and [1] lie in buffers of their own
        for moment in rules.moments(layout.tensors()).flatten() {
            state.push(mlx_rs::ops::zeros_dtype(&moment.shape, Dtype::Float32).unwrap());
        }
        let host = Rc::new(Regression::default());
        let engine = Engine::new(layout.clone(), parameters, state).unwrap();
        let options = match guard {
            Some(guard) => Options::default().max_loss(guard.max_loss),
            None => Options::default().nonfinite(Nonfinite::Allow),
        };
        let recipe = Recipe {
            part: Part::Whole(Rule::Native(Rc::new(rules))),
            layout,
            places: engine.places(),
            options: options.max_grad_norm(max_grad_norm),
            others: 0,
            shards: None,
        };
        Self {
            trace: Trace::new(
                recipe,
                host.clone(),
                if compiled {
                    Compiled::Whole
                } else {
                    Compiled::Update
                },
            ),
            engine,
            host,
        }
    }

    fn step(&mut self) -> Result<Outputs, Error> {
        let x = [
            1.0f32, 2.0, 3.0, -1.0, 0.5, 0.0, 0.25, -2.0, 1.0, 1.0, 1.0, 1.0,
        ];
        let call = Call {
            others: Vec::new(),
            rest: vec![
                Array::from_slice(&[0u32, 0], &[2]),
                Array::from_slice(&x, &[4, 3]),
                Array::from_slice(&[1.0f32, -1.0, 0.5, 2.0], &[4, 1]),
            ],
        };
        let traces = CallTraces {
            trace: &mut self.trace,
            update: None,
        };
        let output = self.engine.call(
            Task::Whole,
            traces,
            call,
            &|i| format!("tensor {i}"),
            &mut (),
            None,
        )?;
        Ok(output.batch)
    }

    fn values(&self) -> Vec<f32> {
        let parameters = self.engine.parameters().iter();
        parameters
            .flat_map(|p| p.to_vec_exact::<f32>().unwrap())
            .collect()
    }
}

#[test]
fn the_loss_falls_and_is_traced_once() {
    let mut run = Run::new(SGD, None, true);
    let losses: Vec<f32> = (0..20)
        .map(|_| run.step().unwrap().loss.unwrap().item_exact::<f32>())
        .collect();
    assert!(losses[19] < 0.5 * losses[0], "{losses:?}");
    assert_eq!(run.host.calls.get(), 1);
    assert!(!run.trace.is_eager());
    let step = run.engine.state()[0].item_exact::<u64>();
    assert_eq!(step, 20);
}

#[test]
fn compiled_and_uncompiled_give_the_same_bits() {
    for rule in [
        SGD,
        Optimizer::AdamW(AdamW {
            bias_correction: true,
            ..AdamW::default()
        }),
    ] {
        let (mut one, mut two) = (
            Run::new(rule.clone(), None, true),
            Run::new(rule, None, false),
        );
        for _ in 0..5 {
            one.step().unwrap();
            two.step().unwrap();
        }
        assert_eq!(one.values(), two.values());
        assert_eq!(two.host.calls.get(), 5);
        assert!(two.trace.is_eager());
    }
}

#[test]
fn the_first_update_is_the_one_of_the_formula() {
    let mut run = Run::new(SGD, Some(0.5), true);
    let before = run.values();
    let norm = run.step().unwrap().norm.unwrap().item_exact::<f32>();
    let moved: f32 = before
        .iter()
        .zip(run.values())
        .map(|(a, b)| (a - b).powi(2))
        .sum();
    assert!(norm > 0.5, "the case has to be clipped: {norm}");
    // learning rate 0.1 times a gradient of norm 0.5
    assert!((moved.sqrt() - 0.05).abs() < 1e-6, "{}", moved.sqrt());
}

#[test]
fn a_step_that_is_no_number_is_not_taken() {
    for rule in [SGD, Optimizer::adadelta()] {
        let mut run = Run::guarded(rule, 10.0);
        assert!(!run.step().unwrap().skipped.unwrap().item_exact::<bool>());
        let far = Array::from_slice(&[1e3f32], &[1]);
        run.engine.set_parameters(vec![(1, far)]).unwrap();
        let before = run.values();
        assert!(run.step().unwrap().skipped.unwrap().item_exact::<bool>());
        assert_eq!(run.values(), before);
        assert_eq!(run.engine.state()[0].item_exact::<u64>(), 1);
    }
}

#[test]
fn a_failing_loss_changes_nothing() {
    let mut run = Run::new(SGD, None, true);
    let before = run.values();
    run.host.fails.set(true);
    assert!(matches!(run.step(), Err(Error::Trace(_))));
    assert_eq!(run.values(), before);
    run.host.fails.set(false);
    run.step().unwrap();
    assert_ne!(run.values(), before);
    assert_eq!(run.host.seen.borrow()[0].shape, [3, 1]);
}

#[test]
fn other_values_are_taken_over() {
    let mut run = Run::new(SGD, None, true);
    run.step().unwrap();
    let bias = Array::from_slice(&[7.0f32], &[1]);
    run.engine.set_parameters(vec![(1, bias)]).unwrap();
    assert!((run.values()[3] - 7.0).abs() < f32::EPSILON);
    let high = run.step().unwrap().loss.unwrap().item_exact::<f32>();
    assert!(high > 20.0, "{high}");
}

#[test]
fn nothing_to_train_is_an_error() {
    let layout = Rc::new(Layout::flat(Vec::new(), &[]));
    let engine = Engine::new(layout, Vec::new(), Vec::new());
    assert!(matches!(engine, Err(Error::NoParameters)));
}

#[test]
fn views_are_the_tensors_that_were_packed() {
    let shapes: [&[i32]; 6] = [&[4, 3], &[3], &[2, 3], &[], &[0], &[5]];
    let mut next = 0.0f32;
    let tensors: Vec<Array> = shapes
        .iter()
        .map(|shape| {
            let size: i32 = shape.iter().product();
            let values: Vec<f32> = (0..size)
                .map(|i| next + f32::from(i16::try_from(i).unwrap()))
                .collect();
            next += 100.0;
            Array::from_slice(&values, shape)
        })
        .collect();
    let keys = [0; 6];
    let layout = Layout::flat(tensors.iter().map(Tensor::of).collect(), &keys);
    assert_eq!(layout.shared().count(), 2); // [4, 3] with [2, 3]; [3] with [5]
    let lazy = layout.views(&layout.pack(&tensors).unwrap()).unwrap();
    let buffers = layout.pack(&tensors).unwrap();
    mlx_rs::transforms::eval(&buffers).unwrap();
    for views in [lazy, layout.views(&buffers).unwrap()] {
        for (view, tensor) in views.iter().zip(&tensors) {
            assert_eq!(view.shape(), tensor.shape());
            assert_eq!(view.dtype(), Dtype::Float32);
            if tensor.size() > 0 {
                let (a, b) = (view.to_vec_exact::<f32>(), tensor.to_vec_exact::<f32>());
                assert_eq!(a.unwrap(), b.unwrap());
            }
        }
    }
}

#[test]
fn the_norm_of_a_million_values_is_exact_to_rounding() {
    let values: Vec<f32> = (0..1_000_003u32)
        .map(|i| f32::from(u16::try_from(i % 977).unwrap()) * 1e-3)
        .collect();
    let exact: f64 = values.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
    let size = i32::try_from(values.len()).unwrap();
    let whole = Array::from_slice(&values, &[size]);
    // 300 small ones, as tensors that an optimizer updates one by one, and what is left in half precision
    let small = values.chunks(3334).map(|part| {
        let rows = i32::try_from(part.len() / 2).unwrap();
        Array::from_slice(&part[..part.len() / 2 * 2], &[rows, 2])
    });
    let mut small: Vec<Array> = small.collect();
    let last = Array::from_slice(&values[1_000_002..], &[1]);
    small.push(last.as_dtype(Dtype::Float16).unwrap());
    for gradients in [vec![whole], small] {
        let norm = faststep::engine::clip::global_norm(&gradients, &[]).unwrap();
        let off = f64::from(norm.item_exact::<f32>()) / exact.sqrt() - 1.0;
        assert!(off.abs() < 1e-6, "{off}");
    }
}
