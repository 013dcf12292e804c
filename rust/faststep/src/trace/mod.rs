//! The computation of a step, as one function over arrays that is traced once for each signature.
//!
//! Uses `evaluation`, `optim`, `layout`, `mlx` and `error`.
//!
//! The way of a batch: a `Task` says which parts its call needs, `TraceCache` finds the `Trace` of each. A trace that is
//! new calls `body`: the loss of the `Host` is differentiated, the gradients are packed and clipped, the `Guard` says
//! whether they count, and the update follows. `Outputs` names what comes out of it.
mod body;
mod cache;
mod captured;
mod guard;
mod host;
mod inputs;
mod key;
mod options;
mod outputs;
mod recipe;
mod task;
#[allow(clippy::module_inception)] // the concept that the room is named after
mod trace;
mod trial;

pub use cache::{CallTraces, TraceCache, TraceEntry, TraceRecord};
pub(crate) use captured::{Captured, Given};
pub use guard::Guard;
pub use host::{Differentiated, Host, Left, LossCall, LossOutput, UpdateCall};
pub(crate) use inputs::Inputs;
pub use inputs::{Call, HeldArrays};
pub use key::{Causes, Key};
pub use options::{Field, Nonfinite, Options, Replay};
pub(crate) use outputs::in_turn;
pub use outputs::Outputs;
pub use recipe::{Part, Recipe, Role, Rule};
pub use task::Task;
pub use trace::{Compiled, Trace};
pub(crate) use trial::trial;
