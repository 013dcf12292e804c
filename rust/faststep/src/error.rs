//! The errors of a step, with what each of them leaves behind.
use mlx_rs::error::{ConversionError, Exception};

/// An error of the step, with what it leaves behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The loss, the optimizer or a shape failed while the step was traced: nothing has changed. What the loss returned is
    /// passed on as it is, with its place in the source.
    #[error("{}", .0.what())]
    Trace(Exception),

    /// MLX cannot compile what the loss and the optimizer compute, which ran without an error: nothing has changed.
    #[error(
        "MLX cannot compile this step: {}. Set `compile: false`, which gives the same numbers but is slower", .0.what()
    )]
    Compile(Exception),

    /// The device failed in a trace's first evaluation: nothing has changed.
    #[error("{}", .0.what())]
    FirstEvaluation(Exception),

    /// The device failed in the middle of a step, this one or one before; what it has computed since is not to be used.
    #[error(
        "a step failed on the device: {}. Parameters and optimizer state are lost: load them from a checkpoint", .0.what()
    )]
    Device(Exception),

    /// An evaluation that is not the step's failed while the step waited for the device: of this step nothing has been done, and
    /// the arrays of that evaluation hold no values, though MLX raises nothing where they are read.
    #[error(
        "an evaluation beside the step, one that `async_eval` began, failed on the device: {}. What it was to compute has no \
         values: compute it again. This step has not been taken, and nothing of the model and the optimizer has changed", .0.what()
    )]
    Beside(Exception),

    /// A step found no memory: what it computes waits, and the next call completes it.
    #[error(
        "a step found no memory: {}. Nothing is lost: free memory, and the next call completes the step first", .0.what()
    )]
    Memory(Exception),

    /// There is nothing to train.
    #[error("the model has no trainable parameters: unfreeze what is to be trained")]
    NoParameters,

    /// An option, a name or an array that is not what was expected; the message says what was.
    #[error("{0}")]
    Invalid(String),

    /// The loss function reads the value of an array, which a trace cannot repeat: nothing has changed.
    #[error(
        "the loss function reads the value of an array, which a compiled step cannot repeat: compute with arrays, or \
         switch the option `compile` off, which gives the same numbers but is slower"
    )]
    Untraceable,

    /// The call came from inside of a transformation: nothing has changed.
    #[error(
        "a step inside of a function that is transformed (by grad, value_and_grad, vmap or compile, or as the loss of another \
         step): it takes gradients, compiles and evaluates by itself. Call it outside of that function; nothing has changed"
    )]
    Transformed,

    /// A loss or a gradient is no number, and nothing was updated.
    #[error("{0}; nothing was updated")]
    Nonfinite(String),

    /// Ranks of a group that have failed, do not agree or are gone: nothing was updated.
    #[error("{message}")]
    Ranks {
        /// The numbers of the ranks at fault, as far as they are known.
        ranks: Vec<usize>,
        /// What is wrong with them, at which update.
        message: String,
    },

    /// A checkpoint that cannot be written or read; what was there before is there still.
    #[error("{}: {reason}", path.display())]
    Checkpoint {
        /// The file or directory.
        path: std::path::PathBuf,
        /// The fault.
        reason: String,
    },

    /// MLX refused an operation outside of a step.
    #[error("{}", .0.what())]
    Mlx(Exception),
}

impl Error {
    /// The error of a call that gives no loss.
    pub(crate) fn no_loss() -> Self {
        Self::Mlx(Exception::custom("a step without a loss"))
    }
}

// No variant has a source: the text of an `Exception` ends in a path of the machine that built mlx-rs.
impl From<Exception> for Error {
    fn from(error: Exception) -> Self {
        Self::Mlx(error)
    }
}

/// The error of a value that could not be read.
#[must_use]
pub fn unread(error: ConversionError) -> Exception {
    match error {
        ConversionError::Exception(error) => error,
        other => Exception::custom(other.to_string()),
    }
}

/// The result of a step's parts.
pub type Result<T> = std::result::Result<T, Error>;
