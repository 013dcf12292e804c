//! The engine below [`Step`](crate::Step), for the Python bindings and for tests: **no promise**. Whatever is here may change
//! with any version; a Rust program needs the names at the root of the crate, and no others.
//!
//! The room evaluates steps: it holds parameters and state between them, hands each to the device, and bounds how many
//! are under way. Uses `memory`, `trace`, `evaluation`, `optim`, `layout`, `mlx` and `error`.
//!
//! The way of a batch: [`Engine::step`] takes the arrays of the state (`run`), has the [`Trace`] build its graph over them
//! and the batch, tries out what has never been evaluated, waits until there is memory (`evaluate`), lets go of the old
//! arrays, hands the graph to MLX and takes up the new ones (`state`). `sample` and `meter` look at what some updates did,
//! `nonfinite` at batches that are no numbers; `stage` tells other threads what a call is doing, `profile` measures its
//! operations. `replay` launches a step again that has been captured; `reduce` sums gradients over other
//! processes, the `ranks`.
mod aux_state;
#[allow(clippy::module_inception)] // the concept that the room is named after
mod engine;
mod evaluate;
mod flags;
mod meter;
pub mod nonfinite;
mod plan;
mod profile;
mod ranks;
mod reduce;
mod replay;
mod run;
mod sample;
mod stage;
mod state;

pub use engine::{Engine, Output, Owner, Seconds};
pub use flags::Flags;
pub use plan::PlannedCalls;
pub use ranks::Ranks;
pub use stage::{Stage, StageClock, StageEvent};

pub use crate::{
    error::unread,
    layout::{
        aux_state::{AuxState, Needs, Open, Places, Window},
        precision, Layout, NamedAuxState, Tensor,
    },
    memory::Plan,
    mlx::{
        array, blas,
        called::{self, CallGraph, Pick, Replayed, Roots, Tracers},
        group::Group,
        join, measure, memory,
        rebind::RebindError,
    },
    optim::{clip, codes, Attributes, Moment, Rules, StateLayout, UpdateOutput},
    trace::{
        Call, CallTraces, Causes, Compiled, Differentiated, Field, Guard, HeldArrays, Host, Key,
        Left, LossCall, LossOutput, Nonfinite, Options, Outputs, Part, Recipe, Replay, Role, Rule,
        Task, Trace, TraceCache, TraceEntry, TraceRecord, UpdateCall,
    },
};
