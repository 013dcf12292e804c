//! A capture is made from what MLX has just evaluated, and kept where launching it gives the same.
use std::time::Instant;

use mlx_rs::{
    error::{Exception, Result as MlxResult},
    ops, Array, Dtype,
};

use super::{launch::SMALL, resident::copied, Rehearsal};
use crate::{
    engine::{
        evaluate::{evaluate, synchronize},
        Engine, Owner,
    },
    error::{unread, Result},
    layout::precision,
    mlx::{
        array, fuse, kernels,
        replay::{self, is_own, Capture, Computed},
    },
    trace::{Captured, Given, Inputs, Outputs, Trace},
};

/// The difference from MLX's update that is tolerated: relative to the update, and to the value.
const UPDATE_TOLERANCE: (f32, f32) = (2e-2, 1e-5);
/// The same of loss, norm and other outputs, relative to the value.
const OUTPUT_TOLERANCE: f32 = 1e-3;
/// The tolerance of a value in half precision, whose last bit may be another one.
const HALF_TOLERANCE: f32 = 1e-2;
/// On a CPU so many evaluations are compared before a capture takes their place: what a task had kept of the first one would
/// show in the second.
const ON_CPU: usize = 2;

impl Engine {
    /// Capture a trace that MLX has just evaluated, and keep the capture where it gives the same.
    ///
    /// # Errors
    /// Of a step in flight. That the trace cannot be captured is none.
    pub(in crate::engine) fn capture(
        &mut self,
        trace: &mut Trace,
        rehearsal: Rehearsal,
        ordinary: &Outputs,
        owner: &mut dyn Owner,
    ) -> Result<()> {
        self.wait(0, owner)?;
        let started = Instant::now();
        match self.verified(trace, rehearsal, ordinary, owner) {
            Ok(Some(captured)) => {
                let (info, seconds) = (captured.graph.info, started.elapsed().as_secs_f64());
                let nodes = if kernels::are_in_blocks() {
                    "tasks (kernels in blocks: there is no compiler)"
                } else if replay::is_on_cpu() {
                    "tasks"
                } else {
                    "kernels and copies"
                };
                if trace.capture.captured.is_empty() {
                    trace.capture.captured = format!(
                        "in {seconds:.2} s: {} {nodes}, {} bytes",
                        info.nodes, info.bytes
                    );
                }
                self.keep(trace, captured);
            }
            Ok(None) => trace.capture.runs = 0,
            Err(error) => trace.capture.refuse(error.what()),
        }
        Ok(())
    }

    // none while loss or norm are not finite: they would say nothing
    fn verified(
        &mut self,
        trace: &mut Trace,
        rehearsal: Rehearsal,
        ordinary: &Outputs,
        owner: &mut dyn Owner,
    ) -> MlxResult<Option<Captured>> {
        for value in ordinary.loss.iter().chain(&ordinary.norm) {
            if !value.try_item_cast::<f32>().map_err(unread)?.is_finite() {
                return Ok(rehearsal.captured); // which stays as doubtful as it was
            }
        }
        let Rehearsal {
            inputs,
            given,
            captured,
        } = rehearsal;
        let captured = match captured {
            Some(captured) => captured,
            None => self.recorded(trace, inputs, given, owner)?,
        };
        if replay::is_on_cpu() {
            self.compare_bits(&captured, ordinary, owner)?;
        } else {
            self.compare(&captured, ordinary, owner)?;
        }
        let doubts = captured.doubts.saturating_sub(1);
        Ok(Some(Captured { doubts, ..captured }))
    }

    // what the rehearsal's inputs give, as it is recorded
    fn recorded(
        &mut self,
        trace: &mut Trace,
        inputs: Vec<Array>,
        given: Vec<Given>,
        owner: &mut dyn Owner,
    ) -> MlxResult<Captured> {
        let Some(resident) = &mut self.resident else {
            return Err("there are no static arrays".into());
        };
        let buffers = self.layout.len();
        let recipe = &trace.recipe;
        let reduced = recipe.part.fills_window() && recipe.options.reduced;
        let summed = if reduced && !replay::is_on_cpu() {
            let places = self.places.summed(&self.layout).into_iter();
            let arrays = places.map(|index| resident.arrays[buffers + index].clone());
            let arrays: Vec<Array> = arrays.collect();
            let exchange = resident.exchange(arrays.len())?;
            Some((arrays, exchange))
        } else {
            None
        };
        let (arrays, resident) = (resident.arrays.clone(), resident.number);
        let inputs = Inputs::from(inputs);
        let (mut outputs, mut written) = (Outputs::default(), Vec::new());
        let mut computed = || {
            let traced = trace.call(&inputs);
            let mut traced = traced.map_err(|error| Exception::custom(error.to_string()))?;
            if !traced.kept.is_empty() {
                return Err("the model keeps arrays that a step computes".into());
            }
            fuse::casts(traced.update())?;
            let mut carried = Vec::new();
            for (value, place) in std::mem::take(&mut traced.parameters).iter().zip(&arrays) {
                carried.push((value.contiguous()?, place.clone()));
            }
            let state = std::mem::take(&mut traced.state);
            for (index, value) in &state {
                carried.push((value.contiguous()?, arrays[buffers + index].clone()));
            }
            written = state.into_iter().map(|(index, _)| index).collect();
            outputs = given_out(&traced)?;
            carried.extend(taken_over(&outputs, &given, trace.recipe.others)?);
            let results = outputs.given_out().cloned().collect();
            let is_fed = |it: &&Given| !matches!(it, Given::Fixed(_));
            let fed = given.iter().filter(is_fed).map(|it| it.array().clone());
            Ok(Computed {
                results,
                carried,
                fed: fed.collect(),
                inputs: inputs.own.clone(),
                summed: summed.clone(),
            })
        };

        synchronize(owner)?;
        let graph = Capture::record(&mut computed)?;
        Ok(Captured {
            graph,
            resident,
            written,
            given,
            outputs,
            doubts: if replay::is_on_cpu() { ON_CPU } else { 1 },
        })
    }

