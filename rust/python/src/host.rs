//! The user's model, loss and optimizer while a step is traced.
//!
//! Tracers are put where the arrays are, the user's function is called, what it assigned is read off, and everything is
//! put back as it was, whether the function returned or raised. Uses `optimizer`, `reach`, `tree` and `mlx`.
mod loss;
mod loss_graph;
mod read;
pub mod shown;
mod update;

use std::{cell::RefCell, rc::Rc};

use faststep::engine::{
    Graph, Host, Left, LossCall, LossOutput, Owner, Role, UpdateCall, UpdateOutput,
};
use mlx_rs::{
    error::{Exception, Result as MlxResult},
    Array,
};
use pyo3::{
    exceptions::{PyException, PyTypeError},
    prelude::*,
    types::{PyList, PyTuple},
};

pub use loss::Swapped;
pub use loss_graph::TraceGraph;
use loss_graph::{arrays_of, evaluate_lasting, LossArrays};
use shown::TakenOut;

use crate::{
    mlx::{bridge, errors::mlx, gil::Waiting},
    optimizer::{leaves, traceable_rate, Replaced},
    reach::{
        advance::{leave, OwnChange},
        stop::{Stop, DISABLED},
        suspect::{self, Imports, Positions, Reads, Suspect},
        Looked, Reach, Reached, Written,
    },
    tree::{renewed::Remade, slot::Slot, snapshot::Snapshot, Tree},
};

/// The call during which a trace may be made.
#[allow(clippy::struct_excessive_bools)] // independent properties of a loss
pub struct Current {
    /// The user's model.
    pub model: Py<PyAny>,
    /// The user's optimizer.
    pub optimizer: Py<PyAny>,
    /// The user's loss function.
    pub loss_fn: Py<PyAny>,
    /// True if it returns a weight behind the loss.
    pub weighted: bool,
    /// The positional arguments and a dict of the named ones.
    pub arguments: Py<PyTuple>,
    /// The same with the user's NumPy arrays.
    pub own: Py<PyTuple>,
    /// `mx.random`'s key list.
    pub key_list: Py<PyList>,
    /// The role of each array slot of the model, and the path to it.
    pub roles: Rc<Vec<(Role, Vec<String>)>>,
    /// The model's trainable parameters as a tree.
    pub trainable: Py<PyAny>,
    /// True if the optimizer's own code updates.
    pub host: bool,
    /// Where the optimizer's arrays are, in the order of the engine's state, if the loss may set them.
    pub in_state: Option<Vec<Vec<String>>>,
    /// True if the loss is computed in another dtype than the parameters': then it may assign in that one.
    pub mixed: bool,
    /// True if the loss is computed once and replayed: then it may store no arrays beside the model's slots.
    pub compiled: bool,
    /// True if the trace repeats that the loss assigns arrays of another shape.
    pub reshapes: bool,
    /// True if everything that the loss does to the model is taken back.
    pub restore: bool,
    /// Objects that the loss reaches beside the model and its arguments; their arrays stand behind the model's others.
    pub looked: Rc<Looked>,
    /// The number of the model's others.
    pub others: usize,
    /// Constants of the trace's graph that are inputs, behind the arrays that the loss reaches.
    pub varying: Vec<u32>,
    /// True if the traces of the loss and of the update are there: neither is called.
    pub known: (bool, bool),
    /// The addresses of dicts and lists of the optimizer that its update has replaced before.
    pub were_remade: Vec<usize>,
    /// Once it has been called, those that it has replaced again, and others.
    pub remade: Option<(Vec<usize>, Vec<Remade>)>,
    /// True if only the graph is wanted.
    pub sketch: bool,
    /// True if that is of a call of the user's, which an error of the loss ends.
    pub ends: bool,
    /// True if the graph of the loss determines that of the step: no Python code computes gradients, and that of an update reads the
    /// same as before.
    pub by_loss: bool,
    /// Arrays of the loss call, where its graph is wanted.
    pub loss_arrays: Option<LossArrays>,
    /// The inputs that stand for the constants.
    pub tracers: Vec<Array>,
    /// The graph of the trace.
    pub graph: Option<TraceGraph>,
    /// Constants of the graph that somebody else holds too.
    pub held: Vec<Array>,
    /// True if the optimizer has changed more than the arrays of its state.
    pub loose: bool,
    /// True if it is to be seen whether the loss takes from generators and iterators; none where that is known.
    pub probe: Option<bool>,
    /// What the loss writes to what it reaches.
    pub written: Written,
    /// Keys that it takes out of dicts among its arguments.
    pub taken_out: TakenOut,
    /// Containers of the model in whose places it puts others, uncompiled.
    pub swapped: Vec<Swapped>,
    /// What the loss has changed itself, where a trace has been made.
    pub suspect: Suspect,
    /// The same where only the graph is wanted: of the model, and of what the loss reaches beside it.
    pub changed: (Vec<OwnChange>, Vec<OwnChange>),
    /// Where generators and iterators stood before the loss was traced.
    pub positions: Option<Py<PyAny>>,
    /// What an optimizer's own code reaches beside its own arrays and numbers.
    pub of_update: Option<Rc<Looked>>,
    /// What is reached by an optimizer's schedules that are called before the loss; none where that does not matter.
    pub of_schedules: Option<Rc<RefCell<Reach>>>,
    /// What the loss changes of that.
    pub late: Option<String>,
    /// What the schedules have replaced in the optimizer's state.
    pub replaced: Rc<RefCell<Vec<Replaced>>>,
    /// Generators and iterators that an optimizer's own code takes from.
    pub moving: Option<Py<PyAny>>,
    /// What it has taken from, or read of the clock, files and the system, as its update was traced.
    pub taken: Option<Vec<String>>,
    /// Reason for which the trace ended early.
    pub stop: Option<Stop>,
    /// Structure that the loss returned, with holes for its arrays; behind the loss, in a tuple with the numbers and texts of each
    /// dict, list or tuple that it has put in the place of another one.
    pub template: Option<Py<PyAny>>,
}

