//! The traces of a step: which one fits a call, why a new one was needed, which one goes first.
use super::{recipe::Part, task::Task, trace::Trace};
use crate::mlx::memory;

/// Number of dropped traces after which the C library returns their memory to the system.
const TRIM_EVERY: usize = 32;

/// Cause and duration of a trace.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TraceRecord {
    /// The cause of the trace.
    pub cause: String,
    /// Its duration in seconds, first evaluation included.
    pub seconds: f64,
    /// Its capture, or why it is not replayed; none where that is not asked for.
    pub replay: Option<String>,
}

/// A trace, what it is valid for, and what the host keeps of what the loss returned.
#[derive(Debug)]
pub struct TraceEntry<K, T> {
    /// Its key.
    pub key: K,
    /// The trace.
    pub trace: Trace,
    /// The host's data.
    pub kept: T,
    /// Its number among those of the cache; 0: it calls the host at each step, and is no trace to a user.
    pub number: usize,
    cause: String,
    seconds: Option<f64>, // none before its first evaluation is done
}

/// The traces of one call.
#[derive(Debug)]
pub struct CallTraces<'a> {
    /// Trace of the whole step, of the batch, of the gradients, or of an update where there is no batch.
    pub trace: &'a mut Trace,
    /// Trace of the update that follows the batch.
    pub update: Option<&'a mut Trace>,
}

/// The traces of one step, by keys of type `K`.
#[derive(Debug)]
pub struct TraceCache<K, T> {
    entries: Vec<TraceEntry<K, T>>, // most recent last
    made: usize,
    dropped: usize,
}

impl<K, T> Default for TraceCache<K, T> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            made: 0,
            dropped: 0,
        }
    }
}

impl<K, T> TraceEntry<K, T> {
    /// Return whether it has not been called yet.
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.seconds.is_none()
    }
}

impl<K, T: Default> TraceCache<K, T> {
    /// The trace for a key becomes the last one; where there is none, `make` makes it and says why, from the key and
    /// those that are known, the last one first.
    pub fn find(
        &mut self,
        key: K,
        max_traces: usize,
        same: impl Fn(&K, &K) -> bool,
        make: impl FnOnce(&K, &[&K]) -> (Trace, String),
    ) {
        if self.use_again(|entry| same(&entry.key, &key)).is_some() {
            return;
        }
        let (trace, cause) = make(&key, &self.keys());
        self.add(key, trace, T::default(), cause, max_traces);
    }

    /// A new trace becomes the last one; the one used least recently goes where there are too many.
    pub fn add(&mut self, key: K, trace: Trace, kept: T, cause: String, max_traces: usize) {
        self.entries.push(TraceEntry {
            key,
            trace,
            kept,
            cause,
            number: 0,
            seconds: None,
        });
        if self.entries.len() > max_traces {
            self.entries.remove(0);
            self.dropped += 1;
            if self.dropped.is_multiple_of(TRIM_EVERY) {
                memory::trim();
            }
        }
    }
}

impl<K, T> TraceCache<K, T> {
    /// The most recent trace that fits becomes the last one.
    pub fn use_again(
        &mut self,
        fits: impl Fn(&TraceEntry<K, T>) -> bool,
    ) -> Option<&mut TraceEntry<K, T>> {
        let at = self.entries.iter().rposition(fits)?;
        let entry = self.entries.remove(at);
        self.entries.push(entry);
        self.entries.last_mut()
    }

    /// The traces, the one used last first.
    pub fn recent(&self) -> impl Iterator<Item = &TraceEntry<K, T>> {
        self.entries.iter().rev()
    }

    /// The traces, to change what the host keeps with them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut TraceEntry<K, T>> {
        self.entries.iter_mut()
    }

    /// The keys of the traces, the one used last first.
    #[must_use]
    pub fn keys(&self) -> Vec<&K> {
        self.recent().map(|entry| &entry.key).collect()
    }

    /// The traces of a call, which were found last: that of its task, and before it that of the update where the batch
    /// fills a window.
    pub fn of(&mut self, task: Task) -> Option<CallTraces<'_>> {
        let mut entries = self.entries.iter_mut().rev();
        let trace = &mut entries.next()?.trace;
        let update = match task {
            Task::Called | Task::Batch { fills: true, .. } => Some(&mut entries.next()?.trace),
            _ => None,
        };
        Some(CallTraces { trace, update })
    }

    /// The trace used last.
    #[must_use]
    pub fn last(&self) -> Option<&TraceEntry<K, T>> {
        self.entries.last()
    }

    /// The same, to change what the host keeps with it.
    pub fn last_mut(&mut self) -> Option<&mut TraceEntry<K, T>> {
        self.entries.last_mut()
    }

    /// Keep the new traces of a call that succeeded, with their seconds. Returns whether there were any.
    pub fn commit(&mut self, seconds: f64) -> bool {
        let before = self.made;
        for entry in self.entries.iter_mut().filter(|e| e.seconds.is_none()) {
            if entry.trace.recipe.part != Part::Given || !entry.trace.is_eager() {
                self.made += 1;
                entry.number = self.made;
            }
            entry.seconds = Some(seconds);
        }
        self.made > before
    }

    /// Drop the new traces of a call that failed. Returns whether there were any.
    pub fn discard(&mut self) -> bool {
        let before = self.entries.len();
        self.retain(|entry| entry.seconds.is_some());
        self.entries.len() < before
    }

    /// Drop those that can never fit again.
    pub fn retain(&mut self, fits: impl FnMut(&TraceEntry<K, T>) -> bool) {
        self.entries.retain(fits);
    }

    /// The number of traces made so far.
    #[must_use]
    pub fn made(&self) -> usize {
        self.made
    }

    /// The traces that are kept, in the order in which they were made.
    #[must_use]
    pub fn records(&self) -> Vec<TraceRecord> {
        let made = self.entries.iter().filter(|entry| entry.number > 0);
        let mut entries: Vec<&TraceEntry<K, T>> = made.collect();
        entries.sort_by_key(|entry| entry.number);
        let records = entries.into_iter().filter_map(|entry| {
            Some(TraceRecord {
                cause: entry.cause.clone(),
                seconds: entry.seconds?,
                replay: entry.trace.replayed(),
            })
        });
        records.collect()
    }
}
