//! The optimizer's arrays of a step: laid out, and by the names that Python's `optimizer.state` has.
use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use mlx_rs::{ops, Array};

use super::slots::ModuleArrays;
use crate::{
    engine::{Engine, Options},
    error::{Error, Result},
    layout::Tensor,
    optim::{codes, Optimizer, Optimizers, Rules, StateLayout},
};

/// Arrays by name.
pub(crate) type Arrays = BTreeMap<String, Array>;

// the prefix of the names of a rule's arrays
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
    let rules = rules.stored(options.stored(), module.slots.tensors())?;
    let layout = rules.layout(module.slots.tensors().to_vec(), &[]);
    let arrays = StateLayout::new(&rules, &layout);
    let mixed = options.compute_dtype.is_some();
    let expected = arrays.expected(&layout, mixed);
    let moments = expected.enumerate().map(|(index, expected)| {
        let prefix = format!("{}{}.", prefix(&rules, rules.of()[index]), names[index]);
        let moments = arrays.moments()[index].iter().zip(&expected);
        if let Some(recoded) = recoded(&prefix, &expected, saved)? {
            return Ok(recoded);
        }
        let moments = moments.map(|(kind, tensor)| {
            let name = format!("{prefix}{}", kind.name);
            moment(&name, tensor, saved.get(&name))
        });
        moments.collect::<Result<Vec<_>>>()
    });
    let moments = moments.collect::<Result<Vec<_>>>()?;
    let state = arrays.join(&layout, scalars(&rules, optimizers, saved)?, &moments)?;
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

// the saved moments where codes are expected, or the other way round, in the form that is expected
fn recoded(prefix: &str, expected: &[Tensor], saved: &Arrays) -> Result<Option<Vec<Array>>> {
    let names: &[&str] = match expected.len() {
        4 => &codes::PLAIN,
        _ => &codes::CODED,
    };
    let found = names
        .iter()
        .map(|name| saved.get(&format!("{prefix}{name}")));
    let Some(found) = found
        .map(Option::<&Array>::cloned)
        .collect::<Option<Vec<_>>>()
    else {
        return Ok(None);
    };
    Ok(codes::recoded(&found, expected)?)
}

/// The names that the moments of these parameters have in one form and in the other.
pub(super) fn names(rules: &Rules, parameters: &[Rc<str>]) -> BTreeSet<String> {
    let pairs = parameters.iter().zip(rules.of());
    let names = pairs.flat_map(|(parameter, &rule)| {
        let forms = codes::PLAIN.iter().chain(&codes::CODED);
        forms.map(move |name| format!("{}{parameter}.{name}", prefix(rules, rule)))
    });
    names.collect()
}

// the saved array, or zeros where there is none
fn moment(name: &str, expected: &Tensor, saved: Option<&Array>) -> Result<Array> {
    match saved {
        Some(array) if array.shape() == expected.shape => Ok(array.as_dtype(expected.dtype)?),
        Some(array) => Err(Error::Invalid(format!(
            "optimizer: {name}: expected {:?}, got {:?}",
            expected.shape,
            array.shape()
        ))),
        None => Ok(ops::zeros_dtype(&expected.shape, expected.dtype)?),
    }
}

/// The optimizer's arrays, as `tree_flatten(optimizer.state)` names them.
pub(super) fn named(rules: &Rules, engine: &Engine, names: &[Rc<str>]) -> Result<Arrays> {
    let (layout, state) = (engine.layout(), engine.state());
    let places = StateLayout::new(rules, layout);
    let mut arrays = Arrays::new();
    let mut values = state.iter();
    for (number, kinds) in places.scalars().iter().enumerate() {
        let prefix = prefix(rules, number);
        let kinds = kinds.iter().map(|kind| format!("{prefix}{kind}"));
        arrays.extend(kinds.zip(values.by_ref().cloned()));
    }
    let views = places.views(layout, state)?;
    for (tensor, (moments, views)) in places.moments().iter().zip(views).enumerate() {
        let prefix = prefix(rules, rules.of()[tensor]);
        for (moment, view) in moments.iter().zip(views) {
            arrays.insert(format!("{prefix}{}.{}", names[tensor], moment.name), view);
        }
    }
    Ok(arrays)
}
