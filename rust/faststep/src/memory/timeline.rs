//! The timeline of training, call by call, as the simulator goes through it: what is evaluated, and who holds what.
//!
//! It follows the engine: what that evaluates, lets go of or takes up in another order, this has to as well.
use std::collections::{HashSet, VecDeque};

use mlx_rs::{error::Result, Array};

use super::{
    budget::MemoryBudget,
    inputs::{PlanInputs, PlannedPart},
    simulator::{Device, Reading, Simulator, Slot},
};
use crate::{layout::pack::taken_over, mlx::array, trace::trial};

/// Of the calls that make one update, so many at the most.
const MOST_CALLS: usize = 4;

/// The simulation of a plan, and how far it has come.
pub(crate) struct Timeline<'a> {
    plan: &'a PlanInputs<'a>,
    simulator: Simulator,
    shown: bool, // whether the user's objects still hold what was there before the first step
    warm: Vec<bool>,
    bytes: Vec<Option<usize>>, // the most that each part took, alone
    budget: MemoryBudget,
    in_flight: VecDeque<Flight>,
    peak: usize, // since it was last asked for
    most: usize, // ever
}

/// A call that the device may not have done yet: what to wait for, and the most bytes that it takes alone.
struct Flight {
    done: usize,
    bytes: usize,
}

