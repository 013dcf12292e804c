//! The return value of a loss function.
use mlx_rs::Array;

/// A scalar to differentiate, and what a loss function may give beside it.
///
/// A loss function may as well return the scalar alone, or a pair of it and a list of auxiliary arrays.
#[derive(Clone, Debug)]
pub struct Loss {
    pub(crate) value: Array,
    pub(crate) weight: Option<Array>,
    pub(crate) aux: Vec<Array>,
}

impl Loss {
    /// A loss alone, a scalar.
    #[must_use]
    pub fn new(loss: Array) -> Self {
        Self {
            value: loss,
            weight: None,
            aux: Vec::new(),
        }
    }

    /// Set the number that the loss is a mean over (tokens, say), a scalar from 0 on: the batch's weight in a window's
    /// average.
    #[must_use]
    pub fn weighted(self, weight: Array) -> Self {
        Self {
            weight: Some(weight),
            ..self
        }
    }

    /// Arrays that the step gives out as they are.
    #[must_use]
    pub fn with_aux(self, aux: Vec<Array>) -> Self {
        Self { aux, ..self }
    }
}

impl From<Array> for Loss {
    fn from(loss: Array) -> Self {
        Self::new(loss)
    }
}

impl From<(Array, Vec<Array>)> for Loss {
    fn from((loss, aux): (Array, Vec<Array>)) -> Self {
        Self::new(loss).with_aux(aux)
    }
}
