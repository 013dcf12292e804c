//! The interface of an update rule: its arrays, its update, and the attributes that Python's optimizer has for its fields.
use std::{cmp::Ordering, fmt::Debug};

use mlx_rs::{
    error::{Exception, Result},
    Array, Dtype,
};

use crate::mlx::ops::{choose, scalar};

/// An array in a tensor's part of `optimizer.state`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The name.
    pub name: &'static str,
    /// The shape.
    pub shape: Vec<i32>,
    /// The dtype; `None`: that in which the tensor is updated.
    pub dtype: Option<Dtype>,
}

impl Moment {
    pub(super) fn new(name: &'static str, shape: Vec<i32>) -> Self {
        let dtype = None;
        Self { name, shape, dtype }
    }
}

/// The attributes of an optimizer of `mlx.optimizers`, by their names; `None` for one that is missing or of another type.
pub trait Attributes {
    /// A float or an int.
    fn number(&self, name: &str) -> Option<f64>;
    /// Two numbers.
    fn pair(&self, name: &str) -> Option<(f64, f64)>;
    /// An int from 0 on.
    fn count(&self, name: &str) -> Option<usize>;
    /// A bool.
    fn flag(&self, name: &str) -> Option<bool>;
    /// A number, or `None`.
    fn optional(&self, name: &str) -> Option<Option<f64>>;
    /// Return whether `optimizer.state` has an array of that name.
    fn keeps(&self, name: &str) -> bool;
}

/// A rule's fields. Their defaults are those of the class of its name in `mlx.optimizers`.
pub(super) trait Fields: Debug + Default {
    /// The fields of Python's optimizer; `None` where one is missing or of another type.
    fn read(attributes: &dyn Attributes) -> Option<Self>;

    /// The same with 1 for each number above 0 and -1 for each below: rules of one form have the same operations.
    fn form(&self) -> Self;
}

/// A field, as it is read.
pub(super) trait Field: Sized {
    fn read(attributes: &dyn Attributes, name: &str) -> Option<Self>;

    /// What decides about operations.
    fn form(self) -> Self;
}

macro_rules! kinds {
    ($($type:ty: $kind:ident, $form:expr,)*) => {$(
        impl Field for $type {
            fn read(attributes: &dyn Attributes, name: &str) -> Option<Self> {
                attributes.$kind(name)
            }

            fn form(self) -> Self {
                $form(self)
            }
        }
    )*};
}

kinds! {
    f64: number, sign,
    (f64, f64): pair, |(a, b)| (sign(a), sign(b)),
    usize: count, |it| it,
    bool: flag, |it| it,
    Option<f64>: optional, |it: Option<f64>| it.map(sign),
}

fn sign(value: f64) -> f64 {
    match value.partial_cmp(&0.0) {
        Some(Ordering::Greater) => 1.0,
        Some(Ordering::Less) => -1.0,
        Some(Ordering::Equal) => 0.0,
        None => value,
    }
}

/// The struct of a rule: its fields, each with its default, which have the names of Python's attributes.
macro_rules! fields {
    ($(#[$about:meta])* $name:ident { $($(#[$meaning:meta])* $field:ident: $type:ty = $default:expr,)* }) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $($(#[$meaning])* pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl $crate::optim::optimizer::rule::Fields for $name {
            fn read(attributes: &dyn $crate::optim::Attributes) -> Option<Self> {
                use $crate::optim::optimizer::rule::Field;
                Some(Self { $($field: Field::read(attributes, stringify!($field))?,)* })
            }

            fn form(&self) -> Self {
                use $crate::optim::optimizer::rule::Field;
                Self { $($field: self.$field.form(),)* }
            }
        }
    };
}
pub(super) use fields;

/// An update rule.
pub(super) trait Rule: Fields {
    /// The state of a tensor of this shape that the update reads and writes, in its order, in the tensor's dtype.
    fn moments(&self, shape: &[i32]) -> Vec<Moment>;

    /// The numbers of its options that an update computes with, as it takes them from [`Given::numbers`].
    fn numbers(&self) -> Vec<f64>;

    /// Build one update.
    fn update(&self, given: &Given) -> Updated;

    /// Return whether a tensor of this shape is updated element by element, so that it may share a buffer with others.
    fn is_elementwise(&self, _shape: &[i32]) -> bool {
        true
    }

    /// Return whether a weight moves by about the learning rate, whatever the size of its gradients.
    fn moves_by_rate(&self) -> bool {
        false
    }

