//! The step of one model, optimizer, loss function and set of options, as Python calls it.
use std::{cell::RefCell, rc::Rc, sync::Arc, time::Instant};

use faststep::{
    guard::Guard,
    step::{Call, Output, Owner},
    trace::{Recipe, Rule, Trace},
    Error,
};
use mlx_rs::Array;
use pyo3::{
    exceptions::{PyFloatingPointError, PyRuntimeError, PyRuntimeWarning, PyValueError},
    prelude::*,
    types::{PyDict, PyTuple},
};

use crate::{
    bridge,
    errors::to_python,
    holder::{Holder, Waiting},
    host::{dotted, Current, PythonHost, Stop},
    optimizer::HostSchedules,
    registry::{self, Shared},
    store::{Prepared, Store},
    tree::Tree,
    walk::rebuild,
};

/// So many traces are kept for each step, and so many signatures for each model; the one used least recently goes first.
pub const MAX_TRACES: usize = 64;
/// So many steps may pass before it is counted which of them were skipped.
const MAX_FLAGS: usize = 256;

/// A trace, what it is valid for, and what the loss returned while it was made.
struct Entry {
    loss: usize,
    model: usize,
    options: usize,
    rule: Rule,
    batch: Tree,
    trace: Trace,
    template: Option<Py<PyAny>>,
}

/// One trace in `Step.stats`.
#[pyclass(frozen, get_all, module = "faststep._core")]
#[derive(Clone)]
pub struct TraceRecord {
    /// What made the trace necessary.
    cause: String,
    /// How long it took, first evaluation included, in seconds.
    seconds: f64,
}

/// The native part of a step.
///
/// Frozen for Python; what changes is in a cell that only the thread of the step may enter.
#[pyclass(frozen, module = "faststep._core")]
pub struct Step {
    shared: Arc<Shared>,
    inner: ThreadBound<RefCell<Inner>>,
}

struct ThreadBound<T>(T);

// SAFETY: `Store::check_thread` lets one thread in; others only drop it, under the GIL, which orders the accesses.
#[allow(unsafe_code)]
unsafe impl<T> Send for ThreadBound<T> {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl<T> Sync for ThreadBound<T> {}

struct Inner {
    max_grad_norm: Option<f64>,
    guard: Option<Guard>,
    raises: bool,
    in_flight: usize,
    compiled: bool,
    checked: bool,
    host: Rc<PythonHost>,
    entries: Vec<Entry>, // most recent last
    steps: usize,
    skipped: usize,
    flags: Vec<Array>, // of steps for which nobody has asked yet whether they were skipped
    records: Vec<TraceRecord>,
    way: &'static str,
}

#[pymethods]
impl Step {
    #[new]
    #[pyo3(signature = (model, optimizer, *, max_grad_norm, nonfinite, max_loss, compile, in_flight))]
    fn new(
        model: &Bound<'_, PyAny>,
        optimizer: &Bound<'_, PyAny>,
        max_grad_norm: Option<f64>,
        nonfinite: &str,
        max_loss: Option<f64>,
        compile: bool,
        in_flight: usize,
    ) -> PyResult<Self> {
        if let Some(norm) = max_grad_norm.filter(|norm| norm.is_nan() || *norm < 0.0) {
            return Err(PyValueError::new_err(format!(
                "max_grad_norm: expected a number from 0 on or None, got {norm}"
            )));
        }
        let guard = match (nonfinite, max_loss) {
            ("skip" | "raise", max_loss) => Some(Guard { max_loss }),
            ("allow", None) => None,
            ("allow", Some(_)) => {
                let message =
                    "max_loss: expected None with nonfinite=\"allow\", which takes every step";
                return Err(PyValueError::new_err(message));
            }
            _ => {
                return Err(PyValueError::new_err(format!(
                    "nonfinite: expected \"skip\", \"raise\" or \"allow\", got {nonfinite:?}"
                )))
            }
        };
        Ok(Self {
            shared: registry::shared(model, optimizer)?,
            inner: ThreadBound(RefCell::new(Inner {
                max_grad_norm,
                guard,
                raises: nonfinite == "raise",
                in_flight,
                compiled: compile,
                checked: false,
                host: Rc::new(PythonHost::default()),
                entries: Vec::new(),
                steps: 0,
                skipped: 0,
                flags: Vec::new(),
                records: Vec::new(),
                way: "native",
            })),
        })
    }

