//! Fused kernels on a machine without a compiler: MLX's check for g++ is answered with yes, so that it makes them, and blocks compute them, for
//! the user's own `mx.compile` too (`native/cpu/blocks`).

use std::{
    ffi::{c_void, CStr},
    sync::atomic::{AtomicBool, Ordering},
};

use libc::{c_char, c_int};

use super::{compiler, store};
use crate::mlx::{
    ffi::{faststep_blocks_alone, faststep_fuses},
    rebind::{Function, Imports},
};

/// The command by which MLX asks once for a compiler (`JitCompiler::available` in `mlx/backend/cpu/jit_compiler.cpp`).
const QUESTION: &CStr = c"g++ --version > /dev/null 2>&1";
/// `Compiled::eval_cpu`, whose address lies in the table of that class's virtual functions.
const EVAL_CPU: &CStr = c"_ZN3mlx4core8Compiled8eval_cpuERKSt6vectorINS0_5arrayESaIS3_EERS5_";

static CAN: AtomicBool = AtomicBool::new(false);
static BOUND: AtomicBool = AtomicBool::new(false);

/// The replacement of libmlx's `system`, where blocks can compute kernels.
pub fn answer(can: bool) -> Option<Function> {
    CAN.store(can, Ordering::Relaxed);
    Function::new(system as *mut c_void).filter(|_| can)
}

/// Return whether MLX's fused kernels on a CPU have to be compiled: otherwise blocks compute them where there is no compiler.
#[must_use]
pub fn need_compiler() -> bool {
    !CAN.load(Ordering::Relaxed)
}

/// Return whether MLX fuses operations: not where it has found no compiler by itself, or where that is turned off.
#[must_use]
pub fn are_fused() -> bool {
    // SAFETY: no conditions.
    unsafe { faststep_fuses() }
}

/// Return whether blocks compute all kernels, since none can be compiled.
#[must_use]
pub fn are_in_blocks() -> bool {
    BOUND.load(Ordering::Relaxed)
}

/// Asks for a compiler, and does nothing else, for libmlx.
unsafe extern "C" fn system(command: *const c_char) -> c_int {
    // SAFETY: its caller passes a string that ends with a NUL.
    let asks = unsafe { CStr::from_ptr(command) } == QUESTION;
    let can_compile = || compiler::identity().is_some() && store::open().is_some();
    if asks && (can_compile() || bind()) {
        return 0;
    }
    // SAFETY: the same string.
    unsafe { libc::system(command) }
}

/// Have MLX's fused kernels computed in blocks from now on.
fn bind() -> bool {
    // SAFETY: no conditions.
    let function = Function::new(unsafe { faststep_blocks_alone() });
    let imports = Imports::of_mlx();
    let replaced = imports.and_then(|it| it.replace(|name| function.filter(|_| name == EVAL_CPU)));
    let is_bound = replaced.is_ok_and(|names| !names.is_empty());
    BOUND.store(is_bound, Ordering::Relaxed);
    is_bound
}
