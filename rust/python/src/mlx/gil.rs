//! Waiting without the GIL.
use faststep::engine::Owner;
use pyo3::prelude::*;

/// Work that may cross the point where the GIL is released, or its result.
struct Once<T>(T);

// SAFETY: the work is done on the thread that made it, while that thread waits for it.
#[allow(unsafe_code)]
unsafe impl<T> Send for Once<T> {}

impl<T, F: FnOnce() -> T> Once<F> {
    fn run(self) -> Once<T> {
        Once((self.0)())
    }
}

/// Do work without the GIL.
///
/// Any work that may evaluate the user's arrays needs this: MLX reads those of an .npz file through Python.
pub fn unlocked<T>(py: Python<'_>, work: impl FnOnce() -> T) -> T {
    let work = Once(work);
    py.detach(|| work.run()).0
}

/// Waits without the GIL.
pub struct Waiting<'py>(pub Python<'py>);

impl Owner for Waiting<'_> {
    fn release(&mut self) {}

    fn unlocked(&mut self, work: &mut dyn FnMut()) {
        unlocked(self.0, work);
    }
}