    /// One step: what the loss function returned, the gradients' norm before clipping, whether the step was skipped.
    fn step<'py>(
        &self,
        model: &Bound<'py, PyAny>,
        optimizer: &Bound<'py, PyAny>,
        loss_fn: &Bound<'py, PyAny>,
        loss_number: usize,
        args: &Bound<'py, PyTuple>,
        named: &Bound<'py, PyDict>,
    ) -> PyResult<Returned<'py>> {
        let user = User::new(model, optimizer, loss_fn, loss_number, args, named)?;
        self.enter(model.py(), |inner, store| {
            registry::claim(&self.shared, optimizer)?;
            inner.step(store, &user)
        })
    }

    /// What the loss function returned, and the tree of gradients.
    fn gradients<'py>(
        &self,
        model: &Bound<'py, PyAny>,
        optimizer: &Bound<'py, PyAny>,
        loss_fn: &Bound<'py, PyAny>,
        loss_number: usize,
        args: &Bound<'py, PyTuple>,
        named: &Bound<'py, PyDict>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let user = User::new(model, optimizer, loss_fn, loss_number, args, named)?;
        self.enter(model.py(), |inner, store| {
            registry::claim(&self.shared, optimizer)?;
            inner.gradients(store, &user)
        })
    }

    /// Wait for all work in flight.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        self.enter(py, |_, store| match &mut store.engine {
            Some(engine) => {
                let done = engine.synchronize(&mut Waiting(py));
                done.map_err(|e| to_python(&e))
            }
            None => Ok(()),
        })
    }

    /// Steps, those of them that were skipped, way and traces.
    fn stats(&self, py: Python<'_>) -> PyResult<(usize, usize, &'static str, Vec<TraceRecord>)> {
        self.enter(py, |inner, _| {
            inner.count(py, inner.flags.len())?;
            Ok((inner.steps, inner.skipped, inner.way, inner.records.clone()))
        })
    }
}

impl Step {
    // the one door: the right thread, and no step within a step
    fn enter<T>(
        &self,
        _py: Python<'_>,
        work: impl FnOnce(&mut Inner, &mut Store) -> PyResult<T>,
    ) -> PyResult<T> {
        let busy =
            || PyRuntimeError::new_err("a step of this model and optimizer is already running");
        let mut store = self.shared.try_borrow_mut().map_err(|_| busy())?;
        store.check_thread()?;
        let mut inner = self.inner.0.try_borrow_mut().map_err(|_| busy())?;
        work(&mut inner, &mut store)
    }
}

/// What the loss function returned, the gradients' norm, and whether the step was skipped.
type Returned<'py> = (
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
);

/// What the user passed to one call.
struct User<'py> {
    model: Bound<'py, PyAny>,
    optimizer: Bound<'py, PyAny>,
    loss_fn: Bound<'py, PyAny>,
    loss_number: usize, // equal for functions that compute the same
    arguments: Bound<'py, PyTuple>,
}

impl<'py> User<'py> {
    fn new(
        model: &Bound<'py, PyAny>,
        optimizer: &Bound<'py, PyAny>,
        loss_fn: &Bound<'py, PyAny>,
        loss_number: usize,
        args: &Bound<'py, PyTuple>,
        named: &Bound<'py, PyDict>,
    ) -> PyResult<Self> {
        let arguments = PyTuple::new(model.py(), [args.as_any(), named.as_any()])?;
        Ok(Self {
            model: model.clone(),
            optimizer: optimizer.clone(),
            loss_fn: loss_fn.clone(),
            loss_number,
            arguments,
        })
    }

    fn py(&self) -> Python<'py> {
        self.model.py()
    }

    // the arrays of the batch; none may wait for another thread
    fn batch(&self) -> PyResult<(Tree, Vec<Array>)> {
        let py = self.py();
        let named = |tree: &Tree| self.name(&tree.last_path(py));
        let (tree, slots) = Tree::record_arguments(self.arguments.as_any(), named)?;
        let arrays: Vec<Array> = slots
            .iter()
            .filter_map(|slot| bridge::get(&slot.object))
            .collect();
        for (index, array) in arrays.iter().enumerate() {
            if faststep::array::is_lazy(array) && faststep::array::is_foreign(array) {
                return Err(PyValueError::new_err(format!(
                    "argument {}: expected an evaluated array, got one that still waits to be computed on another \
                     thread: call mx.eval() on it in the thread that makes it, before it is passed on",
                    self.name(&tree.paths(py)[index])
                )));
            }
        }
        Ok((tree, arrays))
    }

    // a path as the loss function names it: x, or batch["tokens"][0]
    fn name(&self, path: &[String]) -> String {
        let mut parts = path.iter();
        let positional = parts.next().is_some_and(|first| first == "0");
        let Some(first) = parts.next() else {
            return "(the batch)".into();
        };
        let mut name = first.clone();
        if let (true, Ok(index)) = (positional, first.parse::<usize>()) {
            name = self
                .parameter(index + 1)
                .unwrap_or_else(|_| format!("{index}"));
        }
        for part in parts {
            let part = if part.parse::<usize>().is_ok() {
                format!("[{part}]")
            } else {
                format!("[{part:?}]")
            };
            name.push_str(&part);
        }
        name
    }

    fn parameter(&self, index: usize) -> PyResult<String> {
        let inspect = self.py().import("inspect")?;
        let signature = inspect.call_method1("signature", (&self.loss_fn,))?;
        let names = signature.getattr("parameters")?.try_iter()?;
        let names = names
            .map(|name| name?.extract())
            .collect::<PyResult<Vec<String>>>()?;
        let missing = || PyValueError::new_err("more arguments than the loss function has");
        names.into_iter().nth(index).ok_or_else(missing)
    }
}

