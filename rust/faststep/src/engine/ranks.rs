//! The other ranks of a step: rounds, one for each update, in which the gradients of a window are summed over all of them.
//!
//! A round begins with a row of numbers for each rank, which all get: a rank that has failed, is at another update or trains
//! something else is an error on all of them, before anything else is exchanged. Then `reduce` sums the buffers, one after another in the
//! order of the layout. The ranks may trace, capture and evaluate differently: a round is outside of all that.
//!
//! Ranks that share a model, of which each has shards, exchange arrays within each part of a step. A row comes before each part: a rank
//! that has failed, or would exchange something else, is an error on all of them before they wait for each other.
use std::{
    fmt::Write,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    rc::Rc,
    thread,
    time::Instant,
};

use mlx_rs::error::{Exception, Result as MlxResult};

use super::Owner;
use crate::{
    error::{Error, Result},
    layout::Layout,
    mlx::{group::Group, sockets},
    trace::Options,
};

/// The numbers of a row.
const ROW: usize = 11;
/// What ranks may meet for, by number: an update first.
const KINDS: [&str; 6] = [
    "an update",
    "gradients",
    "a validation",
    "a checkpoint",
    "a comparison of all ranks",
    "an exchange of parameters",
];
/// Hashes and counts within a row are whole numbers below this, which float32 has exactly.
const EXACT: u64 = 1 << 24;
/// MLX's ring computes and polls in so many threads of a rank, where a message is large enough for both directions.
const PROCESSORS: usize = 4;

/// The numbers of one rank in a round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Row {
    pub has_window: f32, // 1 if it has one
    failed: f32,         // 1 if it has failed
    update: f32,
    pub layout: f32,
    pub options: f32,
    kind: f32,     // of `KINDS`
    pub work: f32, // what the part that follows exchanges, where they share a model
    wish: f32,
    seconds: f32,   // since its last one
    crowd: f32,     // of `crowd`
    pub order: f32, // of the order in which a launch makes what is summed; 0: it has none
}

impl Row {
    fn numbers(self) -> [f32; ROW] {
        [
            self.has_window,
            self.failed,
            self.update,
            self.layout,
            self.options,
            self.kind,
            self.work,
            self.wish,
            self.seconds,
            self.crowd,
            self.order,
        ]
    }

    fn of(numbers: &[f32]) -> Self {
        let at = |index: usize| numbers.get(index).copied().unwrap_or(f32::NAN);
        Self {
            has_window: at(0),
            failed: at(1),
            update: at(2),
            layout: at(3),
            options: at(4),
            kind: at(5),
            work: at(6),
            wish: at(7),
            seconds: at(8),
            crowd: at(9),
            order: at(10),
        }
    }

    /// Whether a rank has the order of another one.
    pub fn has_order_of(&self, other: &Self) -> bool {
        self.order.to_bits() == other.order.to_bits()
    }
}

/// The ranks of a step, and the number of the update that they are to make.
pub(super) type Round<'a> = (&'a mut Ranks, usize);

/// The group of a step, and what has been exchanged.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // each is an answer of its own
pub struct Ranks {
    group: Rc<Group>,
    shares_model: bool,
    layout: Option<(Rc<Layout>, f32)>,
    rounds: usize,
    pub(super) flushed: bool,
    wish: u8,
    wished: u8,
    told: bool, // the last round has failed: nobody waits for this rank
    lost: bool, // nobody ever will
    bytes: usize,
    seconds: f64,
    left: Option<Instant>, // the end of the last row
    own: Vec<f64>,         // seconds before updates, of each rank
    crowd: f32,
    crowded: bool, // all ranks are on one machine with few processors
}

#[allow(clippy::cast_precision_loss)] // below `EXACT`
fn exact(number: u64) -> f32 {
    (number % EXACT) as f32
}

pub(super) fn hash(what: impl Hash) -> f32 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    exact(hasher.finish())
}

// a number of this machine where it has few processors for so many ranks; else 0
fn crowd(ranks: usize) -> f32 {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let machine = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let machine = machine.ok().filter(|_| processors < PROCESSORS * ranks);
    machine.map_or(0.0, hash)
}

// a number of an order in which arrays are made
pub(super) fn order_hash(order: &[usize]) -> f32 {
    if order.is_empty() {
        return 0.0;
    }
    hash(order)
}

// what all ranks must have alike, for the same arithmetic and the same decisions
pub(super) fn options_hash(options: &Options) -> f32 {
    hash(format!(
        "{:?}",
        (
            options.max_grad_norm,
            options.max_grad_value,
            options.nonfinite,
            options.max_loss,
            options.compute_dtype,
            options.ema_decay,
        )
    ))
}

impl Ranks {
    /// The ranks of a group.
    #[must_use]
    pub fn new(group: Group) -> Self {
        let crowd = crowd(group.size());
        if crowd > 0.0 {
            sockets::wait();
        }
        Self {
            group: Rc::new(group),
            shares_model: false,
            layout: None,
            rounds: 0,
            flushed: false,
            wish: 0,
            wished: 0,
            told: false,
            lost: false,
            bytes: 0,
            seconds: 0.0,
            left: None,
            own: Vec::new(),
            crowd,
            crowded: false,
        }
    }

