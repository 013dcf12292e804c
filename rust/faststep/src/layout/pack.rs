//! Gradients joined by buffer, and the arrays to evaluate when a step takes them over.
use mlx_rs::{error::Result, Array};

use super::layout::Layout;
use crate::mlx::{array, join, kernels};

/// Gradients by buffer, and sums of their squares where they came for free, a float32 vector for each buffer.
#[derive(Debug)]
pub struct Packed {
    /// The gradients.
    pub buffers: Vec<Array>,
    /// The sums.
    pub squares: Vec<Option<Array>>,
}

/// Join gradients, given by tensor, into their buffers (lazily); `joint`: whatever reads one needs all.
///
/// # Errors
/// When the arrays are not of the layout's shapes.
pub fn gradients(layout: &Layout, gradients: &[Array], joint: bool) -> Result<Packed> {
    let cuda = join::is_cuda();
    let straight = !cuda || kernels::wanted();
    let mut alone = vec![false; gradients.len()];
    for tensor in (0..layout.len()).filter_map(|buffer| layout.single(buffer)) {
        alone[tensor] = true;
    }
    let gradients = gradients.iter().zip(alone).map(|(gradient, alone)| {
        if straight {
            join::straight(gradient, alone)
        } else {
            Ok(gradient.clone())
        }
    });
    let mut gradients = gradients.collect::<Result<Vec<_>>>()?;
    if !cuda {
        gradients = array::rows_summed(&gradients)?;
    }
    join::order(&gradients)?;
    let mut packed = Packed {
        buffers: Vec::with_capacity(layout.len()),
        squares: Vec::with_capacity(layout.len()),
    };
    for buffer in 0..layout.len() {
        let parts: Vec<&Array> = layout.members(buffer).map(|i| &gradients[i]).collect();
        let same = parts.iter().all(|part| part.dtype() == parts[0].dtype());
        let (flat, squares) = if cuda && same && (2..=join::MAX_PARTS).contains(&parts.len()) {
            let (flat, squares) = join::join_on_cuda(&parts)?;
            (flat, Some(squares))
        } else {
            let mut flat = layout.pack_one(buffer, &gradients)?;
            if parts.len() == 1 && flat.ndim() > 1 {
                flat = join::contiguous(&flat)?; // a gradient that is a transpose is updated several times slower
            }
            let squares = join::squares_of(&flat)?;
            (flat, squares)
        };
        packed.buffers.push(flat);
        packed.squares.push(squares);
    }
    for waiting in waiting(layout, joint) {
        let flat = waiting.iter().map(|&buffer| packed.buffers[buffer].clone());
        let waited = join::wait(flat.collect())?;
        for (buffer, flat) in waiting.into_iter().zip(waited) {
            packed.buffers[buffer] = flat;
        }
    }
    Ok(packed)
}

// The buffers whose updates begin together, when a CPU's worker is done with all before: what is shared, and the largest beside it,
// or all. The old parameters are not read any more then, and are written over.
fn waiting(layout: &Layout, joint: bool) -> Vec<Vec<usize>> {
    if joint {
        return vec![(0..layout.len()).collect()];
    }
    let bytes = |buffer| Some((layout.tensors()[layout.single(buffer)?].bytes(), buffer));
    let largest = (0..layout.len()).filter_map(bytes).max();
    let largest = largest.map(|(_, buffer)| buffer);
    vec![layout.shared().collect(), largest.into_iter().collect()]
}

// The arrays to evaluate when an engine is built, one at a time, so that the inputs of each join are freed before the next.
// Zeros stay lazy until the first update, when the activations have been freed.
pub(crate) fn taken_over<'a>(
    shared: &'a [Array],
    state: &'a [Array],
) -> impl Iterator<Item = &'a Array> {
    let state = state.iter().filter(|array| !array::is_filled(array));
    shared.iter().chain(state)
}
