//! The compiler of MLX's kernels: g++, as the shell finds it.
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    io,
    process::{self, Stdio},
    sync::OnceLock,
};

use super::{seal, source, FLAGS};

/// The compiler: whether it takes our flags, and a hash of all that a library depends on but for MLX's version and the
/// kernel: the compiler, the flags, and what `native` is on this machine, instructions and sizes of caches.
struct Compiler {
    flags: bool,
    identity: u64,
}

/// The compiler; `None` when there is none.
fn found() -> Option<&'static Compiler> {
    static FOUND: OnceLock<Option<Compiler>> = OnceLock::new();
    let ask = |flags: &str| {
        // -v prints the version; LC_ALL=C makes the output independent of the user's language
        let told = run(&format!(
            "LC_ALL=C g++ -std=c++17 -O3 {flags} -E -v -x c++ /dev/null 2>&1"
        ));
        let mut hasher = DefaultHasher::new(); // with a later Rust another number: kernels are then compiled anew
        (told.ok()?, flags, source::ADDED, seal::MARK).hash(&mut hasher);
        let (flags, identity) = (!flags.is_empty(), hasher.finish());
        Some(Compiler { flags, identity })
    };
    FOUND
        .get_or_init(|| ask(FLAGS).or_else(|| ask("")))
        .as_ref()
}

/// The number of the compiler. `None` when there is none.
pub fn identity() -> Option<u64> {
    found().map(|it| it.identity)
}

/// Return whether it takes our flags.
pub fn takes_flags() -> bool {
    found().is_some_and(|it| it.flags)
}

/// The output of a command that succeeds.
pub fn run(command: &str) -> io::Result<String> {
    let mut shell = process::Command::new("/bin/sh"); // popen's
    let output = shell.args(["-c", command]).stdin(Stdio::null()).output()?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(printed);
    }
    Err(io::Error::other(printed))
}
