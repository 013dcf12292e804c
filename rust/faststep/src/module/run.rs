//! One call of a module's step: traced where it has to be, and run.
use std::{panic::resume_unwind, rc::Rc, time::Instant};

use mlx_rs::{module::ModuleParameters, transforms::eval, Array};

use super::{
    host::Stop,
    key::{ByNumber, ModuleKey},
    step::Step,
};
use crate::{
    engine::{Call, Output, Ranks},
    error::{Error, Result},
    mlx::array,
    trace::{Compiled, Key, Rule, Task, Trace},
};

impl<M: ModuleParameters + 'static> Step<M> {
    // find or make the traces, and run them
    pub(super) fn run(&mut self, batch: &[Array], task: Task) -> Result<Output> {
        if array::is_transforming() {
            return Err(Error::Transformed);
        }
        let started = Instant::now();
        let files = batch.iter().filter(|array| array::reads_file(array));
        eval(files).map_err(Error::FirstEvaluation)?;
        self.engine.need(self.options.needs(task.accumulates()))?;
        self.find(batch, task);
        let rounds = self.ranks.as_mut().map_or(0, Ranks::begin_call);
        let outcome = self.attempt(batch, task);
        if outcome.is_err() && task != Task::Gradients {
            self.tell_ranks(rounds);
        }
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
            self.traces
                .retain(|entry| entry.key.front.is_of(self.version));
        }
        self.seconds.add(output.seconds, new.then_some(seconds));
        Ok(output)
    }

    // the call's traces become those used last: that of the update, then that of the batch
    fn find(&mut self, batch: &[Array], task: Task) {
        for part in task.parts(&Rule::Native(self.rules.clone())) {
            let has_loss = part.has_loss();
            let others = if has_loss { self.others.len() } else { 0 };
            let recipe = self.engine.recipe(part.clone(), self.options, others);
            let key = Key {
                part,
                places: self.engine.places(),
                front: ModuleKey::new(self.version, batch),
            };
            let host = self.host.clone();
            let compiled = if self.options.compile {
                Compiled::Whole
            } else {
                Compiled::Nothing
            };
            let make = |key: &Key<_>, known: &[&Key<_>]| {
                let trace = Trace::new(recipe, host, compiled);
                (trace, key.cause(known, &ByNumber))
            };
            let max_traces = self.options.max_traces;
            self.traces.find(key, max_traces, Key::eq, make);
        }
    }

    fn attempt(&mut self, batch: &[Array], task: Task) -> Result<Output> {
        let slots = self.slots();
        let name = |tensor: usize| slots.parameters[tensor].to_string();
        let mut rest = vec![self.key.clone()];
        rest.extend_from_slice(batch);
        let call = Call {
            others: vec![Rc::new(self.others.clone().into())],
            rest,
        };
        let traces = self.traces.of(task).ok_or_else(Error::no_loss)?;
        let update = self.updates + 1;
        let ranks = self.ranks.as_mut().map(|ranks| (ranks, update));
        self.engine.call(task, traces, call, &name, &mut (), ranks)
    }

    // the others hear of an error in their next round, unless they have
    fn tell_ranks(&mut self, rounds: usize) {
        let update = self.updates + 1;
        if let Some(ranks) = self.ranks.as_mut().filter(|it| it.rounds() == rounds) {
            self.engine.drop_window();
            drop(ranks.fail(update, &mut ())); // the error of this rank is the one to return
        }
    }
}
