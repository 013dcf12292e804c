//! The update: new parameters, optimizer state, masters and average.
use mlx_rs::{error::Result, Array};

use super::{short, Body, Inputs, Rebound};
use crate::{
    mlx::{
        graph,
        ops::{choose, scalar},
    },
    optim::UpdateOutput,
    trace::{host::UpdateCall, inputs::with, outputs::Outputs, recipe::Rule},
};

impl Body<'_> {
    // new parameters, optimizer state, masters and average
    pub(super) fn update(
        &self,
        inputs: &Inputs,
        rule: &Rule,
        rebound: &Rebound,
        gradients: &[Array],
        good: Option<&Array>,
        outputs: &mut Outputs,
    ) -> Result<()> {
        let weights = self.weights(inputs, rebound)?;
        let key = outputs.key.as_ref().or(inputs.rest.first());
        let given = (gradients, &weights[..]);
        let updated = self.updated(inputs, rule, given, &outputs.others, key, good)?;
        let mut new = take(updated, outputs);
        if !rebound.is_empty() {
            // a skipped step restores the values from before the loss
            let before = self.weights(inputs, &[])?;
            for (new, old) in new.iter_mut().zip(&before) {
                *new = choose(good, new.clone(), old)?;
            }
        }
        self.put(inputs, new, good, true, outputs)
    }

    // the update by the host's optimizer of a batch that is taken
    pub(super) fn update_by_host(&self, inputs: &Inputs) -> Result<Outputs> {
        let layout = &self.recipe.layout;
        let (first, _) = self.window(inputs)?;
        let gradients = &inputs.state[first..first + layout.len()];
        let updated = self.host.update(UpdateCall {
            gradients: &self.recipe.gradients(gradients)?,
            parameters: &self.weights(inputs, &[])?,
            state: &inputs.state[..self.recipe.places.optimizer],
            others: inputs.others,
            key: inputs.rest.first(),
        })?;
        let mut outputs = Outputs::default();
        let new = take(updated, &mut outputs);
        self.put(inputs, new, None, true, &mut outputs)?;
        Ok(outputs)
    }

    // parameters as the loss has left them, without an update; a skipped batch leaves none
    pub(super) fn assign(
        &self,
        inputs: &Inputs,
        rebound: &Rebound,
        good: Option<&Array>,
        outputs: &mut Outputs,
    ) -> Result<()> {
        let mut new = self.weights(inputs, rebound)?;
        for (new, old) in new.iter_mut().zip(&self.weights(inputs, &[])?) {
            *new = choose(good, new.clone(), old)?;
        }
        self.put(inputs, new, good, false, outputs)
    }

    // the outputs that new weights make: parameters, masters, and the average, where it goes on
    fn put(
        &self,
        inputs: &Inputs,
        mut new: Vec<Array>,
        good: Option<&Array>,
        averages: bool,
        outputs: &mut Outputs,
    ) -> Result<()> {
        let (layout, places) = (&self.recipe.layout, &self.recipe.places);
        let decay = self.recipe.options.ema_decay.filter(|_| averages);
        for &(buffer, last) in layout.doubles() {
            new[buffer] = new[last].clone();
        }
        for (buffer, weight) in new.iter_mut().enumerate() {
            if let (Some(decay), Some(first)) = (decay, places.average) {
                let old = &inputs.state[first + buffer];
                // a barrier: beyond MLX's limit to the depth of a kernel, the squared gradient would be stored
                *weight = weight.contiguous()?;
                let average = averaged(decay, old, weight)?;
                outputs
                    .state
                    .push((first + buffer, choose(good, average, old)?));
            }
            if let Some(at) = self.recipe.master(buffer) {
                let shown = weight.as_dtype(layout.dtype(buffer))?;
                outputs.state.push((at, std::mem::replace(weight, shown)));
            }
        }
        outputs.parameters = new;
        Ok(())
    }

    // `left`: other arrays to which the loss has assigned
    fn updated(
        &self,
        inputs: &Inputs,
        rule: &Rule,
        (gradients, weights): (&[Array], &[Array]),
        left: &Rebound,
        key: Option<&Array>,
        good: Option<&Array>,
    ) -> Result<UpdateOutput> {
        let state = &inputs.state[..self.recipe.places.optimizer];
        let rule = match rule {
            Rule::Native(rules) => {
                let given = (gradients, weights);
                let first = self.recipe.places.numbers;
                let numbers = first.map_or(&[][..], |first| &inputs.state[first..]);
                let numbers = numbers.get(..rules.taken()).ok_or_else(short)?;
                let state = (state, numbers);
                if let Some(compiled) = self.compiled {
                    return compiled.update(self.recipe, rules, self.host, state, given, good);
                }
                return rules.update(
                    &self.recipe.layout,
                    &|rule, step| self.host.learning_rate(rule, step),
                    state,
                    given,
                    good,
                );
            }
            Rule::Host => self.host,
        };
        // uncompiled it is known first whether the update is taken: what the optimizer's code keeps elsewhere cannot be chosen
        let good = match good.filter(|_| self.eager) {
            Some(flag) if self.reads(flag)? => None,
            Some(_) => {
                return Ok(UpdateOutput {
                    parameters: weights.to_vec(),
                    ..UpdateOutput::default()
                })
            }
            None => good,
        };
        let others = with(inputs.others, left);
        let mut output = rule.update(UpdateCall {
            gradients,
            parameters: weights,
            state,
            others: &others,
            key,
        })?;
        for (new, old) in output.parameters.iter_mut().zip(weights) {
            *new = choose(good, new.clone(), old)?;
        }
        let mut pairs = Vec::new();
        for (index, new) in &mut output.state {
            let chosen = choose(good, new.clone(), &state[*index])?;
            pairs.push((std::mem::replace(new, chosen.clone()), chosen));
        }
        if good.is_some() {
            // or MLX would compile a kernel for each array rather than one for a parameter with its state
            graph::read_instead(&pairs, &output.parameters)?;
        }
        Ok(output)
    }

    // the buffers of the given parameters
    pub(super) fn buffers(&self, inputs: &Inputs) -> Vec<Array> {
        let mut shared = inputs.shared.iter();
        let layout = &self.recipe.layout;
        let buffers = (0..layout.len()).map(|buffer| match layout.single(buffer) {
            Some(tensor) => inputs.parameters.get(tensor),
            None => shared.next(),
        });
        buffers.flatten().cloned().collect()
    }

    // the buffers to update: masters or parameters, with the values that the loss assigned
    pub(super) fn weights(&self, inputs: &Inputs, rebound: &Rebound) -> Result<Vec<Array>> {
        let layout = &self.recipe.layout;
        let mut weights = self.buffers(inputs);
        for (buffer, weight) in weights.iter_mut().enumerate() {
            if let Some(at) = self.recipe.master(buffer) {
                *weight = inputs.state[at].clone();
            }
        }
        if rebound.is_empty() {
            return Ok(weights);
        }
        let mut tensors = layout.unpack(&weights)?;
        for (index, array) in rebound {
            // in mixed precision the loss assigns arrays of compute_dtype
            tensors[*index] = array.as_dtype(tensors[*index].dtype())?;
        }
        layout.pack(&tensors)
    }
}

// put what an update has left among the outputs; returns the new parameters
fn take(updated: UpdateOutput, outputs: &mut Outputs) -> Vec<Array> {
    outputs.state.extend(updated.state);
    outputs.kept.extend(updated.kept);
    let set = |(index, _): &(usize, Array)| updated.others.iter().any(|(at, _)| at == index);
    outputs.others.retain(|left| !set(left));
    outputs.others.extend(updated.others);
    outputs.others.sort_by_key(|(index, _)| *index);
    if updated.key.is_some() {
        outputs.key = updated.key;
    }
    updated.parameters
}

// decay average + (1 - decay) weight: Polyak & Juditsky, Acceleration of Stochastic Approximation by Averaging (1992)
fn averaged(decay: f64, average: &Array, weight: &Array) -> Result<Array> {
    let dtype = average.dtype();
    let old = scalar(decay, dtype).multiply(average)?;
    old.add(scalar(1.0 - decay, dtype).multiply(weight.as_dtype(dtype)?)?)
}
