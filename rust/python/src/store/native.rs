//! The initial rules, layout, dicts and arrays of a Python optimizer that the engine updates.
use faststep::{
    engine::{precision::wide, Layout, Rules, Tensor},
    Optimizer,
};
use mlx_rs::Array;
use pyo3::prelude::*;

use super::moments::Moments;
use crate::{
    mlx::{bridge, errors::mlx},
    optimizer::native_rules,
};

/// All of it.
pub struct Native {
    /// Which tensor is updated how.
    pub rules: Rules,
    /// Where it lies.
    pub layout: Layout,
    /// The optimizer's dicts.
    pub moments: Moments,
    /// The engine's state.
    pub state: Vec<Array>,
}

impl Native {
    /// Read an initialised optimizer; `None` where it cannot be updated natively.
    ///
    /// `trainable` is the tree of what `paths` and `tensors` list; of `doubles`, which are pairs of one tensor, the second
    /// one's update counts; `mixed`: float32 masters are updated.
    pub fn find(
        optimizer: &Bound<'_, PyAny>,
        (paths, tensors): (Vec<Vec<String>>, Vec<Tensor>),
        doubles: &[(usize, usize)],
        trainable: &Bound<'_, PyAny>,
        mixed: bool,
    ) -> PyResult<Option<Self>> {
        if !tensors.iter().all(|t| Optimizer::supports(t.dtype)) {
            return Ok(None);
        }
        let Some(rules) = native_rules(optimizer, &paths, trainable)? else {
            return Ok(None);
        };
        if !doubles.is_empty() && rules.rules().len() > 1 {
            return Ok(None); // which update counts depends on how they are merged
        }
        let layout = rules.layout(tensors, doubles);
        let Some(moments) = Moments::find(optimizer, &paths, &rules, &layout)? else {
            return Ok(None);
        };
        let (Some(scalars), Some(arrays)) = (
            moments.scalars(optimizer.py())?,
            arrays(&moments, &rules, layout.tensors(), mixed)?,
        ) else {
            return Ok(None);
        };
        let scalars = scalars.iter().map(|slot| bridge::get(&slot.object));
        let mut state: Vec<Array> = scalars.flatten().collect();
        for buffer in 0..layout.len() {
            let members: Vec<_> = layout.members(buffer).map(|i| &arrays[i]).collect();
            for name in 0..members[0].len() {
                let parts: Vec<&Array> = members.iter().map(|arrays| &arrays[name]).collect();
                state.push(Layout::join(&parts).map_err(mlx)?);
            }
        }
        Ok(Some(Self {
            rules,
            layout,
            moments,
            state,
        }))
    }
}

// by tensor; None where one is of another shape or dtype: then it is left as the optimizer itself would take it
fn arrays(
    moments: &Moments,
    rules: &Rules,
    tensors: &[Tensor],
    mixed: bool,
) -> PyResult<Option<Vec<Vec<Array>>>> {
    let widened = |dtype| if mixed { wide(dtype) } else { dtype };
    let expected = rules.moments(tensors).zip(tensors);
    let mut all = Vec::with_capacity(tensors.len());
    for (arrays, (moments, tensor)) in moments.arrays().into_iter().zip(expected) {
        let arrays = arrays.iter().map(|a| a.as_dtype(widened(a.dtype())));
        let arrays = arrays.collect::<Result<Vec<_>, _>>().map_err(mlx)?;
        let dtype = widened(tensor.dtype);
        let expected = moments
            .into_iter()
            .map(|(_, shape)| Tensor { shape, dtype });
        if arrays.iter().map(Tensor::of).ne(expected) {
            return Ok(None);
        }
        all.push(arrays);
    }
    Ok(Some(all))
}
