//! One call of the engine by the traces that have been found.
use std::{cell::RefCell, rc::Rc};

use faststep::{
    engine::{Call, CallTraces, Engine, Output, Outputs, Role, Rule, Stage, Task, UpdateCall},
    kernels, Error,
};
use mlx_rs::Array;
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use super::{
    arguments::{Arguments, Batch},
    choose::{task_of, Behind, Way},
    traces::warn,
    Inner,
};
use crate::{
    host::{CalledUpdate, Current, Loss, Update, UpdateWay},
    mlx::{
        bridge,
        errors::{mlx, to_python},
    },
    store::{
        owner::{CallsUpdate, Holder},
        Prepared, Store,
    },
    tree::{paths::dotted, snapshot::Snapshot},
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
        "MLX cannot load one of its CPU kernels from where it was written: that has to be a file system that allows execution",
    ),
    (
        "Failed to compile kernel",
        "the compiler of CUDA failed on one of MLX's kernels",
    ),
];

/// Work of the engine with the traces of a call: its outcome, and whether there are new parameters.
pub(super) type Work<'a, T> = dyn FnMut(&mut Engine, CallTraces<'_>, Call, &mut Holder<'_, '_>) -> (Result<T, Error>, bool)
    + 'a;

/// Why the engine has not done its work.
pub(super) enum Failure {
    /// An exception for the user.
    Raised(PyErr),
    /// MLX cannot compile the step; nothing has changed.
    NotCompiled(String),
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Raised(error)
    }
}

