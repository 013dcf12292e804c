//! The layout of a model's and an optimizer's arrays in an engine of their own.
use std::rc::Rc;

use faststep::{
    engine::{
        precision::{wide, Stored},
        Engine, Layout, Needs, Rule, Rules,
    },
    Optimizer,
};
use mlx_rs::Array;
use pyo3::{
    exceptions::{PyIndexError, PyValueError},
    intern,
    prelude::*,
    types::PyDict,
};

use super::{class_name, first_state::depends_on_values, native::Native, ModelSignature, Store};
use crate::{
    mlx::{
        bridge,
        classes::has_own_methods,
        errors::{mlx, to_python},
        gil::unlocked,
    },
    optimizer::{children, leaves, native_rule, native_rules},
    tree::{rebuild::rebuild, slot::Slot, snapshot::Snapshot, walk::Scope, Tree},
};

impl Store {
    // build a new engine from the model's and the optimizer's arrays; an error restores the optimizer
    pub(super) fn adopt<'py>(
        &mut self,
        model: &Bound<'py, PyAny>,
        optimizer: &Bound<'py, PyAny>,
        slots: &[Slot<'py>],
        needs: Needs,
    ) -> PyResult<Snapshot<'py>> {
        self.expose(model.py())?;
        self.forget()?;
        let snapshot = Snapshot::take(optimizer)?;
        match self.lay_out(model, (optimizer, &snapshot), slots, needs) {
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
        (optimizer, before): (&Bound<'py, PyAny>, &Snapshot<'py>),
        slots: &[Slot<'py>],
        needs: Needs,
    ) -> PyResult<Engine> {
        let py = model.py();
        let signature = self.signature()?;
        let trainable = self.trainable(model)?;
        if !depends_on_values(optimizer, &trainable)? {
            init(optimizer, &self.updated_here(&trainable)?, before)?;
        }
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
        let take = |layout, state| {
            let engine = unlocked(py, || take(Rc::new(layout), parameters, state));
            engine.map_err(|error| to_python(&error))
        };
        let native = if self.transforms || has_own_methods(model, &["update"]) {
            None // the optimizer's `update` is called, and calls that of the model
        } else {
            self.native(optimizer, &signature, &trainable)?
        };
        let mut engine = if let Some(native) = native {
            let rules = self.with_numbers(native.rules, native.layout.tensors());
            self.rule = Some(Rule::Native(Rc::new(rules)));
            let moments = self.moments.insert(native.moments);
            moments.hide(py)?; // or what the engine joins would be held beside the joined until the first update
            take(native.layout, native.state)?
        } else {
            let (layout, state) = self.own_layout(optimizer, &trainable, &signature)?;
            take(layout, state)?
        };
        self.sign_layout(engine.layout().clone());
        engine.set_clock(self.clock.clone());
        if self.updated {
            engine.go_on();
        }
        if let Some(kept) = &self.kept {
            let kept = kept.onto(&self.names()?, &signature.tensors());
            unlocked(py, || {
                engine.need(needs)?;
                engine.load_aux_state(&kept)
            })
            .map_err(|error| to_python(&error))?;
        }
        let scope = if self.has_own_state() {
            Scope::Whole
        } else {
            Scope::Options
        };
        self.sign_options(optimizer, Tree::record(optimizer, scope)?.0)?;
        Ok(engine)
    }

    // the layout where the optimizer's own code is called, and its arrays
    fn own_layout<'py>(
        &mut self,
        optimizer: &Bound<'py, PyAny>,
        trainable: &Bound<'py, PyAny>,
        signature: &ModelSignature,
    ) -> PyResult<(Layout, Vec<Array>)> {
        if self.stored != Stored::default() || self.shared_out.is_some() {
            let what = match self.shared_out {
                Some(_) => "shard_optimizer",
                None => "state_bits, stochastic_rounding",
            };
            let why = self.why_called(optimizer, None)?;
            return Err(PyValueError::new_err(format!(
                "{what}: expected an update that the step computes itself, got one that it calls, because {why}: leave the options out",
            )));
        }
        self.rule = Some(Rule::Host);
        let mut layout = Layout::separate(signature.tensors());
        if let Some(shards) = &self.shards {
            self.rules(optimizer, || Ok(trainable.clone()))?; // which refuses some
            layout = layout.with_shards(&shards.of_tensors(signature));
        }
        if self.mixed {
            widen(&Tree::slots(optimizer)?)?;
        }
        let state = self.state_slots(optimizer)?;
        let state = state.iter().filter_map(|slot| bridge::get(&slot.object));
        Ok((layout, state.collect()))
    }

