//! A part of a step as one CUDA graph, recorded once and launched again.
//!
//! It reads and writes static arrays, whose memory stays where it is. Nobody but a capture's owner may have a handle to
//! one, or to the results: a host that reads an array may move its memory. The C++ behind it (`native/cuda/replay`)
//! belongs to the thread whose stream it records.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    ptr,
};

use mlx_rs::{error::Result, Array};

use super::ffi::{
    check, faststep_replay_copy, faststep_replay_free, faststep_replay_is_own,
    faststep_replay_is_valid, faststep_replay_launch, faststep_replay_new, faststep_replay_record,
    faststep_replay_scalars_apart, faststep_replay_share_stream, faststep_replay_shown,
    faststep_replay_untouched, faststep_replay_wait, handle, handles, owned,
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
}

/// What a launch gives.
pub(crate) struct Launched {
    /// An array without a value, to wait for.
    pub ticket: Array,
    /// Copies of the first of the results that are scalars (`native/cuda/replay/feed.hpp`), in their order.
    pub small: Vec<Array>,
}

/// A CUDA graph with its memory.
#[derive(Debug)]
pub(crate) struct Capture {
    graph: *mut c_void,
    results: usize,
    /// Its contents.
    pub info: CaptureInfo,
}

impl Capture {
    /// Record what the results of a graph and the first of each pair are computed from, without computing anything. A replay
    /// leaves the value of the first in the memory of the second. The graph is made twice: the first time to learn what memory
    /// it takes.
    ///
    /// # Errors
    /// The reason why it cannot be captured.
    pub fn record(mut graph: impl FnMut() -> Result<Computed>) -> Result<Self> {
        let learns = Self::of(graph()?)?;
        let mut capture = Self::of(graph()?)?;
        // SAFETY: two captures of one graph, and room for what the second consists of.
        check(unsafe {
            faststep_replay_record(learns.graph, capture.graph, &raw mut capture.info)
        })?;
        Ok(capture)
    }

    fn of(graph: Computed) -> Result<Self> {
        let results = handles(&graph.results);
        let (from, into): (Vec<_>, Vec<_>) = graph.carried.into_iter().unzip();
        let (fed, inputs) = (handles(&graph.fed), handles(&graph.inputs));
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
                &raw mut graph,
            )
        })?;
        drop(from); // the capture is the only one to hold them
        Ok(Self {
            graph,
            results: results.len(),
            info: CaptureInfo::default(),
        })
    }

    /// Return whether the memory that the graph reads lies where it did.
    pub fn is_valid(&self) -> bool {
        // SAFETY: a capture.
        unsafe { faststep_replay_is_valid(self.graph) != 0 }
    }

    /// Copy the first of each pair into the second, which is static, and replay. `done` gets the event.
    ///
    /// # Errors
    /// Of the driver, and of what the first of each pair is computed from.
    pub fn launch(&self, copies: &[(Array, Array)], done: &Array) -> Result<Launched> {
        let from = handles(copies.iter().map(|(from, _)| from));
        let into = handles(copies.iter().map(|(_, into)| into));
        let (mut launched, mut given) = (vec![ptr::null_mut(); 1 + self.results], 0);
        // SAFETY: a capture, live arrays and the number of each list; there is room for as many arrays as are written.
        unsafe {
            check(faststep_replay_launch(
                self.graph,
                from.as_ptr(),
                into.as_ptr(),
                from.len(),
                handle(done),
                launched.as_mut_ptr(),
                launched.len(),
                &raw mut given,
            ))?;
            Ok(Launched {
                ticket: owned(launched[0]),
                small: launched[1..given].iter().map(|&new| owned(new)).collect(),
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

/// A lazy copy of a static array, which a thread of any kind may evaluate, behind what `done` waits for: a true scalar.
///
/// # Errors
/// When there is no memory.
pub(crate) fn shown(place: &Array, done: &Array) -> Result<Array> {
    let mut shown = ptr::null_mut();
    // SAFETY: live arrays, and room for one.
    unsafe {
        check(faststep_replay_shown(
            handle(place),
            handle(done),
            &raw mut shown,
        ))?;
        Ok(owned(shown))
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
