//! Runs the traces of a call; uncompiled, where the loss cannot be traced.
use std::{cell::Cell, collections::HashMap, rc::Rc, time::Instant};

use faststep::{
    engine::{Call, Compiled, Output, Part, Rule, Stage, Task},
    Error,
};
use mlx_rs::Array;
use pyo3::{
    exceptions::PyRuntimeError,
    prelude::*,
    types::{PyList, PyWeakrefReference},
};

use super::{
    arguments::{Arguments, Batch},
    find::taken,
    flags::{is_true, read},
    known_graphs,
    trace_cache::{is_rare, warn, Key, Pin, PROBED, RARE_OPTIONS, RARE_STRUCTURE},
    Inner,
};
use crate::{
    host::{shown::TakenOut, Current},
    mlx::{
        bridge,
        errors::{mlx, raise_late, to_python},
    },
    reach::{
        advance::Advance,
        stop::{Stop, DISABLED},
        suspect::{put_back, Suspect},
        Before, Looked, Seen, Written,
    },
    store::{
        owner::{Holder, Undo},
        Prepared, Store,
    },
    tree::{paths::dotted, renewed::Remade, snapshot::Snapshot, walk::Scope, Tree},
};

/// MLX's error texts for a kernel that it cannot compile, and the explanation for the user.
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

/// The most batches in a row that store arrays where there were none and run uncompiled, before a step stays so.
const MAX_STORES: usize = 8;

/// The way of a call without a trace.
pub(super) const PLAIN: &str = "plain";

/// The most traces of which a loss that changes numbers itself is looked at once more.
pub(super) const MAX_CHECKS: usize = 4;

/// Inputs of a trace from one call, beside the model's own arrays.
pub(super) struct Given {
    pub(super) tree: Rc<Tree>,
    /// The arrays of the batch.
    pub(super) arrays: Vec<Array>,
    /// The addresses of the dicts and lists of the batch in which there are arrays.
    pub(super) holders: Vec<usize>,
    /// Objects that the loss reaches.
    pub(super) looked: Rc<Looked>,
    /// The loss function, the model, and objects among the arguments.
    pub(super) roots: Vec<Py<PyAny>>,
    /// The constants that the call's trace takes as inputs.
    pub(super) constants: Vec<Array>,
    /// What the loss would add to numbers of its own, where its trace stands for the call.
    pub(super) adds: Rc<Vec<Advance>>,
    /// The numbers of the model to which losses add.
    pub(super) counted: Rc<Vec<Py<PyAny>>>,
    /// True if it adds the same in the next call, to the numbers that there are then.
    pub(super) goes_on: bool,
    /// True if the call may run uncompiled where there is no trace for it.
    pub(super) may_be_rare: bool,
}

impl Given {
    pub(super) fn new(
        batch: Batch<'_>,
        looked: Looked,
        roots: Vec<Bound<'_, PyAny>>,
        may_be_rare: bool,
    ) -> Self {
        Self {
            tree: batch.tree,
            arrays: batch.arrays,
            holders: batch.holders,
            looked: Rc::new(looked),
            roots: roots.into_iter().map(Bound::unbind).collect(),
            constants: Vec::new(),
            adds: Rc::default(),
            counted: Rc::default(),
            goes_on: true,
            may_be_rare,
        }
    }

    pub(super) fn roots<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let roots = self.roots.iter().map(|root| root.bind(py).clone());
        roots.collect()
    }
}

