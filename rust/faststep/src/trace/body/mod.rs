//! The computation of one step, over tracers or arrays: loss, gradients, norm, clipping, update.
mod compiled_update;
mod gradients;
mod update;
mod window;

use mlx_rs::{
    error::{Exception, Result},
    Array, Dtype,
};

use crate::{
    error::unread,
    layout::pack::{self, Packed},
    layout::precision,
    mlx::ops::{choose, scalar},
    optim::clip::{self, Checked},
    trace::{
        guard::Guard,
        host::Host,
        outputs::Outputs,
        recipe::{Part, Recipe, Rule},
    },
};

pub(crate) use compiled_update::CompiledUpdate;

/// A recipe with its host.
pub(crate) struct Body<'a> {
    recipe: &'a Recipe,
    host: &'a dyn Host,
    eager: bool, // the arrays can be read
    compiled: Option<&'a CompiledUpdate>,
}

/// The function's inputs, named.
struct Inputs<'a> {
    parameters: &'a [Array],
    shared: &'a [Array],
    state: &'a [Array],
    others: &'a [Array],
    rest: &'a [Array], // key and batch, where there is a loss
}

type Rebound = [(usize, Array)];

/// A batch of which nothing has been taken yet.
struct CheckedBatch {
    rebound: Vec<(usize, Array)>,
    gradients: Vec<Array>, // by buffer, clipped
    good: Option<Array>,
}

fn short() -> Exception {
    Exception::custom("a step was called with too few arrays")
}

impl<'a> Body<'a> {
    /// `eager`: it is not compiled; `compiled`: the update, where it alone is.
    pub(crate) fn new(
        recipe: &'a Recipe,
        host: &'a dyn Host,
        eager: bool,
        compiled: Option<&'a CompiledUpdate>,
    ) -> Self {
        Self {
            recipe,
            host,
            eager,
            compiled,
        }
    }

    pub(crate) fn trace(&self, inputs: &[Array]) -> Result<Outputs> {
        let inputs = self.split(inputs)?;
        match &self.recipe.part {
            Part::Whole(rule) => self.whole(&inputs, rule),
            Part::Batch => self.batch(&inputs, false),
            Part::OnlyBatch => self.batch(&inputs, true),
            Part::Update(rule) => self.update_by_window(&inputs, rule),
            Part::Clipped => self.clipped(&inputs),
            Part::Given => self.update_by_host(&inputs),
            Part::Gradients => self.gradients(&inputs),
        }
    }

