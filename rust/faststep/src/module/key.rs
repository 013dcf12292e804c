//! Key of a trace of a module's step: what the trace is valid for.
use mlx_rs::Array;

use crate::{
    layout::Tensor,
    trace::{Causes, Key},
};

/// Part of the key beside the engine's state.
#[derive(Debug, PartialEq)]
pub(super) struct ModuleKey {
    version: usize,
    batch: Vec<Tensor>,
}

impl ModuleKey {
    pub(super) fn new(version: usize, batch: &[Array]) -> Self {
        Self {
            version,
            batch: batch.iter().map(Tensor::of).collect(),
        }
    }

    /// Return whether it is of that version of the module and the schedules.
    pub(super) fn is_of(&self, version: usize) -> bool {
        self.version == version
    }
}

/// The names of a module's batch are numbers.
pub(super) struct ByNumber;

impl Causes<ModuleKey> for ByNumber {
    fn first(&self) -> Option<String> {
        None
    }

    fn changed(&self, last: &Key<ModuleKey>, new: &Key<ModuleKey>) -> Option<String> {
        let same = last.front.is_of(new.front.version);
        (!same).then(|| "model_mut(), load() or another schedule".into())
    }

    fn batch<'a>(&self, front: &'a ModuleKey) -> &'a [Tensor] {
        &front.batch
    }

    fn name(&self, _: &ModuleKey, index: usize) -> String {
        format!("batch[{index}]")
    }

    fn rest(&self, last: &ModuleKey, new: &ModuleKey) -> String {
        let (old, new) = (last.batch.len(), new.batch.len());
        format!("the batch: {old} arrays -> {new}")
    }
}
