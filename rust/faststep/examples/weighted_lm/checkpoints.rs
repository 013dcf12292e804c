//! Checkpoints of a run: directories `step-000100`, each whole or not there, of which the last ones are kept.
use std::{
    fs::{self, DirEntry},
    io,
    path::{Path, PathBuf},
};

use faststep::Step;
use serde_json::{Map, Value};

use crate::{
    batches::Batches,
    failure::Failure,
    lora,
    model::{Decoder, Projection},
    options::Options,
};

// behind the name of one that is being written
const UNFINISHED: &str = ".new";

/// The checkpoints of a run.
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
    run: Map<String, Value>, // options that must be the same in a run that is resumed
}

fn name_of(steps: u32) -> String {
    format!("step-{steps:06}")
}

fn steps_of(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("step-")?;
    let all = digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| all)
}

impl Checkpoints {
    /// Open the directory of checkpoints, if one is named; for a new run it must have none.
    pub fn open(options: &Options, batches: &Batches) -> Result<Option<Self>, Failure> {
        let Some(folder) = options.checkpoints.clone() else {
            return Ok(None);
        };
        let object = |value: serde_json::Result<Value>| match value {
            Ok(value) => Ok(value.as_object().cloned().unwrap_or_default()),
            Err(error) => Err(Failure::file(&folder, error)),
        };
        let mut run = object(serde_json::to_value(options.run))?;
        if options.lora.base.is_some() {
            run.extend(object(serde_json::to_value(&options.lora))?);
        }
        run.insert("text".into(), format!("{:016x}", batches.digest()).into());
        let all = Self {
            folder,
            keep: options.keep as usize,
            run,
        };
        match (all.steps()?.last(), options.resume) {
            (None, true) => Err(Failure::file(&all.folder, "expected a checkpoint to resume from, found none")),
            (Some(_), false) => Err(Failure::file(
                &all.folder,
                "has the checkpoints of a run: --resume goes on with it, another directory begins a new one",
            )),
            _ => Ok(Some(all)),
        }
    }

    /// Make the directory, and clear what a killed run has left half-written in it.
    pub fn create(&self) -> Result<(), Failure> {
        let failed = |error| Failure::file(&self.folder, error);
        fs::create_dir_all(&self.folder).map_err(failed)?;
        for name in self.names()? {
            if name.starts_with("step-") && name.contains(UNFINISHED) {
                fs::remove_dir_all(self.folder.join(name)).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Load the last one, if there is one; the number of its steps.
    pub fn load<P: Projection>(&self, step: &mut Step<Decoder<P>>) -> Result<u32, Failure> {
        let Some(last) = self.steps()?.pop() else {
            return Ok(0);
        };
        let path = self.path(last);
        self.compare(&path.join(lora::RUN))?;
        step.load(&path)?;
        Ok(last)
    }

    /// Write one beside its place, put it there, and remove the oldest ones.
    pub fn save<P: Projection>(
        &self,
        step: &mut Step<Decoder<P>>,
        steps: u32,
    ) -> Result<(), Failure> {
        let path = self.path(steps);
        let new = self.folder.join(format!("{}{UNFINISHED}", name_of(steps)));
        step.save(&new)?;
        lora::save(step.parameters(), &new.join(lora::ADAPTERS))?;
        let run = serde_json::to_vec_pretty(&self.run).map_err(|e| Failure::file(&new, e))?;
        fs::write(new.join(lora::RUN), run).map_err(|error| Failure::file(&new, error))?;
        fs::rename(&new, &path).map_err(|error| Failure::file(&path, error))?;
        let all = self.steps()?;
        for old in &all[..all.len().saturating_sub(self.keep)] {
            let old = self.path(*old);
            fs::remove_dir_all(&old).map_err(|error| Failure::file(&old, error))?;
        }
        Ok(())
    }

    fn path(&self, steps: u32) -> PathBuf {
        self.folder.join(name_of(steps))
    }

    fn names(&self) -> Result<Vec<String>, Failure> {
        if !self.folder.exists() {
            return Ok(Vec::new());
        }
        let failed = |error| Failure::file(&self.folder, error);
        let entries = fs::read_dir(&self.folder).map_err(failed)?;
        let name = |entry: DirEntry| entry.file_name().to_string_lossy().into_owned();
        let names: io::Result<_> = entries.map(|entry| entry.map(name)).collect();
        names.map_err(failed)
    }

    // the numbers of steps of all that are there, the last one last
    fn steps(&self) -> Result<Vec<u32>, Failure> {
        let mut all: Vec<u32> = self
            .names()?
            .iter()
            .filter_map(|name| steps_of(name))
            .collect();
        all.sort_unstable();
        Ok(all)
    }

    fn compare(&self, path: &Path) -> Result<(), Failure> {
        let text = fs::read_to_string(path).map_err(|error| Failure::file(path, error))?;
        let saved: Map<String, Value> =
            serde_json::from_str(&text).map_err(|error| Failure::file(path, error))?;
        for (name, value) in &self.run {
            let before = saved.get(name).unwrap_or(&Value::Null);
            if before != value {
                let option = name.replace('_', "-");
                let message =
                    format!("is of another run: --{option} was {before} there, and is {value} now");
                return Err(Failure::file(path, message));
            }
        }
        Ok(())
    }
}
