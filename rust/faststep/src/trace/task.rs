//! The task of one call of a step, and the parts that are traced for it.
use super::recipe::{Part, Rule};

/// The task of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// A batch and an update.
    Whole,
    /// A batch, and an update that the host's optimizer is called for in between: to be planned. A step takes the next two.
    Called,
    /// The batch of such a step.
    Clipped,
    /// The update behind it.
    Given,
    /// A batch for the window, and the update where it is full.
    Batch {
        /// True if it is full by then.
        fills: bool,
        /// True if the window has no other batch.
        only: bool,
    },
    /// The update by the window as it is.
    Flush,
    /// Gradients.
    Gradients,
}

impl Task {
    /// The task of a batch where `accumulate` batches make one update and `open` of them are in the window; `reduced`: over ranks.
    #[must_use]
    pub fn of(accumulate: usize, open: usize, reduced: bool) -> Self {
        if accumulate <= 1 && open == 0 && !reduced {
            return Self::Whole;
        }
        let fills = open + 1 >= accumulate;
        Self::Batch {
            fills,
            only: fills && open == 0,
        }
    }

    /// Return whether parameters and state are updated.
    #[must_use]
    pub fn updates(self) -> bool {
        !matches!(
            self,
            Self::Batch { fills: false, .. } | Self::Clipped | Self::Gradients
        )
    }

    /// Return whether it needs a window.
    #[must_use]
    pub fn accumulates(self) -> bool {
        matches!(self, Self::Batch { .. } | Self::Flush)
    }

    /// The parts to trace, in the order in which their traces are looked up: the update before the batch.
    #[must_use]
    pub fn parts(self, rule: &Rule) -> Vec<Part> {
        match self {
            Self::Whole => vec![Part::Whole(rule.clone())],
            Self::Called => vec![Part::Given, Part::Clipped],
            Self::Clipped => vec![Part::Clipped],
            Self::Given => vec![Part::Given],
            Self::Batch { fills, only } => {
                let update = fills.then(|| Part::Update(rule.clone()));
                let batch = if only { Part::OnlyBatch } else { Part::Batch };
                update.into_iter().chain([batch]).collect()
            }
            Self::Flush => vec![Part::Update(rule.clone())],
            Self::Gradients => vec![Part::Gradients],
        }
    }
}
