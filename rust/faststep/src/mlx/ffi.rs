//! Every C function of `native/ffi.hpp`, which says what each of them does, and the conversion of their statuses and
//! arrays.
//!
//! An array crosses as the `ctx` of mlx-c's handle, an `mlx::core::array`. Nothing is kept between calls but what is
//! freed by a function of its own.
#![allow(unsafe_code)]

use std::{
    ffi::{c_char, c_int, c_void, CStr},
    ptr,
};

use mlx_rs::{
    error::{Exception, Result},
    Array,
};

use super::cblas::Gemm;

/// An array, or a list of them.
pub(crate) type Handle = *const c_void;
pub(crate) type Handles = *const Handle;
/// `cblas_sgemm`, where it is OpenBLAS's.
pub(crate) type Sgemm = Option<Gemm<f32, f32>>;
/// A chunk of work, by its number.
pub(crate) type Chunk = extern "C" fn(*const c_void, usize);
/// A new array, or a list of them.
pub(crate) type New = *mut c_void;

/// What MLX calls the compiler for.
pub(crate) const KERNEL_LOOK: c_int = 1;
pub(crate) const KERNEL_ASK: c_int = 2;

/// A product with quantized weights.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct QuantizedProduct {
    pub dtype: usize, // 0: float32, 1: float16, 2: bfloat16
    pub mode: usize,  // of mlx::core::QuantizationMode
    pub bits: usize,
    pub group: usize,
    pub transposed: usize,
    pub rows: usize,
    pub inner: usize,
    pub columns: usize,
    pub weights: usize, // matrices of packed weights
    pub inputs: usize,  // matrices of activations
    pub pairs: usize, // of matrices of activations and of weights, whose products stand one after the other; 0: one of each
    pub x: *const c_void,
    pub w: *const u8,
    pub scales: *const c_void,
    pub biases: *const c_void,
    pub left: *const u32, // of each pair the matrix of activations, and that of weights
    pub right: *const u32,
    pub out: *mut c_void,
    pub scratch: *mut f32,
}

/// A convolution of images, or the gradient of its weights. Pairs: height and width.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Convolution {
    pub is_gradient: usize, // of [patches, outputs] in `other`; otherwise the weights are there
    pub images: usize,
    pub channels: usize,
    pub outputs: usize,
    pub size: [usize; 2], // of an image
    pub kernel: [usize; 2],
    pub patches: [usize; 2],  // of an image
    pub stride: [usize; 2],   // of patches, over the image with its padding and its dilation
    pub dilation: [usize; 2], // of the image
    pub padding: [usize; 2],  // before the image
    pub x: *const f32,
    pub other: *const f32,
    pub out: *mut f32,
}

/// A product of float32, c = a b or c + a b, of matrices that lie row after row, each so many numbers apart, or a^T, or b^T.
#[repr(C)]
pub(crate) struct MatrixProduct {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: *const f32,
    pub lda: usize,
    pub a_turned: usize,
    pub b: *const f32,
    pub ldb: usize,
    pub b_turned: usize,
    pub c: *mut f32,
    pub ldc: usize,
    pub adds: usize,
}

/// An operation that has been timed.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct TimedOperation {
    pub id: usize,
    pub name: *const c_char,
    pub module: *const c_char,
    pub output: *const c_char,
    pub bytes: usize,
    pub seconds: f64,
    pub by_events: c_int,
}

/// The device, as MLX's allocator describes it, in bytes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Device {
    pub gpu: usize,
    pub active: usize,
    pub cached: usize,
    pub cache_limit: usize,
    pub memory_limit: usize,
    pub max_ops: usize,
    pub max_mega: usize,
}

/// Contents of a capture.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct CaptureInfo {
    /// Kernels and copies.
    pub nodes: usize,
    /// Dependencies between them.
    pub edges: usize,
    /// The bytes that it holds beside its inputs.
    pub bytes: usize,
}

/// The result of a simulation, in bytes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Reading {
    /// Bytes in use now.
    pub active: usize,
    /// Most bytes in use at once since the last reading.
    pub peak: usize,
    /// Freed buffers that MLX keeps.
    pub cache: usize,
}

/// The kinds of memory, in the order of [`Held::bytes`].
pub const KINDS: [&str; 9] = [
    "others",
    "parameters",
    "state",
    "model",
    "batch",
    "activations",
    "backward",
    "gradients",
    "update",
];

