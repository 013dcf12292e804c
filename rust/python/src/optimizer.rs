//! Python optimizers: their rules in the engine, their parts and their schedules. Uses `tree` and `mlx`.
use std::collections::HashMap;

use faststep::{
    engine::{Attributes, Rules},
    Optimizer as Rule,
};
use mlx_rs::{ops, transforms::async_eval, Array};
use pyo3::{
    exceptions::PyTypeError,
    intern,
    prelude::*,
    types::{PyDict, PyFloat, PyFunction, PyInt, PyList, PyTuple, PyType},
};

use crate::{
    mlx::{bridge, classes::is_numpy_float, errors::mlx, gil::unlocked},
    tree::{
        walk::{optimizers_within as within, Scope},
        Tree,
    },
};

fn is_class_of_mlx(class: &Bound<'_, PyType>) -> bool {
    let module = class.module().ok();
    module.is_some_and(|module| module.to_str().ok() == Some("mlx.optimizers.optimizers"))
}

// the name of an optimizer's class, if it is one of MLX and none of its methods is replaced
fn class_of_mlx(optimizer: &Bound<'_, PyAny>) -> Option<String> {
    let class = optimizer.get_type();
    let of_mlx = |object: &Bound<'_, PyAny>| {
        let module = object.getattr(intern!(object.py(), "__module__"));
        module.is_ok_and(|module| module.eq("mlx.optimizers.optimizers").unwrap_or(false))
    };
    let attributes = optimizer
        .getattr(intern!(optimizer.py(), "__dict__"))
        .ok()?;
    let methods = ["update", "apply_gradients", "apply_single", "init_single"];
    let own = is_class_of_mlx(&class)
        && methods.iter().all(|name| {
            let replaced = attributes.contains(name).unwrap_or(true);
            !replaced && class.getattr(*name).is_ok_and(|method| of_mlx(&method))
        });
    own.then(|| class.name().ok()?.extract().ok()).flatten()
}

/// The engine's rules for an optimizer; `None` unless each part of it is exactly of a class of MLX.
///
/// `trainable`: makes the parameters' tree, for the predicates of a `MultiOptimizer`; `paths`: the path to each array in it.
pub fn native_rules<'py>(
    optimizer: &Bound<'py, PyAny>,
    paths: &[Vec<String>],
    trainable: impl FnOnce() -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Option<Rules>> {
    if children(optimizer).is_none() {
        return Ok(native_rule(optimizer).map(|rule| Rules::one(rule, paths.len())));
    }
    let mut parts = Vec::new();
    split(optimizer, &trainable()?, &mut parts)?;
    let places: HashMap<_, _> = paths.iter().zip(0..).collect();
    let mut of = vec![None; paths.len()];
    let mut rules = Vec::with_capacity(parts.len());
    for (number, (part, tree)) in parts.iter().enumerate() {
        let known = parts[..number].iter().any(|(other, _)| other.is(part));
        let Some(rule) = native_rule(part).filter(|_| !known) else {
            return Ok(None);
        };
        rules.push(rule);
        for path in Tree::record(tree, Scope::Whole)?.0.paths(tree.py()) {
            if let Some(&at) = places.get(&path) {
                of[at] = Some(number);
            }
        }
    }
    let of: Option<Vec<usize>> = of.into_iter().collect();
    Ok(of.map(|of| Rules::new(rules, of)))
}

// the optimizers that update, each with its part of the parameters
fn split<'py>(
    optimizer: &Bound<'py, PyAny>,
    trainable: &Bound<'py, PyAny>,
    parts: &mut Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
) -> PyResult<()> {
    let multi = class_of_mlx(optimizer).as_deref() == Some("MultiOptimizer");
    let Some(children) = children(optimizer).filter(|_| multi) else {
        parts.push((optimizer.clone(), trainable.clone()));
        return Ok(());
    };
    let method = intern!(optimizer.py(), "_split_dictionary");
    let trees = optimizer.call_method1(method, (trainable,))?;
    for (child, tree) in children.iter().zip(trees.try_iter()?) {
        split(&child, &tree?, parts)?;
    }
    Ok(())
}

