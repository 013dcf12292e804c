//! A call's traces are found or made, and run; once more, uncompiled, where the loss cannot be traced.
use std::{cell::Cell, rc::Rc, time::Instant};

use faststep::{
    engine::{Call, Graph, Layout, Output, Outputs, Part, Recipe, Rule, Task, Trace},
    Error,
};
use mlx_rs::{error::Result as MlxResult, Array};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use super::Inner;
use crate::{
    bridge,
    call::{Batch, User},
    errors::{mlx, to_python},
    holder::Holder,
    host::{Current, Stop},
    reach::{Looked, Seen},
    refuse::{refuse, refuse_update},
    store::{ModelSignature, Prepared, Store},
    traces::{holds, warn, Entry, Key},
    tree::Tree,
};

/// What MLX says where it cannot make a kernel of its compilation, and what a user is told.
const NO_KERNEL: [(&str, &str); 4] = [
    (
        "[Compile::eval_cpu]",
        "the C++ compiler (g++) failed on one of MLX's CPU kernels",
    ),
    (
        "filesystem error",
        "MLX finds no directory to write its CPU kernels to: make that of HOME or of TMPDIR writable",
    ),
    (
        "Could not load C++ shared library",
        "MLX cannot load its CPU kernels from where they are written: set TMPDIR to a file system that allows execution",
    ),
    (
        "Failed to compile kernel",
        "the compiler of CUDA failed on one of MLX's kernels",
    ),
];

/// What one call gives a trace, beside the model's own arrays.
pub(super) struct Given {
    tree: Rc<Tree>,
    /// The arrays of the batch.
    pub(super) arrays: Vec<Array>,
    /// What the loss reaches.
    pub(super) looked: Rc<Looked>,
    /// The loss function, the model, and objects among the arguments.
    roots: Vec<Py<PyAny>>,
    /// The constants that the call's trace takes as inputs.
    constants: Vec<Array>,
}

impl Given {
    pub(super) fn new(batch: Batch<'_>, looked: Looked, roots: Vec<Bound<'_, PyAny>>) -> Self {
        Self {
            tree: batch.tree,
            arrays: batch.arrays,
            looked: Rc::new(looked),
            roots: roots.into_iter().map(Bound::unbind).collect(),
            constants: Vec::new(),
        }
    }
}

impl Inner {
    // traces where it has to and runs; once more, uncompiled, where the loss cannot be traced. True: a new trace
    pub(super) fn run<T>(
        &mut self,
        store: &mut Store,
        user: &User<'_>,
        given: &mut Given,
        task: Task,
        mut attempt: impl FnMut(&mut Self, &mut Store, &Given) -> Result<T, Stop>,
    ) -> PyResult<(T, bool)> {
        let started = Instant::now();
        self.check_compiler(user.py())?;
        loop {
            let found = self.find(store, user, given, task);
            let stop = match found.and_then(|()| attempt(self, store, given)) {
                Ok(output) => {
                    let seconds = started.elapsed().as_secs_f64();
                    let new = self.traces.settle(seconds);
                    if new {
                        self.seconds.trace += seconds;
                    }
                    self.note_mode(store, &user.optimizer)?;
                    self.compile_again();
                    return Ok((output, new));
                }
                Err(stop) => stop,
            };
            let new = self.traces.discard();
            self.unwatched = None;
            match stop {
                Stop::Raised(error) => return Err(error),
                Stop::Untraceable(why) | Stop::Becomes(why) if !(self.compiled && new) => {
                    return Err(PyRuntimeError::new_err(why));
                }
                // BatchNorm's, of a model in half precision, become float32 at the first batch
                Stop::Becomes(_) if self.became == 0 => self.became = 1,
                Stop::Untraceable(why) | Stop::Becomes(why) => self.fall_back(user.py(), why)?,
            }
            self.compiled = false;
            self.traces.clear();
        }
    }

    fn fall_back(&mut self, py: Python<'_>, why: String) -> PyResult<()> {
        let message = format!(
            "this step cannot be compiled: {why}. It runs uncompiled from here on, with the same numbers but slower"
        );
        self.fallen = Some(why);
        warn(py, &message)
    }

    // behind a batch that ran uncompiled only because a buffer became another
    fn compile_again(&mut self) {
        if self.became == 1 && !self.compiled {
            self.became = 2;
            self.compiled = true;
            self.traces.clear();
        }
    }