impl Inner {
    // find or make the traces and run them; once more uncompiled if the loss cannot be traced. True: a trace was made
    pub(super) fn run<T>(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        task: Task,
        mut attempt: impl FnMut(&mut Self, &mut Store, &Given) -> Result<T, Stop>,
    ) -> PyResult<(T, bool)> {
        let started = Instant::now();
        self.check_compiler(user.py())?;
        if given.looked.is_known {
            self.check(store, user, given, task)?;
        }
        if !given.looked.is_known && self.compiled {
            self.becomes = RARE_STRUCTURE.into();
            let changed = self.reach.change();
            self.traces.note_structure(changed.as_deref());
            self.compiled = false;
        }
        loop {
            if !self.compiled && !self.numpy.takes_own {
                self.takes_numpy(store, user, given)?;
            }
            let found = self.find(store, user, given, task);
            let stop = match found.and_then(|()| attempt(self, store, given)) {
                Ok(output) => {
                    let seconds = started.elapsed().as_secs_f64();
                    let new = self.traces.settle(seconds);
                    if new {
                        self.seconds.trace += seconds;
                        self.keep_graph(store, given, user.py())?;
                    }
                    self.note_mode(store, &user.optimizer)?;
                    if self.compiled && task.updates() {
                        self.became = 0;
                    }
                    self.compile_again();
                    self.keep_suspect();
                    return Ok((output, new));
                }
                Err(stop) => stop,
            };
            self.traces.discard();
            self.unwatched = None;
            self.suspect = None;
            self.take_back_tried(user, &stop)?;
            match stop {
                Stop::Again => {
                    self.traces.drop_found(task);
                    continue;
                }
                // also of a call that was tried without a trace: that was no matter of tracing
                Stop::Raised(error) => return Err(self.raised(error)),
                Stop::Refused(_, error) if !self.compiled => return Err(self.raised(error)),
                Stop::Refused(place, _) => self.takes_number(user.py(), &place)?,
                // the kernels of an update alone, where the compiler has gone or the disk is full
                Stop::Untraceable(_) if self.compiling() == Compiled::Update => {
                    self.has_compiler = false;
                    self.traces.clear();
                }
                Stop::Untraceable(why)
                | Stop::Becomes(why)
                | Stop::Stores(why)
                | Stop::Reshapes(why)
                    if !self.compiled =>
                {
                    return Err(PyRuntimeError::new_err(format!(
                        "the loss cannot be trained as it is: {why}"
                    )));
                }
                // running statistics of BatchNorm in half precision become float32 at the first batch, and many an optimizer
                // makes a part of its state at its first update
                Stop::Becomes(why) if self.became == 0 => {
                    self.read.search_again();
                    self.becomes(why);
                }
                // a mask for each length, say
                Stop::Stores(why) if self.stores(&why) => {
                    for key in self.loss_keys(store, given, task)? {
                        self.traces
                            .note_storing(key, &given.looked, &why, user.py());
                    }
                    self.becomes(why);
                }
                // what a model keeps of its last batch, say
                Stop::Reshapes(why) if self.stores(&why) => {
                    for key in self.loss_keys(store, given, task)? {
                        self.traces.note_reshaping(key);
                    }
                    self.becomes(why);
                }
                Stop::Rare(why) => self.becomes = why.into(),
                Stop::Probe => {
                    self.probe = Some(true);
                    self.becomes = PROBED.into();
                }
                Stop::Untraceable(why)
                | Stop::Becomes(why)
                | Stop::Stores(why)
                | Stop::Reshapes(why) => {
                    self.fall_back(user.py(), why)?;
                    self.traces.clear();
                }
            }
            self.compiled = false;
        }
    }

    // the loss passes an array at a line where MLX takes a number
    fn takes_number(&mut self, py: Python<'_>, place: &str) -> PyResult<()> {
        let why = format!(
            "it passes an array where MLX takes a number ({place}): pass float(array), before the step if you can"
        );
        if self.became == 0 {
            self.becomes(why);
        } else {
            self.fall_back(py, why)?;
            self.traces.clear();
        }
        Ok(())
    }

    fn keep_suspect(&mut self) {
        if let (Some(mut suspect), Some(last)) = (self.suspect.take(), self.traces.last()) {
            suspect.seen = last.kept.seen.iter().map(Seen::numbers).collect();
            last.kept.suspect.replace(Some(suspect));
        }
    }

    // what a loss and an update have changed that were traced in vain, where the call goes on without the trace
    fn take_back_tried(&mut self, user: &Arguments<'_>, stop: &Stop) -> PyResult<()> {
        let before = user.before_update.take();
        if matches!(stop, Stop::Raised(_)) {
            return Ok(());
        }
        before.map_or(Ok(()), |before| before.put_back(user.py()))?;
        self.take_back_loss(user.py()) // it is called again
    }

