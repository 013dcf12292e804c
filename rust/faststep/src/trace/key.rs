//! The key of a trace: what it is valid for, and the cause for another one.
use std::mem::discriminant;

use super::recipe::Part;
use crate::layout::{aux_state::Places, Tensor};

/// What a trace is valid for. `F`: what only the front that calls the engine knows of model, optimizer and batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Key<F> {
    /// Which part of a step, and by which rule.
    pub part: Part,
    /// Where the arrays of the state stand.
    pub places: Places,
    /// What the front knows.
    pub front: F,
}

/// The causes for a new trace that a front knows, with the names that its user has for the arrays.
pub trait Causes<F> {
    /// Why there is another trace where none of this part is known; `None`: it is the first.
    fn first(&self) -> Option<String>;

    /// What has changed in model, loss or optimizer since the last trace; `None`: nothing.
    fn changed(&self, last: &Key<F>, new: &Key<F>) -> Option<String>;

    /// The arrays of the batch.
    fn batch<'a>(&self, front: &'a F) -> &'a [Tensor];

    /// The name of one of them.
    fn name(&self, front: &F, index: usize) -> String;

    /// What has changed in the batch beside shapes and dtypes of its arrays.
    fn rest(&self, last: &F, new: &F) -> String;
}

impl<F> Key<F> {
    /// Why none of the known keys, the one used last first, is this one.
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
            Self::Whole(_) => "first call",
            Self::Batch => "first batch of a window",
            Self::Update(_) => "first update by a window",
            Self::Gradients => "first call of gradients()",
        }
    }
}
