//! The signature of CBLAS's matrix products, and the numbers of its enumerations.
#![cfg_attr(not(target_os = "linux"), allow(dead_code))] // the platform's own BLAS is MLX's

use std::ffi::c_int;

/// Matrices row after row.
pub const BY_ROWS: c_int = 101;
/// Matrices column after column.
pub const BY_COLUMNS: c_int = 102;
/// A factor as it is.
pub const PLAIN: c_int = 111;
/// A transposed factor, and a transposed and conjugated one.
pub const TRANSPOSED: [c_int; 2] = [112, 113];

/// `cblas_?gemm`.
pub type Gemm<E, S> = extern "C" fn(
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    S,
    *const E,
    c_int,
    *const E,
    c_int,
    S,
    *mut E,
    c_int,
);
