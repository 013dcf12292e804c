//! The key of a trace: what it is valid for.
use std::mem::discriminant;

use mlx_rs::Array;

use crate::{
    layout::{aux_state::Places, Tensor},
    trace::Part,
};

/// What a trace is valid for.
#[derive(Debug, PartialEq)]
pub(super) struct Key {
    part: Part,
    version: usize,
    places: Places,
    batch: Vec<Tensor>,
}

impl Key {
    pub(super) fn new(part: &Part, batch: &[Array], version: usize, places: Places) -> Self {
        Self {
            part: part.clone(),
            version,
            places,
            batch: batch.iter().map(Tensor::of).collect(),
        }
    }

    /// Whether it is of that version of the module and the schedules.
    pub(super) fn is_of(&self, version: usize) -> bool {
        self.version == version
    }

    /// Why none of the known keys, the last one first, is this one.
    pub(super) fn cause(&self, known: &[&Self]) -> String {
        let kind = discriminant(&self.part);
        let Some(last) = known.iter().find(|key| discriminant(&key.part) == kind) else {
            return match self.part {
                Part::Whole(_) => "first call",
                Part::Batch => "first batch of a window",
                Part::Update(_) => "first update by a window",
                Part::Gradients => "first call of gradients()",
            }
            .into();
        };
        if last.version != self.version {
            return "model_mut(), load() or another schedule".into();
        }
        if last.places != self.places {
            return "the step keeps more: a window, an average or masters".into();
        }
        if last.batch.len() != self.batch.len() {
            return format!(
                "the batch: {} arrays -> {}",
                last.batch.len(),
                self.batch.len()
            );
        }
        let mut pairs = last.batch.iter().zip(&self.batch).enumerate();
        let changed = pairs.find(|(_, (old, new))| old != new);
        changed.map_or_else(String::new, |(index, (old, new))| {
            format!(
                "batch[{index}]: {:?} {:?} -> {:?} {:?}",
                old.dtype, old.shape, new.dtype, new.shape
            )
        })
    }
}
