//! What can go wrong in a step.
use mlx_rs::error::Exception;

/// An error of the step, with what it leaves behind.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The loss, the optimizer or a shape failed while the step was traced: nothing has changed.
    #[error(transparent)]
    Trace(Exception),

    /// The device failed in a trace's first evaluation: nothing has changed.
    #[error("{0}")]
    FirstEvaluation(Exception),

    /// The device failed in the middle of a step, this one or one before; what it has computed since is not to be used.
    #[error("a step failed on the device: {0}. Parameters and optimizer state are lost: load them from a checkpoint")]
    Device(Exception),

    /// There is nothing to train.
    #[error("the model has no trainable parameters: unfreeze() what is to be trained")]
    NoParameters,

    /// MLX refused an operation outside of a step.
    #[error(transparent)]
    Mlx(#[from] Exception),
}

/// The result of a step's parts.
pub type Result<T> = std::result::Result<T, Error>;
