//! A captured part at work: what has changed is copied in, it is launched, what a call returns is copied out.
use std::{rc::Rc, time::Instant};

use mlx_rs::{error::Result as MlxResult, transforms::async_eval, Array};

use super::resident::{copied, Resident};
use crate::{
    engine::{evaluate::OnDevice, Engine, Owner},
    error::{Error, Result},
    evaluation::{Evaluate, HandOver},
    mlx::{
        array,
        replay::{self, Launched},
    },
    trace::{Call, Captured, Given, Outputs},
};

/// The most bytes of a result that a launch copies itself (`native/cuda/replay/scalars.hpp`), as far as there is room.
pub(super) const SMALL: usize = 8;

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

    fn watch(&mut self) {
        self.0.watch();
    }

    fn watched(&mut self) -> usize {
        self.0.watched()
    }

    fn wait(&mut self, done: &Array) -> Result<()> {
        self.0.wait(done)
    }

    fn synchronize(&mut self) -> Result<()> {
        self.0.synchronize()
    }

    fn release(&mut self, _: &Launch) -> Result<()> {
        Ok(()) // where it has to be: what nobody else holds stays where it is
    }

    fn try_out(&mut self, _: &mut Launch) -> Result<()> {
        Ok(()) // the capture has been verified
    }

    fn submit(&mut self, launch: &mut Launch, _: HandOver) -> Result<Option<Array>> {
        let started = Instant::now();
        let OnDevice { engine, owner, .. } = &mut *self.0;
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
        let launched = self.launch_over(&mut resident, launch, owner);
        if launch.updates {
            self.masters_stale = !launch.keeps_masters;
        }
        self.resident = Some(resident);
        launched.map(Some)
    }

    fn launch_over(
        &mut self,
        resident: &mut Resident,
        launch: &mut Launch,
        owner: &mut dyn Owner,
    ) -> MlxResult<Array> {
        let given = copy_in(&mut launch.captured.given, &launch.call)?;
        if !are_ready(&given) {
            let mut ready = Ok(());
            owner.unlocked(&mut || ready = prepare(&given));
            ready?;
        }
        let (updates, written) = (launch.updates, &launch.captured.written);
        let handles = owner.holds_alone();
        let is_untouched = |count| resident.is_untouched(self, updates, written, count);
        if !handles.is_some_and(is_untouched) {
            return self.launch_beside(resident, launch, given, owner);
        }
        // with the lock: what nobody holds nobody can come by
        if !replay::is_on_cpu() {
            return resident.launch(launch, &given);
        }
        let _closed = resident.gate.close(); // nor evaluate before it is done
        let mut launched = Err("nothing was launched".into());
        owner.unlocked(&mut || launched = resident.launch(launch, &given));
        launched
    }

    // somebody may hold what is written over, or has changed it
    fn launch_beside(
        &mut self,
        resident: &mut Resident,
        launch: &mut Launch,
        mut copies: Vec<(Array, Array)>,
        owner: &mut dyn Owner,
    ) -> MlxResult<Array> {
        if launch.updates {
            owner.release();
        }
        let written = launch.captured.written.clone();
        let held = resident.held(self, launch.updates, &written); // before anybody below has a handle
        let values = self.values();
        copies.extend(resident.changed(&values)?);
        let mut launched = Err("nothing was launched".into());
        owner.unlocked(&mut || {
            launched = prepare(&copies).and_then(|()| {
                let gate = Rc::clone(&resident.gate);
                let _closed = gate.close();
                resident.keep(&held)?;
                resident.take(&values); // which are copied
                resident.launch(launch, &copies)
            });
        });
        drop((copies, values));
        let launched = launched?;
        self.show_resident(resident, launch.updates, &written)?;
        Ok(launched)
    }
}

impl Resident {
    // returns what to wait for
    fn launch(&self, launch: &mut Launch, copies: &[(Array, Array)]) -> MlxResult<Array> {
        let Launch { captured, call, .. } = launch;
        let Launched { ticket, given } = captured.graph.launch(copies, &self.gate)?;
        let all = given.len() == captured.outputs.given_out().count();
        let (mut given, mut large) = (given.into_iter(), Vec::new());
        let outputs = captured.outputs.map_given_out(|result| {
            if all || result.nbytes() <= SMALL {
                if let Some(copy) = given.next() {
                    return Ok(copy);
                }
            }
            large.push(copied(result)?);
            Ok(large[large.len() - 1].clone())
        })?;
        if !large.is_empty() {
            async_eval(&large)?;
        }
        let key = outputs.key.iter().map(|key| (call.count_others(), key));
        let others = outputs.others.iter().map(|(index, array)| (*index, array));
        for (at, value) in others.chain(key) {
            if let Some(Given::Carried { last, .. }) = captured.given.get_mut(at) {
                *last = Some(value.clone());
            }
        }
        launch.outputs = outputs;
        Ok(large.pop().unwrap_or(ticket))
    }
}

// whether what is copied can be read: on a CPU it is by the thread that launches, elsewhere by the device
fn are_ready(copies: &[(Array, Array)]) -> bool {
    let on_cpu = replay::is_on_cpu();
    let is_ready = |from: &Array| !array::is_lazy(from) && (!on_cpu || replay::is_ready(from));
    copies.iter().all(|(from, _)| is_ready(from))
}

fn prepare(copies: &[(Array, Array)]) -> MlxResult<()> {
    let lazy = copies.iter().filter(|(from, _)| array::is_lazy(from));
    let lazy: Vec<&Array> = lazy.map(|(from, _)| from).collect();
    if !lazy.is_empty() {
        async_eval(lazy)?;
    }
    if replay::is_on_cpu() {
        copies.iter().try_for_each(|(from, _)| replay::wait(from))?;
    }
    Ok(())
}

// what is given, and is not what was given the last time, with its static array. A batch is a new one each time
pub(super) fn copy_in(given: &mut [Given], call: &Call) -> MlxResult<Vec<(Array, Array)>> {
    let mut copies = Vec::new();
    let known = call.count_others() + 1; // the random key
    let arrays = call.others().chain(&call.rest).enumerate();
    for (given, (i, value)) in given.iter_mut().zip(arrays) {
        let (Given::Copied { array, last } | Given::Carried { array, last }) = given else {
            continue;
        };
        if last.as_ref().map(array::id) != Some(array::id(value)) {
            copies.push((array::rows(value)?, array.clone()));
            *last = (i < known).then(|| value.clone());
        }
    }
    Ok(copies)
}
