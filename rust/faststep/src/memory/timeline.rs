//! The calls of a few updates, as a plan goes through them: by the schedule of every step, over the simulator.
use std::collections::HashSet;

use mlx_rs::{
    error::{Exception, Result},
    Array,
};

use super::{
    inputs::{PlanInputs, PlannedPart},
    simulator::{Device, Held, Kind, Reading, Simulator, Slot},
};
use crate::{
    evaluation::{Evaluate, Evaluated, HandOver, Schedule},
    layout::pack::taken_over,
    mlx::{array, join},
    trace::{in_turn, trial},
};

/// Largest number of simulated calls that make one update.
const MOST_CALLS: usize = 4;

/// The simulation of a plan, and how far it has come.
pub(crate) struct Timeline<'a> {
    simulated: Simulated<'a>,
    schedule: Schedule<usize>,
    evaluated: Vec<Evaluated>, // by part
}

/// The simulator, as it evaluates the parts of a plan.
struct Simulated<'a> {
    plan: &'a PlanInputs<'a>,
    simulator: Simulator,
    shown: bool, // true while the user's objects hold the arrays from before the first step
    submitted: Option<usize>,
    tried: bool, // the part whose turn it is has been tried out, and holds its gradients no more
    peak: usize, // since it was last asked for
    most: usize, // since it is watched
}

impl Simulated<'_> {
    fn look(&mut self) -> Reading {
        let reading = self.simulator.read();
        self.peak = self.peak.max(reading.peak);
        self.most = self.most.max(reading.peak);
        reading
    }

    // build the graph of a part over its inputs and the arrays that the user's objects hold
    fn begin(&mut self, part: &PlannedPart) -> Result<()> {
        let outputs = outputs(part);
        let shown = if self.shown { self.plan.shown } else { &[] };
        let inputs = self.plan.inputs.iter().chain(shown);
        let inputs: Vec<&Array> = inputs.collect();
        self.simulator.begin(&inputs, &outputs)?;
        self.simulator.hold(&inputs)?;
        self.simulator.hold(&outputs)
    }

    fn release_gradients(&mut self, part: &PlannedPart) -> Result<()> {
        let gradients: Vec<&Array> = part.outputs.gradients.iter().collect();
        self.simulator.release(&gradients)
    }

    // the arrays that an evaluation may overwrite: those that the engine has released
    fn let_go(&mut self, part: &PlannedPart) -> Result<()> {
        let (plan, outputs) = (self.plan, part.outputs);
        if !outputs.parameters.is_empty() {
            let parameters: Vec<&Array> = plan.parameters().iter().collect();
            self.simulator.release(&parameters)?;
        }
        if !self.tried && !part.keep_gradients {
            self.release_gradients(part)?;
        }
        let state: Vec<&Array> = outputs
            .state
            .iter()
            .map(|(i, _)| &plan.state()[*i])
            .collect();
        self.simulator.release(&state)?;
        let window = plan.window.filter(|_| part.is_given);
        let given = window.map(|first| &plan.state()[first..first + plan.layout.len()]);
        self.simulator.release(&all(given.unwrap_or_default()))
    }
}

fn all(arrays: &[Array]) -> Vec<&Array> {
    arrays.iter().collect()
}

fn outputs<'a>(part: &PlannedPart<'a>) -> Vec<&'a Array> {
    let outputs = part.outputs;
    outputs.before_update().chain(outputs.update()).collect()
}

impl<'a> Evaluate for Simulated<'a> {
    type Work = PlannedPart<'a>;
    type Ticket = usize;
    type Error = Exception;

    fn active(&mut self) -> usize {
        self.look().active
    }

    fn watch(&mut self) {
        self.look();
        self.most = 0;
    }

    fn watched(&mut self) -> usize {
        self.look();
        self.most
    }

    fn wait(&mut self, done: &usize) -> Result<()> {
        self.simulator.wait(*done);
        Ok(())
    }

    fn synchronize(&mut self) -> Result<()> {
        if let Some(done) = self.submitted {
            self.simulator.wait(done);
        }
        Ok(())
    }