impl Current {
    // true if the loss has changed numbers of the model itself
    fn changes_model(&self) -> bool {
        !(self.changed.0.is_empty() && self.suspect.model.is_empty())
    }

    // the numbers that the loss changes on the model are those that are known; `renewed`: it makes containers anew with other ones
    fn check_numbers(&self, renewed: bool) -> Result<(), Stop> {
        if self.reshapes && self.changes_model() {
            let what = "it assigns arrays of another shape, and counts on the model";
            return Err(Stop::Reshapes(what.into()));
        }
        if renewed && self.changes_model() {
            let what = "it puts other numbers into a dict or list of the model that it makes anew, and changes others too";
            return Err(Stop::Untraceable(what.into()));
        }
        Ok(())
    }

    // nothing has come to stand on the model that the trace does not know, and no array has gone
    fn check_stored(&self, model: &Snapshot<'_>) -> Result<(), Stop> {
        if let Some(key) = model.new_array(true)? {
            let what = format!("it stores a new array on the model: {key}");
            return Err(Stop::Stores(what));
        }
        if let Some(key) = model.new_object(|object| self.looked.has(object))? {
            let what = format!("it stores a new object on the model: {key}");
            return Err(Stop::Stores(what));
        }
        match model.lost_array()? {
            Some(key) => Err(Stop::Untraceable(format!("it removes {key}"))),
            None => Ok(()),
        }
    }

    // what the loss has changed itself: to be left where its graph is wanted, and looked at behind the step where it is traced
    fn note_changes<'py>(
        &mut self,
        py: Python<'py>,
        (reached, model): (&Reached<'py>, &Snapshot<'py>),
        positions: Option<&Positions<'py>>,
    ) -> Result<(), Stop> {
        if self.sketch {
            self.changed = own_changes(reached, model, false, py)?;
            let (of_model, of_reached) = &self.changed;
            if self.ends && !(of_model.is_empty() && of_reached.is_empty()) {
                self.suspect.first = own_changes(reached, model, false, py)?;
            }
            return self.check_given(py);
        }
        let Some(positions) = positions else {
            return Ok(());
        };
        if !self.compiled {
            self.suspect.drawn = positions.moved()?;
            return Ok(());
        }
        let stuck = reached.stuck(py)?;
        let shared = stuck.is_empty() && positions.shared()?;
        let of_model = suspect::changes(model, false)?;
        // what the loss reaches of the model is put back with it
        let mut of_reached = reached.changes(py)?;
        of_reached.retain(|one| !of_model.iter().any(|other| one.is_of(other, py)));
        self.suspect = Suspect {
            drawn: [positions.moved()?, stuck].concat(),
            shared,
            read: positions.read()?,
            model: of_model,
            reached: of_reached,
            first: own_changes(reached, model, true, py)?,
            ..Suspect::default()
        };
        self.check_given(py)
    }
}

