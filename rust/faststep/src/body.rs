//! What is computed in one step, over tracers or arrays: loss, gradients, norm, clipping, update.
use std::cell::RefCell;

use mlx_rs::{
    error::{Exception, Result},
    ops,
    transforms::value_and_grad_with_argnums,
    Array, Dtype,
};

use crate::{
    clip,
    guard::{choose, Guard},
    optimizer::scalar,
    outputs::Outputs,
    pack::{self, Packed},
    precision,
    trace::{Host, LossCall, LossOutput, Part, Recipe, Rule, UpdateCall, UpdateOutput},
};

/// A recipe with its host.
pub(crate) struct Body<'a> {
    recipe: &'a Recipe,
    host: &'a dyn Host,
}

/// The function's inputs, named.
struct Inputs<'a> {
    parameters: &'a [Array],
    shared: &'a [Array],
    state: &'a [Array],
    others: &'a [Array],
    rest: &'a [Array], // key and batch, where there is a loss
}

/// What came of the loss.
struct Differentiated {
    outputs: Outputs,
    weight: Option<Array>,
    rebound: Vec<(usize, Array)>,
    gradients: Vec<Array>, // by tensor
}

type Rebound = [(usize, Array)];

fn short() -> Exception {
    Exception::custom("a step was called with too few arrays")
}

impl<'a> Body<'a> {
    pub(crate) fn new(recipe: &'a Recipe, host: &'a dyn Host) -> Self {
        Self { recipe, host }
    }

