//! The graph of a call of the user's code, and what its outputs are.
use std::{cell::RefCell, rc::Rc};

use faststep::engine::{
    array::id, called, CallGraph, Differentiated, Left, LossCall, LossOutput, Pick, Replayed,
    Roots, Tracers,
};
use mlx_rs::{
    error::{Exception, Result as MlxResult},
    Array,
};

/// The outputs of a call, in their order: the loss times its scale, the loss, what else it returned; then what it assigned.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(clippy::struct_excessive_bools)] // each is an answer of its own
pub struct Form {
    /// The number of parameters, of other arrays of the model, and of arrays of the batch, or of gradients.
    pub given: (usize, usize, usize),
    /// True if the loss is differentiated times a scale.
    pub scaled: bool,
    /// True if the first array behind the loss is its weight.
    pub weighted: bool,
    /// The number of arrays that the loss returned behind the first one.
    pub aux: usize,
    /// Parameters to which the loss assigned.
    pub parameters: Vec<usize>,
    /// Other arrays of the model to which it assigned.
    pub others: Vec<usize>,
    /// The optimizer's arrays that an update writes.
    pub state: Vec<usize>,
    /// True if the engine has these: the user's objects of the outputs are gone behind the call.
    pub in_engine: bool,
    /// True if it drew from the random key.
    pub key: bool,
}

impl Form {
    /// The number of outputs that are given to the user.
    pub fn results(&self) -> usize {
        usize::from(self.scaled) + 1 + self.aux
    }
}

/// Kind of an input of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The random key.
    Key,
    /// An array of which the step knows only that the graph ends in it.
    Leaf,
}

/// The structure that a loss returned, with holes for its arrays.
pub type Template = pyo3::Py<pyo3::PyAny>;

/// The graph of a loss with its gradients, or of an update.
pub struct KnownGraph {
    /// Its number among those of the step.
    pub number: usize,
    /// Its outputs.
    pub form: Form,
    graph: Rc<CallGraph>,
    compiled: RefCell<Option<(usize, called::Compiled)>>, // for so many inputs
    sources: RefCell<Vec<Source>>,
}

fn short() -> Exception {
    Exception::custom("a graph of a loss has fewer outputs than the loss")
}

