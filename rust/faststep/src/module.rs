//! An mlx-rs module as a step sees it: its array slots by name, and the module while its loss is traced.
use std::{
    any::Any,
    cell::{Cell, RefCell},
    cmp::Ordering,
    collections::{BTreeMap, HashMap, HashSet},
    panic::{catch_unwind, AssertUnwindSafe},
    rc::Rc,
};

use mlx_rs::{
    error::{Exception, Result as MlxResult},
    module::ModuleParameters,
    Array,
};

use crate::{
    array,
    layout::Tensor,
    loss::Loss,
    optimizers::LearningRate,
    random,
    trace::{Host, LossCall, LossOutput, UpdateCall, UpdateOutput},
};

/// How MLX says that a traced array has no value.
const READS: &str = "Attempting to eval an array during function transformations";

/// What an array slot of the module is to the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// A trainable parameter, by its index.
    Parameter(usize),
    /// Any other array, by its index.
    Other(usize),
}

/// The array slots of a module.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Slots {
    /// The names of the trainable parameters, in the order of their indices.
    pub(crate) parameters: Vec<Rc<str>>,
    /// The names of all other arrays.
    pub(crate) others: Vec<Rc<str>>,
    tensors: Vec<Tensor>, // of the parameters
    roles: HashMap<Rc<str>, Role>,
}

/// The slots of a module, and their values.
pub(crate) struct Looked {
    pub(crate) slots: Slots,
    pub(crate) parameters: Vec<Array>,
    pub(crate) others: Vec<Array>,
}

impl Looked {
    /// Other values for all arrays, of the same shapes; an error says which name or shape is not as expected.
    pub(crate) fn replace(&mut self, mut values: BTreeMap<String, Array>) -> Result<(), String> {
        let names = self.slots.parameters.iter().chain(&self.slots.others);
        let arrays = self.parameters.iter_mut().chain(&mut self.others);
        for (name, array) in names.zip(arrays) {
            let value = values.remove(&**name);
            let value = value.ok_or_else(|| format!("expected an array {name}, got none"))?;
            if value.shape() != array.shape() {
                let (expected, got) = (array.shape(), value.shape());
                return Err(format!("{name}: expected {expected:?}, got {got:?}"));
            }
            *array = value;
        }
        self.slots.tensors = self.parameters.iter().map(Tensor::of).collect();
        match values.keys().next() {
            Some(name) => Err(format!(
                "expected the arrays of the module, got {name} beside them"
            )),
            None => Ok(()),
        }
    }
}

/// Look at a module.
pub(crate) fn look(model: &impl ModuleParameters) -> Looked {
    let trainable: HashSet<Rc<str>> = model.trainable_parameters().flatten().into_keys().collect();
    let all = model.parameters().flatten();
    let mut all: Vec<(Rc<str>, &Array)> = all.into_iter().collect();
    all.sort_by(|(a, _), (b, _)| by_number(a, b));
    let mut slots = Slots::default();
    let (mut parameters, mut others) = (Vec::new(), Vec::new());
    for (name, array) in all {
        let (names, arrays, role): (_, _, fn(usize) -> Role) =
            if trainable.contains(&name) && !is_statistic(&name) {
                slots.tensors.push(Tensor::of(array));
                (&mut slots.parameters, &mut parameters, Role::Parameter)
            } else {
                (&mut slots.others, &mut others, Role::Other)
            };
        slots.roles.insert(name.clone(), role(names.len()));
        names.push(name);
        arrays.push(array.clone());
    }
    Looked {
        slots,
        parameters,
        others,
    }
}

// what BatchNorm counts; MLX's Python freezes it, mlx-rs forgets to
fn is_statistic(name: &str) -> bool {
    let last = name.rsplit('.').next();
    matches!(last, Some("running_mean" | "running_var"))
}

// layers.9 before layers.10, as MLX's Python has them
fn by_number(a: &str, b: &str) -> Ordering {
    let parts = a.split('.').zip(b.split('.'));
    let order = parts.map(|(a, b)| match (a.parse::<usize>(), b.parse::<usize>()) {
        (Ok(a), Ok(b)) => a.cmp(&b),
        _ => a.cmp(b),
    });
    order
        .fold(Ordering::Equal, Ordering::then)
        .then_with(|| a.cmp(b))
}

impl Slots {
    /// Shapes and dtypes of the trainable parameters.
    pub(crate) fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Put arrays into a module: `array` gives that of a role.
    pub(crate) fn fill(
        &self,
        model: &mut impl ModuleParameters,
        mut array: impl FnMut(Role) -> Option<Array>,
    ) {
        for (name, slot) in model.parameters_mut().flatten() {
            if let Some(value) = self.roles.get(&name).and_then(|role| array(*role)) {
                *slot = value;
            }
        }
    }

    /// Let a module go of its arrays.
    pub(crate) fn hide(&self, model: &mut impl ModuleParameters) {
        let hollow = array::hollow();
        self.fill(model, |_| Some(hollow.clone()));
    }
}

/// What ended a trace beside an error of MLX.
pub(crate) enum Stop {
    /// The loss function panicked.
    Panic(Box<dyn Any + Send>),
    /// It does what a trace cannot repeat.
    Untraceable(String),
}

pub(crate) type LossFunction<M> = Box<dyn FnMut(&mut M, &[Array]) -> MlxResult<Loss>>;

