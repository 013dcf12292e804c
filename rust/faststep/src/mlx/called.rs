//! One call of a function with tracers in the places of its inputs, and the graph that comes of it.
//!
//! The C++ behind this (`native/graph/called.cpp`) counts the handles of each array: who calls a function here holds exactly one of
//! each tracer and of each root. A graph may be used on any thread that owns the arrays that are passed.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    ptr,
    rc::Rc,
};

use mlx_rs::{error::Result, transforms::compile::compile, Array};

use super::ffi::{
    check, faststep_array_detach, faststep_array_fill, faststep_call_graph_add_gradients,
    faststep_call_graph_count, faststep_call_graph_equals, faststep_call_graph_extremes,
    faststep_call_graph_find_picks, faststep_call_graph_follow, faststep_call_graph_free,
    faststep_call_graph_held, faststep_call_graph_inputs, faststep_call_graph_keep,
    faststep_call_graph_new, faststep_call_graph_pick, faststep_call_graph_replay,
    faststep_call_settle, faststep_differentiate, faststep_in_tracing, faststep_tracer,
    faststep_tracer_is_read, faststep_tracers_end, handle, handles, is_done, made, owned, Handle,
    New,
};
use super::{array, fuse, tape::Tape};

/// Do `work` as MLX calls a function that it differentiates: what is made meanwhile keeps its graph when it is evaluated.
///
/// # Errors
/// When there is no memory.
pub fn in_tracing(work: &mut dyn FnMut()) -> Result<()> {
    unsafe extern "C" fn call(context: *mut c_void) {
        // SAFETY: the context is `work` below, which lives while this runs.
        let work = unsafe { &mut *context.cast::<&mut dyn FnMut()>() };
        work();
    }
    let mut work = work;
    // SAFETY: `call` takes a pointer to `work`.
    check(unsafe { faststep_in_tracing(call, (&raw mut work).cast()) })
}

// as many new arrays as a call writes
fn written(count: usize, call: impl FnOnce(*mut New) -> c_int) -> Result<Vec<Array>> {
    let mut new = vec![ptr::null_mut(); count];
    check(call(new.as_mut_ptr()))?;
    // SAFETY: each of them is a new array.
    Ok(new
        .into_iter()
        .map(|array| unsafe { owned(array) })
        .collect())
}

/// Lazy copies of arrays, with which a function is called in their places.
#[derive(Debug, Default)]
pub struct Tracers(Vec<Array>);

impl Tracers {
    /// Make a tracer for each array.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<Self> {
        let tracer = |array: &Array| {
            // SAFETY: a live array.
            let tracer = made(|tracer| unsafe { faststep_tracer(handle(array), tracer) })?;
            Ok(tracer.unwrap_or_else(|| array.clone()))
        };
        let tracers: Result<Vec<Array>> = arrays.into_iter().map(tracer).collect();
        tracers.map(Self)
    }

    /// The tracers.
    #[must_use]
    pub fn arrays(&self) -> &[Array] {
        &self.0
    }

    /// Return whether the value of one has been read.
    #[must_use]
    pub fn are_read(&self) -> bool {
        // SAFETY: a live array.
        let is_read = |array: &Array| unsafe { faststep_tracer_is_read(handle(array)) != 0 };
        self.0.iter().any(is_read)
    }

    /// The gradients of the first root with respect to the first tracers, whose parameters these are.
    ///
    /// # Errors
    /// If the differentiation fails, which may call Python code.
    pub fn gradients(&self, parameters: &[Array], roots: &Roots) -> Result<Vec<Array>> {
        let (given, tracers, outputs) = (
            handles(parameters),
            handles(&self.0[..parameters.len()]),
            handles(&roots.arrays),
        );
        // SAFETY: live arrays, the number of each list, and room for as many gradients as parameters.
        written(parameters.len(), |gradients| unsafe {
            faststep_differentiate(
                given.as_ptr(),
                tracers.as_ptr(),
                given.len(),
                outputs.as_ptr(),
                outputs.len(),
                gradients,
            )
        })
    }

    /// Evaluate what somebody holds of the graph behind `roots` and is computed from no tracer, as any loop would. In a step, evaluate
    /// the tracers that somebody holds too: the parameters are written over.
    ///
    /// # Errors
    /// If the evaluation fails.
    pub fn settle(&self, roots: &Roots, is_step: bool) -> Result<()> {
        let (tracers, results) = (handles(&self.0), roots.results);
        let roots = handles(&roots.arrays);
        // SAFETY: live arrays, and the number of each list.
        check(unsafe {
            faststep_call_settle(
                tracers.as_ptr(),
                tracers.len(),
                roots.as_ptr(),
                roots.len(),
                results,
                c_int::from(is_step),
            )
        })
    }

    /// The tracers stand for nothing any more.
    pub fn end(&self) {
        let tracers = handles(&self.0);
        // SAFETY: live arrays and their number.
        unsafe { faststep_tracers_end(tracers.as_ptr(), tracers.len()) }
    }
}

