//! MLX's fused kernels on the CPU, compiled for the processor that runs them.
//!
//! MLX writes each kernel that `compile` fuses as C++, and has `g++ -O3` make a library of it when it is first needed:
//! on x86-64 with the vectors of 2003, function calls for `exp` and for each fused multiply-add, and loops that stay
//! scalar where a kernel takes a square root, has more than a few arrays, as every optimizer's has, or writes over one
//! of its inputs, or converts a bool. [`bind`] adds [`FLAGS`], and changes the source (`source.rs`).
//!
//! # Guarantee
//! The same bits as before, and as the uncompiled operations: no flag lets the compiler reorder, contract or approximate
//! arithmetic. Nothing outside this process changes: MLX's own libraries, below the temporary directory, are neither
//! used nor written, and other callers of `popen` keep theirs (`mlx/rebind.rs`). Where the compiler refuses
//! the flags, or fails with them, MLX's own command runs. Nothing is loaded that somebody else may have written.
//!
//! # Rationale
//! MLX keeps its libraries in one directory for all users and flags, and takes what it finds there by the kernel's name:
//! ours need a place of their own, whose name has all else that they depend on, so that machines which share a home
//! never load each other's. MLX compiles under a passing name and renames: processes may want the same kernel at once.
//! MLX loads what it finds, and a library that is cut off or full of zeros ends the process: ours are sealed before they
//! get their name (`seal.rs`), and what is broken is deleted before MLX looks for it (`store.rs`). The header of all
//! kernels is precompiled for a process that compiles several (`header.rs`): 0.12 s of the compiler's time in place of 0.4.
//!
//! # Limits
//! Linux with glibc on x86-64, where it has been measured; elsewhere [`bind`] does nothing. In an MLX with CUDA the kernels
//! are others (`cuda.rs`), and those of its CPU are left alone. What C++ leaves undefined, an infinity or NaN as an integer,
//! may come out as another number. It lasts as long as the process; libraries already loaded stay.
//!
//! # Threads
//! MLX compiles one kernel at a time, under a lock of its own; both functions may be called from any thread.
#![allow(unsafe_code)]

mod ahead;
mod command;
mod compile;
mod compiler;
mod cuda;
mod header;
mod later;
mod no_compiler;
mod nvrtc;
mod seal;
mod source;
mod store;

use libc::{c_char, c_ulong, FILE};
use std::{
    env,
    ffi::{c_void, CStr, CString, OsString},
    mem::MaybeUninit,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
    ptr,
    sync::{
        atomic::{AtomicUsize, Ordering},
        OnceLock,
    },
};

use crate::mlx::{
    ffi::faststep_temp_directory_path,
    rebind::{Function, Imports, RebindError},
};
use command::Command;

/// The flags added to MLX's own, for GCC.
///
/// - `-march=native`: the processor's instructions; but not AVX-512, which converts negative numbers to unsigned ones,
///   which C++ leaves undefined, to others than all the rest of MLX does.
/// - `-ffp-contract=off`: a product and a sum stay two roundings, as they are when MLX runs them one by one.
/// - `-fno-math-errno`, `-fno-trapping-math`: nobody reads `errno` or the flags of floating-point exceptions; without
///   them a square root is an instruction, and both sides of a choice may be computed.
/// - `max-inline-insns-auto`: MLX's `exp`, `sin`, `erf` become part of the loop, whatever their length.
/// - `vect-max-version-for-alias-checks`: vectors for loops over many arrays too, which GCC has to see apart at run
///   time; by itself it checks ten pairs.
pub const FLAGS: &str =
    "-march=native -mno-avx512f -ffp-contract=off -fno-math-errno -fno-trapping-math \
     --param max-inline-insns-auto=1000 --param vect-max-version-for-alias-checks=100";

const POPEN: &CStr = c"popen";
const SYSTEM: &CStr = c"system";
const TEMP_DIRECTORY_PATH: &CStr = c"_ZNSt10filesystem19temp_directory_pathB5cxx11Ev";

/// Has MLX's CPU kernels compiled with [`FLAGS`] from now on, and those of an MLX with CUDA several at a time and once for
/// this user; whether it does so here.
///
/// They are kept in `mlx-faststep` below `XDG_CACHE_HOME` or `~/.cache`; where that cannot be, in `mlx-faststep-` and the
/// user's number below the temporary directory; and where that cannot be either, in a directory there that is this
/// process's alone. The first two may be deleted while no process uses them.
///
/// # Errors
/// When libmlx is not loaded or its table of functions cannot be written.
pub fn bind() -> Result<bool, RebindError> {
    let imports = Imports::of_mlx()?;
    if has_cuda() {
        return cuda::bind(&imports);
    }
    let known = imports.have(POPEN) && imports.have(TEMP_DIRECTORY_PATH);
    if !known || !cfg!(target_arch = "x86_64") {
        return Ok(false);
    }
    store::locate();
    // SAFETY: `find` keeps to what native/cpu/kernels.cpp asks of it and is never unloaded.
    let temp_directory_path = Function::new(unsafe { faststep_temp_directory_path(find) });
    let popen = Function::new(popen as *mut c_void);
    let system = no_compiler::answer(later::begin());
    imports.replace(|name| match name {
        name if name == POPEN => popen,
        name if name == SYSTEM => system,
        name if name == TEMP_DIRECTORY_PATH => temp_directory_path,
        _ => None,
    })?;
    Ok(true)
}