    fn release(&mut self, _: &PlannedPart<'a>) -> Result<()> {
        if std::mem::replace(&mut self.shown, false) {
            let shown: Vec<&Array> = self.plan.shown.iter().collect();
            self.simulator.release(&shown)?;
        }
        Ok(())
    }

    fn try_out(&mut self, part: &mut PlannedPart<'a>) -> Result<()> {
        let before: Vec<&Array> = part.outputs.before_update().collect();
        self.simulator.eval_one_by_one(&before)?;
        self.release_gradients(part)?;
        self.tried = true;
        let update = trial(part.outputs, self.plan.inputs)?;
        let mut portions = update.chunks(if part.by_buffer { 1 } else { usize::MAX });
        portions.try_for_each(|portion| self.simulator.eval_one_by_one(portion).map(drop))
    }

    fn submit(&mut self, part: &mut PlannedPart<'a>, way: HandOver) -> Result<Option<usize>> {
        self.let_go(part)?;
        let one_by_one = matches!(way, HandOver::First(_)) && !join::is_cuda();
        if one_by_one {
            for array in in_turn(&part.outputs.parameters, part.by_buffer) {
                self.simulator.eval_one_by_one(&[array])?;
            }
        }
        let (HandOver::First(limit) | HandOver::Whole(limit)) = way;
        self.simulator.limit(limit);
        let state = part.outputs.state.iter().map(|(_, array)| array);
        let portions = (part.outputs).portions(&part.outputs.parameters, state, part.by_buffer);
        let mut gradients: HashSet<usize> = part.outputs.gradients.iter().map(array::id).collect();
        for (_, array) in &part.outputs.state {
            gradients.remove(&array::id(array));
        }
        let (mut before, mut done) = (0, 0);
        for mut asked in portions {
            self.simulator.wait(std::mem::replace(&mut before, done));
            if self.tried || !part.keep_gradients {
                asked.retain(|array| !gradients.contains(&array::id(array)));
            }
            done = if one_by_one {
                self.simulator.eval_one_by_one(&asked)?
            } else {
                self.simulator.async_eval(&asked)?
            };
        }
        (self.submitted, self.tried) = (Some(done), false);
        self.look();
        if part.outputs.loss.is_some() {
            let returned = part.outputs.loss.iter().chain(&part.outputs.aux);
            self.simulator.keep(Slot::Returned, returned)?;
        }
        for (input, output) in self.plan.pairs(part.outputs) {
            self.simulator.carry(input, output)?;
        }
        Ok(Some(done))
    }
}

