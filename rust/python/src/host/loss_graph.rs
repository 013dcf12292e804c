//! The graph of one loss call, which determines those of its gradients and of a native update.
//!
//! MLX derives gradients from the loss's operations alone, but for functions with gradients of their own
//! (`mx.custom_function`, checkpointing), which call Python code again: there the graph of the whole step is wanted.
use faststep::engine::{
    array,
    graph::{self, Graph},
    Left, LossCall, LossOutput,
};
use mlx_rs::{error::Result, transforms::eval, Array};
use pyo3::Python;

use crate::mlx::gil::unlocked;

/// The graph by which two traces of one kind are compared.
#[derive(Debug)]
pub struct TraceGraph {
    graph: Graph,
    outputs: Option<Vec<usize>>, // which arrays the loss gives and assigns; none: the graph is that of the whole step
}

impl TraceGraph {
    /// The graph of a whole step.
    pub fn of_step(graph: Graph) -> Self {
        let outputs = None;
        Self { graph, outputs }
    }

    /// Return whether it is that of the loss, which determines the rest.
    pub fn is_of_loss(&self) -> bool {
        self.outputs.is_some()
    }

    /// The graph itself.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The constants, by number, in which `other` differs; `None` where it differs in anything else.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn differences(&self, other: &Self) -> Result<Option<Vec<u32>>> {
        if self.outputs != other.outputs {
            return Ok(None);
        }
        self.graph.differences(&other.graph)
    }
}

/// The arrays that a loss returns or assigns to parameters.
pub fn arrays_of(output: &LossOutput) -> impl Iterator<Item = &Array> {
    let returned = std::iter::once(&output.loss).chain(&output.weight);
    let parameters = output.parameters.iter().map(|(_, array)| array);
    returned.chain(&output.aux).chain(parameters)
}

/// Evaluate what a loss computes from no input and a function with a cache keeps, say, as the plain loop does: MLX's compiler
/// rewrites what is computed for the trace. Those behind `known` are left as they are.
///
/// # Errors
/// That of the evaluation.
pub fn evaluate_lasting(known: &[Array], outputs: &[Array]) -> Result<()> {
    loop {
        let lasting = graph::lasting(known, outputs)?;
        if lasting.is_empty() {
            return Ok(());
        }
        Python::attach(|py| unlocked(py, || eval(&lasting)))?;
    }
}

/// The arrays of one loss call.
pub struct LossArrays {
    inputs: Vec<Array>,
    before: Vec<usize>, // the handles of each beside those here and in the call
    outputs: Vec<Array>,
    form: Vec<usize>,
    returned: usize, // so many of the outputs
    complete: bool,
}

impl LossArrays {
    /// Note the inputs that are there before the model is prepared; none where MLX compiles nothing.
    pub fn before(others: &[Array], key: &Array) -> Option<Self> {
        array::is_traced(key).then(|| {
            let mut arrays = Self {
                inputs: Vec::new(),
                before: Vec::new(),
                outputs: Vec::new(),
                form: Vec::new(),
                returned: 0,
                complete: false,
            };
            for input in others.iter().chain([key]) {
                arrays.enter(input);
            }
            arrays
        })
    }

    fn enter(&mut self, input: &Array) {
        self.before.push(array::holders(input) + 1); // with the one that is kept here
        self.inputs.push(input.clone());
    }

    /// Note the other inputs, before the loss is called.
    pub fn call(&mut self, call: LossCall) {
        for array in call.batch {
            self.enter(array);
        }
        // tracers of the differentiation, which ends with the loss in a sketch
        self.inputs.extend_from_slice(call.parameters);
        self.before.resize(self.inputs.len(), 1);
    }

    /// Note what the loss returned.
    pub fn returned(&mut self, output: &LossOutput) {
        self.outputs.extend(arrays_of(output).cloned());
        self.form
            .extend([usize::from(output.weight.is_some()), output.aux.len()]);
        let parameters = output.parameters.iter().map(|(index, _)| index);
        self.form.extend(parameters);
        self.returned = self.outputs.len();
        self.complete = true;
    }

    /// Return whether the loss has returned.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Note what the loss left in the model and in what it reaches.
    pub fn left(&mut self, left: Left) {
        self.form
            .extend([usize::from(left.key.is_some()), left.kept.len()]);
        self.form.extend(left.others.iter().map(|(index, _)| index));
        let others = left.others.into_iter().map(|(_, array)| array);
        self.outputs
            .extend(left.key.into_iter().chain(left.kept).chain(others));
    }

    /// Evaluate what the loss has left that somebody keeps, but for what has been looked at when it returned.
    ///
    /// # Errors
    /// That of the evaluation.
    pub fn evaluate_lasting(&self) -> Result<()> {
        let (known, left) = self.outputs.split_at(self.returned);
        evaluate_lasting(known, left)
    }

    /// Look, when the call is over, at who keeps an array of it: with the inputs, so many handles of each, and the outputs.
    ///
    /// # Errors
    /// Whatever `look` returns.
    pub fn kept(&self, look: impl Fn(&[Array], &[usize], &[Array]) -> Result<()>) -> Result<()> {
        look(&self.inputs, &self.before, &self.outputs)
    }

    /// The graph from the inputs, but for `tracers`, which stand for constants, to the outputs; none where it does not
    /// determine the gradients.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn graph(self, tracers: &[Array]) -> Result<Option<TraceGraph>> {
        let tracers: Vec<usize> = tracers.iter().map(array::id).collect();
        let mut inputs = self.inputs;
        inputs.retain(|input| !tracers.contains(&array::id(input)));
        let graph = Graph::new(&inputs, &self.outputs)?;
        Ok(graph.determines_gradients().then_some(TraceGraph {
            graph,
            outputs: Some(self.form),
        }))
    }
}