/// The arrays that a call has given, of each of which the caller has one handle here.
#[derive(Debug, Default)]
pub struct Roots {
    /// The arrays.
    pub arrays: Vec<Array>,
    /// Number of the first ones that are outputs whoever holds them; the others are only where somebody does.
    pub results: usize,
}

/// The operations from tracers to roots, to arrays that somebody holds, and to gradients.
#[derive(Debug)]
pub struct CallGraph(*mut c_void);

/// Whole numbers of the batch that pick from an axis, which MLX does not check: labels of a cross entropy, rows of an embedding.
#[derive(Clone, Copy, Debug)]
pub struct Pick {
    /// The number of the tracer from which they come.
    pub tracer: usize,
    /// The length of the axis.
    pub length: i64,
    /// True if numbers below zero count from its end.
    pub from_end: bool,
}

/// The outputs of a graph that has been made again.
#[derive(Debug)]
pub struct Replayed {
    /// The roots, in their order.
    pub roots: Vec<Array>,
    /// The arrays that somebody holds.
    pub held: Vec<Array>,
    /// The gradients by parameter.
    pub gradients: Vec<Array>,
}

impl CallGraph {
    /// Write down the graph of a call, before it is differentiated.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(tracers: &Tracers, roots: &Roots) -> Result<Self> {
        let results = roots.results;
        let (tracers, roots) = (handles(tracers.arrays()), handles(&roots.arrays));
        let mut graph = ptr::null_mut();
        // SAFETY: live arrays, and the number of each list.
        check(unsafe {
            faststep_call_graph_new(
                tracers.as_ptr(),
                tracers.len(),
                roots.as_ptr(),
                roots.len(),
                results,
                &raw mut graph,
            )
        })?;
        Ok(Self(graph))
    }

    /// Write down the gradients of the same call too.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn add_gradients(
        &mut self,
        tracers: &Tracers,
        roots: &Roots,
        gradients: &[Array],
    ) -> Result<()> {
        let lists = [tracers.arrays(), &roots.arrays, gradients].map(handles);
        let [tracers, roots, gradients] = &lists;
        // SAFETY: a graph, live arrays, and the number of each list.
        check(unsafe {
            faststep_call_graph_add_gradients(
                self.0,
                tracers.as_ptr(),
                tracers.len(),
                roots.as_ptr(),
                roots.len(),
                gradients.as_ptr(),
                gradients.len(),
            )
        })
    }

    /// Keep it without the arrays of its call.
    pub fn keep(&mut self) {
        // SAFETY: a graph.
        unsafe { faststep_call_graph_keep(self.0) }
    }

    /// Return whether another call has this graph. Constants in which it differs are inputs from here on.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn follows(&self, tracers: &Tracers, roots: &Roots) -> Result<bool> {
        let (tracers, roots) = (handles(tracers.arrays()), handles(&roots.arrays));
        // SAFETY: a graph, live arrays, and the number of each list.
        is_done(unsafe {
            faststep_call_graph_follow(
                self.0,
                tracers.as_ptr(),
                tracers.len(),
                roots.as_ptr(),
                roots.len(),
            )
        })
    }

    /// Compare with the graph of a call that is not kept, of which somebody may hold arrays.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn equals(&self, other: &Self) -> Result<bool> {
        // SAFETY: two graphs.
        is_done(unsafe { faststep_call_graph_equals(self.0, other.0) })
    }

    fn count(&self, of: c_int) -> usize {
        // SAFETY: a graph.
        unsafe { faststep_call_graph_count(self.0, of) }
    }

    /// The number of roots.
    #[must_use]
    pub fn roots(&self) -> usize {
        self.count(0)
    }

    /// The number of inputs beside the tracers.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.count(3)
    }

    /// The number of arrays that somebody holds.
    #[must_use]
    pub fn held(&self) -> usize {
        self.count(1)
    }

    /// Return whether Python functions make gradients of it, so that it is to be compared with these.
    #[must_use]
    pub fn is_custom(&self) -> bool {
        self.count(4) != 0
    }

    /// The inputs of the call that was compared last, or written down.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn take_inputs(&self) -> Result<Vec<Array>> {
        // SAFETY: a graph, and room for as many arrays as it has inputs.
        written(self.inputs(), |inputs| unsafe {
            faststep_call_graph_inputs(self.0, inputs)
        })
    }

    /// Find the picks of arrays of the batch: so many tracers from `first` on. To be called once.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn find_picks(&mut self, first: usize, count: usize) -> Result<()> {
        // SAFETY: a graph.
        check(unsafe { faststep_call_graph_find_picks(self.0, first, count) })
    }

    /// The picks that have been found.
    #[must_use]
    pub fn picks(&self) -> Vec<Pick> {
        let pick = |which| {
            let (mut tracer, mut length, mut from_end) = (0, 0, 0);
            // SAFETY: a graph with so many picks.
            unsafe {
                faststep_call_graph_pick(
                    self.0,
                    which,
                    &raw mut tracer,
                    &raw mut length,
                    &raw mut from_end,
                );
            }
            Pick {
                tracer,
                length,
                from_end: from_end != 0,
            }
        };
        (0..self.count(5)).map(pick).collect()
    }

    /// The least and the greatest number of each pick, int64 scalars, over other arrays of the batch, whose first tracer is `first`.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn extremes(&self, batch: &[Array], first: usize) -> Result<Vec<Array>> {
        let batch = handles(batch);
        // SAFETY: a graph, as many live arrays as the batch has, and room for two arrays for each pick.
        written(2 * self.count(5), |extremes| unsafe {
            faststep_call_graph_extremes(self.0, batch.as_ptr(), first, extremes)
        })
    }

    /// Arrays of the same call that are outputs because somebody holds them, or held them once.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn take_held(&self) -> Result<Vec<Array>> {
        // SAFETY: a graph, and room for as many arrays as are held.
        written(self.held(), |held| unsafe {
            faststep_call_graph_held(self.0, held)
        })
    }

    /// The outputs over other arrays in the places of tracers and inputs.
    ///
    /// # Errors
    /// When they are more or fewer than those of the graph.
    pub fn replay(&self, traced: &[Array], inputs: &[Array]) -> Result<Replayed> {
        let (traced, inputs) = (handles(traced), handles(inputs));
        let (roots, held) = (self.roots(), self.held());
        let count = roots + held + self.count(2);
        // SAFETY: a graph, live arrays, the number of each list, and room for all outputs.
        let mut all = written(count, |outputs| unsafe {
            faststep_call_graph_replay(
                self.0,
                traced.as_ptr(),
                traced.len(),
                inputs.as_ptr(),
                inputs.len(),
                outputs,
            )
        })?;
        let gradients = all.split_off(roots + held);
        let held = all.split_off(roots);
        Ok(Replayed {
            roots: all,
            held,
            gradients,
        })
    }
}

