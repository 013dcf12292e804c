//! The engine's arrays between two steps: laid out, replaced, extended.
use std::{rc::Rc, sync::Arc};

use mlx_rs::{
    error::Result as MlxResult,
    transforms::{async_eval, eval},
    Array,
};

use super::{sample::Seen, Engine, Seconds};
use crate::{
    error::{Error, Result},
    evaluation::Schedule,
    layout::{
        aux_state::{self, Needs, Places},
        pack::taken_over,
        Layout,
    },
    mlx::{array, caller::Caller},
};

/// Parameters and state of no more bytes are evaluated at once where more would be in turn.
const SMALL: usize = 1 << 20;

fn are_small<'a>(arrays: impl Iterator<Item = &'a Array>) -> bool {
    arrays.map(Array::nbytes).sum::<usize>() <= SMALL
}

// by the calling thread, where that can be: few arrays are joined before the worker is awake
fn eval_here(arrays: &[&Array]) -> MlxResult<()> {
    Caller::default().evaluate(Some(0), || async_eval(arrays.iter().copied()))?;
    eval(arrays.iter().copied())
}

impl Engine {
    /// Take over parameters (by tensor) and state; small parameters are joined into shared buffers.
    ///
    /// # Errors
    /// [`Error::NoParameters`], or an array that cannot be evaluated.
    pub fn new(layout: Rc<Layout>, parameters: Vec<Array>, state: Vec<Array>) -> Result<Self> {
        Self::of(layout, parameters, state, false)
    }

    /// The same without memory of its own: everything stays lazy, to be planned with and dropped.
    ///
    /// # Errors
    /// [`Error::NoParameters`], or an array that cannot be joined.
    pub fn draft(layout: Rc<Layout>, parameters: Vec<Array>, state: Vec<Array>) -> Result<Self> {
        Self::of(layout, parameters, state, true)
    }

    pub(super) fn of(
        layout: Rc<Layout>,
        parameters: Vec<Array>,
        state: Vec<Array>,
        dry_run: bool,
    ) -> Result<Self> {
        if layout.is_empty() {
            return Err(Error::NoParameters);
        }
        // A thread's first evaluation creates its stream, which is a key of MLX's cache of compiled functions; otherwise
        // the first step would be traced twice.
        eval_here(&[&Array::from_int(0).add(Array::from_int(0))?])?;
        let mut engine = Self {
            layout,
            parameters,
            shared: Vec::new(),
            places: Places::behind(state.len()),
            state,
            window: None,
            undo: None,
            gives: false,
            masters_stale: false,
            averages: false,
            updates: 0,
            reading: None,
            seen: Seen::default(),
            fresh: Vec::new(),
            schedule: Schedule::new(false),
            captures: Vec::new(),
            called: None,
            exchanged: 0.0,
            resident: None,
            residents: 0,
            clock: Arc::default(),
            seconds: Seconds::default(),
            failed: false,
            dry_run,
        };
        engine.pack()?;
        Ok(engine)
    }

    /// Return whether it has updated parameters.
    #[must_use]
    pub fn has_updated(&self) -> bool {
        self.updates > 0
    }

    /// Go on in place of an engine that has: where no state waits for an update, or all is small, nothing is evaluated in turn.
    pub fn go_on(&mut self) {
        let made = !self.state.iter().any(array::is_filled);
        if made || are_small(self.parameters.iter().chain(&self.state)) {
            self.schedule = Schedule::new(true);
        }
    }

    /// Put another value into the optimizer's state.
    pub fn set_state(&mut self, index: usize, value: Array) {
        self.state[index] = value;
    }

    /// Let go of the optimizer's state, which another engine of an equal layout is to go on with, or which lies somewhere else.
    #[must_use]
    pub fn lend_state(&mut self) -> Vec<Array> {
        let places = &mut self.state[..self.places.optimizer];
        let lent = places
            .iter_mut()
            .map(|place| std::mem::replace(place, Array::from_bool(false)));
        lent.collect()
    }

    /// Take the state that an engine of an equal layout has let go of.
    pub fn take_state(&mut self, lent: Vec<Array>) {
        self.state.splice(..self.places.optimizer, lent);
    }

    /// Whether the state of the optimizer can go from one engine to the other as it is, by shapes and dtypes.
    #[must_use]
    pub fn can_lend(&self, other: &Self) -> bool {
        !self.failed
            && !other.failed
            && self.layout == other.layout
            && self.places.optimizer == other.places.optimizer
    }

    /// Put other values into parameters; the buffers in which they lie are joined anew, and so are their masters.
    ///
    /// # Errors
    /// An array that cannot be evaluated.
    pub fn set_parameters(&mut self, values: Vec<(usize, Array)>) -> Result<()> {
        for (index, value) in values {
            self.parameters[index] = value;
        }
        self.pack()?;
        if self.places.masters.is_some() {
            let masters = self.masters()?;
            self.set_masters(masters)?;
        }
        Ok(())
    }

    /// Make room for what a step needs beside the optimizer's state.
    ///
    /// # Errors
    /// An array that cannot be evaluated.
    pub fn need(&mut self, needs: Needs) -> Result<()> {
        let old = needs.masters && std::mem::take(&mut self.masters_stale);
        if old && self.places.masters.is_some() {
            self.set_masters(vec![None; self.layout.tensors().len()])?;
        }
        if needs.average && !self.averages {
            self.begin_average()?;
        }
        self.gives |= needs.given && !needs.window && self.places.window.is_none();
        let new = self.places.add(needs, &self.layout, &self.buffers())?;
        if !self.dry_run {
            for array in taken_over(&[], &new) {
                eval([array])?;
            }
        }
        self.state.extend(new);
        Ok(())
    }

    // reset an allocated average to the current parameters
    fn begin_average(&mut self) -> Result<()> {
        let Some(first) = self.places.average else {
            return Ok(());
        };
        let begun = aux_state::average(&self.buffers())?;
        if !self.dry_run {
            eval(&begun)?;
        }
        self.state.splice(first..first + begun.len(), begun);
        Ok(())
    }

    fn pack(&mut self) -> Result<()> {
        let shared = self.layout.shared();
        let packed = shared.map(|buffer| self.layout.pack_one(buffer, &self.parameters));
        self.shared = packed.collect::<MlxResult<_>>()?;
        if !self.dry_run {
            eval(&self.parameters)?;
            let taken_over = taken_over(&self.shared, &self.state);
            if are_small(self.parameters.iter().chain(&self.state)) {
                eval_here(&taken_over.collect::<Vec<_>>())?;
            } else {
                for array in taken_over {
                    eval([array])?;
                }
            }
        }
        let buffers = self.buffers();
        self.parameters = self.layout.views(&buffers)?;
        Ok(())
    }

    pub(super) fn buffers(&self) -> Vec<Array> {
        let mut shared = self.shared.iter();
        let buffers = (0..self.layout.len()).map(|buffer| match self.layout.single(buffer) {
            Some(tensor) => Some(&self.parameters[tensor]),
            None => shared.next(),
        });
        buffers.flatten().cloned().collect()
    }
}
