//! A captured part at work: what has changed is copied in, the graph is launched, what a call returns is copied out.
use std::time::Instant;

use mlx_rs::{error::Result as MlxResult, transforms::async_eval, Array};

use super::resident::{copied, Resident};
use crate::{
    engine::{evaluate::OnDevice, Call, Engine, Owner},
    error::{Error, Result},
    evaluation::Evaluate,
    mlx::array,
    trace::{Captured, Given, Outputs},
};

/// A part of a step that is launched again.
pub(in crate::engine) struct Launch {
    pub captured: Captured,
    pub call: Call,
    /// Whether it replaces parameters, and whether it updates float32 masters of them.
    pub updates: bool,
    pub keeps_masters: bool,
    /// What it gives, once it has been launched.
    pub outputs: Outputs,
}

/// The default device, as it launches captures again.
pub(in crate::engine) struct OnGraph<'a, 'b>(pub &'a mut OnDevice<'b>);

impl Evaluate for OnGraph<'_, '_> {
    type Work = Launch;
    type Ticket = Array;
    type Error = Error;

    fn active(&mut self) -> usize {
        self.0.active()
    }

    fn peak(&mut self) -> usize {
        self.0.peak()
    }

    fn wait(&mut self, done: &Array) -> Result<()> {
        self.0.wait(done)
    }

    fn synchronize(&mut self) {
        self.0.synchronize();
    }

    fn release(&mut self, _: &Launch) -> Result<()> {
        self.0.owner.release();
        Ok(())
    }

    fn try_out(&mut self, _: &mut Launch) -> Result<()> {
        Ok(()) // the capture has been verified
    }

    fn submit(&mut self, launch: &mut Launch, _: Option<usize>) -> Result<Option<Array>> {
        let started = Instant::now();
        let OnDevice { engine, owner } = &mut *self.0;
        let launched = engine.launch(launch, *owner);
        engine.seconds.evaluate += started.elapsed().as_secs_f64();
        launched.map_err(|error| engine.lost(error, *owner))
    }
}

impl Engine {
    // what to wait for
    fn launch(&mut self, launch: &mut Launch, owner: &mut dyn Owner) -> MlxResult<Option<Array>> {
        let Some(mut resident) = self.resident.take() else {
            return Err("there are no static arrays".into());
        };
        let mut launched = Err("nothing was launched".into());
        owner.unlocked(&mut || launched = self.launch_on(&mut resident, launch));
        let shown = launched.and_then(|ticket| {
            let written = &launch.captured.written;
            self.show_resident(&mut resident, launch.updates, written)?;
            Ok(ticket)
        });
        if launch.updates {
            self.masters_stale = !launch.keeps_masters;
        }
        self.resident = Some(resident);
        shown
    }

    fn launch_on(&self, resident: &mut Resident, launch: &mut Launch) -> MlxResult<Option<Array>> {
        let mut first = resident.held(self, launch.updates); // before anybody below has a handle
        let values = self.values();
        let mut copies = resident.changed(&values)?;
        resident.shown = values;
        let Launch { captured, call, .. } = launch;
        copy_in(&mut captured.given, call, &mut copies)?;
        let lazy = copies.iter().map(|(from, _)| from);
        first.extend(lazy.filter(|from| array::is_lazy(from)).cloned());
        if !first.is_empty() {
            async_eval(&first)?;
        }
        captured.graph.launch(&copies)?;

        let outputs = captured.outputs.map_given_out(copied)?;
        let mut out: Vec<Array> = outputs.given_out().cloned().collect();
        if out.is_empty() {
            let smallest = resident.arrays.iter().min_by_key(|array| array.nbytes());
            out.extend(smallest.map(copied).transpose()?);
        }
        async_eval(&out)?;
        let key = outputs.key.iter().map(|key| (call.others.len(), key));
        let others = outputs.others.iter().map(|(index, array)| (*index, array));
        for (at, value) in others.chain(key) {
            if let Some(Given::Carried { last, .. }) = captured.given.get_mut(at) {
                *last = Some(value.clone());
            }
        }
        launch.outputs = outputs;
        Ok(out.into_iter().next())
    }
}

// what is given, and is not what was given the last time, with its static array. A batch is a new one each time
fn copy_in(given: &mut [Given], call: &Call, copies: &mut Vec<(Array, Array)>) -> MlxResult<()> {
    let known = call.others.len() + 1; // the random key
    let arrays = call.others.iter().chain(&call.rest).enumerate();
    for (given, (i, value)) in given.iter_mut().zip(arrays) {
        let (Given::Copied { array, last } | Given::Carried { array, last }) = given else {
            continue;
        };
        if last.as_ref().map(array::id) != Some(array::id(value)) {
            copies.push((array::rows(value)?, array.clone()));
            *last = (i < known).then(|| value.clone());
        }
    }
    Ok(())
}
