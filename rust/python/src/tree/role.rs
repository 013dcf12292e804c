//! The role of a model's arrays in a step, and their names.

/// What an array slot of the model is to the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A trainable parameter, by its index.
    Parameter(usize),
    /// Any other array, by its index.
    Other(usize),
}

/// A path as the user writes it behind `model.`.
pub fn dotted(path: &[String]) -> String {
    path.join(".")
}