    // launched on the values of before, it gives the bits of MLX's evaluation
    fn compare_bits(
        &mut self,
        captured: &Captured,
        ordinary: &Outputs,
        owner: &mut dyn Owner,
    ) -> MlxResult<()> {
        let Some(resident) = &self.resident else {
            return Err("there are no static arrays".into());
        };
        let given = captured.graph.launch(&[], &resident.gate)?.given;
        let arrays = resident.arrays.iter().zip(self.value_refs());
        let given = given.iter().zip(ordinary.given_out());
        let pairs = arrays.map(|pair| (pair, "parameters or state"));
        let pairs = pairs.chain(given.map(|pair| (pair, "loss, norm or another output")));
        for ((got, wanted), what) in pairs {
            let wanted = array::rows(wanted)?;
            evaluate([&wanted], owner)?;
            if !replay::is_same(got, &wanted)? {
                return Err(Exception::custom(format!(
                    "called again it gives other bits of {what} than MLX"
                )));
            }
        }
        Ok(())
    }

    // launched on the values of before, it gives what MLX's evaluation does, up to rounding
    fn compare(
        &mut self,
        captured: &Captured,
        ordinary: &Outputs,
        owner: &mut dyn Owner,
    ) -> MlxResult<()> {
        let Some(resident) = &self.resident else {
            return Err("there are no static arrays".into());
        };
        let (values, buffers) = (self.values(), self.layout.len());
        let updates = distances(&values, &resident.arrays, owner)?;
        synchronize(owner)?;
        let results: Vec<Array> = captured.outputs.given_out().cloned().collect();
        captured.graph.launch(&[], &resident.gate)?;
        let differences = distances(&values, &resident.arrays, owner)?;
        for (i, ((update, _), (difference, size))) in
            updates.into_iter().zip(differences).enumerate()
        {
            let update = if update.is_finite() { update } else { 0.0 };
            let tolerated = tolerance(&values[i], UPDATE_TOLERANCE.1) * size;
            if exceeds(difference, UPDATE_TOLERANCE.0 * update + tolerated) {
                let what = if i < buffers { "parameters" } else { "state" };
                return Err(differs(what, difference, update));
            }
        }
        let ordinary: Vec<Array> = ordinary.given_out().cloned().collect();
        let differences = distances(&ordinary, &results, owner)?;
        for (array, (difference, size)) in results.iter().zip(differences) {
            if exceeds(difference, tolerance(array, OUTPUT_TOLERANCE) * size) {
                return Err(differs("loss, norm or another output", difference, size));
            }
        }
        Ok(())
    }
}

// memory of its own for each output: what it is now may be what the step writes over
fn given_out(traced: &Outputs) -> MlxResult<Outputs> {
    traced.map_given_out(|array| {
        if array.nbytes() <= SMALL && is_own(array) {
            return Ok(array.clone()); // copied out by the launch
        }
        copied(array)
    })
}

// the values of the model's other arrays and of the key, the array of this number, beside the arrays that take them
fn taken_over(outputs: &Outputs, given: &[Given], key: usize) -> MlxResult<Vec<(Array, Array)>> {
    let others = outputs.others.iter().map(|(at, value)| (*at, value));
    let key = outputs.key.iter().map(|value| (key, value));
    let taken = others.chain(key).map(|(at, value)| {
        let place = given[at].array();
        if value.shape() != place.shape() {
            return Err("the model keeps an array that gets another shape".into());
        }
        Ok((value.clone(), place.clone()))
    });
    taken.collect()
}

fn exceeds(difference: f32, tolerated: f32) -> bool {
    difference.is_nan() || difference > tolerated
}

fn differs(what: &str, difference: f32, size: f32) -> Exception {
    Exception::custom(format!(
        "launched again it gives another value of {what} than MLX: {difference:e} off where the norm is {size:e}"
    ))
}

// of values that are counted one by one: none
fn tolerance(array: &Array, single: f32) -> f32 {
    match array.dtype() {
        dtype if precision::is_half(dtype) => HALF_TOLERANCE,
        Dtype::Float32 => single,
        _ => 0.0,
    }
}

// Of each pair the norm of the difference, and that of the first, as far as it is finite. Infinities that are equal do not
// differ; whatever is compared with a NaN does.
fn distances(a: &[Array], b: &[Array], owner: &mut dyn Owner) -> MlxResult<Vec<(f32, f32)>> {
    let norm = |array: &Array| array.square()?.sum(None)?.sqrt();
    let mut distances = Vec::with_capacity(a.len());
    for (a, b) in a.iter().zip(b) {
        let zero = Array::from_f32(0.0);
        let pair = if precision::is_half(a.dtype()) || a.dtype() == Dtype::Float32 {
            let (a, b) = (a.as_dtype(Dtype::Float32)?, b.as_dtype(Dtype::Float32)?);
            let difference = ops::select(a.eq(&b)?, &zero, a.subtract(&b)?)?;
            let size = ops::select(ops::is_inf(&a)?, &zero, &a)?;
            [norm(&difference)?, norm(&size)?]
        } else {
            [a.ne(b)?.as_dtype(Dtype::Float32)?.sum(None)?, zero]
        };
        evaluate(&pair, owner)?;
        let read = |array: &Array| array.try_item_cast::<f32>().map_err(unread);
        distances.push((read(&pair[0])?, read(&pair[1])?));
    }
    Ok(distances)
}
