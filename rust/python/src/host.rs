//! The user's loss and optimizer: called once a step, with tracers in the places of the model's arrays.
//!
//! `call` calls the loss and takes what it gives: a graph, of which `graph` keeps the operations. `given` has the
//! tracers; `lent` and `arguments` put them where the arrays are and take them away again. `update` is an optimizer's of
//! the user's own. Uses `watch`, `optimizer`, `store`, `tree` and `mlx`.
mod arguments;
mod call;
mod given;
mod graph;
mod lent;
mod update;

use std::{cell::RefCell, rc::Rc};

use faststep::engine::{
    Differentiated, Host, LossCall, LossOutput, Owner, UpdateCall, UpdateOutput,
};
use mlx_rs::{
    error::{Exception, Result as MlxResult},
    Array,
};
use pyo3::{exceptions::PyTypeError, prelude::*};

pub use arguments::LentArguments;
pub use call::{Called, Graphs, LossInputs};
pub use given::Given;
pub use graph::{KnownGraph, Template};
pub use update::{CalledUpdate, LeftOutUpdate, Observed, Update, UpdateWay, Updates};

use crate::{
    mlx::{bridge, gil::Waiting},
    optimizer::{leaves, traceable_rate},
};

/// Loss and gradients of the call under way.
pub enum Loss {
    /// Made over the engine's arrays; where the step itself is not compiled, by operations that are.
    Graph(Rc<KnownGraph>, bool),
    /// As the call has given them; they are evaluated once.
    Arrays(RefCell<Option<Differentiated>>),
    /// There is none: an update alone.
    None,
}

/// The call under way.
pub struct Current {
    /// Loss and gradients.
    pub loss: Loss,
    /// The way of the update by an optimizer of the user's own.
    pub update: UpdateWay,
    /// The user's optimizer.
    pub optimizer: Py<PyAny>,
    /// An error of the user's code.
    pub raised: Option<PyErr>,
}

/// The engine's host.
#[derive(Default)]
pub struct PythonHost {
    /// The call under way; nothing between calls.
    pub current: RefCell<Option<Current>>,
    updates: RefCell<Updates>,
}

impl PythonHost {
    fn run<T>(
        &self,
        work: impl for<'py> FnOnce(Python<'py>, &mut Current) -> PyResult<T>,
    ) -> MlxResult<T> {
        Python::attach(|py| {
            let mut current = self.current.try_borrow_mut().ok();
            let Some(current) = current.as_mut().and_then(|c| c.as_mut()) else {
                return Err(Exception::custom("a step was traced outside of a call"));
            };
            work(py, current).map_err(|error| {
                current.raised = Some(error);
                Exception::custom("the user's code raised")
            })
        })
    }
}

impl PythonHost {
    /// Call the optimizer.
    pub fn call_update<'py>(
        &self,
        update: &mut Update,
        optimizer: &Bound<'py, PyAny>,
        call: &UpdateCall,
    ) -> PyResult<CalledUpdate<'py>> {
        update.call(optimizer, call, &mut self.updates.borrow_mut())
    }
}

impl Host for PythonHost {
    fn differentiated(
        &self,
        call: LossCall,
        scale: Option<&Array>,
    ) -> MlxResult<Option<Differentiated>> {
        let current = self.current.borrow();
        match current.as_ref().map(|current| &current.loss) {
            Some(Loss::Graph(graph, compiled)) => {
                graph.differentiated(call, scale, *compiled).map(Some)
            }
            Some(Loss::Arrays(arrays)) => Ok(arrays.take()),
            Some(Loss::None) | None => Ok(None),
        }
    }

    fn unlocked(&self, work: &mut dyn FnMut()) {
        Python::attach(|py| Waiting(py).unlocked(work));
    }

    fn loss(&self, _: LossCall) -> MlxResult<LossOutput> {
        Err(Exception::custom("a loss was traced outside of its call"))
    }

    fn learning_rate(&self, rule: usize, step: &Array) -> MlxResult<Option<Array>> {
        self.run(|py, current| {
            let optimizers = leaves(current.optimizer.bind(py));
            let Some(schedule) = optimizers.get(rule).and_then(traceable_rate) else {
                return Ok(None);
            };
            let rate = schedule.call1((bridge::wrap(py, step)?,))?;
            let expected = || PyTypeError::new_err("a schedule: expected mx.array");
            bridge::get(&rate).ok_or_else(expected).map(Some)
        })
    }

    fn update(&self, call: UpdateCall) -> MlxResult<UpdateOutput> {
        let mut known = self.updates.borrow_mut();
        self.run(|py, current| {
            let optimizer = current.optimizer.bind(py);
            current.update.output(optimizer, &call, &mut known)
        })
    }
}
