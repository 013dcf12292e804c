//! The step of one model, optimizer, loss function and set of options, as Python calls it.
//!
//! 1. At each step the loss is either **called** once, with tracers for the model's arrays, or **left out**.
//! 2. A call gives a graph; its leaves are the step's inputs, wherever they come from, and arrays of it that somebody still holds
//!    afterwards are its outputs.
//! 3. The graph picks the trace (equal but for constants, which become inputs); a new graph is differentiated on the spot, and a new
//!    trace is made of it. The loss is never called a second time.
//! 4. A call may be left out only while a watch list holds, which exists only for a loss that reads nothing but a short white list
//!    of kinds, and of which a call changed nothing and called no unknown function.
//! 5. A loss whose graph cannot be had is evaluated by itself at each step, as the plain loop does, with the reason.
//!
//! The way of a batch: `call` takes over the user's changes and returns the outputs, `left_out` says whether the loss is called,
//! `choose` picks the traces from `traces`, `run` has the engine run them. `arguments` and `options` are converted, `alarms`, `first_skipped`,
//! `indices` and `kept_losses` warn, `measure` and `memory_plan` are the other questions to a step. Uses `watch`, `host`, `store`, `optimizer`,
//! `tree` and `mlx`.
mod alarms;
mod arguments;
mod call;
mod choose;
mod first_skipped;
mod flags;
mod indices;
mod kept_losses;
mod left_out;
mod measure;
mod memory_plan;
mod options;
mod run;
mod traces;
mod updates;

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap, HashSet},
    mem::take,
    rc::Rc,
    sync::Arc,
    time::Instant,
};

use faststep::{
    engine::{array, Flags, Group, NamedAuxState, Ranks, Seconds, Stage},
    Error,
};
use mlx_rs::Array;
use pyo3::{
    exceptions::{PyRuntimeError, PyTypeError},
    prelude::*,
    PyVisit,
};

use crate::mlx::collector::{Collector, Refers, Visited};
use crate::{
    host::{Graphs, PythonHost},
    mlx::{bridge, errors::to_python, gil::Waiting},
    store::{
        registry::{self, Shared},
        ModelSignature, Shards, SharedOut, Store,
    },
    watch::WatchList,
};
use alarms::Alarms;
use arguments::Arguments;
use choose::NewGraphs;
use flags::{is_true, read, told};
use left_out::LeavingOut;
use measure::Measured;
use options::Options;
use traces::{Key, Traces};
use updates::Updates;

pub use measure::label;
pub use memory_plan::MemoryPlan;
pub use traces::TraceRecord;

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

/// A call of the loss that may be left out the next time.
struct Watched {
    key: Key,                                      // the part with the loss, whatever its graph
    signature: Rc<ModelSignature>,                 // before it
    list: Option<(Rc<WatchList>, Option<String>)>, // by which it was watched, and why it may not be left out
    seconds: f64,
}

#[allow(clippy::struct_excessive_bools)] // each is an answer of its own
struct Inner {
    options: Options,
    ranks: Option<Ranks>,
    shared_out: Option<Rc<SharedOut>>,
    shards: Option<Rc<Shards>>,
    shared_by: Option<Rc<Group>>, // the ranks that have the shards
    awaited: usize,               // the rounds of the call under way
    varies_norm: bool,            // the norm to which gradients are clipped has been another
    checked: bool,                // whether there is a compiler
    numpy_as_mlx: bool,           // NumPy arrays are passed as mx.arrays
    has_compiler: bool,
    plain: Option<String>, // why each call is evaluated by itself
    host: Rc<PythonHost>,
    graphs: Graphs,
    new_graphs: NewGraphs,
    traces: Traces,
    leaving_out: LeavingOut,
    own_updates: Updates,
    watched: Option<Watched>, // in the call under way
    released: bool, // a batch has been taken whose update follows, and arrays are to be shown behind that
    steps: usize,
    updates: usize,
    skips: Flags,
    misses: Flags,
    alarms: Alarms,
    warned: Vec<String>, // the texts of all warnings
    seconds: Spent,
    mode: (&'static str, Option<String>), // with the reason, where it is not native
    told: Option<String>, // why a trace is not replayed, as last reported to the user
}

/// Time by stage, in seconds.
#[derive(Default)]
struct Spent {
    look: f64,
    call: f64,
    trace: f64,
    engine: Seconds,
    show: f64,
}

/// `Step.state` as it crosses to Python: arrays by flat names, and the number of batches in the window.
type State<'py> = (BTreeMap<String, Bound<'py, PyAny>>, usize);