/// The engine's rule for an optimizer; `None` unless it is exactly of a class of MLX that updates by itself.
pub fn native_rule(optimizer: &Bound<'_, PyAny>) -> Option<Rule> {
    let class = class_of_mlx(optimizer)?;
    let scheduled = schedulers(optimizer).ok()?;
    let only_rate = scheduled.iter().all(|(name, _)| name == "learning_rate");
    let read = || Rule::read(&class, &Fields(optimizer));
    only_rate.then(read).flatten()
}

/// The attributes of a Python optimizer. An array is not read: its value may change unnoticed.
struct Fields<'a, 'py>(&'a Bound<'py, PyAny>);

impl<'py> Fields<'_, 'py> {
    fn get<T: FromPyObjectOwned<'py>>(&self, name: &str) -> Option<T> {
        self.0.getattr(name).ok()?.extract().ok()
    }
}

fn number(value: &Bound<'_, PyAny>) -> Option<f64> {
    let plain = value.is_instance_of::<PyFloat>()
        || value.is_instance_of::<PyInt>()
        || is_numpy_float(value);
    plain.then(|| value.extract().ok()).flatten()
}

impl Attributes for Fields<'_, '_> {
    fn number(&self, name: &str) -> Option<f64> {
        number(&self.0.getattr(name).ok()?)
    }

    fn pair(&self, name: &str) -> Option<(f64, f64)> {
        let [first, second] = self.get(name)?;
        Some((first, second))
    }

    fn count(&self, name: &str) -> Option<usize> {
        self.get(name)
    }

    fn flag(&self, name: &str) -> Option<bool> {
        self.get(name)
    }

    fn optional(&self, name: &str) -> Option<Option<f64>> {
        let value = self.0.getattr(name).ok()?;
        if value.is_none() {
            return Some(None);
        }
        number(&value).map(Some)
    }

    fn keeps(&self, name: &str) -> bool {
        state(self.0).is_ok_and(|state| state.contains(name).is_ok_and(|has| has))
    }
}

/// The optimizers that a `MultiOptimizer` delegates to.
pub fn children<'py>(optimizer: &Bound<'py, PyAny>) -> Option<Bound<'py, PyList>> {
    let name = intern!(optimizer.py(), "optimizers");
    if is_class_of_mlx(&optimizer.get_type()) {
        // read from the dict: the error of an attribute that is missing takes a microsecond
        let attributes = bridge::attributes(optimizer)?;
        return attributes.get_item(name).ok()??.cast_into().ok();
    }
    optimizer.getattr_opt(name).ok()??.cast_into().ok()
}

/// The optimizer and, in a `MultiOptimizer`, those that it delegates to.
pub fn members<'py>(optimizer: &Bound<'py, PyAny>) -> Vec<Bound<'py, PyAny>> {
    let mut all = vec![optimizer.clone()];
    for child in children(optimizer).iter().flatten() {
        all.extend(members(&child));
    }
    all
}

/// List the members that update, in the order of their rules.
pub fn leaves<'py>(optimizer: &Bound<'py, PyAny>) -> Vec<Bound<'py, PyAny>> {
    match children(optimizer) {
        Some(children) => children.iter().flat_map(|child| leaves(&child)).collect(),
        None => vec![optimizer.clone()],
    }
}

fn schedulers<'py>(optimizer: &Bound<'py, PyAny>) -> PyResult<Vec<(String, Bound<'py, PyAny>)>> {
    let schedulers = optimizer.getattr(intern!(optimizer.py(), "_schedulers"))?;
    let schedulers = schedulers.cast::<PyDict>()?;
    let pairs = schedulers
        .iter()
        .map(|(name, schedule)| Ok((name.extract()?, schedule)));
    pairs.collect()
}

// schedules of MLX are traceable; the schedules that they join have to be traceable too
fn is_traceable(schedule: &Bound<'_, PyAny>) -> bool {
    let module = schedule
        .getattr("__module__")
        .and_then(|m| m.extract::<String>());
    if !matches!(module.as_deref(), Ok("mlx.optimizers.schedulers")) {
        return false;
    }
    let Ok(closure) = schedule.getattr("__closure__") else {
        return false;
    };
    let Ok(closure) = closure.cast::<PyTuple>() else {
        return true;
    };
    closure.iter().all(|cell| {
        let Ok(content) = cell.getattr("cell_contents") else {
            return false;
        };
        let Ok(list) = content.cast::<PyList>() else {
            return !content.is_instance_of::<PyFunction>() && !content.is_callable();
        };
        list.iter()
            .all(|item| !item.is_callable() || is_traceable(&item))
    })
}

