//! The contents of NumPy arrays.
#![allow(unsafe_code)]

use std::{hash::Hasher, slice};

use pyo3::{
    buffer::PyBuffer,
    intern,
    prelude::*,
    types::{PyBytes, PyMemoryView},
};
use rustc_hash::FxHasher;

/// A hash of the elements, read in place where they lie row after row.
pub fn hash(array: &Bound<'_, PyAny>) -> PyResult<u64> {
    let py = array.py();
    let mut hasher = FxHasher::default();
    let bytes = PyMemoryView::from(array).and_then(|view| view.call_method1("cast", ("B",)));
    if let Ok(buffer) = bytes.and_then(|bytes| PyBuffer::<u8>::get(&bytes)) {
        // SAFETY: contiguous bytes, which the buffer keeps alive; whoever else may write to them waits for the GIL.
        hasher.write(unsafe {
            slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes())
        });
    } else {
        let copied = array.call_method0(intern!(py, "tobytes"))?;
        hasher.write(copied.cast::<PyBytes>()?.as_bytes());
    }
    Ok(hasher.finish())
}
