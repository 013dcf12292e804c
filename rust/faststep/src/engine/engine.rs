//! The engine: parameters and state of one model, and a bounded number of steps in flight.
//!
//! Between two steps the engine holds every array of the state once. For the evaluation it lets go of all of them, so
//! that MLX can write the new values into the old memory; whoever shows the arrays to a user lets go too, when
//! [`Owner::release`] is called, and shows the new ones afterwards.
use std::{ops::AddAssign, rc::Rc, sync::Arc};

use mlx_rs::{error::Result, Array};

use super::{
    meter::Reading,
    replay::{Called, Kept, Resident},
    sample::Seen,
    StageClock,
};
use crate::{
    evaluation::Schedule,
    layout::{
        aux_state::{Open, Places},
        precision, Layout,
    },
    trace::{Options, Outputs, Recipe},
};

/// The other holder of a step's arrays.
pub trait Owner {
    /// Let go of the arrays of parameters and state: their memory is about to be reused.
    fn release(&mut self);

    /// Return whether nobody but the owner can have come by an array of parameters or state: then it has a handle to
    /// each parameter, and to so many of the state's first arrays. None where somebody can, or where it does not know.
    fn holds_alone(&mut self) -> Option<usize> {
        None
    }

    /// Take what has been computed of a batch, before the host's optimizer is called.
    ///
    /// # Errors
    /// When MLX refuses an array.
    fn take_batch(&mut self, batch: &Outputs) -> Result<()> {
        let _ = batch;
        Ok(())
    }

    /// Run work that waits for the device, with whatever lock the caller holds released.
    fn unlocked(&mut self, work: &mut dyn FnMut());
}

/// An owner without objects: no other object refers to the arrays.
impl Owner for () {
    fn release(&mut self) {}

    fn unlocked(&mut self, work: &mut dyn FnMut()) {
        work();
    }
}

/// The phases of a call, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seconds {
    /// Tracing, or replaying a trace into a graph.
    pub build: f64,
    /// Handing the graph to MLX, which on a CPU computes most of it, and on a GPU waits for the memory of a large one.
    pub evaluate: f64,
    /// Waiting for steps in flight.
    pub wait: f64,
}

impl AddAssign for Seconds {
    fn add_assign(&mut self, other: Self) {
        self.build += other.build;
        self.evaluate += other.evaluate;
        self.wait += other.wait;
    }
}

/// The outputs of a step beside new parameters and state.
#[derive(Debug)]
pub struct Output {
    /// Loss, auxiliary arrays, buffers, random key, and whether nothing is taken of this batch.
    pub batch: Outputs,
    /// Norm, and whether nothing is taken, of the update by a window that this batch has filled.
    pub update: Option<Outputs>,
    /// True if the host's optimizer is to be called, with [`Engine::given`]: the batch is one of [`Task::Clipped`], and taken.
    pub calls: bool,
    /// The time by phase.
    pub seconds: Seconds,
}

impl Output {
    /// The outputs of the last part: the update if there was one.
    #[must_use]
    pub fn last(&self) -> &Outputs {
        self.update.as_ref().unwrap_or(&self.batch)
    }

    /// Return the outputs of a call that has one part only.
    #[must_use]
    pub fn of(batch: Outputs) -> Self {
        Self {
            batch,
            update: None,
            calls: false,
            seconds: Seconds::default(),
        }
    }
}

/// What a batch has changed, as it was before.
#[derive(Debug)]
pub(super) struct Undo {
    pub(super) parameters: Vec<Array>, // none where it has assigned to none
    pub(super) shared: Vec<Array>,
    pub(super) state: Vec<(usize, Array)>,
}

/// Parameters and optimizer state of one model, and the steps in flight.
#[allow(clippy::struct_excessive_bools)] // each is an answer of its own
#[derive(Debug)]
pub struct Engine {
    pub(super) layout: Rc<Layout>,
    pub(super) parameters: Vec<Array>,
    pub(super) shared: Vec<Array>,
    pub(super) state: Vec<Array>,
    pub(super) places: Places,
    pub(super) window: Option<Open>,
    pub(super) undo: Option<Undo>, // of a batch, until its update is done
    pub(super) gives: bool, // the places of a window have no memory: they are for gradients of a called update
    pub(super) masters_stale: bool,
    pub(super) averages: bool, // a step that averages has been taken: until then the average is the parameters
    pub(super) updates: usize,
    pub(super) reading: Option<Reading>,
    pub(super) seen: Seen,
    pub(super) fresh: Vec<Array>,
    pub(super) schedule: Schedule<Array>,
    pub(super) captures: Vec<Kept>, // the one used last last; before the arrays that they write
    pub(super) called: Option<Called>,
    pub(super) exchanged: f64, // seconds since then, with other ranks
    pub(super) resident: Option<Resident>,
    pub(super) residents: usize, // so many there have been
    pub(super) clock: Arc<StageClock>,
    pub(super) seconds: Seconds,
    pub(super) failed: bool,
    pub(super) dry_run: bool, // nothing is evaluated: to be planned with
}

impl Engine {
    /// Tell another clock which stage a call is in.
    pub fn set_clock(&mut self, clock: Arc<StageClock>) {
        self.clock = clock;
    }

    /// The scale of a loss in half precision, where a step of these options has one.
    #[must_use]
    pub fn loss_scale(&self, options: &Options) -> Option<&Array> {
        let at = self
            .places
            .scale
            .filter(|_| precision::scales(options.compute_dtype))?;
        self.state.get(at)
    }

    /// The layout of the parameters.
    #[must_use]
    pub fn layout(&self) -> &Rc<Layout> {
        &self.layout
    }

    /// The indices of the arrays of the state.
    #[must_use]
    pub fn places(&self) -> Places {
        self.places
    }

    /// The parameters, by tensor.
    #[must_use]
    pub fn parameters(&self) -> &[Array] {
        &self.parameters
    }

    /// The optimizer's arrays.
    #[must_use]
    pub fn state(&self) -> &[Array] {
        &self.state[..self.places.optimizer]
    }

    /// What the host's optimizer is given by a batch of this recipe: parameters or their masters, and the clipped gradients.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn given(&self, recipe: &Recipe) -> Result<(Vec<Array>, Vec<Array>)> {
        let _shared = self.shared_stream()?;
        let mut weights = self.buffers();
        for (buffer, weight) in weights.iter_mut().enumerate() {
            if let Some(at) = recipe.master(buffer) {
                *weight = self.state[at].clone();
            }
        }
        let first = self.places.window.unwrap_or(self.state.len());
        let gradients = self.state.iter().skip(first).take(weights.len());
        let gradients: Vec<Array> = gradients.cloned().collect();
        Ok((weights, recipe.gradients(&gradients)?))
    }

    /// The bytes of what is kept beside parameters and the optimizer's state.
    #[must_use]
    pub fn extra_bytes(&self) -> usize {
        let window = self.places.window.filter(|_| self.gives);
        let given = window.map(|first| first..first + self.layout.len());
        let extras = self.state.iter().enumerate().skip(self.places.optimizer);
        let held = extras.filter(|(at, _)| !given.as_ref().is_some_and(|given| given.contains(at)));
        held.map(|(_, array)| array.nbytes()).sum()
    }

    /// The number of batches in the window.
    #[must_use]
    pub fn batches(&self) -> usize {
        self.window.map_or(0, |window| window.batches)
    }
}
