//! The lazy graph of a trace as it was made, before MLX's compiler rewrites it (`native/graph/graph.cpp`).
#![allow(unsafe_code)]

use mlx_rs::{error::Result, Array};

use super::ffi::{check, faststep_graph_read_instead, faststep_graph_size, handles};

/// The number of operations from a trace's inputs to its outputs.
pub(crate) fn size(inputs: &[Array], outputs: &[Array]) -> usize {
    let (inputs, outputs) = (handles(inputs), handles(outputs));
    // SAFETY: live arrays, and the number of each list.
    unsafe {
        faststep_graph_size(
            inputs.as_ptr(),
            inputs.len(),
            outputs.as_ptr(),
            outputs.len(),
        )
    }
}

/// Have the operations behind `outputs` read the second array of each pair in the place of the first, of which it is made by one
/// operation.
///
/// # Errors
/// When there is no memory.
pub(crate) fn read_instead(pairs: &[(Array, Array)], outputs: &[Array]) -> Result<()> {
    let from = handles(pairs.iter().map(|(from, _)| from));
    let to = handles(pairs.iter().map(|(_, to)| to));
    let outputs = handles(outputs);
    // SAFETY: live arrays, and the number of each list.
    check(unsafe {
        faststep_graph_read_instead(
            from.as_ptr(),
            to.as_ptr(),
            from.len(),
            outputs.as_ptr(),
            outputs.len(),
        )
    })
}