    /// The same ranks, of which each has shards of one model.
    #[must_use]
    pub fn sharing_model(mut self) -> Self {
        self.shares_model = true;
        self
    }

    /// The group of ranks that share a model; none where each has a replica.
    #[must_use]
    pub fn shards(&self) -> Option<&Rc<Group>> {
        self.shares_model.then_some(&self.group)
    }

    /// Begin a call, whose error the others have not heard of; the number of rounds so far.
    pub fn begin_call(&mut self) -> usize {
        self.told = self.lost;
        self.rounds
    }

    /// The number of rounds so far, of which one has begun for each.
    #[must_use]
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// Return whether the last window that was flushed had a batch, on any rank.
    #[must_use]
    pub fn has_flushed(&self) -> bool {
        self.flushed
    }

    /// The bytes of what this rank has given to sums.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The seconds spent in rounds, waiting for other ranks included.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// The seconds that each rank has spent outside of exchanges before its updates, but for the first one.
    #[must_use]
    pub fn own_seconds(&self) -> &[f64] {
        &self.own
    }

    /// Count another exchange, which began then.
    pub fn end_exchange(&mut self, began: Instant) {
        self.seconds += began.elapsed().as_secs_f64();
        self.left = Some(Instant::now());
    }

    /// Give a number to the others from the next round on.
    pub fn wish(&mut self, wish: u8) {
        self.wish = wish;
    }

    /// The largest number that a rank has given in the last round, the same on all ranks.
    #[must_use]
    pub fn wished(&self) -> u8 {
        self.wished
    }

    /// Tell the others that this rank has failed, as its part of a round; not where the last one has failed already.
    ///
    /// # Errors
    /// [`Error::Ranks`], when they cannot be reached.
    pub fn fail(&mut self, update: usize, owner: &mut dyn Owner) -> Result<()> {
        if self.told {
            return Ok(());
        }
        let row = Row {
            failed: 1.0,
            ..self.row(update)
        };
        self.told = true;
        self.exchange(row, update, owner).map(drop)
    }

    /// Meet the others for one of `KINDS` that is no update, before anything is exchanged for it.
    ///
    /// # Errors
    /// [`Error::Ranks`], when one of them has failed, or meets for something else.
    pub fn meet(&mut self, kind: u8, update: usize, owner: &mut dyn Owner) -> Result<()> {
        let row = Row {
            kind: f32::from(kind),
            update: 0.0, // one may be about to load a checkpoint
            ..self.row(update)
        };
        self.round(row, update, owner).map(drop)
    }

    pub(super) fn row(&self, update: usize) -> Row {
        Row {
            update: exact(update as u64),
            wish: f32::from(self.wish),
            crowd: self.crowd,
            ..Row::default()
        }
    }

    // the rows of all ranks, which agree
    pub(super) fn round(
        &mut self,
        row: Row,
        update: usize,
        owner: &mut dyn Owner,
    ) -> Result<Vec<Row>> {
        self.told = true;
        let rows = self.exchange(row, update, owner)?;
        agree(&rows, update)?;
        self.told = false;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // each was such a number
        let wishes = rows.iter().map(|row| row.wish as u8);
        self.wished = wishes.max().unwrap_or(0);
        let crowd = rows[0].crowd.to_bits();
        self.crowded = self.crowd > 0.0 && rows.iter().all(|row| row.crowd.to_bits() == crowd);
        Ok(rows)
    }

    // the rows of all ranks
    fn exchange(&mut self, row: Row, update: usize, owner: &mut dyn Owner) -> Result<Vec<Row>> {
        self.rounds += 1;
        let started = Instant::now();
        let (rank, size) = (self.group.rank(), self.group.size());
        let own = self.left.map_or(0.0, |left| (started - left).as_secs_f32());
        let row = Row {
            seconds: own,
            ..row
        };
        let mut numbers = vec![0.0; ROW * size];
        numbers[ROW * rank..ROW * (rank + 1)].copy_from_slice(&row.numbers());
        self.bytes += size_of_val(&numbers[..]);
        let mut summed = Ok(());
        owner.unlocked(&mut || summed = self.group.sum_numbers(&mut numbers));
        self.end_exchange(started);
        summed.map_err(|error| self.lost(update, &error))?;
        let rows: Vec<Row> = numbers.chunks(ROW).map(Row::of).collect();
        self.own.resize(size, 0.0);
        for (own, row) in self.own.iter_mut().zip(&rows) {
            if row.kind <= 0.0 {
                *own += f64::from(row.seconds);
            }
        }
        Ok(rows)
    }

    // the row before a part of a step over shards, which exchanges that
    pub(super) fn begin_part(
        &mut self,
        update: usize,
        (layout, options, work): (&Rc<Layout>, &Options, f32),
        owner: &mut dyn Owner,
    ) -> Result<()> {
        let mut row = self.row(update);
        row.layout = self.layout_hash(layout);
        row.options = options_hash(options);
        row.work = work;
        self.round(row, update, owner).map(drop)
    }

