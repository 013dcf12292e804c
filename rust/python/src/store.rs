//! One model and one optimizer: their arrays in the engine, and whether the user has changed them since.
//!
//! Every step of this pair shares the store. The user's objects are the truth: at each call they are walked, and what
//! is not what the last step left is taken over.
use std::{rc::Rc, thread::ThreadId};

use faststep::{
    extras::Needs,
    layout::{Layout, Tensor},
    outputs::Outputs,
    precision::wide,
    step::Engine,
    trace::Rule,
};
use mlx_rs::Array;
use pyo3::{
    exceptions::{PyRuntimeError, PyTypeError},
    intern,
    prelude::*,
    types::{PyAnyMethods, PyList, PyWeakrefReference},
};

use crate::{
    bridge,
    errors::{mlx, to_python},
    extras::Carried,
    host::{dotted, Role},
    moments::Moments,
    native::Native,
    optimizer::{members, native_rule},
    random::key_list,
    tree::Tree,
    walk::{rebuild, Scope, Slot, Snapshot},
};

/// So many signatures of the model, and of the optimizer's options, are remembered; the oldest goes first.
const MAX_SIGNATURES: usize = 64;

/// What a model looks like, apart from the values of its arrays.
pub struct ModelSignature {
    /// Tells signatures of one store apart.
    pub id: usize,
    tree: Tree,
    /// The role of each slot, and the path to it.
    pub roles: Rc<Vec<(Role, Vec<String>)>>,
    /// The tree of trainable parameters, with holes for the arrays.
    pub trainable: Py<PyAny>,
    parameters: Vec<usize>, // the slot of each
}

impl ModelSignature {
    /// The path to each parameter.
    pub fn paths(&self) -> Vec<Vec<String>> {
        self.parameters
            .iter()
            .map(|&slot| self.roles[slot].1.clone())
            .collect()
    }

    fn tensors(&self) -> Vec<Tensor> {
        self.parameters
            .iter()
            .map(|&slot| self.tree.tensors()[slot].clone())
            .collect()
    }
}

/// The slots of a call, and what undoes its preparation.
pub struct Prepared<'py> {
    /// The model's array slots.
    pub model: Vec<Slot<'py>>,
    /// The slots of the optimizer's arrays that the engine's state stands for.
    pub state: Vec<Slot<'py>>,
    /// Whether several of the model's slots are one.
    pub aliased: bool,
    /// Whether parameters have been laid out anew: the model's arrays are not the engine's yet.
    pub packed: bool,
    /// What the optimizer was before it was initialised, if that has just been done.
    pub undo: Option<Snapshot<'py>>,
}

/// The state of one model and optimizer.
pub struct Store {
    model: Py<PyWeakrefReference>,
    optimizer: Py<PyWeakrefReference>,
    thread: ThreadId,
    /// `mx.random`'s key list of the thread.
    pub key_list: Py<PyList>,
    models: Vec<Rc<ModelSignature>>,
    current: Option<Rc<ModelSignature>>,
    options: Vec<(usize, Tree)>, // most recent last
    next_id: usize,
    /// The values of the model's other arrays.
    pub others: Vec<Array>,
    /// Parameters and state, once a step has begun.
    pub engine: Option<Engine>,
    /// The dicts of a natively updated optimizer.
    pub moments: Option<Moments>,
    /// How the optimizer is updated, once a step has begun.
    pub rule: Option<Rule>,
    drafts: bool,             // what is taken over stays lazy
    mixed: bool,              // the optimizer updates float32 masters
    carried: Option<Carried>, // what an engine that is gone has kept
}