/// A module with its loss function, as the engine's host. Between calls the module is empty or shown to the user.
pub(crate) struct ModuleHost<M> {
    pub(crate) model: RefCell<M>,
    pub(crate) slots: RefCell<Rc<Slots>>,
    pub(crate) rates: RefCell<Vec<LearningRate>>,
    /// Whether the loss is computed in another dtype than the parameters': then it may assign in that one.
    pub(crate) mixed: bool,
    pub(crate) stop: Cell<Option<Stop>>,
    loss: RefCell<LossFunction<M>>,
}

impl<M: ModuleParameters> ModuleHost<M> {
    pub(crate) fn new(
        model: M,
        loss: LossFunction<M>,
        rates: Vec<LearningRate>,
        mixed: bool,
    ) -> Self {
        Self {
            model: RefCell::new(model),
            slots: RefCell::default(),
            rates: RefCell::new(rates),
            mixed,
            stop: Cell::new(None),
            loss: RefCell::new(loss),
        }
    }

    // the stop goes to the step; what MLX is told is lost on its way
    fn stopped(&self, stop: Stop) -> Exception {
        let message = match &stop {
            Stop::Panic(_) => "the loss function panicked".into(),
            Stop::Untraceable(why) => why.clone(),
        };
        self.stop.set(Some(stop));
        Exception::custom(message)
    }

    fn call(&self, model: &mut M, batch: &[Array]) -> MlxResult<Loss> {
        let mut loss = self.loss.borrow_mut();
        let reads = || {
            self.stopped(Stop::Untraceable(
                "the loss function reads the value of an array".into(),
            ))
        };
        match catch_unwind(AssertUnwindSafe(|| loss(model, batch))) {
            Ok(Err(error)) if error.what().contains(READS) => Err(reads()),
            Ok(returned) => returned,
            Err(payload) if text(&*payload).contains(READS) => Err(reads()),
            Err(payload) => Err(self.stopped(Stop::Panic(payload))),
        }
    }

    // what the loss has assigned to the module's slots
    fn assigned(&self, model: &M, call: &LossCall, output: &mut LossOutput) -> MlxResult<()> {
        let slots = self.slots.borrow();
        let arrays = model.parameters().flatten();
        if arrays.len() != slots.roles.len() {
            return Err(self.stopped(Stop::Untraceable(
                "the loss function adds or removes parameters".into(),
            )));
        }
        for (name, now) in arrays {
            let tracer = match slots.roles.get(&name) {
                Some(Role::Parameter(i)) => &call.parameters[*i],
                Some(Role::Other(i)) => &call.others[*i],
                None => {
                    return Err(
                        self.stopped(Stop::Untraceable(format!("the loss function adds {name}")))
                    )
                }
            };
            if array::id(now) == array::id(tracer) {
                continue;
            }
            let now = if self.mixed && now.dtype().is_float() && tracer.dtype().is_float() {
                now.as_dtype(tracer.dtype())?
            } else {
                now.clone()
            };
            if Tensor::of(&now) != Tensor::of(tracer) {
                return Err(self.stopped(Stop::Untraceable(format!(
                    "{name}: expected {:?} {:?}, the loss function assigns {:?} {:?}",
                    tracer.dtype(),
                    tracer.shape(),
                    now.dtype(),
                    now.shape()
                ))));
            }
            match slots.roles.get(&name) {
                Some(Role::Parameter(i)) => output.parameters.push((*i, now)),
                Some(Role::Other(i)) => output.others.push((*i, now)),
                None => {}
            }
        }
        output.parameters.sort_by_key(|(index, _)| *index); // a map's order is another one each time
        output.others.sort_by_key(|(index, _)| *index);
        Ok(())
    }

    fn traced(&self, model: &mut M, call: &LossCall) -> MlxResult<LossOutput> {
        self.slots.borrow().fill(model, |role| match role {
            Role::Parameter(i) => call.parameters.get(i).cloned(),
            Role::Other(i) => call.others.get(i).cloned(),
        });
        let (loss, key) = random::draw_from(call.key, || self.call(model, call.batch))?;
        if let Some(weight) = loss.weight.as_ref().filter(|weight| weight.ndim() > 0) {
            return Err(Exception::custom(format!(
                "the loss function: expected a scalar weight, got one of shape {:?}",
                weight.shape()
            )));
        }
        let mut output = LossOutput {
            loss: loss.value,
            weight: loss.weight,
            aux: loss.aux,
            parameters: Vec::new(),
            others: Vec::new(),
            kept: Vec::new(),
            key: (array::id(&key) != array::id(call.key)).then_some(key),
        };
        self.assigned(model, call, &mut output)?;
        Ok(output)
    }
}

fn text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied())
        .unwrap_or_default()
}

impl<M: ModuleParameters> Host for ModuleHost<M> {
    fn loss(&self, call: LossCall) -> MlxResult<LossOutput> {
        let mut model = self.model.borrow_mut();
        let output = self.traced(&mut model, &call);
        self.slots.borrow().hide(&mut *model);
        output
    }

    fn learning_rate(&self, rule: usize, step: &Array) -> MlxResult<Option<Array>> {
        match self.rates.borrow().get(rule) {
            Some(rate @ LearningRate::Schedule(_)) => rate.at(step).map(Some),
            _ => Ok(None),
        }
    }

    fn update(&self, _: UpdateCall) -> MlxResult<UpdateOutput> {
        Err(Exception::custom("a module is updated by rules"))
    }
}
