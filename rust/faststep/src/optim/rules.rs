//! The assignment of update rules to tensors, and the places of their arrays in the list of the state.
//!
//! First come step and learning rate of each rule, then the moments of each buffer.
use std::{collections::HashMap, ops::Range};

use mlx_rs::{
    error::{Exception, Result},
    Array, Dtype,
};

use super::{
    codes::{self, block},
    optimizer::{Given, Moment, Optimizer, Updated},
};
use crate::{
    error::Error,
    layout::{precision::Stored, Layout, Tensor},
    mlx::ops::choose,
};

/// The rules of a step: one, or those of a `MultiOptimizer`.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::struct_field_names)] // the rules are what it is of
pub struct Rules {
    rules: Vec<Optimizer>,
    of: Vec<usize>,
    takes_numbers: bool, // the numbers of options are arrays
    stored: Stored,
    ranks: Option<(Vec<usize>, usize)>, // by tensor, the rank that updates it; this rank
    shards: Vec<bool>,                  // by tensor, as a layout has them
}

/// The outputs of an update.
#[derive(Debug, Default)]
pub struct UpdateOutput {
    /// The new parameters, all of them.
    pub parameters: Vec<Array>,
    /// The state arrays that changed, with their index.
    pub state: Vec<(usize, Array)>,
    /// Buffers: other arrays that the update has set, with their index.
    pub others: Vec<(usize, Array)>,
    /// Arrays that the optimizer keeps beyond its state and that have to be evaluated with the step.
    pub kept: Vec<Array>,
    /// The random key, where the update drew from it.
    pub key: Option<Array>,
}

/// The learning rate of a rule's schedule after so many updates, by the rule's number and that of the updates; `None` where
/// it is not scheduled on the device.
pub(crate) type Schedule<'a> = &'a dyn Fn(usize, &Array) -> Result<Option<Array>>;

/// The scalars of one rule.
struct Head {
    at: usize,
    step: Array,
    rate: Option<Array>,
    scheduled: bool,
}

impl Head {
    // what is new in the state
    fn updated(self, state: &[Array], good: Option<&Array>) -> Result<Vec<(usize, Array)>> {
        let step = choose(good, self.step, &state[self.at])?;
        let mut new = vec![(self.at, step)];
        if let (Some(rate), true) = (self.rate, self.scheduled) {
            let rate = choose(good, rate, &state[self.at + 1])?;
            new.push((self.at + 1, rate));
        }
        Ok(new)
    }
}

impl Rules {
    /// `of`: for each tensor, the rule that updates it.
    #[must_use]
    pub fn new(rules: Vec<Optimizer>, of: Vec<usize>) -> Self {
        Self {
            rules,
            of,
            takes_numbers: false,
            stored: Stored::default(),
            ranks: None,
            shards: Vec::new(),
        }
    }

    /// Update tensors of which some are shards: each rank of a group has another part of them.
    ///
    /// # Errors
    /// [`Error::Invalid`] where a rule computes with a whole one: the message names it.
    pub fn of_shards(
        mut self,
        shards: Vec<bool>,
        tensors: &[Tensor],
    ) -> crate::error::Result<Self> {
        let mut all = self.of.iter().zip(tensors).zip(&shards);
        let whole = all.find(|((&rule, tensor), &shard)| {
            shard && !self.rules[rule].is_elementwise(&tensor.shape)
        });
        if let Some(((&rule, tensor), _)) = whole {
            return Err(Error::Invalid(format!(
                "the model is sharded: expected an optimizer that updates element by element, got {}, which computes with the whole of \
                 a parameter, for one of which this rank has a part, of shape {:?}. Take AdamW, or a MultiOptimizer that has {} for \
                 parameters that are no shards",
                self.rules[rule].class(),
                tensor.shape,
                self.rules[rule].class(),
            )));
        }
        self.shards = shards;
        Ok(self)
    }

    /// Update the tensors of one rank alone, and keep no moments of the others. `owners`: for each tensor, the rank that updates it.
    #[must_use]
    pub fn shared_out(mut self, owners: Vec<usize>, rank: usize) -> Self {
        self.ranks = Some((owners, rank));
        self
    }

    fn is_own(&self, tensor: usize) -> bool {
        let ranks = self.ranks.as_ref();
        ranks.is_none_or(|(owners, rank)| owners.get(tensor) == Some(rank))
    }