impl<'a> Timeline<'a> {
    /// Begin on that device.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(plan: &'a PlanInputs<'a>, device: &Device) -> Result<Self> {
        let updated = plan.parts.last().is_some_and(|part| part.evaluated.warm);
        let mut schedule = Schedule::new(updated);
        schedule.allow(plan.in_flight);
        Ok(Self {
            simulated: Simulated {
                plan,
                simulator: Simulator::new(device)?,
                shown: true,
                submitted: None,
                tried: false,
                peak: 0,
                most: 0,
            },
            schedule,
            evaluated: plan.parts.iter().map(|part| part.evaluated).collect(),
        })
    }

    /// Memory in use, and its peak since this was last asked.
    pub fn read(&mut self) -> Reading {
        let mut reading = self.simulated.look();
        reading.peak = std::mem::take(&mut self.simulated.peak);
        reading
    }

    /// The bytes that are held when nothing is under way.
    pub fn rest(&mut self) -> Result<usize> {
        let Simulated {
            plan, simulator, ..
        } = &mut self.simulated;
        simulator.keep(Slot::Returned, &[])?;
        let inputs: Vec<&Array> = plan.inputs.iter().collect();
        simulator.begin(&inputs, &[])?;
        Ok(simulator.read().active)
    }

    /// Begin before the first step: parameters are joined and state is made, while the user's objects hold their own.
    pub fn lay_out(&mut self) -> Result<()> {
        let Simulated {
            plan, simulator, ..
        } = &mut self.simulated;
        let all = [plan.inputs, plan.shown].concat();
        let all: Vec<&Array> = all.iter().collect();
        simulator.begin(&[], &all)?;
        simulator.hold(&all)?;
        let tensors: Vec<&Array> = plan.tensors().iter().chain(plan.shown).collect();
        simulator.eval(&tensors)?;
        for array in taken_over(plan.shared(), plan.state()) {
            simulator.eval(&[array])?;
        }
        Ok(())
    }

    /// Say what memory is for. What is computed is an activation where the loss depends on it, and of the backward pass where
    /// a gradient does.
    pub fn mark(&mut self) -> Result<()> {
        let Simulated {
            plan, simulator, ..
        } = &mut self.simulated;
        let mut kinds = vec![
            (Kind::Parameters, Kind::Parameters, all(plan.parameters())),
            (Kind::State, Kind::State, all(plan.state())),
            (Kind::Model, Kind::Model, all(plan.others())),
            (Kind::Batch, Kind::Batch, all(plan.rest())),
        ];
        for PlannedPart { outputs, .. } in plan.parts {
            let others = outputs.others.iter().map(|(_, array)| array);
            let state = outputs.state.iter().map(|(_, array)| array);
            let loss = outputs.loss.iter().chain(&outputs.aux).chain(&outputs.kept);
            kinds.extend([
                (Kind::Activations, Kind::Activations, loss.collect()),
                (Kind::Gradients, Kind::Backward, all(&outputs.gradients)),
                // written where gradients are numbers
                (Kind::Model, Kind::Update, others.collect()),
                (Kind::Batch, Kind::Update, all(outputs.key.as_slice())),
                (Kind::Parameters, Kind::Update, all(&outputs.parameters)),
                (Kind::State, Kind::Update, state.collect()),
                (Kind::Update, Kind::Update, all(outputs.norm.as_slice())),
                (Kind::Update, Kind::Update, all(outputs.skipped.as_slice())),
            ]);
        }
        for (own, before, arrays) in kinds {
            simulator.mark(own, before, arrays)?;
        }
        Ok(())
    }

    /// Return the memory in use while the operations of the last call ran.
    pub fn recorded(&self) -> Vec<Held> {
        self.simulated.simulator.recorded()
    }

    /// The calls that make one update; of many, a few do for all.
    pub fn update(&mut self) -> Result<()> {
        let plan = self.simulated.plan;
        let last = plan.parts.len() - 1;
        for call in (0..plan.calls.min(MOST_CALLS)).rev() {
            let updates = call == 0 && last > 0;
            if updates && plan.parts[last].eager {
                // kept for an update that may fail
                let simulator = &mut self.simulated.simulator;
                simulator.keep(Slot::Window, plan.window())?;
            } else if updates && !plan.parts[last].is_given && !self.evaluated[last].tried {
                let mut part = plan.parts[last];
                self.simulated.begin(&part)?;
                self.simulated.try_out(&mut part)?;
                (self.simulated.tried, self.evaluated[last].tried) = (false, true);
            }
            if call == 0 {
                self.simulated.simulator.record();
            }
            self.schedule.begin();
            self.run(0)?;
            if updates {
                self.run(last)?;
                self.simulated.simulator.keep(Slot::Window, &[])?;
            }
            self.schedule.end();
            self.wait(plan.in_flight)?;
        }
        Ok(())
    }

    /// Let so many calls be under way, no more.
    pub fn wait(&mut self, in_flight: usize) -> Result<()> {
        self.schedule.wait(&mut self.simulated, in_flight)
    }

    fn run(&mut self, number: usize) -> Result<()> {
        let mut part = self.simulated.plan.parts[number];
        self.simulated.begin(&part)?;
        let updates = !part.outputs.parameters.is_empty();
        let evaluated = &mut self.evaluated[number];
        self.schedule
            .evaluate(&mut self.simulated, &mut part, evaluated, updates)
    }
}
