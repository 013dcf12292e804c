//! The step of one model, optimizer, loss function and set of options, as Python calls it.
//!
//! Uses `store`, `host`, `reach`, `optimizer`, `tree` and `mlx`.
//!
//! The way of a batch: `call` takes over the user's changes and returns the outputs, `find` chooses the traces from
//! `trace_cache`, `run` has the engine run them. `arguments` and `options` are converted, `alarms` and `kept_losses` warn,
//! `measure` and `memory_plan` are the other questions to a step.
mod alarms;
mod arguments;
mod call;
mod check;
mod find;
mod flags;
mod kept_losses;
mod known_graphs;
mod measure;
mod memory_plan;
mod numpy;
mod options;
mod run;
mod suspected;
mod trace_cache;
mod undisturbed;

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap},
    mem::take,
    rc::Rc,
    sync::Arc,
};

use faststep::{
    engine::{array, Flags, NamedAuxState, Seconds, Stage, StageClock, Task},
    Error,
};
use mlx_rs::Array;
use pyo3::{exceptions::PyRuntimeError, prelude::*, PyVisit};

use crate::mlx::collector::{Collector, Refers, Visited};
use crate::{
    host::{PythonHost, Swapped},
    mlx::{
        bridge,
        errors::{or_late, to_python},
        gil::Waiting,
    },
    optimizer::Replaced,
    reach::{
        advance::Advance,
        suspect::{Change, Suspect},
        Reach, Read, Seen,
    },
    store::{
        registry::{self, Shared},
        Store,
    },
};
use alarms::Alarms;
use arguments::Arguments;
use flags::{is_true, read};
use measure::Measured;
use numpy::SeenNumpy;
use options::Options;
use suspected::{LookedAhead, Writes};
use trace_cache::Traces;

pub use measure::label;
pub use memory_plan::MemoryPlan;
pub use trace_cache::TraceRecord;

/// The native part of a step.
///
/// Frozen for Python; what changes is in a cell that only the thread of the step may enter.
#[pyclass(frozen, module = "faststep._core")]
pub struct Step {
    shared: Arc<Shared>,
    inner: ThreadBound<RefCell<Inner>>,
}

struct ThreadBound<T>(T);

// SAFETY: `Store::check_thread` lets one thread in; others only drop it, under the GIL, which orders the accesses.
#[allow(unsafe_code)]
unsafe impl<T> Send for ThreadBound<T> {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl<T> Sync for ThreadBound<T> {}

#[allow(clippy::struct_excessive_bools)] // each is an answer of its own
struct Inner {
    owner: usize, // of graphs that steps of the process know
    options: Options,
    varies_norm: bool, // the norm to which gradients are clipped has been another
    compiled: bool,
    /// Number of batches in a row that ran uncompiled because an array on the model became another, or was new.
    became: usize,
    becomes: String, // why the last one did
    checked: bool,
    host: Rc<PythonHost>,
    traces: Traces,
    reach: Reach,
    /// What the optimizer's code reaches.
    read: Read,
    /// What the optimizer's schedules reach that are called before the loss.
    of_schedules: Rc<RefCell<Reach>>,
    /// What the loss changes of that, until the warning.
    late: Option<String>,
    /// Whether there has been one.
    told_late: bool,
    /// What schedules have replaced in the optimizer's state, while a step is under way.
    replaced: Rc<RefCell<Vec<Replaced>>>,
    /// Structure that the loss of the call's trace returned, with holes for its arrays, and the numbers and texts of what it
    /// has replaced.
    template: Option<Py<PyAny>>,
    steps: usize,
    updates: usize,
    skips: Flags,
    misses: Flags,
    alarms: Alarms,
    seconds: Spent,
    mode: &'static str,
    reason: Option<String>,
    /// Reason why the step runs uncompiled.
    fallen: Option<String>,
    /// True while it is to be seen whether the loss takes from what cannot be put back; none where that is known.
    probe: Option<bool>,
    has_compiler: bool,           // as far as is known
    probed: Option<Seen>,         // the numbers of the last such call behind a trace
    positions: Option<Py<PyAny>>, // of generators and iterators before the loss was traced, while a step is under way
    swapped: Vec<Swapped>,        // of the model, by the loss of this call
    bad: Rc<Cell<bool>>, // the batch of this call is skipped, and what its loss has changed is as before
    refused: bool,       // it is an error
    undo: Vec<Change>, // what the loss has changed as it was called for the graph of this call, with what was there before
    suspect: Option<Suspect>, // what the loss has changed itself at the last trace, to be looked at before the next step
    checks: usize,
    numpy: SeenNumpy,
    looked_ahead: LookedAhead,
    counts: Option<(Vec<f64>, Rc<Vec<Advance>>)>, // how far numbers of the model have come, behind the last step
    changes_model: bool,                          // the loss changes numbers of the model itself
    reads_counts: ((usize, usize, usize), bool), // of a program and a model with so many counts: whether the loss may read them
    reshapes: bool, // a trace repeats that the loss assigns arrays of another shape
    shared_draws: usize, // how often a generator of the process has moved while a graph was compared
    apart: bool,         // the loss is called for its graph behind a call of the user's
    writes: Writes,      // so does what it writes
    takes: Option<String>, // generators and iterators from which the loss has taken as it was called for its graph
    /// Reason why the trace that has just been made cannot be used again.
    unwatched: Option<String>,
    /// Reason why a trace is not replayed, as last reported to the user.
    told: Option<String>,
}

impl Refers for Inner {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.reach.visit(collector)?;
        self.read.visit(collector)?;
        self.of_schedules.visit(collector)?;
        self.traces.visit(collector)?;
        self.template.visit(collector)?;
        self.probed.visit(collector)?;
        self.swapped.visit(collector)?;
        self.undo.visit(collector)?;
        self.suspect.visit(collector)?;
        self.looked_ahead.visit(collector)?;
        self.counts
            .as_ref()
            .map_or(Ok(()), |(_, adds)| adds.visit(collector))
    }
}

