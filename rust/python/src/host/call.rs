//! One call of the loss with tracers: what it returned, the graph that came of it, and the arrays that the graph ends in.
use std::rc::Rc;

use faststep::engine::{
    array::{self, id},
    called, Differentiated, Role, Roots, Tensor, Tracers,
};
use mlx_rs::{error::Result as MlxResult, Array, Dtype};
use pyo3::{
    exceptions::{PyRuntimeError, PyTypeError, PyValueError},
    prelude::*,
    types::{PyList, PyTuple},
};

use super::{
    given::Given,
    graph::{named, Form, KnownGraph},
    lent::{Assigned, Lent},
    LentArguments,
};
use crate::{
    mlx::{bridge, classes::has_own_methods, errors::mlx},
    store::{ModelSignature, Moved, Shards},
    tree::{paths::dotted, rebuild::rebuild, slot::Slot},
};

/// The graphs of a step's loss, the one used last first.
#[derive(Default)]
pub struct Graphs {
    known: Vec<Rc<KnownGraph>>,
    made: usize,
}

impl Graphs {
    /// The number of those that have been made.
    pub fn made(&self) -> usize {
        self.made
    }

    /// Forget all but the most recent ones.
    pub fn keep(&mut self, most: usize) {
        self.known.truncate(most);
    }

    fn use_again(&mut self, at: usize) -> Rc<KnownGraph> {
        let found = self.known.remove(at);
        self.known.insert(0, found.clone());
        found
    }

    pub(super) fn find(
        &mut self,
        is: impl Fn(&KnownGraph) -> MlxResult<bool>,
        key: &Array,
    ) -> MlxResult<Option<(Rc<KnownGraph>, Vec<Array>)>> {
        for at in 0..self.known.len() {
            if is(&self.known[at])? {
                if let Some(leaves) = self.known[at].take_leaves(key)? {
                    return Ok(Some((self.use_again(at), leaves)));
                }
            }
        }
        Ok(None)
    }

    pub(super) fn add(
        &mut self,
        mut graph: KnownGraph,
        key: &Array,
    ) -> MlxResult<(Rc<KnownGraph>, Vec<Array>)> {
        self.made += 1;
        graph.keep(self.made)?;
        let leaves = graph.take_leaves(key)?.unwrap_or_default();
        let graph = Rc::new(graph);
        self.known.insert(0, graph.clone());
        Ok((graph, leaves))
    }
}

/// Inputs of a call of the loss.
pub struct LossInputs<'a, 'py> {
    /// The model.
    pub model: &'a Bound<'py, PyAny>,
    /// The loss function.
    pub loss_fn: &'a Bound<'py, PyAny>,
    /// The user's own arguments: a tuple of the positional ones, and a dict of the named ones.
    pub arguments: &'a Bound<'py, PyTuple>,
    /// The places of the model's arrays.
    pub slots: &'a [Slot<'py>],
    /// Their roles and paths.
    pub roles: &'a [(Role, Vec<String>)],
    /// The model's signature.
    pub signature: &'a ModelSignature,
    /// `mx.random`'s key list.
    pub key_list: &'a Bound<'py, PyList>,
    /// True if the step is run, false if it is planned.
    pub is_step: bool,
    /// True if the loss returns its weight.
    pub weighted: bool,
    /// True if it is computed in another dtype than the parameters'.
    pub mixed: bool,
    /// The shards of a model that other ranks share.
    pub shards: Option<&'a Shards>,
}

/// An array of the model that the loss has put there in another shape or dtype: its place, and the object before.
pub struct Reshaped {
    /// The number of the place.
    pub slot: usize,
    /// The new object.
    pub now: Py<PyAny>,
}

/// One call of the loss.
pub struct Called<'py> {
    /// Its return value.
    pub result: Bound<'py, PyAny>,
    /// The outputs of its graph.
    pub form: Form,
    /// Its graph; none where it is not kept.
    pub graph: Option<Rc<KnownGraph>>,
    /// True if no earlier call had that graph.
    pub is_new: bool,
    /// True if the call could have been left out.
    pub is_check: bool,
    /// The arrays that the graph ends in.
    pub leaves: Vec<Array>,
    /// True if the loss has read the value of an array.
    pub reads: bool,
    /// Arrays of another shape that it has put into the model.
    pub reshaped: Vec<Reshaped>,
    /// New places of the model's arrays, if the loss has put other containers into the model.
    pub moved: Option<Moved<'py>>,
    gradients: Vec<Array>, // of this call; none where its graph is known
    given: Given,
    roots: Roots,
    held: Vec<Array>,
}

