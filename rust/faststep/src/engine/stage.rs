//! The stage that a call is in, for another thread to read: a watchdog says by it what hangs.
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// What a call is doing.
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
    /// Handing work to the device and waiting for it.
    Evaluation,
    /// The same where arrays are exchanged with other ranks.
    Collective,
}

const ALL: [Stage; 7] = [
    Stage::Idle,
    Stage::Objects,
    Stage::Trace,
    Stage::Build,
    Stage::FirstEvaluation,
    Stage::Evaluation,
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
            Self::Collective => "collective",
        }
    }
}

/// The stage of the calls of one engine. Entering one costs a store; another thread sees whether it is still the same one.
#[derive(Debug, Default)]
pub struct StageClock {
    stage: AtomicU64, // in the lowest byte, below the number of stages entered
    operations: AtomicUsize,
}

impl StageClock {
    /// A stage begins, in the thread of the step.
    pub fn enter(&self, stage: Stage) {
        let entered = (self.stage.load(Ordering::Relaxed) >> 8) + 1;
        self.stage
            .store(entered << 8 | stage as u64, Ordering::Relaxed);
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
