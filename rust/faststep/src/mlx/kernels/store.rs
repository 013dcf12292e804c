//! The directory of compiled kernels, shared with this user's other processes and with later ones.
//!
//! What belongs to somebody else, or can be written by others, is not used: it would run in this process.
use std::{
    env,
    fs::{self, DirBuilder},
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    sync::OnceLock,
};

use super::{compiler, may_hold_libraries, user};

static PLACES: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// Reads from the environment where the store may be: in the user's cache, or else in the temporary directory.
/// <https://specifications.freedesktop.org/basedir-spec/latest/>: relative paths are to be ignored.
pub fn locate() {
    let absolute = |name| {
        let path = env::var_os(name).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    let home = || absolute("HOME").map(|home| home.join(".cache"));
    let cache = absolute("XDG_CACHE_HOME").or_else(home);
    let cache = cache.map(|cache| cache.join("mlx-faststep"));
    let temp = env::temp_dir().join(format!("mlx-faststep-{}", user()));
    PLACES.get_or_init(|| cache.into_iter().chain([temp]).collect());
}

/// The directory for what this compiler makes with our flags for this processor, made where it is missing; `None` when
/// the compiler refuses the flags, or no place can be used.
pub fn open() -> Option<PathBuf> {
    let name = format!("kernels-{:016x}", compiler::identity()?);
    PLACES.get()?.iter().find_map(|place| {
        let store = place.join(&name);
        (make(place) && make(&store) && may_hold_libraries(&store)).then_some(store)
    })
}

/// Whether a file lies in the store.
pub fn holds(path: &Path) -> bool {
    open().is_some_and(|store| path.starts_with(store))
}

// whether the directory exists, belongs to this user and is writable by nobody else
fn make(directory: &Path) -> bool {
    let made = DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory);
    let found = made.and_then(|()| fs::metadata(directory));
    found.is_ok_and(|it| it.uid() == user() && it.mode() & 0o022 == 0)
}