    // how the step was taken, and why not natively
    fn note_mode(&mut self, store: &Store, optimizer: &Bound<'_, PyAny>) -> PyResult<()> {
        let eager = self.traces.last().is_none_or(|e| e.trace.is_eager());
        let mode = match (eager, &store.rule) {
            (true, _) => "plain",
            (false, Some(Rule::Native(_))) => "native",
            (false, _) => "traced",
        };
        if std::mem::replace(&mut self.mode, mode) == mode
            && (mode != "plain" || self.reason.is_some())
        {
            return Ok(());
        }
        self.reason = match mode {
            "native" => None,
            "traced" => Some(store.why_traced(optimizer)?),
            _ if !self.options.compiled => Some("compile=False".into()),
            _ => self
                .fallen
                .clone()
                .or_else(|| Some("MLX has been told not to compile".into())),
        };
        Ok(())
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
            self.fall_back(py, "there is no C++ compiler (g++) on this machine".into())?;
            self.compiled = false;
        }
        Ok(())
    }

    // the call's traces become the last entries: that of the update, then that of the batch
    fn find(
        &mut self,
        store: &mut Store,
        user: &User<'_>,
        given: &mut Given,
        task: Task,
    ) -> Result<(), Stop> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let rule = store.rule.as_ref().ok_or_else(missing)?.clone();
        for part in task.parts(&rule) {
            let updates = matches!(part, Part::Whole(_) | Part::Update(_));
            let has_loss = !matches!(part, Part::Update(_));
            let places = store.engine.as_ref().ok_or_else(missing)?.places();
            let key = Key {
                model: store.signature()?.id,
                options: if updates { store.options_id() } else { 0 },
                places,
                reached: Vec::new(),
                batch: Rc::default(),
                part,
            };
            if has_loss {
                self.find_loss(store, user, given, key)?;
                continue;
            }
            let py = user.py();
            if self.traces.use_again(|e| e.key.equals(&key, py)).is_none() {
                let recipe = self.recipe(store, &key, 0)?;
                let trace = Trace::new(recipe, self.host.clone(), self.compiled);
                let max_traces = self.options.max_traces;
                self.traces
                    .add(user, key, trace, Vec::new(), None, max_traces);
            }
        }
        Ok(())
    }

    // a trace for the arrays that the loss reaches, and for the numbers: one for which they are known to be the right ones,
    // or one whose graph a new one equals but for constants that are inputs
    fn find_loss(
        &mut self,
        store: &mut Store,
        user: &User<'_>,
        given: &mut Given,
        key: Key,
    ) -> Result<(), Stop> {
        let py = user.py();
        let looked = given.looked.clone();
        let key = Key {
            reached: if self.compiled {
                looked.program.tensors().to_vec()
            } else {
                Vec::new()
            },
            batch: given.tree.clone(),
            ..key
        };
        given.constants.clear();
        let fits = |entry: &Entry| entry.key.equals(&key, py) && holds(entry, py, &looked);
        if let Some(entry) = self.traces.use_again(fits) {
            if let Some(seen) = entry.kept.seen(py, &looked) {
                given.constants.clone_from(&seen.constants);
                self.template = seen
                    .template
                    .as_ref()
                    .map(|template| template.clone_ref(py));
            }
            return Ok(());
        }
        let changed = self
            .traces
            .recent()
            .find(|entry| entry.key.equals(&key, py));
        let seen = changed.and_then(|entry| entry.kept.seen.last());
        let changed = seen.map_or_else(Vec::new, |seen| seen.changes(py, &looked));
        let names = changed.iter().map(|&value| looked.value_name(py, value));
        let mut names: Vec<String> = names.take(3).collect();
        if names.is_empty() {
            names.extend(self.reach.change());
        }
        let names = names.into_iter().map(|name| named(user, &given.tree, name));
        let changed = names.collect::<Vec<_>>().join(", ");
        let changed = (!changed.is_empty()).then_some(changed);
        let varying = self.shared(store, user, given, &key)?;
        let Some(varying) = varying else {
            return Ok(());
        };
        let others = store.others.len() + key.reached.len() + varying.len();
        let recipe = self.recipe(store, &key, others)?;
        let trace = Trace::new(recipe, self.host.clone(), self.compiled);
        let max_traces = self.options.max_traces;
        self.traces
            .add(user, key, trace, varying, changed.as_deref(), max_traces);
        Ok(())
    }

    // where a trace was made for other numbers, a new graph tells whether it does for these: None; or the constants that a
    // new trace is to take as inputs
    fn shared(
        &mut self,
        store: &mut Store,
        user: &User<'_>,
        given: &mut Given,
        key: &Key,
    ) -> Result<Option<Vec<u32>>, Stop> {
        let py = user.py();
        let is_candidate = |entry: &Entry| entry.kept.graph.is_some() && entry.key.equals(key, py);
        if !self.traces.recent().any(is_candidate) {
            return Ok(Some(Vec::new()));
        }
        let (sketch, template) = self.sketch(store, user, given, key)?;
        let failed = Cell::new(None);
        let differences = |entry: &Entry| {
            let graph = entry.kept.graph.as_ref().filter(|_| is_candidate(entry))?;
            let differences = graph.differences(&sketch);
            differences.unwrap_or_else(|error| {
                failed.set(Some(error));
                None
            })
        };
        let holds = |entry: &Entry| {
            let varying = &entry.kept.varying;
            differences(entry).is_some_and(|differ| differ.iter().all(|at| varying.contains(at)))
        };
        let constants = |varying: &[u32]| {
            let constants = varying.iter().map(|&at| sketch.constant(at));
            constants.collect::<MlxResult<Vec<_>>>().map_err(mlx)
        };
        if let Some(entry) = self.traces.use_again(holds) {
            given.constants = constants(&entry.kept.varying)?;
            self.template = template.as_ref().map(|template| template.clone_ref(py));
            self.see(user, given, template)?;
            return Ok(None);
        }
        let mut varying = Vec::new();
        if let Some(entry) = self.traces.use_again(|entry| differences(entry).is_some()) {
            varying.clone_from(&entry.kept.varying);
            varying.extend(differences(entry).unwrap_or_default());
            varying.sort_unstable();
            varying.dedup();
            self.traces.drop_last();
        }
        if let Some(error) = failed.take() {
            return Err(mlx(error).into());
        }
        given.constants = constants(&varying)?;
        Ok(Some(varying))
    }

    // the trace used last holds for the numbers that were there when it was made, and for what the loss has made of them
    fn see(&mut self, user: &User<'_>, given: &Given, template: Option<Py<PyAny>>) -> PyResult<()> {
        let py = user.py();
        let roots: Vec<_> = given
            .roots
            .iter()
            .map(|root| root.bind(py).clone())
            .collect();
        let now = self.reach.look(&roots, &user.optimizer)?;
        if let (Some(last), _) = self.traces.last_two() {
            if last.kept.seen(py, &given.looked).is_none() {
                let constants = given.constants.clone();
                last.kept
                    .see(Seen::new(py, &given.looked, constants, template));
            }
        }
        self.traces.see_changes(py, &given.looked, &now);
        Ok(())
    }

    // the graph of the loss as it is now, and what it returns; nothing is compiled
    fn sketch(
        &mut self,
        store: &mut Store,
        user: &User<'_>,
        given: &mut Given,
        key: &Key,
    ) -> Result<(Graph, Option<Py<PyAny>>), Stop> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let recipe = self.recipe(store, key, store.others.len() + key.reached.len())?;
        let mut trace = Trace::new(recipe, self.host.clone(), true);
        let call = self.enter_host(store, user, given, true, &[])?;
        if let Some(current) = self.host.current.borrow_mut().as_mut() {
            current.sketch = true;
        }
        let engine = store.engine.as_mut().ok_or_else(missing)?;
        let outcome = engine.dry_run(&mut trace, call);
        let current = self.host.current.take();
        let (stop, graph, template) = current.map_or((None, None, None), |current| {
            (current.stop, current.graph, current.template)
        });
        match (graph, stop, outcome) {
            (Some(graph), ..) => Ok((graph, template)),
            (None, Some(stop), _) => Err(stop),
            (None, None, Err(error)) => Err(Stop::Raised(to_python(&error))),
            (None, None, Ok(())) => Err(Stop::Raised(missing())),
        }
    }

    fn recipe(&self, store: &Store, key: &Key, others: usize) -> PyResult<Recipe> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let engine = store.engine.as_ref().ok_or_else(missing)?;
        let options = self.options;
        Ok(Recipe {
            part: key.part.clone(),
            layout: engine.layout().clone(),
            places: engine.places(),
            max_grad_norm: options.max_grad_norm,
            max_grad_value: options.max_grad_value,
            guard: options.guard,
            compute: options.compute,
            ema_decay: options.ema_decay,
            keep_gradients: options.raises,
            others,
        })
    }

    pub(super) fn attempt(
        &mut self,
        store: &mut Store,
        user: &User<'_>,
        prepared: &Prepared<'_>,
        given: &Given,
        task: Task,
    ) -> Result<Output, Stop> {
        let py = user.py();
        let signature = store.signature()?;
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let restore = self.compiled || task == Task::Gradients;
        let varying = self.varying();
        let call = self.enter_host(store, user, given, restore, &varying)?;
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
            let update = output.last();
            if task.updates() && refusal.is_none() {
                refusal = refuse_update(update).err();
            }
        }
        let shown = holder.show(engine, outcome.is_ok() && task != Task::Gradients);
        let stop = self.leave_host(user, given, &signature);
        shown?;
        let stop = stop?;
        match (outcome, stop, refusal) {
            (_, _, Some(refusal)) => Err(Stop::Raised(refusal)),
            (Ok(output), ..) => Ok(output),
            (Err(_), Some(stop), _) => Err(stop),
            (Err(error), None, _) => Err(from_device(&error)),
        }
    }

    pub(super) fn varying(&self) -> Vec<u32> {
        let last = self.traces.last();
        last.map_or_else(Vec::new, |entry| entry.kept.varying.clone())
    }

    // what the host is given for the call under way, and what the engine is
    pub(super) fn enter_host(
        &self,
        store: &Store,
        user: &User<'_>,
        given: &Given,
        restore: bool,
        varying: &[u32],
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
            looked: given.looked.clone(),
            others: store.others.len(),
            varying: varying.to_vec(),
            sketch: false,
            tracers: Vec::new(),
            graph: None,
            held: Vec::new(),
            in_place: Vec::new(),
            stop: None,
            template: None,
        }));
        let mut others = store.others.clone();
        if self.compiled {
            others.extend_from_slice(&given.looked.arrays);
            others.extend_from_slice(&given.constants[..varying.len()]);
        }
        Ok(Call {
            others,
            rest: std::iter::once(key)
                .chain(given.arrays.iter().cloned())
                .collect(),
        })
    }

    // after the engine's call: what ended the trace; of a new trace, what is to be kept
    pub(super) fn leave_host(
        &mut self,
        user: &User<'_>,
        given: &Given,
        signature: &ModelSignature,
    ) -> PyResult<Option<Stop>> {
        let Some(current) = self.host.current.take() else {
            return Ok(None);
        };
        if let Some(template) = current.template {
            if let (true, Some(last)) = (self.compiled, self.traces.last_two().0) {
                last.kept.graph = current.graph;
                last.kept.in_place = current.in_place;
                self.see(user, given, Some(template.clone_ref(user.py())))?;
                self.unwatched = unwatched(user, &current.held, &signature.constants())?;
            }
            self.template = Some(template);
        }
        Ok(current.stop)
    }
}

