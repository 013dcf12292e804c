//! Graphs of losses in the steps of this process: the first trace of another step takes what has varied as inputs.
//!
//! A new optimizer in each round of a search, beside a number that is another one then, would have each round compile kernels of
//! its own. That a constant is an input, of which the step takes the value, is no matter of what the loss computes.
use std::{
    rc::Rc,
    sync::{
        atomic::{AtomicUsize, Ordering},
        LazyLock, Mutex, MutexGuard, PoisonError,
    },
};

use faststep::engine::Tensor;
use mlx_rs::error::Result as MlxResult;
use pyo3::prelude::*;

use crate::{
    host::TraceGraph,
    reach::Looked,
    tree::{static_value::equal, Tree},
};

/// The most graphs that are kept; the one used least recently goes first.
const MAX_GRAPHS: usize = 16;

/// The most bytes of a graph's constants.
const MAX_BYTES: usize = 1 << 16;

/// The most arrays of a graph.
const MAX_SIZE: usize = 1 << 15;

static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Known(Vec<KnownGraph>); // most recent last

// SAFETY: it is entered with the GIL held only, which orders all accesses, and no operation of a graph is bound to a thread.
#[allow(unsafe_code)]
unsafe impl Send for Known {}

fn known() -> MutexGuard<'static, Known> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number of its own for each step.
pub fn new_owner() -> usize {
    static OWNERS: AtomicUsize = AtomicUsize::new(0);
    OWNERS.fetch_add(1, Ordering::Relaxed)
}

/// What a loss was called with as its graph was made.
pub struct Origin {
    owner: usize,
    codes: Py<PyAny>,
    batch: Vec<Tensor>,
    reached: Rc<Vec<Tensor>>,
    numbers: Vec<Py<PyAny>>, // of the model and the arguments, and that it reaches
}

struct KnownGraph {
    origin: Origin,
    graph: Rc<TraceGraph>,
    varying: Vec<u32>,
}

impl Origin {
    /// That of a call of a step; none where it is not known which functions the loss calls. `numbers`: those of the model.
    pub fn of(
        owner: usize,
        batch: &Tree,
        looked: &Looked,
        mut numbers: Vec<Py<PyAny>>,
        py: Python<'_>,
    ) -> Option<Self> {
        numbers.extend(batch.own_numbers(py));
        let reached = looked.numbers(py).into_iter();
        numbers.extend(reached.map(|(_, number)| number.unbind()));
        Some(Self {
            owner,
            codes: looked.codes(py)?.clone().unbind(),
            batch: batch.tensors().to_vec(),
            reached: looked.tensors.clone(),
            numbers,
        })
    }

    fn is_like(&self, other: &Self, py: Python<'_>) -> bool {
        self.reached == other.reached
            && self.batch == other.batch
            && self.codes.bind(py).eq(&other.codes).unwrap_or(false)
    }

    fn has_same_numbers(&self, other: &Self, py: Python<'_>) -> bool {
        let mut pairs = self.numbers.iter().zip(&other.numbers);
        self.numbers.len() == other.numbers.len()
            && pairs.all(|(one, other)| equal(one.bind(py), other.bind(py)))
    }
}

/// Graphs of the same loss in other steps, each with the constants that have varied, the last one first; none where no number is
/// another one than for those.
pub fn of_others(origin: &Origin, py: Python<'_>) -> Vec<(Rc<TraceGraph>, Vec<u32>)> {
    let known = known();
    let alike = known.0.iter().rev().filter(|known| {
        known.origin.owner != origin.owner
            && known.origin.is_like(origin, py)
            && !(known.varying.is_empty() && known.origin.has_same_numbers(origin, py))
    });
    alike
        .map(|known| (known.graph.clone(), known.varying.clone()))
        .collect()
}

/// Keep the graph of a trace, of which these constants are inputs, in the place of one that differs from it in constants alone.
///
/// # Errors
/// When there is no memory.
pub fn keep(
    origin: Origin,
    graph: &Rc<TraceGraph>,
    mut varying: Vec<u32>,
    py: Python<'_>,
) -> MlxResult<()> {
    let its = graph.graph();
    if !graph.is_of_loss() || its.len() > MAX_SIZE || its.bytes() > MAX_BYTES {
        return Ok(()); // it may keep alive what Python code differentiates by, or much else
    }
    let mut known = known();
    let mut replaced = None;
    for (at, other) in known.0.iter().enumerate() {
        if other.origin.is_like(&origin, py) {
            if let Some(differ) = other.graph.differences(graph)? {
                varying.extend(other.varying.iter().chain(&differ));
                replaced = Some(at);
                break;
            }
        }
    }
    varying.sort_unstable();
    varying.dedup();
    let graph = graph.clone();
    let gone = replaced.or((known.0.len() == MAX_GRAPHS).then_some(0));
    let gone = gone.map(|at| known.0.remove(at));
    known.0.push(KnownGraph {
        origin,
        graph,
        varying,
    });
    drop(known);
    drop(gone); // without the lock
    Ok(())
}
