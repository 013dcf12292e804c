//! A plan of the engine's: nothing is evaluated, nothing changes, and its trace is the step's.
#![allow(clippy::unwrap_used)] // how a test fails

use std::{cell::Cell, rc::Rc};

use faststep::{
    engine::{
        array, Call, CallTraces, Compiled, Engine, Host, Layout, LossCall, LossOutput, Nonfinite,
        Options, Part, Places, Plan, PlannedCalls, Recipe, Rule, Rules, Task, Tensor, Trace,
        UpdateCall, UpdateOutput,
    },
    Error, Optimizer,
};
use mlx_rs::{
    error::{Exception, Result as MlxResult},
    Array, Dtype,
};

const WIDTH: i32 = 512;
const BATCH: i32 = 64;

/// The mean square of `tanh(x w)`; counts its calls.
#[derive(Default)]
struct Squares(Cell<usize>);

impl Host for Squares {
    fn loss(&self, call: LossCall) -> MlxResult<LossOutput> {
        self.0.set(self.0.get() + 1);
        let ([w], [x]) = (call.parameters, call.batch) else {
            return Err(Exception::custom("expected w and x"));
        };
        let y = mlx_rs::ops::tanh(x.matmul(w)?)?;
        Ok(LossOutput::new(y.square()?.mean(None)?))
    }

    fn learning_rate(&self, _: usize, _: &Array) -> MlxResult<Option<Array>> {
        Ok(None)
    }

    fn update(&self, _: UpdateCall) -> MlxResult<UpdateOutput> {
        Err(Exception::custom("the update is native"))
    }
}

fn zeros(shape: &[i32]) -> Array {
    mlx_rs::ops::zeros_dtype(shape, Dtype::Float32).unwrap()
}

fn parts() -> (Rc<Layout>, Vec<Array>, Vec<Array>) {
    let w = zeros(&[WIDTH, WIDTH]);
    let state = vec![
        Array::from_int(0),
        Array::from_f32(0.1),
        zeros(&[WIDTH, WIDTH]),
        zeros(&[WIDTH, WIDTH]),
    ];
    let layout = Rc::new(Layout::flat(vec![Tensor::of(&w)], &[0]));
    (layout, vec![w], state)
}

fn adam() -> Rule {
    Rule::Native(Rc::new(Rules::one(Optimizer::adam(), 1)))
}

fn trace(layout: &Rc<Layout>, host: &Rc<Squares>) -> Trace {
    let recipe = Recipe {
        part: Part::Whole(adam()),
        layout: layout.clone(),
        places: Places::behind(4),
        options: Options::default().nonfinite(Nonfinite::Allow).in_flight(0),
        others: 0,
        shards: None,
    };
    Trace::new(recipe, host.clone(), Compiled::Whole)
}

fn call(width: i32) -> Call {
    Call {
        others: Vec::new(),
        rest: vec![Array::from_slice(&[0_u32, 0], &[2]), zeros(&[BATCH, width])],
    }
}

fn plan(engine: &mut Engine, trace: &mut Trace, call: Call) -> Result<Plan, Error> {
    let shown = engine.parameters().to_vec();
    let calls = PlannedCalls {
        calls: 1,
        in_flight: 2,
        shown: &shown,
    };
    engine.plan(alone(trace), call, calls, &mut ())
}

fn alone(trace: &mut Trace) -> CallTraces<'_> {
    CallTraces {
        trace,
        update: None,
    }
}

#[test]
fn a_draft_is_planned_without_memory() {
    let (layout, parameters, state) = parts();
    let host = Rc::new(Squares::default());
    let mut trace = trace(&layout, &host);
    let mut draft = Engine::draft(layout, parameters, state).unwrap();
    let plan = plan(&mut draft, &mut trace, call(WIDTH)).unwrap();

    let square = 4 * usize::try_from(WIDTH * WIDTH).unwrap();
    assert_eq!(plan.parameters, square);
    assert_eq!(plan.gradients, square);
    assert_eq!(plan.state, 2 * square + 8);
    assert!(plan.others >= 4 * usize::try_from(BATCH * WIDTH).unwrap());
    let own = plan.peak() - plan.others; // other tests run in this process too
    assert!((4 * square..20 * square).contains(&own), "{plan:?}");
    assert!(plan.fits());
    assert!(array::is_lazy(&draft.parameters()[0]));
    assert!(array::is_lazy(&draft.state()[2]));
}

#[test]
fn the_trace_of_a_plan_is_the_step_s() {
    let (layout, parameters, state) = parts();
    let host = Rc::new(Squares::default());
    let mut trace = trace(&layout, &host);
    let mut draft = Engine::draft(layout.clone(), parameters.clone(), state.clone()).unwrap();
    let before = plan(&mut draft, &mut trace, call(WIDTH)).unwrap();
    drop(draft);
    let mut engine = Engine::new(layout, parameters, state).unwrap();
    let step = |engine: &mut Engine, trace: &mut Trace| {
        let name = |tensor| format!("tensor {tensor}");
        engine.call(Task::Whole, alone(trace), call(WIDTH), &name, &mut (), None)
    };
    step(&mut engine, &mut trace).unwrap();
    let after = plan(&mut engine, &mut trace, call(WIDTH)).unwrap();
    step(&mut engine, &mut trace).unwrap();

    assert_eq!(host.0.get(), 1);
    let own = |plan: &Plan| plan.steady - plan.others;
    assert!(own(&before).abs_diff(own(&after)) < 1 << 10);
    assert_eq!(engine.state()[0].item_exact::<i32>(), 2);
}

#[test]
fn a_plan_that_fails_leaves_the_engine_as_it_was() {
    let (layout, parameters, state) = parts();
    let mut trace = trace(&layout, &Rc::new(Squares::default()));
    let mut engine = Engine::new(layout, parameters, state).unwrap();
    let before: Vec<usize> = engine.state().iter().map(array::id).collect();
    let refused = plan(&mut engine, &mut trace, call(WIDTH + 1));
    assert!(matches!(refused, Err(Error::Trace(_))));
    let after: Vec<usize> = engine.state().iter().map(array::id).collect();
    assert_eq!(before, after);
    assert_eq!(engine.parameters().len(), 1);
}
