//! The user's model, loss and optimizer while a step is traced.
//!
//! Tracers are put where the arrays are, the user's function is called, what it assigned is read off, and everything is
//! put back as it was, whether the function returned or raised.
use std::{cell::RefCell, rc::Rc};

use faststep::engine::{Graph, Host, Left, LossCall, LossOutput, UpdateCall, UpdateOutput};
use mlx_rs::{
    error::{Exception, Result as MlxResult},
    Array,
};
use pyo3::{
    exceptions::{PyRuntimeError, PyTypeError, PyValueError},
    intern,
    prelude::*,
    types::{PyDict, PyList, PyTuple},
};

use crate::{
    bridge,
    optimizer::{leaves, traceable_rate, HostSchedules},
    reach::{Looked, Reached},
    tree::Tree,
    walk::{rebuild, Scope, Slot, Snapshot},
};

/// What an array slot of the model is to the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A trainable parameter, by its index.
    Parameter(usize),
    /// Any other array, by its index.
    Other(usize),
}

/// The call during which a trace may be made.
#[allow(clippy::struct_excessive_bools)] // what a loss may do and gives has several independent answers
pub struct Current {
    /// The user's model.
    pub model: Py<PyAny>,
    /// The user's optimizer.
    pub optimizer: Py<PyAny>,
    /// The user's loss function.
    pub loss_fn: Py<PyAny>,
    /// Whether it returns a weight behind the loss.
    pub weighted: bool,
    /// The positional arguments and a dict of the named ones.
    pub arguments: Py<PyTuple>,
    /// `mx.random`'s key list.
    pub key_list: Py<PyList>,
    /// The role of each array slot of the model, and the path to it.
    pub roles: Rc<Vec<(Role, Vec<String>)>>,
    /// The model's trainable parameters as a tree.
    pub trainable: Py<PyAny>,
    /// Whether the loss is computed in another dtype than the parameters': then it may assign in that one.
    pub mixed: bool,
    /// Whether the loss is computed once and replayed: then it may store no arrays beside the model's slots.
    pub compiled: bool,
    /// Whether everything that the loss does to the model is taken back.
    pub restore: bool,
    /// What the loss reaches beside the model and its arguments; its arrays stand behind the model's others.
    pub looked: Rc<Looked>,
    /// The number of the model's others.
    pub others: usize,
    /// Constants of the trace's graph that are inputs, behind the arrays that the loss reaches.
    pub varying: Vec<u32>,
    /// Whether only the graph is wanted.
    pub sketch: bool,
    /// The inputs that stand for the constants.
    pub tracers: Vec<Array>,
    /// The graph of the trace.
    pub graph: Option<Graph>,
    /// Constants of the graph that somebody else holds too.
    pub held: Vec<Array>,
    /// Arrays that the loss reaches and changes in place, by number.
    pub in_place: Vec<usize>,
    /// What ended the trace.
    pub stop: Option<Stop>,
    /// What the loss returned, with holes for its arrays.
    pub template: Option<Py<PyAny>>,
}

/// Why a trace ended.
pub enum Stop {
    /// The user's code raised.
    Raised(PyErr),
    /// The loss does what a trace cannot repeat.
    Untraceable(String),
    /// The loss makes another array of a buffer, which the next trace may be for.
    Becomes(String),
}

impl From<PyErr> for Stop {
    fn from(error: PyErr) -> Self {
        Self::Raised(error)
    }
}

/// The engine's host: the call that is under way.
#[derive(Default)]
pub struct PythonHost {
    /// The call; nothing between calls.
    pub current: RefCell<Option<Current>>,
}

impl PythonHost {
    fn run<T>(
        &self,
        work: impl for<'py> FnOnce(Python<'py>, &mut Current) -> Result<T, Stop>,
    ) -> MlxResult<T> {
        Python::attach(|py| {
            let mut current = self.current.try_borrow_mut().ok();
            let Some(current) = current.as_mut().and_then(|c| c.as_mut()) else {
                return Err(Exception::custom("a step was traced outside of a call"));
            };
            work(py, current).map_err(|stop| {
                current.stop = Some(stop);
                Exception::custom("the traced function raised")
            })
        })
    }
}

