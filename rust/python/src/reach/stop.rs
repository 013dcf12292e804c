//! Reasons why a trace ends.
use mlx_rs::Array;
use pyo3::prelude::*;

/// The reason why a call runs uncompiled in which MLX calls what it is given to compile.
pub const DISABLED: &str = "MLX has been told not to compile";

/// Reason for which a trace ended.
pub enum Stop {
    /// The user's code raised.
    Raised(PyErr),
    /// The user's code raised what MLX raises for a traced array in the place of a number: the line, and the error.
    Refused(String, PyErr),
    /// The loss does what a trace cannot repeat.
    Untraceable(String),
    /// The optimizer makes something else of its state, which the next trace may be for.
    Becomes(String),
    /// The loss stores an array where there was none, and the next trace may find it there.
    Stores(String),
    /// The loss assigns an array of another shape: a trace of such a call repeats it, where it comes again.
    Reshapes(String),
    /// The loss might take from what cannot be put back, were its trace given up: a call without one tells.
    Probe,
    /// A trace might be used once, for this reason.
    Rare(&'static str),
    /// A trace that is there is made once more, as arrays of the optimizer have other dtypes: another one is to take its place, for
    /// which the loss is looked at as it is for any new one.
    Again,
}

impl Stop {
    /// For a loss or an optimizer that reads the value of a traced array at a line.
    pub fn reads(place: &str) -> Self {
        Self::Untraceable(format!("it reads the value of an array ({place})"))
    }

    /// For what has a trace already, where another one is about to be made.
    pub fn if_known(is_known: bool) -> Result<(), Self> {
        if is_known {
            Err(Self::Again)
        } else {
            Ok(())
        }
    }

    /// The reason with more behind it.
    pub fn with(self, more: &str) -> Self {
        match self {
            Self::Untraceable(why) => Self::Untraceable(why + more),
            Self::Becomes(why) => Self::Becomes(why + more),
            Self::Stores(why) => Self::Stores(why + more),
            Self::Reshapes(why) => Self::Reshapes(why + more),
            Self::Raised(_) | Self::Refused(..) | Self::Probe | Self::Rare(_) | Self::Again => self,
        }
    }
}

impl From<PyErr> for Stop {
    fn from(error: PyErr) -> Self {
        Self::Raised(error)
    }
}

/// The reason for which a trace does not repeat an assignment.
pub fn another(name: &str, before: &Array, now: &Array) -> String {
    format!(
        "it assigns an array of another shape or dtype to {name}: {:?} {:?} -> {:?} {:?}",
        before.dtype(),
        before.shape(),
        now.dtype(),
        now.shape()
    )
}
