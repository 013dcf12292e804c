//! State of a trace's capture, or the reason why there is none.
use std::{fmt, rc::Rc};

use mlx_rs::Array;

use super::outputs::Outputs;
use crate::mlx::replay::Capture;

/// An array that a capture reads beside parameters and state.
#[derive(Debug)]
pub(crate) enum Given {
    /// A static copy of the last array that was given, which is kept to be known again.
    Copied { array: Array, last: Option<Array> },
    /// The graph leaves the next value in the static array; `last` is the one that was given out.
    Carried { array: Array, last: Option<Array> },
    /// Read where it lies.
    Fixed(Array),
}

impl Given {
    /// The array that the graph reads.
    pub fn array(&self) -> &Array {
        match self {
            Self::Copied { array, .. } | Self::Carried { array, .. } | Self::Fixed(array) => array,
        }
    }

    /// Know nothing of what was given before: the static array has another value by now.
    pub fn forget(&mut self) {
        if let Self::Copied { last, .. } | Self::Carried { last, .. } = self {
            *last = None;
        }
    }
}

/// A trace over static arrays, as one graph.
#[derive(Debug)]
pub(crate) struct Captured {
    /// The graph. Before the arrays, which it reads and writes until it is dropped.
    pub graph: Capture,
    /// The number of the static arrays of parameters and state that it reads and writes.
    pub resident: usize,
    /// The arrays of the state that it writes.
    pub written: Vec<usize>,
    /// The model's other arrays, the random key and the batch.
    pub given: Vec<Given>,
    /// Its outputs, static arrays; neither parameters nor state.
    pub outputs: Outputs,
    /// Number of evaluations by MLX that are still to be compared with it before it is launched in their place.
    pub doubts: usize,
}

/// Capture of a trace, or the reason why there is none.
#[derive(Debug, Default)]
pub(crate) struct CaptureState {
    /// Shared with the engine, which holds the capture as long as the trace is there.
    pub token: Rc<()>,
    /// Number of evaluations of the trace by MLX since there was no capture.
    pub runs: usize,
    /// Number of captures that have been given back.
    pub lost: u32,
    /// True if arrays that were read where they lie have turned out to be replaced.
    pub copies_all: bool,
    /// Description of the last capture; empty: there was none.
    pub captured: String,
    /// Reason why there will be no capture.
    pub refused: Option<String>,
}

impl CaptureState {
    /// There is no capture, and there will be none.
    pub fn refuse(&mut self, reason: impl Into<String>) {
        self.refused = Some(reason.into());
    }

    /// There is no capture for now.
    pub fn lose(&mut self) {
        self.captured.clear();
        (self.runs, self.lost) = (0, self.lost.saturating_add(1));
    }
}

impl fmt::Display for CaptureState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.captured.as_str(), &self.refused) {
            (_, Some(reason)) => write!(f, "not replayed: {reason}"),
            ("", None) => f.write_str("not replayed yet"),
            (captured, None) => write!(f, "captured {captured}"),
        }
    }
}
