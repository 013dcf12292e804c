//! The seam where a step is evaluated: the order of its parts, the same whoever computes them.
//!
//! [`Evaluate`] is what computes: MLX or a capture, in `engine`, or the simulator of a memory plan, in `memory`.
//! A [`Schedule`] takes a part through it: the user's arrays are released, what has never been computed is tried out,
//! there is memory, the part is submitted, its ticket waits among those in flight.
mod budget;
mod schedule;

pub(crate) use schedule::Schedule;

/// Facts about a part of a step from its earlier evaluations.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Evaluated {
    /// True if it has been tried out, on values of before; one that takes any batch, on such a batch.
    pub tried: bool,
    /// True if it has been evaluated: kernels are compiled, and shapes are known to fit.
    pub warm: bool,
    /// The most memory that it took alone, in bytes, once that has been measured.
    pub bytes: Option<usize>,
}

/// The way in which a part is handed over.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HandOver {
    /// The first time, and until parameters have been updated, on a CPU one operation after another and the update buffer by
    /// buffer: the state of one is made when the gradient of the one before is gone. Elsewhere as below.
    First(Option<usize>),
    /// All at once, at this limit of the memory in use.
    Whole(Option<usize>),
}

/// Evaluates the parts of a step, whose graphs are built.
pub(crate) trait Evaluate {
    /// One part: its inputs and its outputs.
    type Work;
    /// The handle to wait on until a submitted part is done.
    type Ticket;
    /// The error of a part that could not be evaluated.
    type Error;

    /// The bytes in use now.
    fn active(&mut self) -> usize;

    /// Begin to watch the bytes in use.
    fn watch(&mut self);

    /// The most bytes that have been in use at once since then, or a bound of them.
    fn watched(&mut self) -> usize;

    /// Wait until a part is done.
    fn wait(&mut self, ticket: &Self::Ticket) -> Result<(), Self::Error>;

    /// Wait until there is nothing left to do, and the memory of what is done is free.
    ///
    /// # Errors
    /// Of what was under way beside the parts, which have been waited for.
    fn synchronize(&mut self) -> Result<(), Self::Error>;

    /// Have the user's objects let go of the arrays that this part replaces.
    fn release(&mut self, work: &Self::Work) -> Result<(), Self::Error>;

    /// Compute everything before the update and a part of the update, while all inputs are held: an error changes nothing.
    /// Gradients that are no output are let go of in between.
    fn try_out(&mut self, work: &mut Self::Work) -> Result<(), Self::Error>;

    /// Let go of the arrays that the part replaces, hand it over, and take up its outputs; what to wait for, if there is
    /// anything to be done.
    fn submit(
        &mut self,
        work: &mut Self::Work,
        way: HandOver,
    ) -> Result<Option<Self::Ticket>, Self::Error>;
}