/// The purpose of memory.
#[derive(Clone, Copy, Debug)]
#[repr(usize)]
pub(crate) enum Kind {
    Parameters = 1,
    State,
    Model,
    Batch,
    Activations,
    Backward,
    Gradients,
    Update,
}

/// Memory in use while an operation runs.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Held {
    /// The least of the identities of the operation's outputs.
    pub(crate) operation: usize,
    /// The bytes of each of [`KINDS`].
    pub bytes: [usize; KINDS.len()],
    /// Freed buffers that MLX keeps.
    pub cache: usize,
}

extern "C" {
    fn faststep_last_error() -> *const c_char;

    pub(crate) fn faststep_array_id(array: Handle) -> usize;
    pub(crate) fn faststep_array_has_rows(array: Handle) -> c_int;
    pub(crate) fn faststep_array_holders(array: Handle) -> usize;
    pub(crate) fn faststep_array_is_lazy(array: Handle) -> c_int;
    pub(crate) fn faststep_array_operations(array: Handle) -> usize;
    pub(crate) fn faststep_measure(
        arrays: Handles,
        count: usize,
        take: extern "C" fn(*mut c_void, *const TimedOperation),
        into: *mut c_void,
    ) -> c_int;
    pub(crate) fn faststep_label(arrays: Handles, count: usize, module: *const c_char) -> c_int;
    pub(crate) fn faststep_label_input(array: Handle, module: *const c_char) -> c_int;
    pub(crate) fn faststep_labels_clear();
    pub(crate) fn faststep_watch_new(array: Handle, watched: *mut *mut c_void) -> c_int;
    pub(crate) fn faststep_watch_is_alive(watched: *const c_void) -> c_int;
    pub(crate) fn faststep_watch_free(watched: *mut c_void);
    pub(crate) fn faststep_array_is_filled(array: Handle) -> c_int;
    pub(crate) fn faststep_array_is_foreign(array: Handle) -> c_int;
    pub(crate) fn faststep_array_reads_file(array: Handle) -> c_int;
    pub(crate) fn faststep_is_transforming() -> c_int;
    pub(crate) fn faststep_array_is_zero(array: Handle) -> c_int;
    pub(crate) fn faststep_arrays_ranks(arrays: Handles, count: usize) -> c_int;
    pub(crate) fn faststep_group_init(group: *mut *mut c_void) -> c_int;
    pub(crate) fn faststep_group_new(group: *const c_void) -> *mut c_void;
    pub(crate) fn faststep_group_is(group: *const c_void, other: *const c_void) -> c_int;
    pub(crate) fn faststep_group_free(group: *mut c_void);
    pub(crate) fn faststep_group_rank(group: *const c_void) -> c_int;
    pub(crate) fn faststep_group_size(group: *const c_void) -> c_int;
    pub(crate) fn faststep_group_sum(
        group: *const c_void,
        array: Handle,
        message: usize,
        sum: *mut New,
    ) -> c_int;
    pub(crate) fn faststep_group_sum_in_turn(
        group: *const c_void,
        array: Handle,
        sum: *mut New,
    ) -> c_int;
    pub(crate) fn faststep_group_sum_numbers(
        group: *const c_void,
        numbers: *mut f32,
        count: usize,
    ) -> c_int;
    pub(crate) fn faststep_arrays_recover(arrays: Handles, count: usize);
    pub(crate) fn faststep_eval_one_by_one(arrays: Handles, count: usize) -> c_int;
    pub(crate) fn faststep_synchronize() -> c_int;
    pub(crate) fn faststep_synchronize_cpu() -> c_int;
    pub(crate) fn faststep_array_view(
        flat: Handle,
        shape: *const c_int,
        ndim: usize,
        offset: usize,
        view: *mut New,
    ) -> c_int;
    pub(crate) fn faststep_array_hollow() -> New;
    pub(crate) fn faststep_array_random_state(draw: Handle, state: *mut New) -> c_int;

    pub(crate) fn faststep_merge(arrays: Handles, count: usize, merged: *mut New) -> c_int;
    pub(crate) fn faststep_exchange_in_order(
        arrays: Handles,
        count: usize,
        ordered: *mut New,
        exchanges: *mut u64,
    ) -> c_int;
    pub(crate) fn faststep_differ_by_rank(
        arrays: Handles,
        count: usize,
        shards: Handles,
        shards_count: usize,
        differ: *mut c_int,
    ) -> c_int;
    pub(crate) fn faststep_sum_rows(arrays: Handles, count: usize, summed: *mut New) -> c_int;
    pub(crate) fn faststep_own_kernels(
        arrays: Handles,
        count: usize,
        convolve: Option<extern "C" fn(*const Convolution)>,
        sgemm: Sgemm,
        share: extern "C" fn(usize, Chunk, *const c_void),
        rewritten: *mut New,
    ) -> c_int;
    pub(crate) fn faststep_few_rows(product: *const MatrixProduct) -> bool;
    pub(crate) fn faststep_is_small_product(m: usize, n: usize, k: usize, b_turned: usize) -> bool;
    pub(crate) fn faststep_small_product(product: *const MatrixProduct) -> bool;
    pub(crate) fn faststep_sum_slices(arrays: Handles, count: usize, summed: *mut New) -> c_int;
    pub(crate) fn faststep_align(arrays: Handles, count: usize, aligned: *mut New) -> c_int;
    pub(crate) fn faststep_order(gradients: Handles, count: usize) -> c_int;
    pub(crate) fn faststep_straight(
        gradient: Handle,
        sgemm: Sgemm,
        alone: c_int,
        joins: c_int,
        straight: *mut New,
    ) -> c_int;
    pub(crate) fn faststep_fuse(arrays: Handles, count: usize) -> c_int;
    pub(crate) fn faststep_fuse_casts(arrays: Handles, count: usize) -> c_int;
    pub(crate) fn faststep_kinds(
        arrays: Handles,
        count: usize,
        known: Handles,
        known_count: usize,
        kinds: *mut usize,
    ) -> c_int;
    pub(crate) fn faststep_tape_new(
        inputs: Handles,
        n_inputs: usize,
        outputs: Handles,
        n_outputs: usize,
        tape: *mut *mut c_void,
    ) -> c_int;
    pub(crate) fn faststep_tape_free(tape: *mut c_void);
    pub(crate) fn faststep_tape_size(tape: *const c_void) -> usize;
    pub(crate) fn faststep_tape_build(
        tape: *const c_void,
        inputs: Handles,
        count: usize,
        known: usize,
        known_end: usize,
        outputs: *mut New,
    ) -> c_int;
    pub(crate) fn faststep_in_tracing(
        work: unsafe extern "C" fn(*mut c_void),
        context: *mut c_void,
    ) -> c_int;
    pub(crate) fn faststep_tracer(array: Handle, tracer: *mut New) -> c_int;
    pub(crate) fn faststep_tracer_is_read(tracer: Handle) -> c_int;
    pub(crate) fn faststep_tracers_end(tracers: Handles, n: usize);
    pub(crate) fn faststep_differentiate(
        parameters: Handles,
        tracers: Handles,
        n: usize,
        outputs: Handles,
        n_outputs: usize,
        gradients: *mut New,
    ) -> c_int;
    pub(crate) fn faststep_call_settle(
        tracers: Handles,
        n_tracers: usize,
        roots: Handles,
        n_roots: usize,
        results: usize,
        is_step: c_int,
    ) -> c_int;
    pub(crate) fn faststep_call_graph_new(
        tracers: Handles,
        n_tracers: usize,
        roots: Handles,
        n_roots: usize,
        results: usize,
        graph: *mut *mut c_void,
    ) -> c_int;
    pub(crate) fn faststep_call_graph_add_gradients(
        graph: *mut c_void,
        tracers: Handles,
        n_tracers: usize,
        roots: Handles,
        n_roots: usize,
        gradients: Handles,
        n_gradients: usize,
    ) -> c_int;
    pub(crate) fn faststep_call_graph_keep(graph: *mut c_void);
    pub(crate) fn faststep_call_graph_free(graph: *mut c_void);
    pub(crate) fn faststep_call_graph_follow(
        graph: *mut c_void,
        tracers: Handles,
        n_tracers: usize,
        roots: Handles,
        n_roots: usize,
    ) -> c_int;
    pub(crate) fn faststep_call_graph_equals(graph: *mut c_void, other: *const c_void) -> c_int;
    pub(crate) fn faststep_call_graph_count(graph: *const c_void, of: c_int) -> usize;
    pub(crate) fn faststep_call_graph_inputs(graph: *mut c_void, inputs: *mut New) -> c_int;
    pub(crate) fn faststep_call_graph_held(graph: *mut c_void, held: *mut New) -> c_int;
    pub(crate) fn faststep_call_graph_replay(
        graph: *const c_void,
        traced: Handles,
        n_traced: usize,
        inputs: Handles,
        n_inputs: usize,
        outputs: *mut New,
    ) -> c_int;
    pub(crate) fn faststep_call_graph_find_picks(
        graph: *mut c_void,
        first: usize,
        count: usize,
    ) -> c_int;
    pub(crate) fn faststep_call_graph_pick(
        graph: *const c_void,
        which: usize,
        tracer: *mut usize,
        length: *mut i64,
        from_end: *mut c_int,
    );
    pub(crate) fn faststep_call_graph_extremes(
        graph: *const c_void,
        batch: Handles,
        first: usize,
        extremes: *mut New,
    ) -> c_int;
    pub(crate) fn faststep_array_detach(array: Handle);
    pub(crate) fn faststep_array_fill(array: Handle, value: Handle) -> c_int;
    pub(crate) fn faststep_graph_size(
        inputs: Handles,
        n_inputs: usize,
        outputs: Handles,
        n_outputs: usize,
    ) -> usize;
    pub(crate) fn faststep_graph_read_instead(
        from: Handles,
        to: Handles,
        n: usize,
        outputs: Handles,
        n_outputs: usize,
    ) -> c_int;

    pub(crate) fn faststep_join(parts: Handles, count: usize, joined: *mut New) -> c_int;
    pub(crate) fn faststep_wait(arrays: Handles, count: usize, waited: *mut New) -> c_int;
    pub(crate) fn faststep_paced(array: Handle, paced: *mut New) -> c_int;
    pub(crate) fn faststep_caller_functions(functions: *mut *mut c_void);
    pub(crate) fn faststep_caller_begin(measures: c_int) -> c_int;
    pub(crate) fn faststep_caller_end(seconds: *mut f64) -> c_int;
    pub(crate) fn faststep_caller_watch();
    pub(crate) fn faststep_caller_watched() -> usize;
    pub(crate) fn faststep_contiguous(array: Handle, contiguous: *mut New) -> c_int;
    pub(crate) fn faststep_sum_of_squares(arrays: Handles, count: usize, sum: *mut New) -> c_int;
    pub(crate) fn faststep_checked(
        gradients: Handles,
        count: usize,
        loss: Handle,
        limits: *const f32,
        made: *mut New,
    ) -> c_int;
    pub(crate) fn faststep_mean_square(array: Handle, by_slice: c_int, mean: *mut New) -> c_int;
    pub(crate) fn faststep_mean_squares(array: Handle, eps: Handle, means: *mut New) -> c_int;
    pub(crate) fn faststep_dequantize(
        input: Handle,
        arrays: Handles,
        count: usize,
        scratch: extern "C" fn(*const QuantizedProduct) -> usize,
        run: extern "C" fn(*const QuantizedProduct) -> c_int,
    ) -> c_int;
    pub(crate) fn faststep_blocks_begin(is_made: extern "C" fn(u64) -> bool) -> bool;
    pub(crate) fn faststep_blocks(arrays: Handles, count: usize) -> c_int;
    pub(crate) fn faststep_blocks_alone() -> *mut c_void;
    pub(crate) fn faststep_fuses() -> bool;
    pub(crate) fn faststep_blocks_computed() -> usize;
    pub(crate) fn faststep_kernel_call() -> c_int;
    pub(crate) fn faststep_kernel_refused(number: u64);
    pub(crate) fn faststep_temp_directory_path(
        find: unsafe extern "C" fn(*mut c_char, usize) -> bool,
    ) -> *mut c_void;

    pub(crate) fn faststep_is_cuda() -> c_int;
    pub(crate) fn faststep_ask_kernels(arrays: Handles, count: usize) -> c_int;
    pub(crate) fn faststep_pack(
        parts: Handles,
        count: usize,
        slots: usize,
        flat: *mut New,
        squares: *mut New,
    ) -> c_int;
    pub(crate) fn faststep_squares(array: Handle, squares: *mut New) -> c_int;
    pub(crate) fn faststep_norm(
        squares: Handles,
        count: usize,
        loss: Handle,
        limits: *const f32,
        made: *mut New,
    ) -> c_int;
    pub(crate) fn faststep_kernels(arrays: Handles, count: usize, rewritten: *mut New) -> c_int;

    pub(crate) fn faststep_is_cpu() -> c_int;
    pub(crate) fn faststep_replay_exchange_new(count: usize, exchange: *mut *mut c_void) -> c_int;
    pub(crate) fn faststep_replay_exchange_free(exchange: *mut c_void);
    pub(crate) fn faststep_replay_exchange(
        exchange: *const c_void,
        group: *const c_void,
        arrays: Handles,
        count: usize,
        in_order: c_int,
        gate: *mut c_void,
    ) -> c_int;
    pub(crate) fn faststep_replay_order(exchange: *const c_void, order: *mut *const usize)
        -> usize;
    pub(crate) fn faststep_replay_gather(
        exchange: *const c_void,
        group: *const c_void,
        arrays: Handles,
        count: usize,
        own: *const bool,
        gate: *mut c_void,
    ) -> c_int;
    pub(crate) fn faststep_replay_new(
        results: Handles,
        n_results: usize,
        from: Handles,
        into: Handles,
        n_carried: usize,
        fed: Handles,
        n_fed: usize,
        inputs: Handles,
        n_inputs: usize,
        summed: Handles,
        n_summed: usize,
        exchange: *const c_void,
        capture: *mut *mut c_void,
    ) -> c_int;
    pub(crate) fn faststep_replay_learning_passes() -> usize;
    pub(crate) fn faststep_replay_record(
        learns: *const *mut c_void,
        count: usize,
        threads: usize,
        capture: *mut c_void,
        info: *mut CaptureInfo,
    ) -> c_int;
    pub(crate) fn faststep_replay_is_valid(capture: *const c_void) -> c_int;
    pub(crate) fn faststep_replay_launch(
        capture: *mut c_void,
        from: Handles,
        into: Handles,
        count: usize,
        gate: *mut c_void,
        run: extern "C" fn(*const c_void),
        context: *const c_void,
        launched: *mut New,
        room: usize,
        given: *mut usize,
    ) -> c_int;
    pub(crate) fn faststep_replay_units(capture: *const c_void) -> usize;
    pub(crate) fn faststep_replay_waits(
        capture: *const c_void,
        unit: usize,
        others: *mut *const usize,
    ) -> usize;
    pub(crate) fn faststep_replay_run_unit(capture: *mut c_void, unit: usize) -> c_int;
    pub(crate) fn faststep_replay_gate_new(gate: *mut *mut c_void) -> c_int;
    pub(crate) fn faststep_replay_gate_free(gate: *mut c_void);
    pub(crate) fn faststep_replay_gate_close(gate: *mut c_void);
    pub(crate) fn faststep_replay_gate_open(gate: *mut c_void);
    pub(crate) fn faststep_replay_shown(
        place: Handle,
        gate: *mut c_void,
        shown: *mut New,
        source: *mut *mut c_void,
    ) -> c_int;
    pub(crate) fn faststep_replay_preserve(source: *mut c_void) -> c_int;
    pub(crate) fn faststep_replay_value(source: *mut c_void, value: *mut New) -> c_int;
    pub(crate) fn faststep_replay_is_over(source: *const c_void) -> c_int;
    pub(crate) fn faststep_replay_source_free(source: *mut c_void);
    pub(crate) fn faststep_replay_share_stream(index: *mut c_int) -> c_int;
    pub(crate) fn faststep_replay_wait(array: Handle) -> c_int;
    pub(crate) fn faststep_replay_is_ready(array: Handle) -> c_int;
    pub(crate) fn faststep_replay_untouched(
        arrays: Handles,
        ids: *const usize,
        holders: *const usize,
        count: usize,
    ) -> c_int;
    pub(crate) fn faststep_replay_copy(from: Handles, into: Handles, count: usize) -> c_int;
    pub(crate) fn faststep_replay_is_same(array: Handle, other: Handle, same: *mut c_int) -> c_int;
    pub(crate) fn faststep_replay_is_own(array: Handle) -> c_int;
    pub(crate) fn faststep_replay_scalars_apart(apart: *mut *mut c_void) -> c_int;
    pub(crate) fn faststep_replay_free(capture: *mut c_void);

    pub(crate) fn faststep_simulator_device(device: *mut Device, memory: *mut usize) -> c_int;
    pub(crate) fn faststep_simulator_new(
        device: *const Device,
        simulator: *mut *mut c_void,
    ) -> c_int;
    pub(crate) fn faststep_simulator_delete(simulator: *mut c_void);
    pub(crate) fn faststep_simulator_begin(
        simulator: *mut c_void,
        given: Handles,
        n_given: usize,
        roots: Handles,
        n_roots: usize,
    ) -> c_int;
    pub(crate) fn faststep_simulator_hold(
        simulator: *mut c_void,
        arrays: Handles,
        count: usize,
        handles: c_int,
    ) -> c_int;
    pub(crate) fn faststep_simulator_keep(
        simulator: *mut c_void,
        slot: usize,
        arrays: Handles,
        count: usize,
    ) -> c_int;
    pub(crate) fn faststep_simulator_evaluate(
        simulator: *mut c_void,
        arrays: Handles,
        count: usize,
        one_by_one: c_int,
        until: *mut usize,
    ) -> c_int;
    pub(crate) fn faststep_simulator_carry(
        simulator: *mut c_void,
        input: Handle,
        output: Handle,
    ) -> c_int;
    pub(crate) fn faststep_simulator_wait(simulator: *mut c_void, until: usize);
    pub(crate) fn faststep_simulator_limit(simulator: *mut c_void, bytes: usize);
    pub(crate) fn faststep_simulator_read(simulator: *mut c_void, reading: *mut Reading);
    pub(crate) fn faststep_simulator_mark(
        simulator: *mut c_void,
        own: Kind,
        before: Kind,
        arrays: Handles,
        count: usize,
    ) -> c_int;
    pub(crate) fn faststep_simulator_record(simulator: *mut c_void);
    pub(crate) fn faststep_simulator_recorded(
        simulator: *mut c_void,
        held: *mut *const Held,
        count: *mut usize,
    );
}

