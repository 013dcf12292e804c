//! The stage that a call is in, for another thread to read: a watchdog says by it what hangs.
use std::{
    sync::{
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        Mutex, PoisonError,
    },
    time::Instant,
};

use crate::mlx::memory;

/// Stage of a call.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(u8)]
pub enum Stage {
    /// No call is under way.
    #[default]
    Idle,
    /// Taking over what the user has changed, and giving the results to the user's objects.
    Objects,
    /// Calling the loss function, and building a graph for the first time.
    Trace,
    /// Building the lazy graph of a trace again.
    Build,
    /// The first evaluation of a trace, for which kernels are compiled.
    FirstEvaluation,
    /// Handing work to the device; a CPU computes it meanwhile.
    Evaluation,
    /// Waiting for the device.
    Wait,
    /// The same where arrays are exchanged with other ranks.
    Collective,
}

const ALL: [Stage; 8] = [
    Stage::Idle,
    Stage::Objects,
    Stage::Trace,
    Stage::Build,
    Stage::FirstEvaluation,
    Stage::Evaluation,
    Stage::Wait,
    Stage::Collective,
];

impl Stage {
    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Objects => "objects",
            Self::Trace => "trace",
            Self::Build => "build",
            Self::FirstEvaluation => "first evaluation",
            Self::Evaluation => "evaluation",
            Self::Wait => "wait",
            Self::Collective => "collective",
        }
    }
}

/// The beginning of a stage.
#[derive(Clone, Copy, Debug)]
pub struct StageEvent {
    /// The stage.
    pub stage: Stage,
    /// Its beginning, in seconds since that of the recording.
    pub seconds: f64,
    /// The bytes that MLX had in use then.
    pub active: usize,
}

#[derive(Debug)]
struct Recording {
    began: Instant,
    events: Vec<StageEvent>,
}

/// The stage of the calls of one engine. Entering one costs a store; another thread sees whether it is still the same one.
#[derive(Debug, Default)]
pub struct StageClock {
    stage: AtomicU64, // in the lowest byte, below the number of stages entered
    operations: AtomicUsize,
    traces: AtomicUsize,
    records: AtomicBool,
    recording: Mutex<Option<Recording>>,
}

impl StageClock {
    /// A stage begins, in the thread of the step.
    pub fn enter(&self, stage: Stage) {
        if stage == Stage::Trace {
            self.traces.fetch_add(1, Ordering::Relaxed);
        }
        self.begin(stage);
    }

    /// A call of the loss begins, which need not make a trace.
    pub fn enter_call(&self) {
        self.begin(Stage::Trace);
    }

    fn begin(&self, stage: Stage) {
        let entered = (self.stage.load(Ordering::Relaxed) >> 8) + 1;
        self.stage
            .store(entered << 8 | stage as u64, Ordering::Relaxed);
        if self.records.load(Ordering::Relaxed) {
            self.record(stage);
        }
    }

    fn record(&self, stage: Stage) {
        let mut recording = self
            .recording
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(Recording { began, events }) = recording.as_mut() {
            events.push(StageEvent {
                stage,
                seconds: began.elapsed().as_secs_f64(),
                active: memory::active(),
            });
        }
    }

    /// Write down every stage that begins, until the recording is taken.
    pub fn begin_recording(&self) {
        let began = Instant::now();
        let events = Vec::new();
        let mut recording = self
            .recording
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *recording = Some(Recording { began, events });
        self.records.store(true, Ordering::Relaxed);
    }

    /// End the recording; the stages since it began.
    pub fn end_recording(&self) -> Vec<StageEvent> {
        self.records.store(false, Ordering::Relaxed);
        let mut recording = self
            .recording
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        recording
            .take()
            .map_or_else(Vec::new, |recording| recording.events)
    }

    /// The graph that is evaluated has so many operations.
    pub fn set_operations(&self, operations: usize) {
        self.operations.store(operations, Ordering::Relaxed);
    }

    /// The stage, and the number of stages entered so far.
    #[must_use]
    pub fn now(&self) -> (Stage, u64) {
        let now = self.stage.load(Ordering::Relaxed);
        let stage = ALL.get((now & 0xff) as usize).copied();
        (stage.unwrap_or_default(), now >> 8)
    }

    /// The number of times that the loss function was called for a trace.
    #[must_use]
    pub fn traces(&self) -> usize {
        self.traces.load(Ordering::Relaxed)
    }

    /// The number of operations of the graph that was evaluated last.
    #[must_use]
    pub fn operations(&self) -> usize {
        self.operations.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_thread_reads_stage_and_count() {
        let clock = StageClock::default();
        assert_eq!(clock.now(), (Stage::Idle, 0));
        for (count, stage) in (1..).zip(ALL) {
            clock.enter(stage);
            let seen = std::thread::scope(|scope| scope.spawn(|| clock.now()).join());
            assert_eq!(seen.ok(), Some((stage, count)));
        }
    }
}
