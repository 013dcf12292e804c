//! MLX's header of all kernels, precompiled: reading it takes three quarters of a kernel's compilation.
//!
//! GCC reads `X.gch` in place of a header `X` where it finds one that was compiled with the same flags, and gives the same
//! library. It takes as long as four kernels, and 50 MB in the store, so a process makes it for its later kernels only;
//! where it is there, all use it.
use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicBool, Ordering},
    time::SystemTime,
};

use super::{command::Command, compiled, store, FLAGS};

/// Number of kernels of one process from which on the header is precompiled.
const LEAST: usize = 6;

/// The precompiled header of a kernel.
pub struct Header {
    file: PathBuf,
    folder: PathBuf,
}

impl Header {
    /// Find the precompiled header of a kernel's source, or make it by `run` where enough kernels are compiled.
    pub fn of(
        command: &Command,
        source: &str,
        run: impl Fn(&str) -> io::Result<String>,
    ) -> Option<Self> {
        static TRIED: AtomicBool = AtomicBool::new(false);
        let name = source.strip_prefix("#include \"")?.split('"').next()?;
        let folder = command.library.parent()?.with_file_name("precompiled");
        let file = folder.join(format!("{name}.gch"));
        if !file.is_file() {
            if compiled() < LEAST || TRIED.swap(true, Ordering::Relaxed) {
                return None;
            }
            make(command, name, &file, run).ok()?;
        }
        store::make(&folder).then_some(Self { file, folder })
    }

    /// The flags by which the compiler finds it, and fails where it cannot use it.
    pub fn flags(&self) -> String {
        format!("-I \"{}\" -Werror=invalid-pch", self.folder.display())
    }

    /// Delete it, after a compilation with it that failed.
    pub fn delete(&self) {
        _ = fs::remove_file(&self.file);
    }
}

// compiles under a passing name and renames: other processes may want it at once
fn make(
    command: &Command,
    name: &str,
    file: &Path,
    run: impl Fn(&str) -> io::Result<String>,
) -> io::Result<()> {
    let place = file.parent().ok_or(io::ErrorKind::InvalidInput)?;
    if !store::make(place) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    store::delete_abandoned(place)?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let now = now.map_or(0, |now| now.as_nanos());
    let source = place.join(format!("tmp_{}_{now}.h", process::id()));
    let part = source.with_extension("part");
    let done = fs::write(&source, format!("#include \"{name}\"\n"))
        .and_then(|()| run(&command.of_header(FLAGS, &source, &part)))
        .and_then(|_| fs::rename(&part, file));
    for path in [source, part] {
        _ = fs::remove_file(path);
    }
    done
}