/// Time by stage, in seconds.
#[derive(Default)]
struct Spent {
    look: f64,
    trace: f64,
    engine: Seconds,
    show: f64,
}

/// `Step.state` as it crosses to Python: arrays by flat names, and the number of batches in the window.
type State<'py> = (BTreeMap<String, Bound<'py, PyAny>>, usize);

/// Steps, updates and skipped batches, the mode and its reason, the kept traces and the number of all, seconds and
/// bytes by name, the share of weights that an update left as they were, operations of the largest lazy argument.
type Stats = (
    usize,
    usize,
    usize,
    (&'static str, Option<String>),
    Vec<TraceRecord>,
    usize,
    HashMap<&'static str, f64>,
    HashMap<&'static str, usize>,
    Option<f64>,
    usize,
);

#[pymethods]
#[allow(clippy::needless_pass_by_value)] // PyO3 passes extracted values
impl Step {
    fn __traverse__(&self, visit: PyVisit<'_>) -> Visited {
        let mut collector = Collector::new(visit);
        self.shared.visit(&mut collector)?;
        self.inner.0.visit(&mut collector)
    }

    // what leads back to it is forgotten: it would be found again, and traced again
    fn __clear__(&self) {
        let Ok(mut inner) = self.inner.0.try_borrow_mut() else {
            return;
        };
        let found = (
            take(&mut inner.reach),
            take(&mut inner.read),
            take(&mut inner.of_schedules),
        );
        let made = (
            take(&mut inner.traces),
            take(&mut inner.suspect),
            take(&mut inner.probed),
        );
        let left = (
            take(&mut inner.swapped),
            take(&mut inner.undo),
            take(&mut inner.counts),
        );
        let template = take(&mut inner.template);
        drop(inner); // before these: that may call Python
        drop((found, made, left, template));
    }

    #[new]
    fn new(
        model: &Bound<'_, PyAny>,
        optimizer: &Bound<'_, PyAny>,
        options: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let options = Options::read(options)?;
        Ok(Self {
            shared: registry::shared(model, optimizer)?,
            inner: ThreadBound(RefCell::new(Inner {
                owner: known_graphs::new_owner(),
                compiled: options.compile,
                became: 0,
                becomes: String::new(),
                options,
                varies_norm: false,
                checked: false,
                host: Rc::new(PythonHost::default()),
                traces: Traces::default(),
                reach: Reach::default(),
                read: Read::default(),
                of_schedules: Rc::default(),
                told_late: false,
                replaced: Rc::default(),
                late: None,
                template: None,
                steps: 0,
                updates: 0,
                skips: Flags::default(),
                misses: Flags::default(),
                alarms: Alarms::default(),
                seconds: Spent::default(),
                mode: "native",
                reason: None,
                fallen: None,
                probe: Some(false),
                has_compiler: true,
                probed: None,
                positions: None,
                bad: Rc::default(),
                refused: false,
                undo: Vec::new(),
                swapped: Vec::new(),
                suspect: None,
                checks: 0,
                numpy: SeenNumpy::default(),
                looked_ahead: LookedAhead::default(),
                counts: None,
                changes_model: false,
                reads_counts: Default::default(),
                reshapes: false,
                shared_draws: 0,
                apart: false,
                takes: None,
                writes: Writes::default(),
                unwatched: None,
                told: None,
            })),
        })
    }

    /// One step: what the loss function returned, the gradients' norm before clipping, whether the batch was skipped, and
    /// whether there was an update, or whether it was missed.
    fn step<'py>(&self, user: Arguments<'py>, accumulate: usize) -> PyResult<Returned<'py>> {
        let optimizer = user.optimizer.clone();
        self.enter(&optimizer, |inner, store| {
            let task = Task::of(accumulate, store.batches());
            inner.step(store, user, task)
        })
    }

    /// Clip to another norm from the next step on; return it as a number.
    fn set_max_grad_norm(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<f64>> {
        self.open(value.py(), |inner, _| {
            inner.varies_norm |= inner.options.set_max_grad_norm(value)?;
            Ok(inner.options.max_grad_norm)
        })
    }

    /// Update by a window that is not full; whether there was one.
    fn flush(&self, user: Arguments<'_>) -> PyResult<bool> {
        let optimizer = user.optimizer.clone();
        self.enter(&optimizer, |inner, store| {
            if store.batches() == 0 {
                return Ok(false);
            }
            inner.step(store, user, Task::Flush).map(|_| true)
        })
    }

    /// Return the loss function's return value and the tree of gradients.
    fn gradients<'py>(
        &self,
        user: Arguments<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let optimizer = user.optimizer.clone();
        self.enter(&optimizer, |inner, store| inner.gradients(store, user))
    }

    /// Plan the device's memory of a step on this batch; nothing is computed and nothing changes.
    fn memory_plan(&self, user: Arguments<'_>, accumulate: usize) -> PyResult<MemoryPlan> {
        let optimizer = user.optimizer.clone();
        self.enter(&optimizer, |inner, store| {
            inner.memory_plan(store, user, accumulate)
        })
    }

    /// The operations of a step on this batch, evaluated one by one: name, module, output, bytes, seconds; nothing
    /// changes.
    fn measure(&self, user: Arguments<'_>, accumulate: usize) -> PyResult<Vec<Measured>> {
        let optimizer = user.optimizer.clone();
        self.enter(&optimizer, |inner, store| {
            inner.measure(store, user, accumulate)
        })
    }

    /// Write down every stage that begins from now on.
    fn begin_recording(&self) {
        self.shared.clock.begin_recording();
    }

    /// The stages since then: name, seconds since the recording began, bytes that MLX had in use.
    fn end_recording(&self) -> Vec<(&'static str, f64, usize)> {
        let events = self.shared.clock.end_recording().into_iter();
        let events = events.map(|event| (event.stage.name(), event.seconds, event.active));
        events.collect()
    }

    /// Return the state of a call, for any thread: the stage, the number of stages entered so far, the number of operations
    /// of the graph that was evaluated last, and how often the loss function was called for a trace.
    fn stage(&self) -> (&'static str, u64, usize, usize) {
        let clock = &self.shared.clock;
        let (stage, entered) = clock.now();
        (stage.name(), entered, clock.operations(), clock.traces())
    }

    /// Wait for all work in flight.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        self.open(py, |_, store| match &mut store.engine {
            Some(engine) => {
                let done = engine.synchronize(&mut Waiting(py));
                done.map_err(|e| to_python(&e))
            }
            None => Ok(()),
        })
    }

    /// Return the state beside model and optimizer: arrays by flat names, and the number of batches in the window.
    fn state<'py>(&self, py: Python<'py>) -> PyResult<Option<State<'py>>> {
        self.open(py, |_, store| {
            let kept = store.kept()?.map(|kept| {
                let arrays = kept.arrays().into_iter();
                let arrays = arrays.map(|(name, array)| Ok((name, bridge::wrap(py, &array)?)));
                Ok((arrays.collect::<PyResult<_>>()?, kept.batches()))
            });
            kept.transpose()
        })
    }

    /// Keep something else, and count on from these numbers.
    fn load_state(
        &self,
        py: Python<'_>,
        state: State<'_>,
        steps: usize,
        updates: usize,
        skipped: usize,
    ) -> PyResult<()> {
        let (arrays, batches) = state;
        let arrays = arrays.into_iter();
        let arrays = arrays.filter_map(|(name, array)| Some((name, bridge::get(&array)?)));
        let kept = NamedAuxState::of_arrays(arrays.collect(), batches);
        self.open(py, |inner, store| {
            store.keep(py, kept)?;
            (inner.steps, inner.updates) = (steps, updates);
            inner.skips = Flags::of(skipped);
            inner.misses = Flags::default();
            Ok(())
        })
    }

    /// Return the step's counters.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        self.open(py, |inner, store| {
            for flags in [&mut inner.skips, &mut inner.misses] {
                read(flags.read(0, &|flag| is_true(py, flag)))?;
            }
            Ok((
                inner.steps,
                inner.updates - inner.misses.count(),
                inner.skips.count(),
                (inner.mode, inner.reason.clone()),
                inner.traces.records(),
                inner.traces.made(),
                inner.seconds.by_name(),
                bytes(store),
                store
                    .engine
                    .as_ref()
                    .and_then(faststep::engine::Engine::unchanged),
                store.lazy.most(),
            ))
        })
    }
}

