//! Samples how many weights an update leaves unchanged, every 128 updates, and records at each step the tensors on which
//! its loss does not depend.
use std::rc::Rc;

use mlx_rs::{error::Result as MlxResult, Array};

use super::{
    evaluate::evaluate,
    meter::{self, Reading},
    Engine, Owner,
};
use crate::{
    error::Result,
    optim::Rules,
    trace::{Outputs, Part, Rule, Trace},
};

/// Number of updates of which one is sampled.
const METER_EVERY: usize = 128;
/// Share of weights that no step of the learning rate moves from which on updates round to nothing.
const NOTHING: f64 = 0.9;
/// Number of steps after which tensors without a gradient are reported.
const MANY: usize = 16;

/// Observations of the last steps.
#[derive(Debug, Default)]
pub(super) struct Seen {
    rounded: usize,            // metered updates in a row that rounded to nothing
    rate: f64,                 // the learning rate at the last one
    highest: f64,              // the highest so far
    idle: Option<Rc<[usize]>>, // the tensors on which no loss has depended
    steps: usize,
}

impl Seen {
    // Small updates are expected during warm-up and at the end of a decay.
    fn round(&mut self, is_lost: bool, rate: f64) {
        let before = std::mem::replace(&mut self.rate, rate);
        self.highest = self.highest.max(rate);
        let full = rate > 0.0 && rate >= 0.5 * self.highest;
        let steady = self.rounded > 0 && rate <= before;
        self.rounded = match (is_lost && full, steady) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => self.rounded + 1,
        };
    }

    fn depends(&mut self, idle: &Rc<[usize]>) {
        self.steps += 1;
        match &mut self.idle {
            None => self.idle = Some(idle.clone()),
            Some(known) if known.is_empty() || Rc::ptr_eq(known, idle) => {}
            Some(known) => {
                let both = known.iter().filter(|tensor| idle.contains(tensor));
                *known = both.copied().collect();
            }
        }
    }
}

impl Engine {
    /// The share of weights that the last metered update left as they were, from 0 to 1; waits for that update.
    #[must_use]
    pub fn unchanged(&self) -> Option<f64> {
        self.reading.as_ref()?.share()
    }

    /// Return whether updates have rounded to nothing for more than a hundred of them, where that is more than a small
    /// rate.
    #[must_use]
    pub fn rounds_away(&self) -> bool {
        self.seen.rounded > 1 // more than METER_EVERY updates
    }

    /// The tensors on which no loss has depended in the first steps, in the order of the layout.
    #[must_use]
    pub fn idle(&self) -> &[usize] {
        match &self.seen.idle {
            Some(idle) if self.seen.steps >= MANY => idle,
            _ => &[],
        }
    }

    pub(super) fn note(&mut self, outputs: &Outputs) {
        if outputs.loss.is_some() {
            self.seen.depends(&outputs.idle);
        }
    }

    // sample a few weights before the update
    pub(super) fn sample(
        &self,
        trace: &Trace,
        owner: &mut dyn Owner,
    ) -> Result<Option<Vec<Array>>> {
        let updates = matches!(trace.recipe.part, Part::Whole(_) | Part::Update(_));
        if !updates || self.updates % METER_EVERY != 1 {
            return Ok(None);
        }
        let sample = meter::samples(&self.weights(trace))?;
        evaluate(&sample, owner)?; // before the update takes the memory over
        Ok(Some(sample))
    }

    pub(super) fn meter(
        &mut self,
        trace: &Trace,
        before: &[Array],
        skipped: Option<Array>,
        owner: &mut dyn Owner,
    ) -> Result<()> {
        let after = meter::samples(&self.weights(trace))?;
        let moments = self.first_moments(trace)?;
        let native = rules(trace);
        let rates = native.map(|rules| rules.rates(&self.layout));
        let rates = rates.unwrap_or_else(|| vec![None; self.layout.len()]);
        let bounds: Vec<_> = rates
            .iter()
            .map(|rate| rate.filter(|(_, is_bound)| *is_bound))
            .map(|rate| rate.map(|(at, _)| &self.state[at]))
            .collect();
        let reading = Reading::of(before, &after, &moments, &bounds, skipped)?;
        let values = rates.iter().flatten().map(|(at, _)| &self.state[*at]);
        evaluate(reading.arrays().into_iter().chain(values.clone()), owner)?;
        let values = values.filter_map(|rate| rate.try_item_cast::<f32>().ok());
        // a rule without a rate has one of its own; a user's optimizer, one that is not known
        let own = native.is_some() && rates.iter().any(Option::is_none);
        let rate = values.fold(if own { 1.0 } else { 0.0 }, f32::max);
        let is_lost = if native.is_some_and(Rules::is_stochastic) {
            false // what one update loses another one makes up for
        } else if bounds.iter().any(Option::is_some) {
            reading.stuck().is_some_and(|share| share >= NOTHING)
        } else {
            reading.share().is_some_and(|share| share >= 1.0) // whatever the sizes of the gradients
        };
        self.seen.round(is_lost, f64::from(rate));
        self.reading = Some(reading);
        Ok(())
    }

    // sample the first moment of each buffer whose moment has the buffer's size
    fn first_moments(&self, trace: &Trace) -> Result<Vec<Option<Array>>> {
        let Some(rules) = rules(trace) else {
            return Ok(vec![None; self.layout.len()]);
        };
        let places = rules.places(&self.layout).into_iter();
        let samples = places.zip(self.buffers()).map(|(place, buffer)| {
            let moment = self.state[place].first();
            let moment = moment.filter(|moment| moment.size() == buffer.size());
            moment.map(meter::sample).transpose()
        });
        Ok(samples.collect::<MlxResult<_>>()?)
    }

    // the buffers that the trace updates
    fn weights(&self, trace: &Trace) -> Vec<Array> {
        match trace.recipe.options.compute_dtype {
            Some(_) => self.wide_buffers(),
            None => self.buffers(),
        }
    }
}

fn rules(trace: &Trace) -> Option<&Rules> {
    match &trace.recipe.part {
        Part::Whole(Rule::Native(rules)) | Part::Update(Rule::Native(rules)) => Some(rules),
        _ => None,
    }
}
