//! A checkpoint: a directory with three safetensors files, whose names are those of Python's trees.
use std::{
    collections::{BTreeMap, HashMap},
    fmt::Display,
    fs,
    path::{Path, PathBuf},
};

use mlx_rs::Array;

use crate::error::{Error, Result};

type Arrays = BTreeMap<String, Array>;

/// `model.load_weights` reads it in Python.
const MODEL: &str = "model.safetensors";
/// `tree_flatten(optimizer.state)`.
const OPTIMIZER: &str = "optimizer.safetensors";
/// `tree_flatten(step.state)`: the arrays, and the numbers as metadata.
const STEP: &str = "step.safetensors";

/// The numbers of `Step.state`, and the seed that gives the random state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Numbers {
    pub(crate) steps: usize,
    pub(crate) updates: usize,
    pub(crate) skipped: usize,
    pub(crate) batches: usize,
    pub(crate) random: Option<u64>,
}

/// The state with which a run goes on.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    pub(crate) model: Arrays,
    pub(crate) optimizer: Arrays,
    pub(crate) step: Arrays,
    pub(crate) numbers: Numbers,
}

fn failed(path: &Path, reason: &dyn Display) -> Error {
    Error::Checkpoint {
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

// the path of a temporary directory beside this one
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(suffix);
    path.with_file_name(name)
}

impl Checkpoint {
    /// Write it beside the path, then put it there in place of what was.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let (new, old) = (beside(path, ".partial"), beside(path, ".old"));
        for stale in [&new, &old] {
            if stale.exists() {
                fs::remove_dir_all(stale).map_err(|error| failed(stale, &error))?;
            }
        }
        fs::create_dir_all(&new).map_err(|error| failed(&new, &error))?;
        write(&new.join(MODEL), &self.model, &HashMap::new())?;
        write(&new.join(OPTIMIZER), &self.optimizer, &HashMap::new())?;
        write(&new.join(STEP), &self.step, &self.numbers.metadata())?;
        if path.exists() {
            fs::rename(path, &old).map_err(|error| failed(path, &error))?;
        }
        fs::rename(&new, path).map_err(|error| failed(path, &error))?;
        if old.exists() {
            fs::remove_dir_all(&old).map_err(|error| failed(&old, &error))?;
        }
        Ok(())
    }

    /// Read it; the arrays are still lazy.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let (step, metadata) = read(&path.join(STEP))?;
        let numbers = Numbers::of(&metadata).map_err(|reason| failed(&path.join(STEP), &reason))?;
        let optimizer = read(&path.join(OPTIMIZER))?.0;
        if !optimizer
            .keys()
            .any(|name| name.rsplit('.').next() == Some("step"))
        {
            return Err(failed(
                &path.join(OPTIMIZER),
                &"expected `step`, the number of updates, among the arrays",
            ));
        }
        Ok(Self {
            model: read(&path.join(MODEL))?.0,
            optimizer,
            step,
            numbers,
        })
    }
}

impl Numbers {
    fn metadata(&self) -> HashMap<String, String> {
        let counts = [
            ("steps", self.steps),
            ("updates", self.updates),
            ("skipped", self.skipped),
            ("batches", self.batches),
        ];
        let counts = counts.map(|(name, count)| (name.to_owned(), count.to_string()));
        let random = self
            .random
            .map(|seed| ("random".to_owned(), seed.to_string()));
        counts.into_iter().chain(random).collect()
    }

    fn of(metadata: &HashMap<String, String>) -> std::result::Result<Self, String> {
        let number = |name: &str| match metadata.get(name) {
            Some(text) => text.parse().map(Some).map_err(|_| {
                format!("metadata `{name}`: expected a number from 0 on, got {text:?}")
            }),
            None => Ok(None),
        };
        let count = |name: &str| -> std::result::Result<usize, String> {
            let count = number(name)?.unwrap_or(0u64);
            usize::try_from(count).map_err(|error| error.to_string())
        };
        Ok(Self {
            steps: count("steps")?,
            updates: count("updates")?,
            skipped: count("skipped")?,
            batches: count("batches")?,
            random: number("random")?,
        })
    }
}

fn write(path: &Path, arrays: &Arrays, metadata: &HashMap<String, String>) -> Result<()> {
    let saved = Array::save_safetensors(arrays, metadata, path);
    saved.map_err(|error| failed(path, &error))
}

fn read(path: &Path) -> Result<(Arrays, HashMap<String, String>)> {
    let loaded = Array::load_safetensors_with_metadata(path);
    let (arrays, metadata) = loaded.map_err(|error| failed(path, &error))?;
    Ok((arrays.into_iter().collect(), metadata))
}
