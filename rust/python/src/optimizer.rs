//! Python optimizers: as a rule of the engine, or traced; their schedules. Uses `tree` and `mlx`.
use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet},
};

use faststep::{
    engine::{Attributes, Rules},
    Optimizer as Rule,
};
use mlx_rs::{ops, transforms::async_eval, Array};
use pyo3::{
    exceptions::{PyRuntimeError, PyTypeError},
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

// the name of an optimizer's class, where it is one of MLX's own
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

/// The engine's rules for an optimizer, of which every part is of exactly one of MLX's classes; `None` for every other.
///
/// `trainable`: makes the parameters' tree, for the predicates of a `MultiOptimizer`; `paths`: where its arrays stand.
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

/// The engine's rule for an optimizer of exactly one of MLX's classes that update; `None` for every other.
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
        // looked for where it is: the error of an attribute that is missing takes a microsecond
        let attributes = bridge::attributes(optimizer)?;
        return attributes.get_item(name).ok()??.cast_into().ok();
    }
    optimizer.getattr_opt(name).ok()??.cast_into().ok()
}

/// The optimizer and, of a `MultiOptimizer`, those in it: their schedules are called by the step.
#[pyfunction(name = "optimizers_of")]
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

// MLX's own schedules are traceable; the schedules that they join have to be traceable too
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

/// The learning rate's schedule, where it can be computed on the device.
pub fn traceable_rate<'py>(optimizer: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    let all = schedulers(optimizer).ok()?;
    let rate = all.into_iter().find(|(name, _)| name == "learning_rate");
    rate.map(|(_, schedule)| schedule).filter(is_traceable)
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

thread_local! {
    static READ: Cell<bool> = const { Cell::new(false) };
}

/// Note that the state of an optimizer is read in this thread, where its step is under way.
pub fn note_read() {
    READ.set(true);
}

/// Return whether that happens while `work` runs, and what that returns.
pub fn reads<T>(work: impl FnOnce() -> T) -> (bool, T) {
    let before = READ.replace(false);
    let done = work();
    (READ.replace(before), done)
}

/// The optimizers within one, itself too, and objects in it that lead to another: what they keep is known to its step.
#[pyfunction]
pub fn optimizers_within<'py>(optimizer: &Bound<'py, PyAny>) -> Vec<Bound<'py, PyAny>> {
    within(optimizer)
}

/// An update of an optimizer under way that is traced: the addresses of those within it, and the class of one that is none of them.
struct Traced {
    known: HashSet<usize>,
    stray: Option<String>,
}

thread_local! {
    static TRACED: RefCell<Option<Traced>> = const { RefCell::new(None) };
}

/// While an update is traced in this thread, refuse the state of an optimizer that is none of those within the one that updates: it
/// would keep arrays of the trace.
pub fn check_traced(optimizer: &Bound<'_, PyAny>) -> PyResult<()> {
    let is_stray = TRACED.with_borrow(|traced| {
        let traced = traced.as_ref();
        traced.is_some_and(|traced| !traced.known.contains(&optimizer.as_ptr().addr()))
    });
    if !is_stray {
        return Ok(());
    }
    let class = optimizer.get_type().name()?.to_string();
    TRACED.with_borrow_mut(|traced| {
        if let Some(traced) = traced {
            traced.stray.get_or_insert(class);
        }
    });
    let message = "an optimizer that no attribute leads to updates in a trace";
    Err(PyRuntimeError::new_err(message))
}

/// Trace an update of an optimizer by its own code: the class of one that is none of those within it and would have updated too, and
/// what `work` returns.
pub fn trace_update<T>(
    optimizer: &Bound<'_, PyAny>,
    work: impl FnOnce() -> T,
) -> (Option<String>, T) {
    let known = within(optimizer).into_iter().map(|it| it.as_ptr().addr());
    let new = Traced {
        known: known.collect(),
        stray: None,
    };
    let before = TRACED.replace(Some(new));
    let done = work();
    let stray = TRACED.replace(before).and_then(|traced| traced.stray);
    (stray, done)
}

