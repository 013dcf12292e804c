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

/// A trace, what it is valid for, and what the host keeps of what the loss returned.
#[derive(Debug)]
pub struct Entry<K, T> {
    /// What it is valid for.
    pub key: K,
    /// The trace.
    pub trace: Trace,
    /// What the host keeps.
    pub template: T,
    cause: String,
    number: usize,
    seconds: Option<f64>, // none before its first evaluation is done
}

type Last<'a, K, T> = Option<&'a mut Entry<K, T>>;

/// The traces of one step, by keys of type `K`.
#[derive(Debug)]
pub struct Traces<K, T> {
    entries: Vec<Entry<K, T>>, // most recent last
    made: usize,
    dropped: usize,
}

impl<K, T> Default for Traces<K, T> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            made: 0,
            dropped: 0,
        }
    }
}

impl<K, T: Default> Traces<K, T> {
    /// The trace for a key becomes the last one; where there is none, `make` makes it and says why, from the key and
    /// those that are known, the last one first.
    pub fn find(
        &mut self,
        key: K,
        max_traces: usize,
        same: impl Fn(&K, &K) -> bool,
        make: impl FnOnce(&K, &[&K]) -> (Trace, String),
    ) {
        let known = self
            .entries
            .iter()
            .rposition(|entry| same(&entry.key, &key));
        let entry = if let Some(at) = known {
            self.entries.remove(at)
        } else {
            let known: Vec<&K> = self.entries.iter().rev().map(|e| &e.key).collect();
            let (trace, cause) = make(&key, &known);
            Entry {
                key,
                trace,
                template: T::default(),
                cause,
                number: 0,
                seconds: None,
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
}

impl<K, T> Traces<K, T> {
    /// The trace used last, and the one before it.
    pub fn last_two(&mut self) -> (Last<'_, K, T>, Last<'_, K, T>) {
        let mut entries = self.entries.iter_mut().rev();
        (entries.next(), entries.next())
    }

    /// The trace used last.
    #[must_use]
    pub fn last(&self) -> Option<&Entry<K, T>> {
        self.entries.last()
    }

    /// After a call that succeeded: its new traces took so many seconds. Whether there were any.
    pub fn settle(&mut self, seconds: f64) -> bool {
        let before = self.made;
        for entry in self.entries.iter_mut().filter(|e| e.seconds.is_none()) {
            self.made += 1;
            entry.number = self.made;
            entry.seconds = Some(seconds);
        }
        self.made > before
    }

    /// After a call that failed: its new traces go. Whether there were any.
    pub fn discard(&mut self) -> bool {
        let before = self.entries.len();
        self.retain(|entry| entry.seconds.is_some());
        self.entries.len() < before
    }

    /// Drop those that can never fit again.
    pub fn retain(&mut self, fits: impl FnMut(&Entry<K, T>) -> bool) {
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
        let mut entries: Vec<&Entry<K, T>> = self.entries.iter().collect();
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
