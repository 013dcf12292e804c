//! The traces of a step: which one fits a call, why a new one was needed, which one goes first.
use std::{mem::discriminant, rc::Rc};

use faststep::{
    extras::Places,
    trace::{Part, Trace},
    traces,
};
use pyo3::{exceptions::PyRuntimeWarning, prelude::*};

use crate::{call::User, tree::Tree};

/// From so many traces on a user is told what makes them.
const MANY: usize = 16;

/// What a trace is valid for.
#[derive(Clone)]
pub struct Key {
    /// Which part of a step, and by which rule.
    pub part: Part,
    /// The loss function's number.
    pub loss: usize,
    /// The model's signature.
    pub model: usize,
    /// The optimizer's options.
    pub options: usize,
    /// Where the arrays of the state stand.
    pub places: Places,
    /// The arguments.
    pub batch: Rc<Tree>,
}

impl Key {
    fn equals(&self, other: &Self, py: Python<'_>) -> bool {
        self.loss == other.loss
            && self.model == other.model
            && self.options == other.options
            && self.places == other.places
            && self.part == other.part
            && self.batch.equals(&other.batch, py)
    }
}

/// One trace in `Step.stats`.
#[pyclass(frozen, get_all, module = "faststep._core")]
#[derive(Clone)]
pub struct TraceRecord {
    /// What made the trace necessary.
    cause: String,
    /// How long it took, first evaluation included, in seconds.
    seconds: f64,
}

/// A trace, what it is valid for, and what the loss returned while it was made, with holes for its arrays.
pub type Entry = traces::Entry<Key, Option<Py<PyAny>>>;

/// The traces of one step.
#[derive(Default)]
pub struct Traces {
    known: traces::Traces<Key, Option<Py<PyAny>>>,
    warning: Option<String>,
}

impl Traces {
    /// The trace for a key becomes the last one; where there is none, `make` makes it.
    pub fn find(
        &mut self,
        user: &User<'_>,
        key: Key,
        max_traces: usize,
        make: impl FnOnce() -> Trace,
    ) {
        let same = |a: &Key, b: &Key| a.equals(b, user.py());
        let make = |key: &Key, known: &[&Key]| (make(), cause(user, key, known));
        self.known.find(key, max_traces, same, make);
    }

    /// The trace used last, and the one before it.
    pub fn last_two(&mut self) -> (Option<&mut Entry>, Option<&mut Entry>) {
        self.known.last_two()
    }

    /// The trace used last.
    pub fn last(&self) -> Option<&Entry> {
        self.known.last()
    }

    /// After a call that succeeded: its new traces took so many seconds. Whether there were any.
    pub fn settle(&mut self, seconds: f64) -> bool {
        let before = self.known.made();
        let new = self.known.settle(seconds);
        let made = self.known.made();
        if before <= MANY && made > MANY {
            let cause = self.known.records().pop().map(|record| record.cause);
            self.warning = Some(format!(
                "{made} traces have been made for this step, the last because of {}. Each takes seconds to make and memory to \
                 keep: pad batches to a few lengths, and pass numbers that change as mx.array. step.stats.traces has the causes",
                cause.unwrap_or_default()
            ));
        }
        new
    }

    /// What the user has to be told, once.
    pub fn warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    /// After a call that failed: its new traces go. Whether there were any.
    pub fn discard(&mut self) -> bool {
        self.known.discard()
    }

    /// Drop all.
    pub fn clear(&mut self) {
        self.known.retain(|_| false);
    }

    /// The number of traces made so far.
    pub fn made(&self) -> usize {
        self.known.made()
    }

    /// The traces that are kept, in the order in which they were made.
    pub fn records(&self) -> Vec<TraceRecord> {
        let records = self.known.records().into_iter();
        records.map(TraceRecord::from).collect()
    }
}

impl From<traces::TraceRecord> for TraceRecord {
    fn from(record: traces::TraceRecord) -> Self {
        Self {
            cause: record.cause,
            seconds: record.seconds,
        }
    }
}

fn cause(user: &User<'_>, new: &Key, known: &[&Key]) -> String {
    let kind = discriminant(&new.part);
    let same = |key: &&&Key| discriminant(&key.part) == kind;
    let Some(last) = known.iter().find(same) else {
        return match new.part {
            Part::Whole(_) => "first call".into(),
            Part::Batch => "first batch of a window".into(),
            Part::Update(_) => "first update by a window".into(),
            Part::Gradients => "first call of gradients()".into(),
        };
    };
    if last.loss != new.loss {
        return "another loss function, or one with another closure".into();
    }
    if last.model != new.model {
        return "model: a mode, a number, or an array's shape has changed".into();
    }
    if last.options != new.options || last.part != new.part {
        return "optimizer: an option has changed".into();
    }
    if last.places != new.places {
        return "the step keeps more: a window, an average or masters".into();
    }
    let tensors = last.batch.tensors().iter().zip(new.batch.tensors());
    let Some((index, (old, new_tensor))) = tensors.enumerate().find(|(_, (a, b))| a != b) else {
        return "arguments: a static value or the structure has changed".into();
    };
    format!(
        "argument {}: {:?} {:?} -> {:?} {:?}",
        user.name(&new.batch.paths(user.py())[index]),
        old.dtype,
        old.shape,
        new_tensor.dtype,
        new_tensor.shape
    )
}

/// Warn at the user's line.
pub fn warn(py: Python<'_>, message: &str) -> PyResult<()> {
    let message = std::ffi::CString::new(format!("faststep: {message}"))?;
    // between the user and this is Step.__call__ or fast_step
    PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 2)
}
