//! The loss and its gradients, scaled where they are computed in half precision, and their norm.
use std::cell::RefCell;

use mlx_rs::{
    error::{Exception, Result},
    stop_gradient,
    transforms::value_and_grad_with_argnums,
    Array, Dtype,
};

use super::{short, Body, Inputs};
use crate::{
    layout::{pack::Packed, precision},
    mlx::array,
    optim::clip,
    trace::{
        host::{Differentiated as Known, Left, LossCall, LossOutput},
        outputs::Outputs,
        recipe::Part,
    },
};

impl Body<'_> {
    pub(super) fn gradients(&self, inputs: &Inputs) -> Result<Outputs> {
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

    pub(super) fn scale<'b>(&self, inputs: &Inputs<'b>) -> Option<[&'b Array; 2]> {
        let at = self
            .recipe
            .places
            .scale
            .filter(|_| precision::scales(self.recipe.options.compute_dtype))?;
        Some([inputs.state.get(at)?, inputs.state.get(at + 1)?])
    }

    // the trainable tensors in the dtype of the loss
    fn for_loss(&self, inputs: &Inputs) -> Result<Vec<Array>> {
        let Some(compute) = self.recipe.options.compute_dtype else {
            return Ok(inputs.parameters.to_vec());
        };
        let buffers = self.buffers(inputs);
        let buffers = buffers.iter().map(|buffer| buffer.as_dtype(compute));
        self.recipe
            .layout
            .unpack(&buffers.collect::<Result<Vec<_>>>()?)
    }

    pub(super) fn differentiate(&self, inputs: &Inputs) -> Result<Differentiated> {
        let (key, batch) = inputs.rest.split_first().ok_or_else(short)?;
        let batch = batch
            .iter()
            .map(|array| match self.recipe.options.compute_dtype {
                Some(compute) if array.dtype() == Dtype::Float32 => array.as_dtype(compute),
                _ => Ok(array.clone()),
            });
        let batch = batch.collect::<Result<Vec<_>>>()?;
        let scale = self.scale(inputs);
        let counts = RefCell::new(LossCounts::default());
        let mut differentiated = self.for_loss(inputs)?;
        let count = differentiated.len();
        let call = LossCall {
            parameters: &differentiated,
            others: inputs.others,
            batch: &batch,
            key,
        };
        if let Some(made) = self
            .host
            .differentiated(call, scale.map(|[scale, _]| scale))?
        {
            return self.known(made);
        }
        if self.eager {
            // a gradient within the loss would make numbers of these otherwise, which functions that MLX compiles take for those
            // of an evaluation
            differentiated.extend(batch.iter().cloned());
        }
        let loss = |arrays: &[Array]| -> Result<Vec<Array>> {
            let (parameters, shown) = arrays.split_at_checked(count).ok_or_else(short)?;
            let output = self.host.loss(LossCall {
                parameters,
                others: inputs.others,
                batch: if self.eager { shown } else { &batch },
                key,
            })?;
            let (values, shape) = LossCounts::flatten(output, scale.map(|[scale, _]| scale))?;
            counts.replace(shape);
            Ok(values)
        };
        let numbers = 0..i32::try_from(inputs.parameters.len()).unwrap_or(i32::MAX);
        let numbers: Vec<i32> = numbers.collect();
        let mut differentiate = value_and_grad_with_argnums(loss, numbers.as_slice());
        let mut made = None;
        let left = self.host.differentiate(inputs.others, key, &mut || {
            made = Some(differentiate(&differentiated)?);
            Ok(())
        })?;
        drop(differentiate);
        let (values, gradients) = made.ok_or_else(short)?;
        self.decides_for_all(&values, &gradients)?;
        let idle = gradients.iter().enumerate();
        let idle = idle.filter(|(_, gradient)| array::is_zero(gradient));
        let idle: Vec<_> = idle.map(|(tensor, _)| tensor).collect();
        let mut made = counts.into_inner().split(values, gradients, left)?;
        // what the loss sets itself is trained without a gradient: a codebook of moving averages
        let set = |tensor: &usize| made.rebound.iter().any(|(rebound, _)| rebound == tensor);
        made.outputs.idle = idle.into_iter().filter(|tensor| !set(tensor)).collect();
        Ok(made)
    }

    // loss and gradients of a graph that the host knows
    fn known(&self, made: Known) -> Result<Differentiated> {
        let Known {
            output,
            left,
            gradients,
        } = made;
        let values = std::iter::once(&output.loss).chain(&output.aux);
        self.decides_for_all(&values.cloned().collect::<Vec<_>>(), &gradients)?;
        let set = |tensor: usize| {
            output
                .parameters
                .iter()
                .any(|(rebound, _)| *rebound == tensor)
        };
        let idle = gradients.iter().enumerate();
        let idle = idle.filter(|(tensor, gradient)| array::is_zero(gradient) && !set(*tensor));
        let idle = idle.map(|(tensor, _)| tensor).collect();
        Ok(Differentiated {
            outputs: Outputs {
                loss: Some(output.loss),
                aux: output.aux,
                others: left.others,
                key: left.key,
                idle,
                ..Outputs::default()
            },
            weight: output.weight,
            rebound: output.parameters,
            gradients,
        })
    }

    // each rank would clip by its own norm, and skip steps by itself
    fn decides_for_all(&self, values: &[Array], gradients: &[Array]) -> Result<()> {
        let recipe = self.recipe;
        let alone = recipe.options.guard().is_none() && recipe.options.max_grad_norm.is_none();
        if alone || recipe.part == Part::Gradients {
            return Ok(());
        }
        let ranks = array::ranks(values.iter().chain(gradients));
        let sharing = recipe.shards.as_ref().map_or(1, |group| group.size());
        if ranks == 1 || usize::try_from(ranks) == Ok(sharing) {
            return Ok(());
        }
        Err(Exception::custom(format!(
            "the loss function exchanges arrays between {ranks} ranks: expected a step that allows what is not finite \
             (nonfinite), with neither max_grad_norm nor max_loss, because each rank would decide by its own part of the gradients which steps to \
             take and how far to clip them, and the ranks would drift apart"
        )))
    }

    fn unscaled(&self, inputs: &Inputs, gradient: Array) -> Result<Array> {
        let gradient = match self.recipe.options.compute_dtype {
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
    pub(super) fn wide(&self, inputs: &Inputs, packed: &[Array]) -> Result<Vec<Array>> {
        let gradients = packed.iter().cloned();
        gradients
            .map(|gradient| self.unscaled(inputs, gradient))
            .collect()
    }

    // the norm of the gradients if the options need it; the sums from packing are of gradients times the loss scale
    pub(super) fn norm(
        &self,
        inputs: &Inputs,
        gradients: &[Array],
        packed: &Packed,
        clips: bool,
        averaged: bool,
    ) -> Result<Option<Array>> {
        if !clips && self.recipe.options.guard().is_none() {
            return Ok(None);
        }
        let Some([scale, _]) = self.scale(inputs) else {
            return self.norm_of(gradients, &packed.squares, averaged).map(Some);
        };
        let norm = self.norm_of(&packed.buffers, &packed.squares, averaged)?;
        norm.divide(scale).map(Some)
    }

    // the norm of gradients by buffer: of shards, those of all ranks; of replicas, unless they are `averaged` already, a number that is
    // finite where those of all ranks are
    pub(super) fn norm_of(
        &self,
        gradients: &[Array],
        squares: &[Option<Array>],
        averaged: bool,
    ) -> Result<Array> {
        let Some(group) = &self.recipe.shards else {
            return clip::global_norm(gradients, squares);
        };
        let sum = |shards: bool| {
            let (mut some, mut theirs) = (Vec::new(), Vec::new());
            for (buffer, gradient) in gradients.iter().enumerate() {
                if (!averaged || self.recipe.layout.is_shard(buffer)) == shards {
                    some.push(gradient.clone());
                    theirs.push(squares.get(buffer).cloned().flatten());
                }
            }
            clip::sum_of_squares(&some, &theirs)
        };
        sum(false)?.add(group.sum_in_turn(&sum(true)?)?)?.sqrt()
    }

    // gradients by buffer, of which those of replicas are averaged over the ranks that share the model: each has the same bits then
    pub(super) fn averaged(&self, gradients: &mut [Array]) -> Result<()> {
        let Some(group) = &self.recipe.shards else {
            return Ok(());
        };
        #[allow(clippy::cast_precision_loss)] // a few ranks
        let share = Array::from_f32(1.0 / group.size() as f32);
        for (buffer, gradient) in gradients.iter_mut().enumerate() {
            if !self.recipe.layout.is_shard(buffer) {
                let wide = gradient.as_dtype(precision::wide(gradient.dtype()))?;
                let mean = group.sum_in_turn(&wide)?.multiply(&share)?;
                *gradient = mean.as_dtype(gradient.dtype())?;
            }
        }
        Ok(())
    }

    // a loss by which all ranks that share the model decide alike
    pub(super) fn loss_of_all(&self, loss: &Array) -> Result<Array> {
        match &self.recipe.shards {
            #[allow(clippy::cast_precision_loss)] // a few ranks
            Some(group) => {
                let sum = group.sum_in_turn(&loss.as_dtype(Dtype::Float32)?)?;
                sum.multiply(Array::from_f32(1.0 / group.size() as f32))
            }
            None => Ok(loss.clone()),
        }
    }
}

/// Result of one loss call, differentiated.
pub(super) struct Differentiated {
    pub(super) outputs: Outputs,
    pub(super) weight: Option<Array>,
    pub(super) rebound: Vec<(usize, Array)>,
    pub(super) gradients: Vec<Array>, // by tensor
}

/// The number of values of each kind that a loss returned: they pass through the differentiation as one list.
#[derive(Default)]
struct LossCounts {
    scaled: bool,
    weight: bool,
    aux: usize,
    rebound: Vec<usize>,
}

impl LossCounts {
    fn flatten(output: LossOutput, scale: Option<&Array>) -> Result<(Vec<Array>, Self)> {
        let (rebound, rebound_values): (Vec<_>, Vec<_>) = output.parameters.into_iter().unzip();
        let counts = Self {
            scaled: scale.is_some(),
            weight: output.weight.is_some(),
            aux: output.aux.len(),
            rebound,
        };
        let mut values = Vec::new();
        if let Some(scale) = scale {
            values.push(output.loss.as_dtype(Dtype::Float32)?.multiply(scale)?);
        }
        values.push(output.loss);
        values.extend(output.weight);
        values.extend(output.aux);
        values.extend(rebound_values);
        Ok((values, counts))
    }

    fn split(
        self,
        values: Vec<Array>,
        gradients: Vec<Array>,
        left: Left,
    ) -> Result<Differentiated> {
        let mut values = values.into_iter().skip(usize::from(self.scaled));
        let mut take = |n: usize| values.by_ref().take(n).collect::<Vec<_>>();
        let loss = take(1).pop();
        let weight = take(usize::from(self.weight)).pop();
        let aux = take(self.aux);
        let rebound = take(self.rebound.len());
        let others = left.others.into_iter();
        let others = others.map(|(index, array)| Ok((index, stop_gradient(&array)?)));
        Ok(Differentiated {
            outputs: Outputs {
                loss,
                aux,
                others: others.collect::<Result<_>>()?,
                key: left.key.as_ref().map(stop_gradient).transpose()?,
                ..Outputs::default()
            },
            weight,
            rebound: self.rebound.into_iter().zip(rebound).collect(),
            gradients,
        })
    }
}
