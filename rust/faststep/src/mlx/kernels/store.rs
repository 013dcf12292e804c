//! The directory of compiled kernels, shared with this user's other processes and with later ones.
//!
//! Files and directories that belong to another user, or that others can write to, are not used, in the store and below
//! it: their code would run in this process. A library that is not whole is deleted and compiled again. Files that a killed
//! compiler left behind are deleted an hour later.
use std::{
    collections::HashMap,
    env,
    ffi::{CString, OsStr},
    fs::{self, DirBuilder, Metadata},
    io,
    os::unix::{
        ffi::OsStringExt,
        fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
    process,
    sync::{Mutex, OnceLock, PoisonError},
    time::Duration,
};

use super::{compiler, is_writable, may_hold_libraries, mlx_version, seal, user};

/// Beginning of a library's name, before its source's number, until MLX gives it another.
pub const AHEAD_OF_MLX: &str = "ahead_";

static PLACES: OnceLock<Vec<PathBuf>> = OnceLock::new();
static OWN: OnceLock<Option<(u32, PathBuf)>> = OnceLock::new();
static OPENED: Mutex<Option<PathBuf>> = Mutex::new(None); // the directory that was found last
static WHOLE: Mutex<Option<Whole>> = Mutex::new(None);

/// Age of a compiler's file from which on it is abandoned.
const ABANDONED: Duration = Duration::from_hours(1);

/// Identity of a file's contents, which changes when it is written: inode, size, time of the change.
type Identity = (u64, u64, i64, i64);

/// Libraries that have been read and are whole, and the directory as it was before that.
#[derive(Default)]
struct Whole {
    libraries: HashMap<PathBuf, Identity>,
    directory: Option<(PathBuf, Identity)>,
}

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

/// The directory for what this compiler makes for this processor, made where it is missing; where no place can be
/// used, one of this process alone, below the temporary directory. `None` when that cannot be made either.
pub fn open() -> Option<PathBuf> {
    let shared = compiler::identity().and_then(|identity| {
        let name = format!("kernels-{identity:016x}");
        PLACES.get()?.iter().find_map(|place| {
            let store = place.join(&name);
            (make(place) && make(&store) && ready(&store)).then_some(store)
        })
    });
    let found = shared.or_else(|| own().filter(|own| ready(own)));
    OPENED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone_from(&found);
    found
}

/// The same, as it was opened last: what has come since was whole when it got its name.
pub fn opened() -> Option<PathBuf> {
    let last = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    last.clone().or_else(|| {
        drop(last);
        open()
    })
}

/// The directory for what NVRTC makes for this MLX and that device, made where it is missing; `None` where no place can be
/// used. Its files have names for all else that they depend on.
pub fn of_cuda(architecture: &str) -> Option<PathBuf> {
    static OPEN: Mutex<Option<PathBuf>> = Mutex::new(None);
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let name = format!("cuda-{}-{architecture}", mlx_version()?);
    let known = open
        .as_ref()
        .filter(|it| it.ends_with(&name) && it.is_dir());
    if known.is_none() {
        let mut places = PLACES.get()?.iter();
        *open = places.find_map(|place| {
            let store = place.join(&name);
            (make(place) && make(&store) && is_writable(&store)).then_some(store)
        });
        if let Some(store) = &*open {
            _ = delete_abandoned(store);
        }
    }
    open.clone()
}

/// Return whether a file lies in the store.
pub fn holds(path: &Path) -> bool {
    open().is_some_and(|store| path.starts_with(store))
}

// Makes the directories in which MLX keeps its libraries, and deletes broken and abandoned libraries.
fn ready(store: &Path) -> bool {
    let Some(version) = mlx_version() else {
        return false;
    };
    let mlx = store.join("mlx");
    let below = [&mlx, &mlx.join(&version), &mlx.join(&version).join("cpu")];
    below.iter().all(|it| make(it))
        && may_hold_libraries(below[2])
        && delete_broken(below[2]).is_ok()
}

/// Return whether the directory exists or can be made, is this user's, and nobody else can write to it.
pub fn make(directory: &Path) -> bool {
    let made = DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory);
    let found = made.and_then(|()| fs::symlink_metadata(directory));
    found.is_ok_and(|it| it.is_dir() && it.uid() == user() && it.mode() & 0o022 == 0)
}

// Reads each library once, and again when it has changed. Nobody writes to one in place: where the directory is as it was, there is
// nothing to do, and a store of thousands costs nothing for each kernel.
fn delete_broken(directory: &Path) -> io::Result<()> {
    let mut guard = WHOLE.lock().unwrap_or_else(PoisonError::into_inner);
    let whole = guard.get_or_insert_default();
    let now = Some((directory.to_path_buf(), identity(&fs::metadata(directory)?)));
    if whole.directory == now {
        return Ok(());
    }
    delete_abandoned(directory)?;
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let stem = path.file_stem().and_then(OsStr::to_str);
        let named = |prefix| stem.is_some_and(|it| it.starts_with(prefix));
        if path.extension() != Some(OsStr::new("so")) || !(named("lib") || named(AHEAD_OF_MLX)) {
            continue;
        }
        let Ok(found) = fs::symlink_metadata(&path) else {
            continue; // another process has deleted it
        };
        if whole.libraries.get(&path) == Some(&identity(&found)) {
            continue;
        }
        if found.is_file() && seal::is_whole(&path) {
            whole.libraries.insert(path, identity(&found));
        } else if let Err(error) = fs::remove_file(&path) {
            if error.kind() != io::ErrorKind::NotFound {
                return Err(error);
            }
        }
    }
    whole.directory = now;
    Ok(())
}

/// Deletes the files of compilations that were killed.
pub fn delete_abandoned(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let is_passing = entry.file_name().as_encoded_bytes().starts_with(b"tmp_");
        if is_passing && entry.metadata().is_ok_and(|found| is_abandoned(&found)) {
            _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

fn is_abandoned(file: &Metadata) -> bool {
    let age = file.modified().ok().and_then(|it| it.elapsed().ok());
    age.is_some_and(|age| age > ABANDONED)
}

fn identity(file: &Metadata) -> Identity {
    (file.ino(), file.size(), file.mtime(), file.mtime_nsec())
}

// A directory of this process alone, deleted when it ends.
fn own() -> Option<PathBuf> {
    let made = OWN.get_or_init(|| {
        let template = env::temp_dir().join("mlx-faststep-XXXXXX");
        let template = CString::new(template.into_os_string().into_vec()).ok()?;
        let path = super::make_own(template)?;
        super::at_exit(delete_own);
        Some((process::id(), path))
    });
    made.as_ref().map(|(_, path)| path.clone())
}

extern "C" fn delete_own() {
    // a forked process has it from the one that made it
    if let Some(Some((maker, path))) = OWN.get() {
        if *maker == process::id() {
            _ = fs::remove_dir_all(path);
        }
    }
}
