//! The graphs behind values that the user passes or puts into the model: one that nobody evaluates grows from call to call.
use faststep::engine::array::{is_lazy, operations};
use mlx_rs::Array;

/// A value that waits for more operations than this is warned of.
const LARGE: usize = 10_000;

/// The graphs seen so far.
#[derive(Default)]
pub struct LazyInputs {
    most: usize,
    told: bool,
    pending: Option<String>,
}

impl LazyInputs {
    /// Look at a value that the user gives: an argument, or an array of the model.
    pub fn look(&mut self, array: &Array, name: impl FnOnce() -> String) {
        if !is_lazy(array) {
            return;
        }
        let count = operations(array);
        self.most = self.most.max(count);
        if count > LARGE && !std::mem::replace(&mut self.told, true) {
            self.pending = Some(format!(
                "{} waits for {count} operations, which this step has to evaluate as well. A graph that nobody evaluates grows \
                 with every operation, and all of its arrays stay in memory: call mx.eval() on it where it is made",
                name()
            ));
        }
    }

    /// The operations behind the largest one so far.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Return the warning that is due.
    pub fn message(&mut self) -> Option<String> {
        self.pending.take()
    }
}
