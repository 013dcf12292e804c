//! A part of a step, recorded once and launched again: as one CUDA graph, or as a list of a CPU's tasks.
//!
//! It reads and writes static arrays, whose memory stays where it is. Nobody but a capture's owner may have a handle to
//! one, or to the results: a host that reads an array may move its memory. The C++ behind it (`native/cuda/replay`,
//! `native/cpu/replay`) belongs to the thread whose stream it records.
//!
//! # Limits
//! On a CPU, where the functions can be replaced by which MLX allocates and hands over tasks (`caller.rs`).
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    ptr,
    rc::Rc,
    slice,
};

use mlx_rs::{error::Result, Array};

use super::{
    blas::{self, Units},
    caller,
    ffi::{
        check, faststep_is_cpu, faststep_replay_copy, faststep_replay_exchange,
        faststep_replay_exchange_free, faststep_replay_exchange_new, faststep_replay_free,
        faststep_replay_gate_close, faststep_replay_gate_free, faststep_replay_gate_new,
        faststep_replay_gate_open, faststep_replay_gather, faststep_replay_is_over,
        faststep_replay_is_own, faststep_replay_is_ready, faststep_replay_is_same,
        faststep_replay_is_valid, faststep_replay_launch, faststep_replay_learning_passes,
        faststep_replay_new, faststep_replay_order, faststep_replay_preserve,
        faststep_replay_record, faststep_replay_run_unit, faststep_replay_scalars_apart,
        faststep_replay_share_stream, faststep_replay_shown, faststep_replay_source_free,
        faststep_replay_units, faststep_replay_untouched, faststep_replay_value,
        faststep_replay_wait, faststep_replay_waits, handle, handles, owned,
    },
    group::Group,
    join,
};

pub(crate) use super::ffi::CaptureInfo;

/// A lazy graph to be captured.
pub(crate) struct Computed {
    /// Its outputs.
    pub results: Vec<Array>,
    /// Values, each with the array whose memory it goes to.
    pub carried: Vec<(Array, Array)>,
    /// Static arrays that get other values before a launch.
    pub fed: Vec<Array>,
    /// All arrays whose values may be others then.
    pub inputs: Vec<Array>,
    /// Static arrays that ranks sum when they are made, and the exchange that does so.
    pub summed: Option<(Vec<Array>, Rc<Exchange>)>,
}

/// What a launch gives.
pub(crate) struct Launched {
    /// An array without a value, to wait for.
    pub ticket: Array,
    /// Copies of results, in their order: of all, or of the first of those that are scalars (`native/cuda/replay/feed.hpp`).
    pub given: Vec<Array>,
}

/// Return why nothing can be recorded on MLX's default device.
pub(crate) fn refusal() -> Option<&'static str> {
    if join::is_cuda() || (is_on_cpu() && caller::has_replaced()) {
        return None;
    }
    Some(if is_on_cpu() {
        "the functions by which MLX's CPU back end hands over its tasks cannot be replaced"
    } else {
        "MLX's default device is none of CUDA's, and no CPU"
    })
}

/// Return whether a launch is computed by the thread that calls, which other threads of the program need not wait for.
pub(crate) fn is_on_cpu() -> bool {
    // SAFETY: asks MLX for its default device, which any thread may.
    unsafe { faststep_is_cpu() != 0 }
}

/// A recorded graph with its memory.
#[derive(Debug)]
pub(crate) struct Capture {
    graph: *mut c_void,
    results: usize,
    units: Units, // of a host's work
    /// Its contents.
    pub info: CaptureInfo,
}

/// A capture whose units any thread may run.
#[derive(Clone, Copy)]
struct Shared<'a>(*mut c_void, &'a Units);

// SAFETY: units write to memory of their own, and what they write together is behind a lock (native/cpu/replay/capture.cpp).
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl Shared<'_> {
    fn run(self, unit: usize) -> bool {
        // SAFETY: a capture within a launch, and one of its units.
        unsafe { faststep_replay_run_unit(self.0, unit) != 0 }
    }
}

