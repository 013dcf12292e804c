//! The outputs of a traced step by name, and their conversion to and from the flat list that MLX's compilation takes.
use std::rc::Rc;

use mlx_rs::{
    error::{Exception, Result},
    Array,
};

/// A trace's outputs.
#[derive(Debug, Default)]
pub struct Outputs {
    /// The loss; none where only the update is computed.
    pub loss: Option<Array>,
    /// The other arrays that the loss function returned.
    pub aux: Vec<Array>,
    /// Arrays that the model keeps beyond its slots and that have to be evaluated with the step.
    pub kept: Vec<Array>,
    /// The gradients' global norm before clipping.
    pub norm: Option<Array>,
    /// True if this step is skipped: a bool scalar.
    pub skipped: Option<Array>,
    /// Gradients.
    pub gradients: Vec<Array>,
    /// The new parameters, by buffer.
    pub parameters: Vec<Array>,
    /// The state's arrays that changed, with their index.
    pub state: Vec<(usize, Array)>,
    /// The model's other arrays that were written, with their index.
    pub others: Vec<(usize, Array)>,
    /// The random key, where it was drawn from.
    pub key: Option<Array>,
    /// The trainable tensors on which the loss does not depend, in their order.
    pub idle: Rc<[usize]>,
}

/// The number of outputs of each kind, in their order.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutputCounts {
    loss: usize,
    aux: usize,
    kept: usize,
    norm: usize,
    skipped: usize,
    gradients: usize,
    parameters: usize,
    state: Vec<usize>,
    others: Vec<usize>,
    key: usize,
    idle: Rc<[usize]>,
}

/// The bytes of new parameters that are worth an evaluation of their own.
const PORTION: usize = 512 << 10;

/// Buffers in the order of their updates: where one after another is evaluated, the gradients of the others are gone when the
/// turn of the largest comes.
pub(crate) fn in_turn(buffers: &[Array], by_buffer: bool) -> Vec<&Array> {
    let mut all: Vec<_> = buffers.iter().collect();
    if by_buffer {
        all.sort_by_key(|array| array.nbytes());
    }
    all
}

impl OutputCounts {
    // others by index, and whether there is a key
    pub(crate) fn written(&self) -> (Vec<usize>, bool) {
        (self.others.clone(), self.key > 0)
    }

    pub(crate) fn written_state(&self) -> Vec<usize> {
        self.state.clone()
    }

    pub(crate) fn sets_parameters(&self) -> bool {
        self.parameters > 0
    }
}

impl Outputs {
    // the outputs for the caller of the step: loss, auxiliary arrays, norm, flag, written arrays, key
    pub(crate) fn given_out(&self) -> impl Iterator<Item = &Array> {
        let values = self.loss.iter().chain(&self.aux);
        let values = values.chain(&self.norm).chain(&self.skipped);
        let others = self.others.iter().map(|(_, array)| array);
        values.chain(others).chain(&self.key)
    }

    // the same outputs, made of other arrays, in the order of `given_out`
    pub(crate) fn map_given_out(&self, mut f: impl FnMut(&Array) -> Result<Array>) -> Result<Self> {
        Ok(Self {
            loss: self.loss.as_ref().map(&mut f).transpose()?,
            aux: self.aux.iter().map(&mut f).collect::<Result<_>>()?,
            norm: self.norm.as_ref().map(&mut f).transpose()?,
            skipped: self.skipped.as_ref().map(&mut f).transpose()?,
            others: {
                let others = self.others.iter();
                let others = others.map(|(index, array)| Ok((*index, f(array)?)));
                others.collect::<Result<_>>()?
            },
            key: self.key.as_ref().map(&mut f).transpose()?,
            idle: self.idle.clone(),
            ..Self::default()
        })
    }