    fn split<'b>(&self, inputs: &'b [Array]) -> Result<Inputs<'b>> {
        let layout = &self.recipe.layout;
        let take = |inputs: &'b [Array], n| inputs.split_at_checked(n).ok_or_else(short);
        let (parameters, rest) = take(inputs, layout.tensors().len())?;
        let (shared, rest) = take(rest, layout.shared().count())?;
        let (state, rest) = take(rest, self.recipe.places.len)?;
        let (others, rest) = take(rest, self.recipe.others)?;
        Ok(Inputs {
            parameters,
            shared,
            state,
            others,
            rest,
        })
    }

    fn whole(&self, inputs: &Inputs, rule: &Rule) -> Result<Outputs> {
        let (mut outputs, batch) = self.checked_batch(inputs)?;
        let good = batch.good.as_ref();
        self.update(
            inputs,
            rule,
            &batch.rebound,
            &batch.gradients,
            good,
            &mut outputs,
        )?;
        self.finish_outputs(inputs, good, &mut outputs)?;
        Ok(outputs)
    }

    // clipped gradients for an update by the host's optimizer
    fn clipped(&self, inputs: &Inputs) -> Result<Outputs> {
        let (mut outputs, batch) = self.checked_batch(inputs)?;
        let good = batch.good.as_ref();
        let (first, _) = self.window(inputs)?;
        for (at, gradient) in (first..).zip(&batch.gradients) {
            let dtype = inputs.state[at].dtype();
            outputs.state.push((at, gradient.as_dtype(dtype)?));
        }
        if !batch.rebound.is_empty() {
            self.assign(inputs, &batch.rebound, good, &mut outputs)?;
        }
        self.finish_outputs(inputs, good, &mut outputs)?;
        Ok(outputs)
    }

    // loss, norm and flag, and the clipped gradients
    fn checked_batch(&self, inputs: &Inputs) -> Result<(Outputs, CheckedBatch)> {
        let made = self.differentiate(inputs)?;
        let mut outputs = made.outputs;
        let max_norm = self.recipe.options.max_grad_norm;
        let joint = max_norm.is_some() || self.recipe.options.guard().is_some();
        let packed = self.packed(&made.gradients, joint)?;
        let gradients = self.wide(inputs, &packed.buffers)?;
        let weight = made.weight.as_ref();
        let checked = self.checked(inputs, &outputs, &packed, &gradients)?;
        let (norm, scale, good) = if let Some(checked) = checked {
            let guard = self.recipe.options.guard();
            let good = guard.map(|_| match weight {
                Some(weight) => Guard::any(&checked.good, weight),
                None => Ok(checked.good),
            });
            if guard.is_some() && weight.is_none() {
                outputs.skipped = checked.bad;
            }
            let factor = max_norm.map(|_| checked.factor);
            (Some(checked.norm), factor, good.transpose()?)
        } else {
            let norm = self.norm(inputs, &gradients, &packed, max_norm.is_some(), true)?;
            let scale = norm.as_ref().zip(self.max_norm(inputs)?);
            let scale = scale.map(|(norm, max_norm)| clip::scale(norm, &max_norm));
            let good = self.good(&outputs, norm.as_ref(), weight)?;
            (norm, scale.transpose()?, good)
        };
        let mut clipped = gradients;
        if let Some(scale) = scale {
            clipped = clip::by(&clipped, &scale)?;
        }
        if let Some(max_value) = self.recipe.options.max_grad_value {
            clipped = clip::by_value(&clipped, max_value)?;
        }
        outputs.norm = norm;
        outputs.gradients = packed.buffers;
        let batch = CheckedBatch {
            rebound: made.rebound,
            gradients: clipped,
            good,
        };
        Ok((outputs, batch))
    }

    // gradients by buffer, those of replicas as all ranks have them
    fn packed(&self, gradients: &[Array], joint: bool) -> Result<Packed> {
        let mut packed = pack::gradients(&self.recipe.layout, gradients, joint)?;
        if self.recipe.shards.is_some() {
            self.averaged(&mut packed.buffers)?;
            packed.squares.fill(None); // of what has been averaged they are others
        }
        Ok(packed)
    }

    // the norm to which gradients are clipped: an input where it is another at each step
    fn max_norm(&self, inputs: &Inputs) -> Result<Option<Array>> {
        let max_norm = self.recipe.options.max_grad_norm;
        let array = max_norm.map(|max_norm| match self.recipe.places.max_norm {
            Some(at) => inputs.state.get(at).ok_or_else(short).cloned(),
            None => Ok(scalar(max_norm, Dtype::Float32)),
        });
        array.transpose()
    }

    // the norm, the factor that clips to it, and the flag of a good step, where one kernel or task gives all three
    fn checked(
        &self,
        inputs: &Inputs,
        outputs: &Outputs,
        packed: &Packed,
        gradients: &[Array],
    ) -> Result<Option<Checked>> {
        let (clips, guard) = (
            self.recipe.options.max_grad_norm,
            self.recipe.options.guard(),
        );
        let is_needed = clips.is_some() || guard.is_some();
        let is_input = clips.is_some() && self.recipe.places.max_norm.is_some();
        match &outputs.loss {
            Some(loss)
                if is_needed
                    && !is_input
                    && self.scale(inputs).is_none()
                    && self.recipe.shards.is_none() =>
            {
                let limit = guard.unwrap_or_default().limit();
                clip::checked(gradients, &packed.squares, loss, clips, limit)
            }
            _ => Ok(None),
        }
    }

    fn good(
        &self,
        outputs: &Outputs,
        norm: Option<&Array>,
        weight: Option<&Array>,
    ) -> Result<Option<Array>> {
        let (Some(guard), Some(norm), Some(loss)) =
            (self.recipe.options.batch_guard(), norm, &outputs.loss)
        else {
            return Ok(None);
        };
        let good = guard.good(&self.loss_of_all(loss)?, norm)?;
        match weight {
            Some(weight) => Guard::any(&good, weight).map(Some),
            None => Ok(Some(good)),
        }
    }

    // the value of a flag, in a step that is not compiled
    fn reads(&self, flag: &Array) -> Result<bool> {
        let mut read = Ok(true);
        self.host
            .unlocked(&mut || read = flag.try_item_exact::<bool>().map_err(unread));
        read
    }

    // the buffers of a good step, or those from before
    fn choose_others(
        &self,
        inputs: &Inputs,
        good: Option<&Array>,
        outputs: &mut Outputs,
    ) -> Result<()> {
        for (index, new) in &mut outputs.others {
            let old = &inputs.others[*index];
            if new.shape() == old.shape() && new.dtype() == old.dtype() {
                *new = choose(good, new.clone(), old)?;
            } else if let (Some(good), true) = (good, self.eager) {
                if !self.reads(good)? {
                    *new = old.clone();
                }
            } // else the host leaves it out where the batch was skipped
        }
        Ok(())
    }

    // the outputs of a batch beside the update: buffers, loss scale, the skip flag
    fn finish_outputs(
        &self,
        inputs: &Inputs,
        good: Option<&Array>,
        outputs: &mut Outputs,
    ) -> Result<()> {
        self.choose_others(inputs, good, outputs)?;
        if outputs.skipped.is_none() {
            outputs.skipped = good.map(Array::logical_not).transpose()?;
        }
        if self.recipe.options.reduced {
            return Ok(()); // the scale is that of all ranks
        }
        self.next_scale(inputs, good, outputs)
    }

    fn next_scale(
        &self,
        inputs: &Inputs,
        good: Option<&Array>,
        outputs: &mut Outputs,
    ) -> Result<()> {
        if let (Some(scale), Some(good), Some(at)) =
            (self.scale(inputs), good, self.recipe.places.scale)
        {
            let next = precision::next_scale(scale, good)?;
            outputs.state.extend((at..).zip(next));
        }
        Ok(())
    }
}
