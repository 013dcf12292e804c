//! The compiler of MLX's kernels: g++, as the shell finds it.
use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    process::{self, Stdio},
    sync::OnceLock,
};

use super::{command::Command, source, FLAGS};

/// A number for all that a library depends on, but for MLX's version and the kernel: the compiler, the flags, and what
/// `native` is on this machine, instructions and sizes of caches. `None` when there is no compiler or it refuses them.
pub fn identity() -> Option<u64> {
    static IDENTITY: OnceLock<Option<u64>> = OnceLock::new();
    // -v prints the version; LC_ALL=C makes the output independent of the user's language
    let command = format!("LC_ALL=C g++ -std=c++17 -O3 {FLAGS} -E -v -x c++ /dev/null 2>&1");
    let hash = |told: String| {
        let mut hasher = DefaultHasher::new(); // with a later Rust another number: kernels are then compiled anew
        (told, FLAGS, source::INDEPENDENT).hash(&mut hasher);
        hasher.finish()
    };
    *IDENTITY.get_or_init(|| run(&command).ok().map(hash))
}

/// Compiles a kernel our way.
pub fn compile(command: &Command) -> io::Result<()> {
    let text = fs::read_to_string(command.source)?;
    fs::write(command.source, source::independent(&text))?;
    run(&command.with_flags())?;
    // sync before MLX renames the library into place: after a power failure the name must not refer to a partial file
    File::open(command.library)?.sync_all()
}

/// The output of a command that succeeds.
fn run(command: &str) -> io::Result<String> {
    let mut shell = process::Command::new("/bin/sh"); // popen's
    let output = shell.args(["-c", command]).stdin(Stdio::null()).output()?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(printed);
    }
    Err(io::Error::other(printed))
}
