//! The graph of a trace as it was made, before MLX's compiler rewrites it.
//!
//! Two traces of a loss in which a number has changed are compared by it: what differs may be a constant, which then
//! becomes an input, or nothing at all. The C++ behind this (`native/graph/graph.cpp`) keeps a graph's operations and constants
//! alive, and none of its results; it may be used on any thread that owns the arrays that are passed.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use mlx_rs::{
    error::{Exception, Result},
    Array,
};

use super::array;

extern "C" {
    fn faststep_graph_new(
        inputs: *const *const c_void,
        n_inputs: usize,
        outputs: *const *const c_void,
        n_outputs: usize,
    ) -> *mut c_void;
    fn faststep_graph_free(graph: *mut c_void);
    fn faststep_graph_size(graph: *const c_void) -> usize;
    fn faststep_graph_compare(
        a: *const c_void,
        b: *const c_void,
        varying: *mut u32,
        room: usize,
        count: *mut usize,
    ) -> c_int;
    fn faststep_graph_constant(graph: *const c_void, number: u32) -> *mut c_void;
    fn faststep_graph_held(
        graph: *const c_void,
        outputs: *const *const c_void,
        n: usize,
        found: *mut *mut c_void,
        room: usize,
    ) -> c_int;
    fn faststep_graph_replace(
        graph: *const c_void,
        numbers: *const u32,
        inputs: *const *const c_void,
        n: usize,
        outputs: *const *const c_void,
        n_outputs: usize,
    ) -> c_int;
}

/// The most constants that may differ between two graphs of one form.
const MAX_VARYING: usize = 1024;
/// The most constants that are looked up for somebody who holds them.
const MAX_HELD: usize = 64;

/// The operations and constants from a trace's inputs to its outputs.
#[derive(Debug)]
pub struct Graph(*mut c_void);

fn pointers(arrays: &[Array]) -> Vec<*const c_void> {
    let pointers = arrays.iter().map(|array| array.as_ptr().ctx.cast_const());
    pointers.collect()
}

fn failed() -> Exception {
    Exception::custom("the graph of a trace could not be written down")
}

impl Graph {
    /// Write down what `outputs` are computed by.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(inputs: &[Array], outputs: &[Array]) -> Result<Self> {
        let (inputs, outputs) = (pointers(inputs), pointers(outputs));
        // SAFETY: live arrays, and the number of each list.
        let graph = unsafe {
            faststep_graph_new(
                inputs.as_ptr(),
                inputs.len(),
                outputs.as_ptr(),
                outputs.len(),
            )
        };
        if graph.is_null() {
            return Err(failed());
        }
        Ok(Self(graph))
    }

    /// The constants, by number, in which `other` differs; `None` where it differs in anything else.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Option<Vec<u32>> {
        let mut varying = vec![0; MAX_VARYING];
        let mut count = 0;
        // SAFETY: two graphs, and as much room as is said.
        let same = unsafe {
            faststep_graph_compare(
                self.0,
                other.0,
                varying.as_mut_ptr(),
                MAX_VARYING,
                &raw mut count,
            )
        };
        if same != 1 || count > MAX_VARYING {
            return None;
        }
        varying.truncate(count);
        Some(varying)
    }

    /// A constant by its number.
    ///
    /// # Errors
    /// Where there is none.
    pub fn constant(&self, number: u32) -> Result<Array> {
        // SAFETY: a graph; what it gives is a fresh array or null.
        unsafe { array::owned(faststep_graph_constant(self.0, number)) }.ok_or_else(failed)
    }

    /// Constants that somebody beside the graph holds, where `outputs` are those of the graph.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn held(&self, outputs: &[Array]) -> Result<Vec<Array>> {
        let outputs = pointers(outputs);
        let mut found = vec![std::ptr::null_mut(); MAX_HELD];
        // SAFETY: a graph, live arrays, and as much room as is said; what is written are fresh arrays.
        unsafe {
            let count = faststep_graph_held(
                self.0,
                outputs.as_ptr(),
                outputs.len(),
                found.as_mut_ptr(),
                MAX_HELD,
            );
            let count = usize::try_from(count).map_err(|_| failed())?;
            Ok(found[..count]
                .iter()
                .filter_map(|&a| array::owned(a))
                .collect())
        }
    }

    /// Have `outputs` be computed from inputs in place of these constants, one for each.
    ///
    /// # Errors
    /// Where a number is that of no constant.
    pub fn replace(&self, numbers: &[u32], inputs: &[Array], outputs: &[Array]) -> Result<()> {
        let (inputs, outputs) = (pointers(inputs), pointers(outputs));
        let n = numbers.len().min(inputs.len());
        // SAFETY: a graph, live arrays, and the number of each list.
        let status = unsafe {
            faststep_graph_replace(
                self.0,
                numbers.as_ptr(),
                inputs.as_ptr(),
                n,
                outputs.as_ptr(),
                outputs.len(),
            )
        };
        if status == 0 {
            Ok(())
        } else {
            Err(failed())
        }
    }

    /// The number of arrays in it.
    #[must_use]
    pub fn len(&self) -> usize {
        // SAFETY: a graph.
        unsafe { faststep_graph_size(self.0) }
    }

    /// Whether there is none.
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
