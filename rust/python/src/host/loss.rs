//! One call of the loss function, with tracers in place of the arrays.
use std::collections::{HashMap, HashSet};

use faststep::engine::{Left, LossCall, LossOutput, Role};
use mlx_rs::{error::Exception, Array};
use pyo3::{
    exceptions::{PyRuntimeError, PyTypeError, PyValueError},
    prelude::*,
    types::{PyDict, PyTuple},
};

use super::{
    expected,
    shown::{Renewed, Shown},
    stop, Current,
};
use crate::mlx::collector::{Collector, Refers, Visited};
use crate::{
    mlx::{bridge, classes::has_own_methods},
    optimizer::{reads, Settings},
    reach::stop::{another, Stop},
    tree::{
        paths::dotted,
        rebuild::rebuild,
        slot::{Place, Slot},
        Tree,
    },
};

/// Parsed return value of a loss function.
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

/// A list, dict or module of the model, and the one that the loss has put in its place, with the arrays that the first had.
pub struct Swapped {
    parent: Py<PyAny>,
    key: Py<PyAny>,
    old: Py<PyAny>,
    new: Py<PyAny>,
    arrays: Vec<(Py<PyAny>, Array)>,
}

impl Refers for Swapped {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.parent.visit(collector)?;
        self.old.visit(collector)?;
        self.new.visit(collector)
    }
}

impl Swapped {
    fn new<'py>(
        place: &Place<'py>,
        old: Bound<'py, PyAny>,
        new: Bound<'py, PyAny>,
        arrays: Vec<(Py<PyAny>, Array)>,
    ) -> PyResult<Option<Self>> {
        let key = place.key(old.py())?;
        let (old, new) = (old.unbind(), new.unbind());
        Ok(place.object().zip(key).map(|(parent, key)| Self {
            parent: parent.unbind(),
            key,
            old,
            new,
            arrays,
        }))
    }

    /// Behind the step, put the second where the loss has put it, with the arrays that the first has by then.
    pub fn settle(self, py: Python<'_>) -> PyResult<()> {
        let (old, new) = (self.old.bind(py), self.new.bind(py));
        for (key, array) in &self.arrays {
            new.set_item(key, old.get_item(key)?)?;
            old.set_item(key, bridge::wrap(py, array)?)?;
        }
        self.parent.bind(py).set_item(self.key, new)
    }
}

#[allow(clippy::needless_pass_by_value)] // for map_err
fn failed(error: Exception) -> Stop {
    Stop::Raised(PyValueError::new_err(error.what().to_owned()))
}

impl Current {
    // put tracers into the model's slots, call the loss, and collect its assignments to parameters
    pub(super) fn loss(&mut self, py: Python<'_>, call: LossCall) -> Result<LossOutput, Stop> {
        let (tree, slots) = Tree::of_model(self.model.bind(py))?;
        let roles = self.roles.clone();
        let tracer = |role: Role| match role {
            Role::Parameter(i) => &call.parameters[i],
            Role::Other(i) => &call.others[i],
        };
        for (slot, (role, _)) in slots.iter().zip(roles.iter()) {
            slot.place.set(&bridge::wrap(py, tracer(*role))?)?;
        }
        let model = self.model.bind(py);
        if has_own_methods(model, &["update"]) {
            let trained = model.call_method0("trainable_parameters")?;
            model.call_method1("update", (trained,))?; // as `nn.value_and_grad` calls it
        }
        self.key_list
            .bind(py)
            .set_item(0, bridge::wrap(py, call.key)?)?;

        let Read { loss, weight, aux } = self.call_loss(py, call.batch)?;
        let swapped = self.put_places(py, &slots)?;
        self.swapped = swapped;

        let mut output = LossOutput {
            weight,
            aux,
            ..LossOutput::new(loss)
        };
        for (number, (slot, (role, path))) in slots.iter().zip(roles.iter()).enumerate() {
            if let Role::Parameter(index) = role {
                let last = tree.last_place(number);
                if last != number && roles[last].0 == *role {
                    continue; // another name of the same
                }
                let shown = tracer(roles[last].0);
                let rebound = self.rebound(slot, shown, *role, path)?;
                output.parameters.extend(rebound.map(|now| (*index, now)));
            }
        }
        Ok(output)
    }

