//! How often there are searches, and which are left out where a call can run without.

/// Number of searches, each soon after the one before, from which on most are left out.
const MANY: usize = 32;

/// Number of looks within which a search comes soon after another one.
const SOON: usize = 4;

/// Of so many that could be left out one is not: what is met again and again is to be known.
const ONE_OF: usize = 16;

/// Counts of looks and searches.
#[derive(Default)]
pub struct Searches {
    looks: usize, // since the last search, or one that was left out
    soon: usize,  // one after the other
    left_out: usize,
}

impl Searches {
    /// Note a look.
    pub fn look(&mut self) {
        self.looks += 1;
    }

    /// Return whether most looks are searches.
    pub fn are_many(&self) -> bool {
        self.soon >= MANY && self.looks <= SOON
    }

    /// Note a search.
    pub fn note(&mut self) {
        let soon = std::mem::take(&mut self.looks) <= SOON;
        self.soon = if soon { self.soon + 1 } else { 0 };
    }

    /// Return whether a search is left out.
    pub fn leave_out(&mut self) -> bool {
        self.looks = 0;
        self.left_out += 1;
        !self.left_out.is_multiple_of(ONE_OF)
    }
}
