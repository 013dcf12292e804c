//! One update by an optimizer of the user's own: its code is called with tracers, and the graph that comes of it is that of a trace of
//! its own; or the call is left out, and the graph made again within the trace of the step.
use std::{cell::RefCell, rc::Rc};

use faststep::engine::{
    array::{self, id},
    called, Replayed, Role, Roots, Tracers, UpdateCall, UpdateOutput,
};
use mlx_rs::{error::Result as MlxResult, Array};
use pyo3::{
    exceptions::{PyRuntimeError, PyTypeError, PyValueError},
    intern,
    prelude::*,
    types::{PyDict, PyList},
};

use super::{
    call::Graphs,
    graph::{Form, KnownGraph},
};
use crate::{
    mlx::{bridge, errors::mlx, gil::unlocked},
    tree::{paths::dotted, rebuild::rebuild, slot::Slot, walk::Scope, Tree},
    watch::{Calls, WatchList},
};

/// The number of graphs of updates that are kept.
const MOST: usize = 16;
/// New graphs in a row behind which none is looked for any more.
const NEVER_AGAIN: usize = 16;

/// A graph, and the arrays that it ends in.
type Found = (Rc<KnownGraph>, Vec<Array>);
/// The arrays that an update has written, with their numbers, and the places of all.
type Written<'py> = (Vec<(usize, Array)>, Vec<Slot<'py>>);
/// The form of a call's outputs, these outputs, and the places of the optimizer's arrays, if the engine has these.
type Left<'py> = (Form, Vec<Array>, Option<Vec<Slot<'py>>>);

/// The graphs of a step's updates.
#[derive(Default)]
pub struct Updates {
    graphs: Graphs,
    new_in_a_row: usize,
}

impl Updates {
    /// The graph of a call, with the arrays that it ends in, and whether it is a new one; none where graphs are not kept any more.
    fn find(
        &mut self,
        py: Python<'_>,
        tracers: &Tracers,
        (form, roots): (&Form, &Roots),
        key: &Array,
    ) -> MlxResult<Option<(Found, bool)>> {
        if self.new_in_a_row >= NEVER_AGAIN {
            return Ok(None);
        }
        let follows = |graph: &KnownGraph| graph.follows(tracers, form, roots);
        let mut found = self.graphs.find(follows, key)?;
        let mut is_new = false;
        if found.is_none() {
            unlocked(py, || tracers.settle(roots, form.in_engine))?;
            let new = KnownGraph::new(tracers, form, roots)?;
            found = self.graphs.find(|graph| graph.equals(&new), key)?;
            is_new = found.is_none();
            if is_new {
                found = Some(self.graphs.add(new, key)?);
                self.graphs.keep(MOST);
            }
        }
        self.new_in_a_row = if is_new { self.new_in_a_row + 1 } else { 0 };
        Ok(found.map(|found| (found, is_new)))
    }
}

/// The graph of an update, with which its calls can be left out.
pub struct LeftOutUpdate {
    /// The graph.
    pub graph: Rc<KnownGraph>,
    /// The arrays that it ends in beside those that it is given: the same at each call.
    pub leaves: Vec<Array>,
}

impl LeftOutUpdate {
    /// Return whether the graphs of both can be compared: in a window the optimizer has its arrays itself while it is called.
    pub fn is_comparable(&self, other: &Self) -> bool {
        self.graph.form.in_engine == other.graph.form.in_engine
    }

    /// Return whether both compute the same.
    pub fn is(&self, other: &Self) -> bool {
        let leaves = self.leaves.iter().map(id);
        Rc::ptr_eq(&self.graph, &other.graph) && leaves.eq(other.leaves.iter().map(id))
    }
}

/// A called update.
pub struct CalledUpdate<'py> {
    /// Its graph; none where it is evaluated by itself.
    pub graph: Option<Rc<KnownGraph>>,
    /// The arrays that the graph ends in.
    pub leaves: Vec<Array>,
    /// The places of the optimizer's arrays, with the objects of before, if the engine has these.
    pub state: Option<Vec<Slot<'py>>>,
    form: Form,
    roots: Vec<Array>,
    held: Vec<Array>,
}

