//! The traces of a step: which one fits a call, why a new one was needed, which one goes first.
use std::{mem::discriminant, rc::Rc};

use faststep::{
    extras::Places,
    trace::{Part, Trace},
};
use pyo3::{exceptions::PyRuntimeWarning, prelude::*};

use crate::{call::User, tree::Tree};

/// From so many traces on a user is told what makes them.
const MANY: usize = 16;
/// After so many dropped traces the C library is asked to give their memory back.
const TRIM_EVERY: usize = 32;

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

/// A trace, what it is valid for, and what the loss returned while it was made.
pub struct Entry {
    /// What it is valid for.
    pub key: Key,
    /// The trace.
    pub trace: Trace,
    /// What the loss returned, with holes for its arrays.
    pub template: Option<Py<PyAny>>,
    cause: String,
    number: usize,
    seconds: Option<f64>, // none before its first evaluation is done
}

/// The traces of one step.
#[derive(Default)]
pub struct Traces {
    entries: Vec<Entry>, // most recent last
    made: usize,
    dropped: usize,
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
        let known = self
            .entries
            .iter()
            .rposition(|entry| entry.key.equals(&key, user.py()));
        let entry = match known {
            Some(at) => self.entries.remove(at),
            None => Entry {
                cause: self.cause(user, &key),
                trace: make(),
                template: None,
                number: 0,
                seconds: None,
                key,
            },
        };
        self.entries.push(entry);
        if self.entries.len() > max_traces {
            self.entries.remove(0);
            self.dropped += 1;
            if self.dropped.is_multiple_of(TRIM_EVERY) {
                faststep::memory::trim();
            }
        }
    }

    /// The trace used last, and the one before it.
    pub fn last_two(&mut self) -> (Option<&mut Entry>, Option<&mut Entry>) {
        match self.entries.split_last_mut() {
            Some((last, rest)) => (Some(last), rest.last_mut()),
            None => (None, None),
        }
    }

    /// The trace used last.
    pub fn last(&self) -> Option<&Entry> {
        self.entries.last()
    }

    /// After a call that succeeded: its new traces took so many seconds. Whether there were any.
    pub fn settle(&mut self, seconds: f64) -> bool {
        let new: Vec<usize> = self.unsettled().collect();
        let before = self.made;
        for &at in &new {
            self.made += 1;
            self.entries[at].number = self.made;
            self.entries[at].seconds = Some(seconds);
        }
        if let (Some(&at), true) = (new.last(), before <= MANY && self.made > MANY) {
            self.warning = Some(format!(
                "{} traces have been made for this step, the last because of {}. Each takes seconds to make and memory to \
                 keep: pad batches to a few lengths, and pass numbers that change as mx.array. step.stats.traces has the causes",
                self.made, self.entries[at].cause
            ));
        }
        !new.is_empty()
    }

    /// What the user has to be told, once.
    pub fn warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    fn unsettled(&self) -> impl Iterator<Item = usize> + '_ {
        let entries = self.entries.iter().enumerate();
        entries.filter_map(|(at, entry)| entry.seconds.is_none().then_some(at))
    }

    /// After a call that failed: its new traces go. Whether there were any.
    pub fn discard(&mut self) -> bool {
        let before = self.entries.len();
        self.entries.retain(|entry| entry.seconds.is_some());
        self.entries.len() < before
    }

    /// Drop all.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// The number of traces made so far.
    pub fn made(&self) -> usize {
        self.made
    }

    /// The traces that are kept, in the order in which they were made.
    pub fn records(&self) -> Vec<TraceRecord> {
        let mut entries: Vec<&Entry> = self.entries.iter().collect();
        entries.sort_by_key(|entry| entry.number);
        let records = entries.into_iter().filter_map(|entry| {
            Some(TraceRecord {
                cause: entry.cause.clone(),
                seconds: entry.seconds?,
            })
        });
        records.collect()
    }

    fn cause(&self, user: &User<'_>, new: &Key) -> String {
        let kind = discriminant(&new.part);
        let same = |entry: &&Entry| discriminant(&entry.key.part) == kind;
        let Some(last) = self.entries.iter().rev().find(same) else {
            return match new.part {
                Part::Whole(_) => "first call".into(),
                Part::Batch => "first batch of a window".into(),
                Part::Update(_) => "first update by a window".into(),
                Part::Gradients => "first call of gradients()".into(),
            };
        };
        let last = &last.key;
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
        let Some((index, (old, new_tensor))) = tensors.enumerate().find(|(_, (a, b))| a != b)
        else {
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
}

/// Warn at the user's line.
pub fn warn(py: Python<'_>, message: &str) -> PyResult<()> {
    let message = std::ffi::CString::new(format!("faststep: {message}"))?;
    // between the user and this are Step.__call__ or fast_step, and Program
    PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 3)
}