// what a user has to be told of an array that the loss takes from where nobody looks
fn unwatched(user: &User<'_>, held: &[Array], known: &[usize]) -> PyResult<Option<String>> {
    let py = user.py();
    let mut held = held.iter();
    let Some(array) = held.find(|array| !known.contains(&faststep::engine::array::id(array)))
    else {
        return Ok(None);
    };
    let describe = py.import("faststep._reach")?.getattr("unwatched")?;
    let core = py.import("faststep._core")?;
    let array = bridge::wrap(py, array)?;
    let text = describe.call1((array, core.getattr("array_id")?, &user.loss_fn))?;
    text.extract().map(Some)
}

// an argument as the loss function names it, for its number among the objects that are looked at
fn named(user: &User<'_>, tree: &Tree, name: String) -> String {
    let Some(rest) = name.strip_prefix("argument ") else {
        return name;
    };
    let (number, rest) = rest.split_at(
        rest.find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len()),
    );
    let paths = tree.object_paths(user.py());
    match number
        .parse()
        .ok()
        .and_then(|number: usize| paths.get(number))
    {
        Some(path) => format!("argument {}{rest}", user.name(path)),
        None => name,
    }
}

// what MLX cannot compile, or a kernel that the compiler refuses (a full disk will do): nothing has changed by then
pub(super) fn from_device(error: &Error) -> Stop {
    match error {
        Error::Compile(e) => {
            Stop::Untraceable(format!("MLX's compilation fails on it ({})", e.what()))
        }
        Error::FirstEvaluation(e) => match NO_KERNEL.iter().find(|it| e.what().contains(it.0)) {
            Some((_, why)) => Stop::Untraceable((*why).into()),
            None => Stop::Raised(to_python(error)),
        },
        _ => Stop::Raised(to_python(error)),
    }
}
