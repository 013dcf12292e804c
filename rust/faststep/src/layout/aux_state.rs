//! The state of a step beside parameters and optimizer: master weights, an average, an open window, a loss scale.
//!
//! Their arrays stand behind the optimizer's in one list, so that a trace takes and gives them as it does those.
use std::sync::atomic::{AtomicU64, Ordering};

use mlx_rs::{error::Result, ops, Array, Dtype};

use super::{
    layout::Layout,
    precision::{self, Stored},
};

/// The sum of the weights while no window is open: no batch makes it this, so that the first of a window sees that what
/// stands in the sums is another window's.
pub(crate) const CLOSED: f32 = f32::NEG_INFINITY;

/// The auxiliary state that a step needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // questions that have nothing to do with each other
pub struct Needs {
    /// Float32 masters of parameters in half precision.
    pub masters: bool,
    /// A moving average of the parameters.
    pub average: bool,
    /// A window over which gradients are summed.
    pub window: bool,
    /// The places of a window for gradients that the host's optimizer is given, which take memory once they are there.
    pub given: bool,
    /// A scale of the loss.
    pub scale: bool,
    /// The sum of the window's losses, each times its weight.
    pub losses: bool,
    /// So many numbers of the optimizer's options that are others at each step.
    pub numbers: usize,
    /// The norm to which gradients are clipped, where it is another at each step.
    pub max_norm: bool,
    /// The way in which the optimizer's arrays are stored.
    pub stored: Stored,
}

/// The index of the first array of each kind in the state, where there is one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// The number of the optimizer's arrays, which come first.
    pub optimizer: usize,
    /// One array for each buffer in half precision.
    pub masters: Option<usize>,
    /// One array for each buffer.
    pub average: Option<usize>,
    /// One array for each buffer, then the sum of the weights.
    pub window: Option<usize>,
    /// The scale, and the number of good steps since it last changed.
    pub scale: Option<usize>,
    /// The sum of the window's losses, each times its weight, a float32 scalar.
    pub losses: Option<usize>,
    /// The numbers of the optimizer's options, float32 scalars.
    pub numbers: Option<usize>,
    /// The norm to which gradients are clipped, a float32 scalar.
    pub max_norm: Option<usize>,
    /// The number of all arrays.
    pub len: usize,
}

impl Places {
    /// Places behind so many arrays of the optimizer.
    #[must_use]
    pub fn behind(optimizer: usize) -> Self {
        Self {
            optimizer,
            len: optimizer,
            ..Self::default()
        }
    }

    /// The place of a buffer's master; `None` for a buffer that needs none.
    #[must_use]
    pub fn master(&self, layout: &Layout, buffer: usize) -> Option<usize> {
        let nth = layout.halves().position(|half| half == buffer)?;
        Some(self.masters? + nth)
    }

    /// The place of the sum of the window's weights.
    #[must_use]
    pub fn total(&self, layout: &Layout) -> Option<usize> {
        Some(self.window? + layout.len())
    }

    /// The places of what ranks sum, in the order in which they do: losses and weights, then the window's buffers, those
    /// of the last layers first, which a backward pass makes first. Empty without a window.
    #[must_use]
    pub fn summed(&self, layout: &Layout) -> Vec<usize> {
        match (self.losses, self.window) {
            (Some(losses), Some(first)) => {
                let all = (first..=first + layout.len()).rev();
                std::iter::once(losses).chain(all).collect()
            }
            _ => Vec::new(),
        }
    }

    // allocate the arrays that are needed and missing, and assign their places
    pub(crate) fn add(
        &mut self,
        needs: Needs,
        layout: &Layout,
        buffers: &[Array],
    ) -> Result<Vec<Array>> {
        let mut new = Vec::new();
        let start = self.len;
        if needs.masters && self.masters.is_none() {
            self.masters = Some(start);
            for buffer in layout.halves() {
                new.push(buffers[buffer].as_dtype(Dtype::Float32)?);
            }
        }
        if needs.average && self.average.is_none() {
            self.average = Some(start + new.len());
            new.extend(average(buffers)?);
        }
        if (needs.window || needs.given) && self.window.is_none() {
            self.window = Some(start + new.len());
            for buffer in buffers {
                let dtype = precision::wide(buffer.dtype());
                new.push(if needs.window {
                    ops::zeros_dtype(buffer.shape(), dtype)?
                } else {
                    nothing(buffer.shape(), dtype)?
                });
            }
            new.push(Array::from_f32(CLOSED));
        }
        if needs.scale && self.scale.is_none() {
            self.scale = Some(start + new.len());
            new.extend(precision::first_scale());
        }
        if needs.losses && self.losses.is_none() {
            self.losses = Some(start + new.len());
            new.push(Array::from_f32(0.0));
        }
        if needs.numbers > 0 && self.numbers.is_none() {
            self.numbers = Some(start + new.len());
            new.extend((0..needs.numbers).map(|_| Array::from_f32(0.0)));
        }
        if needs.max_norm && self.max_norm.is_none() {
            self.max_norm = Some(start + new.len());
            new.push(Array::from_f32(f32::INFINITY));
        }
        self.len += new.len();
        Ok(new)
    }
}

// zeros that take no memory
pub(crate) fn nothing(shape: &[i32], dtype: Dtype) -> Result<Array> {
    ops::broadcast_to(ops::zeros_dtype(&[], dtype)?, shape)
}

// the initial average: the parameters in full precision
pub(crate) fn average(buffers: &[Array]) -> Result<Vec<Array>> {
    let wide = buffers.iter().map(|buffer| {
        let wide = buffer.as_dtype(precision::wide(buffer.dtype()))?;
        wide.contiguous() // shares the memory, but is another array
    });
    wide.collect()
}

/// An open window: sums that were kept count for the window in which they were summed, and for no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    number: u64, // unlike that of any other window of this process
    /// The number of batches in it.
    pub batches: usize,
}

impl Open {
    /// A window like no other, with so many batches in it.
    #[must_use]
    pub fn new(batches: usize) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { number, batches }
    }

    /// Return whether it is this window, with as many batches or with more.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

/// Sums of an open window.
#[derive(Clone, Debug)]
pub struct Window {
    /// The window.
    pub open: Open,
    /// The sum of each tensor's weighted gradients.
    pub sums: Vec<Option<Array>>,
    /// The sum of the weights, a float32 scalar.
    pub weight: Array,
}

/// State of a step beside parameters and optimizer, by tensor: independent of the layout, saved in a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct AuxState {
    /// The master of each tensor in half precision.
    pub masters: Option<Vec<Option<Array>>>,
    /// The average of each tensor.
    pub average: Option<Vec<Option<Array>>>,
    /// The open window.
    pub window: Option<Window>,
    /// The sum of the open window's losses, each times its weight, a float32 scalar.
    pub losses: Option<Array>,
    /// The scale of the loss, float32, and the good steps since it last changed, int32: scalars.
    pub scale: Option<[Array; 2]>,
}