    pub(crate) fn flatten(self) -> (Vec<Array>, OutputCounts) {
        let (state, state_values): (Vec<_>, Vec<_>) = self.state.into_iter().unzip();
        let (others, other_values): (Vec<_>, Vec<_>) = self.others.into_iter().unzip();
        let counts = OutputCounts {
            loss: usize::from(self.loss.is_some()),
            aux: self.aux.len(),
            kept: self.kept.len(),
            norm: usize::from(self.norm.is_some()),
            skipped: usize::from(self.skipped.is_some()),
            gradients: self.gradients.len(),
            parameters: self.parameters.len(),
            state,
            others,
            key: usize::from(self.key.is_some()),
            idle: self.idle,
        };
        let mut values: Vec<Array> = self.loss.into_iter().collect();
        values.extend(self.aux);
        values.extend(self.kept);
        values.extend(self.norm);
        values.extend(self.skipped);
        values.extend(self.gradients);
        values.extend(self.parameters);
        values.extend(state_values);
        values.extend(other_values);
        values.extend(self.key);
        (values, counts)
    }

    pub(crate) fn split(values: Vec<Array>, counts: OutputCounts) -> Result<Self> {
        let wanted = counts.loss
            + counts.aux
            + counts.kept
            + counts.norm
            + counts.skipped
            + counts.gradients
            + counts.parameters
            + counts.state.len()
            + counts.others.len()
            + counts.key;
        if values.len() != wanted {
            return Err(Exception::custom(format!(
                "a traced step returned {} arrays, expected {wanted}",
                values.len()
            )));
        }
        let mut values = values.into_iter();
        let mut take = |n: usize| values.by_ref().take(n).collect::<Vec<_>>();
        Ok(Self {
            loss: take(counts.loss).pop(),
            aux: take(counts.aux),
            kept: take(counts.kept),
            norm: take(counts.norm).pop(),
            skipped: take(counts.skipped).pop(),
            gradients: take(counts.gradients),
            parameters: take(counts.parameters),
            state: {
                let values = take(counts.state.len());
                counts.state.into_iter().zip(values).collect()
            },
            others: {
                let values = take(counts.others.len());
                counts.others.into_iter().zip(values).collect()
            },
            key: take(counts.key).pop(),
            idle: counts.idle,
        })
    }

    // the outputs that do not depend on the update
    pub(crate) fn before_update(&self) -> impl Iterator<Item = &Array> {
        let values = self.loss.iter().chain(&self.aux).chain(&self.kept);
        let values = values.chain(&self.norm).chain(&self.skipped);
        let others = self.others.iter().map(|(_, array)| array);
        values.chain(&self.gradients).chain(others).chain(&self.key)
    }

    /// The outputs of a batch and of the update behind it.
    #[must_use]
    pub fn and(mut self, update: Self) -> Self {
        let set = |at: usize| update.others.iter().any(|(index, _)| *index == at);
        self.others.retain(|(index, _)| !set(*index));
        self.others.extend(update.others);
        self.key = update.key.or(self.key);
        self
    }

    // new parameters and state
    pub(crate) fn update(&self) -> impl Iterator<Item = &Array> {
        let state = self.state.iter().map(|(_, array)| array);
        self.parameters.iter().chain(state)
    }

    // What is evaluated with the new parameters `buffers` and the `rest`, in lists of which one is handed over after another: all
    // at once, or buffer by buffer, of which small ones go together.
    pub(crate) fn portions<'a>(
        &'a self,
        buffers: &'a [Array],
        rest: impl IntoIterator<Item = &'a Array>,
        by_buffer: bool,
    ) -> Vec<Vec<&'a Array>> {
        let mut before: Vec<_> = self.before_update().collect();
        let (mut lists, mut bytes) = (Vec::new(), 0);
        for buffer in in_turn(buffers, by_buffer) {
            if by_buffer && bytes > 0 && buffer.nbytes() >= PORTION {
                bytes = 0; // what the small ones before it take is gone sooner
                lists.push(std::mem::take(&mut before));
            }
            before.push(buffer);
            bytes += buffer.nbytes();
            if by_buffer && bytes >= PORTION {
                bytes = 0;
                lists.push(std::mem::take(&mut before));
            }
        }
        before.extend(rest);
        lists.push(before);
        lists
    }

    // an output whose buffer no later step reuses
    pub(crate) fn marker(&self) -> Option<&Array> {
        let values = self.loss.iter().chain(&self.skipped).chain(&self.norm);
        values
            .chain(self.state.last().map(|(_, array)| array))
            .next()
    }
}
