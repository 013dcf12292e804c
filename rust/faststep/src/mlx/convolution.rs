//! Convolutions of images on a CPU: some patches at a time are written out, and multiplied by OpenBLAS.
//!
//! The C++ in `native/cpu/convolution.cpp` finds them in a step's trace, and evaluates them by what is here.
//!
//! # Guarantee
//! The numbers depend on the shapes alone, not on how many threads there are. A gradient of weights is a sum over patches
//! in another order than MLX's. It takes memory for some patches of each thread, and for [`PARTS`] sums.
//!
//! # Threads
//! Blocks of patches are shared as large products are (`blas/share.rs`).
#![allow(unsafe_code)]

use std::{cell::RefCell, ops::Range, slice};

use crate::mlx::{
    blas::{self, Sgemm},
    ffi::Convolution,
};

/// Numbers of patches that are multiplied at once: they stay in a core's second cache.
const NUMBERS: usize = 1 << 16;
/// A block has a multiple of so many patches, which the kernels of OpenBLAS take whole, and four times as many at least.
const EDGE: usize = 48;
/// The sums of a gradient that are computed at the same time.
const PARTS: usize = 8;

thread_local! {
    static ROOM: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// The function that native/cpu/convolution.cpp calls for a convolution; `None` without OpenBLAS.
pub(crate) fn function() -> Option<extern "C" fn(*const Convolution)> {
    blas::bound().map(|_| run as extern "C" fn(*const Convolution))
}

extern "C" fn run(call: *const Convolution) {
    // SAFETY: native/cpu/convolution.cpp passes a call with arrays that lie row after row and have its shapes.
    let call = unsafe { &*call };
    match blas::bound() {
        Some(sgemm) if call.is_gradient != 0 => call.gradient(sgemm),
        Some(sgemm) => call.forward(sgemm),
        None => {} // `function` has been there
    }
}

// SAFETY: threads read `x` and `other`, and write to parts of `out` that no two of them have in common.
unsafe impl Sync for Convolution {}

impl Convolution {
    fn rows(&self) -> usize {
        self.images * self.patches[0] * self.patches[1]
    }

    fn length(&self) -> usize {
        self.kernel[0] * self.kernel[1] * self.channels
    }

    fn block(&self) -> usize {
        (NUMBERS / self.length() / EDGE).max(4) * EDGE
    }

    fn blocks(&self) -> usize {
        self.rows().div_ceil(self.block())
    }

    fn range(&self, at: usize) -> Range<usize> {
        at * self.block()..((at + 1) * self.block()).min(self.rows())
    }

    fn forward(&self, sgemm: Sgemm) {
        let (length, outputs) = (self.length(), self.outputs);
        let sgemm = sgemm.for_chunks_of([self.rows(), outputs, length], true);
        blas::share(self.blocks(), &|at| {
            let range = self.range(at);
            self.with_patches(range.clone(), |patches| {
                // SAFETY: `out` has that many rows, and this block is no other thread's.
                unsafe {
                    sgemm.call(
                        [false, true],
                        [range.len(), outputs, length],
                        (patches.as_ptr(), length),
                        (self.other, length),
                        0.0,
                        (self.out.add(range.start * outputs), outputs),
                    );
                }
            });
        });
    }

    fn gradient(&self, sgemm: Sgemm) {
        let (length, outputs) = (self.length(), self.outputs);
        let (size, parts) = (outputs * length, PARTS.min(self.blocks()));
        let sgemm = sgemm.for_chunks_of([outputs, length, self.rows()], false);
        let mut sums = vec![0.0_f32; size * parts];
        let places = Places(sums.as_mut_ptr());
        blas::share(parts, &|part| {
            let sum = places.at(part * size);
            for at in self.blocks() * part / parts..self.blocks() * (part + 1) / parts {
                let range = self.range(at);
                self.with_patches(range.clone(), |patches| {
                    // SAFETY: `other` has that many rows, and this sum is no other thread's.
                    unsafe {
                        sgemm.call(
                            [true, false],
                            [outputs, length, range.len()],
                            (self.other.add(range.start * outputs), outputs),
                            (patches.as_ptr(), length),
                            1.0,
                            (sum, length),
                        );
                    }
                });
            }
        });
        // SAFETY: `out` is this call's alone.
        let out = unsafe { slice::from_raw_parts_mut(self.out, size) };
        out.copy_from_slice(&sums[..size]);
        for sum in sums.chunks_exact(size).skip(1) {
            out.iter_mut().zip(sum).for_each(|(out, term)| *out += term);
        }
    }

    /// Call a function with these patches, one after the other.
    fn with_patches(&self, range: Range<usize>, function: impl FnOnce(&[f32])) {
        ROOM.with_borrow_mut(|room| {
            let size = range.len() * self.length();
            if room.len() < size {
                room.resize(size, 0.0);
            }
            self.write(range, &mut room[..size]);
            function(&room[..size]);
        });
    }

    fn write(&self, range: Range<usize>, patches: &mut [f32]) {
        let image = self.size[0] * self.size[1] * self.channels;
        let [_, across] = self.patches;
        let each = self.patches[0] * across;
        for (at, patch) in range.zip(patches.chunks_exact_mut(self.length())) {
            // SAFETY: `x` has so many images.
            let pixels = unsafe { slice::from_raw_parts(self.x.add(at / each * image), image) };
            let first = [
                at % each / across * self.stride[0],
                at % across * self.stride[1],
            ];
            let lines = patch.chunks_exact_mut(self.kernel[1] * self.channels);
            for (line, to) in lines.enumerate() {
                match self.place(first[0] + line, 0) {
                    Some(y) => {
                        let row = self.size[1] * self.channels;
                        self.write_line(&pixels[y * row..(y + 1) * row], first[1], to);
                    }
                    None => to.fill(0.0),
                }
            }
        }
    }

    /// Write a patch's pixels of one row of an image, from one of the padded and dilated row on.
    fn write_line(&self, row: &[f32], first: usize, to: &mut [f32]) {
        let channels = self.channels;
        if self.dilation[1] > 1 {
            for (at, pixel) in to.chunks_exact_mut(channels).enumerate() {
                match self.place(first + at, 1) {
                    Some(x) => pixel.copy_from_slice(&row[x * channels..(x + 1) * channels]),
                    None => pixel.fill(0.0),
                }
            }
            return;
        }
        let (width, before) = (self.size[1], self.padding[1]);
        let begin = before.saturating_sub(first).min(self.kernel[1]);
        let end = (before + width).saturating_sub(first);
        let end = end.clamp(begin, self.kernel[1]);
        to[..begin * channels].fill(0.0);
        to[end * channels..].fill(0.0);
        if begin < end {
            let from = (first + begin - before) * channels;
            let count = (end - begin) * channels;
            to[begin * channels..end * channels].copy_from_slice(&row[from..from + count]);
        }
    }

    /// The index in the image of an index in the padded and dilated image; `None` in the padding or between pixels.
    fn place(&self, at: usize, axis: usize) -> Option<usize> {
        let at = at.checked_sub(self.padding[axis])?;
        let is_there = at % self.dilation[axis] == 0 && at / self.dilation[axis] < self.size[axis];
        is_there.then(|| at / self.dilation[axis])
    }
}

/// Sums that threads write to, each to its own.
struct Places(*mut f32);

// SAFETY: as its users say.
unsafe impl Sync for Places {}

impl Places {
    fn at(&self, offset: usize) -> *mut f32 {
        // SAFETY: an offset within the sums.
        unsafe { self.0.add(offset) }
    }
}