extern "C" fn run_units(shared: *const c_void) {
    // SAFETY: what `Capture::launch` gives, as long as that goes on.
    let shared = unsafe { *shared.cast::<Shared<'_>>() };
    shared.1.run(blas::team(), &|unit| shared.run(unit));
}

impl Capture {
    /// Record what the results of a graph and the first of each pair are computed from, without computing anything. A replay
    /// leaves the value of the first in the memory of the second. The graph is made several times: before the last time to learn
    /// what memory it takes.
    ///
    /// # Errors
    /// The reason why it cannot be captured.
    pub fn record(mut graph: impl FnMut() -> Result<Computed>) -> Result<Self> {
        // SAFETY: asks MLX for its default device.
        let passes = unsafe { faststep_replay_learning_passes() };
        let learns = (0..passes).map(|_| Self::of(graph()?));
        let learns = learns.collect::<Result<Vec<_>>>()?;
        let learns_from: Vec<_> = learns.iter().map(|capture| capture.graph).collect();
        let mut capture = Self::of(graph()?)?;
        // SAFETY: captures of one graph, and room for what the last consists of.
        check(unsafe {
            faststep_replay_record(
                learns_from.as_ptr(),
                passes,
                blas::team().map_or(1, |(_, threads)| threads),
                capture.graph,
                &raw mut capture.info,
            )
        })?;
        // SAFETY: a capture that is recorded.
        let count = unsafe { faststep_replay_units(capture.graph) };
        capture.units = Units::new((0..count).map(|unit| capture.waits(unit)));
        Ok(capture)
    }

    fn waits(&self, unit: usize) -> &[usize] {
        let mut others = ptr::null();
        // SAFETY: one of the units of a capture, which keeps its list.
        unsafe {
            match faststep_replay_waits(self.graph, unit, &raw mut others) {
                0 => &[],
                count => slice::from_raw_parts(others, count),
            }
        }
    }

    fn of(graph: Computed) -> Result<Self> {
        let results = handles(&graph.results);
        let (from, into): (Vec<_>, Vec<_>) = graph.carried.into_iter().unzip();
        let (fed, inputs) = (handles(&graph.fed), handles(&graph.inputs));
        let (summed, exchange) = match &graph.summed {
            Some((arrays, exchange)) => (handles(arrays), exchange.0.cast_const()),
            None => (Vec::new(), ptr::null()),
        };
        let mut graph = ptr::null_mut();
        // SAFETY: live arrays and the number of each list.
        check(unsafe {
            let (from, into) = (handles(&from), handles(&into));
            faststep_replay_new(
                results.as_ptr(),
                results.len(),
                from.as_ptr(),
                into.as_ptr(),
                from.len(),
                fed.as_ptr(),
                fed.len(),
                inputs.as_ptr(),
                inputs.len(),
                summed.as_ptr(),
                summed.len(),
                exchange,
                &raw mut graph,
            )
        })?;
        drop(from); // the capture is the only one to hold them
        Ok(Self {
            graph,
            results: results.len(),
            units: Units::default(),
            info: CaptureInfo::default(),
        })
    }

    /// Return whether the memory that the graph reads lies where it did.
    pub fn is_valid(&self) -> bool {
        // SAFETY: a capture.
        unsafe { faststep_replay_is_valid(self.graph) != 0 }
    }

    /// Copy the first of each pair into the second, which is static, and replay. On a CPU the first of each pair has been
    /// evaluated, and the gate is closed.
    ///
    /// # Errors
    /// Of the driver, of a task, and of what the first of each pair is computed from.
    pub fn launch(&self, copies: &[(Array, Array)], gate: &Gate) -> Result<Launched> {
        let from = handles(copies.iter().map(|(from, _)| from));
        let into = handles(copies.iter().map(|(_, into)| into));
        let (mut launched, mut given) = (vec![ptr::null_mut(); 1 + self.results], 0);
        let shared = Shared(self.graph, &self.units);
        // SAFETY: a capture, live arrays and the number of each list; there is room for as many arrays as are written.
        unsafe {
            check(faststep_replay_launch(
                self.graph,
                from.as_ptr(),
                into.as_ptr(),
                from.len(),
                gate.0,
                run_units,
                (&raw const shared).cast(),
                launched.as_mut_ptr(),
                launched.len(),
                &raw mut given,
            ))?;
            Ok(Launched {
                ticket: owned(launched[0]),
                given: launched[1..given].iter().map(|&new| owned(new)).collect(),
            })
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // SAFETY: made by `record`, freed once.
        unsafe { faststep_replay_free(self.graph) }
    }
}

/// Sums of static arrays over ranks, in their memory, while the graph that makes them goes on.
#[derive(Debug)]
pub(crate) struct Exchange(*mut c_void);

impl Exchange {
    /// An exchange of so many arrays. Only on CUDA.
    ///
    /// # Errors
    /// When the driver cannot make its events.
    pub fn new(count: usize) -> Result<Self> {
        let mut exchange = ptr::null_mut();
        // SAFETY: room for a pointer.
        check(unsafe { faststep_replay_exchange_new(count, &raw mut exchange) })?;
        Ok(Self(exchange))
    }

    /// Sum the arrays of the last launch; what the gate lets through waits for that. Every rank has to do the same with arrays of
    /// the same sizes, `in_order` or not: as a graph makes them, of which each rank has the same order.
    ///
    /// # Errors
    /// Of the driver, and of the group's back end.
    pub fn sum(&self, group: &Group, arrays: &[Array], in_order: bool, gate: &Gate) -> Result<()> {
        let arrays = handles(arrays);
        // SAFETY: an exchange of so many arrays, a group, live arrays and their number, a gate.
        check(unsafe {
            faststep_replay_exchange(
                self.0,
                group.as_ptr(),
                arrays.as_ptr(),
                arrays.len(),
                c_int::from(in_order),
                gate.0,
            )
        })
    }

    /// The numbers of the arrays in the order in which a graph makes them; none before one has been recorded.
    pub fn order(&self) -> Vec<usize> {
        let mut order = ptr::null();
        // SAFETY: an exchange, and a pointer that is written; its numbers stay until a graph is recorded.
        unsafe {
            let count = faststep_replay_order(self.0, &raw mut order);
            if count == 0 {
                return Vec::new();
            }
            slice::from_raw_parts(order, count).to_vec()
        }
    }

    /// Sum any arrays in the same way, once all that has been submitted is done: `own` are those of which this rank has the
    /// values; it gives zeros for the others.
    ///
    /// # Errors
    /// Of the driver, and of the group's back end.
    pub fn gather(&self, group: &Group, arrays: &[Array], own: &[bool], gate: &Gate) -> Result<()> {
        let arrays = handles(arrays);
        let count = arrays.len().min(own.len());
        // SAFETY: an exchange, a group, live arrays and as many flags, a gate.
        check(unsafe {
            faststep_replay_gather(
                self.0,
                group.as_ptr(),
                arrays.as_ptr(),
                count,
                own.as_ptr(),
                gate.0,
            )
        })
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { faststep_replay_exchange_free(self.0) }
    }
}

/// Return whether a lazy array gets memory of its own when it is computed, as far as its operation tells.
pub(crate) fn is_own(array: &Array) -> bool {
    // SAFETY: a live array.
    unsafe { faststep_replay_is_own(handle(array)) != 0 }
}

/// Copy the first of each pair, which is evaluated, into the second, which is static.
///
/// # Errors
/// Of the driver.
pub(crate) fn copy(copies: &[(Array, Array)]) -> Result<()> {
    let from = handles(copies.iter().map(|(from, _)| from));
    let into = handles(copies.iter().map(|(_, into)| into));
    // SAFETY: live arrays and their number.
    check(unsafe { faststep_replay_copy(from.as_ptr(), into.as_ptr(), from.len()) })
}

/// What copies of static arrays wait for: a launch that is under way.
#[derive(Debug)]
pub(crate) struct Gate(*mut c_void);

/// As long as it lives, nobody reads static arrays on a CPU.
pub(crate) struct Closed<'a>(&'a Gate);

impl Gate {
    /// An open one.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new() -> Result<Self> {
        let mut gate = ptr::null_mut();
        // SAFETY: room for a pointer.
        check(unsafe { faststep_replay_gate_new(&raw mut gate) })?;
        Ok(Self(gate))
    }

    /// Close it, when those are done who read.
    pub fn close(&self) -> Closed<'_> {
        // SAFETY: a gate, which only the thread of its engine closes.
        unsafe { faststep_replay_gate_close(self.0) };
        Closed(self)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { faststep_replay_gate_free(self.0) }
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        // SAFETY: closed by this thread.
        unsafe { faststep_replay_gate_open(self.0 .0) }
    }
}

