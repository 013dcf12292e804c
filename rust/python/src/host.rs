//! The user's model, loss and optimizer while a step is traced.
//!
//! Tracers are put where the arrays are, the user's function is called, what it assigned is read off, and everything is
//! put back as it was, whether the function returned or raised.
use std::{cell::RefCell, rc::Rc};

use faststep::trace::{Host, LossCall, LossOutput, UpdateCall, UpdateOutput};
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

impl Host for PythonHost {
    fn loss(&self, call: LossCall) -> MlxResult<LossOutput> {
        self.run(|py, current| current.loss(py, call))
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

fn expected(what: &str) -> PyErr {
    PyTypeError::new_err(format!("expected {what}"))
}

impl Current {
    fn loss(&mut self, py: Python<'_>, call: LossCall) -> Result<LossOutput, Stop> {
        let model = self.model.bind(py).clone();
        let (before, slots) = Tree::record(&model, Scope::Whole)?;
        let snapshot = Snapshot::take(&model)?;
        let keys = self.key_list.bind(py).clone();
        let key = keys.get_item(0)?;
        let outcome = self.traced_loss(py, call, &before, &slots);
        if outcome.is_err() || self.restore {
            snapshot.restore()?;
        } else {
            for slot in &slots {
                slot.place.set(&slot.object)?;
            }
        }
        keys.set_item(0, key)?;
        outcome
    }

    fn traced_loss(
        &mut self,
        py: Python<'_>,
        call: LossCall,
        before: &Tree,
        slots: &[Slot<'_>],
    ) -> Result<LossOutput, Stop> {
        let roles = self.roles.clone();
        let tracer = |role: Role| match role {
            Role::Parameter(i) => &call.parameters[i],
            Role::Other(i) => &call.others[i],
        };
        for (slot, (role, _)) in slots.iter().zip(roles.iter()) {
            slot.place.set(&bridge::wrap(py, tracer(*role))?)?;
        }
        let keys = self.key_list.bind(py).clone();
        keys.set_item(0, bridge::wrap(py, call.key)?)?;

        let Read { loss, weight, aux } = self.call_loss(py, call.batch)?;

        let mut output = LossOutput {
            weight,
            aux,
            ..LossOutput::new(loss)
        };
        for (slot, (role, path)) in slots.iter().zip(roles.iter()) {
            let tracer = tracer(*role);
            let now = slot.place.get()?.and_then(|object| bridge::get(&object));
            let Some(now) = now else {
                return Err(Stop::Untraceable(format!("it removes {}", dotted(path))));
            };
            if faststep::array::id(&now) == faststep::array::id(tracer) {
                continue;
            }
            let now = if self.mixed && now.dtype().is_float() && tracer.dtype().is_float() {
                now.as_dtype(tracer.dtype()).map_err(failed)?
            } else {
                now
            };
            if now.shape() != tracer.shape() || now.dtype() != tracer.dtype() {
                let name = dotted(path);
                let what = format!("it assigns an array of another shape or dtype to {name}");
                match role {
                    Role::Parameter(_) => return Err(Stop::Untraceable(what)),
                    Role::Other(_) if self.compiled => return Err(Stop::Becomes(what)),
                    Role::Other(_) => {}
                }
            }
            match role {
                Role::Parameter(i) => output.parameters.push((*i, now)),
                Role::Other(i) => output.others.push((*i, now)),
            }
        }
        let key = bridge::get(&keys.get_item(0)?);
        output.key = key.filter(|key| faststep::array::id(key) != faststep::array::id(call.key));
        self.kept(py, before, &mut output)?;
        Ok(output)
    }

    // arrays that the loss stored on the model beside its slots
    fn kept(&self, py: Python<'_>, before: &Tree, output: &mut LossOutput) -> Result<(), Stop> {
        let (after, slots) = Tree::record(self.model.bind(py), Scope::Whole)?;
        if after.tensors().len() == before.tensors().len() {
            return Ok(());
        }
        let known = before.paths(py);
        for (path, slot) in after.paths(py).iter().zip(&slots) {
            if known.contains(path) {
                continue;
            }
            if self.compiled {
                let what = format!("it stores a new array on the model: {}", dotted(path));
                return Err(Stop::Untraceable(what));
            }
            output.kept.extend(bridge::get(&slot.object));
        }
        Ok(())
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
        let hole = bridge::wrap(returned.py(), &faststep::array::hollow())?;
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
            if faststep::array::id(&now) != faststep::array::id(tracer) {
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
