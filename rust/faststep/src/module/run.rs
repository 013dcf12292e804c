//! One call of a module's step: traced where it has to be, and run.
use std::{panic::resume_unwind, time::Instant};

use mlx_rs::{module::ModuleParameters, transforms::eval, Array};

use super::{host::Stop, key::Key, step::Step};
use crate::{
    engine::{nonfinite, Call, Output},
    error::{Error, Result},
    layout::Layout,
    mlx::array,
    trace::{Outputs, Part, Recipe, Rule, Task, Trace},
};

impl<M: ModuleParameters + 'static> Step<M> {
    // traces where it has to, and runs
    pub(super) fn run(&mut self, batch: &[Array], task: Task) -> Result<Output> {
        let started = Instant::now();
        let files = batch.iter().filter(|array| array::reads_file(array));
        eval(files).map_err(Error::FirstEvaluation)?;
        self.engine.need(self.options.needs(task.accumulates()))?;
        self.find(batch, task);
        let outcome = self.attempt(batch, task);
        let output = match (outcome, self.host.stop.take()) {
            (Ok(output), _) => output,
            (Err(error), stop) => {
                self.traces.discard();
                return Err(match stop {
                    Some(Stop::Panic(payload)) => resume_unwind(payload),
                    Some(Stop::Reads) => Error::Untraceable,
                    None => error,
                });
            }
        };
        if task != Task::Gradients {
            for (index, array) in &output.batch.others {
                self.others[*index] = array.clone();
            }
            if let Some(key) = &output.batch.key {
                self.key = key.clone();
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        let new = self.traces.commit(seconds);
        if new {
            self.traces.retain(|entry| entry.key.is_of(self.version));
        }
        self.seconds.add(output.seconds, new.then_some(seconds));
        Ok(output)
    }

    // the call's traces become the last entries: that of the update, then that of the batch
    fn find(&mut self, batch: &[Array], task: Task) {
        for part in task.parts(&Rule::Native(self.rules.clone())) {
            let key = Key::new(&part, batch, self.version, self.engine.places());
            let recipe = self.recipe(part);
            let (host, compile) = (self.host.clone(), self.options.compile);
            let make = |key: &Key, known: &[&Key]| {
                let trace = Trace::new(recipe, host, compile);
                (trace, key.cause(known))
            };
            let max_traces = self.options.max_traces;
            self.traces.find(key, max_traces, Key::eq, make);
        }
    }

    fn recipe(&self, part: Part) -> Recipe {
        let has_loss = !matches!(part, Part::Update(_));
        Recipe {
            part,
            layout: self.engine.layout().clone(),
            places: self.engine.places(),
            options: self.options,
            others: if has_loss { self.others.len() } else { 0 },
        }
    }

    fn attempt(&mut self, batch: &[Array], task: Task) -> Result<Output> {
        let names = self.slots();
        let mut rest = vec![self.key.clone()];
        rest.extend_from_slice(batch);
        let call = Call {
            others: self.others.clone(),
            rest,
        };
        let (Some(last), before) = self.traces.last_two() else {
            return Err(Error::no_loss());
        };
        let raises = self.options.raises();
        let mut refusal = None;
        let mut approve = |layout: &Layout, batch: &Outputs| {
            if raises {
                refusal = {
                    let (names, guard) = (&names.parameters, self.options.guard());
                    nonfinite::check(names, layout, guard, batch, &nonfinite::is_true).err()
                };
            }
            refusal.is_none()
        };
        let last = &mut last.trace;
        let update = before.filter(|_| matches!(task, Task::Batch { fills: true }));
        let update = update.map(|entry| &mut entry.trace);
        let output = match task {
            Task::Gradients => self.engine.gradients(last, call, &mut ()).map(Output::of),
            Task::Flush => self.engine.flush(last, &mut ()),
            _ => {
                let in_flight = self.options.in_flight;
                self.engine
                    .step(last, update, call, in_flight, &mut (), &mut approve)
            }
        }?;
        if raises && refusal.is_none() && task != Task::Whole && task.updates() {
            refusal = nonfinite::check_update(output.last()).err();
        }
        refusal.map_or(Ok(output), Err)
    }
}