impl PythonHost {
    // the model as it is, and what puts it back; the call must not stay borrowed while the loss is differentiated
    fn around(
        &self,
        py: Python<'_>,
        others: &[Array],
        key: &Array,
        work: &mut dyn FnMut() -> MlxResult<()>,
    ) -> Result<MlxResult<Left>, Stop> {
        let (model, keys, restore, sketch, reached) = {
            let mut current = self.current.borrow_mut();
            let current = current.as_mut().ok_or_else(|| expected("a call"))?;
            let reached = Reached::new(py, current, others)?;
            let (model, keys) = (current.model.bind(py), current.key_list.bind(py));
            let (restore, sketch) = (current.restore, current.sketch);
            (model.clone(), keys.clone(), restore, sketch, reached)
        };
        let (before, slots) = Tree::record(&model, Scope::Whole)?;
        let snapshot = Snapshot::take(&model)?;
        let old_key = keys.get_item(0)?;
        let outcome = match work() {
            Ok(()) => {
                let mut current = self.current.borrow_mut();
                let current = current.as_mut().ok_or_else(|| expected("a call"))?;
                let left = current.left(py, &before, &slots, others, key);
                left.and_then(|mut left| {
                    current.in_place = reached.read(py, &mut left)?;
                    Ok(Ok(left))
                })
            }
            Err(error) => Ok(Err(error)),
        };
        reached.restore(py, !sketch && matches!(outcome, Ok(Ok(_))))?;
        if restore || !matches!(outcome, Ok(Ok(_))) {
            snapshot.restore()?;
        } else {
            for slot in &slots {
                slot.place.set(&slot.object)?;
            }
        }
        keys.set_item(0, old_key)?;
        outcome
    }

    // the graph of a trace: kept, and its constants that vary replaced
    fn note(&self, inputs: &[Array], outputs: &[Array]) -> MlxResult<()> {
        let mut current = self.current.borrow_mut();
        let Some(current) = current.as_mut().filter(|current| current.compiled) else {
            return Ok(());
        };
        let id = faststep::engine::array::id;
        let tracers: Vec<usize> = current.tracers.iter().map(id).collect();
        let inputs = inputs.iter().filter(|input| !tracers.contains(&id(input)));
        let inputs: Vec<Array> = inputs.cloned().collect();
        if inputs
            .first()
            .is_none_or(|first| !faststep::engine::array::is_lazy(first))
        {
            return Ok(()); // MLX compiles nothing: these are no tracers
        }
        let graph = Graph::new(&inputs, outputs)?;
        if current.sketch {
            current.graph = Some(graph);
            return Err(Exception::custom("only the graph was wanted"));
        }
        current.held = graph.held(outputs)?;
        graph.replace(&current.varying, &current.tracers, outputs)?;
        current.graph = Some(graph);
        Ok(())
    }
}

impl Host for PythonHost {
    fn differentiate(
        &self,
        others: &[Array],
        key: &Array,
        work: &mut dyn FnMut() -> MlxResult<()>,
    ) -> MlxResult<Left> {
        Python::attach(|py| match self.around(py, others, key, work) {
            Ok(outcome) => outcome,
            Err(stop) => self.run(|_, _| Err(stop)),
        })
    }

    fn loss(&self, call: LossCall) -> MlxResult<LossOutput> {
        self.run(|py, current| current.loss(py, call))
    }

    fn traced(&self, inputs: &[Array], outputs: &[Array]) -> MlxResult<()> {
        self.note(inputs, outputs)
    }

    fn learning_rate(&self, rule: usize, step: &Array) -> MlxResult<Option<Array>> {
        self.run(|py, current| {
            let optimizers = leaves(current.optimizer.bind(py));
            let Some(schedule) = optimizers.get(rule).and_then(traceable_rate) else {
                return Ok(None);
            };
            let rate = schedule.call1((bridge::wrap(py, step)?,))?;
            let rate = bridge::get(&rate);
            Ok(Some(rate.ok_or_else(|| {
                expected("a schedule to return mx.array")
            })?))
        })
    }

