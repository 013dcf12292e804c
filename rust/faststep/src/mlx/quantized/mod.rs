//! Products with quantized weights on a CPU: weights in float32 again, a piece at a time, and OpenBLAS.
//!
//! MLX's CPU multiplies packed weights number by number, some thirty times slower than OpenBLAS multiplies float32. In a
//! step's trace `quantized_matmul` and `gather_qmm` are replaced, the gradient's too; the C++ in `native/cpu/quantized.cpp`
//! finds them and evaluates what takes their place, by what is here.
//!
//! # Guarantee
//! The weights are those that MLX computes with in float32. Products are summed in float32 and rounded to the dtype of
//! the activations once at the end, where MLX rounds each sum to float16 or bfloat16. Memory for weights in float32 is
//! that of some columns of one matrix, about 20 MiB. Only what a step traces is replaced, on a CPU whose products are
//! OpenBLAS's; all else is MLX's own, and with `FASTSTEP_QUANTIZED=0` in the environment everything is.
#![allow(unsafe_code)]

mod element;
mod product;
mod unpack;

use std::{env, ffi::c_int, slice};

use half::{bf16, f16};
use mlx_rs::{error::Result, Array};

use crate::mlx::{
    blas,
    ffi::{check, faststep_dequantize, handle, handles, QuantizedProduct},
};
use element::Element;
use product::{Pieces, Product};
use unpack::{Format, Mode, Packed};

/// Let what `outputs` are computed from multiply by weights in float32 where it multiplies quantized ones, if `inputs` are
/// tracers of a compilation.
///
/// # Errors
/// When there is no memory for the graph.
pub(crate) fn rewrite(inputs: &[Array], outputs: &[Array]) -> Result<()> {
    let wanted = env::var_os("FASTSTEP_QUANTIZED").is_none_or(|value| value != "0");
    let (Some(input), Some(_), true) = (inputs.first(), blas::bound(), wanted) else {
        return Ok(());
    };
    let (input, handles) = (handle(input), handles(outputs));
    // SAFETY: live arrays, which this thread traces, and their number; the functions are never unloaded.
    check(unsafe { faststep_dequantize(input, handles.as_ptr(), handles.len(), scratch, run) })
}

/// The scratch size of a product in float32 numbers; 0: it is left to MLX.
extern "C" fn scratch(call: *const QuantizedProduct) -> usize {
    // SAFETY: native/cpu/quantized.cpp passes a call without pointers.
    let call = unsafe { &*call };
    if call.format().is_none() || !call.is_worth_it() {
        return 0;
    }
    call.pieces().scratch(call.is_direct())
}

/// Multiply. Nonzero: not done.
extern "C" fn run(call: *const QuantizedProduct) -> c_int {
    // SAFETY: native/cpu/quantized.cpp passes a call with all that belongs to it.
    let call = unsafe { &*call };
    let done = match call.dtype {
        0 => call.run::<f32>(),
        1 => call.run::<f16>(),
        _ => call.run::<bf16>(),
    };
    c_int::from(done.is_none())
}

impl QuantizedProduct {
    fn format(&self) -> Option<Format> {
        let mode = match self.mode {
            0 => Mode::Affine,
            1..=3 => Mode::Float,
            _ => return None,
        };
        Format::new(mode, self.bits, self.group)
    }

    fn pieces(&self) -> Pieces {
        let rows = self.rows * self.pairs.max(1);
        Pieces::of(rows, self.inner, self.columns)
    }

    /// A single row of float32 is multiplied by packed weights in less time than they take to be unpacked.
    fn is_worth_it(&self) -> bool {
        let matrices = self.weights.min(self.pairs).max(1);
        self.dtype != 0 || self.rows * self.pairs.max(1) >= 2 * matrices
    }

    /// Return whether OpenBLAS can read and write the arrays themselves.
    fn is_direct(&self) -> bool {
        self.dtype == 0 && self.pairs == 0
    }

    fn run<T: Element>(&self) -> Option<()> {
        let format = self.format()?;
        let size = self.weights * self.inner * self.columns;
        let groups = size / self.group;
        // SAFETY: the arrays lie row after row and have so many numbers as these shapes say; nobody else writes to `out`
        // or to `scratch` meanwhile.
        let product = unsafe {
            let scales = match format.mode() {
                Mode::Affine => unpack::Scales::Affine(
                    slice::from_raw_parts(self.scales.cast::<T>(), groups),
                    slice::from_raw_parts(self.biases.cast::<T>(), groups),
                ),
                Mode::Float => {
                    unpack::Scales::Float(slice::from_raw_parts(self.scales.cast(), groups))
                }
            };
            let list = |at| (self.pairs > 0).then(|| slice::from_raw_parts(at, self.pairs));
            Product {
                sgemm: blas::bound()?,
                pieces: self.pieces(),
                direct: self.is_direct(),
                transposed: self.transposed != 0,
                rows: self.rows,
                inner: self.inner,
                columns: self.columns,
                x: slice::from_raw_parts(self.x.cast::<T>(), self.inputs * self.rows * self.inner),
                w: Packed::new(
                    format,
                    slice::from_raw_parts(self.w, size * self.bits / 8),
                    scales,
                ),
                pairs: list(self.left).zip(list(self.right)),
                out: self.out.cast::<T>(),
                scratch: self.scratch,
            }
        };
        product.run();
        Some(())
    }
}
