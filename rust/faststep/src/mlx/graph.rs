//! The graph of a trace as it was made, before MLX's compiler rewrites it.
//!
//! Two traces of a loss in which a number has changed are compared by it: what differs may be a constant, which then
//! becomes an input, or nothing at all. The C++ behind this (`native/graph/graph.cpp`) keeps a graph's operations and
//! constants alive, and none of its results; it may be used on any thread that owns the arrays that are passed.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    ptr,
};

use mlx_rs::{
    error::{Exception, Result},
    Array,
};

use super::ffi::{
    check, faststep_graph_bytes, faststep_graph_compare, faststep_graph_constant,
    faststep_graph_determines_gradients, faststep_graph_free, faststep_graph_held,
    faststep_graph_kept, faststep_graph_lasting, faststep_graph_new, faststep_graph_replace,
    faststep_graph_size, handles, is_done, made, owned,
};

/// The most constants that may differ between two graphs of one form.
const MAX_VARYING: usize = 1024;
/// The most constants whose other holders are looked up.
const MAX_HELD: usize = 64;

/// Arrays of a trace that somebody keeps who is not in its graph, where there were so many handles of each input `before`.
///
/// # Errors
/// When there is no memory.
pub fn kept(inputs: &[Array], before: &[usize], outputs: &[Array]) -> Result<Vec<Array>> {
    let n = inputs.len().min(before.len());
    let (inputs, outputs) = (handles(&inputs[..n]), handles(outputs));
    // SAFETY: live arrays, a number for each input, and as much room as is said.
    given_out(|found, room, count| unsafe {
        faststep_graph_kept(
            inputs.as_ptr(),
            before.as_ptr(),
            n,
            outputs.as_ptr(),
            outputs.len(),
            found,
            room,
            count,
        )
    })
}

/// Arrays of a trace that are yet to be computed, and from no input, and that somebody keeps who is not in its graph: a function
/// with a cache, say. Those behind `known` are left out; of each output there is one handle beside that in `outputs`.
///
/// # Errors
/// When there is no memory.
pub fn lasting(known: &[Array], outputs: &[Array]) -> Result<Vec<Array>> {
    let (known, outputs) = (handles(known), handles(outputs));
    // SAFETY: live arrays, the number of each list, and as much room as is said.
    given_out(|found, room, count| unsafe {
        faststep_graph_lasting(
            known.as_ptr(),
            known.len(),
            outputs.as_ptr(),
            outputs.len(),
            found,
            room,
            count,
        )
    })
}

// the arrays that a call writes to a place with so much room, and counts
fn given_out(
    call: impl FnOnce(*mut *mut c_void, usize, *mut usize) -> c_int,
) -> Result<Vec<Array>> {
    let mut found = vec![ptr::null_mut(); MAX_HELD];
    let mut count = 0;
    check(call(found.as_mut_ptr(), MAX_HELD, &raw mut count))?;
    found.truncate(count);
    // SAFETY: so many are new arrays as are counted.
    Ok(found
        .into_iter()
        .map(|array| unsafe { owned(array) })
        .collect())
}

/// The operations and constants from a trace's inputs to its outputs.
#[derive(Debug)]
pub struct Graph(*mut c_void);

impl Graph {
    /// Write down what `outputs` are computed by.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(inputs: &[Array], outputs: &[Array]) -> Result<Self> {
        let (inputs, outputs) = (handles(inputs), handles(outputs));
        let mut graph = ptr::null_mut();
        // SAFETY: live arrays, and the number of each list.
        check(unsafe {
            faststep_graph_new(
                inputs.as_ptr(),
                inputs.len(),
                outputs.as_ptr(),
                outputs.len(),
                &raw mut graph,
            )
        })?;
        Ok(Self(graph))
    }

    /// The constants, by number, in which `other` differs; `None` where it differs in anything else.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn differences(&self, other: &Self) -> Result<Option<Vec<u32>>> {
        let mut varying = vec![0; MAX_VARYING];
        let mut count = 0;
        // SAFETY: two graphs, and as much room as is said.
        let status = unsafe {
            faststep_graph_compare(
                self.0,
                other.0,
                varying.as_mut_ptr(),
                MAX_VARYING,
                &raw mut count,
            )
        };
        if !is_done(status)? || count > MAX_VARYING {
            return Ok(None);
        }
        varying.truncate(count);
        Ok(Some(varying))
    }

    /// A constant by its number.
    ///
    /// # Errors
    /// When there is none.
    pub fn constant(&self, number: u32) -> Result<Array> {
        // SAFETY: a graph.
        let constant =
            made(|constant| unsafe { faststep_graph_constant(self.0, number, constant) })?;
        constant.ok_or_else(|| {
            Exception::custom(format!("no constant of a trace has the number {number}"))
        })
    }

    /// Whether MLX alone makes gradients of it: no function with gradients of its own is in it.
    #[must_use]
    pub fn determines_gradients(&self) -> bool {
        // SAFETY: a graph.
        unsafe { faststep_graph_determines_gradients(self.0) }
    }

    /// Constants that somebody beside the graph and another one of the same arrays holds; `outputs` are those of the graph.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn held(&self, also: Option<&Self>, outputs: &[Array]) -> Result<Vec<Array>> {
        let also = also.map_or(ptr::null(), |also| also.0.cast_const());
        let outputs = handles(outputs);
        let (outputs, n) = (outputs.as_ptr(), outputs.len());
        // SAFETY: two graphs or one, live arrays, and as much room as is said.
        given_out(|found, room, count| unsafe {
            faststep_graph_held(self.0, also, outputs, n, found, room, count)
        })
    }

    /// Have `outputs` be computed from inputs in place of these constants, one for each.
    ///
    /// # Errors
    /// When a number is that of no constant.
    pub fn replace(&self, numbers: &[u32], inputs: &[Array], outputs: &[Array]) -> Result<()> {
        let (inputs, outputs) = (handles(inputs), handles(outputs));
        let n = numbers.len().min(inputs.len());
        // SAFETY: a graph, live arrays, and the number of each list.
        check(unsafe {
            faststep_graph_replace(
                self.0,
                numbers.as_ptr(),
                inputs.as_ptr(),
                n,
                outputs.as_ptr(),
                outputs.len(),
            )
        })
    }

    /// The number of arrays in it.
    #[must_use]
    pub fn len(&self) -> usize {
        // SAFETY: a graph.
        unsafe { faststep_graph_size(self.0) }
    }

    /// The bytes of its constants.
    #[must_use]
    pub fn bytes(&self) -> usize {
        // SAFETY: a graph.
        unsafe { faststep_graph_bytes(self.0) }
    }

    /// Return whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { faststep_graph_free(self.0) }
    }
}
