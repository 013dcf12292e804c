//! Warnings about training that goes wrong without an error, each told once: a batch that is skipped, numbers out of range,
//! gradients that are zero and parameters without one after the first steps, what lasts for a hundred steps.
//!
//! It is found in values that are there anyway, long done when they are read; arrays of the model are looked at only when
//! there is something to tell.
use faststep::engine::{Flags, Output};
use mlx_rs::Array;
use pyo3::prelude::*;

use super::{
    first_skipped::{are, bad_arrays, listed, Context, FirstSkipped, Recent},
    flags::{number_of, read},
    indices::Indices,
    kept_losses::KeptLosses,
};
use crate::{host::KnownGraph, store::Store, tree::paths::dotted};

/// Number of steps in a row that is warned of.
const MANY: usize = 100;
/// Number of steps of which one is checked, a number that no alternation of losses shares.
const EVERY: usize = 7;
/// Number of first steps, or first updates, that are all checked.
const FIRST: usize = 20;
/// Number of checked steps in a row that is warned of.
const LOOKS: usize = MANY / EVERY + 1;
/// Number of pending flags from which on the older half is read, which no longer waits for the device.
const PENDING: usize = 6;

/// Counts of what was seen, and the warnings that have been given.
pub struct Alarms {
    zero: Flags,   // true: all gradients are zero
    broken: Flags, // true: the loss is no number, where nothing is skipped
    first: FirstSkipped,
    indices: Indices,
    steps: usize,
    norms: usize,
    kept: KeptLosses,
    due: Vec<String>, // warnings
    told: Told,
}

#[derive(Default)]
#[allow(clippy::struct_excessive_bools)] // each warns once
struct Told {
    skipped: bool,
    broken: bool,
    zero: bool,
    idle: bool,
    rounded: bool,
}

impl Default for Alarms {
    fn default() -> Self {
        Self {
            zero: Flags::default().read_at(PENDING),
            broken: Flags::default().read_at(PENDING),
            first: FirstSkipped::default(),
            indices: Indices::default(),
            steps: 0,
            norms: 0,
            kept: KeptLosses::default(),
            due: Vec::new(),
            told: Told::default(),
        }
    }
}

impl Alarms {
    /// A step has been taken, the `number`-th; `checked`: bad ones are skipped.
    pub fn note(
        &mut self,
        py: Python<'_>,
        number: usize,
        output: &Output,
        checked: bool,
    ) -> PyResult<()> {
        self.steps += 1;
        let sampled = number.is_multiple_of(EVERY);
        let is = |of: fn(f32) -> bool| move |array: &Array| Ok(of(number_of(py, array)?));
        let norm = output.update.as_ref().unwrap_or(&output.batch);
        if let Some(norm) = &norm.norm {
            self.norms += 1;
            if sampled || self.norms <= FIRST {
                read(self.zero.push(Some(norm), &is(|norm| norm == 0.0)))?;
            }
        }
        let loss = output.batch.loss.as_ref().filter(|_| !checked);
        if sampled || self.steps <= FIRST {
            read(self.broken.push(loss, &is(|loss| !loss.is_finite())))?;
        }
        Ok(())
    }

    /// Return the warning of numbers out of range in the first batch of a graph, before it is computed.
    pub fn look(
        &mut self,
        py: Python<'_>,
        graph: &KnownGraph,
        batch: &[Array],
        argument: &dyn Fn(usize) -> String,
    ) -> PyResult<Option<String>> {
        let found = read(self.indices.look(py, graph, batch))?;
        Ok(found.map(|(array, text)| format!("argument {} {text}", argument(array))))
    }

    /// Return whether the batch of this step is to be noted.
    pub fn notes_batch(&self, number: usize) -> bool {
        self.first.is_awaited() || self.indices.is_due(number)
    }

    /// Note the batch of a step, the `number`-th.
    pub fn note_batch(
        &mut self,
        py: Python<'_>,
        number: usize,
        output: &Output,
        batch: &[Array],
        context: &Context<'_>,
    ) -> PyResult<()> {
        if let Some((graph, _)) = &context.graph {
            let found = read(self.indices.note(py, number, (graph, batch)))?;
            self.due.extend(found.map(|(step, array, text)| {
                let name = (context.argument)(array);
                format!("argument {name} of step {step} {text}")
            }));
        }
        if self.first.is_awaited() {
            let recent = Recent::new(output, batch, context);
            self.first.note(number, output, recent);
        }
        Ok(())
    }