// an object that is in just one of two dicts, or another in each
fn differing<'py>(before: &Bound<'py, PyDict>, now: &Bound<'py, PyDict>) -> Vec<Bound<'py, PyAny>> {
    let is_same =
        |dict: &Bound<'py, PyDict>, key: &Bound<'py, PyAny>, value: &Bound<'py, PyAny>| {
            dict.get_item(key)
                .is_ok_and(|it| it.is_some_and(|it| it.is(value)))
        };
    let new = now
        .iter()
        .filter(|(key, value)| !is_same(before, key, value));
    let gone = before
        .iter()
        .filter(|(key, value)| !is_same(now, key, value));
    new.chain(gone).map(|(key, _)| key).collect()
}

// true if this code, or that of a function in it, names the attribute
fn names(code: &Bound<'_, PyAny>, name: &Bound<'_, PyAny>) -> PyResult<bool> {
    if code
        .getattr(intern!(code.py(), "co_names"))?
        .contains(name)?
    {
        return Ok(true);
    }
    for inner in code.getattr(intern!(code.py(), "co_consts"))?.try_iter()? {
        let inner = inner?;
        if inner.hasattr(intern!(code.py(), "co_names"))? && names(&inner, name)? {
            return Ok(true);
        }
    }
    Ok(false)
}

