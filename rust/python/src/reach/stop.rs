//! Reasons why a trace ends.
use pyo3::prelude::*;

/// Reason for which a trace ended.
pub enum Stop {
    /// The user's code raised.
    Raised(PyErr),
    /// The loss does what a trace cannot repeat.
    Untraceable(String),
    /// The loss makes another array of a buffer, which the next trace may be for.
    Becomes(String),
    /// The loss stores an array where there was none, and where the next trace may find it.
    Stores(String),
    /// There are many traces, and there may be no other batch of this kind.
    Rare,
}

impl From<PyErr> for Stop {
    fn from(error: PyErr) -> Self {
        Self::Raised(error)
    }
}
