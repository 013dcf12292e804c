//! The optimizers of `mlx.optimizers`: for each one file with its fields, their defaults and its arithmetic, operation for
//! operation as MLX has it. Here is the list of them.
mod adadelta;
mod adafactor;
mod adagrad;
mod adam;
mod adamax;
mod adamw;
mod lion;
mod muon;
mod rmsprop;
mod rule;
mod sgd;

use mlx_rs::Dtype;

use rule::{Fields, Rule};

pub use rule::{Attributes, Moment};
pub(super) use rule::{Given, Updated};

/// A module and a class of `mlx.optimizers` for each rule.
macro_rules! rules {
    ($($file:ident::$name:ident = $class:literal,)*) => {
        $(pub use $file::$name;)*

        /// An update rule with its options, named and meant as in `mlx.optimizers`. The learning rate and the step are
        /// arrays of their own.
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub enum Optimizer {$(
            #[doc = concat!("`mlx.optimizers.", $class, "`.")]
            $name($name),
        )*}

        $(impl From<$name> for Optimizer {
            fn from(rule: $name) -> Self {
                Self::$name(rule)
            }
        })*

        impl Optimizer {
            /// The rule of a class of `mlx.optimizers` with an optimizer's attributes; `None` for every other class, and
            /// where an attribute is missing or of another type.
            #[must_use]
            pub fn read(class: &str, attributes: &dyn Attributes) -> Option<Self> {
                match class {
                    $($class => $name::read(attributes).map(Self::$name),)*
                    _ => None,
                }
            }

            /// The state of a tensor of this shape that the update reads and writes, in its order, in the tensor's dtype.
            #[must_use]
            pub fn moments(&self, shape: &[i32]) -> Vec<Moment> {
                match self {
                    $(Self::$name(rule) => rule.moments(shape),)*
                }
            }

            /// The name of the class in `mlx.optimizers`.
            #[must_use]
            pub fn class(&self) -> &'static str {
                match self {
                    $(Self::$name(_) => $class,)*
                }
            }

            /// Return whether a tensor of this shape is updated element by element, so that it may share a buffer with
            /// others.
            #[must_use]
            pub fn is_elementwise(&self, shape: &[i32]) -> bool {
                match self {
                    $(Self::$name(rule) => rule.is_elementwise(shape),)*
                }
            }

            /// Return whether a weight moves by about the learning rate, whatever the size of its gradients.
            #[must_use]
            pub fn moves_by_rate(&self) -> bool {
                match self {
                    $(Self::$name(rule) => rule.moves_by_rate(),)*
                }
            }

            /// Return whether `optimizer.state` has a learning rate.
            #[must_use]
            pub fn has_rate(&self) -> bool {
                match self {
                    $(Self::$name(rule) => rule.has_rate(),)*
                }
            }

            /// The numbers of its options that an update computes with.
            pub(super) fn numbers(&self) -> Vec<f64> {
                match self {
                    $(Self::$name(rule) => rule.numbers(),)*
                }
            }

            /// The same with 1 for each number above 0 and -1 for each below: rules of one form have the same operations.
            pub(super) fn form(&self) -> Self {
                match self {
                    $(Self::$name(rule) => Self::$name(rule.form()),)*
                }
            }

            /// One update: the new parameter and its new moments, which come back as they were where it is not taken.
            pub(super) fn update(&self, given: &Given) -> Updated {
                match self {
                    $(Self::$name(rule) => rule.update(given),)*
                }
            }
        }
    };
}

rules! {
    sgd::Sgd = "SGD",
    adam::Adam = "Adam",
    adamw::AdamW = "AdamW",
    adamax::Adamax = "Adamax",
    lion::Lion = "Lion",
    rmsprop::RmsProp = "RMSprop",
    adagrad::Adagrad = "Adagrad",
    adadelta::AdaDelta = "AdaDelta",
    adafactor::Adafactor = "Adafactor",
    muon::Muon = "Muon",
}

impl Optimizer {
    /// Return whether the rules are written for tensors of this dtype.
    #[must_use]
    pub fn supports(dtype: Dtype) -> bool {
        matches!(dtype, Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16)
    }

    /// The scalars of the rule in `optimizer.state`, in their order.
    #[must_use]
    pub fn scalars(&self) -> &'static [&'static str] {
        if self.has_rate() {
            &["step", "learning_rate"]
        } else {
            &["step"]
        }
    }
}
