//! The initial rules, layout, dicts and arrays of a Python optimizer that the engine updates.
use faststep::engine::{precision::wide, Layout, Rules, StateLayout, Tensor};
use mlx_rs::Array;
use pyo3::prelude::*;

use super::moments::Moments;
use crate::mlx::{bridge, errors::mlx};

/// Rules, layout and state of an optimizer that is updated natively.
pub struct Native {
    /// Rules by tensor.
    pub rules: Rules,
    /// Layout of their state.
    pub layout: Layout,
    /// The optimizer's dicts.
    pub moments: Moments,
    /// The engine's state.
    pub state: Vec<Array>,
}

impl Native {
    /// Read an initialised optimizer; `None` where it cannot be updated natively.
    ///
    /// `rules` are those of what `paths` and `tensors` list; of `doubles`, which are pairs of one tensor, the second one's
    /// update counts; `mixed`: float32 masters are updated.
    pub fn find(
        optimizer: &Bound<'_, PyAny>,
        rules: Rules,
        (paths, tensors): (Vec<Vec<String>>, Vec<Tensor>),
        doubles: &[(usize, usize)],
        mixed: bool,
    ) -> PyResult<Option<Self>> {
        if !doubles.is_empty() && rules.rules().len() > 1 {
            return Ok(None); // which update counts depends on how they are merged
        }
        let layout = rules.layout(tensors, doubles);
        let places = StateLayout::new(&rules, &layout);
        let expected: Vec<_> = places.expected(&layout, mixed).collect();
        let Some(moments) = Moments::find(optimizer, &paths, &rules, places, &expected)? else {
            return Ok(None);
        };
        let (Some(scalars), Some(arrays)) = (
            moments.scalars(optimizer.py())?,
            arrays(&moments, expected, mixed)?,
        ) else {
            return Ok(None);
        };
        let scalars = scalars.iter().map(|slot| bridge::get(&slot.object));
        let scalars = scalars.flatten().collect();
        let state = moments.layout().join(&layout, scalars, &arrays);
        let state = state.map_err(mlx)?;
        Ok(Some(Self {
            rules,
            layout,
            moments,
            state,
        }))
    }
}

// moments by tensor; None if one has another shape or dtype: then the optimizer's own update is traced
fn arrays(
    moments: &Moments,
    expected: Vec<Vec<Tensor>>,
    mixed: bool,
) -> PyResult<Option<Vec<Vec<Array>>>> {
    let widened = |dtype| if mixed { wide(dtype) } else { dtype };
    let mut all = Vec::with_capacity(expected.len());
    for (arrays, expected) in moments.arrays().into_iter().zip(expected) {
        let arrays = arrays.iter().map(|a| a.as_dtype(widened(a.dtype())));
        let arrays = arrays.collect::<Result<Vec<_>, _>>().map_err(mlx)?;
        if arrays.iter().map(Tensor::of).ne(expected) {
            return Ok(None);
        }
        all.push(arrays);
    }
    Ok(Some(all))
}
