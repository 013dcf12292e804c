//! A step is planned: traced, and its evaluation gone through.
use mlx_rs::Array;

use super::{run::build, Call, Engine, Owner};
use crate::{
    error::{Error, Result},
    memory::{self, Plan, PlanInputs, PlannedPart},
    trace::CallTraces,
};

impl Engine {
    /// Plan the device's memory of `calls` steps, which make one update. They are traced and not evaluated, and
    /// nothing changes. `shown` is what the user's objects hold of parameters and state until the first update.
    ///
    /// # Errors
    /// Of a trace, or of a step before.
    pub fn plan(
        &mut self,
        CallTraces { trace, update }: CallTraces<'_>,
        call: Call,
        (calls, in_flight): (usize, usize),
        shown: &[Array],
        owner: &mut dyn Owner,
    ) -> Result<Plan> {
        self.synchronize(owner)?;
        let others = call.others.len();
        let inputs = self.take(call);
        let kept = self.layout.tensors().len() + self.layout.shared().count() + self.places.len;
        let mut traced = build(trace, &inputs).map(|outputs| vec![outputs]);
        let mut asked = vec![trace];
        if let (Ok(all), Some(update)) = (&mut traced, update) {
            match build(update, &inputs[..kept]) {
                Ok(outputs) => all.push(outputs),
                Err(error) => traced = Err(error),
            }
            asked.push(update);
        }
        let planned = traced.and_then(|outputs| {
            let parts = asked.iter().zip(&outputs);
            let parts = parts.map(|(trace, outputs)| PlannedPart {
                outputs,
                keep_gradients: trace.recipe.options.raises(),
                evaluated: trace.evaluated,
                eager: trace.is_eager(),
            });
            let planned = memory::plan(&PlanInputs {
                layout: &self.layout,
                inputs: &inputs,
                states: self.places.len,
                window: self.places.window,
                others,
                shown,
                parts: &parts.collect::<Vec<_>>(),
                calls,
                in_flight,
            });
            planned.map_err(Error::Trace)
        });
        self.put_back(inputs);
        let mut plan = planned?;
        let alone = plan.activations + plan.gradients;
        let captures = asked.iter().map(|trace| self.planned_capture(trace, alone));
        plan.replay = captures.max().unwrap_or(0);
        Ok(plan)
    }
}