/// Return whether two arrays have the same bits, row after row.
///
/// # Errors
/// Of their evaluation, or where they do not lie so.
pub(crate) fn is_same(array: &Array, other: &Array) -> Result<bool> {
    let mut same = 0;
    // SAFETY: live arrays, and room for a number.
    check(unsafe { faststep_replay_is_same(handle(array), handle(other), &raw mut same) })?;
    Ok(same != 0)
}

/// A lazy copy of a static array, which a thread of any kind may evaluate, behind what the gate waits for; and what it is made
/// of, where no device's queue keeps the order.
///
/// # Errors
/// When there is no memory.
pub(crate) fn shown(place: &Array, gate: &Gate) -> Result<(Array, Option<Source>)> {
    let (mut shown, mut source) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: live arrays, and room for two pointers.
    unsafe {
        check(faststep_replay_shown(
            handle(place),
            gate.0,
            &raw mut shown,
            &raw mut source,
        ))?;
        Ok((owned(shown), (!source.is_null()).then_some(Source(source))))
    }
}

/// What a lazy copy on a CPU is made of: a static array, or what was there before that was written over. Whoever has the copy may
/// evaluate it at any time: nobody else does.
#[derive(Debug)]
pub(crate) struct Source(*mut c_void);

impl Source {
    /// With the gate closed, before the static array is written over: the copy is of what is there now.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn preserve(&self) -> Result<()> {
        // SAFETY: a source.
        check(unsafe { faststep_replay_preserve(self.0) })
    }

    /// The same, and what is there now, in memory of its own.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn value(&self) -> Result<Array> {
        let mut value = ptr::null_mut();
        // SAFETY: a source, and room for an array.
        unsafe {
            check(faststep_replay_value(self.0, &raw mut value))?;
            Ok(owned(value))
        }
    }

    /// Return whether the copy is not of what the static array will hold.
    pub fn is_over(&self) -> bool {
        // SAFETY: a source.
        unsafe { faststep_replay_is_over(self.0) != 0 }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        // SAFETY: made by `shown`, freed once.
        unsafe { faststep_replay_source_free(self.0) }
    }
}