    pub(crate) fn trace(&self, inputs: &[Array]) -> Result<Outputs> {
        let inputs = self.split(inputs)?;
        match &self.recipe.part {
            Part::Whole(rule) => self.whole(&inputs, rule),
            Part::Batch => self.batch(&inputs),
            Part::Update(rule) => self.update_by_window(&inputs, rule),
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

    fn gradients(&self, inputs: &Inputs) -> Result<Outputs> {
        let Differentiated {
            mut outputs,
            gradients,
            ..
        } = self.differentiate(inputs)?;
        outputs.others.clear();
        let tensors = self.recipe.layout.tensors().iter();
        let shown = gradients.iter().zip(tensors).map(|(gradient, tensor)| {
            let gradient = self.unscaled(inputs, gradient.clone())?;
            gradient.as_dtype(tensor.dtype)
        });
        outputs.gradients = shown.collect::<Result<_>>()?;
        Ok(outputs)
    }

    fn whole(&self, inputs: &Inputs, rule: &Rule) -> Result<Outputs> {
        let made = self.differentiate(inputs)?;
        let mut outputs = made.outputs;
        let packed = pack::gradients(&self.recipe.layout, &made.gradients)?;
        let gradients = self.wide(inputs, &packed.buffers)?;
        let clips = self.recipe.max_grad_norm.is_some();
        let norm = self.norm(inputs, &gradients, &packed, clips)?;
        let good = self.good(&outputs, norm.as_ref(), made.weight.as_ref())?;
        let mut clipped = gradients;
        if let (Some(max_norm), Some(norm)) = (self.recipe.max_grad_norm, &norm) {
            clipped = clip::by(&clipped, &clip::scale(norm, max_norm)?)?;
        }
        if let Some(max_value) = self.recipe.max_grad_value {
            clipped = clip::by_value(&clipped, max_value)?;
        }
        self.update(
            inputs,
            rule,
            &made.rebound,
            &clipped,
            good.as_ref(),
            &mut outputs,
        )?;
        self.settle(inputs, good.as_ref(), &mut outputs)?;
        outputs.norm = norm;
        outputs.gradients = packed.buffers;
        Ok(outputs)
    }

    // adds the weighted gradients to the window, which begins anew where nothing has been weighed in yet
    fn batch(&self, inputs: &Inputs) -> Result<Outputs> {
        let made = self.differentiate(inputs)?;
        if !made.rebound.is_empty() {
            return Err(Exception::custom(
                "the loss assigns to a trainable parameter, which an accumulated step cannot repeat: expected \
                 assignments to buffers only (freeze() what is no parameter)",
            ));
        }
        let mut outputs = made.outputs;
        let packed = pack::gradients(&self.recipe.layout, &made.gradients)?;
        let gradients = self.wide(inputs, &packed.buffers)?;
        let norm = self.norm(inputs, &gradients, &packed, false)?;
        let mut good = self.good(&outputs, norm.as_ref(), None)?;
        if let (Some(yes), Some(weight)) = (&good, &made.weight) {
            good = Some(Guard::and_weight(yes, weight)?);
        }
        let (first, total) = self.window(inputs)?;
        let fresh = total.le(Array::from_f32(0.0))?.contiguous()?;
        let weight = match &made.weight {
            Some(weight) => weight.as_dtype(Dtype::Float32)?.contiguous()?,
            None => Array::from_f32(1.0),
        };
        for (buffer, gradient) in gradients.iter().enumerate() {
            let old = &inputs.state[first + buffer];
            let mut gradient = gradient.as_dtype(old.dtype())?;
            if made.weight.is_some() {
                gradient = gradient.multiply(weight.as_dtype(old.dtype())?)?;
            }
            let begun = ops::select(&fresh, scalar(0.0, old.dtype()), old)?;
            let new = choose(good.as_ref(), begun.add(gradient)?, old)?;
            outputs.state.push((first + buffer, new));
        }
        let new = choose(good.as_ref(), total.add(weight)?, total)?;
        outputs.state.push((first + gradients.len(), new));
        self.settle(inputs, good.as_ref(), &mut outputs)?;
        outputs.gradients = packed.buffers;
        Ok(outputs)
    }

    fn update_by_window(&self, inputs: &Inputs, rule: &Rule) -> Result<Outputs> {
        let (first, total) = self.window(inputs)?;
        let layout = &self.recipe.layout;
        let sums = &inputs.state[first..first + layout.len()];
        let share = Array::from_f32(1.0).divide(total)?;
        let mut outputs = Outputs::default();
        let mut factor = share.clone();
        if self.recipe.max_grad_norm.is_some() || self.recipe.guard.is_some() {
            let norm = clip::global_norm(sums, &[])?.multiply(&share)?;
            if let Some(max_norm) = self.recipe.max_grad_norm {
                factor = factor.multiply(clip::scale(&norm, max_norm)?)?;
            }
            outputs.norm = Some(norm);
        }
        let good = match (&self.recipe.guard, &outputs.norm) {
            (Some(_), Some(norm)) => Some(Guard::any(&Guard::finite(norm)?, total)?),
            _ => None,
        };
        let mut gradients = clip::by(sums, &factor)?;
        if self.recipe.compute.is_none() {
            let shown = gradients.iter().enumerate();
            gradients = shown
                .map(|(buffer, gradient)| gradient.as_dtype(layout.dtype(buffer)))
                .collect::<Result<_>>()?;
        }
        if let Some(max_value) = self.recipe.max_grad_value {
            gradients = clip::by_value(&gradients, max_value)?;
        }
        self.update(inputs, rule, &[], &gradients, good.as_ref(), &mut outputs)?;
        outputs.skipped = good.as_ref().map(Array::logical_not).transpose()?;
        // of the total, so that it is an array of this step and no constant
        let nothing = Array::from_f32(0.0);
        let empty = ops::select(total.ge(&nothing)?, &nothing, &nothing)?;
        outputs.state.push((first + sums.len(), empty));
        Ok(outputs)
    }

    // the place of the window's first array, and the sum of its weights
    fn window<'b>(&self, inputs: &Inputs<'b>) -> Result<(usize, &'b Array)> {
        let places = &self.recipe.places;
        let total = places.total(&self.recipe.layout);
        let (Some(first), Some(total)) = (places.window, total) else {
            return Err(Exception::custom(
                "a step without a window cannot accumulate",
            ));
        };
        Ok((first, inputs.state.get(total).ok_or_else(short)?))
    }

    fn scale<'b>(&self, inputs: &Inputs<'b>) -> Option<[&'b Array; 2]> {
        let at = self
            .recipe
            .places
            .scale
            .filter(|_| precision::scales(self.recipe.compute))?;
        Some([inputs.state.get(at)?, inputs.state.get(at + 1)?])
    }

    // the trainable tensors as the loss takes them
    fn for_loss(&self, inputs: &Inputs) -> Result<Vec<Array>> {
        let Some(compute) = self.recipe.compute else {
            return Ok(inputs.parameters.to_vec());
        };
        let buffers = self.buffers(inputs);
        let buffers = buffers.iter().map(|buffer| buffer.as_dtype(compute));
        self.recipe
            .layout
            .unpack(&buffers.collect::<Result<Vec<_>>>()?)
    }

    fn differentiate(&self, inputs: &Inputs) -> Result<Differentiated> {
        let (key, batch) = inputs.rest.split_first().ok_or_else(short)?;
        let batch = batch.iter().map(|array| match self.recipe.compute {
            Some(compute) if array.dtype() == Dtype::Float32 => array.as_dtype(compute),
            _ => Ok(array.clone()),
        });
        let batch = batch.collect::<Result<Vec<_>>>()?;
        let scale = self.scale(inputs);
        let outline = RefCell::new(Outlined::default());
        let loss = |parameters: &[Array]| -> Result<Vec<Array>> {
            let output = self.host.loss(LossCall {
                parameters,
                others: inputs.others,
                batch: &batch,
                key,
            })?;
            let (values, shape) = Outlined::flatten(output, scale.map(|[scale, _]| scale))?;
            outline.replace(shape);
            Ok(values)
        };
        let numbers = 0..i32::try_from(inputs.parameters.len()).unwrap_or(i32::MAX);
        let numbers: Vec<i32> = numbers.collect();
        let parameters = self.for_loss(inputs)?;
        let (values, gradients) =
            value_and_grad_with_argnums(loss, numbers.as_slice())(&parameters)?;
        Ok(outline.into_inner().split(values, gradients))
    }

