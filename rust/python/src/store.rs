//! One model and one optimizer: their arrays in the engine, and whether the user has changed them since.
//!
//! Every step of this pair shares the store. The user's objects are the truth: at each call they are walked, and what
//! is not what the last step left is taken over. Uses `optimizer`, `tree` and `mlx`.
mod adopt;
mod detect;
mod first_state;
mod hand_over;
mod kept;
mod known_numbers;
mod lazy;
pub mod moments;
mod moved;
mod native;
pub mod owner;
pub mod registry;
mod values;

use std::{
    collections::{HashMap, HashSet},
    rc::Rc,
    sync::Arc,
    thread::ThreadId,
};

use faststep::engine::{
    precision::Stored, Engine, HeldArrays, Layout, NamedAuxState, Needs, Role, Rule, StageClock,
    Tensor,
};
use mlx_rs::Array;
use pyo3::{
    exceptions::{PyRuntimeError, PyTypeError, PyValueError},
    prelude::*,
    types::{PyList, PyWeakrefReference},
};

use crate::{
    mlx::{
        bridge,
        collector::{Collector, Refers, Visited},
        errors::to_python,
        random::key_list,
    },
    optimizer::members,
    tree::{paths::dotted, slot::Slot, snapshot::Snapshot, text::text, Tree},
};
use lazy::LazyInputs;
use moments::Moments;
pub use moved::Moved;

/// Structure of a model, apart from the values of its arrays.
pub struct ModelSignature {
    /// Tells signatures of one store apart.
    pub id: usize,
    /// Number that models share whose arrays have the same places, roles, shapes and dtypes.
    pub form: usize,
    tree: Tree,
    /// The role of each slot, and the path to it.
    pub roles: Rc<Vec<(Role, Vec<String>)>>,
    /// The tree of trainable parameters, with holes for the arrays.
    pub trainable: Py<PyAny>,
    parameters: Vec<usize>,              // the slot of each
    asked: Option<HashSet<Vec<String>>>, // what is trained, where the model's own code says so: it may say another thing at any call
}

impl Refers for ModelSignature {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.tree.visit(collector)?;
        self.trainable.visit(collector)
    }
}

impl ModelSignature {
    /// Return whether places of the model are one: a module stands in it twice.
    pub fn is_doubled(&self) -> bool {
        !self.tree.doubles().is_empty()
    }

    /// The addresses of the model's modules, dicts and lists, as they were when it was looked at last.
    pub fn containers(&self) -> Rc<Vec<usize>> {
        self.tree.containers()
    }

    /// The path to what the loss has changed in the model beside its arrays; none where all is as it was.
    pub fn changed(&self, model: &Bound<'_, PyAny>) -> PyResult<Option<Vec<String>>> {
        let py = model.py();
        let (now, _) = Tree::of_model(model)?;
        let changed = self.tree.difference(&now, py);
        Ok(changed.or_else(|| self.tree.replaced(&now, py)))
    }

    /// The path to a parameter.
    pub fn path(&self, parameter: usize) -> &[String] {
        &self.roles[self.parameters[parameter]].1
    }

    /// The path to each parameter.
    pub fn paths(&self) -> Vec<Vec<String>> {
        self.parameters
            .iter()
            .map(|&slot| self.roles[slot].1.clone())
            .collect()
    }

    /// Parameters that are at a later place in the model too, and the last parameter there, whose update counts.
    pub fn doubles(&self) -> Vec<(usize, usize)> {
        let roles = self.tree.doubles().iter();
        let roles = roles.map(|&(slot, last)| (self.roles[slot].0, self.roles[last].0));
        let doubles = roles.filter_map(|roles| match roles {
            (Role::Parameter(slot), Role::Parameter(last)) => {
                (slot != last).then_some((slot, last))
            }
            _ => None,
        });
        doubles.collect()
    }

    fn tensors(&self) -> Vec<Tensor> {
        self.parameters
            .iter()
            .map(|&slot| self.tree.tensors()[slot].clone())
            .collect()
    }
}

