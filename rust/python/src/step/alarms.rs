//! Warnings about training that goes wrong without an error, each told once: a batch that is skipped, gradients that are
//! zero and parameters without one after the first steps, what lasts for a hundred steps.
//!
//! It is found in values that are there anyway, long done when they are read; arrays of the model are looked at only when
//! there is something to tell.
use faststep::engine::{Flags, Output, Role};
use mlx_rs::{error::Result as MlxResult, transforms::eval, Array};
use pyo3::prelude::*;

use super::{
    flags::{is_true, read},
    kept_losses::KeptLosses,
};
use crate::{
    mlx::{errors::mlx, gil::unlocked},
    store::Store,
    tree::paths::dotted,
};

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
/// Largest number of names in a warning.
const NAMES: usize = 5;

/// Counts of what was seen, and the warnings that have been given.
pub struct Alarms {
    zero: Flags,    // true: all gradients are zero
    broken: Flags,  // true: the loss is no number, where nothing is skipped
    skipped: Flags, // those of the first hundred steps
    losses: Vec<Array>,
    steps: usize,
    norms: usize,
    kept: KeptLosses,
    due: Vec<String>, // warnings
    told: Told,
}

#[derive(Default)]
#[allow(clippy::struct_excessive_bools)] // each warns once
struct Told {
    first: bool,
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
            skipped: Flags::default().read_at(PENDING),
            losses: Vec::new(),
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
        self.note_skipped(py, number, output)?;
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

    // the batches of the first steps: the first that is skipped is told
    fn note_skipped(&mut self, py: Python<'_>, number: usize, output: &Output) -> PyResult<()> {
        let over_all = output
            .update
            .as_ref()
            .and_then(|update| update.loss.as_ref()); // ranks
        let loss = over_all.or(output.batch.loss.as_ref());
        let (Some(flag), Some(loss)) = (&output.batch.skipped, loss) else {
            return Ok(());
        };
        if self.told.first || self.steps > MANY {
            self.losses.clear();
            return Ok(());
        }
        self.losses.push(loss.clone());
        read(self.skipped.push(Some(flag), &|flag| is_true(py, flag)))?;
        let Some(place) = self.skipped.first() else {
            return Ok(());
        };
        self.told.first = true;
        let loss = read(number_of(py, &self.losses[place]))?;
        let why = if loss.is_finite() {
            format!("its loss is {loss:.4}, and a gradient is not finite, or the loss is above max_loss")
        } else {
            format!("its loss is {loss}")
        };
        let step = number + 1 + place - self.losses.len();
        self.due.push(format!(
            "the batch of step {step} was skipped, and trains nothing: {why}. nonfinite=\"raise\" stops there and names the \
             gradient; faststep.diagnose names the array or the module. step.stats.skipped counts further ones, without a \
             warning"
        ));
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
        skips: &Flags,
    ) -> PyResult<Vec<String>> {
        let told = &mut self.told;
        let mut messages = std::mem::take(&mut self.due);
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
                let way = "Keep float32 masters with Step(..., compute_dtype=mx.bfloat16), or raise the learning rate";
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

fn number_of(py: Python<'_>, scalar: &Array) -> MlxResult<f32> {
    unlocked(py, || eval([scalar]))?;
    scalar
        .try_item_cast::<f32>()
        .map_err(faststep::engine::unread)
}

fn listed(mut names: Vec<String>) -> String {
    let more = names.len().saturating_sub(NAMES);
    names.truncate(NAMES);
    let names: Vec<_> = names.iter().map(|name| format!("model.{name}")).collect();
    match more {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

// a message that names the first array of the model that is not finite, and says what to do
fn not_finite(py: Python<'_>, store: &Store) -> PyResult<String> {
    let Some(engine) = &store.engine else {
        return Ok(String::new());
    };
    let mut bad = Vec::new();
    for (role, path) in store.signature()?.roles.iter() {
        let array = match role {
            Role::Parameter(i) => &engine.parameters()[*i],
            Role::Other(i) => &store.others[*i],
        };
        if !array.dtype().is_float() {
            continue;
        }
        let finite = array
            .abs()
            .and_then(|a| a.lt(Array::from_f32(f32::INFINITY)));
        let finite = finite.and_then(|finite| finite.all(None)).map_err(mlx)?;
        if read(number_of(py, &finite))? == 0.0 {
            bad.push(dotted(path));
        }
    }
    Ok(match bad.len() {
        0 => "The model's arrays are finite: look at the batches and at the loss (nonfinite=\"raise\" names the first \
              gradient that is not)"
            .into(),
        _ => format!(
            "{} not finite, and no step will mend that: go on from a checkpoint, with a lower learning rate or \
             max_grad_norm",
            match &bad[..] {
                [_] => format!("{} is", listed(bad)),
                _ => format!("{} are", listed(bad)),
            }
        ),
    })
}
