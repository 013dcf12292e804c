//! A call's traces are found or made, and run; once more, uncompiled, where the loss cannot be traced.
use std::{rc::Rc, time::Instant};

use faststep::{
    layout::Layout,
    outputs::Outputs,
    step::{Call, Output},
    task::Task,
    trace::{Part, Recipe, Rule, Trace},
    Error,
};
use mlx_rs::Array;
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use super::Inner;
use crate::{
    bridge,
    call::User,
    errors::to_python,
    holder::Holder,
    host::{Current, Stop},
    refuse::{refuse, refuse_update},
    store::{Prepared, Store},
    traces::{warn, Key},
    tree::Tree,
};

impl Inner {
    // traces where it has to and runs; once more, uncompiled, where the loss cannot be traced. True: a new trace
    pub(super) fn run<T>(
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
                    self.compile_again();
                    return Ok((output, new));
                }
                Err(stop) => stop,
            };
            let new = self.traces.discard();
            match stop {
                Stop::Raised(error) => return Err(error),
                Stop::Untraceable(why) | Stop::Becomes(why) if !(self.compiled && new) => {
                    return Err(PyRuntimeError::new_err(why));
                }
                // BatchNorm's, of a model in half precision, become float32 at the first batch
                Stop::Becomes(_) if self.became == 0 => self.became = 1,
                Stop::Untraceable(why) | Stop::Becomes(why) => fall_back(user.py(), &why)?,
            }
            self.compiled = false;
            self.traces.clear();
        }
    }

    // behind a batch that ran uncompiled only because a buffer became another
    fn compile_again(&mut self) {
        if self.became == 1 && !self.compiled {
            self.became = 2;
            self.compiled = true;
            self.traces.clear();
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

    pub(super) fn attempt(
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
    pub(super) fn enter_host(
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
    pub(super) fn leave_host(&mut self) -> Option<Stop> {
        let current = self.host.current.take();
        let (stop, template) = current.map_or((None, None), |c| (c.stop, c.template));
        if let (Some(last), Some(template)) = (self.traces.last_two().0, template) {
            last.template = Some(template);
        }
        stop
    }
}

// a kernel that the compiler refuses (a full disk will do): nothing has changed by then
pub(super) fn from_device(error: &Error) -> Stop {
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
