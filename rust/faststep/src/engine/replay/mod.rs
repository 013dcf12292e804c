//! A step that is recorded once and launched again, as a CUDA graph or as a list of a CPU's tasks: which traces are captured,
//! and how long their captures stay.
//!
//! Parameters and state of a step that is replayed lie in static arrays (`resident`), which nobody else ever sees. What the
//! engine holds in their place are lazy copies: whoever evaluates one has the value of that moment. Those that somebody
//! still holds are evaluated before a launch writes over what they are copies of (`launch`). A capture begins with copies of
//! all that a trace reads, a rehearsal; MLX evaluates the step as always, and what the capture makes of the copies has to be
//! the same (`verify`): on a CPU to the bit, twice.
mod launch;
mod resident;
mod verify;

use std::{rc::Rc, time::Instant};

use mlx_rs::{error::Result as MlxResult, Array};

use super::{evaluate::evaluate, Engine, Owner};
use crate::{
    mlx::{
        array, blas, memory,
        replay::{self, ScalarsApart},
    },
    trace::{Call, Captured, Given, Outputs, Replay, Trace},
};
use resident::copied;

pub(super) use launch::{Launch, OnGraph};
pub(super) use resident::Resident;

/// So many evaluations by MLX before a trace is captured, where that is left to the engine, and where it is asked for.
const RUNS: (usize, usize) = (4, 1);
/// Largest part of the free memory, as its inverse, that a capture may take where the engine is left to choose: on a GPU, and on a
/// CPU, whose memory other programs use too.
const SHARE: (usize, usize) = (2, 32);
/// Seconds, at most, to build an operation and to hand it to a CPU's worker: the time that a capture can save.
const SECONDS: f64 = 1e-5;
/// Least part of a step that a capture has to be able to save, where the engine is left to choose.
const GAIN: f64 = 0.05;
/// One part in so many of the memory limit is left to others: where less is free, captures go.
const RESERVE: usize = 32;
/// An array of the model of which there is no second copy: from so many bytes on.
const LARGE: usize = 1 << 20;
/// Memory that a capture takes beyond that of a step that MLX evaluates: one part in so many of it; of a step that takes
/// little, up to so many times as much, but not more than this (`native/cuda/replay/recorder.cpp`).
const BEYOND: usize = 10;
const LITTLE: (usize, usize) = (8, 64 << 20);
/// And so many bytes: the places of small arrays are rounded up.
const ROUNDING: usize = 1 << 16;

fn captured(bytes: usize) -> usize {
    let (times, most) = LITTLE;
    let little = if replay::is_on_cpu() {
        0
    } else {
        (times * bytes).min(most)
    };
    (bytes + bytes / BEYOND).max(little) + ROUNDING
}

fn reserve() -> usize {
    memory::limit() / RESERVE
}

/// A capture, as long as its trace is there.
#[derive(Debug)]
pub(super) struct Kept {
    token: std::rc::Weak<()>,
    captured: Captured,
}

/// The last call of a trace.
#[derive(Debug)]
pub(super) struct Called {
    token: std::rc::Weak<()>,
    launched: bool,
    at: Instant,
}

/// A trace's inputs, copied before MLX evaluates it.
pub(super) struct Rehearsal {
    inputs: Vec<Array>,
    given: Vec<Given>,
    captured: Option<Captured>, // by which it has been recorded before
}

/// Whether a capture is one for a call.
#[derive(PartialEq, Eq)]
enum Fit {
    Fits,
    Replaced, // an array that is read where it lies is another one
    Lost,
}

impl Engine {
    /// The launch of a trace that has been captured, where its capture fits this call.
    pub(super) fn replayed(
        &mut self,
        trace: &mut Trace,
        call: Call,
    ) -> std::result::Result<Launch, Call> {
        if trace.capture.captured.is_empty() {
            return Err(call);
        }
        let Some(at) = self.kept(trace) else {
            trace.capture.lose();
            return Err(call);
        };
        let fit = self.fit(&self.captures[at].captured, &call);
        if fit != Fit::Fits {
            self.captures.remove(at);
            trace.capture.copies_all |= fit == Fit::Replaced;
            trace.capture.lose();
            return Err(call);
        }
        if self.captures[at].captured.doubts > 0 {
            return Err(call);
        }
        let captured = self.captures.remove(at).captured;
        Ok(Launch {
            captured,
            call,
            updates: trace.sets_parameters(),
            keeps_masters: trace.recipe.options.compute_dtype.is_some(),
            outputs: Outputs::default(),
        })
    }