    // a trained array has to be in its place when the update comes: a list, dict or module that the loss has put in the place of
    // the one that it is in gives its items to that one, which comes back until the step is done
    fn put_places<'py>(&self, py: Python<'py>, slots: &[Slot<'py>]) -> Result<Vec<Swapped>, Stop> {
        let mut swapped = Vec::new();
        loop {
            let model = self.model.bind(py);
            let (after, now) = Tree::of_model(model)?;
            let container = |slot: &Slot<'_>| slot.place.container();
            if now.len() == slots.len() && now.iter().map(container).eq(slots.iter().map(container))
            {
                return Ok(swapped);
            }
            let paths = after.paths(py);
            let at: HashMap<_, _> = paths.iter().zip(&now).collect();
            let here: HashSet<_> = now.iter().map(container).collect();
            let mut trained = slots.iter().zip(self.roles.iter());
            let gone = trained.find(|(slot, (role, path))| {
                let other = at.get(path).map(|now| container(now) != container(slot));
                matches!(role, Role::Parameter(_))
                    && other.unwrap_or_else(|| !here.contains(&container(slot)))
            });
            let Some((slot, (_, path))) = gone else {
                return Ok(swapped);
            };
            let Some(there) = at.get(path) else {
                return Err(Stop::Untraceable(format!("it removes {}", dotted(path))));
            };
            if self.compiled {
                return Err(Stop::Untraceable(format!(
                    "it puts another list or dict in the place of the one that {} is in",
                    dotted(path)
                )));
            }
            let mut arrays = Vec::new();
            for (other, (_, path)) in slots.iter().zip(self.roles.iter()) {
                let Some(now) = at.get(path).filter(|_| container(other) == container(slot)) else {
                    continue;
                };
                if container(now) == container(there) {
                    other.place.set(&now.object)?;
                    let key = other.place.key(py)?;
                    arrays.extend(key.zip(bridge::get(&other.object)));
                }
            }
            let containers = slot.place.object().zip(there.place.object());
            let parts = path.split_last().map(|(_, parts)| parts);
            let place = parts.and_then(|parts| Place::at(model, parts));
            let place = place.filter(|place| {
                let object = place.get().ok().flatten();
                object.is_some_and(|object| object.as_ptr().addr() == container(there))
            });
            let (Some((old, new)), Some(place)) = (containers, place) else {
                return Err(Stop::Raised(PyValueError::new_err(format!(
                    "the loss function: it puts another tuple in the place of the one on the model that {} is in, which is \
                     trained: assign to the items",
                    dotted(path)
                ))));
            };
            place.set(&old)?;
            swapped.extend(Swapped::new(&place, old, new, arrays)?);
        }
    }

