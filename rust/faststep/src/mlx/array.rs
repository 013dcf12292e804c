//! Access to MLX's arrays that mlx-c leaves out: identity, views that share a buffer, hollow arrays.
//!
//! The C++ behind it (`native/array.cpp`) reads and makes `mlx::core::array` objects. It keeps nothing between calls
//! and may be used from any thread that owns the arrays that it passes.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    ptr,
};

use mlx_rs::{error::Result, Array};

use super::ffi::{
    check, faststep_align, faststep_array_has_rows, faststep_array_holders, faststep_array_hollow,
    faststep_array_id, faststep_array_is_filled, faststep_array_is_foreign, faststep_array_is_lazy,
    faststep_array_is_zero, faststep_array_operations, faststep_array_random_state,
    faststep_array_reads_file, faststep_array_view, faststep_arrays_ranks, faststep_arrays_recover,
    faststep_differ_by_rank, faststep_eval_one_by_one, faststep_exchange_in_order,
    faststep_is_transforming, faststep_kernels, faststep_merge, faststep_own_kernels,
    faststep_sum_rows, faststep_sum_slices, faststep_watch_free, faststep_watch_is_alive,
    faststep_watch_new, handle, handles, made, owned, Chunk, Handles, New,
};
use super::{blas, convolution, join, kernels};

/// The identity of an array's value: equal for handles of the same value, unique while one of them lives.
#[must_use]
pub fn id(array: &Array) -> usize {
    // SAFETY: an `Array` always holds a live mlx::core::array.
    unsafe { faststep_array_id(handle(array)) }
}

/// Return the number of handles to the array's value, this one included.
#[must_use]
pub fn holders(array: &Array) -> usize {
    // SAFETY: as in `id`.
    unsafe { faststep_array_holders(handle(array)) }
}

/// The same value row after row: the array itself where it lies so, else lazily.
///
/// # Errors
/// When there is no memory.
pub(crate) fn rows(array: &Array) -> Result<Array> {
    // SAFETY: as in `id`.
    if unsafe { faststep_array_has_rows(handle(array)) != 0 } {
        return Ok(array.clone());
    }
    array.contiguous()
}

/// Return whether the array still waits to be evaluated.
#[must_use]
pub fn is_lazy(array: &Array) -> bool {
    // SAFETY: as in `id`.
    unsafe { faststep_array_is_lazy(handle(array)) != 0 }
}

/// The number of operations that have to be computed before the array has its value: the size of its graph. A loop that
/// evaluates nothing sees it grow from step to step.
#[must_use]
pub fn operations(array: &Array) -> usize {
    // SAFETY: as in `id`.
    unsafe { faststep_array_operations(handle(array)) }
}

/// A value that is watched without being kept alive.
#[derive(Debug)]
pub struct Watched(*mut c_void);

impl Watched {
    /// Watch the value of an array.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(array: &Array) -> Result<Self> {
        let mut watched = ptr::null_mut();
        // SAFETY: as in `id`; the pointer is written where there was no error.
        check(unsafe { faststep_watch_new(handle(array), &raw mut watched) })?;
        Ok(Self(watched))
    }

    /// Return whether anybody still has it: an array object, or a graph.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        // SAFETY: made by `new`.
        unsafe { faststep_watch_is_alive(self.0) != 0 }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { faststep_watch_free(self.0) }
    }
}

/// Return whether the array waits to be filled with one number that is there, as the zeros do that an optimizer begins
/// with: nothing can fail of it but the memory.
pub(crate) fn is_filled(array: &Array) -> bool {
    // SAFETY: as in `id`.
    unsafe { faststep_array_is_filled(handle(array)) != 0 }
}

/// Return whether the array waits for work on a stream of another thread, so that this thread cannot evaluate it.
#[must_use]
pub fn is_foreign(array: &Array) -> bool {
    // SAFETY: as in `id`.
    unsafe { faststep_array_is_foreign(handle(array)) != 0 }
}

/// Return whether the array waits for a file to be read. A file that is lost by then leaves anything in it, after one
/// error.
#[must_use]
pub fn reads_file(array: &Array) -> bool {
    // SAFETY: as in `id`.
    unsafe { faststep_array_reads_file(handle(array)) != 0 }
}

/// Evaluate arrays, on a CPU each operation when the one before is done: no memory is taken ahead of the worker.
///
/// # Errors
/// Of the evaluation.
pub(crate) fn eval_one_by_one<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    let handles = handles(arrays);
    // SAFETY: as in `id`; handles and length are those of one list.
    check(unsafe { faststep_eval_one_by_one(handles.as_ptr(), handles.len()) })
}

/// Mark the arrays after an error of the device, so that reading them computes what can be computed and never blocks.
pub fn recover<'a>(arrays: impl IntoIterator<Item = &'a Array>) {
    let handles = handles(arrays);
    // SAFETY: as in `id`; handles and length are those of one list.
    unsafe { faststep_arrays_recover(handles.as_ptr(), handles.len()) }
}

/// The most ranks of a distributed group between which arrays are exchanged to compute these lazy ones; 1: none are.
pub(crate) fn ranks<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> i32 {
    let handles = handles(arrays);
    // SAFETY: as in `recover`.
    unsafe { faststep_arrays_ranks(handles.as_ptr(), handles.len()) }
}

/// Return whether the caller is inside of a function that is transformed, where nothing may be evaluated.
#[must_use]
pub fn is_transforming() -> bool {
    // SAFETY: nothing is passed.
    unsafe { faststep_is_transforming() != 0 }
}

/// Return how often MLX has refused to read the value of a traced array, on this thread.
pub(crate) fn refused_reads() -> usize {
    // SAFETY: nothing is passed.
    unsafe { mlx_sys::mlx_refused_reads() }
}