    /// The trained parameters as a tree, in the dtypes in which they are updated.
    pub(super) fn trainable<'py>(&self, model: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = model.py();
        let trainable = model.call_method0(intern!(py, "trainable_parameters"))?;
        if !self.mixed {
            return Ok(trainable);
        }
        rebuild(&trainable, &mut |object| {
            let array = bridge::get(object).map(|a| a.as_dtype(wide(a.dtype())));
            match array.transpose().map_err(mlx)? {
                Some(array) => bridge::wrap(py, &array),
                None => Ok(object.clone()),
            }
        })
    }

    fn native(
        &self,
        optimizer: &Bound<'_, PyAny>,
        signature: &ModelSignature,
        trainable: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Native>> {
        let (paths, tensors) = (signature.paths(), signature.tensors());
        if !tensors.iter().all(|t| Optimizer::supports(t.dtype)) {
            return Ok(None);
        }
        let rules = self.rules(optimizer, || Ok(trainable.clone()))?;
        let doubles = signature.doubles();
        rules.map_or(Ok(None), |rules| {
            Native::find(optimizer, rules, (paths, tensors), &doubles, self.mixed)
        })
    }

    /// The rules of an optimizer for the trained parameters; `None` where it is called. `trainable`: makes their tree.
    pub(super) fn rules<'py>(
        &self,
        optimizer: &Bound<'py, PyAny>,
        trainable: impl FnOnce() -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Rules>> {
        let signature = self.signature()?;
        let Some(rules) = native_rules(optimizer, &signature.paths(), trainable)? else {
            return Ok(None);
        };
        let rules = rules.stored(self.stored, &signature.tensors());
        let rules = rules.and_then(|rules| match &self.shards {
            Some(shards) => rules.of_shards(shards.of_tensors(&signature), &signature.tensors()),
            None => Ok(rules),
        });
        let rules = rules.map_err(|error| to_python(&error))?;
        Ok(Some(match &self.shared_out {
            Some(shared) => rules.shared_out(shared.owners(&signature)?, shared.rank),
            None => rules,
        }))
    }

    // the tree of parameters with an empty dict in the place of each one that another rank updates
    fn updated_here<'py>(&self, trainable: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let Some(shared) = &self.shared_out else {
            return Ok(trainable.clone());
        };
        let mut owners = shared.owners(&*self.signature()?)?.into_iter();
        rebuild(trainable, &mut |object| {
            Ok(match owners.next() {
                Some(owner) if owner != shared.rank => PyDict::new(object.py()).into_any(),
                _ => object.clone(),
            })
        })
    }

    /// Return the reason why the optimizer's own code is called. `reason`: what is known of its update.
    pub fn why_called(
        &self,
        optimizer: &Bound<'_, PyAny>,
        reason: Option<&str>,
    ) -> PyResult<String> {
        let signature = self.signature()?;
        let halves = signature.tensors();
        if let Some(tensor) = halves.iter().find(|t| !Optimizer::supports(t.dtype)) {
            return Ok(format!("there are parameters of {:?}", tensor.dtype));
        }
        let model = self.model.bind(optimizer.py()).upgrade();
        if model.is_some_and(|model| has_own_methods(&model, &["update"])) {
            return Ok("the model has an update() of its own, which the optimizer calls".into());
        }
        let class = class_name(optimizer)?;
        if let Some(reason) = reason {
            let what = if self.transforms {
                "the transform of the gradients, or "
            } else {
                ""
            };
            return Ok(format!(
                "{what}the update of the optimizer ({class}) {reason}"
            ));
        }
        if self.transforms {
            return Ok("a function transforms the gradients".into());
        }
        if !signature.doubles().is_empty() && children(optimizer).is_some() {
            return Ok(format!(
                "parameters stand in the model twice, and the optimizer ({class}) is several"
            ));
        }
        if native_rule(optimizer).is_some() {
            return Ok(format!(
                "the state of the optimizer ({class}) has other names, shapes or dtypes than MLX's"
            ));
        }
        Ok(format!(
            "the optimizer ({class}) is none of MLX's own, or has one in it that is not"
        ))
    }

    pub(super) fn state_slots<'py>(
        &self,
        optimizer: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Slot<'py>>> {
        match &self.moments {
            Some(moments) => Ok(moments.scalars(optimizer.py())?.unwrap_or_default()),
            None if self.has_own_state() => Tree::slots(optimizer),
            None => Ok(Vec::new()),
        }
    }
}

// make the state that is missing. MLX's `init` raises where a list of the model has become shorter than the state's is: with
// that state, and none for a layer of which it has none, a plain loop goes on
fn init<'py>(
    optimizer: &Bound<'py, PyAny>,
    trainable: &Bound<'py, PyAny>,
    before: &Snapshot<'py>,
) -> PyResult<()> {
    let py = optimizer.py();
    let made = |leaf: &Bound<'_, PyAny>| leaf.getattr("_initialized")?.is_truthy();
    let leaves = leaves(optimizer);
    let made = leaves.iter().map(made).collect::<PyResult<Vec<_>>>()?;
    match optimizer.call_method1(intern!(py, "init"), (trainable,)) {
        Err(error) if made.iter().all(|&made| made) && error.is_instance_of::<PyIndexError>(py) => {
            before.restore()
        }
        outcome => outcome.map(drop),
    }
}

// replace half-precision arrays by float32 ones in place
fn widen(slots: &[Slot<'_>]) -> PyResult<()> {
    for slot in slots {
        if let Some(array) = bridge::get(&slot.object).filter(|a| wide(a.dtype()) != a.dtype()) {
            slot.put(&array.as_dtype(wide(array.dtype())).map_err(mlx)?)?;
        }
    }
    Ok(())
}
