//! The time of each operation behind lazy arrays.
//!
//! The C++ behind it (`native/measure.cpp`) evaluates the arrays, operation by operation, in the calling thread, and keeps
//! nothing but the labels of that thread, until they are cleared.
#![allow(unsafe_code)]

use std::ffi::{c_void, CStr, CString};

use mlx_rs::{
    error::{Exception, Result},
    Array,
};

use super::ffi::{
    check, faststep_label, faststep_label_input, faststep_labels_clear, faststep_measure, handle,
    handles, TimedOperation,
};
pub use super::ffi::{Held, KINDS};

/// One operation, evaluated by itself.
#[derive(Clone, Debug)]
pub struct Operation {
    /// The least of the identities of its outputs.
    pub(crate) id: usize,
    /// MLX's name of it.
    pub name: String,
    /// The module that it belongs to; empty where that is not known.
    pub module: String,
    /// Dtype and shape of its (first) output.
    pub output: String,
    /// The bytes of its inputs and outputs.
    pub bytes: usize,
    /// Its seconds, without what any evaluation takes.
    pub seconds: f64,
    /// True if the device has timed it; otherwise it was waited for.
    pub by_events: bool,
    /// Memory in use while it runs in a step.
    pub held: Held,
}

extern "C" fn take(into: *mut c_void, operation: *const TimedOperation) {
    // SAFETY: `operations` passes its list, and the operation and its texts with their NUL live while this runs.
    let (into, operation, [name, module, output]) = unsafe {
        let into = &mut *into.cast::<Vec<Operation>>();
        let operation = &*operation;
        let texts = [operation.name, operation.module, operation.output];
        (into, operation, texts.map(|text| CStr::from_ptr(text)))
    };
    let [name, module, output] =
        [name, module, output].map(|text| text.to_string_lossy().into_owned());
    into.push(Operation {
        id: operation.id,
        name,
        module,
        output,
        bytes: operation.bytes,
        seconds: operation.seconds,
        by_events: operation.by_events != 0,
        held: Held::default(),
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

/// The operations that these arrays are computed from, and have no module yet, belong to this one.
///
/// # Errors
/// When there is no memory, or the name has a NUL in it.
pub fn label<'a>(arrays: impl IntoIterator<Item = &'a Array>, module: &str) -> Result<()> {
    let (handles, module) = (handles(arrays), text(module)?);
    // SAFETY: live arrays and their number, and a text with its NUL.
    check(unsafe { faststep_label(handles.as_ptr(), handles.len(), module.as_ptr()) })
}

/// Label the operations that read this array as a module's.
///
/// # Errors
/// As [`label`].
pub fn label_input(array: &Array, module: &str) -> Result<()> {
    let module = text(module)?;
    // SAFETY: a live array, and a text with its NUL.
    check(unsafe { faststep_label_input(handle(array), module.as_ptr()) })
}

/// Forget the labels of this thread.
pub fn clear_labels() {
    // SAFETY: nothing is passed.
    unsafe { faststep_labels_clear() }
}

fn text(name: &str) -> Result<CString> {
    CString::new(name).map_err(|error| Exception::custom(error.to_string()))
}