impl Step {
    // a call that reads the user's model and optimizer
    fn enter<T>(
        &self,
        optimizer: &Bound<'_, PyAny>,
        work: impl FnOnce(&mut Inner, &mut Store) -> PyResult<T>,
    ) -> PyResult<T> {
        if array::is_transforming() {
            return Err(to_python(&Error::Transformed));
        }
        self.open(optimizer.py(), |inner, store| {
            registry::claim(&self.shared, store, optimizer)?;
            work(inner, store)
        })
    }

    // every entry goes through here: it checks the thread and refuses a step within a step
    fn open<T>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Inner, &mut Store) -> PyResult<T>,
    ) -> PyResult<T> {
        let busy =
            || PyRuntimeError::new_err("a step of this model and optimizer is already running");
        let mut store = self.shared.try_borrow_mut().map_err(|_| busy())?;
        store.check_thread()?;
        let mut inner = self.inner.0.try_borrow_mut().map_err(|_| busy())?;
        let _under_way = UnderWay::begin(&self.shared.clock);
        or_late(py, work(&mut inner, &mut store))
    }
}

// a call is under way until this is dropped
struct UnderWay<'a>(&'a StageClock);

impl<'a> UnderWay<'a> {
    fn begin(clock: &'a StageClock) -> Self {
        clock.enter(Stage::Objects);
        Self(clock)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.enter(Stage::Idle);
    }
}

/// The loss function's return value, the gradients' norm, whether the batch was skipped, whether there was an update (or
/// the flag that tells whether it was missed).
type Returned<'py> = (
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Bound<'py, PyAny>,
);

impl Spent {
    fn by_name(&self) -> HashMap<&'static str, f64> {
        HashMap::from([
            ("look", self.look),
            ("trace", self.trace),
            ("build", self.engine.build),
            ("evaluate", self.engine.evaluate),
            ("wait", self.engine.wait),
            ("show", self.show),
        ])
    }
}

fn bytes(store: &Store) -> HashMap<&'static str, usize> {
    let sum = |arrays: &[Array]| arrays.iter().map(Array::nbytes).sum();
    let engine = store.engine.as_ref();
    HashMap::from([
        ("parameters", engine.map_or(0, |e| sum(e.parameters()))),
        ("optimizer", engine.map_or(0, |e| sum(e.state()))),
        (
            "step",
            engine.map_or(0, faststep::engine::Engine::extra_bytes),
        ),
        ("model", sum(&store.others)),
        (
            "replay",
            engine.map_or(0, faststep::engine::Engine::captured_bytes),
        ),
    ])
}