    fn unscaled(&self, inputs: &Inputs, gradient: Array) -> Result<Array> {
        let gradient = match self.recipe.compute {
            Some(_) => gradient.as_dtype(precision::wide(gradient.dtype()))?,
            None => gradient,
        };
        match self.scale(inputs) {
            Some([scale, _]) => {
                gradient.multiply(Array::from_f32(1.0).divide(scale)?.contiguous()?)
            }
            None => Ok(gradient),
        }
    }

    // the gradients by buffer, in the dtype of what is updated
    fn wide(&self, inputs: &Inputs, packed: &[Array]) -> Result<Vec<Array>> {
        let gradients = packed.iter().cloned();
        gradients
            .map(|gradient| self.unscaled(inputs, gradient))
            .collect()
    }

    // the norm of the gradients, where it is needed; the sums that came with packing are of scaled gradients
    fn norm(
        &self,
        inputs: &Inputs,
        gradients: &[Array],
        packed: &Packed,
        clips: bool,
    ) -> Result<Option<Array>> {
        if !clips && self.recipe.guard.is_none() {
            return Ok(None);
        }
        let Some([scale, _]) = self.scale(inputs) else {
            return clip::global_norm(gradients, &packed.squares).map(Some);
        };
        let norm = clip::global_norm(&packed.buffers, &packed.squares)?;
        norm.divide(scale).map(Some)
    }

    fn good(
        &self,
        outputs: &Outputs,
        norm: Option<&Array>,
        weight: Option<&Array>,
    ) -> Result<Option<Array>> {
        let (Some(guard), Some(norm), Some(loss)) = (&self.recipe.guard, norm, &outputs.loss)
        else {
            return Ok(None);
        };
        let good = guard.good(loss, norm)?;
        match weight {
            Some(weight) => Guard::any(&good, weight).map(Some),
            None => Ok(Some(good)),
        }
    }

    // what a batch leaves beside the update: buffers, the loss scale, whether it counts
    fn settle(&self, inputs: &Inputs, good: Option<&Array>, outputs: &mut Outputs) -> Result<()> {
        for (index, new) in &mut outputs.others {
            *new = choose(good, new.clone(), &inputs.others[*index])?;
        }
        outputs.skipped = good.map(Array::logical_not).transpose()?;
        if let (Some(scale), Some(good), Some(at)) =
            (self.scale(inputs), good, self.recipe.places.scale)
        {
            let next = precision::next_scale(scale, good)?;
            outputs.state.extend((at..).zip(next));
        }
        Ok(())
    }

    // new parameters, optimizer state, masters and average
    fn update(
        &self,
        inputs: &Inputs,
        rule: &Rule,
        rebound: &Rebound,
        gradients: &[Array],
        good: Option<&Array>,
        outputs: &mut Outputs,
    ) -> Result<()> {
        let weights = self.weights(inputs, rebound)?;
        let updated = self.updated(inputs, rule, gradients, &weights, good)?;
        let mut new = updated.parameters;
        outputs.state.extend(updated.state);
        if !rebound.is_empty() {
            // a step that is not taken leaves what was there before the loss
            let before = self.weights(inputs, &[])?;
            for (new, old) in new.iter_mut().zip(&before) {
                *new = choose(good, new.clone(), old)?;
            }
        }
        let (layout, places) = (&self.recipe.layout, &self.recipe.places);
        for (buffer, weight) in new.iter_mut().enumerate() {
            if let (Some(decay), Some(first)) = (self.recipe.ema_decay, places.average) {
                let old = &inputs.state[first + buffer];
                // a barrier: beyond MLX's limit to the depth of a kernel, the squared gradient would be stored
                *weight = weight.contiguous()?;
                let average = averaged(decay, old, weight)?;
                outputs
                    .state
                    .push((first + buffer, choose(good, average, old)?));
            }
            if let Some(at) = self.master(buffer) {
                let shown = weight.as_dtype(layout.dtype(buffer))?;
                outputs.state.push((at, std::mem::replace(weight, shown)));
            }
        }
        outputs.parameters = new;
        Ok(())
    }

