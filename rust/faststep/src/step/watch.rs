//! Every now and then a step is watched: what share of a few weights the update left as they were.
use mlx_rs::{error::Result as MlxResult, Array};

use super::{device::evaluate, Engine, Owner};
use crate::{
    error::Result,
    meter::{self, Reading},
    trace::{Part, Rule, Trace},
};

/// Of so many updates one is metered.
const METER_EVERY: usize = 128;

impl Engine {
    /// The share of weights that the last metered update left as they were, from 0 to 1; waits for that update.
    #[must_use]
    pub fn unchanged(&self) -> Option<f64> {
        self.reading.as_ref()?.share()
    }

    // every now and then: a few weights before the update
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
        let reading = Reading::of(before, &after, &moments, skipped)?;
        evaluate(reading.arrays(), owner)?;
        self.reading = Some(reading);
        Ok(())
    }

    // samples of the first moment of each buffer that has one of its own size
    fn first_moments(&self, trace: &Trace) -> Result<Vec<Option<Array>>> {
        let (Part::Whole(Rule::Native(rules)) | Part::Update(Rule::Native(rules))) =
            &trace.recipe.part
        else {
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
        match trace.recipe.compute {
            Some(_) => self.wide_buffers(),
            None => self.buffers(),
        }
    }
}