    /// For each buffer, whether this rank updates it; none where it updates all.
    pub(crate) fn own(&self, layout: &Layout) -> Option<Vec<bool>> {
        self.ranks.as_ref()?;
        let first = |buffer| layout.members(buffer).next();
        let own = (0..layout.len()).map(|buffer| first(buffer).is_some_and(|it| self.is_own(it)));
        Some(own.collect())
    }

    /// Set how moments and parameters of these tensors are stored.
    ///
    /// # Errors
    /// [`Error::Invalid`] where a rule cannot: the message names it.
    pub fn stored(mut self, stored: Stored, tensors: &[Tensor]) -> crate::error::Result<Self> {
        let option = match stored {
            Stored { codes: true, .. } => "state_bits",
            Stored {
                stochastic: true, ..
            } => "stochastic_rounding",
            _ => return Ok(self),
        };
        let coded = |rule: &&Optimizer| matches!(rule, Optimizer::Adam(_) | Optimizer::AdamW(_));
        if let Some(other) = self.rules.iter().find(|rule| !coded(rule)) {
            return Err(Error::Invalid(format!(
                "{option}: expected Adam or AdamW, got {}: take one of these, or leave the option out",
                other.class()
            )));
        }
        if stored.stochastic && !tensors.iter().any(|tensor| tensor.dtype == Dtype::Bfloat16) {
            return Err(Error::Invalid(
                "stochastic_rounding: expected trainable parameters in bfloat16, got none: leave the option out".into(),
            ));
        }
        self.stored = stored;
        Ok(self)
    }

    /// Return whether moments are codes.
    #[must_use]
    pub fn are_coded(&self) -> bool {
        self.stored.codes
    }

    /// Return whether bfloat16 is rounded by chance.
    #[must_use]
    pub fn is_stochastic(&self) -> bool {
        self.stored.stochastic
    }

    // the size of a tensor's blocks, where its moments are codes
    fn block(&self, tensor: &Tensor) -> Option<i32> {
        self.stored.codes.then(|| block(tensor.size())).flatten()
    }

    // whether the update of a tensor is stored in another way than it is computed; `dtype`: that of what is updated
    fn stores(&self, tensor: &Tensor, dtype: Dtype) -> bool {
        let rounds = self.stored.stochastic && dtype == Dtype::Bfloat16 && tensor.size() > 0;
        rounds || self.block(tensor).is_some()
    }

    fn moments_of(&self, index: usize, tensor: &Tensor) -> Vec<Moment> {
        match self.block(tensor) {
            _ if !self.is_own(index) => Vec::new(),
            Some(block) => codes::moments(tensor.size(), block),
            None => self.rules[self.of[index]].moments(&tensor.shape),
        }
    }

    /// The numbers of the rules' options that an update computes with, rule by rule.
    #[must_use]
    pub fn numbers(&self) -> Vec<f64> {
        self.rules.iter().flat_map(Optimizer::numbers).collect()
    }

    /// The same with numbers that are arrays of the state ([`Places::numbers`]): rules whose operations are the same are equal.
    ///
    /// [`Places::numbers`]: crate::layout::aux_state::Places::numbers
    #[must_use]
    pub fn with_numbers_taken(mut self) -> Self {
        for rule in &mut self.rules {
            *rule = rule.form();
        }
        self.takes_numbers = true;
        self
    }

    /// The number of arrays that are taken for numbers of options.
    #[must_use]
    pub fn taken(&self) -> usize {
        if self.takes_numbers {
            self.numbers().len()
        } else {
            0
        }
    }

    /// Use one rule for this number of tensors.
    #[must_use]
    pub fn one(rule: Optimizer, tensors: usize) -> Self {
        Self::new(vec![rule], vec![0; tensors])
    }

    /// The rules.
    #[must_use]
    pub fn rules(&self) -> &[Optimizer] {
        &self.rules
    }

    /// For each tensor, the rule that updates it.
    #[must_use]
    pub fn of(&self) -> &[usize] {
        &self.of
    }

    /// The state of each tensor.
    pub fn moments<'a>(&'a self, tensors: &'a [Tensor]) -> impl Iterator<Item = Vec<Moment>> + 'a {
        let tensors = tensors.iter().enumerate();
        tensors.map(|(index, tensor)| self.moments_of(index, tensor))
    }