impl Inner {
    fn step<'py>(&mut self, store: &mut Store, user: &User<'py>) -> PyResult<Returned<'py>> {
        let py = user.py();
        let (tree, batch) = user.batch()?;
        let mut schedules = HostSchedules::of(&user.optimizer);
        let outcome = schedules.call().and_then(|()| {
            let mut prepared = store.prepare(&user.model, &user.optimizer)?;
            let undo = prepared.undo.take();
            let outcome = self.run(store, user, &prepared, tree, &batch, true);
            if let (Err(_), Some(undo)) = (&outcome, undo) {
                undo.restore()?;
                store.forget();
            }
            let (output, new) = outcome?;
            if self.raises {
                refuse(py, store, &output)?;
            }
            store.take_output(py, &prepared, &output)?;
            if new {
                store.check_layout(py)?;
            }
            Ok(output)
        });
        if outcome.is_err() {
            schedules.undo()?;
        }
        let output = outcome?;
        self.steps += 1;
        let wrap = |array: &Option<Array>| array.as_ref().map(|a| bridge::wrap(py, a)).transpose();
        let (norm, skipped) = (wrap(&output.norm)?, wrap(&output.skipped)?);
        let returned = self.returned(py, &output)?;
        self.flags.extend(output.skipped);
        if self.flags.len() >= MAX_FLAGS {
            self.count(py, MAX_FLAGS / 2)?; // the older half is long done
        }
        Ok((returned, norm, skipped))
    }

    // reads the first flags of those that have not been read
    fn count(&mut self, py: Python<'_>, first: usize) -> PyResult<()> {
        let flags: Vec<Array> = self.flags.drain(..first).collect();
        let mut skipped = 0;
        let mut read = Ok(());
        Waiting(py).unlocked(&mut || {
            for flag in &flags {
                match flag.try_item_exact::<bool>() {
                    Ok(flag) => skipped += usize::from(flag),
                    Err(error) => read = Err(error.to_string()),
                }
            }
        });
        self.skipped += skipped;
        read.map_err(PyRuntimeError::new_err)
    }

    fn gradients<'py>(
        &mut self,
        store: &mut Store,
        user: &User<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let (tree, batch) = user.batch()?;
        let mut prepared = store.prepare(&user.model, &user.optimizer)?;
        let undo = prepared.undo.take();
        let outcome = self.run(store, user, &prepared, tree, &batch, false);
        if let Some(undo) = undo {
            undo.restore()?; // the optimizer is initialised by its first update
            store.forget();
        }
        let (output, _) = outcome?;
        let trainable = store.signature()?.trainable.bind(user.py()).clone();
        let tree = fill(&trainable, output.gradients.iter())?;
        Ok((self.returned(user.py(), &output)?, tree))
    }

    // traces where it has to and runs; once more, uncompiled, where the loss cannot be traced. True: a new trace
    fn run(
        &mut self,
        store: &mut Store,
        user: &User<'_>,
        prepared: &Prepared<'_>,
        tree: Tree,
        batch: &[Array],
        update: bool,
    ) -> PyResult<(Output, bool)> {
        let started = Instant::now();
        let mut cause = self.find(store, user, tree, update)?;
        loop {
            let stop = match self.attempt(store, user, prepared, batch) {
                Ok(output) => {
                    let new = cause.take().map(|cause| {
                        let seconds = started.elapsed().as_secs_f64();
                        self.records.push(TraceRecord { cause, seconds });
                    });
                    self.way = self.way_of(store);
                    return Ok((output, new.is_some()));
                }
                Err(stop) => stop,
            };
            let failed = if cause.is_some() {
                self.entries.pop()
            } else {
                None
            };
            match (stop, failed) {
                (Stop::Untraceable(why), Some(failed)) if self.compiled => {
                    fall_back(user.py(), &why)?;
                    self.compiled = false;
                    self.entries.clear();
                    cause = self.find(store, user, failed.batch, update)?;
                }
                (Stop::Untraceable(why), _) => return Err(PyRuntimeError::new_err(why)),
                (Stop::Raised(error), _) => return Err(error),
            }
        }
    }

    fn way_of(&self, store: &Store) -> &'static str {
        let eager = self
            .entries
            .last()
            .is_none_or(|entry| entry.trace.is_eager());
        match (eager, &store.rule) {
            (true, _) => "plain",
            (false, Rule::Native(_)) => "native",
            (false, _) => "traced",
        }
    }

    // where MLX finds no g++ it compiles nothing for the CPU, without a word
    fn check_compiler(&mut self, py: Python<'_>) -> PyResult<()> {
        if !self.compiled || std::mem::replace(&mut self.checked, true) {
            return Ok(());
        }
        let mlx = py.import("mlx.core")?;
        let device = mlx.call_method0("default_device")?.getattr("type")?;
        let compiler = py.import("shutil")?.call_method1("which", ("g++",))?;
        if cfg!(target_os = "linux") && compiler.is_none() && device.eq(mlx.getattr("cpu")?)? {
            fall_back(py, "there is no C++ compiler (g++) on this machine")?;
            self.compiled = false;
        }
        Ok(())
    }

    // the call's trace becomes the last entry; a new one has a cause
    fn find(
        &mut self,
        store: &Store,
        user: &User<'_>,
        tree: Tree,
        update: bool,
    ) -> PyResult<Option<String>> {
        let py = user.py();
        self.check_compiler(py)?;
        let signature = store.signature()?;
        let rule = if update {
            store.rule.clone()
        } else {
            Rule::None
        };
        let options = if update { store.options_id() } else { 0 };
        let known = self.entries.iter().rposition(|entry| {
            entry.loss == user.loss_number
                && entry.model == signature.id
                && entry.options == options
                && entry.rule == rule
                && entry.batch.equals(&tree, py)
        });
        if let Some(at) = known {
            let entry = self.entries.remove(at);
            self.entries.push(entry);
            return Ok(None);
        }
        let engine = store.engine.as_ref();
        let engine =
            engine.ok_or_else(|| PyRuntimeError::new_err("the step has not been prepared"))?;
        let recipe = Recipe {
            layout: engine.layout().clone(),
            rule: rule.clone(),
            max_grad_norm: self.max_grad_norm,
            guard: self.guard,
            keep_gradients: self.raises,
            state: engine.state().len(),
            others: store.others.len(),
        };
        let entry = Entry {
            loss: user.loss_number,
            model: signature.id,
            options,
            rule,
            batch: tree,
            trace: Trace::new(recipe, self.host.clone(), self.compiled),
            template: None,
        };
        let cause = self.cause(user, &entry);
        self.entries.push(entry);
        if self.entries.len() > MAX_TRACES {
            self.entries.remove(0);
        }
        Ok(Some(cause))
    }

    fn cause(&self, user: &User<'_>, new: &Entry) -> String {
        let Some(last) = self.entries.last() else {
            return "first call".into();
        };
        if last.loss != new.loss {
            return "another loss function, or one with another closure".into();
        }
        if last.model != new.model {
            return "model: a mode, a number, or an array's shape has changed".into();
        }
        if last.options != new.options || last.rule != new.rule {
            return "optimizer: an option has changed".into();
        }
        let tensors = last.batch.tensors().iter().zip(new.batch.tensors());
        let Some((index, (old, new_tensor))) = tensors.enumerate().find(|(_, (a, b))| a != b)
        else {
            return "arguments: a static value or the structure has changed".into();
        };
        format!(
            "argument {}: {:?} {:?} -> {:?} {:?}",
            user.name(&new.batch.paths(user.py())[index]),
            old.dtype,
            old.shape,
            new_tensor.dtype,
            new_tensor.shape
        )
    }

    fn attempt(
        &mut self,
        store: &mut Store,
        user: &User<'_>,
        prepared: &Prepared<'_>,
        batch: &[Array],
    ) -> Result<Output, Stop> {
        let py = user.py();
        let signature = store.signature()?;
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let entry = self.entries.last_mut().ok_or_else(missing)?;
        let key = bridge::get(&store.key_list.bind(py).get_item(0)?).ok_or_else(missing)?;
        let call = Call {
            others: store.others.clone(),
            key,
            batch: batch.to_vec(),
        };
        self.host.current.replace(Some(Current {
            model: user.model.clone().unbind(),
            optimizer: user.optimizer.clone().unbind(),
            loss_fn: user.loss_fn.clone().unbind(),
            arguments: user.arguments.clone().unbind(),
            key_list: store.key_list.clone_ref(py),
            roles: signature.roles.clone(),
            trainable: signature.trainable.clone_ref(py),
            compiled: self.compiled,
            restore: self.compiled || entry.rule == Rule::None,
            stop: None,
            template: None,
        }));
        let engine = store.engine.as_mut().ok_or_else(missing)?;
        let mut holder = Holder::new(py, prepared, &signature.roles, store.moments.as_mut());
        let outcome = if entry.rule == Rule::None {
            engine.gradients(&mut entry.trace, call, &mut holder)
        } else {
            engine.step(&mut entry.trace, call, self.in_flight, &mut holder)
        };
        let shown = holder.show(engine);
        let current = self.host.current.take();
        let (stop, template) = current.map_or((None, None), |c| (c.stop, c.template));
        if template.is_some() {
            entry.template = template;
        }
        shown?;
        match (outcome, stop) {
            (Ok(output), _) => Ok(output),
            (Err(_), Some(stop)) => Err(stop),
            (Err(error), None) => Err(from_device(&error)),
        }
    }

    // what the loss function returned, with the arrays of this step
    fn returned<'py>(&self, py: Python<'py>, output: &Output) -> PyResult<Bound<'py, PyAny>> {
        let template = self
            .entries
            .last()
            .and_then(|entry| entry.template.as_ref());
        match template.map(|template| template.bind(py)) {
            Some(template) if !bridge::is_array(template) => {
                fill(template, std::iter::once(&output.loss).chain(&output.aux))
            }
            _ => bridge::wrap(py, &output.loss),
        }
    }
}

