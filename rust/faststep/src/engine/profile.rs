//! The operations of a step, measured one by one.
use std::{collections::HashMap, iter};

use mlx_rs::error::Result as MlxResult;

use super::{evaluate::evaluate, plan::PlannedCalls, run::build, Engine, Owner};
use crate::{
    error::{Error, Result},
    memory,
    mlx::measure::{label_input, operations, Held, Operation},
    trace::{Call, CallTraces, Inputs, Outputs, Trace},
};

/// Each operation counts with the least of so many measurements.
const TIMES: usize = 3;
/// The module of what reads the optimizer's state.
const UPDATE: &str = "(update)";

impl Engine {
    /// Evaluate the parts of a step operation by operation, on copies of what it would write over: nothing changes. The
    /// operations of the update follow those of the batch. Memory is that of a step (`memory::by_operation`), not of this.
    /// `module` is that of a tensor.
    ///
    /// # Errors
    /// Of a trace, of the evaluation, or of a step before.
    pub fn measure(
        &mut self,
        CallTraces { trace, update }: CallTraces<'_>,
        call: Call,
        calls: PlannedCalls<'_>,
        module: &dyn Fn(usize) -> String,
        owner: &mut dyn Owner,
    ) -> Result<Vec<Operation>> {
        self.synchronize(owner)?;
        if self.resident.is_some() {
            // what a replay shows are lazy copies, which are no operations of the step
            self.leave_replay(owner)?;
            let held = self.parameters.iter().chain(&self.shared);
            evaluate(held.chain(&self.state), owner).map_err(Error::Device)?;
        }
        for (tensor, parameter) in self.parameters.iter().enumerate() {
            label_input(parameter, &module(tensor)).map_err(Error::Trace)?;
        }
        for array in &self.state {
            label_input(array, UPDATE).map_err(Error::Trace)?;
        }
        let others = call.count_others();
        let inputs = self.take(call);
        let mut traces: Vec<&mut Trace> = iter::once(trace).chain(update).collect();
        let found = self.measured(&mut traces, &inputs, others, calls, owner);
        self.put_back(inputs);
        found
    }

    fn measured(
        &self,
        traces: &mut [&mut Trace],
        inputs: &Inputs,
        others: usize,
        calls: PlannedCalls<'_>,
        owner: &mut dyn Owner,
    ) -> Result<Vec<Operation>> {
        let made = Self::build_parts(traces, inputs, owner)?;
        let parts = (&*traces, &made[..]);
        let held = self.planned(parts, &inputs.all(), others, calls, memory::by_operation)?;
        let mut found = Vec::new();
        for (trace, (inputs, outputs)) in traces.iter_mut().zip(made) {
            found.extend(least_of(trace, outputs, &inputs, owner)?);
        }
        hold(&mut found, &held);
        Ok(found)
    }
}

// an operation that the plan does not have takes nothing: memory is as it was
fn hold(operations: &mut [Operation], held: &[Held]) {
    let by_operation: HashMap<usize, &Held> =
        held.iter().map(|each| (each.operation, each)).collect();
    let mut now = held.first().copied().unwrap_or_default();
    for operation in operations {
        now = by_operation.get(&operation.id).map_or(now, |held| **held);
        operation.held = now;
    }
}

fn least_of(
    trace: &mut Trace,
    outputs: Outputs,
    inputs: &Inputs,
    owner: &mut dyn Owner,
) -> Result<Vec<Operation>> {
    let mut least = timed(outputs, owner)?;
    for _ in 1..TIMES {
        let found = timed(build(trace, inputs)?, owner)?;
        if least.len() != found.len() {
            continue; // the graph of an uncompiled loss may be another one
        }
        for (least, found) in least.iter_mut().zip(found) {
            least.seconds = least.seconds.min(found.seconds);
        }
    }
    Ok(least)
}

#[allow(clippy::needless_pass_by_value)] // they end here, with the memory of their values
fn timed(outputs: Outputs, owner: &mut dyn Owner) -> Result<Vec<Operation>> {
    let mut found: MlxResult<Vec<Operation>> = Ok(Vec::new());
    owner.unlocked(&mut || {
        found = operations(outputs.before_update().chain(outputs.update()));
    });
    found.map_err(Error::FirstEvaluation)
}