    // the array that replaced the tracer in a slot, cast to its dtype in mixed precision
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
            let what = another(&name, tracer, &now);
            match role {
                Role::Parameter(_) => {
                    return Err(Stop::Untraceable(format!(
                        "{what}, which is trained: freeze it, `model.freeze(keys=[...])`, or give its name an underscore in front"
                    )))
                }
                Role::Other(_) if self.compiled && !self.reshapes => {
                    return Err(Stop::Reshapes(what))
                }
                Role::Other(_) => {}
            }
        }
        Ok(Some(now))
    }

    // the assignments of the loss, including those of parts called again for the gradients
    pub(super) fn left<'py>(
        &self,
        py: Python<'py>,
        before: &Tree,
        slots: &[Slot<'py>],
        others: &[Array],
        key: &Array,
    ) -> Result<Left, Stop> {
        let mut left = Left::default();
        let (after, after_slots) = Tree::of_model(self.model.bind(py))?;
        // uncompiled, another dict or list may have come to the place of one
        let paths = if self.compiled {
            Vec::new()
        } else {
            after.paths(py)
        };
        let at: HashMap<_, _> = paths.iter().zip(&after_slots).collect();
        for (number, (slot, (role, path))) in slots.iter().zip(self.roles.iter()).enumerate() {
            if let Role::Other(index) = role {
                if !self.compiled && !slot.place.holds_array()? {
                    continue; // the loss has taken it out or put something else there, as the plain loop lets it
                }
                let slot = at.get(path).copied().unwrap_or(slot);
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
        left.kept = self.kept(py, before, (&after, &after_slots))?;
        Ok(left)
    }

    // arrays that the loss stored on the model beside its slots
    fn kept(
        &self,
        py: Python<'_>,
        before: &Tree,
        (after, slots): (&Tree, &[Slot<'_>]),
    ) -> Result<Vec<Array>, Stop> {
        if self.compiled && after.tensors().len() == before.tensors().len() {
            return Ok(Vec::new()); // where one has gone too, that ends the trace
        }
        let known: HashSet<_> = before.paths(py).into_iter().collect();
        let mut kept = Vec::new();
        for (path, slot) in after.paths(py).iter().zip(slots) {
            if known.contains(path) {
                continue;
            }
            if self.compiled {
                let what = format!("it stores a new array on the model: {}", dotted(path));
                return Err(Stop::Stores(what));
            }
            kept.extend(bridge::get(&slot.object));
        }
        Ok(kept)
    }

    // the arrays that the model has now, uncompiled, where dicts or lists of it may be passed
    fn given_of_model(&self, py: Python<'_>) -> PyResult<HashSet<usize>> {
        if self.compiled || !self.looked.is_given_containers() {
            return Ok(HashSet::new());
        }
        let (_, slots) = Tree::of_model(self.model.bind(py))?;
        let ids = slots.iter().map(|slot| bridge::id(&slot.object));
        Ok(ids.flatten().collect())
    }

    fn call_loss<'py>(&mut self, py: Python<'py>, batch: &[Array]) -> Result<Read, Stop> {
        let mut tracers = batch.iter();
        let own = self.arguments.bind(py).as_any();
        let of_model = self.given_of_model(py)?;
        let mut shown = |object: &Bound<'py, PyAny>| {
            let tracer = tracers.next().ok_or_else(|| expected("another batch"))?;
            if !of_model.is_empty() && bridge::id(object).is_some_and(|id| of_model.contains(&id)) {
                return Ok(object.clone());
            }
            bridge::wrap(py, tracer)
        };
        let mut renewed = Renewed::default();
        let converted = (!self.arguments.is(&self.own)).then(|| self.own.bind(py));
        let copied = self.compiled || self.mixed || converted.is_some();
        let arguments = if copied {
            rebuild(own, &mut shown)?
        } else {
            renewed.take(own, &mut shown)? // what the loss does to containers is the user's to see
        };
        let shown = copied.then(|| Shown::take(&arguments, converted));
        let shown = shown.transpose()?;
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
        let all = PyTuple::new(py, all)?;
        let meets = self.looked.program.meets_optimizer && !self.compiled;
        let optimizer = self.optimizer.bind(py);
        let swap = || {
            let mut replaced = self.replaced.borrow_mut();
            replaced
                .iter_mut()
                .filter(|_| meets)
                .try_for_each(|it| it.swap(py))
        };
        swap()?;
        let settings = meets.then(|| Settings::of(optimizer)).transpose()?;
        let (reads, returned) = reads(|| self.loss_fn.bind(py).call(all, Some(&named)));
        let now = meets.then(|| Settings::of(optimizer)).transpose()?;
        swap()?;
        renewed.give_back()?;
        if reads && self.compiled {
            return Err(Stop::Untraceable(
                "it reads the state of the optimizer that updates it".into(),
            ));
        }
        let returned = returned.map_err(|error| stop(py, error))?;
        if let Some((before, now)) = settings.zip(now) {
            if before.differ(&now)? {
                return Err(Stop::Raised(PyRuntimeError::new_err(
                    "the loss function: it changes an option of the optimizer that updates it, which is to be done between the steps",
                )));
            }
        }
        match shown {
            Some(shown) if self.compiled => {
                if let Some(what) = shown.written() {
                    return Err(Stop::Untraceable(format!(
                        "it writes into {what} among its arguments"
                    )));
                }
                self.taken_out = shown.taken_out();
            }
            Some(shown) => shown.give_back(self.own.bind(py).as_any())?,
            None => {}
        }
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
}