impl<'a> Timeline<'a> {
    /// Begin on that device.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(plan: &'a PlanInputs<'a>, device: &Device) -> Result<Self> {
        Ok(Self {
            plan,
            simulator: Simulator::new(device)?,
            shown: true,
            warm: plan.parts.iter().map(|part| part.warm).collect(),
            bytes: vec![None; plan.parts.len()],
            budget: MemoryBudget::new(),
            in_flight: VecDeque::new(),
            peak: 0,
            most: 0,
        })
    }

    /// What it has come to since this was last asked.
    pub fn read(&mut self) -> Reading {
        let mut reading = self.look();
        reading.peak = std::mem::take(&mut self.peak);
        reading
    }

    fn look(&mut self) -> Reading {
        let reading = self.simulator.read();
        self.peak = self.peak.max(reading.peak);
        self.most = self.most.max(reading.peak);
        reading
    }

    /// What is held when nothing is under way, in bytes.
    pub fn rest(&mut self) -> Result<usize> {
        self.simulator.keep(Slot::Returned, &[])?;
        let inputs: Vec<&Array> = self.plan.inputs.iter().collect();
        self.simulator.begin(&inputs, &[])?;
        Ok(self.simulator.read().active)
    }

    /// Before the first step, parameters are joined and state is made, while the user's objects hold their own.
    pub fn lay_out(&mut self) -> Result<()> {
        let plan = self.plan;
        let all = [plan.inputs, plan.shown].concat();
        let all: Vec<&Array> = all.iter().collect();
        self.simulator.begin(&[], &all)?;
        self.simulator.hold(&all)?;
        let tensors: Vec<&Array> = plan.tensors().iter().chain(plan.shown).collect();
        self.simulator.eval(&tensors)?;
        for array in taken_over(plan.shared(), plan.state()) {
            self.simulator.eval(&[array])?;
        }
        Ok(())
    }

    /// The calls that make one update; of many, a few do for all.
    pub fn update(&mut self) -> Result<()> {
        let last = self.plan.parts.len() - 1;
        for call in (0..self.plan.calls.min(MOST_CALLS)).rev() {
            let updates = call == 0 && last > 0;
            if updates && (!self.warm[last] || self.plan.parts[last].eager) {
                // for an update that may fail
                self.simulator.keep(Slot::Window, self.plan.window())?;
            }
            let mut flight = self.run(0, None)?;
            if updates {
                flight = self.run(last, Some(flight))?;
                self.simulator.keep(Slot::Window, &[])?;
            }
            self.in_flight.push_back(flight);
            self.wait(self.plan.in_flight);
        }
        Ok(())
    }

    /// Let so many calls be under way, no more.
    pub fn wait(&mut self, in_flight: usize) {
        let done = self.in_flight.len().saturating_sub(in_flight);
        for flight in self.in_flight.drain(..done) {
            self.simulator.wait(flight.done);
        }
    }

    // `pending`: the part of this call that is under way
    fn run(&mut self, number: usize, pending: Option<Flight>) -> Result<Flight> {
        let (plan, part) = (self.plan, self.plan.parts[number]);
        let outputs = part.outputs;
        let updated: Vec<&Array> = outputs.update().collect();
        let before: Vec<&Array> = outputs.before_update().collect();
        let all = [before.as_slice(), &updated].concat();
        let shown = if self.shown { plan.shown } else { &[] };
        let inputs: Vec<&Array> = plan.inputs.iter().chain(shown).collect();
        self.simulator.begin(&inputs, &all)?;
        self.simulator.hold(&inputs)?;
        self.simulator.hold(&all)?;
        let measured = self.warm[number] && self.bytes[number].is_none();
        if !outputs.parameters.is_empty() {
            let shown: Vec<&Array> = shown.iter().collect();
            self.simulator.release(&shown)?;
            self.shown = false;
        }
        if !std::mem::replace(&mut self.warm[number], true) {
            self.simulator.eval(&before)?;
            self.simulator.eval(&trial(outputs, plan.inputs)?)?;
        }
        let pending = self.make_room(self.bytes[number], pending);
        let active = self.look().active;
        self.let_go(&part)?;
        let done = if part.keep_gradients {
            self.simulator.async_eval(&all)?
        } else {
            let gradients: HashSet<usize> = outputs.gradients.iter().map(array::id).collect();
            let rest = all.into_iter();
            let rest = rest.filter(|array| !gradients.contains(&array::id(array)));
            self.simulator.async_eval(&rest.collect::<Vec<_>>())?
        };
        self.look();
        if measured {
            self.bytes[number] = Some(self.most.saturating_sub(active));
        }
        let bytes = pending.max(self.bytes[number].unwrap_or(0));
        if outputs.loss.is_some() {
            let returned = outputs.loss.iter().chain(&outputs.aux);
            self.simulator.keep(Slot::Returned, returned)?;
        }
        for (input, output) in plan.pairs(outputs) {
            self.simulator.carry(input, output)?;
        }
        Ok(Flight { done, bytes })
    }

    // gives what this call takes, as far as it is known
    fn make_room(&mut self, bytes: Option<usize>, pending: Option<Flight>) -> usize {
        self.wait(self.plan.in_flight.saturating_sub(1));
        let others = self.in_flight.iter().chain(&pending);
        let others = others.map(|flight| flight.bytes);
        let most = others.chain(bytes).max().unwrap_or(0);
        let active = self.look().active;
        if bytes.is_none() || self.budget.is_stale(most, active) {
            self.wait(0);
            if let Some(flight) = &pending {
                self.simulator.wait(flight.done);
            }
            let active = self.look().active;
            self.budget.set_idle(active);
        }
        let limit = bytes.and_then(|_| self.budget.hand_over(most));
        self.simulator.limit(limit);
        pending.map(|flight| flight.bytes).max(bytes).unwrap_or(0)
    }

    // what an evaluation may write over: what the engine holds no more
    fn let_go(&mut self, part: &PlannedPart) -> Result<()> {
        let (plan, outputs) = (self.plan, part.outputs);
        if !outputs.parameters.is_empty() {
            let parameters: Vec<&Array> = plan.parameters().iter().collect();
            self.simulator.release(&parameters)?;
        }
        if !part.keep_gradients {
            let gradients: Vec<&Array> = outputs.gradients.iter().collect();
            self.simulator.release(&gradients)?;
        }
        let state: Vec<&Array> = outputs
            .state
            .iter()
            .map(|(i, _)| &plan.state()[*i])
            .collect();
        self.simulator.release(&state)
    }
}