    /// A step returns its loss in this object.
    pub fn note_loss(&mut self, number: usize, loss: &Array, object: &Bound<'_, PyAny>) {
        if let Some(message) = self.kept.note(number, loss, object) {
            self.due.push(message);
        }
    }

    /// Return the warning that is due.
    pub fn raised(
        &mut self,
        py: Python<'_>,
        store: &Store,
        (skips, context): (&Flags, &Context<'_>),
    ) -> PyResult<Vec<String>> {
        let told = &mut self.told;
        let mut messages = std::mem::take(&mut self.due);
        messages.extend(self.first.raised(py, self.steps, (store, context))?);
        if skips.streak() >= MANY && first(&mut told.skipped) {
            messages.push(format!(
                "the last {} batches were all skipped, because loss or gradients are not finite or the loss is above max_loss. {}",
                skips.streak(),
                not_finite(py, store)?
            ));
        }
        if lasts(&self.broken) && first(&mut told.broken) {
            messages.push(format!(
                "the loss has not been finite for {} steps. {}",
                self.steps.min(self.broken.streak() * EVERY),
                not_finite(py, store)?
            ));
        }
        messages.extend(self.idle(py, store)?);
        messages.extend(self.without_effect(store));
        Ok(messages)
    }

    // parameters on which the loss does not depend
    fn idle(&mut self, py: Python<'_>, store: &Store) -> PyResult<Option<String>> {
        let engine = store.engine.as_ref();
        let engine = engine.filter(|engine| !engine.idle().is_empty());
        let Some(engine) = engine.filter(|_| first(&mut self.told.idle)) else {
            return Ok(None);
        };
        let signature = store.signature()?;
        let (paths, doubles) = (signature.paths(), signature.doubles());
        let is_double = |tensor| doubles.iter().any(|&(double, _)| double == tensor);
        let idle = engine.idle().iter().filter(|&&tensor| !is_double(tensor));
        let elsewhere = store.trained_elsewhere(py);
        let idle = idle.map(|&tensor| &paths[tensor]);
        let idle = idle.filter(|path| !elsewhere.contains(path));
        let idle: Vec<String> = idle.map(|path| dotted(path)).collect();
        if idle.is_empty() {
            return Ok(None);
        }
        self.told.zero |= engine.idle().len() == engine.layout().tensors().len();
        Ok(Some(format!(
            "the loss of the first {} steps does not depend on {}: they get no gradient, and weight decay alone \
             may change them. freeze() what is not to be trained, or look for what cuts it off (stop_gradient, an \
             argmax, a layer that is not called)",
            self.steps,
            listed(idle)
        )))
    }

    // gradients of zero, and updates that are rounded to nothing
    fn without_effect(&mut self, store: &Store) -> Vec<String> {
        let mut messages = Vec::new();
        let Some(engine) = &store.engine else {
            return messages;
        };
        if lasts(&self.zero) && first(&mut self.told.zero) {
            messages.push(format!(
                "all gradients have been zero for {} steps, and nothing is learned: look for activations that are zero for every input, a mask or a \
                 weight of zero in the loss, or gradients too small for half precision (compute_dtype scales them)",
                self.steps.min(self.zero.streak() * EVERY)
            ));
        }
        if engine.rounds_away() && !self.told.zero && first(&mut self.told.rounded) {
            let is_half =
                engine.layout().halves().next().is_some() && engine.places().masters.is_none();
            let (precision, way) = if is_half {
                let way = "Keep float32 masters (compute_dtype=mx.bfloat16), round by chance (stochastic_rounding=True), or raise the learning rate";
                ("the parameters' half precision is", way)
            } else {
                ("float32 is", "Raise the learning rate, or scale the loss")
            };
            messages.push(format!(
                "updates have been rounded to nothing for more than 100 of them: {precision} too coarse for this learning rate and \
                 these gradients (step.stats.unchanged is near 1). {way}"
            ));
        }
        messages
    }
}

// true if what a flag says has been so for many steps
fn lasts(flags: &Flags) -> bool {
    flags.streak() >= LOOKS
}

fn first(told: &mut bool) -> bool {
    !std::mem::replace(told, true)
}

// a message that names the first array of the model that is not finite, and says what to do
fn not_finite(py: Python<'_>, store: &Store) -> PyResult<String> {
    let bad = bad_arrays(py, store)?;
    Ok(match bad.len() {
        0 => "The model's arrays are finite: look at the batches and at the loss (nonfinite=\"raise\" names the first \
              gradient that is not)"
            .into(),
        _ => format!(
            "{} not finite, and no step will mend that: go on from a checkpoint, with a lower learning rate or \
             max_grad_norm",
            are(bad)
        ),
    })
}
