//! The optimizer's arrays of a step: laid out, and by the names that Python's `optimizer.state` has.
use std::{collections::BTreeMap, rc::Rc};

use mlx_rs::{ops, Array};

use super::slots::ModuleArrays;
use crate::{
    engine::{Engine, Options},
    error::{Error, Result},
    layout::{precision::wide, Layout, Tensor},
    optim::{Optimizer, Optimizers, Rules},
};

/// Arrays by name.
pub(crate) type Arrays = BTreeMap<String, Array>;

/// The place of a rule's learning rate in the engine's state.
pub(super) fn rate_at(rules: &Rules, rule: usize) -> Option<usize> {
    let before = rules.rules().get(..rule)?;
    let first: usize = before
        .iter()
        .map(|rule| 1 + usize::from(rule.has_rate()))
        .sum();
    rules.rules().get(rule)?.has_rate().then_some(first + 1)
}

// what the names of a rule's arrays begin with
fn prefix(rules: &Rules, rule: usize) -> String {
    match rules.rules().len() {
        1 => String::new(),
        _ => format!("states.{rule}."),
    }
}

/// The rules of a module, and an engine that begins with the arrays of `saved`, and with zeros where it has none.
pub(super) fn lay_out(
    module: &ModuleArrays,
    optimizers: &Optimizers,
    options: &Options,
    saved: &Arrays,
) -> Result<(Rules, Engine)> {
    let names = &module.slots.parameters;
    for (name, tensor) in names.iter().zip(module.slots.tensors()) {
        if !Optimizer::supports(tensor.dtype) {
            return Err(Error::Invalid(format!(
                "{name}: expected Float32, Float16 or Bfloat16, got {:?}: freeze what is not to be trained",
                tensor.dtype
            )));
        }
    }
    let pairs = names.iter().zip(&module.parameters);
    let of = pairs
        .map(|(name, array)| optimizers.rule_of(name, array))
        .collect();
    let rules = Rules::new(optimizers.rules(), of);
    let layout = rules.layout(module.slots.tensors().to_vec(), &[]);
    let mut state = scalars(&rules, optimizers, saved)?;
    let moments = moments(&rules, names, layout.tensors(), options, saved)?;
    for buffer in 0..layout.len() {
        let members: Vec<&Vec<Array>> = layout.members(buffer).map(|i| &moments[i]).collect();
        for nth in 0..members[0].len() {
            let parts: Vec<&Array> = members.iter().map(|arrays| &arrays[nth]).collect();
            state.push(Layout::join(&parts)?);
        }
    }
    let engine = Engine::new(Rc::new(layout), module.parameters.clone(), state)?;
    Ok((rules, engine))
}

// step and learning rate of each rule
fn scalars(rules: &Rules, optimizers: &Optimizers, saved: &Arrays) -> Result<Vec<Array>> {
    let mut scalars = Vec::new();
    for ((number, rule), rate) in rules.rules().iter().enumerate().zip(optimizers.rates()) {
        let prefix = prefix(rules, number);
        let step = saved.get(&format!("{prefix}step")).cloned();
        let step = step.unwrap_or_else(|| Array::from_slice(&[0u64], &[]));
        if rule.has_rate() {
            let kept = saved.get(&format!("{prefix}learning_rate")).cloned();
            let rate = kept.map_or_else(|| rate.at(&step), Ok)?;
            scalars.extend([step, rate]);
        } else {
            scalars.push(step);
        }
    }
    Ok(scalars)
}

// by tensor
fn moments(
    rules: &Rules,
    names: &[Rc<str>],
    tensors: &[Tensor],
    options: &Options,
    saved: &Arrays,
) -> Result<Vec<Vec<Array>>> {
    let mut all = Vec::with_capacity(tensors.len());
    for (index, moments) in rules.moments(tensors).enumerate() {
        let dtype = match options.compute_dtype {
            Some(_) => wide(tensors[index].dtype),
            None => tensors[index].dtype,
        };
        let prefix = prefix(rules, rules.of()[index]);
        let arrays = moments.into_iter().map(|(moment, shape)| {
            let name = format!("{prefix}{}.{moment}", names[index]);
            match saved.get(&name) {
                Some(array) if array.shape() == shape => Ok(array.as_dtype(dtype)?),
                Some(array) => Err(Error::Invalid(format!(
                    "optimizer: {name}: expected {shape:?}, got {:?}",
                    array.shape()
                ))),
                None => Ok(ops::zeros_dtype(&shape, dtype)?),
            }
        });
        all.push(arrays.collect::<Result<Vec<_>>>()?);
    }
    Ok(all)
}

/// The optimizer's arrays, as `tree_flatten(optimizer.state)` names them.
pub(super) fn named(rules: &Rules, engine: &Engine, names: &[Rc<str>]) -> Result<Arrays> {
    let (layout, state) = (engine.layout(), engine.state());
    let mut arrays = Arrays::new();
    let mut scalars = state.iter();
    for (number, rule) in rules.rules().iter().enumerate() {
        let prefix = prefix(rules, number);
        let kinds = ["step", "learning_rate"]
            .iter()
            .take(1 + usize::from(rule.has_rate()));
        arrays.extend(
            kinds
                .zip(&mut scalars)
                .map(|(kind, array)| (format!("{prefix}{kind}"), array.clone())),
        );
    }
    let moments: Vec<_> = rules.moments(layout.tensors()).collect();
    for (buffer, place) in rules.places(layout).into_iter().enumerate() {
        for (nth, array) in state.get(place).unwrap_or_default().iter().enumerate() {
            let parts = layout.views_of(buffer, array, |tensor| &moments[tensor][nth].1)?;
            for (tensor, part) in layout.members(buffer).zip(parts) {
                let prefix = prefix(rules, rules.of()[tensor]);
                let moment = moments[tensor][nth].0;
                arrays.insert(format!("{prefix}{}.{moment}", names[tensor]), part);
            }
        }
    }
    Ok(arrays)
}