impl Inner {
    /// Find or make the traces and run them. True: a trace was made.
    pub(super) fn run<'py>(
        &mut self,
        store: &mut Store,
        user: &Arguments<'py>,
        prepared: &mut Prepared<'py>,
        (batch, way): (&Batch<'py>, &mut Way<'py>),
        task: Task,
    ) -> PyResult<(Output, bool)> {
        let started = std::time::Instant::now();
        let task = task_of(store, task, self.update_left_out(way));
        let signature = store.signature()?;
        let name = |tensor: usize| dotted(signature.path(tensor));
        let given = (&*prepared, batch, &mut *way);
        if self.shards.is_some() {
            let rule = store.rule.as_ref();
            self.awaited = rule.map_or(1, |rule| task.parts(rule).len());
        }
        let (mut ranks, update) = (self.ranks.take(), self.updates + 1);
        let output = self.evaluate(
            store,
            user,
            given,
            task,
            &mut |engine, traces, call, holder| {
                let ranks = ranks.as_mut().map(|ranks| (ranks, update));
                let outcome = engine.call(task, traces, call, &name, holder, ranks);
                let done = outcome.is_ok() || matches!(outcome, Err(Error::Nonfinite(_)));
                (outcome, done && task != Task::Gradients)
            },
        );
        self.ranks = ranks;
        let mut output = output?;
        if output.calls {
            self.awaited += usize::from(self.shards.is_some());
            let given = (&mut *prepared, batch, &*way);
            output = self.update_behind(store, user, given, output)?;
            self.traces.use_again(|entry| entry.key.part.has_loss());
        } else if task == Task::Clipped {
            self.show_batch(store, user, prepared, true)?;
        }
        let seconds = started.elapsed().as_secs_f64();
        let new = self.traces.settle(seconds);
        if new {
            self.seconds.trace += seconds;
        }
        self.note_update(store, user, way)?;
        let own = matches!(store.rule, Some(Rule::Host)) && self.own_updates.number().is_none();
        let reason = self.own_updates.reason();
        let own = own
            .then(|| store.why_called(&user.optimizer, reason))
            .transpose()?;
        let parts = self.traces.of(task).into_iter();
        let mut parts = parts.flat_map(|it| std::iter::once(it.trace).chain(it.update));
        let is_partial =
            matches!(store.rule, Some(Rule::Native(_))) && parts.any(|trace| trace.is_partial());
        self.note_mode(way, own, is_partial);
        Ok((output, new))
    }

    /// Find or make the traces, and do `work` with them and the engine; once more without compilation where MLX fails to compile a
    /// step. `work` returns whether the engine has new parameters to be shown.
    pub(super) fn evaluate<'py, T>(
        &mut self,
        store: &mut Store,
        user: &Arguments<'py>,
        (prepared, batch, way): (&Prepared<'py>, &Batch<'py>, &mut Way<'py>),
        task: Task,
        work: &mut Work<'_, T>,
    ) -> PyResult<T> {
        loop {
            self.find(store, user, batch, way, task)?;
            match self.attempt(store, user, prepared, (batch, way), task, work) {
                Ok(made) => return Ok(made),
                Err(failure) => {
                    self.traces.discard();
                    match failure {
                        Failure::Raised(error) => return Err(error),
                        Failure::NotCompiled(why) if self.has_compiler => {
                            self.has_compiler = false;
                            self.traces.clear();
                            self.become_plain(user.py(), why)?;
                        }
                        Failure::NotCompiled(why) => return Err(PyRuntimeError::new_err(why)),
                    }
                }
            }
        }
    }

    /// Evaluate each call by itself from here on, after a warning.
    pub(super) fn become_plain(&mut self, py: Python<'_>, why: String) -> PyResult<()> {
        let message = format!(
            "this step cannot be compiled: {why}. It runs uncompiled from here on, with the same numbers but slower"
        );
        self.plain = Some(why);
        warn(py, &message)
    }

    // without a g++ that MLX knows of it silently compiles nothing for the CPU
    pub(super) fn check_compiler(&mut self, py: Python<'_>) -> PyResult<()> {
        if !self.options.compile || std::mem::replace(&mut self.checked, true) {
            return Ok(());
        }
        let device = py.import("mlx.core")?;
        let on_cpu = device
            .call_method0("default_device")?
            .getattr("type")?
            .eq(device.getattr("cpu")?)?;
        let compiler = py.import("shutil")?.call_method1("which", ("g++",))?;
        if cfg!(target_os = "linux") && compiler.is_none() && on_cpu && !kernels::are_fused() {
            self.has_compiler = false;
            let why = if kernels::need_compiler() {
                "there is no C++ compiler (g++) on this machine"
            } else {
                "mx.compile has been used before faststep was imported, on a machine without a C++ compiler (g++): import faststep first"
            };
            self.become_plain(py, why.into())?;
        }
        Ok(())
    }

    fn note_mode(&mut self, way: &Way<'_>, own: Option<String>, is_partial: bool) {
        let plain = || match &self.plain {
            Some(why) => Some(why.clone()),
            None if !self.options.compile => Some("compile=False".into()),
            None => {
                Some("many graphs have been made, and this is the first call with its own".into())
            }
        };
        self.mode = match way {
            Way::Plain(_) => ("plain", plain()),
            Way::Called(_) if self.plain.is_some() => ("plain", plain()),
            Way::LeftOut(_) | Way::Called(_) if is_partial && own.is_none() => (
                "plain",
                Some("options of the optimizer have changed again and again".into()),
            ),
            Way::LeftOut(_) if own.is_none() => ("native", None),
            Way::Called(called) if called.is_check && own.is_none() => ("native", None),
            Way::LeftOut(_) | Way::Called(_) => ("called", own),
            Way::Nothing | Way::Updated(_) => return,
        };
    }

    // the engine's arguments: the model's other arrays, those in which the graph ends, the key and the batch
    pub(super) fn enter_host(
        &mut self,
        store: &Store,
        user: &Arguments<'_>,
        batch: &Batch<'_>,
        (way, calls): (&mut Way<'_>, bool),
    ) -> PyResult<Call> {
        let py = user.py();
        let missing = || PyRuntimeError::new_err("there is no random key");
        let key = bridge::get(&store.key_list.bind(py).get_item(0)?).ok_or_else(missing)?;
        let mut others = vec![store.others.clone()];
        let eager = self.traces.last().is_none_or(|last| last.trace.is_eager());
        let by_itself = eager && self.options.compile && self.has_compiler;
        let loss = match way {
            Way::Called(called) => {
                others.push(Rc::new(called.leaves.clone().into()));
                called
                    .graph
                    .clone()
                    .map_or(Loss::None, |graph| Loss::Graph(graph, by_itself))
            }
            Way::Plain(called) => {
                let made = called.arrays().map_err(mlx)?;
                Loss::Arrays(std::cell::RefCell::new(Some(made)))
            }
            Way::LeftOut(_) => {
                let last = self.traces.last();
                others.extend(last.map(|last| last.kept.leaves.clone()));
                let graph = last.and_then(|last| last.kept.graph.clone());
                graph.map_or(Loss::None, |graph| Loss::Graph(graph, by_itself))
            }
            Way::Nothing | Way::Updated(_) => Loss::None,
        };
        let (update, call) = match (way, self.own_updates.left_out()) {
            (Way::Updated(behind), _) => (behind.update.way(), Some(behind.call.clone())),
            (Way::LeftOut(_), Some(it)) => {
                let way = UpdateWay::Graph(it.graph.clone(), Some(it.leaves.clone()));
                (way, None)
            }
            _ if calls => (
                UpdateWay::Call(Box::new(self.update_of(store, user, false)?)),
                None,
            ),
            _ => (UpdateWay::Nothing, None),
        };
        self.host.current.replace(Some(Current {
            loss,
            update,
            optimizer: user.optimizer.clone().unbind(),
            raised: None,
        }));
        let arrays = batch.arrays.iter().cloned();
        Ok(call.unwrap_or_else(|| Call {
            others,
            rest: std::iter::once(key).chain(arrays).collect(),
        }))
    }

    // the objects of a called update
    fn update_of(&self, store: &Store, user: &Arguments<'_>, in_engine: bool) -> PyResult<Update> {
        let (py, signature) = (user.py(), store.signature()?);
        Ok(Update {
            model: user.model.clone().unbind(),
            key_list: store.key_list.clone_ref(py),
            trainable: signature.trainable.clone_ref(py),
            roles: signature.roles.clone(),
            transform: self.own_updates.transform().cloned(),
            compiles: self.options.compile && self.has_compiler,
            in_engine,
            watched: self.own_updates.list(&user.optimizer)?,
            observed: self.own_updates.observes(),
        })
    }

    // the update by the optimizer's own code behind a batch that has been taken; an error leaves all as it was
    fn update_behind<'py>(
        &mut self,
        store: &mut Store,
        user: &Arguments<'py>,
        (prepared, batch, way): (&mut Prepared<'py>, &Batch<'py>, &Way<'py>),
        taken: Output,
    ) -> PyResult<Output> {
        let before = Rc::new(RefCell::new(Some(Snapshot::take(&user.optimizer)?)));
        let started = std::time::Instant::now();
        let called = self.call_update(store, user, way, &taken.batch);
        let seconds = started.elapsed().as_secs_f64();
        let outcome = called.and_then(|(mut update, call)| {
            prepared.state = update.state.take().unwrap_or_default();
            let behind = Behind {
                update,
                call,
                before: before.clone(),
            };
            self.evaluate_update(store, user, (prepared, batch), behind)
        });
        let error = match outcome {
            Ok(update) => {
                let mut spent = update.seconds;
                spent.build += seconds;
                return Ok(Output {
                    batch: taken.batch.and(update.batch),
                    update: None,
                    calls: true,
                    seconds: spent,
                });
            }
            Err(error) => error,
        };
        self.own_updates.observed = None;
        if let Some(before) = before.take() {
            before.restore()?;
        }
        if let Some(engine) = &mut store.engine {
            engine.without_update();
        }
        self.show_batch(store, user, prepared, false)?;
        Err(error)
    }

    fn evaluate_update<'py>(
        &mut self,
        store: &mut Store,
        user: &Arguments<'py>,
        (prepared, batch): (&Prepared<'py>, &Batch<'py>),
        behind: Behind<'py>,
    ) -> PyResult<Output> {
        let mut way = Way::Updated(behind);
        let given = (prepared, batch, &mut way);
        let name = |_: usize| String::new();
        let (mut ranks, update) = (self.ranks.take(), self.updates + 1);
        let output = self.evaluate(
            store,
            user,
            given,
            Task::Given,
            &mut |engine, traces, call, holder| {
                let ranks = ranks.as_mut().map(|ranks| (ranks, update));
                let outcome = engine.call(Task::Given, traces, call, &name, holder, ranks);
                let done = outcome.is_ok();
                (outcome, done)
            },
        );
        self.ranks = ranks;
        let output = output?;
        if let Way::Updated(behind) = &way {
            behind.update.fill(&output.batch.kept).map_err(mlx)?;
        }
        Ok(output)
    }

    // show what a batch that no update follows has changed
    fn show_batch<'py>(
        &mut self,
        store: &Store,
        user: &Arguments<'py>,
        prepared: &Prepared<'py>,
        done: bool,
    ) -> PyResult<()> {
        let signature = store.signature()?;
        let Some(engine) = &store.engine else {
            return Ok(());
        };
        let holder = Holder::new(user.py(), prepared, &signature.roles, None, None);
        let mut holder = holder.behind(std::mem::take(&mut self.released), None);
        holder.show(engine, done)
    }

    // call the optimizer with the gradients of a batch; the arguments of the part that follows
    fn call_update<'py>(
        &mut self,
        store: &Store,
        user: &Arguments<'py>,
        way: &Way<'py>,
        batch: &Outputs,
    ) -> PyResult<(CalledUpdate<'py>, Call)> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        if let Way::Called(called) | Way::Plain(called) = way {
            let values = batch.loss.iter().chain(&batch.aux);
            called.fill(values).map_err(mlx)?; // the optimizer's code may read them
        }
        let engine = store.engine.as_ref().ok_or_else(missing)?;
        let last = self.traces.last().ok_or_else(missing)?;
        let (parameters, gradients) = engine.given(&last.trace.recipe).map_err(mlx)?;
        let key = bridge::get(&store.key_list.bind(user.py()).get_item(0)?).ok_or_else(missing)?;
        let call = Call {
            others: vec![store.others.clone()],
            rest: vec![key],
        };
        let count = store.others.len();
        let mut call = call.behind(count, batch);
        let others: Vec<Array> = call.others().cloned().collect();
        let mut update = self.update_of(store, user, store.has_own_state())?;
        let given = UpdateCall {
            gradients: &gradients,
            parameters: &parameters,
            state: engine.state(),
            others: &others,
            key: call.rest.first(),
        };
        let called = self
            .host
            .call_update(&mut update, &user.optimizer, &given)?;
        self.own_updates.observed = update.observed;
        let moved = called.state.is_none() || called.keeps();
        self.own_updates.note_moved(store.has_own_state() && moved);
        if called.graph.is_some() {
            call.others.push(Rc::new(called.leaves.clone().into()));
        }
        Ok((called, call))
    }

    fn attempt<'py, T>(
        &mut self,
        store: &mut Store,
        user: &Arguments<'py>,
        prepared: &Prepared<'py>,
        (batch, way): (&Batch<'py>, &mut Way<'py>),
        task: Task,
        work: &mut Work<'_, T>,
    ) -> Result<T, Failure> {
        let signature = store.signature()?;
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let updates = self.calls_update(store, task, way);
        let call = self.enter_host(store, user, batch, (way, updates))?;
        if let Way::Called(called) = way {
            called.release();
        }
        let goes_on = task == Task::Clipped;
        let before = match &*way {
            Way::Updated(behind) => Some(behind.before.clone()),
            _ => None,
        };
        let released = before.is_some() && std::mem::take(&mut self.released);
        let engine = store.engine.as_mut().ok_or_else(missing)?;
        let moments = store.moments.as_mut();
        let fill = |outputs: &Outputs| match &*way {
            Way::Called(called) => called.fill(outputs.loss.iter().chain(&outputs.aux)),
            _ => Ok(()),
        };
        let calls = updates.then_some(CallsUpdate {
            optimizer: &user.optimizer,
            fill: &fill,
        });
        let holder = Holder::new(user.py(), prepared, &signature.roles, moments, calls);
        let mut holder = holder.before_call(goes_on).behind(released, before);
        let traces = self.traces.of(task).ok_or_else(missing)?;
        let (outcome, done) = work(engine, traces, call, &mut holder);
        store.clock.enter(Stage::Objects);
        let shown = if goes_on && outcome.is_ok() {
            self.released = holder.has_released();
            Ok(())
        } else {
            holder.show(engine, done)
        };
        let current = self.host.current.take();
        let (raised, update) =
            current.map_or((None, UpdateWay::Nothing), |it| (it.raised, it.update));
        if let UpdateWay::Call(update) = update {
            self.own_updates.observed = update.observed.filter(|_| done);
        }
        if let (Err(_), Way::Called(called)) = (&outcome, &*way) {
            _ = self.recover(store, user, prepared, batch, called); // the error of the step is the one to tell
        }
        shown?;
        finished(outcome, raised)
    }

    // give what the loss has made its values all the same, from the arrays that there are
    pub(super) fn recover(
        &self,
        store: &Store,
        user: &Arguments<'_>,
        prepared: &Prepared<'_>,
        batch: &Batch<'_>,
        called: &crate::host::Called<'_>,
    ) -> PyResult<()> {
        let Some(engine) = &store.engine else {
            return Ok(());
        };
        let parameters = engine.parameters();
        if !parameters.iter().all(|array| array.size() > 0) {
            return Ok(());
        }
        let given = self.given(store, prepared, batch)?;
        let key = bridge::get(&store.key_list.bind(user.py()).get_item(0)?);
        key.map_or(Ok(()), |key| called.recover(given.traced(), &key))
            .map_err(mlx)
    }

    // tracers of the arrays that the loss is called with
    pub(super) fn given(
        &self,
        store: &Store,
        prepared: &Prepared<'_>,
        batch: &Batch<'_>,
    ) -> PyResult<crate::host::Given> {
        let signature = store.signature()?;
        let scale = store
            .engine
            .as_ref()
            .and_then(|it| it.loss_scale(&self.options));
        let (mut parameters, mut others): (Vec<Option<Array>>, Vec<Option<Array>>) =
            (Vec::new(), Vec::new());
        for (slot, (role, _)) in prepared.model.iter().zip(signature.roles.iter()) {
            let (list, at) = match role {
                Role::Parameter(at) => (&mut parameters, *at),
                Role::Other(at) => (&mut others, *at),
            };
            if list.len() <= at {
                list.resize(at + 1, None);
            }
            list[at] = bridge::get(&slot.object);
        }
        let missing = || PyRuntimeError::new_err("an array of the model is gone");
        let parameters: Option<Vec<Array>> = parameters.into_iter().collect();
        let others: Option<Vec<Array>> = others.into_iter().collect();
        let (parameters, others) = (parameters.ok_or_else(missing)?, others.ok_or_else(missing)?);
        let dtype = self.options.compute_dtype;
        crate::host::Given::new(&parameters, &others, &batch.arrays, scale, dtype).map_err(mlx)
    }
}

// the engine's outcome; what the user's code raised comes before its error
pub(super) fn finished<T>(outcome: Result<T, Error>, raised: Option<PyErr>) -> Result<T, Failure> {
    outcome.map_err(|error| match raised {
        Some(raised) => Failure::Raised(raised),
        None => from_device(&error),
    })
}

// the first line of an error's text, without what a compiler printed
fn brief(text: &str) -> String {
    const MOST: usize = 600; // letters: room for a path and what is wrong with it
    text.trim()
        .lines()
        .next()
        .map_or_else(String::new, |line| line.chars().take(MOST).collect())
}

// a step that MLX cannot compile, or a kernel that the compiler refuses (a full disk, say): nothing has changed yet
fn from_device(error: &Error) -> Failure {
    match error {
        Error::Compile(e) => {
            Failure::NotCompiled(format!("MLX's compilation fails on it ({})", e.what()))
        }
        Error::FirstEvaluation(e) => match NO_KERNEL.iter().find(|it| e.what().contains(it.0)) {
            Some((_, why)) => Failure::NotCompiled(format!("{why} (MLX: {})", brief(e.what()))),
            None => Failure::Raised(to_python(error)),
        },
        _ => Failure::Raised(to_python(error)),
    }
}
