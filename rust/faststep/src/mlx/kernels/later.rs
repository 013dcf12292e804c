//! Kernels that are compiled while they are computed in blocks (`native/cpu/blocks`): MLX's call of the compiler is refused, and what it
//! would have compiled is compiled by a thread. The next call takes the library, in this process or in a later one.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    process,
    sync::{atomic::Ordering, LazyLock},
    time::SystemTime,
};

use super::{
    ahead::Ahead, command::Command, compile::compile, seal, store::AHEAD_OF_MLX, COMPILED,
};
use crate::mlx::ffi::{
    faststep_blocks_begin, faststep_kernel_call, faststep_kernel_refused, KERNEL_ASK, KERNEL_LOOK,
};

static AHEAD: LazyLock<Ahead<io::Result<()>>> = LazyLock::new(|| Ahead::new(give_way));

/// How much less of a processor than the step the compiler gets: Unix's nice value.
const NICE: i32 = 10;

/// Have kernels computed in blocks from now on; false on a processor without the loops for that.
pub fn begin() -> bool {
    // SAFETY: the function is never unloaded.
    unsafe { faststep_blocks_begin(is_made) }
}

/// Return whether MLX is only to say whether it has a library of a kernel.
pub fn looks() -> bool {
    // SAFETY: no conditions.
    unsafe { faststep_kernel_call() == KERNEL_LOOK }
}

/// Return whether MLX only asks for a kernel: no compiler runs then, and its call is to fail.
pub fn is_refused(command: &Command) -> bool {
    // SAFETY: no conditions.
    let call = unsafe { faststep_kernel_call() };
    if call != KERNEL_LOOK && call != KERNEL_ASK {
        return false;
    }
    let text = fs::read_to_string(command.source);
    let number = text.as_deref().map_or(0, number_of);
    if seal::is_whole(&made(command, number)) {
        return false;
    }
    _ = fs::remove_file(command.source);
    if let (Ok(text), KERNEL_ASK) = (text, call) {
        ask(command, number, text);
    }
    // SAFETY: no conditions.
    unsafe { faststep_kernel_refused(number) };
    true
}

/// Put the library that has been made of a command's source where the command is to make it; false where there is none.
pub fn take(command: &Command) -> bool {
    let Ok(text) = fs::read_to_string(command.source) else {
        return false;
    };
    let number = number_of(&text);
    AHEAD.take(number.into());
    let library = made(command, number);
    seal::is_whole(&library)
        && renew(&library).is_ok()
        && fs::rename(library, command.library).is_ok()
}

// Under the passing name that it gets here, another process would delete an old file as abandoned.
fn renew(library: &Path) -> io::Result<()> {
    let file = fs::File::options().append(true).open(library)?;
    file.set_modified(SystemTime::now())
}

fn number_of(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

// the library of a source, until MLX gives it a name
fn made(command: &Command, number: u64) -> PathBuf {
    let folder = command.library.parent().unwrap_or(Path::new("."));
    folder.join(format!("{AHEAD_OF_MLX}{number:016x}.so"))
}

fn ask(command: &Command, number: u64, text: String) {
    let made = made(command, number);
    let source = made.with_file_name(format!("tmp_{}_{number:016x}.cpp", process::id()));
    let library = source.with_extension("so");
    let command = command.of(&source, &library);
    AHEAD.ask(number.into(), move || {
        COMPILED.fetch_add(1, Ordering::Relaxed);
        fs::write(&source, text)?;
        let parsed = Command::parse(&command).ok_or(io::ErrorKind::InvalidInput)?;
        let done = compile(&parsed);
        _ = fs::remove_file(&source);
        done.and_then(|()| fs::rename(library, made))
    });
}

// of a thread that compiles, and of the compilers that it starts; a thread that waits for a library compiles it as it is
fn give_way() {
    // SAFETY: no conditions; it is the calling thread's
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

extern "C" fn is_made(number: u64) -> bool {
    AHEAD.has(number.into(), Result::is_ok)
}
