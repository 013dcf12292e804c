//! The operations of a step, measured one by one.
use mlx_rs::{error::Result as MlxResult, Array};

use super::{run::build, Call, Engine, Owner};
use crate::{
    error::{Error, Result},
    mlx::measure::{label_input, operations, Operation},
    trace::{CallTraces, Trace},
};

/// Each operation counts with the least of so many measurements.
const TIMES: usize = 3;
/// The module of what reads the optimizer's state.
const UPDATE: &str = "(update)";

impl Engine {
    /// Evaluate the parts of a step operation by operation, each to its end, on copies of what it would write over: nothing
    /// changes. The operations of the update follow those of the batch. `module` is that of a tensor.
    ///
    /// # Errors
    /// Of a trace, of the evaluation, or of a step before.
    pub fn measure(
        &mut self,
        CallTraces { trace, update }: CallTraces<'_>,
        call: Call,
        module: &dyn Fn(usize) -> String,
        owner: &mut dyn Owner,
    ) -> Result<Vec<Operation>> {
        self.synchronize(owner)?;
        for (tensor, parameter) in self.parameters.iter().enumerate() {
            label_input(parameter, &module(tensor)).map_err(Error::Trace)?;
        }
        for array in &self.state {
            label_input(array, UPDATE).map_err(Error::Trace)?;
        }
        let inputs = self.take(call);
        let kept = self.layout.tensors().len() + self.layout.shared().count() + self.places.len;
        let mut found = measured(trace, &inputs, owner);
        if let (Ok(found), Some(update)) = (&mut found, update) {
            match measured(update, &inputs[..kept], owner) {
                Ok(more) => found.extend(more),
                Err(error) => {
                    self.put_back(inputs);
                    return Err(error);
                }
            }
        }
        self.put_back(inputs);
        found
    }
}

fn measured(trace: &mut Trace, inputs: &[Array], owner: &mut dyn Owner) -> Result<Vec<Operation>> {
    let mut least: Vec<Operation> = Vec::new();
    for _ in 0..TIMES {
        let outputs = build(trace, inputs)?;
        let mut found: MlxResult<Vec<Operation>> = Ok(Vec::new());
        owner.unlocked(&mut || {
            found = operations(outputs.before_update().chain(outputs.update()));
        });
        let found = found.map_err(Error::FirstEvaluation)?;
        if least.len() != found.len() {
            least = found; // the first time, or the graph of an uncompiled loss is another one
            continue;
        }
        for (least, found) in least.iter_mut().zip(found) {
            least.seconds = least.seconds.min(found.seconds);
        }
    }
    Ok(least)
}