// true if the code of an optimizer's class names this attribute: by itself, or by a property
fn is_option(class: &Bound<'_, PyType>, name: &Bound<'_, PyAny>) -> PyResult<bool> {
    for class in class.mro() {
        let attributes = class.getattr(intern!(class.py(), "__dict__"))?;
        for value in attributes.call_method0("values")?.try_iter()? {
            let value = value?;
            let getter = value.getattr_opt(intern!(class.py(), "fget"))?;
            let function = getter.unwrap_or(value);
            let Some(code) = function.getattr_opt(intern!(class.py(), "__code__"))? else {
                continue;
            };
            if names(&code, name)? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// What an optimizer and those in it read as they update: the options of MLX's, and of any the arrays in the state that are no
/// parameter's.
///
/// An optimizer of the user's own reads its attributes itself as it updates.
pub struct Settings<'py>(Vec<Setting<'py>>);

struct Setting<'py> {
    class: Bound<'py, PyType>,
    state: Bound<'py, PyDict>,
    options: Bound<'py, PyDict>,
}

impl<'py> Settings<'py> {
    /// Note the objects.
    pub fn of(optimizer: &Bound<'py, PyAny>) -> PyResult<Self> {
        let mut all = Vec::new();
        for member in members(optimizer) {
            let kept = PyDict::new(member.py());
            for (name, value) in state(&member).iter().flatten() {
                if bridge::is_array(&value) {
                    kept.set_item(name, value)?;
                }
            }
            let options = class_of_mlx(&member).and_then(|_| bridge::attributes(&member));
            all.push(Setting {
                class: member.get_type(),
                state: kept,
                options: options.map_or_else(|| Ok(PyDict::new(member.py())), |it| it.copy())?,
            });
        }
        Ok(Self(all))
    }

    /// Return whether one of them is another object now; an attribute that the code of MLX's does not name is none.
    pub fn differ(&self, now: &Self) -> PyResult<bool> {
        if self.0.len() != now.0.len() {
            return Ok(true);
        }
        for (before, now) in self.0.iter().zip(&now.0) {
            if !differing(&before.state, &now.state).is_empty() {
                return Ok(true);
            }
            for name in differing(&before.options, &now.options) {
                if is_option(&now.class, &name)? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}

/// What stood in an optimizer's state before a schedule was called, or what that has put there.
pub struct Replaced {
    state: Py<PyDict>,
    name: String,
    value: Option<Py<PyAny>>,
}

impl Replaced {
    /// Put the one in the place of the other.
    pub fn swap(&mut self, py: Python<'_>) -> PyResult<()> {
        let state = self.state.bind(py);
        let now = state.get_item(&self.name)?.map(Bound::unbind);
        match std::mem::replace(&mut self.value, now) {
            Some(value) => state.set_item(&self.name, value),
            None => state.del_item(&self.name),
        }
    }
}

/// Schedules that are called on the host, and what they replaced in the optimizer's state.
pub struct HostSchedules<'py> {
    found: Vec<(Bound<'py, PyAny>, String, Bound<'py, PyAny>)>, // optimizer, name, schedule
    old: Vec<Option<Bound<'py, PyAny>>>, // the value of each, as far as they have been called
}

impl<'py> HostSchedules<'py> {
    /// Find them.
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

    /// The roots of a look at what they reach; none where there is no schedule. In the place of a model there is nothing: they read
    /// one as any other object.
    pub fn roots(&self) -> Option<Vec<Bound<'py, PyAny>>> {
        let functions = self.found.iter().map(|(_, _, schedule)| schedule.clone());
        let mut roots: Vec<_> = functions.collect();
        let none = roots.first()?.py().None().into_bound(roots[0].py());
        roots.insert(1, none);
        Some(roots)
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

    /// What `call` replaced, for a loss that reads it: in the plain loop a schedule is called behind that.
    pub fn replaced(&self) -> PyResult<Vec<Replaced>> {
        let pairs = self.found.iter().zip(&self.old);
        let replaced = pairs.map(|((optimizer, name, _), old)| {
            Ok(Replaced {
                state: state(optimizer)?.unbind(),
                name: name.clone(),
                value: old.as_ref().map(|old| old.clone().unbind()),
            })
        });
        replaced.collect()
    }

    /// Put back what `call` replaced.
    pub fn undo(self) -> PyResult<()> {
        for ((optimizer, name, _), old) in self.found.into_iter().zip(self.old) {
            match old {
                Some(old) => state(&optimizer)?.set_item(name, old)?,
                None => state(&optimizer)?.del_item(name)?,
            }
        }
        Ok(())
    }

    /// Put the rates back after a step whose update was missed, as the number of updates is.
    pub fn settle(&self, missed: &Array) -> PyResult<()> {
        for ((optimizer, name, _), old) in self.found.iter().zip(&self.old) {
            let state = state(optimizer)?;
            let old = old.as_ref().and_then(bridge::get);
            let new = state.get_item(name)?.as_ref().and_then(bridge::get);
            if let (Some(old), Some(new)) = (old, new) {
                let old = old.as_dtype(new.dtype()).map_err(mlx)?;
                let rate = ops::select(missed, old, new).map_err(mlx)?;
                unlocked(state.py(), || async_eval([&rate])).map_err(mlx)?; // or it would hold all that came before it
                state.set_item(name, bridge::wrap(state.py(), &rate)?)?;
            }
        }
        Ok(())
    }

    /// Replace each schedule, while the optimizer is traced, by the value that `call` put into the state.
    pub fn hold(&self) -> PyResult<()> {
        for (optimizer, name, _) in &self.found {
            let schedulers = optimizer.getattr(intern!(optimizer.py(), "_schedulers"))?;
            let value = state(optimizer)?.as_any().get_item(name)?.unbind();
            let held = pyo3::types::PyCFunction::new_closure(
                optimizer.py(),
                None,
                None,
                move |args: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| {
                    value.clone_ref(args.py())
                },
            )?;
            schedulers.set_item(name, held)?;
        }
        Ok(())
    }

    /// Put the schedules back that `hold` replaced.
    pub fn let_go(&self) -> PyResult<()> {
        for (optimizer, name, schedule) in &self.found {
            let schedulers = optimizer.getattr(intern!(optimizer.py(), "_schedulers"))?;
            schedulers.set_item(name, schedule)?;
        }
        Ok(())
    }
}
