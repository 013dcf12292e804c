//! OpenBLAS for a Rust program: found beside the libmlx that the program runs with, and bound by [`blas::bind`].
//!
//! [`Step::new`](crate::Step::new) does it by itself, once for each process; [`bind`] returns what was bound. The
//! library is that of the Python package `scipy-openblas32`, which is looked for in the environment that libmlx comes
//! from. In the environment variable `FASTSTEP_BLAS`, an absolute path is the library to take, and 0 leaves MLX as it
//! is.
use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use super::blas::{self, BlasError, Bound};

static BOUND: OnceLock<Option<Bound>> = OnceLock::new();

/// Find OpenBLAS and bind MLX's linear algebra on the CPU to it; `None` where there is none to be found, or none is wanted.
///
/// # Errors
/// As [`blas::bind`].
pub fn bind() -> Result<Option<Bound>, BlasError> {
    find().map(|library| blas::bind(&library)).transpose()
}

/// The path of OpenBLAS; `None` if it is missing or disabled.
#[must_use]
pub fn find() -> Option<PathBuf> {
    match env::var_os("FASTSTEP_BLAS") {
        Some(value) if value == "0" => None,
        Some(value) if Path::new(&value).is_absolute() => Some(value.into()),
        _ => beside(&libmlx()?),
    }
}

/// Bind it, whatever comes of it.
pub(crate) fn bind_once() {
    BOUND.get_or_init(|| bind().ok().flatten());
}

/// Return whether `bind_once` has bound anything.
pub(crate) fn is_bound() -> bool {
    let bound = BOUND.get().and_then(Option::as_ref);
    bound.is_some_and(|bound| !bound.names.is_empty())
}

// the path of the libmlx loaded in this process
fn libmlx() -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]));
    paths
        .map(Path::new)
        .find(|path| path.ends_with("libmlx.so"))
        .map(Path::to_owned)
}

// site-packages/mlx/lib/libmlx.so and site-packages/scipy_openblas32/lib/libscipy_openblas….so
fn beside(libmlx: &Path) -> Option<PathBuf> {
    let packages = libmlx.ancestors().nth(3)?;
    let files = fs::read_dir(packages.join("scipy_openblas32/lib")).ok()?;
    let files = files.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<PathBuf> = files.filter(|path| is_openblas(path)).collect();
    files.sort();
    files.into_iter().next()
}

fn is_openblas(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy());
    name.is_some_and(|name| name.starts_with("libscipy_openblas") && name.ends_with(".so"))
}
