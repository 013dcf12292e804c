//! A product with packed weights, piece by piece: some columns of the weights in float32, times some rows.
#![allow(unsafe_code)]

use std::{iter, slice};

use super::{element::Element, unpack::Packed};
use crate::mlx::blas::{self, Sgemm};

/// Numbers of float32 that the weights of one piece take, about, and all that one product takes.
const PIECE: usize = 1 << 20;
const SCRATCH: usize = 1 << 22;
/// Columns of a piece are multiples of the largest group.
const EDGE: usize = 128;
/// Number of multiplications from which on pieces are shared with other threads; each brings the unpacking of its weights.
const LEAST_SHARED: usize = 1 << 22;

/// The division of a product, by its shape alone.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    rows: usize, // of a block, which is converted and multiplied as one
    inner: usize,
    columns: usize, // of a piece
    count: usize,   // pieces side by side
    at_once: usize,
}

impl Pieces {
    /// `rows`: the most that are multiplied by one matrix.
    pub fn of(rows: usize, inner: usize, columns: usize) -> Self {
        let most = (PIECE / inner.max(1)).clamp(EDGE, 4 * EDGE) / EDGE * EDGE;
        let rows = rows.min((PIECE / inner.max(1)).max(64));
        let half = (columns / 2).next_multiple_of(EDGE);
        let piece = most.min(half).min(columns).max(1);
        let count = columns.div_ceil(piece);
        let each = piece * (inner + rows);
        Self {
            rows,
            inner,
            columns: piece,
            count,
            at_once: (SCRATCH / each.max(1)).clamp(1, count.max(1)),
        }
    }

    fn weights(&self) -> usize {
        self.columns * self.inner
    }

    fn results(&self, direct: bool) -> usize {
        if direct {
            0
        } else {
            self.columns * self.rows
        }
    }

    /// Numbers of float32; `direct`: activations and results are used where they are.
    pub fn scratch(&self, direct: bool) -> usize {
        let block = if direct { 0 } else { self.rows * self.inner };
        block + self.at_once * (self.weights() + self.results(direct))
    }
}

/// One product: its matrices and how they are computed.
pub struct Product<'a, T> {
    pub sgemm: Sgemm,
    pub pieces: Pieces,
    pub direct: bool,
    pub transposed: bool,
    pub rows: usize,
    pub inner: usize,
    pub columns: usize,
    pub x: &'a [T],
    pub w: Packed<'a, T>,
    pub pairs: Option<(&'a [u32], &'a [u32])>,
    pub out: *mut T,
    pub scratch: *mut f32,
}

// SAFETY: threads write to parts of `out` and `scratch` that no two of them have in common.
unsafe impl<T: Sync> Sync for Product<'_, T> {}

/// The source of a row, and the destination of its product.
type Row = (usize, usize);

impl<T: Element> Product<'_, T> {
    pub fn run(&self) {
        let Some((left, right)) = self.pairs else {
            let rows: Vec<Row> = iter::zip(0..self.rows, 0..self.rows).collect();
            let most = if self.direct {
                self.rows
            } else {
                self.pieces.rows
            };
            rows.chunks(most.max(1))
                .for_each(|rows| self.block(0, rows));
            return;
        };
        // group the pairs by their weights
        let mut order: Vec<usize> = (0..right.len()).collect();
        order.sort_by_key(|&pair| right[pair]);
        for pairs in order.chunk_by(|&a, &b| right[a] == right[b]) {
            let rows = pairs.iter().flat_map(|&pair| {
                let begin = left[pair] as usize * self.rows;
                iter::zip(begin..begin + self.rows, pair * self.rows..)
            });
            let rows: Vec<Row> = rows.collect();
            for rows in rows.chunks(self.pieces.rows.max(1)) {
                self.block(right[pairs[0]] as usize, rows);
            }
        }
    }

    /// Rows times one matrix of the weights.
    fn block(&self, matrix: usize, rows: &[Row]) {
        let widened = rows.len() * self.inner;
        let x = if self.direct {
            self.x.as_ptr().cast::<f32>()
        } else {
            // SAFETY: the scratch begins with room for a block, which no thread uses meanwhile.
            let to = unsafe { slice::from_raw_parts_mut(self.scratch, widened) };
            for (row, to) in rows.iter().zip(to.chunks_exact_mut(self.inner)) {
                T::widen(&self.x[row.0 * self.inner..][..self.inner], to);
            }
            self.scratch.cast_const()
        };
        let block = Block { matrix, rows, x };
        let pieces = &self.pieces;
        let shared = rows.len() * self.inner * self.columns >= LEAST_SHARED;
        for first in (0..pieces.count).step_by(pieces.at_once) {
            let count = pieces.at_once.min(pieces.count - first);
            let piece = |at: usize| self.piece(&block, first + at, at);
            if shared && count > 1 {
                blas::share(count, &piece);
            } else {
                (0..count).for_each(piece);
            }
        }
    }

    /// Rows times some columns, with the scratch that has the number `slot`.
    fn piece(&self, block: &Block, at: usize, slot: usize) {
        let pieces = &self.pieces;
        let begin = at * pieces.columns;
        let columns = pieces.columns.min(self.columns - begin);
        let (weights, results) = (pieces.weights(), pieces.results(self.direct));
        let skipped = if self.direct {
            0
        } else {
            pieces.rows * self.inner
        };
        // SAFETY: `Pieces::scratch` has counted room for a block and so many slots, each of which one thread uses.
        let (wide, narrow) = unsafe {
            let slot = self.scratch.add(skipped + slot * (weights + results));
            (
                slice::from_raw_parts_mut(slot, columns * self.inner),
                slot.add(weights),
            )
        };
        self.unpack(block.matrix, begin, columns, wide);
        let (c, ldc) = if self.direct {
            // SAFETY: `out` has that many columns; this thread alone writes to these.
            (unsafe { self.out.cast::<f32>().add(begin) }, self.columns)
        } else {
            (narrow, columns)
        };
        let ldb = if self.transposed { self.inner } else { columns };
        // SAFETY: `x` has the block's rows, `wide` these columns of the weights, and `c` room for the product.
        unsafe {
            self.sgemm.call(
                [false, self.transposed],
                [block.rows.len(), columns, self.inner],
                (block.x, self.inner),
                (wide.as_ptr(), ldb),
                0.0,
                (c, ldc),
            );
        }
        if !self.direct {
            // SAFETY: the product has filled it in.
            let narrow = unsafe { slice::from_raw_parts(narrow, block.rows.len() * columns) };
            for (from, row) in narrow.chunks_exact(columns).zip(block.rows) {
                // SAFETY: these columns of that row of `out`, to which this thread alone writes.
                let to = unsafe {
                    slice::from_raw_parts_mut(self.out.add(row.1 * self.columns + begin), columns)
                };
                T::narrow(from, to);
            }
        }
    }

    fn unpack(&self, matrix: usize, begin: usize, columns: usize, out: &mut [f32]) {
        let matrix = matrix * self.inner * self.columns;
        if self.transposed {
            self.w.unpack(matrix + begin * self.inner, out);
            return;
        }
        for (row, out) in out.chunks_exact_mut(columns).enumerate() {
            self.w.unpack(matrix + row * self.columns + begin, out);
        }
    }
}

/// Rows in float32.
struct Block<'a> {
    matrix: usize,
    rows: &'a [Row],
    x: *const f32,
}

// SAFETY: read only.
unsafe impl Sync for Block<'_> {}