/// Steps, updates and skipped batches, the mode and its reason, the kept traces and the number of all, seconds and
/// bytes by name, the share of weights that an update left as they were, operations of the largest lazy argument, bytes given
/// to other ranks, warnings.
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
    usize,
    Vec<String>,
);

#[pymethods]
#[allow(clippy::needless_pass_by_value)] // PyO3 passes extracted values
impl Step {
    fn __traverse__(&self, visit: PyVisit<'_>) -> Visited {
        let mut collector = Collector::new(visit);
        self.shared.visit(&mut collector)?;
        match self.inner.0.try_borrow() {
            Ok(inner) => {
                inner.traces.visit(&mut collector)?;
                inner.own_updates.visit(&mut collector)
            }
            Err(_) => Ok(()), // it is under way
        }
    }

    // forget the traces, which may lead back to the step
    fn __clear__(&self) {
        let Ok(mut inner) = self.inner.0.try_borrow_mut() else {
            return;
        };
        let forgotten = (take(&mut inner.traces), take(&mut inner.own_updates));
        drop(inner); // before these: that may call Python
        drop(forgotten);
    }

    #[new]
    #[pyo3(signature = (model, optimizer, options, group=None, shards=None))]
    fn new(
        model: &Bound<'_, PyAny>,
        optimizer: &Bound<'_, PyAny>,
        options: &Bound<'_, PyAny>,
        group: Option<&Bound<'_, PyAny>>,
        shards: Option<(HashSet<String>, bool)>,
    ) -> PyResult<Self> {
        let own_updates = Updates::read(options)?;
        let mut ranks = group.map(ranks).transpose()?.flatten();
        if shards.is_some() {
            ranks = ranks.map(Ranks::sharing_model);
        }
        let shared_by = ranks.as_ref().and_then(Ranks::shards).cloned();
        let shards = shards.map(|(names, same_batch)| Rc::new(Shards { names, same_batch }));
        let options = Options::read(options, ranks.is_some() && shared_by.is_none())?;
        Ok(Self {
            shared: registry::shared(model, optimizer)?,
            inner: ThreadBound(RefCell::new(Inner {
                options,
                ranks,
                shared_out: None,
                shards,
                shared_by,
                awaited: 1,
                varies_norm: false,
                checked: false,
                numpy_as_mlx: false,
                has_compiler: true,
                plain: None,
                host: Rc::default(),
                graphs: Graphs::default(),
                new_graphs: NewGraphs::default(),
                traces: Traces::default(),
                leaving_out: LeavingOut::default(),
                own_updates,
                released: false,
                watched: None,
                steps: 0,
                updates: 0,
                skips: Flags::default(),
                misses: Flags::default(),
                alarms: Alarms::default(),
                warned: Vec::new(),
                seconds: Spent::default(),
                mode: ("called", None),
                told: None,
            })),
        })
    }

