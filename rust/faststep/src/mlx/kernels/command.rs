//! The command with which MLX compiles a kernel.
use std::path::Path;

/// Beginning and end of a command by `JitCompiler::build_command` in `mlx/backend/cpu/jit_compiler.cpp`.
const BEGIN: &str = "g++ -std=c++17 -O3 -Wall -fPIC -shared ";
const END: &str = "\" 2>&1";
/// The beginning for a header: that of a command, but for the linker's flag.
const BEGIN_HEADER: &str = "g++ -std=c++17 -O3 -Wall -fPIC ";

/// A command of the form `g++ … <options> "<source>" -o "<library>" 2>&1`.
pub struct Command<'a> {
    /// The arguments besides MLX's own flags: the path of its headers.
    options: &'a str,
    /// The file to compile.
    pub source: &'a Path,
    /// The file to make.
    pub library: &'a Path,
}

impl<'a> Command<'a> {
    /// Takes a command apart; `None` for every other one.
    pub fn parse(command: &'a str) -> Option<Self> {
        let rest = command.strip_prefix(BEGIN)?.strip_suffix(END)?;
        let (rest, library) = rest.rsplit_once("\" -o \"")?;
        let (options, source) = rest.rsplit_once(" \"")?;
        Some(Self {
            options,
            source: Path::new(source),
            library: Path::new(library),
        })
    }

    /// The command with more flags; MLX's options come later and win.
    pub fn with_flags(&self, flags: &str) -> String {
        let text = self.of(self.source, self.library);
        format!("{BEGIN}{flags} {}", &text[BEGIN.len()..])
    }

    /// MLX's command for other files.
    pub fn of(&self, source: &Path, library: &Path) -> String {
        let (options, source, library) = (self.options, source.display(), library.display());
        format!("{BEGIN}{options} \"{source}\" -o \"{library}{END}")
    }

    /// The command that precompiles a header for this one with the same flags.
    pub fn of_header(&self, flags: &str, source: &Path, result: &Path) -> String {
        let (options, source, result) = (self.options, source.display(), result.display());
        format!("{BEGIN_HEADER}{flags} {options} -x c++-header \"{source}\" -o \"{result}{END}")
    }
}

#[cfg(test)]
mod tests {
    use super::{Command, BEGIN};
    use crate::mlx::kernels::FLAGS;

    #[test]
    fn mlx_s_command_gets_the_flags() {
        let rest = r#"-I "/a b/include" "/c d/k.cpp" -o "/c d/k.so" 2>&1"#;
        let ours = Command::parse(&format!("{BEGIN}{rest}")).map(|it| it.with_flags(FLAGS));
        assert_eq!(ours, Some(format!("{BEGIN}{FLAGS} {rest}")));
    }

    #[test]
    fn every_other_command_is_left_alone() {
        for other in [
            "",
            "g++ --version",
            BEGIN,
            r#"g++ -std=c++20 -O3 -Wall -fPIC -shared "k.cpp" -o "k.so" 2>&1"#,
            r#"g++ -std=c++17 -O3 -Wall -fPIC -shared "k.cpp" -o "k.so""#,
            r#"g++ -std=c++17 -O3 -Wall -fPIC -shared "k.cpp" 2>&1"#,
            r#"cd /; g++ -std=c++17 -O3 -Wall -fPIC -shared "k.cpp" -o "k.so" 2>&1"#,
        ] {
            assert!(Command::parse(other).is_none(), "{other}");
        }
    }
}