/// Wait until an array that is not lazy has its value.
///
/// # Errors
/// Of its evaluation.
pub(crate) fn wait(array: &Array) -> Result<()> {
    // SAFETY: a live array.
    check(unsafe { faststep_replay_wait(handle(array)) })
}

/// Return whether an array that is not lazy need not be waited for.
pub(crate) fn is_ready(array: &Array) -> bool {
    // SAFETY: a live array.
    unsafe { faststep_replay_is_ready(handle(array)) != 0 }
}

/// Return whether arrays are those of these ids, and lazy, with at most so many holders; 0 holders: whatever they are.
pub(crate) fn is_untouched<'a>(
    arrays: impl IntoIterator<Item = &'a Array>,
    ids: &[usize],
    holders: &[usize],
) -> bool {
    let arrays = handles(arrays);
    // SAFETY: live arrays, and lists of one length.
    arrays.len() == ids.len()
        && ids.len() == holders.len()
        && unsafe {
            faststep_replay_untouched(
                arrays.as_ptr(),
                ids.as_ptr(),
                holders.as_ptr(),
                arrays.len(),
            ) != 0
        }
}

/// Arrays of at most 8 bytes that are evaluated get memory that no host touches, as long as it lives.
pub(crate) struct ScalarsApart(*mut c_void);

impl ScalarsApart {
    /// From now on.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn begin() -> Result<Self> {
        let mut apart = ptr::null_mut();
        // SAFETY: room for a pointer.
        check(unsafe { faststep_replay_scalars_apart(&raw mut apart) })?;
        Ok(Self(apart))
    }
}

impl Drop for ScalarsApart {
    fn drop(&mut self) {
        // SAFETY: made by `begin`, ended once.
        let _ = unsafe { faststep_replay_scalars_apart(&raw mut self.0) };
    }
}

/// The thread's lazy operations are on the stream of the copies that are shown, as long as it lives.
pub(crate) struct SharedStream {
    before: c_int,
}

impl SharedStream {
    /// From now on.
    ///
    /// # Errors
    /// When there is no such stream.
    pub fn enter() -> Result<Self> {
        let mut before = -1;
        // SAFETY: room for an index.
        check(unsafe { faststep_replay_share_stream(&raw mut before) })?;
        Ok(Self { before })
    }
}

impl Drop for SharedStream {
    fn drop(&mut self) {
        // SAFETY: the index of a stream of this thread.
        let _ = unsafe { faststep_replay_share_stream(&raw mut self.before) };
    }
}
