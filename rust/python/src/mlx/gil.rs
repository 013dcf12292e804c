//! Waiting without the GIL.
use faststep::engine::Owner;
use pyo3::prelude::*;

/// Work that may cross the point where the GIL is released.
struct Unlocked<'a>(&'a mut dyn FnMut());

// SAFETY: the closure runs on the thread that made it, while that thread waits for it.
#[allow(unsafe_code)]
unsafe impl Send for Unlocked<'_> {}

impl Unlocked<'_> {
    fn run(self) {
        (self.0)();
    }
}

/// Do work without the GIL: whatever may evaluate arrays of the caller's, of which MLX reads those of an .npz file through Python.
pub fn unlocked<T>(py: Python<'_>, work: impl FnOnce() -> T) -> T {
    let (mut work, mut done) = (Some(work), None);
    Waiting(py).unlocked(&mut || done = work.take().map(|work| work()));
    done.expect("work is done once")
}

/// Waits without the GIL.
pub struct Waiting<'py>(pub Python<'py>);

impl Owner for Waiting<'_> {
    fn release(&mut self) {}

    fn unlocked(&mut self, work: &mut dyn FnMut()) {
        let work = Unlocked(work);
        self.0.detach(|| work.run());
    }
}
