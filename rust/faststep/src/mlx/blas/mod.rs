//! MLX's linear algebra on the CPU, through OpenBLAS.
//!
//! The CPU wheel of MLX is linked with the reference BLAS and LAPACK, which take some fifty times as long as OpenBLAS
//! for a matrix product. [`bind`] loads an OpenBLAS whose functions carry the prefix `scipy_` (the wheel
//! `scipy-openblas32` of PyPI) and writes their addresses into libmlx's table of imported functions.
//!
//! # Guarantee
//! Every function that libmlx imports, and that the library has under the same name after the prefix, is that of the
//! library from then on: whichever was loaded first, and whether or not libmlx has called it before. Nothing but
//! libmlx is touched: NumPy keeps its BLAS (`mlx/rebind.rs`).
//!
//! # Rationale
//! Symbols are looked up by name, and an OpenBLAS that took the plain names would take them for the whole process;
//! `LD_PRELOAD` has to be there before the process starts. Nothing is listed by hand, so the next MLX may import more.
//!
//! # Limits
//! Linux with glibc on x86-64 and AArch64; elsewhere [`bind`] does nothing (on macOS MLX uses Accelerate). The integers
//! of that OpenBLAS must be 32 bits wide, as MLX passes them. It lasts as long as the process; there is no way back.
//!
//! # Threads
//! Binding is safe while other threads compute: see `mlx/rebind.rs`. OpenBLAS computes by one thread from then
//! on, for whoever else has loaded this file of it too, and large matrix products are shared by as many threads as it
//! would have taken: one for each processor that the process may use, or what `OPENBLAS_NUM_THREADS` or
//! `OMP_NUM_THREADS` said when it was loaded, at most 16 (`blas/gemm.rs`). They run the tasks of a captured step, too, that need not
//! wait for each other (`blas/units.rs`), and sleep while there is nothing of either.
#![allow(unsafe_code)]

#[cfg(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod few_rows;
#[cfg(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod gemm;
#[cfg_attr(not(target_os = "linux"), allow(dead_code))] // there are no helpers
mod share;
mod units;

use std::path::{Path, PathBuf};

use crate::mlx::rebind::RebindError;

pub(crate) use imp::{bound, of_mlx, share, team, Sgemm};
pub(crate) use units::Units;

/// The result of [`bind`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bound {
    /// The functions that libmlx now takes from the library, sorted: `cblas_sgemm`, `ssyevd_`, …
    pub names: Vec<String>,
}

/// Reason why [`bind`] failed.
#[derive(Debug, thiserror::Error)]
pub enum BlasError {
    /// The dynamic linker refuses the library.
    #[error("cannot load OpenBLAS from {}: {reason}", library.display())]
    Load {
        /// The file that was to be loaded.
        library: PathBuf,
        /// The dynamic linker's message.
        reason: String,
    },
    /// The library has other names than `scipy_…`.
    #[error("{} has no function scipy_cblas_sgemm: expected the library of scipy-openblas32", .0.display())]
    Foreign(PathBuf),
    /// The functions of libmlx cannot be replaced.
    #[error(transparent)]
    Rebind(#[from] RebindError),
}

/// Points the BLAS and LAPACK functions that the loaded libmlx imports at those of `library`.
///
/// A second call with the same library changes nothing and returns the same names.
///
/// # Errors
/// When the library cannot be loaded or is none of `scipy-openblas32`, and when libmlx is not loaded or its table
/// cannot be written.
pub fn bind(library: &Path) -> Result<Bound, BlasError> {
    let names = imp::bind(library)?;
    Ok(Bound { names })
}

#[cfg(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod imp {
    use super::{gemm, BlasError};
    use crate::mlx::rebind::{Function, Imports};
    use std::{
        ffi::{CStr, CString},
        os::unix::ffi::OsStrExt,
        path::Path,
    };

    pub use super::gemm::{bound, of_mlx, share, team, Sgemm};

    pub fn bind(path: &Path) -> Result<Vec<String>, BlasError> {
        let library = Library::open(path)?;
        if library.function(c"cblas_sgemm").is_none() {
            return Err(BlasError::Foreign(path.to_owned()));
        }
        let imports = Imports::of_mlx()?;
        library.take_threads();
        let function = |name: &CStr| {
            let function = library.function(name)?;
            Some(gemm::replace(name.to_bytes(), function))
        };
        Ok(imports.replace(function)?)
    }

    /// A library that stays loaded: libmlx is about to hold addresses of its functions.
    struct Library(Function);

    impl Library {
        fn open(path: &Path) -> Result<Self, BlasError> {
            let refuse = |reason: String| BlasError::Load {
                library: path.to_owned(),
                reason,
            };
            let name = CString::new(path.as_os_str().as_bytes())
                .map_err(|error| refuse(error.to_string()))?;
            // SAFETY: `name` ends with a NUL; the initialisers of a BLAS library have no conditions of their own.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            Function::new(handle)
                .map(Self)
                .ok_or_else(|| refuse(last_error()))
        }

        fn take_threads(&self) {
            let [get, set] = [c"openblas_get_num_threads", c"openblas_set_num_threads"]
                .map(|name| self.function(name));
            if let Some((get, set)) = get.zip(set) {
                gemm::take_threads(get, set);
            }
        }

        /// The address of `scipy_<name>`.
        fn function(&self, name: &CStr) -> Option<Function> {
            let name = CString::new([b"scipy_", name.to_bytes()].concat()).ok()?;
            // SAFETY: the handle is that of an open library and `name` ends with a NUL.
            Function::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
        }
    }

    fn last_error() -> String {
        // SAFETY: dlerror returns null or a string of this thread that lives until the next call of its family.
        let text = unsafe { libc::dlerror().as_ref().map(|text| CStr::from_ptr(text)) };
        text.map_or_else(
            || "unknown error".to_owned(),
            |text| text.to_string_lossy().into_owned(),
        )
    }
}

#[cfg(not(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
mod imp {
    use super::{
        share::{Chunk, Helpers},
        BlasError,
    };
    use crate::mlx::cblas::Gemm;
    use std::path::Path;

    /// A function that does not exist: nothing is bound to OpenBLAS on this system.
    #[derive(Clone, Copy)]
    pub enum Sgemm {}

    impl Sgemm {
        pub fn for_chunks_of(self, _shape: [usize; 3], _b_turned: bool) -> Self {
            match self {}
        }

        pub unsafe fn call(
            self,
            _transposed: [bool; 2],
            _shape: [usize; 3],
            _a: (*const f32, usize),
            _b: (*const f32, usize),
            _beta: f32,
            _c: (*mut f32, usize),
        ) {
            match self {}
        }
    }

    pub fn bound() -> Option<Sgemm> {
        None
    }

    pub fn of_mlx() -> Option<Gemm<f32, f32>> {
        None
    }

    pub fn share(count: usize, chunk: &Chunk<'_>) {
        (0..count).for_each(chunk);
    }

    pub fn team() -> Option<(&'static Helpers, usize)> {
        None
    }

    /// MLX brings the platform's own fast BLAS, or a table in a format unknown here.
    #[allow(clippy::unnecessary_wraps)] // the signature of the other platform
    pub fn bind(_library: &Path) -> Result<Vec<String>, BlasError> {
        Ok(Vec::new())
    }
}
