//! The key of a trace: what it is valid for, and the cause for another one.
use std::mem::discriminant;

use super::recipe::Part;
use crate::layout::{aux_state::Places, Tensor};

/// The key of a trace. `F`: the part that only the calling front knows: model, optimizer and batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Key<F> {
    /// The part of a step, and its rule.
    pub part: Part,
    /// The indices of the arrays of the state.
    pub places: Places,
    /// The front's part of the key.
    pub front: F,
}

/// The causes for a new trace that a front knows, with the names that its user has for the arrays.
pub trait Causes<F> {
    /// The cause of another trace where none of this part is known; `None`: it is the first.
    fn first(&self) -> Option<String>;

    /// The change in model, loss or optimizer since the last trace; `None`: none.
    fn changed(&self, last: &Key<F>, new: &Key<F>) -> Option<String>;

    /// The arrays of the batch.
    fn batch<'a>(&self, front: &'a F) -> &'a [Tensor];

    /// The name of one of them.
    fn name(&self, front: &F, index: usize) -> String;

    /// The change in the batch beside shapes and dtypes of its arrays.
    fn rest(&self, last: &F, new: &F) -> String;
}

impl<F> Key<F> {
    /// The cause of a new trace: the first difference from the known keys, the one used last first.
    pub fn cause(&self, known: &[&Self], causes: &dyn Causes<F>) -> String {
        let kind = discriminant(&self.part);
        let Some(last) = known.iter().find(|key| discriminant(&key.part) == kind) else {
            return causes.first().unwrap_or_else(|| self.part.first().into());
        };
        if let Some(cause) = causes.changed(last, self) {
            return cause;
        }
        if last.places != self.places {
            return "the step keeps more: a window, an average or masters".into();
        }
        let (old, new) = (causes.batch(&last.front), causes.batch(&self.front));
        let mut pairs = old.iter().zip(new).enumerate();
        let Some((index, (old, new))) = pairs.find(|(_, (old, new))| old != new) else {
            return causes.rest(&last.front, &self.front);
        };
        let name = causes.name(&self.front, index);
        format!(
            "{name}: {:?} {:?} -> {:?} {:?}",
            old.dtype, old.shape, new.dtype, new.shape
        )
    }
}

impl Part {
    // the cause of its first trace
    fn first(&self) -> &'static str {
        match self {
            Self::Whole(_) | Self::Clipped => "first call",
            Self::Batch | Self::OnlyBatch => "first batch of a window",
            Self::Given => "first update by the optimizer's own code",
            Self::Update(_) => "first update by a window",
            Self::Gradients => "first call of gradients()",
        }
    }
}