    /// One step: what the loss function returned, the gradients' norm before clipping, whether the batch was skipped,
    /// whether there was an update, or whether it was missed, and the mean loss of the window over all ranks where that is known.
    fn step<'py>(&self, user: Arguments<'py>, accumulate: usize) -> PyResult<Returned<'py>> {
        let optimizer = user.optimizer.clone();
        self.enter(&optimizer, |inner, shared| {
            inner.step(shared, user, accumulate, false)
        })
    }

    /// Clip to another norm from the next step on; return it as a number.
    fn set_max_grad_norm(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<f64>> {
        self.open(|inner, _| {
            inner.varies_norm |= inner.options.set_max_grad_norm(value)?;
            Ok(inner.options.max_grad_norm)
        })
    }

    /// Update by a window that is not full; whether there was one, on any rank.
    fn flush(&self, user: Arguments<'_>) -> PyResult<bool> {
        let optimizer = user.optimizer.clone();
        self.enter(&optimizer, |inner, shared| {
            if !inner.options.reduced && shared.enter()?.batches() == 0 {
                return Ok(false);
            }
            inner.step(shared, user, 1, true)?;
            let ranks = inner.ranks.as_ref().filter(|_| inner.options.reduced);
            Ok(ranks.is_none_or(Ranks::has_flushed))
        })
    }

    /// Return the loss function's return value and the tree of gradients.
    fn gradients<'py>(
        &self,
        user: Arguments<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let optimizer = user.optimizer.clone();
        self.enter(&optimizer, |inner, shared| inner.gradients(shared, user))
    }

    /// Plan the device's memory of a step on this batch; nothing is computed and nothing changes.
    fn memory_plan(&self, user: Arguments<'_>, accumulate: usize) -> PyResult<MemoryPlan> {
        let optimizer = user.optimizer.clone();
        self.enter(&optimizer, |inner, shared| {
            inner.memory_plan(shared, user, accumulate)
        })
    }

    /// The operations of a step on this batch, evaluated one by one: name, module, output, bytes, seconds; nothing
    /// changes.
    fn measure(&self, user: Arguments<'_>, accumulate: usize) -> PyResult<Vec<Measured>> {
        let optimizer = user.optimizer.clone();
        self.enter(&optimizer, |inner, shared| {
            inner.measure(shared, user, accumulate)
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

    /// Meet the other ranks of the group for something that is no update: 1 gradients, 2 a validation, 3 a checkpoint, 4 a
    /// comparison of them.
    /// `exchange` is called then: what it waits for counts as an exchange.
    fn meet<'py>(
        &self,
        py: Python<'py>,
        kind: u8,
        exchange: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.open(|inner, shared| {
            let update = inner.updates + 1;
            let Some(ranks) = inner.ranks.as_mut() else {
                return exchange.call0();
            };
            shared.clock.enter(Stage::Collective);
            let met = ranks.meet(kind, update, &mut Waiting(py));
            met.map_err(|error| to_python(&error))?;
            let began = Instant::now();
            let found = exchange.call0();
            ranks.end_exchange(began);
            found
        })
    }

    /// Update the parameters of this rank alone from the next step on, and take the others from the rank that `owners` has by name.
    fn share_out(&self, owners: HashMap<String, usize>, rank: usize) -> PyResult<()> {
        self.open(|inner, _| {
            inner.shared_out = Some(Rc::new(SharedOut { owners, rank }));
            Ok(())
        })
    }

    /// Tell the other ranks that this one has failed, unless they know.
    fn fail(&self, py: Python<'_>) -> PyResult<()> {
        self.with_ranks((), |ranks, update| ranks.fail(update, &mut Waiting(py)))
    }

    /// Return the seconds that each rank has spent outside of exchanges before its updates.
    fn rank_seconds(&self) -> PyResult<Vec<f64>> {
        self.with_ranks(Vec::new(), |ranks, _| Ok(ranks.own_seconds().to_vec()))
    }

    /// Give a number to the other ranks, from the next round on; return the largest that one has given in the last round.
    fn wish(&self, number: u8) -> PyResult<u8> {
        self.with_ranks(0, |ranks, _| {
            ranks.wish(number);
            Ok(ranks.wished())
        })
    }

    /// Wait for all work in flight.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        self.open(|_, shared| match shared.enter()?.engine.as_mut() {
            Some(engine) => {
                let done = engine.synchronize(&mut Waiting(py));
                done.map_err(|e| to_python(&e))
            }
            None => Ok(()),
        })
    }

    /// Return the state beside model and optimizer: arrays by flat names, and the number of batches in the window.
    fn state<'py>(&self, py: Python<'py>) -> PyResult<Option<State<'py>>> {
        self.open(|_, shared| {
            let kept = shared.enter()?.kept()?.map(|kept| {
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
        self.open(|inner, shared| {
            shared.enter()?.keep(py, kept)?;
            (inner.steps, inner.updates) = (steps, updates);
            inner.skips = Flags::of(skipped);
            inner.misses = Flags::default();
            Ok(())
        })
    }

    /// Return the step's counters.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        self.open(|inner, shared| {
            let store = shared.enter()?;
            for flags in [&mut inner.skips, &mut inner.misses] {
                read(flags.read(0, &|flag| is_true(py, flag)))?;
            }
            let mut seconds = inner.seconds.by_name();
            seconds.extend(inner.ranks.as_ref().map(|it| ("ranks", it.seconds())));
            Ok((
                inner.steps,
                inner.updates - inner.misses.count(),
                inner.skips.count(),
                inner.mode.clone(),
                inner.traces.records(),
                inner.traces.made(),
                seconds,
                bytes(py, &store)?,
                store
                    .engine
                    .as_ref()
                    .and_then(faststep::engine::Engine::unchanged),
                store.lazy.most(),
                inner.ranks.as_ref().map_or(0, Ranks::bytes),
                inner.warned.clone(),
            ))
        })
    }
}

