//! The course of training, call by call, as [`crate::simulation`] goes through it: what is evaluated, and who holds what.
//!
//! It follows [`crate::step::Engine`]: what that evaluates, lets go of or takes up in another order, this has to as well.
use std::collections::{HashSet, VecDeque};

use mlx_rs::{error::Result, Array};

use crate::{
    array,
    memory::Room,
    scene::{Part, Scene},
    simulation::{Device, Reading, Simulation, Slot},
    step::{taken_over, trial},
};

/// Of the calls that make one update, so many at the most.
const MOST_CALLS: usize = 4;

/// The simulation of a scene, and how far it has come.
pub(crate) struct Course<'a> {
    scene: &'a Scene<'a>,
    simulation: Simulation,
    shown: bool, // whether the user's objects still hold what was there before the first step
    warm: Vec<bool>,
    bytes: Vec<Option<usize>>, // the most that each part took, alone
    room: Room,
    in_flight: VecDeque<Flight>,
    peak: usize, // since it was last asked for
    most: usize, // ever
}

/// A call that the device may not have done yet: what to wait for, and the most bytes that it takes alone.
struct Flight {
    done: usize,
    bytes: usize,
}

impl<'a> Course<'a> {
    /// Begin on that device.
    pub fn new(scene: &'a Scene<'a>, device: &Device) -> Self {
        Self {
            scene,
            simulation: Simulation::new(device),
            shown: true,
            warm: scene.parts.iter().map(|part| part.warm).collect(),
            bytes: vec![None; scene.parts.len()],
            room: Room::new(),
            in_flight: VecDeque::new(),
            peak: 0,
            most: 0,
        }
    }

    /// What it has come to since this was last asked.
    pub fn read(&mut self) -> Reading {
        let mut reading = self.look();
        reading.peak = std::mem::take(&mut self.peak);
        reading
    }

    fn look(&mut self) -> Reading {
        let reading = self.simulation.read();
        self.peak = self.peak.max(reading.peak);
        self.most = self.most.max(reading.peak);
        reading
    }

    /// What is held when nothing is under way, in bytes.
    pub fn rest(&mut self) -> Result<usize> {
        self.simulation.keep(Slot::Returned, &[])?;
        let inputs: Vec<&Array> = self.scene.inputs.iter().collect();
        self.simulation.begin(&inputs, &[])?;
        Ok(self.simulation.read().active)
    }

    /// Before the first step, parameters are joined and state is made, while the user's objects hold their own.
    pub fn lay_out(&mut self) -> Result<()> {
        let scene = self.scene;
        let all = [scene.inputs, scene.shown].concat();
        let all: Vec<&Array> = all.iter().collect();
        self.simulation.begin(&[], &all)?;
        self.simulation.hold(&all)?;
        let tensors: Vec<&Array> = scene.tensors().iter().chain(scene.shown).collect();
        self.simulation.eval(&tensors)?;
        for array in taken_over(scene.shared(), scene.state()) {
            self.simulation.eval(&[array])?;
        }
        Ok(())
    }

    /// The calls that make one update; of many, a few do for all.
    pub fn update(&mut self) -> Result<()> {
        let last = self.scene.parts.len() - 1;
        for call in (0..self.scene.calls.min(MOST_CALLS)).rev() {
            let updates = call == 0 && last > 0;
            if updates && (!self.warm[last] || self.scene.parts[last].eager) {
                // for an update that may fail
                self.simulation.keep(Slot::Window, self.scene.window())?;
            }
            let mut flight = self.run(0, None)?;
            if updates {
                flight = self.run(last, Some(flight))?;
                self.simulation.keep(Slot::Window, &[])?;
            }
            self.in_flight.push_back(flight);
            self.wait(self.scene.in_flight);
        }
        Ok(())
    }

