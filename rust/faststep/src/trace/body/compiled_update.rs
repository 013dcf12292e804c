//! The update by rules of this crate, compiled by itself: in a step whose loss is called each time, its operations would hold the
//! moments of all parameters, old and new, at once.
use std::{cell::RefCell, rc::Rc};

use mlx_rs::{error::Result, transforms::compile::compile, Array};

use super::short;
use crate::{
    mlx::array,
    optim::{Rules, UpdateOutput},
    trace::{host::Host, recipe::Recipe},
};

/// The update of one recipe; compiled at its first call.
#[derive(Default)]
pub(crate) struct CompiledUpdate(RefCell<Option<Function>>);

type Call = dyn FnMut(&[Array]) -> Result<Vec<Array>>;

struct Function {
    form: Form,
    call: Box<Call>,
    state: Rc<RefCell<Vec<usize>>>, // the indices of what is new in the state
}

/// What decides which inputs there are: the rules with a scheduled rate, and whether a step may be skipped.
#[derive(Clone, PartialEq)]
struct Form {
    scheduled: Vec<bool>,
    guarded: bool,
}

impl CompiledUpdate {
    /// What [`Rules::update`] gives. Schedules are called each time, and may read what they like.
    pub(super) fn update(
        &self,
        recipe: &Recipe,
        rules: &Rc<Rules>,
        host: &dyn Host,
        (state, numbers): (&[Array], &[Array]),
        (gradients, weights): (&[Array], &[Array]),
        good: Option<&Array>,
    ) -> Result<UpdateOutput> {
        let rates = (0..rules.rules().len()).map(|rule| {
            let step = rules.rate_at(rule).and_then(|rate| state.get(rate - 1));
            step.map_or(Ok(None), |step| host.learning_rate(rule, step))
        });
        let rates: Vec<_> = rates.collect::<Result<_>>()?;
        let form = Form {
            scheduled: rates.iter().map(Option::is_some).collect(),
            guarded: good.is_some(),
        };
        let mut known = self.0.borrow_mut();
        if known.as_ref().is_none_or(|known| known.form != form) {
            *known = Some(Function::new(recipe, rules.clone(), form));
        }
        let function = known.as_mut().ok_or_else(short)?;
        let rates = rates.iter().flatten();
        let inputs = rates
            .chain(state)
            .chain(numbers)
            .chain(gradients)
            .chain(weights)
            .chain(good);
        let mut outputs = (function.call)(&inputs.cloned().collect::<Vec<_>>())?;
        let new_state = outputs.split_off(weights.len());
        let indices = function.state.borrow().clone();
        Ok(UpdateOutput {
            parameters: outputs,
            state: indices.into_iter().zip(new_state).collect(),
            ..UpdateOutput::default()
        })
    }
}

impl Function {
    fn new(recipe: &Recipe, rules: Rc<Rules>, form: Form) -> Self {
        let (layout, moments) = (recipe.layout.clone(), recipe.places.optimizer);
        let state = Rc::new(RefCell::default());
        let (new, of) = (state.clone(), form.clone());
        let body = move |inputs: &[Array]| -> Result<Vec<Array>> {
            let scheduled = of.scheduled.iter().filter(|it| **it).count();
            let (rates, rest) = taken(inputs, scheduled)?;
            let (state, rest) = taken(rest, moments)?;
            let (numbers, rest) = taken(rest, rules.taken())?;
            let (gradients, rest) = taken(rest, layout.len())?;
            let (weights, good) = taken(rest, layout.len())?;
            let rate = |rule: usize, _: &Array| {
                let before = of.scheduled[..rule].iter().filter(|it| **it).count();
                Ok(of.scheduled[rule].then(|| rates[before].clone()))
            };
            let state = (state, numbers);
            let made = rules.update(&layout, &rate, state, (gradients, weights), good.first())?;
            let (indices, values): (Vec<_>, Vec<_>) = made.state.into_iter().unzip();
            new.replace(indices);
            array::rewritten(&[made.parameters, values].concat())
        };
        Self {
            form,
            call: Box::new(compile(body, false)),
            state,
        }
    }
}

fn taken(inputs: &[Array], count: usize) -> Result<(&[Array], &[Array])> {
    inputs.split_at_checked(count).ok_or_else(short)
}
