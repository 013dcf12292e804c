//! The order in which the parts of steps are evaluated, and the steps in flight.
use std::collections::VecDeque;

use super::{budget::MemoryBudget, Evaluate, Evaluated, HandOver};

/// A step that may not be done yet.
#[derive(Debug)]
struct Flight<T> {
    ticket: T,
    bytes: usize, // the most memory that it takes alone, where that is known
}

/// A bounded number of steps in flight, within the memory that one of them takes alone.
#[derive(Debug)]
pub(crate) struct Schedule<T> {
    flights: VecDeque<Flight<T>>,
    budget: MemoryBudget,
    most: usize,     // so many are under way at once
    last: Option<T>, // of the step that is being made
    pending: usize,  // the bytes of that step, as far as they are known
    updated: bool,   // parameters have been updated
}

impl<T> Schedule<T> {
    /// Nothing is under way; `updated`: parameters have been updated before.
    pub fn new(updated: bool) -> Self {
        Self {
            flights: VecDeque::new(),
            budget: MemoryBudget::new(),
            most: 0,
            last: None,
            pending: 0,
            updated,
        }
    }

    /// Let so many steps be under way at once.
    pub fn allow(&mut self, in_flight: usize) {
        self.most = in_flight;
    }

    /// Begin a step.
    pub fn begin(&mut self) {
        (self.last, self.pending) = (None, 0);
    }

    /// Evaluate one part of the step; `updates`: it replaces parameters, which the user's objects hold.
    ///
    /// # Errors
    /// Of the evaluation. Before the part is submitted, nothing has changed.
    pub fn evaluate<E: Evaluate<Ticket = T>>(
        &mut self,
        evaluator: &mut E,
        work: &mut E::Work,
        evaluated: &mut Evaluated,
        updates: bool,
    ) -> Result<(), E::Error> {
        let measured = evaluated.warm && self.updated && evaluated.bytes.is_none();
        let first = !evaluated.warm;
        if updates || first {
            // of what takes parameters over, too: the user's objects hold them as they were before they got their layout
            evaluator.release(work)?;
        }
        if !evaluated.tried {
            evaluator.try_out(work)?;
        }
        evaluated.tried = true;
        let limit = self.make_room(evaluator, evaluated.bytes)?;
        evaluated.warm = true;
        let way = if first || !self.updated {
            HandOver::First(limit)
        } else {
            HandOver::Whole(limit)
        };
        self.updated |= updates;
        let before = measured.then(|| {
            evaluator.watch();
            evaluator.active()
        });
        match evaluator.submit(work, way) {
            Ok(ticket) => self.last = ticket,
            Err(error) => {
                self.forget();
                return Err(error);
            }
        }
        if let Some(before) = before {
            let bytes = evaluator.watched().saturating_sub(before);
            evaluated.bytes = Some(bytes);
            self.pending = self.pending.max(bytes);
        }
        Ok(())
    }

    /// End the step: it is under way.
    pub fn end(&mut self) {
        let bytes = std::mem::take(&mut self.pending);
        let last = self.last.take();
        self.flights
            .extend(last.map(|ticket| Flight { ticket, bytes }));
    }

    /// Wait until no more than so many steps are under way.
    ///
    /// # Errors
    /// Of a step that failed; nothing is under way then.
    pub fn wait<E: Evaluate<Ticket = T>>(
        &mut self,
        evaluator: &mut E,
        in_flight: usize,
    ) -> Result<(), E::Error> {
        while self.flights.len() > in_flight {
            let Some(flight) = self.flights.pop_front() else {
                break;
            };
            if let Err(error) = evaluator.wait(&flight.ticket) {
                self.forget();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Wait for none of the steps under way any more: one of them has failed.
    pub fn forget(&mut self) {
        self.flights.clear();
    }

    // Make room for another part, which is built while the last one runs. A part whose memory has not been measured runs
    // alone. Returns the memory limit.
    fn make_room<E: Evaluate<Ticket = T>>(
        &mut self,
        evaluator: &mut E,
        bytes: Option<usize>,
    ) -> Result<Option<usize>, E::Error> {
        self.wait(evaluator, self.most.saturating_sub(1))?;
        let others = self.flights.iter().map(|flight| flight.bytes);
        self.pending = self.pending.max(bytes.unwrap_or(0));
        let most = others.fold(self.pending, usize::max);
        if bytes.is_none() || self.budget.is_stale(most, evaluator.active()) {
            self.wait(evaluator, 0)?;
            evaluator.synchronize()?;
            self.budget.set_idle(evaluator.active());
        }
        Ok(bytes.and_then(|_| self.budget.hand_over(most)))
    }
}
