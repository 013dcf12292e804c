//! A step is planned: traced, and its evaluation gone through.
use std::iter;

use mlx_rs::{error::Result as MlxResult, Array};

use super::{run::build, Engine, Owner};
use crate::{
    error::{Error, Result},
    memory::{self, Plan, PlanInputs, PlannedPart},
    trace::{Call, CallTraces, Inputs, Outputs, Part, Trace},
};

/// The calls of a plan.
#[derive(Clone, Copy, Debug)]
pub struct PlannedCalls<'a> {
    /// Number of calls that make one update.
    pub calls: usize,
    /// Largest number of calls under way.
    pub in_flight: usize,
    /// Arrays that the user's objects hold of parameters and state until the first update.
    pub shown: &'a [Array],
}

impl Engine {
    /// Plan the device's memory of steps. They are traced and not evaluated, and nothing changes.
    ///
    /// # Errors
    /// Of a trace, or of a step before.
    pub fn plan(
        &mut self,
        CallTraces { trace, update }: CallTraces<'_>,
        call: Call,
        calls: PlannedCalls<'_>,
        owner: &mut dyn Owner,
    ) -> Result<Plan> {
        self.synchronize(owner)?;
        let others = call.count_others();
        let inputs = self.take(call);
        let mut traces: Vec<&mut Trace> = iter::once(trace).chain(update).collect();
        let planned = Self::build_parts(&mut traces, &inputs, owner).and_then(|parts| {
            let parts = (&traces[..], &parts[..]);
            self.planned(parts, &inputs.all(), others, calls, memory::plan)
        });
        self.put_back(inputs);
        let mut plan = planned?;
        let alone = plan.activations + plan.gradients;
        let captures = traces
            .iter()
            .map(|trace| self.planned_capture(trace, alone));
        plan.replay = captures.max().unwrap_or(0);
        Ok(plan)
    }

    // the graph of a batch's part, and that of the update behind it where it is another one, each with its inputs
    pub(super) fn build_parts(
        traces: &mut [&mut Trace],
        inputs: &Inputs,
        owner: &mut dyn Owner,
    ) -> Result<Vec<(Inputs, Outputs)>> {
        let mut parts: Vec<(Inputs, Outputs)> = Vec::new();
        for trace in traces {
            if let Some((_, batch)) = parts.last().filter(|_| trace.is_eager()) {
                owner.take_batch(batch).map_err(Error::Trace)?;
            }
            let call = match parts.last() {
                None => inputs.call.clone(),
                Some((_, batch)) if trace.recipe.part == Part::Given => {
                    inputs.call.behind(trace.recipe.others, batch)
                }
                Some(_) => inputs.call.of_update(trace.recipe.others, &[]),
            };
            let inputs = Inputs {
                own: inputs.own.clone(),
                call,
            };
            let outputs = build(trace, &inputs)?;
            parts.push((inputs, outputs));
        }
        Ok(parts)
    }

    // go through the evaluation of parts that have been built
    pub(super) fn planned<R>(
        &self,
        (traces, parts): (&[&mut Trace], &[(Inputs, Outputs)]),
        inputs: &[Array],
        others: usize,
        PlannedCalls {
            calls,
            in_flight,
            shown,
        }: PlannedCalls<'_>,
        go_through: impl FnOnce(&PlanInputs) -> MlxResult<R>,
    ) -> Result<R> {
        let parts = traces.iter().zip(parts);
        let parts = parts.map(|(trace, (_, outputs))| PlannedPart {
            outputs,
            keep_gradients: trace.recipe.options.raises(),
            is_given: trace.recipe.part == Part::Given,
            by_buffer: trace.recipe.updates_by_buffer(),
            evaluated: trace.evaluated,
            eager: trace.is_eager() && trace.recipe.part != Part::Given, // that is called before its part
        });
        let planned = go_through(&PlanInputs {
            layout: &self.layout,
            inputs,
            states: self.places.len,
            window: self.places.window,
            others,
            shown,
            parts: &parts.collect::<Vec<_>>(),
            calls,
            in_flight,
        });
        planned.map_err(Error::Trace)
    }
}
