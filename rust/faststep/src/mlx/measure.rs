//! The time of each operation behind lazy arrays.
//!
//! The C++ behind it (`native/measure.cpp`) evaluates the arrays, operation by operation, in the calling thread, and keeps
//! nothing.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void, CStr};

use mlx_rs::{error::Result, Array};

use super::ffi::{check, faststep_measure, handles};

/// One operation, evaluated by itself.
#[derive(Clone, Debug)]
pub struct Operation {
    /// MLX's name of it.
    pub name: String,
    /// Dtype and shape of its (first) output.
    pub output: String,
    /// The bytes of its inputs and outputs.
    pub bytes: usize,
    /// Its seconds, without what any evaluation takes.
    pub seconds: f64,
}

extern "C" fn take(
    into: *mut c_void,
    name: *const c_char,
    output: *const c_char,
    bytes: usize,
    seconds: f64,
) {
    // SAFETY: `operations` passes its list, and two texts with their NUL live while this runs.
    let (into, name, output) = unsafe {
        let into = &mut *into.cast::<Vec<Operation>>();
        (into, CStr::from_ptr(name), CStr::from_ptr(output))
    };
    into.push(Operation {
        name: name.to_string_lossy().into_owned(),
        output: output.to_string_lossy().into_owned(),
        bytes,
        seconds,
    });
}

/// Evaluate arrays operation by operation.
///
/// # Errors
/// Of the evaluation.
pub(crate) fn operations<'a>(
    arrays: impl IntoIterator<Item = &'a Array>,
) -> Result<Vec<Operation>> {
    let handles = handles(arrays);
    let mut found: Vec<Operation> = Vec::new();
    // SAFETY: live arrays and their number; the list outlives the call.
    check(unsafe {
        let into = (&raw mut found).cast::<c_void>();
        faststep_measure(handles.as_ptr(), handles.len(), take, into)
    })?;
    Ok(found)
}
