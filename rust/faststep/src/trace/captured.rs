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
    /// True if MLX has computed kernels of the last evaluation in blocks.
    pub in_blocks: bool,
    /// Seconds of a step in either way.
    pub pace: Pace,
}

/// Launches that are timed before a capture goes that is no faster than MLX.
const TIMED: usize = 16;

/// Fewest seconds from one call of a trace to the next, with all that the program does between them.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    evaluations: usize,
    launches: usize,
    evaluated: Option<f64>,
    launched: Option<f64>,
}

impl Pace {
    /// Count a call that MLX has evaluated. The first ones, which compile and return before a step has been waited for, do not
    /// count: as many as may be under way, and two.
    pub fn evaluated(&mut self, seconds: f64, in_flight: usize) {
        self.evaluations += 1;
        if self.evaluations > in_flight + 2 {
            self.evaluated = Some(self.evaluated.unwrap_or(seconds).min(seconds));
        }
    }

    /// True if a step is known to take so many seconds.
    pub fn takes(&self, seconds: f64) -> bool {
        self.evaluated.is_some_and(|evaluated| evaluated >= seconds)
    }

    /// Count a launch. Returns the reason why the capture is not worth its memory, once that is known.
    pub fn launched(&mut self, seconds: f64) -> Option<String> {
        self.launches += 1;
        let launched = self.launched.unwrap_or(seconds).min(seconds);
        self.launched = Some(launched);
        let evaluated = self.evaluated?;
        (self.launches == TIMED && launched > evaluated).then(|| {
            format!("a step takes {launched:.2e} s at least, and {evaluated:.2e} s where MLX evaluates it")
        })
    }
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

#[cfg(test)]
mod tests {
    use super::{Pace, TIMED};

    // a step that takes `evaluated` seconds by MLX and `launched` by its capture
    fn refusal(evaluated: f64, launched: f64) -> Option<String> {
        let mut pace = Pace::default();
        for first in [9.0, 0.001, 0.001, 0.001] {
            pace.evaluated(first, 2);
        }
        pace.evaluated(evaluated, 2);
        pace.evaluated(2.0 * evaluated, 2);
        (0..2 * TIMED).find_map(|_| pace.launched(launched))
    }

    #[test]
    fn a_capture_goes_that_is_no_faster() {
        assert_eq!(refusal(0.02, 0.01), None);
        let reason = refusal(0.02, 0.03);
        assert!(reason.is_some_and(|text| text.contains("3.00e-2 s at least, and 2.00e-2 s")));
    }

    #[test]
    fn nothing_is_said_of_an_evaluation_that_was_not_timed() {
        let mut pace = Pace::default();
        assert!(!pace.takes(0.0));
        assert!((0..2 * TIMED).all(|_| pace.launched(1.0).is_none()));
        (0..5).for_each(|_| pace.evaluated(0.5, 2));
        assert!(pace.takes(0.5) && !pace.takes(0.6));
    }
}