    // the place of a trace's capture
    fn kept(&self, trace: &Trace) -> Option<usize> {
        let token = Rc::as_ptr(&trace.capture.token);
        let is_its = |kept: &Kept| std::ptr::eq(kept.token.as_ptr(), token);
        self.captures.iter().position(is_its)
    }

    fn fit(&self, captured: &Captured, call: &Call) -> Fit {
        let arrays = call.others().chain(&call.rest);
        let replaced = captured.given.iter().zip(arrays).any(|(given, array)| {
            matches!(given, Given::Fixed(fixed) if array::id(fixed) != array::id(array))
        });
        let resident = self.resident.as_ref();
        let resident = resident.filter(|it| it.number == captured.resident);
        let fits = resident.is_some_and(|it| it.fits(self.value_refs()));
        let short = memory::free() < reserve(); // others have taken what was left to them
        if replaced {
            Fit::Replaced
        } else if !fits || short || !captured.graph.is_valid() {
            Fit::Lost
        } else {
            Fit::Fits
        }
    }

    /// Keep a capture, as the one used last.
    pub(super) fn keep(&mut self, trace: &Trace, captured: Captured) {
        let token = Rc::downgrade(&trace.capture.token);
        self.captures.push(Kept { token, captured });
    }

    /// As a trace is called: time the call before, without exchanges, if that was the trace's too. Where the engine is left to
    /// choose, a capture goes that is no faster than MLX.
    pub(super) fn pace(&mut self, trace: &mut Trace) {
        let now = Instant::now();
        let exchanged = std::mem::take(&mut self.exchanged);
        let kept = self.kept(trace);
        let launched = kept.is_some_and(|at| self.captures[at].captured.doubts == 0);
        let token = Rc::downgrade(&trace.capture.token);
        let before = self.called.replace(Called {
            token,
            launched,
            at: now,
        });
        let Some(before) =
            before.filter(|it| std::ptr::eq(it.token.as_ptr(), Rc::as_ptr(&trace.capture.token)))
        else {
            return;
        };
        let seconds = (now - before.at).as_secs_f64() - exchanged;
        let options = trace.recipe.options;
        if !before.launched {
            return trace.capture.pace.evaluated(seconds, options.in_flight);
        }
        let slower = trace.capture.pace.launched(seconds);
        if let (Some(reason), Replay::Auto) = (slower, options.replay) {
            trace.capture.refuse(reason);
            if let Some(at) = kept {
                self.captures.remove(at);
            }
        }
    }

    /// The bytes that captures and static arrays hold.
    #[must_use]
    pub fn captured_bytes(&self) -> usize {
        let graphs = self
            .captures
            .iter()
            .map(|kept| kept.captured.graph.info.bytes);
        graphs.sum::<usize>() + self.resident.as_ref().map_or(0, Resident::bytes)
    }

    /// Before MLX evaluates a trace: captures go whose traces have gone, and as many others, the one used least recently
    /// first, as have to for the memory of this one; with the last of them the static arrays.
    pub(super) fn make_way(&mut self, trace: &Trace) {
        self.captures.retain(|kept| kept.token.strong_count() > 0);
        let bytes = trace.evaluated.bytes.unwrap_or(0).max(reserve());
        while !self.captures.is_empty() && memory::free() < bytes {
            self.captures.remove(0);
        }
        if self.captures.is_empty() && (memory::free() < bytes || trace.capture.refused.is_some()) {
            self.resident = None;
        }
    }

    /// Give all captures back.
    pub fn give_back(&mut self) {
        self.captures.clear();
        self.resident = None;
    }

    /// The bytes that the capture of a step will hold beside parameters and state, whose copies it works on; the step takes
    /// so many alone. None where nothing is captured.
    pub(super) fn planned_capture(&self, trace: &Trace, bytes: usize) -> usize {
        if trace.recipe.options.replay == Replay::Never || refusal(trace).is_some() {
            return 0;
        }
        let copies = self.value_refs().map(Array::nbytes).sum::<usize>();
        copies + captured(bytes)
    }