// raises for a step that was not taken, with the first tensor whose gradient is no number; waits for the step
fn refuse(py: Python<'_>, store: &Store, output: &Output) -> PyResult<()> {
    let failed = |e: mlx_rs::error::Exception| to_python(&Error::Mlx(e));
    let read = |array: &Array| -> PyResult<bool> {
        let mut value = Ok(true);
        Waiting(py).unlocked(&mut || value = array.try_item_exact::<bool>());
        value.map_err(|e| PyRuntimeError::new_err(e.to_string()))
    };
    if !output
        .skipped
        .as_ref()
        .map(read)
        .transpose()?
        .unwrap_or(false)
    {
        return Ok(());
    }
    let (signature, Some(engine)) = (store.signature()?, &store.engine) else {
        return Ok(());
    };
    let gradients = engine.layout().views(&output.gradients).map_err(failed)?;
    for (gradient, path) in gradients.iter().zip(signature.paths()) {
        let finite = gradient
            .abs()
            .and_then(|g| g.lt(Array::from_f32(f32::INFINITY)));
        let finite = finite.and_then(|finite| finite.all(None)).map_err(failed)?;
        if !read(&finite)? {
            return Err(PyFloatingPointError::new_err(format!(
                "the gradient of {} has NaN or infinite values; nothing was updated",
                dotted(&path)
            )));
        }
    }
    let loss = output.loss.try_item_cast::<f32>();
    let loss = loss.map_or_else(|e| e.to_string(), |loss| loss.to_string());
    Err(PyFloatingPointError::new_err(format!(
        "the loss is {loss}, not finite or above max_loss; nothing was updated"
    )))
}

fn fill<'a, 'py>(
    template: &Bound<'py, PyAny>,
    mut arrays: impl Iterator<Item = &'a Array>,
) -> PyResult<Bound<'py, PyAny>> {
    rebuild(template, &mut |hole| match arrays.next() {
        Some(array) => bridge::wrap(hole.py(), array),
        None => Ok(hole.clone()),
    })
}

// a kernel that the compiler refuses (a full disk will do): nothing has changed by then
fn from_device(error: &Error) -> Stop {
    match error {
        Error::FirstEvaluation(e) if e.what().contains("[Compile::eval_cpu]") => {
            Stop::Untraceable("the C++ compiler (g++) failed on one of MLX's CPU kernels".into())
        }
        _ => Stop::Raised(to_python(error)),
    }
}

fn fall_back(py: Python<'_>, why: &str) -> PyResult<()> {
    let message = format!(
        "faststep: this step cannot be compiled: {why}. It runs uncompiled from here on, with the same numbers but slower"
    );
    let message = std::ffi::CString::new(message)?;
    PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 2)
}
