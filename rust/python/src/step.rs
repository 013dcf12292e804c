//! The step of one model, optimizer, loss function and set of options, as Python calls it.
use std::{cell::RefCell, collections::HashMap, rc::Rc, sync::Arc, time::Instant};

use faststep::{
    flags::Flags,
    layout::Layout,
    memory,
    outputs::Outputs,
    step::{Call, Output, Seconds},
    task::Task,
    trace::{Part, Recipe, Rule, Trace},
    Error,
};
use mlx_rs::Array;
use pyo3::{exceptions::PyRuntimeError, prelude::*, types::PyBool};

use crate::{
    bridge,
    call::User,
    errors::to_python,
    extras::{Carried, State},
    holder::{Holder, Waiting},
    host::{Current, PythonHost, Stop},
    optimizer::HostSchedules,
    options::Options,
    refuse::{is_true, read, refuse, refuse_update},
    registry::{self, Shared},
    store::{Prepared, Store},
    traces::{warn, Key, TraceRecord, Traces},
    tree::Tree,
    walk::rebuild,
};

mod plan;

pub use plan::MemoryPlan;

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
    options: Options,
    compiled: bool,
    checked: bool,
    host: Rc<PythonHost>,
    traces: Traces,
    steps: usize,
    updates: usize,
    skips: Flags,
    misses: Flags,
    seconds: Spent,
    way: &'static str,
}

/// Where the time went, in seconds.
#[derive(Default)]
struct Spent {
    look: f64,
    trace: f64,
    engine: Seconds,
    show: f64,
}

/// Steps, updates and skipped batches, the way, the kept traces and the number of all, seconds and bytes by name, the
/// share of weights that an update left as they were.
type Stats = (
    usize,
    usize,
    usize,
    &'static str,
    Vec<TraceRecord>,
    usize,
    HashMap<&'static str, f64>,
    HashMap<&'static str, usize>,
    Option<f64>,
);

#[pymethods]
impl Step {
    #[new]
    fn new(
        model: &Bound<'_, PyAny>,
        optimizer: &Bound<'_, PyAny>,
        options: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let options = Options::read(options)?;
        Ok(Self {
            shared: registry::shared(model, optimizer)?,
            inner: ThreadBound(RefCell::new(Inner {
                compiled: options.compiled,
                options,
                checked: false,
                host: Rc::new(PythonHost::default()),
                traces: Traces::default(),
                steps: 0,
                updates: 0,
                skips: Flags::default(),
                misses: Flags::default(),
                seconds: Spent::default(),
                way: "native",
            })),
        })
    }

    /// One step: what the loss function returned, the gradients' norm before clipping, whether the batch was skipped, and
    /// whether there was an update, or whether it was missed.
    fn step<'py>(&self, user: User<'py>, accumulate: usize) -> PyResult<Returned<'py>> {
        self.enter(&user, |inner, store| {
            let task = Task::of(accumulate, store.batches());
            inner.step(store, &user, task)
        })
    }

    /// Update by a window that is not full; whether there was one.
    fn flush(&self, user: User<'_>) -> PyResult<bool> {
        self.enter(&user, |inner, store| {
            if store.batches() == 0 {
                return Ok(false);
            }
            inner.step(store, &user, Task::Flush).map(|_| true)
        })
    }

    /// What the loss function returned, and the tree of gradients.
    fn gradients<'py>(&self, user: User<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        self.enter(&user, |inner, store| inner.gradients(store, &user))
    }

    /// What a step on this batch will take of the device's memory; nothing is computed and nothing changes.
    fn memory_plan(&self, user: User<'_>, accumulate: usize) -> PyResult<MemoryPlan> {
        self.enter(&user, |inner, store| {
            inner.memory_plan(store, &user, accumulate)
        })
    }

    /// Wait for all work in flight.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        self.open(py, |_, store| match &mut store.engine {
            Some(engine) => {
                let done = engine.synchronize(&mut Waiting(py));
                done.map_err(|e| to_python(&e))
            }
            None => Ok(()),
        })
    }

    /// What is kept beside model and optimizer.
    fn state<'py>(&self, py: Python<'py>) -> PyResult<Option<State<'py>>> {
        self.open(py, |_, store| {
            store.carried()?.map(|carried| carried.show(py)).transpose()
        })
    }

    /// Keep something else, and count on from these numbers.
    #[allow(clippy::needless_pass_by_value)] // what PyO3 extracts
    fn load_state(
        &self,
        py: Python<'_>,
        state: State<'_>,
        steps: usize,
        updates: usize,
        skipped: usize,
    ) -> PyResult<()> {
        self.open(py, |inner, store| {
            store.carry(py, Carried::read(&state))?;
            (inner.steps, inner.updates) = (steps, updates);
            inner.skips = Flags::of(skipped);
            inner.misses = Flags::default();
            Ok(())
        })
    }

    /// What the step has done so far.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        self.open(py, |inner, store| {
            for flags in [&mut inner.skips, &mut inner.misses] {
                read(flags.read(0, &|flag| is_true(py, flag)))?;
            }
            Ok((
                inner.steps,
                inner.updates - inner.misses.count(),
                inner.skips.count(),
                inner.way,
                inner.traces.records(),
                inner.traces.made(),
                inner.seconds.by_name(),
                bytes(store),
                store
                    .engine
                    .as_ref()
                    .and_then(faststep::step::Engine::unchanged),
            ))
        })
    }
}