/// The engine's host: the call that is under way.
#[derive(Default)]
pub struct PythonHost {
    /// The call; nothing between calls.
    pub current: RefCell<Option<Current>>,
}

impl PythonHost {
    fn run<T>(
        &self,
        work: impl for<'py> FnOnce(Python<'py>, &mut Current) -> Result<T, Stop>,
    ) -> MlxResult<T> {
        Python::attach(|py| {
            let mut current = self.current.try_borrow_mut().ok();
            let Some(current) = current.as_mut().and_then(|c| c.as_mut()) else {
                return Err(Exception::custom("a step was traced outside of a call"));
            };
            work(py, current).map_err(|stop| {
                current.stop = Some(stop);
                Exception::custom("the traced function raised")
            })
        })
    }
}

impl PythonHost {
    // the model and a snapshot to restore it; release the borrow before the loss is differentiated
    fn around(
        &self,
        py: Python<'_>,
        others: &[Array],
        key: &Array,
        work: &mut dyn FnMut() -> MlxResult<()>,
    ) -> Result<MlxResult<Left>, Stop> {
        let (model, keys) = {
            let current = self.current.borrow();
            let current = current.as_ref().ok_or_else(|| expected("a call"))?;
            (current.model.clone_ref(py), current.key_list.clone_ref(py))
        };
        let (model, keys) = (model.into_bound(py), keys.into_bound(py));
        let (before, slots) = Tree::of_model(&model)?;
        let snapshot = Snapshot::take(&model)?;
        let old_key = keys.get_item(0)?;
        // behind this everything is put back, also where Ctrl-C ends Python code of the package
        let (restore, compiled, sketch, positions, reached, seen) = {
            let mut current = self.current.borrow_mut();
            let current = current.as_mut().ok_or_else(|| expected("a call"))?;
            if current.compiled && !faststep::engine::array::is_traced(key) {
                return Err(Stop::Rare(DISABLED));
            }
            Stop::if_known(current.known.0)?;
            let looked = current.looked.clone();
            let probes = !current.compiled && current.probe == Some(true);
            let watches = (current.compiled || probes) && !current.sketch;
            current.loss_arrays = current
                .by_loss
                .then(|| LossArrays::before(others, key))
                .flatten();
            let positions = watches.then(|| Positions::of(current.model.bind(py), &looked));
            let positions = positions.transpose()?;
            if let (Some(positions), true, Some(false)) =
                (&positions, current.compiled, current.probe)
            {
                if positions.stay()? {
                    return Err(Stop::Probe);
                }
            }
            let how = (current.compiled, current.reshapes);
            let of_schedules = current.look_at_schedules(py)?;
            let of_optimizer = current.before_loss(py)?;
            let reached = Reached::new(py, looked, current.others, how, others)?;
            current.tracers = reached.constants(others).to_vec();
            let (restore, compiled, sketch) = (current.restore, current.compiled, current.sketch);
            let seen = (of_schedules, of_optimizer, current.has_updated(py)?);
            (restore, compiled, sketch, positions, reached, seen)
        };
        let outcome = match noticed(py, compiled, positions.as_ref(), work) {
            Err(error) => Err(Stop::Raised(error)),
            Ok((Some(place), _)) if !self.interrupted(py) => Err(Stop::reads(&place)),
            Ok((_, done)) if done.is_ok() || self.has_sketched() => {
                let mut current = self.current.borrow_mut();
                let current = current.as_mut().ok_or_else(|| expected("a call"))?;
                let renewed = current.taken_back(&snapshot, &slots)?;
                let changes = renewed.iter().any(|taken| taken.changes);
                let left = current.left(py, &before, &slots, others, key);
                left.and_then(|mut left| {
                    let read = reached.read(py, &mut left)?;
                    current.note_written(py, read, (renewed, &left))?;
                    current.note_state(py, seen.1.as_ref(), &mut left)?;
                    let done = (&slots[..], &left, &snapshot);
                    current.check_read(py, done, (seen.0.as_ref(), seen.2))?;
                    if current.compiled {
                        current.check_stored(&snapshot)?;
                    }
                    current.note_changes(py, (&reached, &snapshot), positions.as_ref())?;
                    current.check_numbers(changes)?;
                    Ok(Ok(left))
                })
            }
            Ok((_, done)) => Ok(done.map(|()| Left::default())),
        };
        if let Some(current) = self.current.borrow_mut().as_mut() {
            current.positions = positions.map(Positions::into_object);
        }
        let stays = match &outcome {
            Ok(Ok(_)) => true,
            // an error of the user's ends the call, as it would without a trace
            Ok(Err(_)) => self.raised(py) && reached.holds_no_tracer(py)?,
            Err(_) => false,
        };
        let raised = matches!(&outcome, Ok(Err(_))) && self.raised(py);
        let ended = raised && self.ends();
        let left = ended.then(|| own_changes(&reached, &snapshot, false, py));
        // gradients alone leave the model's arrays as they are, and what the loss counts
        let alone = restore && !compiled && matches!(outcome, Ok(Ok(_)));
        let counted = alone.then(|| own_changes(&reached, &snapshot, false, py));
        let reached_again = reached.restore(py, !sketch && stays);
        let model_again = if restore || !matches!(outcome, Ok(Ok(_))) {
            snapshot.restore()
        } else {
            let stays = |slot: &&Slot<'_>| compiled || slot.place.holds_array().unwrap_or(false);
            let mut set = slots.iter().filter(stays);
            set.try_for_each(|slot| slot.place.set(&slot.object))
        };
        keys.set_item(0, old_key)?;
        reached_again.and(model_again)?;
        leave_ended(left.transpose()?, (sketch, stays), py)?;
        if let Some((mut on_model, _)) = counted.transpose()? {
            on_model.retain(|own| own.is_plain(py));
            leave(on_model, py)?;
        }
        drop((before, slots, snapshot, reached)); // with their handles of the inputs
        match outcome {
            Ok(Ok(left)) => self.note_loss(left),
            other => other,
        }
    }

