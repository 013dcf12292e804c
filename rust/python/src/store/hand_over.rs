//! One optimizer that several models use in turns: its state goes from store to store as it is.
use faststep::engine::{Rule, StateLayout};
use pyo3::prelude::*;

use super::{moments::Moments, Store};

impl Store {
    /// Hand the optimizer's state over to another store. One that cannot go on with it as it is reads it from the optimizer.
    ///
    /// The engine stays without that state, so that it needs not be laid out anew when its model's turn comes.
    pub fn hand_over(&mut self, optimizer: &Bound<'_, PyAny>, to: &mut Self) -> PyResult<()> {
        let py = optimizer.py();
        if self.lent {
            return Ok(()); // of several optimizers in one
        }
        self.look_at_moments(optimizer)?;
        let fits = self.fits(to);
        if !fits {
            self.expose(py)?;
        }
        let moments = self.moments.take();
        let Some(engine) = &mut self.engine else {
            return Ok(());
        };
        let state = engine.lend_state();
        self.lent = true;
        match &mut to.engine {
            Some(other) if fits => {
                other.take_state(state);
                to.moments = moments;
                to.lent = false;
            }
            _ => engine.give_back(), // it may be for good
        }
        Ok(())
    }

    /// Forget an engine whose state nobody has handed over.
    pub fn wake(&mut self) -> PyResult<()> {
        if self.lent {
            self.forget()?;
        }
        Ok(())
    }

    fn fits(&self, to: &Self) -> bool {
        let (Some(engine), Some(other)) = (&self.engine, &to.engine) else {
            return false;
        };
        let (Some(model), Some(its)) = (&self.current, &to.current) else {
            return false;
        };
        let places = self.moments.as_ref().map(Moments::layout);
        to.lent
            && self.thread == to.thread
            && self.mixed == to.mixed
            && self.stored == to.stored
            && engine.can_lend(other)
            && match (&to.rule, places) {
                (Some(Rule::Native(rules)), Some(places)) => {
                    *places == StateLayout::new(rules, other.layout())
                }
                (Some(Rule::Host), None) => true,
                _ => false,
            }
            && (0..engine.layout().tensors().len()).all(|at| model.path(at) == its.path(at))
    }
}
