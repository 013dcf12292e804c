//! Products of few rows: one step of a sequence, a small batch.
//!
//! OpenBLAS copies all of the right side before it multiplies. For few rows that takes as long as the product;
//! `native/cpu/few_rows.cpp` multiplies what it copies at once.
//!
//! # Guarantee
//! The bits of OpenBLAS: a few products are compared when the first one is wanted. Where a bit differs, or the processor has no
//! AVX-512, all products are OpenBLAS's.
#![allow(clippy::many_single_char_names)] // those of BLAS

use std::sync::OnceLock;

use crate::mlx::{
    cblas::{Gemm, BY_ROWS, PLAIN, TRANSPOSED},
    ffi::{faststep_few_rows, MatrixProduct},
};

/// The most rows: of 128, whose numbers are read again for each 32 columns, OpenBLAS makes better use of the caches.
const MOST_ROWS: usize = 64;
/// The least columns: so many are multiplied at once.
const LEAST_COLUMNS: usize = 32;
/// The most multiplications of a product that OpenBLAS computes without a copy, by another kernel.
const SMALL: usize = 1_000_000;

/// Products that are compared: rows, columns, terms.
const COMPARED: [[usize; 3]; 3] = [[9, 110, 1030], [17, 70, 900], [3, 700, 500]];

/// Compute a product; false, and nothing is done, where it is left to OpenBLAS.
///
/// # Safety
/// As for [`MatrixProduct`]; `function` is OpenBLAS's product.
pub unsafe fn multiply(product: &MatrixProduct, function: Gemm<f32, f32>) -> bool {
    // SAFETY: as the caller says.
    fits(product) && are_equal(function) && unsafe { faststep_few_rows(product) }
}

fn fits(product: &MatrixProduct) -> bool {
    let MatrixProduct { m, n, k, .. } = *product;
    (2..=MOST_ROWS).contains(&m) && n >= LEAST_COLUMNS && m * n * k > SMALL
}

fn are_equal(function: Gemm<f32, f32>) -> bool {
    static ARE_EQUAL: OnceLock<bool> = OnceLock::new();
    *ARE_EQUAL.get_or_init(|| {
        let ways = [false, true].map(|turned| [false, true].map(|adds| (turned, adds)));
        let mut ways = ways.into_iter().flatten();
        ways.all(|(turned, adds)| {
            let mut shapes = COMPARED.into_iter();
            shapes.all(|shape| is_equal(shape, turned, adds, function))
        })
    })
}

fn is_equal([m, n, k]: [usize; 3], turned: bool, adds: bool, function: Gemm<f32, f32>) -> bool {
    let (a, b, c) = (numbers(m * k), numbers(k * n), numbers(m * n));
    let (mut ours, mut theirs) = (c.clone(), c);
    let ldb = if turned { k } else { n };
    let product = MatrixProduct {
        m,
        n,
        k,
        a: a.as_ptr(),
        lda: k,
        a_turned: 0,
        b: b.as_ptr(),
        ldb,
        b_turned: usize::from(turned),
        c: ours.as_mut_ptr(),
        ldc: n,
        adds: usize::from(adds),
    };
    // SAFETY: the matrices have that many numbers.
    if !unsafe { faststep_few_rows(&raw const product) } {
        return false;
    }
    let [m, n, k, ldb] = [m, n, k, ldb].map(|size| i32::try_from(size).unwrap_or(0));
    let transposed = if turned { TRANSPOSED[0] } else { PLAIN };
    let (beta, to) = (f32::from(u8::from(adds)), theirs.as_mut_ptr());
    let (a, b) = (a.as_ptr(), b.as_ptr());
    function(
        BY_ROWS, PLAIN, transposed, m, n, k, 1.0, a, k, b, ldb, beta, to, n,
    );
    ours.iter()
        .map(|x| x.to_bits())
        .eq(theirs.iter().map(|x| x.to_bits()))
}

/// Numbers from -1 to 1, equal each time.
fn numbers(count: usize) -> Vec<f32> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from((state >> 16) as u16) / 32768.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}