    /// Return whether all tensors are updated element by element.
    pub(crate) fn are_elementwise(&self, tensors: &[Tensor]) -> bool {
        let mut pairs = self.of.iter().zip(tensors);
        pairs.all(|(&rule, tensor)| self.rules[rule].is_elementwise(&tensor.shape))
    }

    /// Lay out tensors so that those share buffers which one rule updates element by element, and those of one shape which
    /// it updates tensor by tensor.
    ///
    /// `doubles`: pairs of tensors that are one, as [`Layout::with_doubles`] takes them.
    #[must_use]
    pub fn layout(&self, tensors: Vec<Tensor>, doubles: &[(usize, usize)]) -> Layout {
        let mut groups = HashMap::new();
        let given = self.of.iter().zip(&tensors).enumerate();
        let keys = given.map(|(at, (&rule, tensor))| {
            let double = doubles.iter().any(|&(a, b)| a == at || b == at);
            let stacked = !self.rules[rule].is_elementwise(&tensor.shape);
            let shape = stacked.then_some(&tensor.shape);
            let owner = self.ranks.as_ref().and_then(|(owners, _)| owners.get(at));
            let shard = self.shards.get(at);
            let group = (
                rule,
                self.block(tensor),
                shape,
                double.then_some(at),
                owner,
                shard,
            );
            let next = groups.len();
            *groups.entry(group).or_insert(next)
        });
        let keys: Vec<_> = keys.collect();
        let layout = Layout::flat(tensors, &keys).with_doubles(doubles);
        layout.with_shards(&self.shards)
    }

    /// Others in place of these; `None` where they keep another state, or update other tensors.
    #[must_use]
    pub fn replaced(&self, new: Self, tensors: &[Tensor]) -> Option<Self> {
        let kind = |rule: &Optimizer| (std::mem::discriminant(rule), rule.has_rate());
        let same = self.of == new.of
            && self.stored == new.stored
            && self.ranks == new.ranks
            && self.shards == new.shards
            && self.rules.iter().map(kind).eq(new.rules.iter().map(kind))
            && self.moments(tensors).eq(new.moments(tensors));
        same.then_some(new)
    }

    /// The number of steps and learning rates.
    #[must_use]
    pub fn scalars(&self) -> usize {
        let rules = self.rules.iter();
        rules.map(|rule| rule.scalars().len()).sum()
    }

    /// The index of each buffer's learning rate in the state, and whether its weights move by about that much.
    pub(crate) fn rates(&self, layout: &Layout) -> Vec<Option<(usize, bool)>> {
        let rates = self.rules.iter().enumerate().map(|(number, rule)| {
            let at = self.rate_at(number);
            at.map(|at| (at, rule.moves_by_rate()))
        });
        let rates: Vec<_> = rates.collect();
        let first = |buffer| layout.members(buffer).next();
        let buffers = (0..layout.len()).map(|buffer| rates[self.of[first(buffer)?]]);
        buffers.collect()
    }

    /// The index of a rule's learning rate in the state; `None` for a rule without one.
    #[must_use]
    pub fn rate_at(&self, rule: usize) -> Option<usize> {
        let before = self.rules.get(..rule)?.iter();
        let first: usize = before.map(|rule| rule.scalars().len()).sum();
        self.rules.get(rule)?.has_rate().then_some(first + 1)
    }

    /// The indices of each buffer's moments in the state.
    #[must_use]
    pub fn places(&self, layout: &Layout) -> Vec<Range<usize>> {
        let mut end = self.scalars();
        let buffers = 0..layout.len();
        let places = buffers.map(|buffer| {
            let start = end;
            if let Some(first) = layout.members(buffer).next() {
                let tensor = &layout.tensors()[first];
                end += self.moments_of(first, tensor).len();
            }
            start..end
        });
        places.collect()
    }