impl KnownGraph {
    /// The graph of a call, before it is differentiated.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(tracers: &Tracers, form: &Form, roots: &Roots) -> MlxResult<Self> {
        Ok(Self {
            number: 0,
            form: form.clone(),
            graph: Rc::new(CallGraph::new(tracers, roots)?),
            compiled: RefCell::default(),
            sources: RefCell::default(),
        })
    }

    /// Note the gradients of the same call.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn add_gradients(
        &mut self,
        tracers: &Tracers,
        (form, roots): (&Form, &Roots),
        gradients: &[Array],
    ) -> MlxResult<()> {
        self.form = form.clone(); // a backward pass may have drawn
        match Rc::get_mut(&mut self.graph) {
            Some(graph) => graph.add_gradients(tracers, roots, gradients),
            None => Ok(()), // it is kept already
        }
    }

    /// Keep it, with a number, without the arrays of its call.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn keep(&mut self, number: usize) -> MlxResult<()> {
        self.number = number;
        let (first, count) = (self.first_of_batch(), self.form.given.2);
        match Rc::get_mut(&mut self.graph) {
            Some(graph) => {
                graph.keep();
                graph.find_picks(first, count)
            }
            None => Ok(()),
        }
    }

    // the number of the tracer of the batch's first array
    fn first_of_batch(&self) -> usize {
        self.form.given.0 + self.form.given.1
    }

    /// The picks of an axis by whole numbers of the batch, each with the number of its array in the batch.
    pub fn picks(&self) -> Vec<Pick> {
        let first = self.first_of_batch();
        let picks = self.graph.picks().into_iter();
        let in_batch = |pick: Pick| Pick {
            tracer: pick.tracer - first,
            ..pick
        };
        picks.map(in_batch).collect()
    }

    /// The least and the greatest number of each pick in another batch.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn extremes(&self, batch: &[Array]) -> MlxResult<Vec<Array>> {
        self.graph.extremes(batch, self.first_of_batch())
    }

    /// Return whether a call has this graph, where nobody holds an array of it.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn follows(&self, tracers: &Tracers, form: &Form, roots: &Roots) -> MlxResult<bool> {
        Ok(self.form == *form && self.graph.follows(tracers, roots)?)
    }

    /// Compare with the graph of a call that is not kept.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn equals(&self, other: &Self) -> MlxResult<bool> {
        Ok(self.form == other.form && self.graph.equals(&other.graph)?)
    }

    /// Return whether Python functions make some of its gradients.
    pub fn is_custom(&self) -> bool {
        self.graph.is_custom()
    }

    /// The number of its inputs: another one is another trace.
    pub fn inputs(&self) -> usize {
        self.graph.inputs()
    }

    /// The number of its inputs beside the random key.
    pub fn leaves(&self) -> usize {
        let sources = self.sources.borrow();
        sources
            .iter()
            .filter(|source| **source == Source::Leaf)
            .count()
    }

    /// The leaves of the call that was compared last, without the random key. `None`: the key is another input than before.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn take_leaves(&self, key: &Array) -> MlxResult<Option<Vec<Array>>> {
        let inputs = self.graph.take_inputs()?;
        let source = |input: &Array| {
            if id(input) == id(key) {
                Source::Key
            } else {
                Source::Leaf
            }
        };
        let now: Vec<Source> = inputs.iter().map(source).collect();
        let mut known = self.sources.borrow_mut();
        if known.len() == now.len() && *known != now {
            return Ok(None);
        }
        let leaves = inputs.into_iter().zip(&now);
        let leaves = leaves.filter(|(_, source)| **source == Source::Leaf);
        let leaves = leaves.map(|(leaf, _)| leaf).collect();
        *known = now;
        Ok(Some(leaves))
    }

    /// The arrays of that call that somebody holds, or held once.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn take_held(&self) -> MlxResult<Vec<Array>> {
        self.graph.take_held()
    }

    // the inputs of the graph from its leaves and the random key
    fn inputs_of(&self, leaves: &[Array], key: &Array) -> MlxResult<Vec<Array>> {
        let mut leaves = leaves.iter();
        let sources = self.sources.borrow();
        let inputs = sources.iter().map(|source| match source {
            Source::Key => Some(key),
            Source::Leaf => leaves.next(),
        });
        let inputs: Option<Vec<Array>> = inputs.map(Option::<&Array>::cloned).collect();
        inputs.ok_or_else(short)
    }

    /// All outputs over other arrays.
    ///
    /// # Errors
    /// When they are more or fewer than those of the graph.
    pub fn replay(&self, traced: &[Array], leaves: &[Array], key: &Array) -> MlxResult<Replayed> {
        self.graph.replay(traced, &self.inputs_of(leaves, key)?)
    }

    /// All outputs over other arrays, by operations that MLX has compiled.
    ///
    /// # Errors
    /// As [`KnownGraph::replay`].
    pub fn run(&self, traced: &[Array], leaves: &[Array], key: &Array) -> MlxResult<Replayed> {
        let inputs = self.inputs_of(leaves, key)?;
        let mut compiled = self.compiled.borrow_mut();
        if compiled
            .as_ref()
            .is_none_or(|(count, _)| *count != inputs.len())
        {
            let function = called::compiled(self.graph.clone(), traced.len());
            *compiled = Some((inputs.len(), function));
        }
        let (_, function) = compiled.as_mut().ok_or_else(short)?;
        let mut roots = function(&[traced, &inputs].concat())?;
        let held = self.graph.roots();
        let mut held = roots.split_off(held.min(roots.len()));
        let gradients = held.split_off(self.graph.held().min(held.len()));
        Ok(Replayed {
            roots,
            held,
            gradients,
        })
    }

    /// Loss and gradients over the engine's arrays; `compiled`: by operations that MLX has compiled.
    ///
    /// # Errors
    /// As [`KnownGraph::replay`].
    pub fn differentiated(
        &self,
        call: LossCall,
        scale: Option<&Array>,
        compiled: bool,
    ) -> MlxResult<Differentiated> {
        let (others, leaves) = call
            .others
            .split_at_checked(self.form.given.1)
            .ok_or_else(short)?;
        let traced = [call.parameters, others, call.batch].concat();
        let traced: Vec<Array> = traced.into_iter().chain(scale.cloned()).collect();
        let made = if compiled {
            self.run(&traced, leaves, call.key)?
        } else {
            self.replay(&traced, leaves, call.key)?
        };
        let mut named = named(&self.form, made.roots)?;
        named.output.aux.extend(made.held);
        named.gradients = made.gradients;
        Ok(named)
    }
}

/// The outputs of a loss by name.
pub fn named(form: &Form, roots: Vec<Array>) -> MlxResult<Differentiated> {
    let mut roots = roots.into_iter().skip(usize::from(form.scaled));
    let mut output = LossOutput::new(roots.next().ok_or_else(short)?);
    output.aux = roots.by_ref().take(form.aux).collect();
    output.weight = form.weighted.then(|| output.aux.first().cloned()).flatten();
    output.parameters = form
        .parameters
        .iter()
        .copied()
        .zip(roots.by_ref())
        .collect();
    let others = form.others.iter().copied().zip(roots.by_ref()).collect();
    let key = form.key.then(|| roots.next()).flatten();
    Ok(Differentiated {
        output,
        left: Left { others, key },
        gradients: Vec::new(),
    })
}