    // let other steps know the graph of a new trace
    fn keep_graph(&self, store: &Store, given: &Given, py: Python<'_>) -> PyResult<()> {
        let kept = self.traces.last().map(|last| &last.kept);
        let Some((graph, varying)) = kept.and_then(|it| Some((it.graph.as_ref()?, &it.varying)))
        else {
            return Ok(());
        };
        let origin = self.origin(store, given, py)?;
        let kept = origin.map(|origin| known_graphs::keep(origin, graph, varying.clone(), py));
        kept.transpose().map(drop).map_err(mlx)
    }

    // run uncompiled from here on where what the loss reaches, or does itself, is a reason for it
    fn check(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        task: Task,
    ) -> PyResult<()> {
        let model = store.signature()?;
        if self
            .reach
            .settle(model.form, model.containers(), &given.looked)
        {
            let roots = given.roots(user.py());
            let looked = if given.may_be_rare {
                self.reach.look_unless_searching(&roots, &user.optimizer)
            } else {
                self.reach.look(&roots, &user.optimizer)
            };
            given.looked = Rc::new(looked?);
            if !given.looked.is_known {
                return Ok(());
            }
        }
        let why = match self
            .unwatched
            .take()
            .or_else(|| self.hidden(store, given, user.py()))
        {
            Some(why) => Some(why),
            None => self.suspected(store, user, given, (task, false))?,
        };
        match why.filter(|_| self.compiled) {
            Some(why) => self.give_up(user.py(), why), // which may raise: the next call is uncompiled all the same
            None => Ok(()),
        }
    }

    // why this call cannot be compiled: what the loss, or the optimizer, reaches cannot be watched
    fn hidden(&self, store: &Store, given: &Given, py: Python<'_>) -> Option<String> {
        let program = &given.looked.program;
        let is_given = || {
            let mut why = self.traces.recent().map(|entry| {
                let changes = (&entry.kept.written.stored[..], !entry.kept.adds.is_empty());
                given.looked.is_given(changes, py)
            });
            why.find_map(|why| why)
        };
        let of_model = || {
            let model = store.signature().ok()?.containers();
            let mut holders = given.holders.iter();
            holders.any(|it| model.contains(it)).then(|| {
                "a dict or a list of the model is among its arguments: let the loss take it from the model".into()
            })
        };
        let hidden = program.hidden.clone().or_else(is_given).or_else(of_model);
        let own = matches!(store.rule, Some(Rule::Host));
        hidden.or_else(|| self.read.hidden().filter(|_| own))
    }

    // run uncompiled from here on
    pub(super) fn give_up(&mut self, py: Python<'_>, why: String) -> PyResult<()> {
        self.compiled = false;
        self.traces.clear();
        self.fall_back(py, why)
    }

    // true if a loss that stores an array may be traced for the next batch
    fn stores(&self, why: &str) -> bool {
        self.became < MAX_STORES && (self.became == 0 || self.becomes != why)
    }