impl CalledUpdate<'_> {
    // by operations that MLX has compiled: whoever holds an array of the call has its value
    fn evaluate(&mut self, values: Replayed) -> MlxResult<()> {
        let seen = || self.roots.iter().chain(&self.held);
        called::detach(seen());
        for (array, value) in seen().zip(values.roots.iter().chain(&values.held)) {
            called::fill(array, value)?;
        }
        let first = self.form.given.0 + self.form.others.len();
        let first = values.roots.into_iter().take(first);
        self.roots.splice(..first.len(), first);
        Ok(())
    }

    /// Return whether somebody holds an array that it has computed, beside the optimizer.
    pub fn keeps(&self) -> bool {
        !self.held.is_empty()
    }

    /// The way in which its part computes it.
    pub fn way(&mut self) -> UpdateWay {
        match &self.graph {
            Some(graph) => UpdateWay::Graph(graph.clone(), None),
            None => UpdateWay::Arrays(RefCell::new(Some(self.take_arrays()))),
        }
    }

    /// The outputs, where there is no graph.
    fn take_arrays(&mut self) -> UpdateOutput {
        let held = std::mem::take(&mut self.held);
        let mut made = named(&self.form, std::mem::take(&mut self.roots), held);
        if !self.form.in_engine {
            let state = std::mem::take(&mut made.state).into_iter();
            made.kept.splice(..0, state.map(|(_, array)| array));
        }
        made
    }

    /// Give arrays that somebody holds their values.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn fill(&self, values: &[Array]) -> MlxResult<()> {
        let mut pairs = self.held.iter().zip(values);
        pairs.try_for_each(|(array, value)| called::fill(array, value))
    }
}

/// The update of a part that is traced.
pub enum UpdateWay {
    /// By a graph, whose leaves are the arrays of the model behind its own; or those that are given here.
    Graph(Rc<KnownGraph>, Option<Vec<Array>>),
    /// As the call has given it.
    Arrays(RefCell<Option<UpdateOutput>>),
    /// The optimizer is called.
    Call(Box<Update>),
    /// There is none.
    Nothing,
}

impl UpdateWay {
    /// The outputs of an update.
    pub fn output(
        &mut self,
        optimizer: &Bound<'_, PyAny>,
        call: &UpdateCall,
        known: &mut Updates,
    ) -> PyResult<UpdateOutput> {
        match self {
            Self::Graph(graph, leaves) => replayed(graph, leaves.as_deref(), call).map_err(mlx),
            Self::Arrays(arrays) => arrays
                .take()
                .ok_or_else(|| expected("its arrays to be evaluated once")),
            Self::Call(update) => Ok(update.call(optimizer, call, known)?.take_arrays()),
            Self::Nothing => Err(expected("a part that has one")),
        }
    }
}

// the outputs of an update over other arrays
fn replayed(
    graph: &KnownGraph,
    leaves: Option<&[Array]>,
    call: &UpdateCall,
) -> MlxResult<UpdateOutput> {
    let count = graph.form.given.1.min(call.others.len());
    let (others, behind) = call.others.split_at(count);
    let given = [call.parameters, others, call.gradients, call.state].concat();
    let no_key = array::hollow();
    let key = call.key.unwrap_or(&no_key);
    let made = graph.replay(&given, leaves.unwrap_or(behind), key)?;
    Ok(named(&graph.form, made.roots, made.held))
}

// the outputs of an update by name
fn named(form: &Form, roots: Vec<Array>, held: Vec<Array>) -> UpdateOutput {
    let mut roots = roots.into_iter();
    let parameters = roots.by_ref().take(form.given.0).collect();
    let others = form.others.iter().copied().zip(roots.by_ref()).collect();
    let state = form.state.iter().copied().zip(roots.by_ref()).collect();
    let key = form.key.then(|| roots.next()).flatten();
    UpdateOutput {
        parameters,
        state,
        others,
        key,
        kept: held,
    }
}

/// Observations of a called update, for one that may be left out.
#[derive(Default)]
pub struct Observed {
    /// The update that can be left out; none where its graph is not known yet.
    pub update: Option<LeftOutUpdate>,
    /// The optimizer before the update, then as the update has left it.
    pub tree: Option<Tree>,
    /// Why it cannot be left out.
    pub reason: Option<String>,
}