impl<'py> Called<'py> {
    /// Call the loss. `graphs`: those to compare with; none: the call is differentiated and evaluated by itself.
    ///
    /// # Errors
    /// An error of the loss, which leaves the model's arrays and the random key as they were.
    pub fn make(
        inputs: &LossInputs<'_, 'py>,
        given: Given,
        graphs: Option<&mut Graphs>,
    ) -> PyResult<Self> {
        let old_key = inputs.key_list.get_item(0)?;
        let mut outcome = None;
        let mut graphs = graphs;
        let mut given = Some(given);
        let done = called::in_tracing(&mut || {
            if let Some(given) = given.take() {
                outcome = Some(Self::call(inputs, given, graphs.take(), &old_key));
            }
        });
        inputs.key_list.set_item(0, old_key)?;
        done.map_err(mlx)?;
        let nothing = || PyRuntimeError::new_err("MLX has not called the loss");
        let called = outcome.ok_or_else(nothing)??;
        called.given.tracers.end();
        Ok(called)
    }

    fn call(
        inputs: &LossInputs<'_, 'py>,
        given: Given,
        graphs: Option<&mut Graphs>,
        old_key: &Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        let py = inputs.model.py();
        let (result, assigned, moved) = call_loss(inputs, &given)?;
        let reads = given.tracers.are_read();
        if reads && inputs.shards.is_some() {
            return Err(PyValueError::new_err(
                "the model is sharded: expected a loss that reads no values (item(), float(), NumPy), for which it would exchange \
                 arrays with the other ranks out of turn: return them beside the loss, and read them behind the step",
            ));
        }
        let (mut form, mut roots) = read(inputs, &given, &result)?;
        let reshaped = note_assigned(
            inputs,
            &given,
            (assigned, moved.as_deref()),
            (&mut form, &mut roots),
        )?;
        let now = key_of(inputs)?;
        let missing = || PyRuntimeError::new_err("there is no random key");
        let key = bridge::get(old_key).ok_or_else(missing)?;
        if id(&now) != id(&key) {
            form.key = true;
            roots.arrays.push(now.clone());
        }
        drop(now);
        inputs.key_list.set_item(0, old_key)?; // or the list would hold the key of the graph
        let mut called = Self {
            result,
            form,
            graph: None,
            is_new: false,
            is_check: false,
            leaves: Vec::new(),
            reads,
            reshaped,
            moved,
            gradients: Vec::new(),
            given,
            roots,
            held: Vec::new(),
        };
        match graphs {
            Some(graphs) => called.compare(py, inputs, graphs, &key)?,
            None => called.differentiate(inputs)?,
        }
        Ok(called)
    }

    // find the graph among those that are known, or make it known
    fn compare(
        &mut self,
        py: Python<'py>,
        inputs: &LossInputs<'_, 'py>,
        graphs: &mut Graphs,
        key: &Array,
    ) -> PyResult<()> {
        let (given, form) = (&self.given, &self.form);
        let found = graphs.find(
            |graph| graph.follows(&given.tracers, form, &self.roots),
            key,
        );
        if let Some(found) = found.map_err(mlx)? {
            return self.is(found).map_err(mlx);
        }
        let settle = || given.tracers.settle(&self.roots, inputs.is_step);
        crate::mlx::gil::unlocked(py, settle).map_err(mlx)?;
        let mut new = KnownGraph::new(&given.tracers, form, &self.roots).map_err(mlx)?;
        if !new.is_custom() {
            if let Some(found) = graphs.find(|graph| graph.equals(&new), key).map_err(mlx)? {
                return self.is(found).map_err(mlx);
            }
        }
        self.differentiate(inputs)?;
        let found = (&self.form, &self.roots);
        new.add_gradients(&self.given.tracers, found, &self.gradients)
            .map_err(mlx)?;
        let known = if new.is_custom() {
            graphs.find(|graph| graph.equals(&new), key).map_err(mlx)?
        } else {
            None
        };
        self.is_new = known.is_none();
        let found = known
            .map_or_else(|| graphs.add(new, key), Ok)
            .map_err(mlx)?;
        self.is(found).map_err(mlx)
    }

