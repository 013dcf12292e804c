//! Evaluation on the device: dispatch, the steps in flight, and recovery when one fails.
use std::time::Instant;

use mlx_rs::{
    error::{Exception, Result as MlxResult},
    transforms::{async_eval, eval},
    Array,
};

use super::{engine::Flight, Engine, Owner};
use crate::{
    error::{Error, Result},
    memory::MemoryLimit,
    mlx::{
        array,
        memory::{self, active},
    },
    trace::Outputs,
};

/// So many operations of one step may have failed: each is an error of its own.
const MAX_FAILURES: usize = 16;

impl Engine {
    /// Wait for everything in flight.
    ///
    /// # Errors
    /// [`Error::Device`], when a step failed.
    pub fn synchronize(&mut self, owner: &mut dyn Owner) -> Result<()> {
        self.complete(owner)?;
        self.wait(0, owner)
    }

    // no array but those that changed: what an evaluation is asked for, no later one can take over before it is done
    pub(super) fn dispatch(
        &mut self,
        outputs: &Outputs,
        changed: &[usize],
        limit: Option<usize>,
        owner: &mut dyn Owner,
    ) -> Result<()> {
        let started = Instant::now();
        let mut sent = Ok(());
        owner.unlocked(&mut || {
            let _limited = MemoryLimit::to(limit);
            let arrays = outputs.before_update().chain(&self.fresh);
            sent = async_eval(arrays.chain(changed.iter().map(|&index| &self.state[index])));
        });
        self.show()?;
        self.seconds.evaluate += started.elapsed().as_secs_f64();
        let Err(error) = sent else {
            return Ok(());
        };
        let no_memory = ["malloc", "out of memory"];
        if !no_memory.iter().any(|words| error.what().contains(words)) {
            return Err(self.lost(error, owner));
        }
        self.failed = true;
        memory::clear_cache(); // what found no memory stays lazy: once more, all of it
        self.complete(owner)
    }

    // parameters as views into the new buffers
    fn show(&mut self) -> Result<()> {
        if self.fresh.is_empty() {
            return Ok(());
        }
        let buffers = std::mem::take(&mut self.fresh);
        self.parameters = self.layout.views(&buffers)?;
        let shared: Vec<usize> = self.layout.shared().collect();
        let buffers = buffers.into_iter().enumerate();
        let buffers = buffers.filter(|(buffer, _)| shared.contains(buffer));
        self.shared = buffers.map(|(_, array)| array).collect();
        Ok(())
    }

    pub(super) fn push_in_flight(&mut self, done: Option<Array>) {
        let bytes = std::mem::take(&mut self.pending_bytes);
        self.in_flight
            .extend(done.map(|done| Flight { done, bytes }));
    }

    // Before another step is handed to the device; the one that is there has been built meanwhile. What has not been
    // measured yet goes alone. Gives the limit of the memory.
    pub(super) fn make_room(
        &mut self,
        bytes: Option<usize>,
        owner: &mut dyn Owner,
    ) -> Result<Option<usize>> {
        self.wait(self.max_in_flight.saturating_sub(1), owner)?;
        let others = self.in_flight.iter().map(|flight| flight.bytes);
        self.pending_bytes = self.pending_bytes.max(bytes.unwrap_or(0));
        let most = others.fold(self.pending_bytes, usize::max);
        if bytes.is_none() || self.budget.is_stale(most, active()) {
            self.wait(0, owner)?;
            owner.unlocked(&mut memory::synchronize);
            self.budget.set_idle(active());
        }
        Ok(bytes.and_then(|_| self.budget.hand_over(most)))
    }

    pub(super) fn wait(&mut self, in_flight: usize, owner: &mut dyn Owner) -> Result<()> {
        let started = Instant::now();
        while self.in_flight.len() > in_flight {
            let Some(flight) = self.in_flight.pop_front() else {
                break;
            };
            if let Err(error) = evaluate(std::iter::once(&flight.done), owner) {
                return Err(self.lost(error, owner));
            }
        }
        self.seconds.wait += started.elapsed().as_secs_f64();
        Ok(())
    }

    // what is lazy by now is computed, from whatever there is, so that nobody who reads it meets the error once more
    fn lost(&mut self, error: Exception, owner: &mut dyn Owner) -> Error {
        self.failed = true;
        self.in_flight.clear();
        let kept = || {
            self.shared
                .iter()
                .chain(&self.parameters)
                .chain(&self.state)
        };
        for _ in 0..MAX_FAILURES {
            owner.unlocked(&mut || array::recover(kept()));
            if evaluate(kept(), owner).is_ok() {
                break;
            }
        }
        Error::Device(error)
    }

    // after a failure: compute what is still lazy
    pub(super) fn complete(&mut self, owner: &mut dyn Owner) -> Result<()> {
        if !self.failed {
            return Ok(());
        }
        let arrays = self.shared.iter().chain(&self.parameters);
        evaluate(arrays.chain(&self.state), owner).map_err(Error::Device)?;
        self.failed = false;
        Ok(())
    }
}

pub(super) fn evaluate<'a>(
    arrays: impl IntoIterator<Item = &'a Array>,
    owner: &mut dyn Owner,
) -> MlxResult<()> {
    let mut arrays = Some(arrays.into_iter());
    let mut result = Ok(());
    owner.unlocked(&mut || {
        if let Some(arrays) = arrays.take() {
            result = eval(arrays);
        }
    });
    result
}