/// A function that MLX compiles.
pub type Compiled = Box<dyn FnMut(&[Array]) -> Result<Vec<Array>>>;

/// A graph as a function of its tracers, so many, and of its inputs behind them, compiled: roots, arrays that somebody holds, and
/// gradients.
#[must_use]
pub fn compiled(graph: Rc<CallGraph>, traced: usize) -> Compiled {
    let body = move |arrays: &[Array]| -> Result<Vec<Array>> {
        let (traced, inputs) = arrays.split_at(traced.min(arrays.len()));
        let made = graph.replay(traced, inputs)?;
        array::rewritten(&[made.roots, made.held, made.gradients].concat())
    };
    let mut function = compile(body, false);
    let (mut tape, mut is_known): (Option<Tape>, bool) = (None, false);
    Box::new(move |arrays| {
        let taped = tape.as_ref().map(|tape| tape.build(&handles(arrays), 0..0));
        if let Some(outputs) = taped.transpose()?.flatten() {
            return Ok(outputs);
        }
        let outputs = function(arrays)?;
        fuse::in_blocks(&outputs)?; // some are evaluated before the trace that they are part of has been made
        if std::mem::replace(&mut is_known, true) && tape.is_none() {
            tape = Some(Tape::of(&mut function, arrays)?);
        }
        Ok(outputs)
    })
}

impl Drop for CallGraph {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { faststep_call_graph_free(self.0) }
    }
}

/// Let arrays that are yet to be computed go of what they would be computed from.
pub fn detach<'a>(arrays: impl IntoIterator<Item = &'a Array>) {
    for array in arrays {
        // SAFETY: a live array.
        unsafe { faststep_array_detach(handle(array)) }
    }
}

/// Give such an array its value, which all who hold it see.
///
/// # Errors
/// When the value has another shape or dtype.
pub fn fill(array: &Array, value: &Array) -> Result<()> {
    let (array, value): (Handle, Handle) = (handle(array), handle(value));
    // SAFETY: live arrays.
    check(unsafe { faststep_array_fill(array, value) })
}