/// The learning rate's schedule, if it can be computed on the device.
pub fn traceable_rate<'py>(optimizer: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    let all = schedulers(optimizer).ok()?;
    let rate = all.into_iter().find(|(name, _)| name == "learning_rate");
    rate.map(|(_, schedule)| schedule).filter(is_traceable)
}

/// The learning rates' schedules that are computed on the device, of each member that updates; None where there is none.
pub fn traceable_rates<'py>(optimizer: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(optimizer.py(), leaves(optimizer).iter().map(traceable_rate))
}

/// The dict behind `optimizer.state`, as it is: a look at the attribute would make it current.
pub fn state<'py>(optimizer: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    let name = intern!(optimizer.py(), "_state");
    let own = bridge::attributes(optimizer).map(|attributes| attributes.get_item(name));
    let state = own.transpose()?.flatten();
    Ok(state
        .map_or_else(|| optimizer.getattr(name), Ok)?
        .cast_into()?)
}

/// List an optimizer, those in it, and the objects in it that refer to others.
#[pyfunction]
pub fn optimizers_within<'py>(optimizer: &Bound<'py, PyAny>) -> Vec<Bound<'py, PyAny>> {
    within(optimizer)
}

/// Schedules that are called on the host, and the values that they replaced in the optimizer's state.
pub struct HostSchedules<'py> {
    found: Vec<(Bound<'py, PyAny>, String, Bound<'py, PyAny>)>, // optimizer, name, schedule
    old: Vec<Option<Bound<'py, PyAny>>>, // the value of each, once they have been called
}

impl<'py> HostSchedules<'py> {
    /// Find the schedules of an optimizer.
    pub fn of(optimizer: &Bound<'py, PyAny>) -> Self {
        let mut found = Vec::new();
        for member in members(optimizer) {
            for (name, schedule) in schedulers(&member).unwrap_or_default() {
                if !is_traceable(&schedule) {
                    found.push((member.clone(), name, schedule));
                }
            }
        }
        Self {
            found,
            old: Vec::new(),
        }
    }

    /// Return whether there are any.
    pub fn are_there(&self) -> bool {
        !self.found.is_empty()
    }

    /// Call each with the number of updates so far, and put the value where the optimizer looks for it.
    pub fn call(&mut self) -> PyResult<()> {
        for (optimizer, name, schedule) in &self.found {
            let state = state(optimizer)?;
            let value = schedule.call1((state.get_item("step")?,))?;
            if !bridge::is_array(&value) {
                return Err(PyTypeError::new_err(format!(
                    "the schedule of {name}: expected mx.array, got {}: return mx.array(...)",
                    value.get_type().fully_qualified_name()?
                )));
            }
            self.old.push(state.get_item(name)?);
            state.set_item(name, value)?;
        }
        Ok(())
    }

    /// Put back the values that `call` replaced.
    pub fn undo(self) -> PyResult<()> {
        for ((optimizer, name, _), old) in self.found.into_iter().zip(self.old) {
            match old {
                Some(old) => state(&optimizer)?.set_item(name, old)?,
                None => state(&optimizer)?.del_item(name)?,
            }
        }
        Ok(())
    }

    /// Put the rates back if the update was missed, which an array on the device tells.
    pub fn settle(&self, missed: &Array) -> PyResult<()> {
        for ((optimizer, name, _), old) in self.found.iter().zip(&self.old) {
            let state = state(optimizer)?;
            let old = old.as_ref().and_then(bridge::get);
            let new = state.get_item(name)?.as_ref().and_then(bridge::get);
            if let (Some(old), Some(new)) = (old, new) {
                let old = old.as_dtype(new.dtype()).map_err(mlx)?;
                let rate = ops::select(missed, old, new).map_err(mlx)?;
                unlocked(state.py(), || async_eval([&rate])).map_err(mlx)?; // a lazy one would hold all that it is computed from
                state.set_item(name, bridge::wrap(state.py(), &rate)?)?;
            }
        }
        Ok(())
    }
}