impl Step {
    // work with the other ranks, by the number of the next update; without a group there is none
    fn with_ranks<T>(
        &self,
        none: T,
        work: impl FnOnce(&mut Ranks, usize) -> Result<T, Error>,
    ) -> PyResult<T> {
        self.open(|inner, shared| {
            let update = inner.updates + 1;
            let Some(ranks) = inner.ranks.as_mut() else {
                return Ok(none);
            };
            shared.clock.enter(Stage::Collective);
            work(ranks, update).map_err(|error| to_python(&error))
        })
    }

    // a call that reads the user's model and optimizer
    fn enter<T>(
        &self,
        optimizer: &Bound<'_, PyAny>,
        work: impl FnOnce(&mut Inner, &Shared) -> PyResult<T>,
    ) -> PyResult<T> {
        if array::is_transforming() {
            return Err(to_python(&Error::Transformed));
        }
        self.open(|inner, shared| {
            registry::claim(&self.shared, &mut *shared.enter()?, optimizer)?;
            work(inner, shared)
        })
    }

    // every entry goes through here: it checks the thread and refuses a step within a step
    fn open<T>(&self, work: impl FnOnce(&mut Inner, &Shared) -> PyResult<T>) -> PyResult<T> {
        self.shared.enter()?.check_thread()?;
        let busy = || PyRuntimeError::new_err(registry::BUSY);
        let mut inner = self.inner.0.try_borrow_mut().map_err(|_| busy())?;
        let _under_way = UnderWay::begin(&self.shared)?;
        let outcome = work(&mut inner, &self.shared);
        outcome.map_err(|error| Python::attach(|py| told(py, &self.shared, error)))
    }
}

// a call is under way until this is dropped
struct UnderWay<'a>(&'a Shared);

impl<'a> UnderWay<'a> {
    fn begin(shared: &'a Shared) -> PyResult<Self> {
        shared.begin()?;
        shared.clock.enter(Stage::Objects);
        Ok(Self(shared))
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.clock.enter(Stage::Idle);
        self.0.end();
    }
}

/// The loss function's return value, the gradients' norm, whether the batch was skipped, whether there was an update (or
/// the flag that tells whether it was missed), the mean loss over ranks.
type Returned<'py> = (
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
);

// the ranks of a group; none where it is one of one, or none
fn ranks(group: &Bound<'_, PyAny>) -> PyResult<Option<Ranks>> {
    let got = || group.get_type().fully_qualified_name();
    match bridge::group(group) {
        Some(group) => Ok((group.size() > 1).then(|| Ranks::new(group))),
        None => Err(PyTypeError::new_err(format!(
            "group: expected mx.distributed.Group or None, got {}",
            got()?
        ))),
    }
}

impl Spent {
    fn by_name(&self) -> HashMap<&'static str, f64> {
        HashMap::from([
            ("look", self.look),
            ("call", self.call),
            ("trace", self.trace),
            ("build", self.engine.build),
            ("evaluate", self.engine.evaluate),
            ("wait", self.engine.wait),
            ("show", self.show),
        ])
    }
}

fn bytes(py: Python<'_>, store: &Store) -> PyResult<HashMap<&'static str, usize>> {
    let sum = |arrays: &[Array]| arrays.iter().map(Array::nbytes).sum();
    let engine = store.engine.as_ref();
    Ok(HashMap::from([
        ("parameters", engine.map_or(0, |e| sum(e.parameters()))),
        ("optimizer", store.optimizer_bytes(py)?),
        (
            "step",
            engine.map_or(0, faststep::engine::Engine::extra_bytes),
        ),
        ("model", sum(&store.others)),
        (
            "replay",
            engine.map_or(0, faststep::engine::Engine::captured_bytes),
        ),
    ]))
}