    /// One update of every buffer: the new parameters, and what is new in `state`. `numbers`: those that are arrays.
    pub(crate) fn update(
        &self,
        layout: &Layout,
        schedule: Schedule,
        (state, numbers): (&[Array], &[Array]),
        (gradients, weights): (&[Array], &[Array]),
        good: Option<&Array>,
    ) -> Result<UpdateOutput> {
        let heads = self.heads(schedule, state)?;
        let numbers = self.by_rule(numbers)?;
        let mut new_state = Vec::with_capacity(state.len());
        let mut parameters = Vec::with_capacity(weights.len());
        let buffers = gradients.iter().zip(weights).enumerate();
        for ((buffer, (gradient, weight)), place) in buffers.zip(self.places(layout)) {
            let Some(old) = state.get(place.clone()) else {
                return Err(short());
            };
            let first = layout.members(buffer).next().unwrap_or(0);
            if !self.is_own(first) {
                parameters.push(weight.clone());
                continue;
            }
            let (head, rule) = (&heads[self.of[first]], &self.rules[self.of[first]]);
            let shape = &layout.tensors()[first].shape;
            let stacked = layout.single(buffer).is_none() && !rule.is_elementwise(shape);
            let rate = head.rate.as_ref();
            let stored = self.stores(&layout.tensors()[first], weight.dtype());
            let dtype = if stored {
                Dtype::Float32
            } else {
                gradient.dtype()
            };
            let given = Given {
                rule,
                gradient,
                parameter: weight,
                moments: old,
                rate: rate.map(|rate| rate.as_dtype(dtype)).transpose()?,
                numbers: numbers[self.of[first]],
                step: &head.step,
                take: good,
                stacked,
            };
            let (weight, new) = if stacked {
                update_stack(rule, shape, &given)?
            } else if stored {
                codes::update(rule, &given, self.stored.stochastic, buffer)?
            } else {
                rule.update(&given)?
            };
            parameters.push(weight);
            new_state.extend(place.zip(new));
        }
        for head in heads {
            new_state.extend(head.updated(state, good)?);
        }
        Ok(UpdateOutput {
            parameters,
            state: new_state,
            ..UpdateOutput::default()
        })
    }

    // each rule's part of the numbers that are taken
    fn by_rule<'a>(&self, mut numbers: &'a [Array]) -> Result<Vec<Option<&'a [Array]>>> {
        let parts = self.rules.iter().map(|rule| {
            if !self.takes_numbers {
                return Ok(None);
            }
            let part = numbers.split_at_checked(rule.numbers().len());
            let (part, rest) = part.ok_or_else(short)?;
            numbers = rest;
            Ok(Some(part))
        });
        parts.collect()
    }

    // the number of this update, and the learning rate that its schedule gives for those before
    fn heads(&self, schedule: Schedule, state: &[Array]) -> Result<Vec<Head>> {
        let mut at = 0;
        let heads = self.rules.iter().enumerate().map(|(number, rule)| {
            let here = at;
            at += rule.scalars().len();
            let [step, rate @ ..] = state.get(here..at).ok_or_else(short)? else {
                return Err(short());
            };
            let scheduled = match rate {
                [_] => schedule(number, step)?,
                _ => None,
            };
            Ok(Head {
                at: here,
                step: step.add(Array::from_int(1).as_dtype(step.dtype())?)?,
                scheduled: scheduled.is_some(),
                rate: scheduled.or_else(|| rate.first().cloned()),
            })
        });
        heads.collect()
    }
}

// update tensors of one shape, joined along their first axis, as one array with a leading axis
fn update_stack(rule: &Optimizer, shape: &[i32], given: &Given) -> Updated {
    let stack = |array: &Array, shape: &[i32]| array.reshape(&[&[-1], shape].concat());
    let pairs = given.moments.iter().zip(rule.moments(shape));
    let moments: Vec<Array> = pairs
        .map(|(old, moment)| stack(old, &moment.shape))
        .collect::<Result<_>>()?;
    let (gradient, parameter) = (
        stack(given.gradient, shape)?,
        stack(given.parameter, shape)?,
    );
    let (new, new_moments) = rule.update(&Given {
        gradient: &gradient,
        parameter: &parameter,
        moments: &moments,
        rate: given.rate.clone(),
        ..*given
    })?;
    let pairs = new_moments.iter().zip(given.moments);
    let new_moments = pairs.map(|(new, old)| new.reshape(old.shape()));
    Ok((
        new.reshape(given.parameter.shape())?,
        new_moments.collect::<Result<_>>()?,
    ))
}

fn short() -> Exception {
    Exception::custom("an update needs step, learning rate and moments")
}