// arrays in half precision as float32, in their places
fn widen(slots: &[Slot<'_>]) -> PyResult<()> {
    for slot in slots {
        if let Some(array) = bridge::get(&slot.object).filter(|a| wide(a.dtype()) != a.dtype()) {
            slot.put(&array.as_dtype(wide(array.dtype())).map_err(mlx)?)?;
        }
    }
    Ok(())
}

fn class_name(object: &Bound<'_, PyAny>) -> PyResult<String> {
    Ok(object.get_type().fully_qualified_name()?.to_string())
}

impl Store {
    /// A store that takes over nothing yet.
    pub fn new(model: &Bound<'_, PyAny>, optimizer: &Bound<'_, PyAny>) -> PyResult<Self> {
        if !crate::walk::is_module(model) {
            let message = format!("model: expected mlx.nn.Module, got {}", class_name(model)?);
            return Err(PyTypeError::new_err(message));
        }
        if !crate::walk::is_optimizer(optimizer) {
            let message = format!(
                "optimizer: expected mlx.optimizers.Optimizer, got {}",
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
            others: Vec::new(),
            engine: None,
            moments: None,
            rule: None,
            drafts: false,
            mixed: false,
            carried: None,
        })
    }

    /// Whether this is the store of that model and optimizer.
    pub fn is_of(&self, model: &Bound<'_, PyAny>, optimizer: &Bound<'_, PyAny>) -> bool {
        let py = model.py();
        let is = |mine: &Py<PyWeakrefReference>, other: &Bound<'_, PyAny>| {
            mine.bind(py).upgrade().is_some_and(|mine| mine.is(other))
        };
        is(&self.model, model) && is(&self.optimizer, optimizer)
    }

    /// Whether the store is of that optimizer, or of one that it is in.
    pub fn is_owner(&self, optimizer: &Bound<'_, PyAny>) -> bool {
        let mine = self.optimizer.bind(optimizer.py()).upgrade();
        mine.is_some_and(|mine| members(&mine).iter().any(|member| member.is(optimizer)))
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

    /// The id of the optimizer's options at the last preparation.
    pub fn options_id(&self) -> usize {
        self.options.last().map_or(0, |(id, _)| *id)
    }

    /// Take over whatever the user has changed since the last step, for one that needs this beside the optimizer's state.
    pub fn prepare<'py>(
        &mut self,
        model: &Bound<'py, PyAny>,
        optimizer: &Bound<'py, PyAny>,
        needs: Needs,
    ) -> PyResult<Prepared<'py>> {
        let slots = self.look_at_model(model)?;
        if std::mem::replace(&mut self.mixed, needs.masters) != needs.masters {
            let engine = self.engine.as_ref();
            if engine.is_some_and(|engine| engine.layout().halves().next().is_some()) {
                self.expose(model.py())?;
                self.forget()?;
            }
        }
        self.look_at_moments(optimizer)?;
        let mut undo = None;
        let state = if let Some(state) = self.look_at_optimizer(optimizer)? {
            state
        } else {
            undo = Some(self.adopt(model, optimizer, &slots, needs)?);
            self.state_slots(optimizer)?
        };
        let packed = self.take_values(&slots, &state, undo.is_some())? || undo.is_some();
        if let Some(engine) = &mut self.engine {
            engine.need(needs).map_err(|error| to_python(&error))?;
        }
        Ok(Prepared {
            aliased: self.signature()?.tree.is_aliased(),
            packed,
            model: slots,
            state,
            undo,
        })
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

    /// After a new trace: where an update gave a parameter another dtype, everything is looked at anew.
    pub fn check_layout(&mut self, py: Python<'_>) -> PyResult<()> {
        let Some(engine) = &self.engine else {
            return Ok(());
        };
        let now = engine.parameters().iter().map(Tensor::of);
        if now.ne(engine.layout().tensors().iter().cloned()) {
            self.expose(py)?;
            self.forget()?;
            self.current = None;
        }
        Ok(())
    }

    /// Forget what was taken over, apart from what only the steps keep; the next step takes it over anew.
    pub fn forget(&mut self) -> PyResult<()> {
        if let Some(engine) = self.engine.take() {
            let keep = engine.keep().map_err(|e| to_python(&e))?;
            let carried = Carried::new(self.names()?, keep);
            self.carried = Some(match self.carried.take() {
                Some(before) => carried.with_rest_of(&before), // what is frozen now
                None => carried,
            });
        }
        self.moments = None;
        Ok(())
    }

    /// Forget what a call has taken over that then failed.
    pub fn discard(&mut self) {
        self.engine = None;
        self.moments = None;
    }

    /// What the steps keep beside the optimizer's state; `None`: nothing yet.
    pub fn carried(&self) -> PyResult<Option<Carried>> {
        match &self.engine {
            Some(engine) => {
                let keep = engine.keep().map_err(|e| to_python(&e))?;
                Ok(Some(Carried::new(self.names()?, keep)))
            }
            None => Ok(self.carried.clone()),
        }
    }

    /// Keep something else.
    pub fn carry(&mut self, py: Python<'_>, carried: Carried) -> PyResult<()> {
        self.expose(py)?;
        self.discard();
        self.carried = Some(carried);
        Ok(())
    }

    /// The window has been used up.
    pub fn close_window(&mut self) {
        if let Some(carried) = &mut self.carried {
            carried.close_window();
        }
    }

    /// The number of batches in the window.
    pub fn batches(&self) -> usize {
        match (&self.engine, &self.carried) {
            (Some(engine), _) => engine.batches(),
            (None, Some(carried)) => carried.batches(),
            (None, None) => 0,
        }
    }

    fn names(&self) -> PyResult<Vec<String>> {
        let paths = self.signature()?.paths();
        Ok(paths.iter().map(|path| dotted(path)).collect())
    }

    /// Make `optimizer.state` current.
    pub fn expose(&mut self, py: Python<'_>) -> PyResult<()> {
        match (&mut self.moments, &self.engine) {
            (Some(moments), Some(engine)) => moments.show(py, engine),
            _ => Ok(()),
        }
    }

    fn known(&self) -> Vec<usize> {
        let (Some(current), Some(engine)) = (&self.current, &self.engine) else {
            return Vec::new();
        };
        let id = |array: Option<&Array>| array.map_or(0, faststep::array::id);
        let roles = current.roles.iter().map(|(role, _)| match role {
            Role::Parameter(i) => id(engine.parameters().get(*i)),
            Role::Other(i) => id(self.others.get(*i)),
        });
        roles.collect()
    }

    fn look_at_model<'py>(&mut self, model: &Bound<'py, PyAny>) -> PyResult<Vec<Slot<'py>>> {
        if let Some(current) = &self.current {
            if let Some(slots) = current.tree.check(model, Scope::Whole, &self.known()) {
                return Ok(slots);
            }
        }
        let py = model.py();
        let (tree, slots) = Tree::record(model, Scope::Whole)?;
        let at = self
            .models
            .iter()
            .position(|known| known.tree.equals(&tree, py));
        let signature = match at {
            // the recorded objects are the ones that a fast check will meet again
            Some(at) => {
                let known = self.models.remove(at);
                Rc::new(ModelSignature {
                    id: known.id,
                    tree,
                    roles: known.roles.clone(),
                    trainable: known.trainable.clone_ref(py),
                    parameters: known.parameters.clone(),
                })
            }
            None => Rc::new(self.sign(model, tree)?),
        };
        self.models.push(signature.clone());
        if self.models.len() > MAX_SIGNATURES {
            self.models.remove(0);
        }
        self.switch(py, signature)?;
        Ok(slots)
    }

    fn sign(&mut self, model: &Bound<'_, PyAny>, tree: Tree) -> PyResult<ModelSignature> {
        let py = model.py();
        let trainable = model.call_method0(intern!(py, "trainable_parameters"))?;
        let hole = bridge::wrap(py, &faststep::array::hollow())?;
        let trainable = rebuild(&trainable, &mut |_| Ok(hole.clone()))?;
        let trainable_paths = Tree::record(&trainable, Scope::Whole)?.0.paths(py);
        let trainable_paths: std::collections::HashSet<_> = trainable_paths.into_iter().collect();
        let (mut parameters, mut others) = (Vec::new(), 0);
        let mut roles = Vec::new();
        for (slot, path) in tree.paths(py).into_iter().enumerate() {
            if trainable_paths.contains(&path) {
                roles.push((Role::Parameter(parameters.len()), path));
                parameters.push(slot);
            } else {
                roles.push((Role::Other(others), path));
                others += 1;
            }
        }
        self.next_id += 1;
        Ok(ModelSignature {
            id: self.next_id,
            tree,
            roles: Rc::new(roles),
            trainable: trainable.unbind(),
            parameters,
        })
    }

    // another signature: the engine stays where it trains the same tensors
    fn switch(&mut self, py: Python<'_>, signature: Rc<ModelSignature>) -> PyResult<()> {
        if let Some(old) = &self.current {
            let same = old.paths() == signature.paths()
                && old.tensors() == signature.tensors()
                && old.tree.is_aliased() == signature.tree.is_aliased();
            if !same {
                self.expose(py)?;
                self.forget()?;
            }
        }
        self.others.clear();
        self.current = Some(signature);
        Ok(())
    }

    // nothing in the dicts of a native optimizer's state may have been replaced
    fn look_at_moments(&mut self, optimizer: &Bound<'_, PyAny>) -> PyResult<()> {
        let current = match &self.moments {
            Some(moments) => moments.is_current(optimizer)?,
            None => true,
        };
        if !current {
            self.forget()?;
        }
        Ok(())
    }

    // the optimizer's slots; None when it has to be adopted anew
    fn look_at_optimizer<'py>(
        &mut self,
        optimizer: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Vec<Slot<'py>>>> {
        let Some(engine) = &self.engine else {
            return Ok(None);
        };
        let layout = engine.layout().clone();
        let scope = self.scope();
        let known: Vec<usize> = match scope {
            Scope::Whole => engine.state().iter().map(faststep::array::id).collect(),
            Scope::Options | Scope::Arguments => Vec::new(),
        };
        let tree = self.options.last().map(|(_, tree)| tree);
        if let Some(slots) = tree.and_then(|tree| tree.check(optimizer, scope, &known)) {
            return self.state_or(slots, optimizer);
        }
        let before = tree.map(|tree| tree.tensors().to_vec());
        let (tree, slots) = Tree::record(optimizer, scope)?;
        let same = before.is_some_and(|before| before == tree.tensors());
        self.sign_options(optimizer.py(), tree);
        if let Some(Rule::Native(old)) = &self.rule {
            let rule = native_rule(optimizer);
            let rule = rule.and_then(|rule| old.replaced(rule, layout.tensors()));
            let Some(rules) = rule else {
                return Ok(None); // of a `MultiOptimizer`, predicates may have changed
            };
            self.rule = Some(Rule::Native(Rc::new(rules)));
        } else if !same {
            return Ok(None);
        }
        self.state_or(slots, optimizer)
    }

    fn state_or<'py>(
        &self,
        slots: Vec<Slot<'py>>,
        optimizer: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Vec<Slot<'py>>>> {
        match &self.moments {
            Some(moments) => moments.scalars(optimizer.py()),
            None => Ok(Some(slots)),
        }
    }

    fn scope(&self) -> Scope {
        match self.rule {
            Some(Rule::Native(_)) => Scope::Options,
            Some(Rule::Host) | None => Scope::Whole,
        }
    }

    fn sign_options(&mut self, py: Python<'_>, tree: Tree) {
        let at = self
            .options
            .iter()
            .position(|(_, known)| known.equals(&tree, py));
        let id = if let Some(at) = at {
            self.options.remove(at).0
        } else {
            self.next_id += 1;
            self.next_id
        };
        self.options.push((id, tree));
        if self.options.len() > MAX_SIGNATURES {
            self.options.remove(0);
        }
    }

    // lay the model's and the optimizer's arrays out anew; whatever fails, the optimizer is what it was
    fn adopt<'py>(
        &mut self,
        model: &Bound<'py, PyAny>,
        optimizer: &Bound<'py, PyAny>,
        slots: &[Slot<'py>],
        needs: Needs,
    ) -> PyResult<Snapshot<'py>> {
        self.expose(model.py())?;
        self.forget()?;
        let snapshot = Snapshot::take(optimizer)?;
        match self.lay_out(model, optimizer, slots, needs) {
            Ok(engine) => {
                self.engine = Some(engine);
                Ok(snapshot)
            }
            Err(error) => {
                snapshot.restore()?;
                self.discard();
                Err(error)
            }
        }
    }

    fn lay_out<'py>(
        &mut self,
        model: &Bound<'py, PyAny>,
        optimizer: &Bound<'py, PyAny>,
        slots: &[Slot<'py>],
        needs: Needs,
    ) -> PyResult<Engine> {
        let py = model.py();
        let signature = self.signature()?;
        let trainable = model.call_method0(intern!(py, "trainable_parameters"))?;
        let trainable = if self.mixed {
            rebuild(&trainable, &mut |object| {
                let array = bridge::get(object).map(|a| a.as_dtype(wide(a.dtype())));
                match array.transpose().map_err(mlx)? {
                    Some(array) => bridge::wrap(py, &array),
                    None => Ok(object.clone()),
                }
            })?
        } else {
            trainable
        };
        optimizer.call_method1(intern!(py, "init"), (&trainable,))?;
        let parameters = signature
            .parameters
            .iter()
            .map(|&slot| bridge::get(&slots[slot].object));
        let parameters: Vec<Array> = parameters.flatten().collect();
        let take = if self.drafts {
            Engine::draft
        } else {
            Engine::new
        };
        let engine = if let Some(native) = self.native(optimizer, &signature, &trainable)? {
            self.rule = Some(Rule::Native(Rc::new(native.rules)));
            self.moments = Some(native.moments);
            take(Rc::new(native.layout), parameters, native.state)
        } else {
            self.rule = Some(Rule::Host);
            let layout = Layout::separate(signature.tensors());
            if self.mixed {
                widen(&Tree::record(optimizer, Scope::Whole)?.1)?;
            }
            let (_, slots) = Tree::record(optimizer, Scope::Whole)?;
            let state = slots.iter().filter_map(|slot| bridge::get(&slot.object));
            take(Rc::new(layout), parameters, state.collect())
        };
        let mut engine = engine.map_err(|error| to_python(&error))?;
        if let Some(carried) = &self.carried {
            let keep = carried.onto(&self.names()?, &signature.tensors());
            engine.need(needs).map_err(|error| to_python(&error))?;
            engine.take_up(&keep).map_err(|error| to_python(&error))?;
        }
        let (tree, _) = Tree::record(optimizer, self.scope())?;
        self.sign_options(py, tree);
        Ok(engine)
    }

    fn native(
        &self,
        optimizer: &Bound<'_, PyAny>,
        signature: &ModelSignature,
        trainable: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Native>> {
        if signature.tree.is_aliased() {
            return Ok(None);
        }
        let given = (signature.paths(), signature.tensors());
        Native::find(optimizer, given, trainable, self.mixed)
    }

    fn state_slots<'py>(&self, optimizer: &Bound<'py, PyAny>) -> PyResult<Vec<Slot<'py>>> {
        match &self.moments {
            Some(moments) => Ok(moments.scalars(optimizer.py())?.unwrap_or_default()),
            None => Ok(Tree::record(optimizer, Scope::Whole)?.1),
        }
    }

    /// Show what a step wrote beside parameters and optimizer state: buffers and the random key.
    pub fn take_output(
        &mut self,
        py: Python<'_>,
        prepared: &Prepared<'_>,
        output: &Outputs,
    ) -> PyResult<()> {
        let signature = self.signature()?;
        for (index, array) in &output.others {
            let slots = prepared.model.iter().zip(signature.roles.iter());
            let mut found = slots.filter(|(_, (role, _))| *role == Role::Other(*index));
            if let Some((slot, _)) = found.next() {
                self.others[*index] = array.clone();
                if prepared.aliased {
                    slot.put(array)?;
                } else {
                    slot.show(array)?;
                }
            }
        }
        if let Some(key) = &output.key {
            let keys = self.key_list.bind(py);
            keys.set_item(0, bridge::wrap(py, key)?)?;
        }
        Ok(())
    }

    // arrays that are not the ones that the last step left; whether there were parameters among them
    fn take_values(
        &mut self,
        model: &[Slot<'_>],
        state: &[Slot<'_>],
        adopted: bool,
    ) -> PyResult<bool> {
        let signature = self.signature()?;
        let Some(engine) = &mut self.engine else {
            return Ok(false);
        };
        let differs = |slot: &Slot<'_>, array: Option<&Array>| {
            bridge::id(&slot.object) != array.map(faststep::array::id)
        };
        let mut changed = Vec::new();
        for (slot, (role, _)) in model.iter().zip(signature.roles.iter()) {
            let known = match role {
                Role::Parameter(i) => engine.parameters().get(*i),
                Role::Other(i) => self.others.get(*i),
            };
            if !differs(slot, known) {
                continue;
            }
            let Some(value) = bridge::get(&slot.object) else {
                continue;
            };
            match role {
                Role::Parameter(_) if adopted => {}
                Role::Parameter(i) => changed.push((*i, value)),
                Role::Other(i) if *i < self.others.len() => self.others[*i] = value,
                Role::Other(_) => self.others.push(value),
            }
        }
        for (index, slot) in state.iter().enumerate() {
            if differs(slot, engine.state().get(index)) {
                if let Some(value) = bridge::get(&slot.object) {
                    engine.set_state(index, value);
                }
            }
        }
        let packed = !changed.is_empty();
        if packed {
            engine.set_parameters(changed).map_err(|e| to_python(&e))?;
        }
        Ok(packed)
    }
}