    // what the traces of a call are known by
    fn loss_keys(&self, store: &Store, given: &Given, task: Task) -> PyResult<Vec<Key>> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let rule = store.rule.as_ref().ok_or_else(missing)?;
        let parts = task.parts(rule).into_iter();
        let parts = parts.filter(|part| !matches!(part, Part::Update(_)));
        parts
            .map(|part| self.loss_key(store, given, rule, part))
            .collect()
    }

    fn becomes(&mut self, why: String) {
        self.became += 1;
        self.becomes = why;
    }

    fn fall_back(&mut self, py: Python<'_>, why: String) -> PyResult<()> {
        let message = format!(
            "this step cannot be compiled: {why}. It runs uncompiled from here on, with the same numbers but slower"
        );
        self.fallen = Some(why);
        warn(py, &message)
    }

    // true while one batch runs uncompiled, and the next will not
    pub(super) fn becomes_another(&self) -> bool {
        !self.compiled && self.options.compile && self.fallen.is_none()
    }

    fn raised(&mut self, error: PyErr) -> PyErr {
        if self.becomes_another() {
            self.became = 0;
        }
        self.compile_again();
        error
    }

    // compile again after a batch that ran uncompiled because an array on the model became another
    fn compile_again(&mut self) {
        if self.becomes_another() {
            self.compiled = true;
            // an uncompiled step reads the model's numbers at each call, and takes any batch: it serves for the next ones
            let comes_again = is_rare(&self.becomes) || self.traces.stores_again(&self.becomes);
            if self.becomes != RARE_STRUCTURE {
                self.traces.drop_eager(comes_again); // else both batches of a window come again
            }
        }
    }

    // record the mode of the step, and the reason if it is not native
    fn note_mode(&mut self, store: &Store, optimizer: &Bound<'_, PyAny>) -> PyResult<()> {
        let eager = self.traces.last().is_none_or(|e| e.trace.is_eager());
        let mode = match (eager, &store.rule) {
            (true, _) => PLAIN,
            (false, Some(Rule::Native(_))) => "native",
            (false, _) => "traced",
        };
        if std::mem::replace(&mut self.mode, mode) == mode
            && (mode != PLAIN || (self.reason.is_some() && self.reason == self.fallen))
        {
            return Ok(());
        }
        self.reason = match mode {
            "native" => None,
            "traced" => Some(store.why_traced(optimizer)?),
            _ if !self.options.compile => Some("compile=False".into()),
            _ => self
                .fallen
                .clone()
                .or_else(|| self.becomes_another().then(|| self.becomes.clone()))
                .or_else(|| Some(DISABLED.into())),
        };
        Ok(())
    }

    // without g++ MLX silently compiles nothing for the CPU
    fn check_compiler(&mut self, py: Python<'_>) -> PyResult<()> {
        if !self.compiled || std::mem::replace(&mut self.checked, true) {
            return Ok(());
        }
        let mlx = py.import("mlx.core")?;
        let device = mlx.call_method0("default_device")?.getattr("type")?;
        let compiler = py.import("shutil")?.call_method1("which", ("g++",))?;
        if cfg!(target_os = "linux") && compiler.is_none() && device.eq(mlx.getattr("cpu")?)? {
            (self.compiled, self.has_compiler) = (false, false);
            self.fall_back(py, "there is no C++ compiler (g++) on this machine".into())?;
        }
        Ok(())
    }

    // why an update of the optimizer's own code cannot be repeated: what it has taken as it was traced, or changed of what it reads
    fn changed_by_update(
        &mut self,
        user: &Arguments<'_>,
        taken: &[String],
    ) -> PyResult<Option<String>> {
        let name = user.optimizer.get_type().fully_qualified_name()?;
        if !taken.is_empty() {
            let taken = taken.join(", ");
            return Ok(Some(format!(
                "the optimizer ({name}) takes from {taken} as it updates, which a trace would do once: draw with mx.random, and keep \
                 other numbers in an mx.array of its state"
            )));
        }
        let changed = self.read.changed(&user.optimizer, &user.model)?;
        Ok(changed.map(|changed| {
            format!(
                "the optimizer's code reads {changed}, which it changes itself: keep it in an mx.array of its state, \
                 which alone a checkpoint has"
            )
        }))
    }

    // what of a step is compiled
    pub(super) fn compiling(&self) -> Compiled {
        // options that change at each step are constants of a kernel
        let rare = self.becomes_another() && self.becomes == RARE_OPTIONS;
        match (
            self.compiled,
            self.options.compile && self.has_compiler && !rare,
        ) {
            (true, _) => Compiled::Whole,
            (false, true) => Compiled::Update,
            (false, false) => Compiled::Nothing,
        }
    }

    // how often slots and looks refer to each dict and list, by its address
    fn holders(&self, prepared: &Prepared<'_>, given: &Given) -> HashMap<usize, isize> {
        let mut found = given.looked.program.references();
        if let Some(looked) = self.read.looked() {
            for (address, count) in looked.program.references() {
                *found.entry(address).or_insert(0) += count;
            }
        }
        for slot in &prepared.state {
            *found.entry(slot.place.container()).or_insert(0) += 1;
        }
        found
    }

    pub(super) fn attempt<'py>(
        &mut self,
        store: &mut Store,
        user: &Arguments<'py>,
        prepared: &Prepared<'py>,
        given: &Given,
        task: Task,
    ) -> Result<Output, Stop> {
        let py = user.py();
        let signature = store.signature()?;
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let suspect = self.suspect.take();
        let restore = self.compiled || task == Task::Gradients;
        let varying = self.varying();
        let call = self.enter_host(store, user, given, restore, &varying)?;
        let known = self.traces.are_known(task);
        if let (true, Some(current)) = (self.compiled, self.host.current.borrow_mut().as_mut()) {
            current.known = known;
        }
        if !self.compiled && given.looked.program.meets_optimizer {
            store.expose(py)?; // the loss may read its state
        }
        let engine = store.engine.as_mut().ok_or_else(missing)?;
        let before = user.before.borrow_mut().take_if(|_| !self.compiled);
        let undo = before.map(|before| TakeBack {
            before,
            bad: self.bad.clone(),
        });
        let undo = undo.as_ref().map(|undo| -> &dyn Undo { undo });
        let moments = store.moments.as_mut();
        let remakes = task.updates(); // what an update replaces is replaced by one
        let is_shared = remakes && !store.remade.is_empty() && {
            let known = self.holders(prepared, given);
            let mut all = store.remade.iter();
            all.any(|it| it.is_shared(&user.optimizer, &known))
        };
        let holder = Holder::new(py, prepared, &signature.roles, moments);
        let mut holder = holder.with(undo, is_shared);
        let traces = self.traces.of(task).ok_or_else(missing)?;
        let name = |tensor: usize| dotted(signature.path(tensor));
        let host = matches!(store.rule, Some(Rule::Host)) && !self.compiled && task.updates();
        let optimizer = host
            .then(|| Uncompiled::take(&user.optimizer))
            .transpose()?;
        let outcome = engine.call(task, traces, call, &name, &mut holder);
        let refused = matches!(outcome, Err(Error::Nonfinite(_)));
        self.refused |= refused;
        let done = outcome.is_ok() || refused;
        store.clock.enter(Stage::Objects);
        let remade = self
            .host
            .current
            .borrow_mut()
            .as_mut()
            .and_then(|it| it.remade.take());
        if let Some((again, mut new)) = remade {
            store
                .remade
                .retain(|remade| again.contains(&remade.address()));
            store.remade.append(&mut new);
        }
        if done && remakes && !store.remade.is_empty() {
            let known = self.holders(prepared, given);
            holder.remake(&user.optimizer, &known, &mut store.remade)?;
        }
        let shown = holder.show(engine, done && task != Task::Gradients);
        let loose = self
            .host
            .current
            .borrow()
            .as_ref()
            .is_some_and(|it| it.loose);
        let stop = self.leave_host(user, given, done);
        shown?;
        if let (Some(optimizer), true) = (optimizer, loose) {
            let state = store
                .engine
                .as_ref()
                .map_or(&[][..], |engine| engine.state());
            optimizer.settle(&user.optimizer, state, &outcome)?;
            self.read.search_again(); // objects with arrays may have come into its state
        }
        let outcome = finished(outcome, stop?);
        match (outcome, self.positions.take()) {
            (Err(stop), Some(positions)) => {
                let new = std::mem::replace(&mut self.suspect, suspect);
                Err(taken_back(positions.bind(py), new, stop)?)
            }
            (outcome, _) => {
                self.suspect = self.suspect.take().or(suspect);
                outcome
            }
        }
    }

    pub(super) fn varying(&self) -> Vec<u32> {
        let last = self.traces.last();
        last.map_or_else(Vec::new, |entry| entry.kept.varying.clone())
    }

    // set up the host for this call; returns the engine's arguments
    pub(super) fn enter_host(
        &self,
        store: &Store,
        user: &Arguments<'_>,
        given: &Given,
        restore: bool,
        varying: &[u32],
    ) -> PyResult<Call> {
        let py = user.py();
        let signature = store.signature()?;
        let missing = || PyRuntimeError::new_err("there is no random key");
        let key = bridge::get(&store.key_list.bind(py).get_item(0)?).ok_or_else(missing)?;
        let host = matches!(store.rule, Some(Rule::Host));
        self.host.current.replace(Some(Current {
            model: user.model.clone().unbind(),
            optimizer: user.optimizer.clone().unbind(),
            loss_fn: user.loss_fn.clone().unbind(),
            weighted: self.options.weighted,
            mixed: self.options.compute_dtype.is_some(),
            arguments: if !self.compiled && self.numpy.takes_own {
                user.own.clone().unbind()
            } else {
                user.passed.clone().unbind()
            },
            own: user.own.clone().unbind(),
            key_list: store.key_list.clone_ref(py),
            roles: signature.roles.clone(),
            trainable: signature.trainable.clone_ref(py),
            compiled: self.compiled,
            reshapes: self.reshapes,
            restore,
            looked: given.looked.clone(),
            others: store.others.len(),
            varying: varying.to_vec(),
            known: (false, false),
            were_remade: store.remade.iter().map(Remade::address).collect(),
            remade: None,
            sketch: false,
            ends: true,
            by_loss: self.compiled && !(host && self.read.of_numbers),
            loss_arrays: None,
            tracers: Vec::new(),
            graph: None,
            held: Vec::new(),
            loose: false,
            written: Written::default(),
            taken_out: TakenOut::default(),
            swapped: Vec::new(),
            suspect: Suspect::default(),
            changed: Default::default(),
            positions: None,
            moving: self.read.moving().map(|moving| moving.clone_ref(py)),
            taken: None,
            of_update: self.read.looked().filter(|_| host).cloned(),
            of_schedules: (!self.told_late).then(|| self.of_schedules.clone()),
            replaced: self.replaced.clone(),
            host,
            in_state: None,
            late: None,
            probe: self.probe,
            stop: None,
            template: None,
        }));
        let mut others = vec![store.others.clone()];
        if self.compiled {
            others.push(given.looked.arrays.clone());
            if !varying.is_empty() {
                let constants = given.constants[..varying.len()].to_vec();
                others.push(Rc::new(constants.into()));
            }
        }
        Ok(Call {
            others,
            rest: std::iter::once(key)
                .chain(given.arrays.iter().cloned())
                .collect(),
        })
    }

    // after the engine's call: the reason why tracing stopped, if any; stores the graph of a new trace
    pub(super) fn leave_host(
        &mut self,
        user: &Arguments<'_>,
        given: &Given,
        done: bool,
    ) -> PyResult<Option<Stop>> {
        let Some(mut current) = self.host.current.take() else {
            return Ok(None);
        };
        self.positions = current.positions;
        self.swapped = current.swapped;
        let of_update = current.taken.take();
        if current.late.is_some() {
            (self.told_late, self.late) = (true, current.late);
        }
        if !self.compiled && self.probe == Some(true) && current.stop.is_none() {
            self.probe = None;
            let drawn = std::mem::take(&mut current.suspect.drawn).join(", ");
            self.unwatched = (!drawn.is_empty()).then(|| taken(&drawn));
        }
        self.changes_model |= !current.suspect.model.is_empty();
        if !current.suspect.is_empty() {
            self.suspect = Some(current.suspect);
        }
        if let Some(template) = current.template {
            if let (true, Some(last)) = (self.compiled, self.traces.last_mut()) {
                last.kept.graph = current.graph.map(Rc::new);
                last.kept.written = current.written;
                last.kept.taken_out = Rc::new(current.taken_out);
                match self.note_seen(user, given, &current.held, &template) {
                    // the step has been taken: what it has made of the model is shown before this is raised
                    Err(error) if done => raise_late(error),
                    noted => noted?,
                }
            }
            self.template = Some(template);
        }
        if let (Some(taken), None) = (of_update, &current.stop) {
            self.unwatched = match self.changed_by_update(user, &taken)? {
                None => self.unwatched.take(),
                why => why,
            };
        }
        self.read.let_go();
        Ok(current.stop)
    }

    // what a new trace is valid for
    fn note_seen(
        &mut self,
        user: &Arguments<'_>,
        given: &Given,
        held: &[Array],
        template: &Py<PyAny>,
    ) -> PyResult<()> {
        let py = user.py();
        let held = held.iter().filter(|it| !self.read.has(it));
        let (why, pins) = unwatched(user, &held.collect::<Vec<_>>())?;
        if let Some(last) = self.traces.last_mut() {
            last.kept.pins = pins;
        }
        self.unwatched = why;
        let now = self.reach.look(&given.roots(py), &user.optimizer)?;
        // what the loss has made is looked at first
        let is_same = now.program.id == given.looked.program.id;
        let now = if is_same { &now } else { &*given.looked };
        self.see(py, (given, now), Some(template.clone_ref(py)), None)
    }
}