    fn is(&mut self, (graph, leaves): (Rc<KnownGraph>, Vec<Array>)) -> MlxResult<()> {
        self.held = graph.take_held()?;
        self.leaves = leaves;
        self.graph = Some(graph);
        Ok(())
    }

    // make the gradients, of which Python functions may compute some: the model has its tracers meanwhile
    fn differentiate(&mut self, inputs: &LossInputs<'_, 'py>) -> PyResult<()> {
        let py = inputs.model.py();
        let given = &self.given;
        if self.form.key {
            if let Some(key) = self.roots.arrays.last() {
                inputs.key_list.set_item(0, bridge::wrap(py, key)?)?;
            }
        }
        let before = key_of(inputs)?;
        let doubled = inputs.signature.is_doubled();
        let lent = Lent::put(py, inputs.slots, inputs.roles, doubled, |role| {
            given.of_role(role)
        })?;
        let made = given.tracers.gradients(&given.parameters, &self.roots);
        let put_back = lent.take_back(None);
        put_back?;
        self.gradients = made.map_err(mlx)?;
        if let Some(shards) = inputs.shards.filter(|shards| shards.same_batch) {
            self.check_replicas(inputs, shards)?;
        }
        let now = key_of(inputs)?;
        if id(&now) != id(&before) {
            // a backward pass has drawn
            if self.form.key {
                self.roots.arrays.pop();
            }
            self.form.key = true;
            self.roots.arrays.push(now);
        }
        Ok(())
    }

    // refuse a loss, and gradients of replicas, that are not the same on all ranks
    fn check_replicas(&self, inputs: &LossInputs<'_, 'py>, shards: &Shards) -> PyResult<()> {
        let (mut leaves, mut names) = (Vec::new(), vec![String::new(); self.gradients.len()]);
        for (role, path) in inputs.roles {
            let name = dotted(path);
            let is_shard = shards.names.contains(&name);
            if is_shard {
                leaves.push(self.given.of_role(*role).clone());
            }
            if let Role::Parameter(at) = role {
                names[*at] = if is_shard { String::new() } else { name };
            }
        }
        let loss = self.roots.arrays.first();
        let all: Vec<Array> = loss.into_iter().chain(&self.gradients).cloned().collect();
        let differ = array::differ_by_rank(&all, &leaves).map_err(mlx)?;
        if differ.first() == Some(&true) {
            return Err(PyValueError::new_err(
                "the model is sharded: expected a loss that is the same on all ranks, got one that is computed from this rank's part \
                 alone: end in a layer that is sharded-to-all, or sum over the ranks with mx.distributed.all_sum",
            ));
        }
        let mut differ = names.iter().zip(differ.iter().skip(1));
        let Some((name, _)) = differ.find(|(name, differs)| **differs && !name.is_empty()) else {
            return Ok(());
        };
        Err(PyValueError::new_err(format!(
            "the model is sharded: expected gradients of {name} that are the same on all ranks, as it is on all of them itself, got \
             those of this rank's part alone, since shards are computed with it: freeze it, or use \
             nn.layers.distributed.sum_gradients(group)(...) of it there, whose gradient is the sum over the ranks",
        )))
    }

    /// Loss and gradients as this call has given them.
    ///
    /// # Errors
    /// When outputs are missing.
    pub fn arrays(&mut self) -> MlxResult<Differentiated> {
        let gradients = std::mem::take(&mut self.gradients);
        let mut made = named(&self.form, self.roots.arrays.clone())?;
        made.output.aux.extend(self.held.iter().cloned());
        Ok(Differentiated { gradients, ..made })
    }

    /// Return whether somebody holds an array that it has computed, beside what it returned.
    pub fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// Let go of the graph, which is made again over the engine's arrays.
    pub fn release(&mut self) {
        self.gradients.clear();
        called::detach(self.results().chain(&self.held));
        self.roots.arrays.truncate(self.roots.results);
        self.given.parameters.clear();
        self.given.tracers = Tracers::default();
    }

    // the arrays that somebody sees, in the order of the engine's outputs
    fn results(&self) -> impl Iterator<Item = &Array> {
        let results = self.roots.arrays[..self.roots.results].iter();
        results.skip(usize::from(self.form.scaled))
    }

