//! The inputs of a plan: the parts of a step as they have been traced, and the arrays that they begin with.
use mlx_rs::Array;

use crate::{evaluation::Evaluated, layout::Layout, trace::Outputs};

/// A part of a step that has been traced.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_excessive_bools)] // each is an answer of its own
pub(crate) struct PlannedPart<'a> {
    pub outputs: &'a Outputs,
    pub keep_gradients: bool,
    /// True if it reads gradients in the places of a window, and lets go of them.
    pub is_given: bool,
    /// True if the update is evaluated buffer by buffer.
    pub by_buffer: bool,
    /// Its record from evaluations before.
    pub evaluated: Evaluated,
    /// True if the host computes it anew each time.
    pub eager: bool,
}

/// Inputs of the parts of a step, and the order of the parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanInputs<'a> {
    pub layout: &'a Layout,
    /// Parameters, shared buffers, state, others; then key and batch.
    pub inputs: &'a [Array],
    pub states: usize,
    /// The place of the window in the state: one array for each buffer, and one more.
    pub window: Option<usize>,
    pub others: usize,
    /// Arrays of parameters and state that the user's objects hold.
    pub shown: &'a [Array],
    /// The whole step or that of a batch, and the update by a window.
    pub parts: &'a [PlannedPart<'a>],
    /// The calls that make one update.
    pub calls: usize,
    pub in_flight: usize,
}

impl<'a> PlanInputs<'a> {
    /// The trainable parameters, as the user has them.
    pub fn tensors(&self) -> &'a [Array] {
        &self.inputs[..self.layout.tensors().len()]
    }

    /// Their gradients.
    pub fn gradients(&self) -> &'a [Array] {
        &self.parts[0].outputs.gradients
    }

    /// The parameters, and the buffers that they share.
    pub fn parameters(&self) -> &'a [Array] {
        let shared = self.layout.shared().count();
        &self.inputs[..self.layout.tensors().len() + shared]
    }

    /// The buffers that parameters share.
    pub fn shared(&self) -> &'a [Array] {
        &self.parameters()[self.layout.tensors().len()..]
    }

    /// The optimizer's state, and what is kept beside it.
    pub fn state(&self) -> &'a [Array] {
        let first = self.parameters().len();
        &self.inputs[first..first + self.states]
    }

    /// The window, where there is one.
    pub fn window(&self) -> &'a [Array] {
        let window = self.window.map(|first| first..=first + self.layout.len());
        window.map_or(&[], |window| &self.state()[window])
    }

    /// The model's other arrays.
    pub fn others(&self) -> &'a [Array] {
        let first = self.parameters().len() + self.states;
        &self.inputs[first..first + self.others]
    }

    /// Key and batch.
    pub fn rest(&self) -> &'a [Array] {
        &self.inputs[self.parameters().len() + self.states + self.others..]
    }

    /// Return the inputs, each with the output that takes its place.
    pub fn pairs(&self, outputs: &'a Outputs) -> Vec<(&'a Array, &'a Array)> {
        let (parameters, state, others) = (self.parameters(), self.state(), self.others());
        let (tensors, shared) = parameters.split_at(self.layout.tensors().len());
        let mut shared = shared.iter();
        let mut pairs = Vec::new();
        for (buffer, new) in outputs.parameters.iter().enumerate() {
            if self.layout.single(buffer).is_none() {
                pairs.extend(shared.next().map(|old| (old, new)));
            }
            pairs.extend(self.layout.members(buffer).map(|i| (&tensors[i], new)));
        }
        pairs.extend(outputs.state.iter().map(|(i, new)| (&state[*i], new)));
        pairs.extend(outputs.others.iter().map(|(i, new)| (&others[*i], new)));
        pairs.extend(self.rest().first().zip(outputs.key.as_ref()));
        pairs
    }
}