/// What there was before an uncompiled loss, and whether that has been put back.
struct TakeBack<'py> {
    before: Before<'py>,
    bad: Rc<Cell<bool>>,
}

impl Undo for TakeBack<'_> {
    fn is_needed(&self, py: Python<'_>) -> PyResult<bool> {
        self.before.has_changed(py)
    }

    fn take_back(&self, py: Python<'_>) -> PyResult<()> {
        self.bad.set(true);
        self.before.put_back(py)
    }
}

/// An optimizer before an uncompiled update by its own code.
struct Uncompiled<'py> {
    tree: Tree,
    snapshot: Snapshot<'py>,
}

impl<'py> Uncompiled<'py> {
    fn take(optimizer: &Bound<'py, PyAny>) -> PyResult<Self> {
        let mut snapshot = Snapshot::take(optimizer)?;
        snapshot.let_go(optimizer.py())?;
        let (tree, _) = Tree::record(optimizer, Scope::Whole)?;
        Ok(Self { tree, snapshot })
    }

    // after an update that changed numbers or containers: keep them, or take them back where the update was none
    fn settle(
        self,
        optimizer: &Bound<'py, PyAny>,
        state: &[Array],
        outcome: &Result<Output, Error>,
    ) -> PyResult<()> {
        let py = optimizer.py();
        let missed = match outcome {
            Ok(output) => output.last().skipped.as_ref(),
            Err(_) => return self.snapshot.restore(),
        };
        if let Some(missed) = missed {
            if read(is_true(py, missed))? {
                return self.snapshot.restore();
            }
        }
        // containers may be others now
        let (after, slots) = Tree::record(optimizer, Scope::Whole)?;
        let mut pairs = slots.iter().zip(state);
        if slots.len() == state.len() && pairs.all(|(slot, array)| slot.holds(array)) {
            return Ok(());
        }
        let paths = self.tree.paths(py).into_iter();
        let known: HashMap<_, _> = paths.zip(state).collect();
        for (path, slot) in after.paths(py).iter().zip(&slots) {
            if let Some(array) = known.get(path).filter(|array| !slot.holds(array)) {
                slot.show(array)?;
            }
        }
        Ok(())
    }
}