    /// Give what the loss returned, and arrays of it that somebody holds, their values: the loss first.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn fill<'a>(&self, values: impl IntoIterator<Item = &'a Array>) -> MlxResult<()> {
        let mut arrays = self.results().chain(&self.held).zip(values);
        arrays.try_for_each(|(array, value)| called::fill(array, value))
    }

    /// Give them lazy values after an error of the engine, over the arrays that there are.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn recover(&self, traced: &[Array], key: &Array) -> MlxResult<()> {
        let Some(graph) = &self.graph else {
            return Ok(());
        };
        let made = graph.replay(traced, &self.leaves, key)?;
        let results = made.roots.iter().skip(usize::from(self.form.scaled));
        self.fill(results.take(self.form.aux + 1).chain(&made.held))
    }
}

fn key_of(inputs: &LossInputs<'_, '_>) -> PyResult<Array> {
    let missing = || PyRuntimeError::new_err("there is no random key");
    bridge::get(&inputs.key_list.get_item(0)?).ok_or_else(missing)
}

// return value, assignments to the model, and new places of the model's arrays
type Outcome<'py> = (Bound<'py, PyAny>, Vec<Assigned<'py>>, Option<Moved<'py>>);

// call the loss with tracers in the places of arrays
fn call_loss<'py>(inputs: &LossInputs<'_, 'py>, given: &Given) -> PyResult<Outcome<'py>> {
    let py = inputs.model.py();
    let doubled = inputs.signature.is_doubled();
    let model = Lent::put(py, inputs.slots, inputs.roles, doubled, |role| {
        given.of_role(role)
    })?;
    let (lent, arguments) =
        match LentArguments::put(inputs.arguments, given.of_batch(), model.ids()) {
            Ok(lent) => lent,
            Err(error) => {
                model.take_back(None)?;
                return Err(error);
            }
        };
    let returned = update_model(inputs, given).and_then(|()| {
        let (all, named) = LentArguments::split(inputs.model, &arguments)?;
        inputs.loss_fn.call(all, Some(&named))
    });
    drop(arguments);
    lent.take_back()?;
    let signature = inputs.signature;
    let moved = signature.moved(inputs.model, inputs.slots, model.ids());
    let places = moved.as_ref().ok().and_then(Option::as_deref);
    let assigned = model.take_back(places)?;
    Ok((returned?, assigned, moved?))
}

// a model with an `update` of its own is given the tracers by that too, as by nn.value_and_grad
fn update_model(inputs: &LossInputs<'_, '_>, given: &Given) -> PyResult<()> {
    if !has_own_methods(inputs.model, &["update"]) {
        return Ok(());
    }
    let mut tracers = given.tracers.arrays().iter();
    let trainable = inputs.signature.trainable.bind(inputs.model.py());
    let tree = rebuild(trainable, &mut |hole| match tracers.next() {
        Some(tracer) => bridge::wrap(hole.py(), tracer),
        None => Ok(hole.clone()),
    })?;
    inputs.model.call_method1("update", (tree,)).map(drop)
}

// the arrays that the loss returned
fn read(
    inputs: &LossInputs<'_, '_>,
    given: &Given,
    returned: &Bound<'_, PyAny>,
) -> PyResult<(Form, Roots)> {
    let first = match returned.cast::<PyTuple>() {
        Ok(tuple) => tuple.get_item(0).ok(),
        Err(_) => Some(returned.clone()),
    };
    let Some(loss) = first.as_ref().and_then(bridge::get) else {
        return Err(PyTypeError::new_err(format!(
            "the loss function: expected a scalar mx.array or a tuple that begins with one, got {}",
            returned.get_type().fully_qualified_name()?
        )));
    };
    if loss.ndim() != 0 {
        return Err(PyValueError::new_err(format!(
            "the loss function: expected a scalar loss, got one of shape {:?}: reduce it with mean() or sum()",
            loss.shape()
        )));
    }
    if !loss.dtype().is_float() {
        return Err(PyValueError::new_err(format!(
            "the loss function: expected a floating loss, got one of {}: an integer has no gradient",
            format!("{:?}", loss.dtype()).to_lowercase()
        )));
    }
    let mut arrays = Vec::new();
    if let Some(scale) = given.scale() {
        let loss = loss
            .as_dtype(Dtype::Float32)
            .and_then(|loss| loss.multiply(scale));
        arrays.push(loss.map_err(mlx)?);
    }
    arrays.push(loss);
    let results = arrays.len();
    if inputs.weighted {
        let (weight, is_number) = read_weight(returned)?;
        if is_number {
            arrays.push(weight);
        }
    }
    if !bridge::is_array(returned) {
        let mut first = true;
        rebuild(returned, &mut |object| {
            if !std::mem::replace(&mut first, false) {
                arrays.extend(bridge::get(object));
            }
            Ok(object.clone())
        })?;
    }
    let form = Form {
        given: (given.parameters.len(), given.others, given.batch),
        scaled: given.scaled,
        weighted: inputs.weighted,
        aux: arrays.len() - results,
        ..Form::default()
    };
    let results = form.results();
    Ok((form, Roots { arrays, results }))
}