/// Objects of an update by the optimizer's own code.
pub struct Update {
    /// The model.
    pub model: Py<PyAny>,
    /// `mx.random`'s key list.
    pub key_list: Py<PyList>,
    /// The model's trainable parameters as a tree.
    pub trainable: Py<PyAny>,
    /// The role of each array slot of the model, and the path to it.
    pub roles: Rc<Vec<(Role, Vec<String>)>>,
    /// The function of the model and the gradients that is called before the optimizer; it returns those that the optimizer takes.
    pub transform: Option<Rc<Py<PyAny>>>,
    /// True if there is a compiler, and it may be used.
    pub compiles: bool,
    /// True if the engine has the optimizer's arrays.
    pub in_engine: bool,
    /// The list by which the call is watched.
    pub watched: Option<Rc<WatchList>>,
    /// Observations of the call; none where they are not asked for.
    pub observed: Option<Observed>,
}

fn expected(what: &str) -> PyErr {
    PyRuntimeError::new_err(format!("the update of the optimizer: expected {what}"))
}

// gradients that a function of the user's has returned
fn taken(gradients: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
    if gradients.is_instance_of::<PyDict>() {
        return Ok(gradients);
    }
    Err(PyTypeError::new_err(format!(
        "transform: expected the dict of gradients that the optimizer takes, got {}",
        gradients.get_type().name()?
    )))
}

// tracers of what an update is called with, and the optimizer with its own arrays
struct Given<'py> {
    tracers: Tracers,
    arrays: Vec<Array>,
    counts: (usize, usize, usize), // parameters, other arrays of the model, gradients
    state: Vec<Slot<'py>>,
    in_engine: bool, // its arrays are those that the engine has
}

impl<'py> Given<'py> {
    fn new(optimizer: &Bound<'py, PyAny>, call: &UpdateCall, update: &Update) -> PyResult<Self> {
        let state = if update.compiles {
            Tree::slots(optimizer)?
        } else {
            Vec::new()
        };
        let own = state.iter().filter_map(|slot| bridge::get(&slot.object));
        let own: Vec<Array> = own.collect();
        let is_engines = || own.iter().map(id).eq(call.state.iter().map(id));
        let in_engine = update.compiles && update.in_engine && is_engines();
        let arrays = [call.parameters, call.others, call.gradients, &own].concat();
        Ok(Self {
            tracers: Tracers::new(&arrays).map_err(mlx)?,
            arrays,
            counts: (
                call.parameters.len(),
                call.others.len(),
                call.gradients.len(),
            ),
            state,
            in_engine,
        })
    }

    fn of_role(&self, role: Role) -> Option<&Array> {
        let (parameters, others, _) = self.counts;
        match role {
            Role::Parameter(at) => self.tracers.arrays().get(..parameters)?.get(at),
            Role::Other(at) => self.tracers.arrays()[parameters..][..others].get(at),
        }
    }

    fn gradients(&self) -> &[Array] {
        let (parameters, others, gradients) = self.counts;
        &self.tracers.arrays()[parameters + others..][..gradients]
    }

    fn of_state(&self) -> &[Array] {
        let (parameters, others, gradients) = self.counts;
        &self.tracers.arrays()[parameters + others + gradients..]
    }

    // put tracers into the places of the optimizer's arrays
    fn lend(&self, py: Python<'py>) -> PyResult<()> {
        let mut pairs = self.state.iter().zip(self.of_state());
        pairs.try_for_each(|(slot, tracer)| slot.place.set(&bridge::wrap(py, tracer)?))
    }