impl Step {
    // a call that takes over what the user passed
    fn enter<T>(
        &self,
        user: &User<'_>,
        work: impl FnOnce(&mut Inner, &mut Store) -> PyResult<T>,
    ) -> PyResult<T> {
        self.open(user.py(), |inner, store| {
            registry::claim(&self.shared, &user.optimizer)?;
            work(inner, store)
        })
    }

    // the one door: the right thread, and no step within a step
    fn open<T>(
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

/// What the loss function returned, the gradients' norm, whether the batch was skipped, whether there was an update (or
/// the flag that tells whether it was missed).
type Returned<'py> = (
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Bound<'py, PyAny>,
);

impl Spent {
    fn by_name(&self) -> HashMap<&'static str, f64> {
        HashMap::from([
            ("look", self.look),
            ("trace", self.trace),
            ("build", self.engine.build),
            ("evaluate", self.engine.evaluate),
            ("wait", self.engine.wait),
            ("show", self.show),
        ])
    }
}

fn bytes(store: &Store) -> HashMap<&'static str, usize> {
    let sum = |arrays: &[Array]| arrays.iter().map(Array::nbytes).sum();
    let engine = store.engine.as_ref();
    HashMap::from([
        ("parameters", engine.map_or(0, |e| sum(e.parameters()))),
        ("optimizer", engine.map_or(0, |e| sum(e.state()))),
        (
            "step",
            engine.map_or(0, faststep::step::Engine::extra_bytes),
        ),
        ("model", sum(&store.others)),
    ])
}