    /// Return whether `optimizer.state` has a learning rate.
    fn has_rate(&self) -> bool {
        true
    }
}

/// Moments of these names, each of the tensor's shape.
pub(super) fn like(shape: &[i32], names: &[&'static str]) -> Vec<Moment> {
    let moments = names.iter();
    moments
        .map(|name| Moment::new(name, shape.to_vec()))
        .collect()
}

/// The arrays of one update.
pub(in crate::optim) struct Given<'a> {
    pub(in crate::optim) rule: &'a dyn Debug,
    pub(in crate::optim) gradient: &'a Array,
    pub(in crate::optim) parameter: &'a Array,
    pub(in crate::optim) moments: &'a [Array],
    /// The learning rate, in the gradient's dtype.
    pub(in crate::optim) rate: Option<Array>,
    /// The rule's numbers, float32, where they are arrays.
    pub(in crate::optim) numbers: Option<&'a [Array]>,
    /// The number of this update, from 1.
    pub(in crate::optim) step: &'a Array,
    /// True if the update is taken.
    pub(in crate::optim) take: Option<&'a Array>,
    /// True if the arrays are of many tensors, along their first axis.
    pub(in crate::optim) stacked: bool,
}

/// The new parameter and its new moments.
pub(in crate::optim) type Updated = Result<(Array, Vec<Array>)>;

impl Given<'_> {
    /// A scalar in the dtype of the gradient.
    pub(super) fn number(&self, value: f64) -> Array {
        scalar(value, self.gradient.dtype())
    }

    /// The numbers of a rule, in the dtype of the gradient.
    pub(super) fn numbers<const N: usize>(&self, rule: &impl Rule) -> Result<[Array; N]> {
        self.numbers_in(rule, self.gradient.dtype())
    }

    /// The numbers of a rule, in this dtype.
    pub(super) fn numbers_in<const N: usize>(
        &self,
        rule: &impl Rule,
        dtype: Dtype,
    ) -> Result<[Array; N]> {
        let numbers: Vec<_> = match self.numbers {
            Some(numbers) => numbers
                .iter()
                .map(|number| number.as_dtype(dtype))
                .collect::<Result<_>>()?,
            None => rule
                .numbers()
                .into_iter()
                .map(|number| scalar(number, dtype))
                .collect(),
        };
        let got = numbers.len();
        let message = || format!("{:?}: expected {N} numbers, got {got}", self.rule);
        numbers.try_into().map_err(|_| Exception::custom(message()))
    }

    /// The learning rate of a rule that has one.
    pub(super) fn rate(&self) -> Result<&Array> {
        self.rate.as_ref().ok_or_else(|| {
            Exception::custom(format!(
                "{:?}: expected a learning rate, got none",
                self.rule
            ))
        })
    }

    /// The moments of a rule that has so many.
    pub(super) fn moments<const N: usize>(&self) -> Result<&[Array; N]> {
        let moments = self.moments.try_into();
        moments.map_err(|_| self.refuse_moments(N))
    }

    /// The error of a rule with other moments than it keeps.
    pub(in crate::optim) fn refuse_moments(&self, expected: usize) -> Exception {
        let (rule, got) = (self.rule, self.moments.len());
        Exception::custom(format!("{rule:?}: expected {expected} moments, got {got}"))
    }

    /// The new moment where the update is taken, and the old one otherwise.
    pub(super) fn moment(&self, new: Array, old: &Array) -> Result<Array> {
        choose(self.take, new, old)
    }

    /// The new parameter where the update is taken, and the old one otherwise, with the moments.
    pub(in crate::optim) fn updated(&self, parameter: Array, moments: Vec<Array>) -> Updated {
        Ok((choose(self.take, parameter, self.parameter)?, moments))
    }

    /// The update by gradients over a root: `w - lr g / (sqrt(v) + eps)`.
    pub(super) fn over_root(&self, v: Array, eps: Array) -> Updated {
        let root = v.sqrt()?.add(eps)?;
        let update = self.rate()?.multiply(self.gradient)?.divide(root)?;
        self.updated(self.parameter.subtract(update)?, vec![v])
    }
}

/// A decay and what is left of 1.
pub(super) fn shares(decay: f64) -> [f64; 2] {
    [decay, 1.0 - decay]
}

/// `decay * average + rest * value`.
pub(super) fn averaged(
    [decay, rest]: [&Array; 2],
    average: &Array,
    value: &Array,
) -> Result<Array> {
    decay.multiply(average)?.add(rest.multiply(value)?)
}
