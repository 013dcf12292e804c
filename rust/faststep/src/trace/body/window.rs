//! The parts of an accumulated step: a batch is added to the window, and the update by the window.
use mlx_rs::{
    error::{Exception, Result},
    ops, Array, Dtype,
};

use super::{short, Body, Inputs};
use crate::{
    layout::aux_state::CLOSED,
    layout::pack,
    mlx::ops::{choose, scalar},
    optim::clip,
    trace::{guard::Guard, outputs::Outputs, recipe::Rule},
};

/// A loss that sets parameters itself.
const ASSIGNED: &str = "the loss function assigns to a trainable parameter: expected one that does not in a step with a group, because \
     the ranks would have different values. Keep what it sets as a frozen parameter or a buffer";

impl Body<'_> {
    // add the weighted gradients to the window; the first batch of a window, skipped or not, clears the previous sums. `only`:
    // there is no other one, and nothing reads them
    pub(super) fn batch(&self, inputs: &Inputs, only: bool) -> Result<Outputs> {
        let made = self.differentiate(inputs)?;
        let mut outputs = made.outputs;
        let joint = self.recipe.options.guard().is_some();
        let packed = pack::gradients(&self.recipe.layout, &made.gradients, joint)?;
        let gradients = self.wide(inputs, &packed.buffers)?;
        let norm = self.norm(inputs, &gradients, &packed, false, false)?;
        let mut good = self.good(&outputs, norm.as_ref(), None)?;
        if let (Some(yes), Some(weight)) = (&good, &made.weight) {
            good = Some(Guard::and_weight(yes, weight)?);
        }
        let (first, total) = self.window(inputs)?;
        let first_batch = total.eq(Array::from_f32(CLOSED))?.contiguous()?;
        let begun = |old: &Array| ops::select(&first_batch, scalar(0.0, old.dtype()), old);
        let mut weight = match &made.weight {
            Some(weight) => weight.as_dtype(Dtype::Float32)?.contiguous()?,
            None => Array::from_f32(1.0),
        };
        let reduced = self.recipe.options.reduced;
        if reduced && made.weight.is_some() {
            let fits = Guard::and_weight(&Array::from_bool(true), &weight)?;
            weight = choose(Some(&fits), weight, &Array::from_f32(f32::NAN))?;
        }
        // what is bad for one rank is bad for all: it stays in their sums
        let taken = good.as_ref().filter(|_| !reduced);
        let added = |old: &Array, new: &Array| {
            let old = begun(old)?;
            choose(taken, old.add(new)?, &old)
        };
        for (buffer, gradient) in gradients.iter().enumerate() {
            let old = &inputs.state[first + buffer];
            let mut gradient = gradient.as_dtype(old.dtype())?;
            if made.weight.is_some() {
                gradient = gradient.multiply(weight.as_dtype(old.dtype())?)?;
            }
            if !only {
                gradient = added(old, &gradient)?;
            }
            outputs.state.push((first + buffer, gradient));
        }
        let total = added(total, &weight)?;
        outputs.state.push((first + gradients.len(), total));
        if let (true, Some(at), Some(loss)) = (reduced, self.recipe.places.losses, &outputs.loss) {
            let losses = inputs.state.get(at).ok_or_else(short)?;
            let loss = loss.as_dtype(Dtype::Float32)?.multiply(&weight)?;
            outputs.state.push((at, added(losses, &loss)?));
        }
        if !made.rebound.is_empty() {
            if reduced {
                return Err(Exception::custom(ASSIGNED));
            }
            self.assign(inputs, &made.rebound, good.as_ref(), &mut outputs)?;
        }
        self.finish_outputs(inputs, good.as_ref(), &mut outputs)?;
        outputs.gradients = packed.buffers;
        Ok(outputs)
    }

    pub(super) fn update_by_window(&self, inputs: &Inputs, rule: &Rule) -> Result<Outputs> {
        let (first, total) = self.window(inputs)?;
        let layout = &self.recipe.layout;
        let mut sums = inputs.state[first..first + layout.len()].to_vec();
        self.averaged(&mut sums)?;
        let share = Array::from_f32(1.0).divide(total)?;
        let mut outputs = Outputs::default();
        let mut factor = share.clone();
        if self.recipe.options.max_grad_norm.is_some() || self.recipe.options.guard().is_some() {
            let norm = self.norm_of(&sums, &[], true)?.multiply(&share)?;
            if let Some(max_norm) = self.max_norm(inputs)? {
                factor = factor.multiply(clip::scale(&norm, &max_norm)?)?;
            }
            outputs.norm = Some(norm);
        }
        if self.recipe.options.reduced {
            let losses = self
                .recipe
                .places
                .losses
                .and_then(|at| inputs.state.get(at));
            outputs.loss = Some(losses.ok_or_else(short)?.multiply(&share)?);
        }
        let good = match (self.recipe.options.guard(), &outputs.norm) {
            (Some(guard), Some(norm)) if outputs.loss.is_some() => {
                let loss = outputs.loss.as_ref().ok_or_else(short)?;
                Guard::any(&guard.good(loss, norm)?, total)?
            }
            (Some(_), Some(norm)) => Guard::any(&Guard::finite(norm)?, total)?,
            // with a guard, all batches of the window may have been skipped
            _ => total.ne(Array::from_f32(0.0))?.contiguous()?,
        };
        let mut gradients = self.recipe.gradients(&clip::by(&sums, &factor)?)?;
        if let Some(max_value) = self.recipe.options.max_grad_value {
            gradients = clip::by_value(&gradients, max_value)?;
        }
        self.update(inputs, rule, &[], &gradients, Some(&good), &mut outputs)?;
        self.choose_others(inputs, Some(&good), &mut outputs)?;
        if self.recipe.options.reduced {
            self.next_scale(inputs, Some(&good), &mut outputs)?;
        }
        outputs.skipped = Some(good.logical_not()?);
        // depends on the total, so that it is an output of this step and not a constant
        let closed = Array::from_f32(CLOSED);
        let closed = ops::select(total.ge(&closed)?, &closed, &closed)?;
        outputs.state.push((first + sums.len(), closed));
        Ok(outputs)
    }

    // the place of the window's first array, and the sum of its weights
    pub(super) fn window<'b>(&self, inputs: &Inputs<'b>) -> Result<(usize, &'b Array)> {
        let places = &self.recipe.places;
        let total = places.total(&self.recipe.layout);
        let (Some(first), Some(total)) = (places.window, total) else {
            return Err(Exception::custom(
                "a step without a window cannot accumulate",
            ));
        };
        Ok((first, inputs.state.get(total).ok_or_else(short)?))
    }
}
