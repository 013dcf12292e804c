//! Output of a run: a progress bar, lines of progress, and a JSON line for each step.
use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    time::Instant,
};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::{failure::Failure, memory::Memory, options::Options};

/// Numbers of one step.
#[derive(Debug, Serialize)]
pub struct Record {
    /// The number of steps so far.
    pub step: u32,
    /// The weighted loss in nats a byte, before the update.
    pub loss: f32,
    /// The norm of the gradients before clipping.
    pub grad_norm: f32,
    #[serde(flatten)]
    pub memory: Option<Memory>,
}

/// The log file.
struct Log {
    path: PathBuf,
    file: BufWriter<File>,
}

/// Progress on the terminal, and the log file.
pub struct Report {
    bar: ProgressBar,
    log: Option<Log>,
    shown: (u32, Instant), // steps at the last line, and when that was
    bytes: f64,            // that are predicted in a step
}

impl Log {
    // without the lines of steps that are to be taken again
    fn open(path: &Path, steps: u32) -> Result<Self, Failure> {
        let old = if steps > 0 && path.exists() {
            fs::read_to_string(path).map_err(|error| Failure::file(path, error))?
        } else {
            String::new()
        };
        let step =
            |line: &str| serde_json::from_str::<serde_json::Value>(line).ok()?["step"].as_u64();
        let mut log = Self {
            path: path.to_owned(),
            file: BufWriter::new(File::create(path).map_err(|error| Failure::file(path, error))?),
        };
        for line in old.lines() {
            if step(line).is_some_and(|step| step <= u64::from(steps)) {
                log.write(line)?;
            }
        }
        Ok(log)
    }

    fn write(&mut self, line: &str) -> Result<(), Failure> {
        writeln!(self.file, "{line}").map_err(|error| Failure::file(&self.path, error))
    }
}

impl Report {
    /// A report of a run that goes on after so many steps.
    pub fn new(options: &Options, steps: u32) -> Result<Self, Failure> {
        let run = &options.run;
        let bar = ProgressBar::new(run.steps.into()).with_position(steps.into());
        let style = ProgressStyle::with_template("{wide_bar} {pos}/{len}, {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        let log = options.log.as_deref().map(|path| Log::open(path, steps));
        Ok(Self {
            bar,
            log: log.transpose()?,
            shown: (steps, Instant::now()),
            bytes: f64::from(run.batch) * f64::from(run.seq - 1),
        })
    }

    /// Move the bar.
    pub fn advance(&self) {
        self.bar.inc(1);
    }

    /// Write steps down, and show the last of them where it has its memory.
    pub fn add(&mut self, records: &[Record]) -> Result<(), Failure> {
        if let Some(log) = &mut self.log {
            for record in records {
                let line = serde_json::to_string(record);
                log.write(&line.map_err(|error| Failure::file(&log.path, error))?)?;
            }
            let flushed = log.file.flush();
            flushed.map_err(|error| Failure::file(&log.path, error))?;
        }
        if let Some((record, memory)) = records.last().and_then(|r| Some((r, r.memory?))) {
            self.show(record, memory);
        }
        Ok(())
    }

    fn show(&mut self, record: &Record, memory: Memory) {
        let (steps, at) = self.shown;
        let speed = f64::from(record.step - steps) * self.bytes / at.elapsed().as_secs_f64();
        let Record {
            step,
            loss,
            grad_norm,
            ..
        } = record;
        let line = format!(
            "step {step:>6}: loss {loss:.4}, gradient norm {grad_norm:.3}, {speed:.0} bytes/s; {memory}"
        );
        self.bar.suspend(|| println!("{line}"));
        self.shown = (*step, Instant::now());
    }
}