    /// Whether a trace is to be captured when MLX has evaluated it once more: then copies of all that it reads.
    pub(super) fn rehearse(
        &mut self,
        trace: &mut Trace,
        call: &Call,
        owner: &mut dyn Owner,
    ) -> Option<Rehearsal> {
        let runs = match trace.recipe.options.replay {
            Replay::Never => return None,
            Replay::Auto => RUNS.0,
            Replay::Always => RUNS.1,
        };
        if trace.capture.refused.is_some() || self.dry_run {
            return None;
        }
        if let Some(reason) = refusal(trace) {
            trace.capture.refuse(reason);
            return None;
        }
        if let Some(at) = self.kept(trace) {
            let captured = self.captures.remove(at).captured; // in doubt, or it would be launched
            let again = self.again(captured, call, owner);
            return again
                .map_err(|error| trace.capture.refuse(error.what()))
                .ok();
        }
        let bytes = trace.evaluated.bytes?; // where it has been measured
        if trace.recipe.options.replay == Replay::Auto && replay::is_on_cpu() && !pays(trace) {
            return None;
        }
        trace.capture.runs += 1;
        if trace.capture.runs <= runs.saturating_mul(1 << trace.capture.lost.min(16)) {
            return None;
        }
        let rehearsal = if let Some(reason) = self.no_room(trace, bytes) {
            Err(reason)
        } else {
            let rehearsal = self.rehearsal(trace, call, owner);
            rehearsal.map_err(|error| error.what().to_owned())
        };
        rehearsal
            .map_err(|reason| trace.capture.refuse(reason))
            .ok()
    }

    fn no_room(&self, trace: &Trace, bytes: usize) -> Option<String> {
        let state = match &self.resident {
            Some(resident) if resident.fits(self.value_refs()) => 0,
            _ => self.value_refs().map(Array::nbytes).sum::<usize>(),
        };
        let needed = state + captured(bytes);
        let left = memory::free().saturating_sub(reserve());
        let free = match trace.recipe.options.replay {
            Replay::Auto if replay::is_on_cpu() => left / SHARE.1,
            Replay::Auto => left / SHARE.0,
            _ => left,
        };
        (needed > free).then(|| format!("a capture takes {needed} bytes, and may take {free}"))
    }

    fn rehearsal(
        &mut self,
        trace: &Trace,
        call: &Call,
        owner: &mut dyn Owner,
    ) -> MlxResult<Rehearsal> {
        self.fill_resident(owner)?;
        let (written, draws) = trace.written();
        let mut given = Vec::new();
        for (index, other) in call.others().enumerate() {
            given.push(if written.contains(&index) {
                let array = copied(other)?;
                Given::Carried { array, last: None }
            } else if other.nbytes() >= LARGE && !trace.capture.copies_all {
                Given::Fixed(other.clone())
            } else {
                let array = copied(other)?;
                Given::Copied { array, last: None }
            });
        }
        for (index, array) in call.rest.iter().enumerate() {
            let array = copied(array)?;
            given.push(if index == 0 && draws {
                Given::Carried { array, last: None }
            } else {
                Given::Copied { array, last: None }
            });
        }
        let apart = ScalarsApart::begin()?;
        evaluate(given.iter().map(Given::array), owner)?;
        drop(apart);
        let Some(resident) = &self.resident else {
            return Err("there are no static arrays".into());
        };
        let (buffers, state) = resident.arrays.split_at(self.layout.len());
        let mut inputs = self.layout.views(buffers)?;
        inputs.extend(self.layout.shared().map(|buffer| buffers[buffer].clone()));
        inputs.extend_from_slice(state);
        inputs.extend(given.iter().map(|given| given.array().clone()));
        Ok(Rehearsal {
            inputs,
            given,
            captured: None,
        })
    }

    // the same for what has been recorded: its static arrays get the values of this call
    fn again(
        &mut self,
        mut captured: Captured,
        call: &Call,
        owner: &mut dyn Owner,
    ) -> MlxResult<Rehearsal> {
        self.fill_resident(owner)?;
        let copies = launch::copy_in(&mut captured.given, call)?;
        evaluate(copies.iter().map(|(from, _)| from), owner)?;
        replay::copy(&copies)?;
        for given in &mut captured.given {
            given.forget();
        }
        Ok(Rehearsal {
            inputs: Vec::new(),
            given: Vec::new(),
            captured: Some(captured),
        })
    }
}

// on a CPU: once a compiler has made the kernels, for which a capture would wait; several threads may run its units side by side
fn pays(trace: &Trace) -> bool {
    let gain = SECONDS * f64::from(u32::try_from(trace.operations).unwrap_or(u32::MAX));
    !trace.capture.in_blocks && (blas::team().is_some() || !trace.capture.pace.takes(gain / GAIN))
}

fn refusal(trace: &Trace) -> Option<&'static str> {
    if let Some(reason) = replay::refusal() {
        return Some(reason);
    }
    if trace.is_eager() {
        return Some("the step is not compiled");
    }
    if trace.recipe.part.fills_window() && trace.sets_parameters() {
        return Some("the loss assigns to a trainable parameter");
    }
    let raises = trace.recipe.options.raises();
    raises.then_some("a step that raises for what is not finite needs the gradients of each step")
}
