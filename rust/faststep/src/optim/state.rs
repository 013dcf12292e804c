//! The arrays of an optimizer's state: their names in Python, their shapes, and their places in the engine's list.
use std::ops::Range;

use mlx_rs::{error::Result, Array};

use super::{
    optimizer::{Moment, Optimizer},
    rules::Rules,
};
use crate::layout::{precision::wide, Layout, Tensor};

/// Names, shapes and places of the arrays of some rules for the tensors of a layout.
#[derive(Clone, Debug, PartialEq)]
pub struct StateLayout {
    scalars: Vec<&'static [&'static str]>, // by rule
    moments: Vec<Vec<Moment>>,             // by tensor
    places: Vec<Range<usize>>,             // of each buffer's arrays
}

impl StateLayout {
    /// Lay out the state of these rules.
    #[must_use]
    pub fn new(rules: &Rules, layout: &Layout) -> Self {
        let scalars = rules.rules().iter().map(Optimizer::scalars);
        Self {
            scalars: scalars.collect(),
            moments: rules.moments(layout.tensors()).collect(),
            places: rules.places(layout),
        }
    }

    /// The names of each rule's scalars, which come first in the list, rule by rule.
    #[must_use]
    pub fn scalars(&self) -> &[&'static [&'static str]] {
        &self.scalars
    }

    /// The names and shapes of each tensor's moments.
    #[must_use]
    pub fn moments(&self) -> &[Vec<Moment>] {
        &self.moments
    }

    /// The shapes and dtypes of each tensor's moments; `mixed`: of float32 masters.
    pub fn expected<'a>(
        &'a self,
        layout: &'a Layout,
        mixed: bool,
    ) -> impl Iterator<Item = Vec<Tensor>> + 'a {
        let pairs = self.moments.iter().zip(layout.tensors());
        pairs.map(move |(moments, tensor)| {
            let dtype = if mixed {
                wide(tensor.dtype)
            } else {
                tensor.dtype
            };
            let tensors = moments.iter().map(|moment| Tensor {
                shape: moment.shape.clone(),
                dtype: moment.dtype.unwrap_or(dtype),
            });
            tensors.collect()
        })
    }

    /// The engine's list: the scalars, then the moments, given by tensor, joined into buffers (lazily).
    ///
    /// # Errors
    /// When the moments are not of the expected shapes.
    pub fn join(
        &self,
        layout: &Layout,
        scalars: Vec<Array>,
        moments: &[Vec<Array>],
    ) -> Result<Vec<Array>> {
        let mut state = scalars;
        for (buffer, place) in self.places.iter().enumerate() {
            let joined = (0..place.len()).map(|nth| {
                let parts = layout.members(buffer).map(|tensor| &moments[tensor][nth]);
                Layout::join(&parts.collect::<Vec<_>>())
            });
            for array in joined {
                state.push(array?);
            }
        }
        Ok(state)
    }

    /// The moments in the engine's list by tensor, as views of the buffers.
    ///
    /// # Errors
    /// When MLX refuses a view.
    pub fn views(&self, layout: &Layout, state: &[Array]) -> Result<Vec<Vec<Array>>> {
        let mut views = vec![Vec::new(); self.moments.len()];
        for (buffer, place) in self.places.iter().enumerate() {
            let arrays = state.get(place.clone()).unwrap_or_default();
            for (nth, array) in arrays.iter().enumerate() {
                let shape = |tensor: usize| &*self.moments[tensor][nth].shape;
                let parts = layout.views_of(buffer, array, shape)?;
                for (tensor, part) in layout.members(buffer).zip(parts) {
                    views[tensor].push(part);
                }
            }
        }
        Ok(views)
    }
}