// why a trace with arrays from places that are not watched cannot be used again; or those to look at before each use
fn unwatched(user: &Arguments<'_>, held: &[&Array]) -> PyResult<(Option<String>, Vec<Pin>)> {
    if held.is_empty() {
        return Ok((None, Vec::new()));
    }
    let py = user.py();
    let arrays = held.iter().map(|array| bridge::wrap(py, array));
    let arrays = PyList::new(py, arrays.collect::<PyResult<Vec<_>>>()?)?;
    let places = py.import("faststep._step._places")?;
    let id = py.import("faststep._core")?.getattr("array_id")?;
    let found = places.getattr("held")?.call1((arrays, id, &user.loss_fn))?;
    let (why, pins): (Option<String>, Vec<(Bound<'_, PyWeakrefReference>, usize)>) =
        found.extract()?;
    let pins = pins.into_iter().map(|(array, id)| Pin::new(array, id));
    Ok((why, pins.collect()))
}

// after a trace that was made in vain, and before the loss is called again: take back what it has changed and drawn itself
fn taken_back(
    positions: &Bound<'_, PyAny>,
    suspect: Option<Suspect>,
    stop: Stop,
) -> PyResult<Stop> {
    if matches!(stop, Stop::Raised(_)) {
        return Ok(stop);
    }
    if let Some(mut suspect) = suspect {
        suspect.swap(positions.py(), false)?;
    }
    let lost = put_back(positions)?.join(", ");
    if lost.is_empty() {
        return Ok(stop);
    }
    Ok(stop.with(&format!(
        ", and what it took from {lost} before that is lost: this step goes on with what comes next (`compile=False` loses nothing)"
    )))
}

// the result of the engine's call; where it failed, why tracing stopped comes before the error
pub(super) fn finished<T>(outcome: Result<T, Error>, stop: Option<Stop>) -> Result<T, Stop> {
    outcome.map_err(|error| stop.unwrap_or_else(|| from_device(&error)))
}

// a loss that MLX cannot compile, or a kernel that the compiler refuses (a full disk, say): nothing has changed yet
fn from_device(error: &Error) -> Stop {
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