    /// Let so many calls be under way, no more.
    pub fn wait(&mut self, in_flight: usize) {
        let done = self.in_flight.len().saturating_sub(in_flight);
        for flight in self.in_flight.drain(..done) {
            self.simulation.wait(flight.done);
        }
    }

    // `handed_over`: the part of this call that is under way
    fn run(&mut self, number: usize, handed_over: Option<Flight>) -> Result<Flight> {
        let (scene, part) = (self.scene, self.scene.parts[number]);
        let outputs = part.outputs;
        let updated: Vec<&Array> = outputs.update().collect();
        let before: Vec<&Array> = outputs.before_update().collect();
        let all = [before.as_slice(), &updated].concat();
        let shown = if self.shown { scene.shown } else { &[] };
        let inputs: Vec<&Array> = scene.inputs.iter().chain(shown).collect();
        self.simulation.begin(&inputs, &all)?;
        self.simulation.hold(&inputs)?;
        self.simulation.hold(&all)?;
        let measured = self.warm[number] && self.bytes[number].is_none();
        if !outputs.parameters.is_empty() {
            let shown: Vec<&Array> = shown.iter().collect();
            self.simulation.release(&shown)?;
            self.shown = false;
        }
        if !std::mem::replace(&mut self.warm[number], true) {
            self.simulation.eval(&before)?;
            self.simulation.eval(&trial(outputs, scene.inputs)?)?;
        }
        let handed_over = self.make_room(self.bytes[number], handed_over);
        let active = self.look().active;
        self.let_go(&part)?;
        let done = if part.keep_gradients {
            self.simulation.async_eval(&all)?
        } else {
            let gradients: HashSet<usize> = outputs.gradients.iter().map(array::id).collect();
            let rest = all.into_iter();
            let rest = rest.filter(|array| !gradients.contains(&array::id(array)));
            self.simulation.async_eval(&rest.collect::<Vec<_>>())?
        };
        self.look();
        if measured {
            self.bytes[number] = Some(self.most.saturating_sub(active));
        }
        let bytes = handed_over.max(self.bytes[number].unwrap_or(0));
        if outputs.loss.is_some() {
            let returned = outputs.loss.iter().chain(&outputs.aux);
            self.simulation.keep(Slot::Returned, returned)?;
        }
        for (input, output) in scene.pairs(outputs) {
            self.simulation.carry(input, output)?;
        }
        Ok(Flight { done, bytes })
    }

    // gives what this call takes, as far as it is known
    fn make_room(&mut self, bytes: Option<usize>, handed_over: Option<Flight>) -> usize {
        self.wait(self.scene.in_flight.saturating_sub(1));
        let others = self.in_flight.iter().chain(&handed_over);
        let others = others.map(|flight| flight.bytes);
        let most = others.chain(bytes).max().unwrap_or(0);
        let active = self.look().active;
        if bytes.is_none() || self.room.is_stale(most, active) {
            self.wait(0);
            if let Some(flight) = &handed_over {
                self.simulation.wait(flight.done);
            }
            let active = self.look().active;
            self.room.settled(active);
        }
        let limit = bytes.and_then(|_| self.room.hand_over(most));
        self.simulation.limit(limit);
        handed_over
            .map(|flight| flight.bytes)
            .max(bytes)
            .unwrap_or(0)
    }

    // what an evaluation may write over: what the engine holds no more
    fn let_go(&mut self, part: &Part) -> Result<()> {
        let (scene, outputs) = (self.scene, part.outputs);
        if !outputs.parameters.is_empty() {
            let parameters: Vec<&Array> = scene.parameters().iter().collect();
            self.simulation.release(&parameters)?;
        }
        if !part.keep_gradients {
            let gradients: Vec<&Array> = outputs.gradients.iter().collect();
            self.simulation.release(&gradients)?;
        }
        let state: Vec<&Array> = outputs
            .state
            .iter()
            .map(|(i, _)| &scene.state()[*i])
            .collect();
        self.simulation.release(&state)
    }
}
