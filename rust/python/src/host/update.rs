//! One update by an optimizer of the user's own: its code is called with tracers, and the graph that comes of it is compiled; or the
//! call is left out, and the graph made again within the trace of the step.
use std::rc::Rc;

use faststep::engine::{
    array::{self, id},
    called, Role, Roots, Tracers, UpdateCall, UpdateOutput,
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
            unlocked(py, || tracers.settle(roots, false))?;
            let new = KnownGraph::new(tracers, form, roots)?;
            found = self.graphs.find(|graph| graph.equals(&new), key)?;
            is_new = found.is_none();
            if is_new {
                self.graphs.add(new, key)?;
                self.graphs.keep(MOST);
                found = self.graphs.find(follows, key)?; // compiled from the first call on: all calls have the same bits
            }
        }
        self.new_in_a_row = if is_new { self.new_in_a_row + 1 } else { 0 };
        Ok(found.map(|found| (found, is_new)))
    }
}

/// The graph of an update, with which its calls can be left out.
pub struct LeftOutUpdate {
    graph: Rc<KnownGraph>,
    /// The arrays that it ends in beside those that it is given: the same at each call.
    pub leaves: Vec<Array>,
    state: Vec<usize>, // the numbers of the optimizer's arrays that it writes
}

impl LeftOutUpdate {
    /// Return whether both compute the same.
    pub fn is(&self, other: &Self) -> bool {
        let leaves = self.leaves.iter().map(id);
        Rc::ptr_eq(&self.graph, &other.graph)
            && leaves.eq(other.leaves.iter().map(id))
            && self.state == other.state
    }

    /// The outputs of an update over other arrays.
    fn outputs(&self, call: UpdateCall) -> MlxResult<UpdateOutput> {
        let given = [call.parameters, call.others, call.gradients, call.state].concat();
        let no_key = array::hollow();
        let key = call.key.unwrap_or(&no_key);
        let form = &self.graph.form;
        let made = self.graph.replay(&given, &self.leaves, key)?;
        let mut made = made.roots.into_iter();
        let parameters = made.by_ref().take(call.parameters.len()).collect();
        let others = form.others.iter().copied().zip(made.by_ref()).collect();
        let state = self.state.iter().copied().zip(made.by_ref()).collect();
        Ok(UpdateOutput {
            parameters,
            state,
            others,
            key: made.next(),
            ..UpdateOutput::default()
        })
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
    /// In place of a call.
    pub left_out: Option<Rc<LeftOutUpdate>>,
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
}

impl<'py> Given<'py> {
    fn new(optimizer: &Bound<'py, PyAny>, call: &UpdateCall, compiles: bool) -> PyResult<Self> {
        let state = if compiles {
            Tree::slots(optimizer)?
        } else {
            Vec::new()
        };
        let own = state.iter().filter_map(|slot| bridge::get(&slot.object));
        let own: Vec<Array> = own.collect();
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
    /// Update with these gradients, and return what has become of the model and of the optimizer's state.
    pub fn call(
        &mut self,
        py: Python<'_>,
        optimizer: &Bound<'_, PyAny>,
        call: UpdateCall,
        known: &mut Updates,
    ) -> PyResult<UpdateOutput> {
        if let Some(left_out) = &self.left_out {
            return left_out.outputs(call).map_err(mlx);
        }
        if let Some(observed) = &mut self.observed {
            observed.tree = Some(Tree::record(optimizer, Scope::Whole)?.0);
        }
        let given = Given::new(optimizer, &call, self.compiles)?;
        let mut made = None;
        called::in_tracing(&mut || made = Some(self.traced(optimizer, &call, &given)))
            .map_err(mlx)?;
        let (form, mut roots) = made.ok_or_else(|| expected("MLX to call it"))??;
        let no_key = array::hollow();
        let key = call.key.unwrap_or(&no_key);
        let mut held = Vec::new();
        let found = if self.compiles {
            let graph = (&form, &roots);
            known.find(py, &given.tracers, graph, key).map_err(mlx)?
        } else {
            None
        };
        if let Some(((graph, leaves), is_new)) = found {
            held = graph.take_held().map_err(mlx)?;
            let made = graph.run(&given.arrays, &leaves, key).map_err(mlx)?;
            if !is_new {
                let is_read = given.tracers.are_read();
                self.observe(optimizer, is_read, (graph, leaves), !held.is_empty())?;
            }
            let seen = || roots.arrays.iter().chain(&held);
            called::detach(seen());
            for (array, value) in seen().zip(made.roots.iter().chain(&made.held)) {
                called::fill(array, value).map_err(mlx)?;
            }
            let first = form.given.0 + form.others.len();
            let first = made.roots.into_iter().take(first);
            roots.arrays.splice(..first.len(), first);
        }
        given.tracers.end();
        let mut arrays = roots.arrays.into_iter();
        let parameters = arrays.by_ref().take(form.given.0).collect();
        let others = form.others.iter().copied().zip(arrays.by_ref()).collect();
        let key = if form.key { arrays.next_back() } else { None };
        Ok(UpdateOutput {
            parameters,
            others,
            key,
            kept: arrays.chain(held).collect(),
            ..UpdateOutput::default()
        })
    }

    // the outputs of a call: parameters, other arrays of the model, those that the optimizer keeps and that are yet to be computed,
    // and the random key
    fn traced<'py>(
        &mut self,
        optimizer: &Bound<'py, PyAny>,
        call: &UpdateCall,
        given: &Given<'py>,
    ) -> PyResult<(Form, Roots)> {
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
        given.take_back()?;
        let left = updated.and_then(|()| self.left(optimizer, (&slots, &firsts), given));
        for slot in slots.iter().take(self.roles.len()) {
            slot.place.set(&slot.object)?;
        }
        let key = keys.get_item(0)?;
        keys.set_item(0, old_key)?;
        let (mut form, mut arrays) = left?;
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
        let results = arrays.len();
        Ok((form, Roots { arrays, results }))
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

    // the parameters, other arrays of the model that are others now, and what the optimizer keeps that is yet to be computed
    fn left(
        &self,
        optimizer: &Bound<'_, PyAny>,
        (slots, firsts): (&[Slot<'_>], &[bool]),
        given: &Given<'_>,
    ) -> PyResult<(Form, Vec<Array>)> {
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
        let before = arrays.len();
        let state = pending(&Tree::slots(optimizer)?);
        arrays.extend(state.into_iter().map(|(_, array)| array));
        let form = Form {
            given: given.counts,
            aux: arrays.len() - before,
            others,
            ..Form::default()
        };
        Ok((form, arrays))
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
        let (tree, slots) = Tree::record(optimizer, Scope::Whole)?;
        let before = observed.tree.take();
        let reason = if is_read {
            "reads the value of an array"
        } else if keeps {
            "keeps an array in another place than the optimizer"
        } else if !before.is_some_and(|before| tree.equals(&before, optimizer.py())) {
            "changes what the optimizer keeps beside arrays"
        } else {
            let state = pending(&slots).into_iter().map(|(at, _)| at).collect();
            observed.update = Some(LeftOutUpdate {
                graph,
                leaves,
                state,
            });
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