/// Return whether a function is done; false where it is not applicable.
///
/// # Errors
/// The exception of a function that failed.
pub(crate) fn is_done(status: c_int) -> Result<bool> {
    match status {
        0 => Ok(true),
        1 => Ok(false),
        _ => {
            // SAFETY: a string that ends with a NUL, and stays until this thread's next failure.
            let message = unsafe { CStr::from_ptr(faststep_last_error()) };
            Err(Exception::custom(message.to_string_lossy()))
        }
    }
}

/// The end of a function that is always applicable.
///
/// # Errors
/// As [`is_done`].
pub(crate) fn check(status: c_int) -> Result<()> {
    is_done(status).map(drop)
}

/// The array that a function writes; `None` where it is not applicable.
///
/// # Errors
/// As [`is_done`].
pub(crate) fn made(function: impl FnOnce(*mut New) -> c_int) -> Result<Option<Array>> {
    let mut new = ptr::null_mut();
    let done = is_done(function(&raw mut new))?;
    // SAFETY: a function that is done has written a new array.
    Ok(done.then(|| unsafe { owned(new) }))
}

/// The handle of a new array.
///
/// # Safety
/// A new `mlx::core::array` on the heap, which is what mlx-c's handles own.
pub(crate) unsafe fn owned(new: New) -> Array {
    // SAFETY: as above.
    unsafe { Array::from_ptr(mlx_sys::mlx_array { ctx: new }) }
}

