//! The traces of a step, and the causes for new ones in the user's words.
use std::rc::Rc;

use faststep::engine::{
    self, CallTraces, Causes, HeldArrays, Part, Task, Tensor, Trace, TraceCache, TraceEntry,
};
use pyo3::{exceptions::PyRuntimeWarning, prelude::*};

use super::arguments::Arguments;
use crate::{
    host::{KnownGraph, Template},
    mlx::collector::{Collector, Refers, Visited},
    tree::Tree,
    watch::WatchList,
};

/// Number of traces from which on a warning names their cause.
const MANY: usize = 16;

/// Part of a trace's key beside the engine's state.
#[derive(Clone)]
pub struct CallKey {
    /// The model's signature.
    pub model: usize,
    /// Id that models share whose arrays have the same places, roles, shapes and dtypes.
    pub form: usize,
    /// The optimizer's options, and the forms of the arrays among them.
    pub options: (usize, usize),
    /// The layout of the trained tensors.
    pub layout: usize,
    /// The arguments.
    pub batch: Rc<Tree>,
    /// The addresses of the model's modules, dicts and lists.
    pub containers: Rc<Vec<usize>>,
    /// Arrays among the arguments that are one object.
    pub aliases: Rc<Vec<(usize, usize)>>,
    /// Objects among the arguments.
    pub objects: Rc<Vec<Py<PyAny>>>,
    /// The graph of the loss, and the number of its inputs; none where the step is not compiled, or has no loss.
    pub graph: Option<(usize, usize)>,
    /// The number of an update by an optimizer of the user's own that is left out.
    pub update: Option<usize>,
}

impl CallKey {
    /// Return whether a dict or list of the model is among the arguments: there are tracers in it while the loss is called.
    pub fn is_given_of_model(&self) -> bool {
        let given = self.batch.containers();
        given
            .iter()
            .any(|container| self.containers.contains(container))
    }
}

/// Key of a trace: what it is valid for.
pub type Key = engine::Key<CallKey>;

/// Return whether a trace for one key computes what the other wants, where the loss has been called.
pub fn equals(one: &Key, other: &Key) -> bool {
    let (a, b) = (&one.front, &other.front);
    one.part == other.part
        && one.places == other.places
        && (a.graph, a.form, a.options, a.layout) == (b.graph, b.form, b.options, b.layout)
        && a.update == b.update
}

/// Return whether a trace for one key may stand for a call of the other: all but the graph is the same.
pub fn may_stand_for(one: &Key, other: &Key, py: Python<'_>) -> bool {
    let (a, b) = (&one.front, &other.front);
    let mut objects = a.objects.iter().zip(b.objects.iter());
    one.part == other.part
        && one.places == other.places
        && a.objects.len() == b.objects.len()
        && a.aliases == b.aliases
        && (Rc::ptr_eq(&a.containers, &b.containers) || a.containers == b.containers)
        && objects.all(|(one, other)| one.is(other))
        && (a.model, a.options, a.layout, a.update) == (b.model, b.options, b.layout, b.update)
        && a.batch.equals(&b.batch, py)
}

/// One trace in `Step.stats`.
#[pyclass(frozen, get_all, module = "faststep._core")]
#[derive(Clone)]
pub struct TraceRecord {
    /// The cause of the trace.
    cause: String,
    /// Its duration in seconds, first evaluation included.
    seconds: f64,
    /// Its capture, or why it is not replayed; None where that is not asked for.
    replay: Option<String>,
}

#[pymethods]
impl TraceRecord {
    fn __repr__(&self) -> String {
        format!("TraceRecord({:?}, {:.3} s)", self.cause, self.seconds)
    }
}

impl From<engine::TraceRecord> for TraceRecord {
    fn from(record: engine::TraceRecord) -> Self {
        Self {
            cause: record.cause,
            seconds: record.seconds,
            replay: record.replay,
        }
    }
}

/// State of a trace's watch list.
#[derive(Default)]
pub enum Watch {
    /// It has been called once.
    #[default]
    Unknown,
    /// All that it reads is listed; the next call is watched.
    Listed(Rc<WatchList>),
    /// It need not be called while that holds.
    Stands(Rc<WatchList>),
}

impl Refers for Watch {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        match self {
            Self::Unknown => Ok(()),
            Self::Listed(list) | Self::Stands(list) => list.visit(collector),
        }
    }
}

/// Data that is kept with a trace.
#[derive(Default)]
pub struct Kept {
    /// The graph of its loss.
    pub graph: Option<Rc<KnownGraph>>,
    /// The arrays that the graph ended in at the last call, while calls may be left out.
    pub leaves: Rc<HeldArrays>,
    /// Return value of the loss, with holes for the arrays.
    pub template: Option<Template>,
    /// While this holds, the loss need not be called.
    pub watch: Watch,
    /// True if that list, which no call was watched by yet, was of another key than a call of the trace.
    pub missed: bool,
    /// Number of calls for which the trace has stood.
    pub uses: usize,
}

impl Kept {
    /// Return a copy without a list.
    pub fn again(&self, py: Python<'_>) -> Self {
        Self {
            graph: self.graph.clone(),
            leaves: self.leaves.clone(),
            template: self.template.as_ref().map(|it| it.clone_ref(py)),
            ..Self::default()
        }
    }
}

impl Refers for Kept {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.template.visit(collector)?;
        self.watch.visit(collector)
    }
}