pub(crate) use cuda::ask;
pub use no_compiler::{are_fused, are_in_blocks, need_compiler};

/// Return the number of kernels that this process has compiled, or begun to.
#[must_use]
pub fn compiled() -> usize {
    COMPILED.load(Ordering::Relaxed)
}

static COMPILED: AtomicUsize = AtomicUsize::new(0);

/// Return whether MLX's kernels may be replaced: unless `FASTSTEP_KERNELS` is 0 in the environment.
pub(crate) fn wanted() -> bool {
    env::var_os("FASTSTEP_KERNELS").is_none_or(|value| value != "0")
}

/// Bind for a Rust program, once for each process, where kernels are wanted; where that fails, MLX stays as it is.
pub(crate) fn bind_once() {
    static BOUND: OnceLock<bool> = OnceLock::new();
    BOUND.get_or_init(|| wanted() && bind().unwrap_or(false));
}

/// Replacement of libmlx's `popen`, by which it runs the compiler and nothing else.
unsafe extern "C" fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE {
    // SAFETY: popen's caller passes a string that ends with a NUL.
    let text = unsafe { CStr::from_ptr(command) }.to_str();
    let ours = text.ok().and_then(Command::parse);
    if ours.as_ref().is_some_and(later::is_refused) {
        return ptr::null_mut();
    }
    COMPILED.fetch_add(usize::from(ours.is_some()), Ordering::Relaxed);
    let ours = ours.filter(|it| store::holds(it.source) && store::holds(it.library));
    let done = ours.is_some_and(|it| later::take(&it) || compile::compile(&it).is_ok());
    // `:` is a no-op that succeeds
    let command = if done { c":".as_ptr() } else { command };
    // SAFETY: both are strings that end with a NUL.
    unsafe { libc::popen(command, mode) }
}

/// Finds the store for native/cpu/kernels.cpp.
unsafe extern "C" fn find(path: *mut c_char, size: usize) -> bool {
    let found = if later::looks() {
        store::opened()
    } else {
        store::open()
    };
    let store = found.and_then(|it| CString::new(it.into_os_string().into_vec()).ok());
    let Some(store) = store.filter(|it| it.count_bytes() < size) else {
        return false;
    };
    // SAFETY: `path` has room for `size` bytes, which is enough for these and their NUL.
    unsafe { ptr::copy_nonoverlapping(store.as_ptr(), path, store.count_bytes() + 1) };
    true
}

/// Return whether MLX is built with CUDA, whose kernels it keeps below the temporary directory too.
pub(crate) fn has_cuda() -> bool {
    let mut cuda = false;
    // SAFETY: MLX writes one bool.
    let failed = unsafe { mlx_sys::mlx_cuda_is_available(&raw mut cuda) } != 0;
    cuda || failed
}

/// The number of the user whose files this process makes.
fn user() -> u32 {
    // SAFETY: geteuid has no conditions.
    unsafe { libc::geteuid() }
}

/// MLX's version, as it names its directory of libraries.
fn mlx_version() -> Option<String> {
    // SAFETY: MLX fills the string in, which is read and freed behind that alone.
    unsafe {
        let mut text = mlx_sys::mlx_string_new();
        let failed = mlx_sys::mlx_version(&raw mut text) != 0;
        let data = mlx_sys::mlx_string_data(text);
        let found = (!failed && !data.is_null())
            .then(|| CStr::from_ptr(data).to_string_lossy().into_owned());
        mlx_sys::mlx_string_free(text);
        found
    }
}

/// Makes a directory that only this user may enter, of a name in which `XXXXXX` stands for what is new.
fn make_own(template: CString) -> Option<PathBuf> {
    let template = template.into_raw();
    // SAFETY: mkdtemp writes over the six letters of a string that ends with a NUL, which is ours again behind it.
    let (made, path) = unsafe {
        (
            !libc::mkdtemp(template).is_null(),
            CString::from_raw(template),
        )
    };
    made.then(|| PathBuf::from(OsString::from_vec(path.into_bytes())))
}

/// Has a function called when the process ends by itself.
fn at_exit(function: extern "C" fn()) {
    // SAFETY: the function is never unloaded before: the library holds on to libmlx's table, and is never closed.
    unsafe { libc::atexit(function) };
}

/// Return whether this process may put libraries into a directory, and load them from it.
fn may_hold_libraries(directory: &Path) -> bool {
    const NOEXEC: c_ulong = 8; // ST_NOEXEC of <sys/statvfs.h>
    let Ok(path) = CString::new(directory.as_os_str().as_encoded_bytes()) else {
        return false;
    };
    let mut system = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` ends with a NUL; `system` is read only when statvfs has filled it in.
    is_writable(directory)
        && unsafe {
            libc::statvfs(path.as_ptr(), system.as_mut_ptr()) == 0
                && system.assume_init().f_flag & NOEXEC == 0
        }
}

/// Return whether this process may make files in a directory.
fn is_writable(directory: &Path) -> bool {
    let path = CString::new(directory.as_os_str().as_encoded_bytes());
    // SAFETY: the path ends with a NUL.
    path.is_ok_and(|path| unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) == 0 })
}