    // the place of the buffer's master, where it has one that this step updates
    fn master(&self, buffer: usize) -> Option<usize> {
        self.recipe.compute?;
        self.recipe.places.master(&self.recipe.layout, buffer)
    }

    fn updated(
        &self,
        inputs: &Inputs,
        rule: &Rule,
        gradients: &[Array],
        weights: &[Array],
        good: Option<&Array>,
    ) -> Result<UpdateOutput> {
        let state = &inputs.state[..self.recipe.places.optimizer];
        let rule = match rule {
            Rule::Native(rules) => {
                let given = (gradients, weights);
                return rules.update(&self.recipe.layout, self.host, state, given, good);
            }
            Rule::Host => self.host,
        };
        let mut output = rule.update(UpdateCall {
            gradients,
            parameters: weights,
            state,
        })?;
        for (new, old) in output.parameters.iter_mut().zip(weights) {
            *new = choose(good, new.clone(), old)?;
        }
        for (index, new) in &mut output.state {
            *new = choose(good, new.clone(), &state[*index])?;
        }
        Ok(output)
    }

    // the buffers of the given parameters
    fn buffers(&self, inputs: &Inputs) -> Vec<Array> {
        let mut shared = inputs.shared.iter();
        let layout = &self.recipe.layout;
        let buffers = (0..layout.len()).map(|buffer| match layout.single(buffer) {
            Some(tensor) => inputs.parameters.get(tensor),
            None => shared.next(),
        });
        buffers.flatten().cloned().collect()
    }

    // the buffers to update: masters, or what the step was given, or what the loss assigned
    fn weights(&self, inputs: &Inputs, rebound: &Rebound) -> Result<Vec<Array>> {
        let layout = &self.recipe.layout;
        let mut weights = self.buffers(inputs);
        for (buffer, weight) in weights.iter_mut().enumerate() {
            if let Some(at) = self.master(buffer) {
                *weight = inputs.state[at].clone();
            }
        }
        if rebound.is_empty() {
            return Ok(weights);
        }
        let mut tensors = layout.unpack(&weights)?;
        for (index, array) in rebound {
            // in mixed precision the loss assigns in the dtype that it computes in
            tensors[*index] = array.as_dtype(tensors[*index].dtype())?;
        }
        layout.pack(&tensors)
    }
}

// decay average + (1 - decay) weight: Polyak & Juditsky, Acceleration of Stochastic Approximation by Averaging (1992)
fn averaged(decay: f64, average: &Array, weight: &Array) -> Result<Array> {
    let dtype = average.dtype();
    let old = scalar(decay, dtype).multiply(average)?;
    old.add(scalar(1.0 - decay, dtype).multiply(weight.as_dtype(dtype)?)?)
}

/// How many values of each kind a loss returned, while they cross the differentiation as one list.
#[derive(Default)]
struct Outlined {
    scaled: bool,
    weight: bool,
    aux: usize,
    kept: usize,
    others: Vec<usize>,
    key: bool,
    rebound: Vec<usize>,
}

impl Outlined {
    fn flatten(output: LossOutput, scale: Option<&Array>) -> Result<(Vec<Array>, Self)> {
        let (others, other_values): (Vec<_>, Vec<_>) = output.others.into_iter().unzip();
        let (rebound, rebound_values): (Vec<_>, Vec<_>) = output.parameters.into_iter().unzip();
        let outlined = Self {
            scaled: scale.is_some(),
            weight: output.weight.is_some(),
            aux: output.aux.len(),
            kept: output.kept.len(),
            others,
            key: output.key.is_some(),
            rebound,
        };
        let mut values = Vec::new();
        if let Some(scale) = scale {
            values.push(output.loss.as_dtype(Dtype::Float32)?.multiply(scale)?);
        }
        values.push(output.loss);
        values.extend(output.weight);
        values.extend(output.aux);
        values.extend(output.kept);
        values.extend(other_values);
        values.extend(output.key);
        values.extend(rebound_values);
        Ok((values, outlined))
    }

    fn split(self, values: Vec<Array>, gradients: Vec<Array>) -> Differentiated {
        let mut values = values.into_iter().skip(usize::from(self.scaled));
        let mut take = |n: usize| values.by_ref().take(n).collect::<Vec<_>>();
        let loss = take(1).pop();
        let weight = take(usize::from(self.weight)).pop();
        let (aux, kept) = (take(self.aux), take(self.kept));
        let others = take(self.others.len());
        let key = take(usize::from(self.key)).pop();
        let rebound = take(self.rebound.len());
        Differentiated {
            outputs: Outputs {
                loss,
                aux,
                kept,
                others: self.others.into_iter().zip(others).collect(),
                key,
                ..Outputs::default()
            },
            weight,
            rebound: self.rebound.into_iter().zip(rebound).collect(),
            gradients,
        }
    }
}
