//! The first batch that is skipped: what of it was not finite.
//!
//! The batches of the first steps are kept until their flags can be read without a wait, some steps later. For the one that was
//! skipped, arguments and arrays of the model are looked at, and its gradients are computed again.
use std::{collections::VecDeque, rc::Rc};

use faststep::engine::{Engine, Output, Role};
use mlx_rs::{error::Result as MlxResult, transforms::eval, Array};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use super::{
    flags::{is_true, number_of, read},
    indices::out_of_range,
    options::Options,
};
use crate::{
    host::{Given, KnownGraph},
    mlx::{bridge, errors::mlx, gil::unlocked},
    store::Store,
    tree::paths::dotted,
};

/// Number of first steps of which a batch is kept.
const STEPS: usize = 100;
/// Number of batches that are kept at once.
const PENDING: usize = 3;
/// The largest batch that is kept, in bytes.
const LARGEST: usize = 16 << 20;
/// Largest number of names in a warning.
const NAMES: usize = 5;

/// The graph of a loss, and the arrays that it ended in at a step.
pub type StepGraph = (Rc<KnownGraph>, Vec<Array>);

/// Options and names that a warning reads beside the batch.
pub struct Context<'a> {
    /// The options of the step.
    pub options: &'a Options,
    /// The name that the user gives an array of the batch.
    pub argument: &'a dyn Fn(usize) -> String,
    /// The graph of the step that has just been taken.
    pub graph: Option<StepGraph>,
}

/// The steps whose flags have not been read yet.
#[derive(Default)]
pub struct FirstSkipped {
    pending: VecDeque<(usize, Array, Recent)>, // the step, and whether its batch was skipped
    done: bool,
}

impl FirstSkipped {
    /// Return whether another step is to be noted.
    pub fn is_awaited(&self) -> bool {
        !self.done
    }

    /// Note a step of this number.
    pub fn note(&mut self, step: usize, output: &Output, recent: Option<Recent>) {
        if let (Some(flag), Some(recent)) = (&output.batch.skipped, recent) {
            self.pending.push_back((step, flag.clone(), recent));
        }
    }

    /// Return the warning of the first batch that was skipped, once its flag is long there; `steps` have been taken.
    pub fn raised(
        &mut self,
        py: Python<'_>,
        steps: usize,
        (store, context): (&Store, &Context<'_>),
    ) -> PyResult<Option<String>> {
        while self.pending.len() > PENDING {
            let Some((step, flag, recent)) = self.pending.pop_front() else {
                break;
            };
            if !read(is_true(py, &flag))? {
                continue;
            }
            if let Some(why) = recent.reason(py, store, context)? {
                self.end();
                return Ok(Some(format!(
                    "the batch of step {step} was skipped, and trains nothing: {why}. nonfinite=\"raise\" stops there, and \
                     faststep.diagnose names the module. step.stats.skipped counts further ones, without a warning"
                )));
            }
        }
        if steps > STEPS {
            self.end();
        }
        Ok(None)
    }

    fn end(&mut self) {
        self.done = true;
        self.pending.clear();
    }
}

/// The batch and the graph of a step, and its results.
pub struct Recent {
    loss: Array,
    norm: Option<Array>,
    weight: Option<Array>,
    batch: Vec<Array>,             // none where it is large
    graph: Option<Rc<KnownGraph>>, // without the arrays that it ended in, which may be large
}

impl Recent {
    /// Keep a step's batch; none where it has no loss.
    pub fn new(output: &Output, batch: &[Array], context: &Context<'_>) -> Option<Self> {
        let is_small = batch.iter().map(Array::nbytes).sum::<usize>() <= LARGEST;
        let norm = output.update.as_ref().unwrap_or(&output.batch).norm.clone();
        let over_ranks = output.update.as_ref().and_then(|it| it.loss.as_ref());
        Some(Self {
            loss: over_ranks.or(output.batch.loss.as_ref())?.clone(),
            norm,
            weight: output
                .batch
                .aux
                .first()
                .filter(|_| context.options.weighted)
                .cloned(),
            batch: batch.iter().filter(|_| is_small).cloned().collect(),
            graph: context
                .graph
                .as_ref()
                .filter(|_| is_small)
                .map(|(graph, _)| graph.clone()),
        })
    }

    /// Return why the batch was skipped; none if nothing is wrong: its weight is 0, or float16 has overflowed, and the scale of the
    /// loss follows.
    pub fn reason(
        &self,
        py: Python<'_>,
        store: &Store,
        context: &Context<'_>,
    ) -> PyResult<Option<String>> {
        let loss: f32 = read(number_of(py, &self.loss))?;
        if let Some(argument) = self.bad_argument(py, context)? {
            return Ok(Some(format!("its loss is {loss}, and argument {argument}")));
        }
        let bad = bad_arrays(py, store)?;
        if !bad.is_empty() {
            let bad = are(bad);
            return Ok(Some(format!("its loss is {loss}, and {bad} not finite")));
        }
        if !loss.is_finite() {
            return Ok(Some(format!(
                "its loss is {loss}, though its arguments and the model are finite: look for log(0), a division by zero (the sum of a mask \
                 without a one), or exp of a large number"
            )));
        }
        if context
            .options
            .max_loss
            .is_some_and(|most| f64::from(loss) > most)
        {
            return Ok(Some(format!("its loss is {loss:.4}, above max_loss")));
        }
        if let Some(weight) = &self.weight {
            if read(number_of::<f32>(py, weight))? == 0.0 {
                return Ok(None);
            }
        }
        if context.options.needs(false).scale {
            return Ok(None);
        }
        let why = self.of_gradients(py, store, context)?;
        Ok(Some(format!("its loss is {loss:.4}, and {why}")))
    }

