//! Access to MLX's arrays that mlx-c leaves out: identity, views that share a buffer, hollow arrays.
//!
//! The C++ behind it reads and makes `mlx::core::array` objects, which is what the `ctx` of mlx-c's handles points at in
//! the MLX that this crate is built against. It keeps nothing between calls and may be used from any thread that owns
//! the arrays that it passes.
#![allow(unsafe_code)]

use std::{ffi::c_void, ptr};

use mlx_rs::{error::Exception, Array};

extern "C" {
    fn faststep_array_id(array: *const c_void) -> usize;
    fn faststep_array_is_lazy(array: *const c_void) -> i32;
    fn faststep_array_operations(array: *const c_void) -> usize;
    fn faststep_array_is_filled(array: *const c_void) -> i32;
    fn faststep_array_is_foreign(array: *const c_void) -> i32;
    fn faststep_array_reads_file(array: *const c_void) -> i32;
    fn faststep_arrays_recover(arrays: *const *const c_void, n: usize);
    fn faststep_array_view(
        flat: *const c_void,
        shape: *const i32,
        ndim: usize,
        offset: usize,
    ) -> *mut c_void;
    fn faststep_array_is_zero(array: *const c_void) -> i32;
    fn faststep_merge(arrays: *const *const c_void, n: usize, merged: *mut *mut c_void) -> i32;
    fn faststep_arrays_ranks(arrays: *const *const c_void, n: usize) -> i32;
    fn faststep_array_hollow() -> *mut c_void;
    fn faststep_array_random_state(draw: *const c_void) -> *mut c_void;
}

/// The identity of an array's value: equal for handles of the same value, unique while one of them lives.
#[must_use]
pub fn id(array: &Array) -> usize {
    // SAFETY: an `Array` always holds a live mlx::core::array.
    unsafe { faststep_array_id(array.as_ptr().ctx) }
}

/// Whether the array still waits to be evaluated.
#[must_use]
pub fn is_lazy(array: &Array) -> bool {
    // SAFETY: as in `id`.
    unsafe { faststep_array_is_lazy(array.as_ptr().ctx) != 0 }
}

/// How many operations have to be computed before the array has its value: the size of the graph behind it. A loop that
/// evaluates nothing sees it grow from step to step.
#[must_use]
pub fn operations(array: &Array) -> usize {
    // SAFETY: as in `id`.
    unsafe { faststep_array_operations(array.as_ptr().ctx) }
}

/// Whether the array waits to be filled with one number that is there, as the zeros do that an optimizer begins with:
/// nothing can fail of it but the memory.
pub(crate) fn is_filled(array: &Array) -> bool {
    // SAFETY: as in `id`.
    unsafe { faststep_array_is_filled(array.as_ptr().ctx) != 0 }
}

/// Whether the array waits for work on a stream of another thread, so that this thread cannot evaluate it.
#[must_use]
pub fn is_foreign(array: &Array) -> bool {
    // SAFETY: as in `id`.
    unsafe { faststep_array_is_foreign(array.as_ptr().ctx) != 0 }
}

/// Whether the array waits for a file to be read. A file that is lost by then leaves anything in it, after one error.
#[must_use]
pub fn reads_file(array: &Array) -> bool {
    // SAFETY: as in `id`.
    unsafe { faststep_array_reads_file(array.as_ptr().ctx) != 0 }
}

/// After an error of the device: what can be computed is, and nobody who reads these arrays waits for what never comes.
pub fn recover<'a>(arrays: impl IntoIterator<Item = &'a Array>) {
    let pointers = pointers(arrays);
    // SAFETY: as in `id`; pointer and length are those of one list.
    unsafe { faststep_arrays_recover(pointers.as_ptr(), pointers.len()) }
}

fn pointers<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Vec<*const c_void> {
    let pointers = arrays
        .into_iter()
        .map(|array| array.as_ptr().ctx.cast_const());
    pointers.collect()
}

/// The most ranks of a distributed group between which arrays are exchanged to compute these lazy ones; 1: none are.
pub(crate) fn ranks<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> i32 {
    let pointers = pointers(arrays);
    // SAFETY: as in `recover`.
    unsafe { faststep_arrays_ranks(pointers.as_ptr(), pointers.len()) }
}

/// Whether a lazy array is zero in every element, whatever the values that come in.
pub(crate) fn is_zero(array: &Array) -> bool {
    // SAFETY: as in `id`.
    unsafe { faststep_array_is_zero(array.as_ptr().ctx) != 0 }
}

/// The same lazy arrays, equal operations behind them merged: what MLX's compilation would lose otherwise.
pub(crate) fn merged(arrays: &[Array]) -> Result<Vec<Array>, Exception> {
    let pointers = pointers(arrays);
    let mut merged = vec![ptr::null_mut(); arrays.len()];
    // SAFETY: as in `recover`; there is room for as many arrays as there are.
    let failed =
        unsafe { faststep_merge(pointers.as_ptr(), pointers.len(), merged.as_mut_ptr()) } != 0;
    // SAFETY: each is null, or a fresh mlx::core::array on the heap.
    let merged = merged.into_iter().map(|array| unsafe { owned(array) });
    let merged: Option<Vec<Array>> = merged.collect();
    let merged = merged.filter(|_| !failed);
    merged.ok_or_else(|| Exception::custom("equal operations of a step could not be merged"))
}

/// The array that C++ has made; `None` for null.
///
/// # Safety
/// It is null, or a fresh `mlx::core::array` on the heap, which is what mlx-c's handles own.
pub(crate) unsafe fn owned(made: *mut c_void) -> Option<Array> {
    // SAFETY: as above.
    (!made.is_null()).then(|| unsafe { Array::from_ptr(mlx_sys::mlx_array { ctx: made }) })
}

/// The part of a one-dimensional buffer that begins at element `offset`, in the given shape, without a copy.
///
/// # Errors
/// When MLX refuses the lazy view of a buffer that is not evaluated.
pub fn view(buffer: &Array, shape: &[i32], offset: usize) -> Result<Array, Exception> {
    // SAFETY: as in `id`; shape and length come from one slice; the layout keeps offset + size within the buffer.
    let part =
        unsafe { faststep_array_view(buffer.as_ptr().ctx, shape.as_ptr(), shape.len(), offset) };
    if part.is_null() {
        return Err(Exception::custom(format!(
            "no view of shape {shape:?} at element {offset} of a buffer of {} elements",
            buffer.size()
        )));
    }
    // SAFETY: a fresh mlx::core::array on the heap, which is what mlx-c's handles own.
    Ok(unsafe { Array::from_ptr(mlx_sys::mlx_array { ctx: part }) })
}

/// An array without a value: what an object holds while its value is in the device's hands. Reading it is an error.
#[must_use]
pub fn hollow() -> Array {
    // SAFETY: as in `view`.
    unsafe {
        Array::from_ptr(mlx_sys::mlx_array {
            ctx: faststep_array_hollow(),
        })
    }
}

/// The random state from which a draw that is still lazy has split its key; `None` where the array is no such draw.
pub(crate) fn random_state(draw: &Array) -> Option<Array> {
    // SAFETY: as in `id`.
    unsafe { owned(faststep_array_random_state(draw.as_ptr().ctx)) }
}