    // an exchange that MLX could not do: another one may wait for ever
    fn lost(&mut self, update: usize, error: &Exception) -> Error {
        (self.told, self.lost) = (true, true);
        let (rank, size) = (self.group.rank(), self.group.size());
        let beside = [(rank + size - 1) % size, (rank + 1) % size];
        let beside = if beside[0] == beside[1] {
            format!("rank {}", beside[0])
        } else {
            format!(
                "rank {} or rank {}, or one behind them",
                beside[0], beside[1]
            )
        };
        Error::Ranks {
            ranks: Vec::new(),
            message: format!(
                "update {update}: rank {rank} of {size} has lost the others: {}. In a ring that is {beside}: its output says why it \
                 ended. Nothing was updated here; end all ranks, and start them again from a checkpoint",
                error.what()
            ),
        }
    }

    // the result of `work`, which sums arrays of so many bytes over the group
    pub(super) fn sum<T>(
        &mut self,
        (bytes, update): (usize, usize),
        owner: &mut dyn Owner,
        work: impl FnOnce(&Group, bool) -> MlxResult<T>,
    ) -> Result<T> {
        let started = Instant::now();
        self.bytes += bytes;
        let mut work = Some(work);
        let mut sums = Err(Exception::custom("nothing was summed"));
        owner.unlocked(&mut || {
            if let Some(work) = work.take() {
                sums = work(&self.group, self.crowded);
            }
        });
        self.end_exchange(started);
        sums.map_err(|error| self.lost(update, &error))
    }

    pub(super) fn layout_hash(&mut self, layout: &Rc<Layout>) -> f32 {
        match &self.layout {
            Some((known, hash)) if Rc::ptr_eq(known, layout) => *hash,
            _ => {
                let hash = hash(format!("{layout:?}"));
                self.layout = Some((layout.clone(), hash));
                hash
            }
        }
    }
}

/// A number of a row that is the same on all ranks, and the words for those that have another than rank 0.
type Alike = (fn(&Row) -> f32, fn(&[Row], &[usize]) -> String);

const ALIKE: [Alike; 5] = [
    (
        |row| row.kind,
        |rows, others| {
            let [first, other] = [&rows[0], &rows[others[0]]].map(|row| {
                let at = KINDS
                    .iter()
                    .zip(0_u8..)
                    .find(|(_, at)| row.kind.to_bits() == f32::from(*at).to_bits());
                at.map_or("another place", |(kind, _)| *kind)
            });
            format!("rank 0 is at {first}, {} at {other}", named(others))
        },
    ),
    (
        |row| row.update,
        |rows, others| {
            let mut what = format!(
                "the ranks are at different updates: rank 0 at {}",
                rows[0].update
            );
            for &rank in others {
                let _ = write!(what, ", rank {rank} at {}", rows[rank].update); // into a String
            }
            what + ". Load the same checkpoint on all of them"
        },
    ),
    (
        |row| row.layout,
        |_, others| {
            format!(
                "{} trains other parameters than rank 0: their shapes and dtypes, and which are frozen, are to be the same on all ranks",
                named(others)
            )
        },
    ),
    (
        |row| row.options,
        |_, others| {
            format!(
                "{} has other options than rank 0: max_grad_norm, max_grad_value, nonfinite, max_loss, compute_dtype and ema_decay are \
                 to be the same on all ranks",
                named(others)
            )
        },
    ),
    (
        |row| row.work,
        |_, others| {
            format!(
                "{} would exchange other arrays than rank 0: on ranks that share a model the same loss is computed, of batches of one \
                 shape, and all of them compile it, or none",
                named(others)
            )
        },
    ),
];

// the error of ranks that do not agree, the same on all of those that have not failed
fn agree(rows: &[Row], update: usize) -> Result<()> {
    let those = |is: &dyn Fn(&Row) -> bool| -> Vec<usize> {
        let rows = rows.iter().enumerate();
        let found = rows.filter(|(_, row)| is(row));
        found.map(|(rank, _)| rank).collect()
    };
    let failed = those(&|row| row.failed > 0.0);
    let (ranks, what) = if failed.is_empty() {
        let differ =
            |of: fn(&Row) -> f32| those(&|row| of(row).to_bits() != of(&rows[0]).to_bits());
        let mut others = ALIKE.iter().map(|(of, words)| (differ(*of), words));
        let Some((others, words)) = others.find(|(others, _)| !others.is_empty()) else {
            return Ok(());
        };
        let what = words(rows, &others);
        (others, what)
    } else {
        let what = format!("{} failed, whose own error says why", named(&failed));
        (failed, what)
    };
    Err(Error::Ranks {
        ranks,
        message: format!(
            "update {update}: {what}. Nothing was updated on any rank, and what was in the window is gone"
        ),
    })
}

fn named(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", names.join(", "))
}