/// The ranks of a group that update a model's parameters, of which each updates a part.
#[derive(PartialEq, Eq)]
pub struct SharedOut {
    /// By name.
    pub owners: HashMap<String, usize>,
    /// The number of this rank.
    pub rank: usize,
}

impl SharedOut {
    /// The rank that updates each parameter.
    fn owners(&self, signature: &ModelSignature) -> PyResult<Vec<usize>> {
        let paths = signature.paths().into_iter();
        let owners = paths.map(|path| {
            let name = dotted(&path);
            self.owners.get(&name).copied().ok_or_else(|| {
                PyValueError::new_err(format!(
                    "shard_optimizer: {name} was frozen at the first step: make a new Step"
                ))
            })
        });
        owners.collect()
    }
}

/// A model of which each rank of a group has shards.
#[derive(PartialEq, Eq)]
pub struct Shards {
    /// The names of the arrays that are shards.
    pub names: HashSet<String>,
    /// True if all ranks compute the loss of the same batch, with the same random numbers.
    pub same_batch: bool,
}

impl Shards {
    fn of_tensors(&self, signature: &ModelSignature) -> Vec<bool> {
        let paths = signature.paths().into_iter();
        let is_shard = paths.map(|path| self.names.contains(&dotted(&path)));
        is_shard.collect()
    }
}

/// The slots of a call, and what undoes its preparation.
pub struct Prepared<'py> {
    /// The model's array slots.
    pub model: Vec<Slot<'py>>,
    /// The slots of the optimizer's arrays that the engine's state stands for.
    pub state: Vec<Slot<'py>>,
    /// True if several of the model's slots are one.
    pub aliased: bool,
    /// True if parameters have a new layout: the model's arrays are not the engine's yet.
    pub packed: bool,
    /// True if the loss has put other containers into the model: the arrays in these are not the engine's yet.
    pub moved: bool,
    /// The optimizer before it was initialised, if that has just been done.
    pub undo: Option<Snapshot<'py>>,
}

/// An optimizer's options, and those on which the trace of a native one depends beside its rule: schedules.
struct OptionTrees {
    all: Tree,
    rates: Tree,
}

/// The numbers of a native optimizer's options.
#[derive(Default)]
struct Numbers {
    values: Vec<f64>,
    changes: usize,     // how often they have become others, the first ones counted
    arrays: Vec<Array>, // of the values, once they stand in the engine's state
}

/// The state of one model and optimizer.
#[allow(clippy::struct_excessive_bools)] // each is an answer of its own
pub struct Store {
    model: Py<PyWeakrefReference>,
    optimizer: Py<PyWeakrefReference>,
    thread: ThreadId,
    /// `mx.random`'s key list of the thread.
    pub key_list: Py<PyList>,
    models: Vec<Rc<ModelSignature>>,
    current: Option<Rc<ModelSignature>>,
    options: Vec<(usize, OptionTrees)>, // most recent last
    forms: Vec<(usize, Vec<Tensor>)>, // of the optimizer's arrays that a user sets: a rate, say; most recent last
    layouts: Vec<(usize, Rc<Layout>)>, // most recent last
    numbers: Numbers,
    max_norm: Option<(f64, Array)>, // to which gradients are clipped, where that is an input
    next_id: usize,
    /// The values of the model's other arrays.
    pub others: Rc<HeldArrays>,
    /// Parameters and state, once a step has begun.
    pub engine: Option<Engine>,
    /// The dicts of a natively updated optimizer.
    pub moments: Option<Moments>,
    /// The graphs behind what the user gives.
    pub lazy: LazyInputs,
    /// The stage of the calls.
    pub clock: Arc<StageClock>,
    /// The optimizer's update, native or traced, once a step has begun.
    pub rule: Option<Rule>,
    drafts: bool, // arrays that are taken over stay lazy
    mixed: bool,  // the optimizer updates float32 masters
    stored: Stored,
    kept: Option<NamedAuxState>, // by an engine that is gone
    lent: bool,                  // the engine has let go of the optimizer's state
    updated: bool,               // parameters, by an engine that is gone
    takes_state: bool,           // of an optimizer of the user's own
    watches: bool,               // all that it keeps, while its update is left out
    transforms: bool, // the gradients, by a function of the user's: the optimizer is called with what it returns
    shared_out: Option<Rc<SharedOut>>,
    shards: Option<Rc<Shards>>,
}

