//! The text: files, each a source with an authority and an entropy.
//!
//! These two follow from the file alone, by a rule that stands in for what a reader knows about texts of his own:
//!
//! - the authority is that of the file's kind: 1 for documentation, 1/4 for tests, which hold much that is made up, and 1/2
//!   for source code and all else;
//! - the entropy is that of the file's bytes, `-sum(p * log2 p)` over their shares `p` (Shannon, 1948), in bits: from 0 for a
//!   file of one byte over and over to 8. Prose and code are near 4.5, tables and encoded data above.
use std::{
    ffi::OsStr,
    fmt, fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use crate::failure::Failure;

const DOCUMENTATION: [&str; 3] = ["md", "rst", "txt"];
const CODE: [&str; 7] = ["py", "rs", "c", "h", "cpp", "hpp", "toml"];
// what others have put beside the text, and what was built from it
const PASSED_OVER: [&str; 3] = ["site-packages", "dist-packages", "target"];

/// A file.
pub struct Source {
    pub bytes: Vec<u8>,
    /// Above 0, at most 1.
    pub authority: f32,
    /// Entropy of the bytes in bits, from 0 to 8.
    pub entropy: f32,
}

/// The files that have a whole sequence.
pub struct Text {
    pub sources: Vec<Source>,
}

impl Text {
    /// Read the files that have `seq` bytes: all that are named, and those below named directories that are known as text.
    pub fn read(paths: &[PathBuf], seq: usize) -> Result<Self, Failure> {
        let paths = match paths {
            [] => vec![standard_library()?],
            paths => paths.to_vec(),
        };
        let mut sources = Vec::new();
        for path in &paths {
            for file in files(path)? {
                let inner = file.strip_prefix(path).unwrap_or(&file);
                let bytes = fs::read(&file).map_err(|error| Failure::file(&file, error))?;
                sources.push(Source {
                    authority: authority(inner, &file),
                    entropy: entropy(&bytes),
                    bytes,
                });
            }
        }
        sources.retain(|source| source.bytes.len() >= seq);
        if sources.is_empty() {
            let names: Vec<String> = paths.iter().map(|p| p.display().to_string()).collect();
            let names = names.join(", ");
            return Err(Failure::Input(format!(
                "--text {names}: expected a text of --seq {seq} bytes or more, found none"
            )));
        }
        Ok(Self { sources })
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: usize = self.sources.iter().map(|source| source.bytes.len()).sum();
        let files = self.sources.len();
        write!(f, "{files} files, {bytes} bytes of text")
    }
}

fn standard_library() -> Result<PathBuf, Failure> {
    let code = "import sysconfig; print(sysconfig.get_path('stdlib'), end='')";
    let answer = Command::new("python3").args(["-c", code]).output().ok();
    let folder = answer.and_then(|answer| String::from_utf8(answer.stdout).ok());
    let folder = folder.map(PathBuf::from);
    let folder = folder.filter(|folder| folder.join("os.py").is_file());
    folder.ok_or_else(|| {
        let message = "expected the standard library of a python3, found none: name another text by --text PATH";
        Failure::Input(message.into())
    })
}

fn files(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    walk(path, &mut found).map_err(|error| Failure::file(path, error))?;
    Ok(found)
}

// in the order of the names
fn walk(folder: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    let entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let mut entries: Vec<PathBuf> = entries.collect::<io::Result<_>>()?;
    entries.sort();
    for entry in entries {
        let name = entry.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') || PASSED_OVER.contains(&&*name) || entry.is_symlink() {
            continue;
        }
        if entry.is_dir() {
            walk(&entry, found)?;
        } else if DOCUMENTATION.contains(&kind(&entry)) || CODE.contains(&kind(&entry)) {
            found.push(entry);
        }
    }
    Ok(())
}

fn kind(path: &Path) -> &str {
    path.extension().and_then(OsStr::to_str).unwrap_or_default()
}

// by the path within the directory that was named: what lies above it says nothing about the file
fn authority(inner: &Path, file: &Path) -> f32 {
    let is_test = |part: &OsStr| {
        let part = part.to_string_lossy();
        part == "test" || part == "tests" || part.starts_with("test_")
    };
    let name = file.file_name().unwrap_or_default();
    if is_test(name) || inner.iter().any(is_test) {
        0.25
    } else if DOCUMENTATION.contains(&kind(file)) {
        1.0
    } else {
        0.5
    }
}

#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)] // counts of bytes; a loss is float32
fn entropy(bytes: &[u8]) -> f32 {
    let mut counts = [0usize; 256];
    for byte in bytes {
        counts[usize::from(*byte)] += 1;
    }
    let counts = counts.iter().filter(|count| **count > 0);
    let shares = counts.map(|count| *count as f64 / bytes.len() as f64);
    shares
        .map(|share| share * share.recip().log2())
        .sum::<f64>() as f32
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{authority, entropy};

    #[test]
    fn entropy_is_in_bits() {
        assert_eq!(entropy(b"aaaa").to_bits(), 0f32.to_bits());
        assert_eq!(entropy(b"abab").to_bits(), 1f32.to_bits());
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(entropy(&all).to_bits(), 8f32.to_bits());
    }

    #[test]
    fn authority_is_that_of_the_kind() {
        let of = |inner: &str| authority(Path::new(inner), Path::new(inner));
        let got = ["docs/a.md", "a.rs", "tests/a.md", "test_a.py", "latest.py"].map(of);
        assert_eq!(
            got.map(f32::to_bits),
            [1.0, 0.5, 0.25, 0.25, 0.5].map(f32::to_bits)
        );
    }
}