    // The arrays that the update has put into the places of the engine's, with their numbers, and all places, where it has left as
    // many arrays of the same forms: the objects of before stand there again, in whose place nobody holds others.
    fn written(&self, mut now: Vec<Slot<'py>>) -> PyResult<Option<Written<'py>>> {
        let arrays: Option<Vec<Array>> = now.iter().map(|slot| bridge::get(&slot.object)).collect();
        let arrays = arrays.filter(|arrays| {
            let mut pairs = arrays.iter().zip(self.of_state());
            let same = |(one, other): (&Array, &Array)| {
                one.shape() == other.shape() && one.dtype() == other.dtype()
            };
            self.in_engine && arrays.len() == self.state.len() && pairs.all(same)
        });
        let Some(arrays) = arrays else {
            return Ok(None);
        };
        for (slot, before) in now.iter_mut().zip(&self.state) {
            slot.place.set(&before.object)?;
            slot.object = before.object.clone();
        }
        let pairs = arrays.into_iter().zip(self.of_state()).enumerate();
        let changed = pairs.filter(|(_, (array, tracer))| id(array) != id(tracer));
        let changed = changed.map(|(at, (array, _))| (at, array)).collect();
        Ok(Some((changed, now)))
    }

    // put the optimizer's own objects back where the update has left their tracers
    fn take_back(&self) -> PyResult<()> {
        for (slot, tracer) in self.state.iter().zip(self.of_state()) {
            let now = slot.place.get()?.as_ref().and_then(bridge::id);
            if now == Some(id(tracer)) {
                slot.place.set(&slot.object)?;
            }
        }
        Ok(())
    }
}

impl Update {
    /// Update with these gradients, lazily: a graph, if the engine has the optimizer's arrays and the update keeps no others; else
    /// arrays.
    pub fn call<'py>(
        &mut self,
        optimizer: &Bound<'py, PyAny>,
        call: &UpdateCall,
        known: &mut Updates,
    ) -> PyResult<CalledUpdate<'py>> {
        let py = optimizer.py();
        if let Some(observed) = &mut self.observed {
            observed.tree = Some(Tree::record(optimizer, Scope::Whole)?.0);
        }
        let given = Given::new(optimizer, call, self)?;
        let mut made = None;
        called::in_tracing(&mut || made = Some(self.traced(optimizer, call, &given)))
            .map_err(mlx)?;
        let (mut made, roots) = made.ok_or_else(|| expected("MLX to call it"))??;
        let no_key = array::hollow();
        let key = call.key.unwrap_or(&no_key);
        let found = if self.compiles {
            let graph = (&made.form, &roots);
            known.find(py, &given.tracers, graph, key).map_err(mlx)?
        } else {
            None
        };
        made.roots = roots.arrays;
        if let Some(((graph, leaves), is_new)) = found {
            made.held = graph.take_held().map_err(mlx)?;
            if !is_new {
                let found = (graph.clone(), leaves.clone());
                let keeps = !made.held.is_empty();
                self.observe(optimizer, given.tracers.are_read(), found, keeps)?;
            }
            if made.form.in_engine {
                called::detach(made.roots.iter().chain(&made.held));
                made.roots.clear();
                (made.graph, made.leaves) = (Some(graph), leaves);
            } else {
                let values = graph.run(&given.arrays, &leaves, key).map_err(mlx)?;
                made.evaluate(values).map_err(mlx)?;
            }
        }
        given.tracers.end();
        Ok(made)
    }

    // the outputs of a call: parameters, other arrays of the model, the optimizer's, and the random key
    fn traced<'py>(
        &mut self,
        optimizer: &Bound<'py, PyAny>,
        call: &UpdateCall,
        given: &Given<'py>,
    ) -> PyResult<(CalledUpdate<'py>, Roots)> {
        let py = optimizer.py();
        let (model, keys) = (self.model.bind(py), self.key_list.bind(py).clone());
        let slots = Tree::slots(model)?;
        if slots.len() < self.roles.len() {
            return Err(expected("a model with the arrays that it had"));
        }
        let old_key = keys.get_item(0)?;
        let mut firsts = Vec::with_capacity(self.roles.len());
        for (slot, (role, _)) in slots.iter().zip(self.roles.iter()) {
            let now = slot.place.get()?;
            let is_first = now.is_some_and(|now| now.is(&slot.object)); // a module may stand in the model twice
            firsts.push(is_first);
            if let Some(tracer) = given.of_role(*role).filter(|_| is_first) {
                slot.place.set(&bridge::wrap(py, tracer)?)?;
            }
        }
        if let Some(key) = call.key {
            keys.set_item(0, bridge::wrap(py, key)?)?;
        }
        let first = bridge::id(&keys.get_item(0)?);
        given.lend(py)?;
        let updated = self.update(optimizer, given);
        let left = updated.and_then(|()| self.left(optimizer, (&slots, &firsts), given));
        given.take_back()?;
        for slot in slots.iter().take(self.roles.len()) {
            slot.place.set(&slot.object)?;
        }
        let key = keys.get_item(0)?;
        keys.set_item(0, old_key)?;
        let (mut form, mut arrays, state) = left?;
        form.key = bridge::id(&key) != first;
        if form.key {
            if call.key.is_none() {
                return Err(PyValueError::new_err(format!(
                    "the optimizer ({}) draws random numbers in its update, which a window cannot repeat: expected accumulate=1",
                    optimizer.get_type().fully_qualified_name()?
                )));
            }
            arrays.extend(bridge::get(&key));
        }
        let results = if form.in_engine { 0 } else { arrays.len() };
        let made = CalledUpdate {
            graph: None,
            leaves: Vec::new(),
            state,
            form,
            roots: Vec::new(),
            held: Vec::new(),
        };
        Ok((made, Roots { arrays, results }))
    }

    fn update(&mut self, optimizer: &Bound<'_, PyAny>, given: &Given<'_>) -> PyResult<()> {
        let py = optimizer.py();
        let mut gradients = given.gradients().iter();
        let gradients = rebuild(self.trainable.bind(py), &mut |_| {
            let array = gradients.next();
            bridge::wrap(
                py,
                array.ok_or_else(|| expected("as many gradients as parameters"))?,
            )
        })?;
        let calls = self.watched.as_ref().map(|list| Calls::begin(py, list));
        let calls = calls.transpose()?;
        let model = self.model.bind(py);
        let transformed = match &self.transform {
            Some(transform) => transform.bind(py).call1((model, gradients)).and_then(taken),
            None => Ok(gradients),
        };
        let updated = transformed.and_then(|gradients| {
            optimizer.call_method1(intern!(py, "update"), (model, gradients))
        });
        if let Some(calls) = calls {
            let unknown = calls.end(py)?;
            if let Some(observed) = &mut self.observed {
                observed.reason = unknown;
            }
        }
        updated.map(drop)
    }

    // the parameters, other arrays of the model that are others now, and the optimizer's that are others or yet to be computed
    fn left<'py>(
        &self,
        optimizer: &Bound<'py, PyAny>,
        (slots, firsts): (&[Slot<'_>], &[bool]),
        given: &Given<'py>,
    ) -> PyResult<Left<'py>> {
        let mut parameters: Vec<Option<Array>> = vec![None; given.counts.0];
        let mut others = Vec::new();
        for ((slot, is_first), (role, path)) in slots.iter().zip(firsts).zip(self.roles.iter()) {
            let now = slot.place.get()?.as_ref().and_then(bridge::get);
            let Some(now) = now else {
                return Err(expected(&format!(
                    "it to leave {} an mx.array",
                    dotted(path)
                )));
            };
            match role {
                Role::Parameter(at) => parameters[*at] = Some(now),
                Role::Other(at) => {
                    if *is_first && given.of_role(*role).map(id) != Some(id(&now)) {
                        others.push((*at, now));
                    }
                }
            }
        }
        let parameters: Option<Vec<Array>> = parameters.into_iter().collect();
        let mut arrays =
            parameters.ok_or_else(|| expected("it to leave the model its parameters"))?;
        let (others, values): (Vec<_>, Vec<_>) = others.into_iter().unzip();
        arrays.extend(values);
        let written = given.written(Tree::slots(optimizer)?)?;
        let in_engine = written.is_some();
        let (state, places) = if let Some((state, places)) = written {
            (state, Some(places))
        } else {
            given.take_back()?;
            (pending(&Tree::slots(optimizer)?), None)
        };
        let (state, values): (Vec<_>, Vec<_>) = state.into_iter().unzip();
        arrays.extend(values);
        let form = Form {
            given: given.counts,
            others,
            state,
            in_engine,
            ..Form::default()
        };
        Ok((form, arrays, places))
    }

    // note whether all that the update reads and writes is known
    fn observe(
        &mut self,
        optimizer: &Bound<'_, PyAny>,
        is_read: bool,
        (graph, leaves): (Rc<KnownGraph>, Vec<Array>),
        keeps: bool,
    ) -> PyResult<()> {
        let Some(observed) = &mut self.observed else {
            return Ok(());
        };
        let (tree, _) = Tree::record(optimizer, Scope::Whole)?;
        let before = observed.tree.take();
        let reason = if is_read {
            "reads the value of an array"
        } else if keeps {
            "keeps an array in another place than the optimizer"
        } else if !before.is_some_and(|before| tree.equals(&before, optimizer.py())) {
            "changes what the optimizer keeps beside arrays"
        } else {
            observed.update = Some(LeftOutUpdate { graph, leaves });
            observed.tree = Some(tree);
            return Ok(());
        };
        observed.reason.get_or_insert_with(|| reason.into());
        Ok(())
    }
}

// the arrays that are yet to be computed, with the numbers of their slots
fn pending(slots: &[Slot<'_>]) -> Vec<(usize, Array)> {
    let arrays = slots.iter().enumerate();
    let arrays = arrays.filter_map(|(at, slot)| Some((at, bridge::get(&slot.object)?)));
    arrays.filter(|(_, array)| array::is_lazy(array)).collect()
}
