//! State that outlives an engine: the step's own, and the optimizer's as the user sees it.
use faststep::engine::{Engine, NamedAuxState, Tensor};
use pyo3::prelude::*;

use super::Store;
use crate::{mlx::errors::to_python, tree::paths::dotted};

impl Store {
    /// Adopt everything again after a new trace whose update gave a parameter another dtype.
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

    /// Forget what was taken over, apart from what only the steps keep; the next step takes it over again.
    pub fn forget(&mut self) -> PyResult<()> {
        self.kept = self.kept()?;
        self.discard();
        Ok(())
    }

    /// Forget what a call has taken over that then failed.
    pub fn discard(&mut self) {
        self.updated |= self.engine.as_ref().is_some_and(Engine::has_updated);
        self.engine = None;
        self.moments = None;
        self.lent = false;
    }

    /// Return the steps' state beside the optimizer's, that of frozen parameters included; `None`: nothing yet.
    pub fn kept(&self) -> PyResult<Option<NamedAuxState>> {
        let Some(engine) = &self.engine else {
            return Ok(self.kept.clone());
        };
        let state = engine.aux_state().map_err(|e| to_python(&e))?;
        let kept = NamedAuxState::new(self.names()?, state);
        Ok(Some(match &self.kept {
            Some(before) => kept.with_rest_of(before),
            None => kept,
        }))
    }

    /// Keep something else.
    pub fn keep(&mut self, py: Python<'_>, kept: NamedAuxState) -> PyResult<()> {
        self.expose(py)?;
        self.discard();
        self.kept = Some(kept);
        Ok(())
    }

    /// The number of batches in the window.
    pub fn batches(&self) -> usize {
        match (&self.engine, &self.kept) {
            (Some(engine), _) => engine.batches(),
            (None, Some(kept)) => kept.batches(),
            (None, None) => 0,
        }
    }

    pub(super) fn names(&self) -> PyResult<Vec<String>> {
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
}