/// A trace, what it is valid for, and what is kept with it.
pub type Entry = TraceEntry<Key, Kept>;

/// The traces of one step.
#[derive(Default)]
pub struct Traces {
    known: TraceCache<Key, Kept>,
    compiled: usize, // of those that have been made
    warning: Option<String>,
}

impl Refers for Traces {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.recent().try_for_each(|entry| {
            entry.key.front.batch.visit(collector)?;
            entry.key.front.objects.visit(collector)?;
            entry.kept.visit(collector)
        })
    }
}

impl Traces {
    /// The most recent trace that fits becomes the last one.
    pub fn use_again(&mut self, fits: impl Fn(&Entry) -> bool) -> Option<&mut Entry> {
        self.known.use_again(fits)
    }

    /// The traces, the one used last first.
    pub fn recent(&self) -> impl Iterator<Item = &Entry> {
        self.known.recent()
    }

    /// A new trace becomes the last one.
    pub fn add(
        &mut self,
        user: &Arguments<'_>,
        key: Key,
        trace: Trace,
        graph: Option<Rc<KnownGraph>>,
        max_traces: usize,
    ) {
        let compiled = self.recent().filter(|entry| !entry.trace.is_eager());
        let known: Vec<_> = compiled.map(|entry| &entry.key).collect();
        let cause = key.cause(&known, &ByName(user));
        let kept = Kept {
            graph,
            ..Kept::default()
        };
        self.known.add(key, trace, kept, cause, max_traces);
    }

    /// The traces of a call, which were found last.
    pub fn of(&mut self, task: Task) -> Option<CallTraces<'_>> {
        self.known.of(task)
    }

    /// The trace used last.
    pub fn last(&self) -> Option<&Entry> {
        self.known.last()
    }

    /// The trace used last, to change what is kept with it.
    pub fn last_mut(&mut self) -> Option<&mut Entry> {
        self.known.last_mut()
    }

    /// Return whether calls of the loss may be left out.
    pub fn stand(&self) -> bool {
        self.recent()
            .any(|entry| matches!(entry.kept.watch, Watch::Stands(_)))
    }

    /// Let go of arrays that a loss read and that have been replaced since.
    pub fn forget_replaced(&mut self, loss_fn: &Bound<'_, PyAny>) -> PyResult<()> {
        for entry in self.known.iter_mut() {
            let (Watch::Listed(list) | Watch::Stands(list)) = &entry.kept.watch else {
                continue;
            };
            if list.is_stale(loss_fn)? {
                entry.kept.watch = Watch::default();
                entry.kept.leaves = Rc::default();
            }
        }
        Ok(())
    }

    /// No call may be left out any more.
    pub fn call_always(&mut self) {
        for entry in self.known.iter_mut() {
            entry.kept.watch = Watch::default();
            entry.kept.leaves = Rc::default();
        }
    }

    /// Keep the new traces of a call that succeeded, with their seconds. Returns whether there were any.
    pub fn settle(&mut self, seconds: f64) -> bool {
        let before = self.compiled;
        let made = self.recent();
        let made = made.filter(|entry| entry.is_new() && !entry.trace.is_eager());
        let made = before + made.count();
        self.compiled = made;
        let new = self.known.commit(seconds);
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

    /// Take the warning for the user, once.
    pub fn warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    /// Drop the new traces of a call that failed. Returns whether there were any.
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

/// The names that the user has for what a trace depends on.
struct ByName<'a, 'py>(&'a Arguments<'py>);

impl Causes<CallKey> for ByName<'_, '_> {
    fn first(&self) -> Option<String> {
        None
    }

    fn changed(&self, last: &Key, new: &Key) -> Option<String> {
        let (old, now) = (&last.front, &new.front);
        if new.part == Part::Given && old.graph != now.graph {
            let same = old.graph.map(|it| it.0) == now.graph.map(|it| it.0);
            Some(if same {
                "the update of the optimizer: a number in it has changed, and is an input now"
                    .into()
            } else {
                "the update of the optimizer: it computes something else".into()
            })
        } else if old.options != now.options || last.part != new.part {
            Some("optimizer: an option has changed".into())
        } else if old.batch.tensors() != now.batch.tensors() {
            None
        } else if old.model != now.model {
            Some("model: a mode, a number, or an array's shape has changed".into())
        } else {
            None
        }
    }

    fn batch<'a>(&self, front: &'a CallKey) -> &'a [Tensor] {
        front.batch.tensors()
    }

    fn name(&self, front: &CallKey, index: usize) -> String {
        let paths = front.batch.paths(self.0.py());
        format!("argument {}", self.0.name(&paths[index]))
    }

    fn rest(&self, last: &CallKey, new: &CallKey) -> String {
        if !last.batch.equals(&new.batch, self.0.py()) {
            return "arguments: a static value or the structure has changed".into();
        }
        if last.update != new.update {
            return "the optimizer: its update is left out, or called again".into();
        }
        match (last.graph, new.graph) {
            (Some((one, _)), Some((other, _))) if one == other => {
                "the loss: a number in it has changed, and is an input now".into()
            }
            _ => "the loss: it computes something else".into(),
        }
    }
}

/// Warn at the user's line.
pub fn warn(py: Python<'_>, message: &str) -> PyResult<()> {
    let message = std::ffi::CString::new(format!("faststep: {message}"))?;
    // stack level 2: the caller of Step.__call__ or fast_step
    PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 2)
}