    fn update(&self, call: UpdateCall) -> MlxResult<UpdateOutput> {
        self.run(|py, current| current.update(py, call))
    }
}

/// What a loss function returned.
struct Read {
    loss: Array,
    weight: Option<Array>,
    aux: Vec<Array>, // the weight among them, where it is an array
}

// a scalar array, or a number that the shapes of the batch determine
fn read_weight(returned: &Bound<'_, PyAny>) -> Result<Array, Stop> {
    let second = returned
        .cast::<PyTuple>()
        .ok()
        .and_then(|tuple| tuple.get_item(1).ok());
    if let Some(weight) = second.as_ref().and_then(bridge::get) {
        if weight.ndim() == 0 {
            return Ok(weight);
        }
        return Err(Stop::Raised(PyValueError::new_err(format!(
            "the loss function: expected a scalar weight behind the loss, got one of shape {:?}",
            weight.shape()
        ))));
    }
    if let Some(weight) = second.as_ref().and_then(|w| w.extract::<f32>().ok()) {
        return Ok(Array::from_f32(weight));
    }
    Err(Stop::Raised(PyTypeError::new_err(format!(
        "the loss function: expected (mean loss, weight, ...) with weighted=True, the weight a scalar mx.array or a number, \
         got {}",
        second.unwrap_or_else(|| returned.clone()).get_type().fully_qualified_name()?
    ))))
}

#[allow(clippy::needless_pass_by_value)] // for map_err
fn failed(error: Exception) -> Stop {
    Stop::Raised(PyValueError::new_err(error.what().to_owned()))
}

pub fn expected(what: &str) -> PyErr {
    PyTypeError::new_err(format!("expected {what}"))
}

impl Current {
    // puts tracers into the model's slots, calls the loss and reads off what it assigned to parameters
    fn loss(&mut self, py: Python<'_>, call: LossCall) -> Result<LossOutput, Stop> {
        let (tree, slots) = Tree::record(self.model.bind(py), Scope::Whole)?;
        let roles = self.roles.clone();
        let tracer = |role: Role| match role {
            Role::Parameter(i) => &call.parameters[i],
            Role::Other(i) => &call.others[i],
        };
        for (slot, (role, _)) in slots.iter().zip(roles.iter()) {
            slot.place.set(&bridge::wrap(py, tracer(*role))?)?;
        }
        self.key_list
            .bind(py)
            .set_item(0, bridge::wrap(py, call.key)?)?;

        let Read { loss, weight, aux } = self.call_loss(py, call.batch)?;

        let mut output = LossOutput {
            weight,
            aux,
            ..LossOutput::new(loss)
        };
        for (number, (slot, (role, path))) in slots.iter().zip(roles.iter()).enumerate() {
            if let Role::Parameter(index) = role {
                let shown = tracer(roles[tree.last_place(number)].0);
                let rebound = self.rebound(slot, shown, *role, path)?;
                output.parameters.extend(rebound.map(|now| (*index, now)));
            }
        }
        Ok(output)
    }

    // what the slot holds in place of the tracer, in its dtype where the loss computes in another one
    fn rebound(
        &self,
        slot: &Slot<'_>,
        tracer: &Array,
        role: Role,
        path: &[String],
    ) -> Result<Option<Array>, Stop> {
        let now = slot.place.get()?.and_then(|object| bridge::get(&object));
        let Some(mut now) = now else {
            return Err(Stop::Untraceable(format!("it removes {}", dotted(path))));
        };
        if faststep::engine::array::id(&now) == faststep::engine::array::id(tracer) {
            return Ok(None);
        }
        if self.mixed && now.dtype().is_float() && tracer.dtype().is_float() {
            now = now.as_dtype(tracer.dtype()).map_err(failed)?;
        }
        if now.shape() != tracer.shape() || now.dtype() != tracer.dtype() {
            let name = dotted(path);
            let what = format!("it assigns an array of another shape or dtype to {name}");
            match role {
                Role::Parameter(_) => return Err(Stop::Untraceable(what)),
                Role::Other(_) if self.compiled => return Err(Stop::Becomes(what)),
                Role::Other(_) => {}
            }
        }
        Ok(Some(now))
    }

