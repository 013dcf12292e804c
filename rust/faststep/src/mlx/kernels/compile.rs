//! The compilation of one of MLX's kernels.
use std::{fs, io};

use super::{
    command::Command,
    compiler::{run, takes_flags},
    header::Header,
    seal, source, FLAGS,
};

/// Compile a kernel our way, or MLX's where that fails, and seal it.
pub fn compile(command: &Command) -> io::Result<()> {
    let ours = || {
        let text = fs::read_to_string(command.source)?;
        fs::write(command.source, source::rewritten(&text))?;
        if let Some(header) = Header::of(command, &text, run) {
            let done = run(&command.with_flags(&format!("{FLAGS} {}", header.flags())));
            if done.is_ok() {
                return done;
            }
            header.delete(); // it may be damaged
        }
        run(&command.with_flags(FLAGS))
    };
    if !takes_flags() || ours().is_err() {
        run(&command.with_flags(""))?;
    }
    // sync before MLX renames the library into place: after a power failure the name must not refer to a partial file
    seal::seal(command.library)
}