    // an argument that is not finite, or has numbers out of range
    fn bad_argument(&self, py: Python<'_>, context: &Context<'_>) -> PyResult<Option<String>> {
        for (number, array) in self.batch.iter().enumerate() {
            if !is_finite(py, array)? {
                let name = (context.argument)(number);
                return Ok(Some(format!("{name} has NaN or infinite values")));
            }
        }
        let Some(graph) = &self.graph else {
            return Ok(None);
        };
        let extremes = graph.extremes(&self.batch).map_err(mlx)?;
        let found = read(out_of_range(py, &graph.picks(), &extremes))?;
        Ok(found.map(|(number, text)| format!("{} {text}", (context.argument)(number))))
    }

    fn of_gradients(
        &self,
        py: Python<'_>,
        store: &Store,
        context: &Context<'_>,
    ) -> PyResult<String> {
        let now = context.graph.as_ref();
        let now = now.filter(|_| !store.has_shards()); // whose gradients the other ranks would have to compute too
        let now = now.filter(|(graph, _)| {
            self.graph
                .as_ref()
                .is_some_and(|its| Rc::ptr_eq(its, graph))
        });
        let bad = match (now, &store.engine) {
            (Some(graph), Some(engine)) => {
                self.bad_gradients(py, (store, engine), graph, context)?
            }
            _ => Vec::new(),
        };
        if !bad.is_empty() {
            return Ok(format!(
                "the gradient of {} is not finite: look for a square root, a norm or a power at zero, whose slope is infinite",
                listed(bad)
            ));
        }
        let norm = self.norm.as_ref().map(|norm| number_of::<f32>(py, norm));
        Ok(match read(norm.transpose())? {
            Some(f32::INFINITY) => "the norm of its gradients overflows float32".into(),
            _ => "a gradient is not finite".into(),
        })
    }

    // the names of parameters whose gradients are not finite, at the parameters as they are now
    fn bad_gradients(
        &self,
        py: Python<'_>,
        (store, engine): (&Store, &Engine),
        (graph, leaves): &StepGraph,
        context: &Context<'_>,
    ) -> PyResult<Vec<String>> {
        let parameters = engine.parameters();
        let signature = store.signature()?;
        if !parameters.iter().all(|array| array.size() > 0) {
            return Ok(Vec::new());
        }
        let missing = || PyRuntimeError::new_err("there is no random key");
        let key = bridge::get(&store.key_list.bind(py).get_item(0)?).ok_or_else(missing)?;
        let dtype = context.options.compute_dtype;
        let given = Given::new(parameters, &store.others, &self.batch, None, dtype).map_err(mlx)?;
        let made = graph.replay(given.traced(), leaves, &key).map_err(mlx)?;
        let flags: MlxResult<Vec<Array>> = made.gradients.iter().map(finite).collect();
        let flags = flags.map_err(mlx)?;
        read(unlocked(py, || eval(&flags)))?;
        let mut bad = Vec::new();
        for (tensor, flag) in flags.iter().enumerate() {
            if read(number_of::<f32>(py, flag))? == 0.0 {
                bad.push(dotted(signature.path(tensor)));
            }
        }
        Ok(bad)
    }
}

/// The names of the model's arrays that are not finite.
pub fn bad_arrays(py: Python<'_>, store: &Store) -> PyResult<Vec<String>> {
    let Some(engine) = &store.engine else {
        return Ok(Vec::new());
    };
    let mut bad = Vec::new();
    for (role, path) in store.signature()?.roles.iter() {
        let array = match role {
            Role::Parameter(i) => &engine.parameters()[*i],
            Role::Other(i) => &store.others[*i],
        };
        if !is_finite(py, array)? {
            bad.push(dotted(path));
        }
    }
    Ok(bad)
}

/// Some names, with their verb.
pub fn are(names: Vec<String>) -> String {
    let verb = if names.len() == 1 { "is" } else { "are" };
    format!("{} {verb}", listed(names))
}

/// Some names of parameters.
pub fn listed(mut names: Vec<String>) -> String {
    let more = names.len().saturating_sub(NAMES);
    names.truncate(NAMES);
    let names: Vec<_> = names.iter().map(|name| format!("model.{name}")).collect();
    match more {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

fn is_finite(py: Python<'_>, array: &Array) -> PyResult<bool> {
    if !array.dtype().is_float() {
        return Ok(true);
    }
    let finite = finite(array).map_err(mlx)?;
    Ok(read(number_of::<f32>(py, &finite))? != 0.0)
}

// a bool scalar
fn finite(array: &Array) -> MlxResult<Array> {
    let infinite = Array::from_f32(f32::INFINITY);
    array.abs()?.lt(infinite)?.all(None)
}