impl Refers for Store {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.models.visit(collector)?;
        self.current.visit(collector)?;
        self.options.iter().try_for_each(|(_, options)| {
            options.all.visit(collector)?;
            options.rates.visit(collector)
        })
    }
}

fn class_name(object: &Bound<'_, PyAny>) -> PyResult<String> {
    let name = object.get_type().fully_qualified_name()?;
    Ok(text(&name))
}

impl Store {
    /// A store that takes over nothing yet.
    pub fn new(model: &Bound<'_, PyAny>, optimizer: &Bound<'_, PyAny>) -> PyResult<Self> {
        if !crate::mlx::classes::is_module(model) {
            let message = format!("model: expected mlx.nn.Module, got {}", class_name(model)?);
            return Err(PyTypeError::new_err(message));
        }
        if !crate::mlx::classes::is_optimizer(optimizer) {
            let message = format!(
                "optimizer: expected mlx.optimizers.Optimizer, or an object with an update(model, gradients) that keeps its \
                 arrays in attributes, got {0}",
                class_name(optimizer)?
            );
            return Err(PyTypeError::new_err(message));
        }
        Ok(Self {
            model: PyWeakrefReference::new(model)?.unbind(),
            optimizer: PyWeakrefReference::new(optimizer)?.unbind(),
            thread: std::thread::current().id(),
            key_list: key_list(model.py())?.unbind(),
            models: Vec::new(),
            current: None,
            options: Vec::new(),
            next_id: 0,
            others: Rc::default(),
            engine: None,
            moments: None,
            clock: Arc::default(),
            lazy: LazyInputs::default(),
            rule: None,
            forms: Vec::new(),
            layouts: Vec::new(),
            numbers: Numbers::default(),
            max_norm: None,
            drafts: false,
            mixed: false,
            stored: Stored::default(),
            kept: None,
            lent: false,
            updated: false,
            takes_state: false,
            watches: false,
            transforms: false,
            shared_out: None,
            shards: None,
        })
    }