    // what the loss, and the parts of it that were called again for the gradients, have left behind
    fn left(
        &self,
        py: Python<'_>,
        before: &Tree,
        slots: &[Slot<'_>],
        others: &[Array],
        key: &Array,
    ) -> Result<Left, Stop> {
        let mut left = Left::default();
        for (number, (slot, (role, path))) in slots.iter().zip(self.roles.iter()).enumerate() {
            if let Role::Other(index) = role {
                let shown = match self.roles[before.last_place(number)].0 {
                    Role::Other(last) => &others[last],
                    Role::Parameter(_) => &others[*index],
                };
                let rebound = self.rebound(slot, shown, *role, path)?;
                left.others.extend(rebound.map(|now| (*index, now)));
            }
        }
        let now = bridge::get(&self.key_list.bind(py).get_item(0)?);
        left.key =
            now.filter(|now| faststep::engine::array::id(now) != faststep::engine::array::id(key));
        left.kept = self.kept(py, before)?;
        Ok(left)
    }

    // arrays that the loss stored on the model beside its slots
    fn kept(&self, py: Python<'_>, before: &Tree) -> Result<Vec<Array>, Stop> {
        let (after, slots) = Tree::record(self.model.bind(py), Scope::Whole)?;
        if after.tensors().len() == before.tensors().len() {
            return Ok(Vec::new());
        }
        let known = before.paths(py);
        let mut kept = Vec::new();
        for (path, slot) in after.paths(py).iter().zip(&slots) {
            if known.contains(path) {
                continue;
            }
            if self.compiled {
                let what = format!("it stores a new array on the model: {}", dotted(path));
                return Err(Stop::Untraceable(what));
            }
            kept.extend(bridge::get(&slot.object));
        }
        Ok(kept)
    }

    fn call_loss(&mut self, py: Python<'_>, batch: &[Array]) -> Result<Read, Stop> {
        let mut tracers = batch.iter();
        let arguments = rebuild(self.arguments.bind(py), &mut |_| {
            let tracer = tracers.next().ok_or_else(|| expected("another batch"))?;
            bridge::wrap(py, tracer)
        })?;
        let arguments = arguments.cast_into::<PyTuple>().map_err(PyErr::from)?;
        let positional = arguments
            .get_item(0)?
            .cast_into::<PyTuple>()
            .map_err(PyErr::from)?;
        let named = arguments
            .get_item(1)?
            .cast_into::<PyDict>()
            .map_err(PyErr::from)?;
        let mut all = vec![self.model.bind(py).clone()];
        all.extend(positional.iter());
        let returned = self
            .loss_fn
            .bind(py)
            .call(PyTuple::new(py, all)?, Some(&named))
            .map_err(|error| stop(py, error))?;
        self.read_loss(&returned)
    }

    fn read_loss(&mut self, returned: &Bound<'_, PyAny>) -> Result<Read, Stop> {
        let first = match returned.cast::<PyTuple>() {
            Ok(tuple) => tuple.get_item(0).ok(),
            Err(_) => Some(returned.clone()),
        };
        let Some(loss) = first.as_ref().and_then(bridge::get) else {
            return Err(Stop::Raised(PyTypeError::new_err(format!(
                "the loss function: expected a scalar mx.array or a tuple that begins with one, got {}",
                returned.get_type().fully_qualified_name()?
            ))));
        };
        if loss.ndim() != 0 {
            return Err(Stop::Raised(PyValueError::new_err(format!(
                "the loss function: expected a scalar loss, got one of shape {:?}: reduce it with mean() or sum()",
                loss.shape()
            ))));
        }
        let weight = if self.weighted {
            Some(read_weight(returned)?)
        } else {
            None
        };
        let hole = bridge::wrap(returned.py(), &faststep::engine::array::hollow())?;
        let mut arrays = Vec::new();
        let template = rebuild(returned, &mut |object| {
            arrays.extend(bridge::get(object));
            Ok(hole.clone())
        })?;
        self.template = Some(template.unbind());
        arrays.remove(0);
        Ok(Read {
            loss,
            weight,
            aux: arrays,
        })
    }

    fn update(&mut self, py: Python<'_>, call: UpdateCall) -> Result<UpdateOutput, Stop> {
        let optimizer = self.optimizer.bind(py).clone();
        let (_, slots) = Tree::record(&optimizer, Scope::Whole)?;
        let snapshot = Snapshot::take(&optimizer)?;
        let outcome = self.traced_update(py, &optimizer, call, &slots);
        snapshot.restore()?;
        outcome
    }

    fn traced_update<'py>(
        &self,
        py: Python<'py>,
        optimizer: &Bound<'py, PyAny>,
        call: UpdateCall,
        slots: &[Slot<'py>],
    ) -> Result<UpdateOutput, Stop> {
        for (slot, tracer) in slots.iter().zip(call.state) {
            slot.place.set(&bridge::wrap(py, tracer)?)?;
        }
        HostSchedules::of(optimizer).hold()?;
        let trainable = self.trainable.bind(py);
        let fill = |arrays: &[Array]| {
            let mut arrays = arrays.iter();
            rebuild(trainable, &mut |_| {
                let array = arrays
                    .next()
                    .ok_or_else(|| expected("as many arrays as parameters"))?;
                bridge::wrap(py, array)
            })
        };
        let updated = optimizer
            .call_method1(
                intern!(py, "apply_gradients"),
                (fill(call.gradients)?, fill(call.parameters)?),
            )
            .map_err(|error| stop(py, error))?;
        let mut state = Vec::new();
        for (index, (slot, tracer)) in slots.iter().zip(call.state).enumerate() {
            let now = slot.place.get()?.and_then(|object| bridge::get(&object));
            let now = now.ok_or_else(|| {
                Stop::Untraceable("the optimizer removes an array from its state".into())
            })?;
            if faststep::engine::array::id(&now) != faststep::engine::array::id(tracer) {
                state.push((index, now));
            }
        }
        Ok(UpdateOutput {
            parameters: self.in_order(py, &updated)?,
            state,
        })
    }

    // the optimizer's tree of new parameters, in the order of the model's
    fn in_order(&self, py: Python<'_>, updated: &Bound<'_, PyAny>) -> Result<Vec<Array>, Stop> {
        let wanted = Tree::record(self.trainable.bind(py), Scope::Whole)?
            .0
            .paths(py);
        let (tree, slots) = Tree::record(updated, Scope::Whole)?;
        let found = tree.paths(py);
        let find = |path: &Vec<String>| {
            let at = found.iter().position(|other| other == path)?;
            bridge::get(&slots[at].object)
        };
        let arrays = wanted.iter().map(|path| {
            find(path).ok_or_else(|| {
                Stop::Raised(PyRuntimeError::new_err(format!(
                    "the optimizer returned no parameter for {}",
                    dotted(path)
                )))
            })
        });
        arrays.collect()
    }
}

/// A path as the user writes it behind `model.`.
pub fn dotted(path: &[String]) -> String {
    path.join(".")
}

// an exception of the user's, or the one by which MLX says that a traced array has no value
fn stop(py: Python<'_>, error: PyErr) -> Stop {
    let message = error.value(py).to_string();
    let reads = "[eval] Attempting to eval an array during function transformations";
    if !error.is_instance_of::<PyValueError>(py) || !message.starts_with(reads) {
        return Stop::Raised(error);
    }
    let mut place = None;
    let mut next = error.traceback(py).map(Bound::into_any);
    while let Some(traceback) = next {
        let line = traceback
            .getattr("tb_lineno")
            .and_then(|l| l.extract::<usize>());
        let file = traceback
            .getattr("tb_frame")
            .and_then(|frame| frame.getattr("f_code"))
            .and_then(|code| code.getattr("co_filename"))
            .and_then(|file| file.extract::<String>());
        if let (Ok(line), Ok(file)) = (line, file) {
            if !file.contains("/mlx/") {
                place = Some(format!("{file}:{line}"));
            }
        }
        next = traceback.getattr("tb_next").ok().filter(|t| !t.is_none());
    }
    let place = place.unwrap_or_else(|| "in the loss".into());
    Stop::Untraceable(format!("it reads the value of an array ({place})"))
}