    // whether the loss has returned in a sketch that needs no more
    fn has_sketched(&self) -> bool {
        let current = self.current.borrow();
        let current = current.as_ref().filter(|current| current.sketch);
        let arrays = current.and_then(|current| current.loss_arrays.as_ref());
        arrays.is_some_and(LossArrays::is_complete)
    }

    // whether the graph is to be that of the whole step, with the update by Python code
    fn has_no_graph(&self) -> bool {
        let current = self.current.borrow();
        current
            .as_ref()
            .is_some_and(|current| current.graph.is_none())
    }

    // keep the graph of the loss, where it tells the gradients too; of a sketch nothing else is wanted
    fn note_loss(&self, left: Left) -> Result<MlxResult<Left>, Stop> {
        let mut noted = None;
        if let Some(current) = self.current.borrow_mut().as_mut() {
            let arrays = current.loss_arrays.take();
            noted = arrays.map(|arrays| (arrays, current.sketch, current.tracers.clone()));
        }
        let Some((mut arrays, sketch, tracers)) = noted else {
            return Ok(Ok(left));
        };
        arrays.left(left.clone());
        if let Err(error) = arrays.evaluate_lasting() {
            return Ok(Err(error));
        }
        let left = if sketch {
            drop(left);
            if let Err(error) =
                arrays.kept(|inputs, before, outputs| self.check_kept(inputs, before, outputs))
            {
                return Ok(Err(error));
            }
            Err(Exception::custom("only the graph was wanted"))
        } else {
            Ok(left)
        };
        let graph = arrays.graph(&tracers).map_err(mlx)?;
        if let Some(current) = self.current.borrow_mut().as_mut() {
            current.by_loss = graph.is_some();
            current.graph = graph;
        }
        Ok(left)
    }

    // whether the user has ended the loss, by Ctrl-C say
    fn interrupted(&self, py: Python<'_>) -> bool {
        let current = self.current.borrow();
        let stop = current.as_ref().and_then(|current| current.stop.as_ref());
        matches!(stop, Some(Stop::Raised(error)) if !error.is_instance_of::<PyException>(py))
    }

    // whether an error of the loss ends a call of the user's
    fn ends(&self) -> bool {
        let current = self.current.borrow();
        current.as_ref().is_some_and(|current| current.ends)
    }

    // whether the user's code has raised
    fn raised(&self, py: Python<'_>) -> bool {
        let current = self.current.borrow();
        let stop = current.as_ref().and_then(|current| current.stop.as_ref());
        matches!(stop, Some(Stop::Raised(error)) if error.is_instance_of::<PyException>(py))
    }