/// An array as it crosses.
pub(crate) fn handle(array: &Array) -> Handle {
    array.as_ptr().ctx.cast_const()
}

/// Arrays as they cross.
pub(crate) fn handles<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Vec<Handle> {
    arrays.into_iter().map(handle).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    const HEADER: &str = include_str!("../../native/ffi.hpp");
    const HERE: &str = include_str!("ffi.rs");

    // each function and its number of parameters
    fn functions(text: &str) -> BTreeMap<&str, usize> {
        let mut functions = BTreeMap::new();
        for (at, _) in text.match_indices("faststep_") {
            let rest = &text[at..];
            let end = rest.find(|c: char| c != '_' && !c.is_ascii_alphanumeric());
            let (name, rest) = rest.split_at(end.unwrap_or(rest.len()));
            if rest.starts_with('(') {
                functions.entry(name).or_insert_with(|| parameters(rest));
            }
        }
        functions
    }

    fn parameters(list: &str) -> usize {
        let (mut depth, mut commas, mut before) = (0, 0, '(');
        for c in list.chars().filter(|c| !c.is_whitespace()) {
            match c {
                '(' => depth += 1,
                ')' if depth == 1 => break,
                ')' => depth -= 1,
                ',' if depth == 1 => commas += 1,
                _ => {}
            }
            before = c;
        }
        match before {
            '(' => 0,
            ',' => commas,
            _ => commas + 1,
        }
    }

    #[test]
    fn the_header_declares_the_same_functions() {
        let declared = functions(HEADER);
        assert!(declared.len() > 40, "{declared:?}");
        assert_eq!(declared, functions(HERE));
    }
}
