//! Errors that end the program early, and their exit codes.
use std::{fmt::Display, path::Path, process::ExitCode};

/// An error with its message.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Something that was given to the program is not as expected: exit code 2, as for an unknown option.
    #[error("{0}")]
    Input(String),

    /// `--doctor` has found a fault, which is printed.
    #[error("the training has a fault")]
    Fault,

    /// A step failed.
    #[error(transparent)]
    Step(#[from] faststep::Error),

    /// MLX failed outside of a step.
    #[error(transparent)]
    Mlx(#[from] mlx_rs::error::Exception),
}

impl Failure {
    /// A file or directory that is not as expected.
    pub fn file(path: &Path, reason: impl Display) -> Self {
        Self::Input(format!("{}: {reason}", path.display()))
    }

    /// 2 for bad input, 1 otherwise.
    pub fn code(&self) -> ExitCode {
        let bad_input = matches!(
            self,
            Self::Input(_) | Self::Step(faststep::Error::Checkpoint { .. })
        );
        ExitCode::from(1 + u8::from(bad_input))
    }
}