    /// Return whether this is the store of that model and optimizer.
    pub fn is_of(&self, model: &Bound<'_, PyAny>, optimizer: &Bound<'_, PyAny>) -> bool {
        let py = model.py();
        let is = |mine: &Py<PyWeakrefReference>, other: &Bound<'_, PyAny>| {
            mine.bind(py).upgrade().is_some_and(|mine| mine.is(other))
        };
        is(&self.model, model) && is(&self.optimizer, optimizer)
    }

    /// The paths of the parameters that other steps train with other optimizers in the same model.
    pub fn trained_elsewhere(&self, py: Python<'_>) -> Vec<Vec<String>> {
        let model = self.model.bind(py).upgrade();
        model.map_or_else(Vec::new, |model| {
            registry::each_other(|store| {
                let theirs = store.model.bind(py).upgrade();
                let same = theirs.is_some_and(|theirs| theirs.is(&model));
                let (Some(engine), Some(current)) = (&store.engine, store.current.as_ref()) else {
                    return Vec::new();
                };
                let paths = current.paths().into_iter().enumerate();
                let used = paths.filter(|(at, _)| same && !engine.idle().contains(at));
                used.map(|(_, path)| path).collect()
            })
        })
    }

    /// The bytes of the optimizer's state, once a step has begun.
    pub fn optimizer_bytes(&self, py: Python<'_>) -> PyResult<usize> {
        let sum = |arrays: &[Array]| arrays.iter().map(Array::nbytes).sum();
        let of_engine = self.engine.as_ref().map_or(0, |engine| sum(engine.state()));
        match (&self.rule, self.optimizer.bind(py).upgrade()) {
            (Some(Rule::Host), Some(optimizer)) if !self.takes_state => {
                let slots = Tree::slots(&optimizer)?;
                let arrays = slots.iter().filter_map(|slot| bridge::get(&slot.object));
                Ok(of_engine + sum(&arrays.collect::<Vec<_>>()))
            }
            _ => Ok(of_engine),
        }
    }

    /// Return whether the store is of that optimizer, or of one that it is in.
    pub fn is_owner(&self, optimizer: &Bound<'_, PyAny>) -> bool {
        let mine = self.optimizer.bind(optimizer.py()).upgrade();
        mine.is_some_and(|mine| members(&mine).iter().any(|member| member.is(optimizer)))
    }

    /// Make the store that of an optimizer which a step has been given in place of its first one.
    pub fn serve(&mut self, optimizer: &Bound<'_, PyAny>) -> PyResult<()> {
        let mine = self.optimizer.bind(optimizer.py()).upgrade();
        if !mine.is_some_and(|mine| mine.is(optimizer)) {
            self.expose(optimizer.py())?; // the first one keeps its state
            self.optimizer = PyWeakrefReference::new(optimizer)?.unbind();
        }
        Ok(())
    }

    /// An error on every thread but the one that made the store.
    pub fn check_thread(&self) -> PyResult<()> {
        if std::thread::current().id() == self.thread {
            return Ok(());
        }
        Err(PyRuntimeError::new_err(
            "this step belongs to the thread that made it, because MLX's streams and random state do: \
             call it there, or make a Step of its own in this thread",
        ))
    }

    /// The model's signature at the last preparation.
    pub fn signature(&self) -> PyResult<Rc<ModelSignature>> {
        let current = self.current.clone();
        current.ok_or_else(|| PyRuntimeError::new_err("the step has not been prepared"))
    }

    /// The path to the first difference between two signatures of the model, apart from the addresses of its parts.
    pub fn difference(&self, one: usize, other: usize, py: Python<'_>) -> Option<Vec<String>> {
        let tree = |id| Some(&self.models.iter().find(|it| it.id == id)?.tree);
        let differ = one != other;
        differ
            .then(|| tree(one)?.difference(tree(other)?, py))
            .flatten()
    }

    /// The id of the optimizer's options at the last preparation, and that of the forms of the arrays among them.
    pub fn options_id(&self) -> (usize, usize) {
        let options = self.options.last().map_or(0, |(id, _)| *id);
        (options, self.forms.last().map_or(0, |(id, _)| *id))
    }

    /// Return whether the optimizer's options were these at the last preparation.
    pub fn has_options(&self, py: Python<'_>, tree: &Tree) -> bool {
        let last = self.options.last();
        last.is_some_and(|(_, options)| options.all.equals(tree, py))
    }

    /// The id of the layout of the trained tensors, since a step has begun.
    pub fn layout_id(&self) -> usize {
        self.layouts.last().map_or(0, |(id, _)| *id)
    }

    /// Return whether all that an optimizer of the user's own keeps is compared.
    pub fn watches(&self) -> bool {
        self.watches
    }

    /// Return whether the engine has the arrays of an optimizer of the user's own.
    pub fn has_own_state(&self) -> bool {
        self.takes_state && matches!(self.rule, Some(Rule::Host))
    }

    /// Take over the arrays of an optimizer of the user's own, or leave them to it; `watches`: its update is left out. With a function
    /// that transforms the gradients, one of MLX's is such an optimizer, too.
    pub fn set_own_update(
        &mut self,
        py: Python<'_>,
        (takes_state, watches): (bool, bool),
        transforms: bool,
    ) -> PyResult<()> {
        self.watches = watches;
        let is_called = !matches!(self.rule, Some(Rule::Native(_)));
        let moves = is_called && self.takes_state != takes_state;
        self.takes_state = takes_state;
        if moves || self.transforms != transforms {
            self.transforms = transforms;
            self.expose(py)?;
            self.forget()?;
        }
        Ok(())
    }

    /// Have the parameters updated by these ranks, or all by this one.
    pub fn set_shared_out(
        &mut self,
        py: Python<'_>,
        shared_out: Option<&Rc<SharedOut>>,
    ) -> PyResult<()> {
        if self.shared_out.as_ref() != shared_out {
            self.shared_out = shared_out.cloned();
            self.expose(py)?;
            self.forget()?;
        }
        Ok(())
    }

    /// Return whether some of the model's arrays are shards.
    pub fn has_shards(&self) -> bool {
        self.shards.is_some()
    }

    /// Take some of the model's arrays for shards, or none.
    pub fn set_shards(&mut self, py: Python<'_>, shards: Option<&Rc<Shards>>) -> PyResult<()> {
        if self.shards.as_ref() != shards {
            self.shards = shards.cloned();
            self.expose(py)?;
            self.forget()?;
        }
        Ok(())
    }

    /// Take over whatever the user has changed since the last step, for one that needs this beside the optimizer's state.
    pub fn prepare<'py>(
        &mut self,
        model: &Bound<'py, PyAny>,
        optimizer: &Bound<'py, PyAny>,
        needs: Needs,
    ) -> PyResult<Prepared<'py>> {
        let (slots, same) = self.look_at_model(model)?;
        let mixes = std::mem::replace(&mut self.mixed, needs.masters) != needs.masters;
        let stores = std::mem::replace(&mut self.stored, needs.stored) != needs.stored;
        let halves = |engine: &Engine| engine.layout().halves().next().is_some();
        if stores || (mixes && self.engine.as_ref().is_some_and(halves)) {
            self.expose(model.py())?;
            self.forget()?;
        }
        self.look_at_moments(optimizer)?;
        let mut undo = None;
        let state = if let Some(state) = self.look_at_optimizer(model, optimizer)? {
            state
        } else {
            undo = Some(self.adopt(model, optimizer, &slots, needs)?);
            self.state_slots(optimizer)?
        };
        let to_take = if same { &[] } else { &slots[..] };
        let packed = self.take_values(to_take, &state, undo.is_some())? || undo.is_some();
        if let Some(engine) = &mut self.engine {
            let (numbers, given) = match &self.rule {
                Some(Rule::Native(rules)) => (rules.taken(), false),
                _ => (0, !needs.window),
            };
            let needs = Needs {
                numbers,
                given,
                ..needs
            };
            engine.need(needs).map_err(|error| to_python(&error))?;
            self.give_numbers();
        }
        Ok(Prepared {
            aliased: !self.signature()?.tree.doubles().is_empty(),
            packed,
            moved: false,
            model: slots,
            state,
            undo,
        })
    }

    /// Take over what the loss or a schedule has changed of the optimizer since `prepare`: of one of the user's own nothing, which is
    /// called.
    ///
    /// # Errors
    /// Where the optimizer has become another one meanwhile.
    pub fn look_again<'py>(
        &mut self,
        prepared: &mut Prepared<'py>,
        model: &Bound<'py, PyAny>,
        optimizer: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        if let Some(Rule::Host) = self.rule {
            return Ok(());
        }
        let current = self
            .moments
            .as_ref()
            .map(|moments| moments.is_current(optimizer));
        let same = current.transpose()?.unwrap_or(true);
        let state = if same {
            self.look_at_optimizer(model, optimizer)?
        } else {
            None
        };
        let Some(state) = state else {
            return Err(PyRuntimeError::new_err(
                "the loss function: it has put another state or other options into the optimizer that updates it: do that \
                 between the steps",
            ));
        };
        self.take_values(&[], &state, false)?;
        self.give_numbers();
        prepared.state = state;
        Ok(())
    }

    /// The same for a plan: what has not been taken over yet takes no memory, and is to be discarded.
    pub fn prepare_draft<'py>(
        &mut self,
        model: &Bound<'py, PyAny>,
        optimizer: &Bound<'py, PyAny>,
        needs: Needs,
    ) -> PyResult<Prepared<'py>> {
        self.drafts = true;
        let prepared = self.prepare(model, optimizer, needs);
        self.drafts = false;
        prepared
    }
}
