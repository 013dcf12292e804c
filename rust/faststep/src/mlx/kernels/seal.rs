//! The seal at the end of a library: by it a library is loaded only as it was written.
//!
//! A library that was cut off, or whose blocks never reached the disk, ends the process when it is loaded. The seal is
//! the last thing that is written, before MLX gives the library its name, so that no library is ever seen without it;
//! the dynamic linker does not read what lies behind an ELF file's own contents.
use std::{
    fs::{self, OpenOptions},
    hash::{DefaultHasher, Hasher},
    io::{self, Write},
    path::Path,
};

/// The end of a seal; before it the hash and the number of the library's bytes, 8 bytes each.
pub const MARK: &[u8; 16] = b"faststep, sealed";

/// Seals a library, and brings it to the disk.
pub fn seal(library: &Path) -> io::Result<()> {
    let contents = fs::read(library)?;
    let mut file = OpenOptions::new().append(true).open(library)?;
    file.write_all(&of(&contents))?;
    file.sync_all()
}

/// Return whether a library is as it was when it was sealed.
pub fn is_whole(library: &Path) -> bool {
    contents(library).is_some()
}

/// Contents as they were sealed, where the file is as it was then.
pub fn contents(file: &Path) -> Option<Vec<u8>> {
    let mut contents = fs::read(file).ok()?;
    let split = contents.len().checked_sub(of(&[]).len())?;
    let is_whole = contents[split..] == of(&contents[..split]);
    contents.truncate(split);
    is_whole.then_some(contents)
}

fn of(contents: &[u8]) -> [u8; 32] {
    let mut hasher = DefaultHasher::new(); // with a later Rust another number: libraries are then compiled anew
    hasher.write(contents);
    let mut seal = [0; 32];
    seal[..8].copy_from_slice(&hasher.finish().to_le_bytes());
    seal[8..16].copy_from_slice(&(contents.len() as u64).to_le_bytes());
    seal[16..].copy_from_slice(MARK);
    seal
}

#[cfg(test)]
mod tests {
    use super::{is_whole, seal};
    use std::{env, fs, process};

    #[test]
    fn what_differs_from_what_was_sealed_is_not_whole() -> std::io::Result<()> {
        let file = env::temp_dir().join(format!("faststep-seal-{}", process::id()));
        fs::write(&file, b"contents")?;
        assert!(!is_whole(&file), "no seal");
        seal(&file)?;
        assert!(is_whole(&file));
        let sealed = fs::read(&file)?;
        for length in 0..sealed.len() {
            fs::write(&file, &sealed[..length])?;
            assert!(!is_whole(&file), "cut off at {length}");
            let mut zeros = sealed.clone();
            zeros[length..].fill(0);
            fs::write(&file, zeros)?;
            assert!(!is_whole(&file), "zeros from {length} on");
        }
        fs::remove_file(&file)?;
        assert!(!is_whole(&file), "no file");
        Ok(())
    }
}