    // what the loss computes and somebody keeps would never get a value
    fn check_kept(&self, inputs: &[Array], before: &[usize], outputs: &[Array]) -> MlxResult<()> {
        let id = faststep::engine::array::id;
        let mut before = before.to_vec();
        for tracer in self.current.borrow().iter().flat_map(|it| &it.tracers) {
            let held = inputs.iter().zip(&mut before);
            held.filter(|(input, _)| id(input) == id(tracer))
                .for_each(|(_, count)| *count += 1);
        }
        let kept = || faststep::engine::graph::kept(inputs, &before, outputs);
        // a cycle that the loss has left is young: to look through all objects of a program takes long
        for generation in 0..3 {
            if kept()?.is_empty() {
                return Ok(());
            }
            let collected = Python::attach(|py| {
                let gc = py.import("gc")?;
                gc.call_method1("collect", (generation,)).map(drop)
            });
            if let Err(error) = collected {
                return self.run(|_, _| Err(error.into()));
            }
        }
        let kept = kept()?;
        if kept.is_empty() {
            return Ok(());
        }
        self.run(|py, _| {
            let found = kept.iter().map(|array| bridge::wrap(py, array));
            let found = PyList::new(py, found.collect::<PyResult<Vec<_>>>()?)?;
            let place = py
                .import("faststep._step._places")?
                .getattr("kept")?
                .call1((found, py.import("faststep._core")?.getattr("array_id")?))?;
            Err(Stop::Stores(format!(
                "it keeps an array that it computes{place}"
            )))
        })
    }

    // keep the graph of a trace, and replace its varying constants by inputs
    fn note(&self, inputs: &[Array], outputs: &[Array]) -> MlxResult<()> {
        let mut current = self.current.borrow_mut();
        let Some(current) = current.as_mut().filter(|current| current.compiled) else {
            return Ok(());
        };
        let id = faststep::engine::array::id;
        let tracers: Vec<usize> = current.tracers.iter().map(id).collect();
        let inputs = inputs.iter().filter(|input| !tracers.contains(&id(input)));
        let inputs: Vec<Array> = inputs.cloned().collect();
        if inputs
            .first()
            .is_none_or(|first| !faststep::engine::array::is_traced(first))
        {
            return Ok(()); // MLX compiles nothing: these are no tracers
        }
        let whole = Graph::new(&inputs, outputs)?;
        if current.sketch {
            current.graph = Some(TraceGraph::of_step(whole));
            return Err(Exception::custom("only the graph was wanted"));
        }
        let of_loss = current.graph.take();
        current.held = whole.held(of_loss.as_ref().map(TraceGraph::graph), outputs)?;
        let graph = of_loss.unwrap_or_else(|| TraceGraph::of_step(whole));
        let (numbers, tracers) = (&current.varying, &current.tracers);
        graph.graph().replace(numbers, tracers, outputs)?;
        current.graph = Some(graph);
        Ok(())
    }
}

impl Host for PythonHost {
    fn differentiate(
        &self,
        others: &[Array],
        key: &Array,
        work: &mut dyn FnMut() -> MlxResult<()>,
    ) -> MlxResult<Left> {
        Python::attach(|py| match self.around(py, others, key, work) {
            Ok(outcome) => outcome,
            Err(stop) => self.run(|_, _| Err(stop)),
        })
    }

    fn loss(&self, call: LossCall) -> MlxResult<LossOutput> {
        let (output, compiled) = self.run(|py, current| {
            if let Some(arrays) = &mut current.loss_arrays {
                arrays.call(call);
            }
            Ok((current.loss(py, call)?, current.compiled))
        })?;
        if compiled {
            let outputs: Vec<Array> = arrays_of(&output).cloned().collect();
            evaluate_lasting(&[], &outputs)?;
        }
        if let Some(current) = self.current.borrow_mut().as_mut() {
            if let Some(arrays) = &mut current.loss_arrays {
                arrays.returned(&output);
            }
        }
        if self.has_sketched() {
            return Ok(LossOutput::new(Array::from_f32(0.0))); // of which there is nothing to differentiate
        }
        Ok(output)
    }

    fn unlocked(&self, work: &mut dyn FnMut()) {
        Python::attach(|py| Waiting(py).unlocked(work));
    }

