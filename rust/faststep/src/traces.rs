//! The traces of a step: which one fits a call, why a new one was needed, which one goes first.
use crate::trace::Trace;

/// After so many dropped traces the C library is asked to give their memory back.
const TRIM_EVERY: usize = 32;

/// Why a trace was made, and how long it took.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceRecord {
    /// What made the trace necessary.
    pub cause: String,
    /// How long it took, first evaluation included, in seconds.
    pub seconds: f64,
}

/// A trace, and what it is valid for.
#[derive(Debug)]
pub(crate) struct Entry<K> {
    pub(crate) key: K,
    pub(crate) trace: Trace,
    cause: String,
    number: usize,
    seconds: Option<f64>, // none before its first evaluation is done
}

/// The traces of one step, by keys of type `K`.
#[derive(Debug)]
pub(crate) struct Traces<K> {
    entries: Vec<Entry<K>>, // most recent last
    made: usize,
    dropped: usize,
}

impl<K: PartialEq> Traces<K> {
    pub(crate) fn new() -> Self {
        Self {
            entries: Vec::new(),
            made: 0,
            dropped: 0,
        }
    }

    /// The trace for a key becomes the last one; where there is none, `make` makes it, with its cause,
    /// from the key and those that are known, the last one first.
    pub(crate) fn find(
        &mut self,
        key: K,
        max_traces: usize,
        make: impl FnOnce(&K, &[&K]) -> (Trace, String),
    ) {
        let known = self.entries.iter().rposition(|entry| entry.key == key);
        let entry = if let Some(at) = known {
            self.entries.remove(at)
        } else {
            let known: Vec<&K> = self.entries.iter().rev().map(|e| &e.key).collect();
            let (trace, cause) = make(&key, &known);
            Entry {
                cause,
                trace,
                number: 0,
                seconds: None,
                key,
            }
        };
        self.entries.push(entry);
        if self.entries.len() > max_traces {
            self.entries.remove(0);
            self.dropped += 1;
            if self.dropped.is_multiple_of(TRIM_EVERY) {
                crate::memory::trim();
            }
        }
    }

    /// The trace used last, and the one before it.
    pub(crate) fn last_two(&mut self) -> (Option<&mut Trace>, Option<&mut Trace>) {
        let mut entries = self.entries.iter_mut().rev().map(|entry| &mut entry.trace);
        (entries.next(), entries.next())
    }

    /// After a call that succeeded: its new traces took so many seconds. Whether there were any.
    pub(crate) fn settle(&mut self, seconds: f64) -> bool {
        let before = self.made;
        for entry in self.entries.iter_mut().filter(|e| e.seconds.is_none()) {
            self.made += 1;
            entry.number = self.made;
            entry.seconds = Some(seconds);
        }
        self.made > before
    }

    /// After a call that failed: its new traces go.
    pub(crate) fn discard(&mut self) {
        self.entries.retain(|entry| entry.seconds.is_some());
    }

    /// Drop those that can never fit again.
    pub(crate) fn retain(&mut self, mut fits: impl FnMut(&K) -> bool) {
        self.entries.retain(|entry| fits(&entry.key));
    }

    /// The number of traces made so far.
    pub(crate) fn made(&self) -> usize {
        self.made
    }

    /// Whether the trace used last calls the loss function at every step.
    pub(crate) fn is_eager(&self) -> bool {
        self.entries
            .last()
            .is_some_and(|entry| entry.trace.is_eager())
    }

    /// The traces that are kept, in the order in which they were made.
    pub(crate) fn records(&self) -> Vec<TraceRecord> {
        let mut entries: Vec<&Entry<K>> = self.entries.iter().collect();
        entries.sort_by_key(|entry| entry.number);
        let records = entries.into_iter().filter_map(|entry| {
            Some(TraceRecord {
                cause: entry.cause.clone(),
                seconds: entry.seconds?,
            })
        });
        records.collect()
    }
}