/// Return whether a lazy array is zero in every element, whatever the values that come in.
pub(crate) fn is_zero(array: &Array) -> bool {
    // SAFETY: as in `id`.
    unsafe { faststep_array_is_zero(handle(array)) != 0 }
}

/// The same lazy arrays as MLX's compilation should get them: equal operations are merged, which it loses outputs over,
/// the gradients of what is read by slices are summed at once, on a CPU those of tables by rows, and on CUDA odd dimensions
/// of products are padded. Some operations are computed by kernels of the package's own, unless `FASTSTEP_KERNELS` is 0.
///
/// # Errors
/// When MLX refuses to rebuild an operation.
pub(crate) fn rewritten(arrays: &[Array]) -> Result<Vec<Array>> {
    let merged = each(&each(arrays, faststep_merge)?, faststep_sum_slices)?;
    if !join::is_cuda() {
        let summed = rows_summed(&merged)?;
        if kernels::wanted() {
            each(&summed, own_kernels)
        } else {
            Ok(summed)
        }
    } else if kernels::wanted() {
        each(&each(&merged, faststep_align)?, faststep_kernels)
    } else {
        Ok(merged)
    }
}

/// The same lazy arrays, which exchange with other ranks one array after another, in an order that follows from the graph alone; and a
/// number of what they exchange, 0 for nothing.
///
/// # Errors
/// When there is no memory.
pub(crate) fn exchange_in_order(arrays: &[Array]) -> Result<(Vec<Array>, u64)> {
    let handles = handles(arrays);
    let mut made = vec![ptr::null_mut(); arrays.len()];
    let mut exchanges = 0;
    // SAFETY: as in `each`; a number that is written.
    unsafe {
        check(faststep_exchange_in_order(
            handles.as_ptr(),
            handles.len(),
            made.as_mut_ptr(),
            &raw mut exchanges,
        ))?;
        let made = made.into_iter().map(|array| owned(array));
        Ok((made.collect(), exchanges))
    }
}

/// For each lazy array, whether it has another value on each rank, where these shards have: what is computed from one has, until the
/// ranks are summed or gathered.
///
/// # Errors
/// When there is no memory.
pub fn differ_by_rank(arrays: &[Array], shards: &[Array]) -> Result<Vec<bool>> {
    let (arrays, shards) = (handles(arrays), handles(shards));
    let mut differ = vec![0; arrays.len()];
    // SAFETY: as in `recover`; there is room for as many numbers as arrays.
    check(unsafe {
        faststep_differ_by_rank(
            arrays.as_ptr(),
            arrays.len(),
            shards.as_ptr(),
            shards.len(),
            differ.as_mut_ptr(),
        )
    })?;
    Ok(differ.into_iter().map(|differs| differs != 0).collect())
}

/// The same lazy arrays, of which tables of sums of rows, as the gradient of an embedding is one, are computed by one operation
/// each, on a CPU. Uncompiled, nothing is.
///
/// # Errors
/// When there is no memory.
pub(crate) fn rows_summed(arrays: &[Array]) -> Result<Vec<Array>> {
    each(arrays, faststep_sum_rows)
}

unsafe extern "C" fn own_kernels(arrays: Handles, count: usize, rewritten: *mut New) -> c_int {
    let (convolve, sgemm) = (convolution::function(), blas::of_mlx());
    // SAFETY: as the caller says; the functions are never unloaded.
    unsafe { faststep_own_kernels(arrays, count, convolve, sgemm, share, rewritten) }
}

extern "C" fn share(count: usize, chunk: Chunk, context: *const c_void) {
    let context = Context(context);
    blas::share(count, &|at| chunk(context.get(), at));
}

/// What the chunks of a kernel read; they write to parts of arrays that no two of them have in common.
struct Context(*const c_void);

// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    fn get(&self) -> *const c_void {
        self.0
    }
}

/// What a rewrite of a lazy graph makes of each array.
fn each(
    arrays: &[Array],
    rewrite: unsafe extern "C" fn(Handles, usize, *mut New) -> c_int,
) -> Result<Vec<Array>> {
    let handles = handles(arrays);
    let mut made = vec![ptr::null_mut(); arrays.len()];
    // SAFETY: as in `recover`; there is room for as many arrays as there are, and all are written.
    unsafe {
        check(rewrite(handles.as_ptr(), handles.len(), made.as_mut_ptr()))?;
        Ok(made.into_iter().map(|array| owned(array)).collect())
    }
}

/// The part of a one-dimensional buffer that begins at element `offset`, in the given shape, without a copy.
///
/// # Errors
/// When MLX refuses the lazy view of a buffer that is not evaluated.
pub fn view(buffer: &Array, shape: &[i32], offset: usize) -> Result<Array> {
    let mut view = ptr::null_mut();
    // SAFETY: as in `id`; shape and length come from one slice; the layout keeps offset + size within the buffer.
    unsafe {
        let buffer = handle(buffer);
        check(faststep_array_view(
            buffer,
            shape.as_ptr(),
            shape.len(),
            offset,
            &raw mut view,
        ))?;
        Ok(owned(view))
    }
}

/// Return an array without a value, which an object holds while the device has the value. Reading it is an error.
#[must_use]
pub fn hollow() -> Array {
    // SAFETY: a new array.
    unsafe { owned(faststep_array_hollow()) }
}

/// The random state from which a draw that is still lazy has split its key; `None` where the array is no such draw.
///
/// # Errors
/// When there is no memory.
pub(crate) fn random_state(draw: &Array) -> Result<Option<Array>> {
    // SAFETY: as in `id`.
    made(|state| unsafe { faststep_array_random_state(handle(draw), state) })
}