    fn has_seen_enough(&self) -> bool {
        let current = self.current.borrow();
        let current = current.as_ref();
        current.is_some_and(|current| current.sketch && current.graph.is_some())
    }

    fn traced(&self, inputs: &[Array], before: &[usize], outputs: &[Array]) -> MlxResult<()> {
        let compiled = |current: &Option<Current>| {
            let current = current.as_ref();
            current.is_some_and(|current| current.compiled)
        };
        if compiled(&self.current.borrow()) {
            self.check_kept(inputs, before, outputs)?;
            if self.has_no_graph() {
                let again: Vec<Array> = outputs.to_vec(); // the second handle of each
                evaluate_lasting(&[], &again)?;
            }
        }
        self.note(inputs, outputs)
    }

    fn learning_rate(&self, rule: usize, step: &Array) -> MlxResult<Option<Array>> {
        self.run(|py, current| {
            let optimizers = leaves(current.optimizer.bind(py));
            let Some(schedule) = optimizers.get(rule).and_then(traceable_rate) else {
                return Ok(None);
            };
            let rate = schedule.call1((bridge::wrap(py, step)?,))?;
            let rate = bridge::get(&rate);
            Ok(Some(rate.ok_or_else(|| {
                expected("a schedule to return mx.array")
            })?))
        })
    }

    fn update(&self, call: UpdateCall) -> MlxResult<UpdateOutput> {
        self.run(|py, current| current.update(py, call))
    }
}

// what a loss has changed itself, of the model and of what it reaches beside it, as long as it is there
fn own_changes<'py>(
    reached: &Reached<'py>,
    model: &Snapshot<'py>,
    first: bool,
    py: Python<'py>,
) -> PyResult<(Vec<OwnChange>, Vec<OwnChange>)> {
    let model = suspect::changes(model, true)?;
    let mut changed = reached.changes(py)?;
    changed.retain(|one| !model.iter().any(|other| one.is_of(other, py)));
    let note = |changes, of_model| OwnChange::note(changes, of_model, first, py);
    Ok((note(model, true)?, note(changed, false)?))
}

// an error of the loss ends the call: what it has changed before stays, though it has been taken back
fn leave_ended(
    left: Option<(Vec<OwnChange>, Vec<OwnChange>)>,
    (sketch, stays): (bool, bool),
    py: Python<'_>,
) -> PyResult<()> {
    let Some((on_model, mut reached)) = left else {
        return Ok(());
    };
    leave(on_model, py)?;
    if !stays {
        reached.retain(|own| own.is_plain(py)); // the array beside that is one of the trace
    }
    let taken_back = sketch || !stays;
    leave(if taken_back { reached } else { Vec::new() }, py)?;
    Ok(())
}

// call `work` and notice what the loss reads: the line where it reads the value of an array, and what came of `work`
fn noticed(
    py: Python<'_>,
    compiled: bool,
    positions: Option<&Positions<'_>>,
    work: &mut dyn FnMut() -> MlxResult<()>,
) -> PyResult<(Option<String>, MlxResult<()>)> {
    let reads = Reads::begin(py, compiled)?;
    let imports = compiled.then(|| Imports::begin(py)).transpose()?;
    if let Some(positions) = positions {
        positions.begin()?;
    }
    let done = work();
    drop(imports);
    if let Some(positions) = positions {
        positions.end();
    }
    Ok((reads.end()?, done))
}

pub fn expected(what: &str) -> PyErr {
    PyTypeError::new_err(format!("expected {what}"))
}

// an exception of the user's code, or MLX's error for a traced array
fn stop(py: Python<'_>, error: PyErr) -> Stop {
    if let Ok(Some(module)) = Imports::first(&error, py) {
        return Stop::Becomes(format!("it imports {module} for the first time"));
    }
    let place = |name: &str| -> PyResult<Option<String>> {
        let module = py.import("faststep._step._suspect")?;
        let place = module.getattr(name)?;
        place
            .call1((error.value(py), error.traceback(py)))?
            .extract()
    };
    match (place("read_at"), place("refused_at")) {
        (Ok(Some(place)), _) => Stop::reads(&place),
        (Ok(None), Ok(Some(place))) => Stop::Refused(place, error),
        (Ok(None), Ok(None)) => Stop::Raised(error),
        (Err(other), _) | (_, Err(other)) => Stop::Raised(other),
    }
}