// the weight of a batch, and whether it is a number
fn read_weight(returned: &Bound<'_, PyAny>) -> PyResult<(Array, bool)> {
    let second = returned.cast::<PyTuple>().ok();
    let second = second.and_then(|tuple| tuple.get_item(1).ok());
    if let Some(weight) = second.as_ref().and_then(bridge::get) {
        if weight.ndim() == 0 {
            return Ok((weight, false));
        }
        return Err(PyValueError::new_err(format!(
            "the loss function: expected a scalar weight behind the loss, got one of shape {:?}",
            weight.shape()
        )));
    }
    if let Some(weight) = second
        .as_ref()
        .and_then(|weight| weight.extract::<f32>().ok())
    {
        return Ok((Array::from_f32(weight), true));
    }
    Err(PyTypeError::new_err(format!(
        "the loss function: expected (mean loss, weight, ...) with weighted=True, the weight a scalar mx.array or a number, got {}",
        second.unwrap_or_else(|| returned.clone()).get_type().fully_qualified_name()?
    )))
}

// note what the loss has assigned to the model among the outputs; arrays of another shape stay where it has put them
fn note_assigned<'py>(
    inputs: &LossInputs<'_, 'py>,
    given: &Given,
    (assigned, moved): (Vec<Assigned<'py>>, Option<&[Option<Slot<'py>>]>),
    (form, roots): (&mut Form, &mut Roots),
) -> PyResult<Vec<Reshaped>> {
    let mut reshaped = Vec::new();
    let mut parameters: Vec<(usize, Array)> = Vec::new();
    let mut others: Vec<(usize, Array)> = Vec::new();
    for Assigned { slot, object } in assigned {
        let (role, path) = &inputs.roles[slot];
        let tracer = given.of_role(*role);
        let Some(mut array) = bridge::get(&object) else {
            continue;
        };
        if inputs.mixed && array.dtype().is_float() && tracer.dtype().is_float() {
            array = array.as_dtype(tracer.dtype()).map_err(mlx)?;
        }
        let same = Tensor::of(&array) == Tensor::of(tracer);
        let list = match role {
            Role::Parameter(_) if !same => {
                return Err(PyValueError::new_err(format!(
                    "the loss function: expected it to leave {} as {:?} {:?}, which is trained, got {:?} {:?}: freeze it, \
                     `model.freeze(keys=[...])`, or give its name an underscore in front",
                    dotted(path),
                    tracer.dtype(),
                    tracer.shape(),
                    array.dtype(),
                    array.shape()
                )))
            }
            Role::Other(_) if !same => {
                let moved = moved.and_then(|moved| moved[slot].as_ref());
                let place = moved.map_or(&inputs.slots[slot].place, |moved| &moved.place);
                place.set(&object)?;
                let now = object.unbind();
                reshaped.push(Reshaped { slot, now });
                continue;
            }
            Role::Parameter(at) => (&mut parameters, *at),
            Role::Other(at) => (&mut others, *at),
        };
        list.0.retain(|(at, _)| *at != list.1);
        list.0.push((list.1, array));
    }
    form.parameters = parameters.iter().map(|(at, _)| *at).collect();
    form.others = others.iter().map(|(at, _)| *at).collect();
    let all = parameters.into_iter().chain(others);
    roots.arrays.extend(all.map(|(_, array)| array));
    Ok(reshaped)
}