impl Inner {
    fn step<'py>(
        &mut self,
        store: &mut Store,
        user: &User<'py>,
        task: Task,
    ) -> PyResult<Returned<'py>> {
        let py = user.py();
        let started = Instant::now();
        let (tree, batch) = user.batch()?;
        let mut schedules = HostSchedules::of(&user.optimizer);
        let called = if task.updates() {
            schedules.call()
        } else {
            Ok(())
        };
        let outcome = called.and_then(|()| {
            let mut prepared = self.prepare(store, user, task)?;
            let undo = prepared.undo.take();
            self.seconds.look += started.elapsed().as_secs_f64();
            let outcome = self.run(store, user, tree, task, |inner, store| {
                inner.attempt(store, user, &prepared, &batch, task)
            });
            if let (Err(_), Some(undo)) = (&outcome, undo) {
                undo.restore()?;
                store.discard();
            }
            let (output, new) = outcome?;
            let shown = Instant::now();
            store.take_output(py, &prepared, &output.batch)?;
            if task.updates() {
                store.close_window();
            }
            if new {
                store.check_layout(py)?;
            }
            self.seconds.engine += output.seconds;
            self.seconds.show += shown.elapsed().as_secs_f64();
            Ok(output)
        });
        if outcome.is_err() {
            schedules.undo()?;
        }
        let taken = self.taken(py, &outcome?, task)?;
        if let Some(message) = self.traces.warning() {
            warn(py, &message)?; // which may raise: everything is in its place by now
        }
        Ok(taken)
    }

    // counts a step, and gives out what came of it
    fn taken<'py>(
        &mut self,
        py: Python<'py>,
        output: &Output,
        task: Task,
    ) -> PyResult<Returned<'py>> {
        let update = output.update.as_ref().unwrap_or(&output.batch);
        if task != Task::Flush {
            self.steps += 1;
            let skipped = output.batch.skipped.as_ref();
            read(self.skips.push(skipped, &|flag| is_true(py, flag)))?;
        }
        let every = self.options.clear_cache_every;
        if every > 0 && self.steps.is_multiple_of(every) {
            memory::clear_cache();
        }
        let returned = match &output.batch.loss {
            Some(_) => self.returned(py, &output.batch)?,
            None => py.None().into_bound(py),
        };
        let wrap = |array: &Option<Array>| array.as_ref().map(|a| bridge::wrap(py, a)).transpose();
        let skipped = wrap(&output.batch.skipped)?;
        if !task.updates() {
            let updated = PyBool::new(py, false).to_owned().into_any();
            return Ok((returned, None, skipped, updated));
        }
        self.updates += 1;
        let missed = update.skipped.as_ref();
        read(self.misses.push(missed, &|flag| is_true(py, flag)))?;
        let missed = wrap(&update.skipped)?;
        let updated = missed.unwrap_or_else(|| PyBool::new(py, true).to_owned().into_any());
        Ok((returned, wrap(&update.norm)?, skipped, updated))
    }

    fn prepare<'py>(
        &self,
        store: &mut Store,
        user: &User<'py>,
        task: Task,
    ) -> PyResult<Prepared<'py>> {
        let needs = self.options.needs(task.accumulates());
        store.prepare(&user.model, &user.optimizer, needs)
    }

    fn gradients<'py>(
        &mut self,
        store: &mut Store,
        user: &User<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let (tree, batch) = user.batch()?;
        let mut prepared = self.prepare(store, user, Task::Gradients)?;
        let undo = prepared.undo.take();
        let outcome = self.run(store, user, tree, Task::Gradients, |inner, store| {
            inner.attempt(store, user, &prepared, &batch, Task::Gradients)
        });
        if let Some(undo) = undo {
            undo.restore()?; // the optimizer is initialised by its first update
            store.discard();
        }
        let (output, _) = outcome?;
        let trainable = store.signature()?.trainable.bind(user.py()).clone();
        let tree = fill(&trainable, output.batch.gradients.iter())?;
        Ok((self.returned(user.py(), &output.batch)?, tree))
    }

    // traces where it has to and runs; once more, uncompiled, where the loss cannot be traced. True: a new trace
    fn run<T>(
        &mut self,
        store: &mut Store,
        user: &User<'_>,
        tree: Tree,
        task: Task,
        mut attempt: impl FnMut(&mut Self, &mut Store) -> Result<T, Stop>,
    ) -> PyResult<(T, bool)> {
        let started = Instant::now();
        let tree = Rc::new(tree);
        self.check_compiler(user.py())?;
        loop {
            self.find(store, user, &tree, task)?;
            let stop = match attempt(self, store) {
                Ok(output) => {
                    let seconds = started.elapsed().as_secs_f64();
                    let new = self.traces.settle(seconds);
                    if new {
                        self.seconds.trace += seconds;
                    }
                    self.way = self.way_of(store);
                    return Ok((output, new));
                }
                Err(stop) => stop,
            };
            let new = self.traces.discard();
            match stop {
                Stop::Untraceable(why) if self.compiled && new => {
                    fall_back(user.py(), &why)?;
                    self.compiled = false;
                    self.traces.clear();
                }
                Stop::Untraceable(why) => return Err(PyRuntimeError::new_err(why)),
                Stop::Raised(error) => return Err(error),
            }
        }
    }

    fn way_of(&self, store: &Store) -> &'static str {
        let eager = self.traces.last().is_none_or(|e| e.trace.is_eager());
        match (eager, &store.rule) {
            (true, _) => "plain",
            (false, Some(Rule::Native(_))) => "native",
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

    // the call's traces become the last entries: that of the update, then that of the batch
    fn find(
        &mut self,
        store: &Store,
        user: &User<'_>,
        tree: &Rc<Tree>,
        task: Task,
    ) -> PyResult<()> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let rule = store.rule.as_ref().ok_or_else(missing)?;
        let engine = store.engine.as_ref().ok_or_else(missing)?;
        let signature = store.signature()?;
        for part in task.parts(rule) {
            let updates = matches!(part, Part::Whole(_) | Part::Update(_));
            let has_loss = !matches!(part, Part::Update(_));
            let key = Key {
                loss: if has_loss { user.loss_number } else { 0 },
                model: signature.id,
                options: if updates { store.options_id() } else { 0 },
                places: engine.places(),
                batch: if has_loss {
                    tree.clone()
                } else {
                    Rc::default()
                },
                part: part.clone(),
            };
            let options = self.options;
            let recipe = || Recipe {
                part,
                layout: engine.layout().clone(),
                places: engine.places(),
                max_grad_norm: options.max_grad_norm,
                max_grad_value: options.max_grad_value,
                guard: options.guard,
                compute: options.compute,
                ema_decay: options.ema_decay,
                keep_gradients: options.raises,
                others: if has_loss { store.others.len() } else { 0 },
            };
            let make = || Trace::new(recipe(), self.host.clone(), self.compiled);
            self.traces.find(user, key, options.max_traces, make);
        }
        Ok(())
    }

    fn attempt(
        &mut self,
        store: &mut Store,
        user: &User<'_>,
        prepared: &Prepared<'_>,
        batch: &[Array],
        task: Task,
    ) -> Result<Output, Stop> {
        let py = user.py();
        let signature = store.signature()?;
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let restore = self.compiled || task == Task::Gradients;
        let call = self.enter_host(store, user, batch, restore)?;
        let engine = store.engine.as_mut().ok_or_else(missing)?;
        let mut holder = Holder::new(py, prepared, &signature.roles, store.moments.as_mut());
        let (last, before) = self.traces.last_two();
        let last = last.ok_or_else(missing)?;
        let in_flight = self.options.in_flight;
        let mut refusal = None;
        let mut approve = |layout: &Layout, batch: &Outputs| {
            if self.options.raises {
                refusal = refuse(py, &signature.paths(), layout, self.options.guard, batch).err();
            }
            refusal.is_none()
        };
        let update = match before {
            Some(update) if matches!(task, Task::Batch { fills: true }) => Some(&mut update.trace),
            _ => None,
        };
        let outcome = match task {
            Task::Gradients => engine
                .gradients(&mut last.trace, call, &mut holder)
                .map(Output::of),
            Task::Flush => engine.flush(&mut last.trace, &mut holder),
            _ => engine.step(
                &mut last.trace,
                update,
                call,
                in_flight,
                &mut holder,
                &mut approve,
            ),
        };
        if let (Ok(output), true) = (&outcome, self.options.raises && task != Task::Whole) {
            let update = output.update.as_ref().unwrap_or(&output.batch);
            if task.updates() && refusal.is_none() {
                refusal = refuse_update(update).err();
            }
        }
        let shown = holder.show(engine, outcome.is_ok() && task != Task::Gradients);
        let stop = self.leave_host();
        shown?;
        match (outcome, stop, refusal) {
            (_, _, Some(refusal)) => Err(Stop::Raised(refusal)),
            (Ok(output), ..) => Ok(output),
            (Err(_), Some(stop), _) => Err(stop),
            (Err(error), None, _) => Err(from_device(&error)),
        }
    }

    // what the host is given for the call under way, and what the engine is
    fn enter_host(
        &self,
        store: &Store,
        user: &User<'_>,
        batch: &[Array],
        restore: bool,
    ) -> PyResult<Call> {
        let py = user.py();
        let signature = store.signature()?;
        let missing = || PyRuntimeError::new_err("there is no random key");
        let key = bridge::get(&store.key_list.bind(py).get_item(0)?).ok_or_else(missing)?;
        self.host.current.replace(Some(Current {
            model: user.model.clone().unbind(),
            optimizer: user.optimizer.clone().unbind(),
            loss_fn: user.loss_fn.clone().unbind(),
            weighted: self.options.weighted,
            mixed: self.options.compute.is_some(),
            arguments: user.arguments.clone().unbind(),
            key_list: store.key_list.clone_ref(py),
            roles: signature.roles.clone(),
            trainable: signature.trainable.clone_ref(py),
            compiled: self.compiled,
            restore,
            stop: None,
            template: None,
        }));
        Ok(Call {
            others: store.others.clone(),
            rest: std::iter::once(key).chain(batch.iter().cloned()).collect(),
        })
    }

    // after the engine's call: what ended the trace
    fn leave_host(&mut self) -> Option<Stop> {
        let current = self.host.current.take();
        let (stop, template) = current.map_or((None, None), |c| (c.stop, c.template));
        if let (Some(last), Some(template)) = (self.traces.last_two().0, template) {
            last.template = Some(template);
        }
        stop
    }

    // what the loss function returned, with the arrays of this step
    fn returned<'py>(&self, py: Python<'py>, output: &Outputs) -> PyResult<Bound<'py, PyAny>> {
        let template = self.traces.last().and_then(|entry| entry.template.as_ref());
        match template.map(|template| template.bind(py)) {
            Some(template) if !bridge::is_array(template) => {
                fill(template, output.loss.iter().chain(&output.aux))
            }
            _ => match &output.loss {
                Some(loss) => bridge::wrap(py, loss),
                None => Ok(py.None().into_bound(py)),
            },
        }
    }
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
    warn(
        py,
        &format!("this step cannot be compiled: {why}. It runs uncompiled from here on, with the same numbers but slower"),
    )
}
