//! Checkpoints: a run goes on as if nothing had happened, and one that does not fit changes nothing.
#![allow(clippy::unwrap_used)] // how a test fails

mod common;

use std::{
    collections::HashMap,
    env, fs,
    path::{Path, PathBuf},
    process,
};

use common::{losses, mse, values, Mlp};
use faststep::{Error, Optimizer, Optimizers, Options, Step};
use mlx_rs::{
    module::{Module, ModuleParameters},
    Array, Dtype,
};

/// A directory of this test's own, gone when it ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("faststep-{name}-{}", process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn step(seed: u64) -> Step<Mlp> {
    let options = Options::default()
        .max_grad_norm(0.1)
        .accumulate(3)
        .compute_dtype(Dtype::Float16)
        .ema_decay(0.9);
    let mut model = Mlp::seeded(seed);
    for (name, array) in model.parameters_mut().flatten() {
        if name.starts_with("second") {
            *array = array.as_dtype(Dtype::Bfloat16).unwrap();
        }
    }
    let optimizers = Optimizers::new(Optimizer::adamw(0.01), 1e-2);
    Step::new(model, optimizers, mse, options).unwrap()
}

fn loaded(path: &Path) -> HashMap<String, Array> {
    Array::load_safetensors(path).unwrap()
}

#[test]
fn a_run_goes_on() {
    let folder = Folder::new("goes-on");
    let mut straight = step(1);
    losses(&mut straight, 0..4);
    let wanted = losses(&mut straight, 4..10);

    let path = folder.0.join("run");
    let mut first = step(1);
    losses(&mut first, 0..2);
    first.save(&path).unwrap();
    losses(&mut first, 2..4);
    first.model_mut().training_mode(true); // anything may have changed: it is looked at when it is saved
    first.save(&path).unwrap(); // in place of the one before
    let mut second = step(5);
    losses(&mut second, 7..9);
    second.load(&path).unwrap();
    assert_eq!(second.batches(), 1);
    assert_eq!(losses(&mut second, 4..10), wanted);
    assert_eq!(second.stats().unwrap().updates, 3);
    let names: Vec<_> = fs::read_dir(&folder.0)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names, ["run"]);
    for (name, array) in straight.average().unwrap() {
        assert!(
            array.eq_values(&second.average().unwrap()[&name]).unwrap(),
            "{name}"
        );
    }
}

#[test]
fn what_is_kept_for_frozen_parameters_goes_on() {
    let folder = Folder::new("frozen");
    let path = folder.0.join("run");
    let (mut first, mut second) = (step(1), step(5));
    losses(&mut first, 0..6);
    first.model_mut().first.freeze_parameters(true);
    losses(&mut first, 6..9);
    first.save(&path).unwrap();
    second.model_mut().first.freeze_parameters(true);
    second.load(&path).unwrap();
    let mut trained = Vec::new();
    for step in [&mut first, &mut second] {
        step.model_mut().first.unfreeze_parameters(true);
        trained.push(losses(step, 9..15));
    }
    assert_eq!(trained[0], trained[1]);
    let (wanted, average) = (first.average().unwrap(), second.average().unwrap());
    assert_eq!(wanted.len(), 4);
    for (name, array) in wanted {
        assert!(array.eq_values(&average[&name]).unwrap(), "{name}");
    }
}

#[test]
fn the_names_are_those_of_python() {
    let folder = Folder::new("names");
    let mut step = step(1);
    losses(&mut step, 0..4);
    step.save(folder.0.join("run")).unwrap();
    let mut names: Vec<String> = loaded(&folder.0.join("run/step.safetensors"))
        .into_keys()
        .collect();
    names.sort();
    let parameters = ["first.bias", "first.weight", "second.bias", "second.weight"];
    let group = |group: &str, from: usize| {
        parameters[from..]
            .iter()
            .map(|n| format!("{group}.{n}"))
            .collect::<Vec<_>>()
    };
    let mut wanted = [group("ema", 0), group("masters", 2), group("window", 0)].concat();
    wanted.extend(["good_steps", "loss_scale", "weight"].map(String::from));
    wanted.sort();
    assert_eq!(names, wanted);
    let optimizer = loaded(&folder.0.join("run/optimizer.safetensors"));
    assert_eq!(optimizer["step"].dtype(), Dtype::Uint64);
    assert_eq!(optimizer["second.weight.v"].dtype(), Dtype::Float32);
    assert_eq!(optimizer.len(), 2 + 2 * parameters.len());
    let model = loaded(&folder.0.join("run/model.safetensors"));
    assert_eq!(model["second.weight"].dtype(), Dtype::Bfloat16);
}

/// A file, what the error says, and what is done to its arrays.
type Change<'a> = (&'a str, &'a str, &'a dyn Fn(&mut HashMap<String, Array>));

#[test]
fn what_does_not_fit_changes_nothing() {
    let folder = Folder::new("fits");
    let path = folder.0.join("run");
    let mut step = step(1);
    losses(&mut step, 0..4);
    step.save(&path).unwrap();
    let wanted = values(&step.model());
    let bad = |file: &str, change: &dyn Fn(&mut HashMap<String, Array>)| {
        let file = path.join(file);
        let kept = fs::read(&file).unwrap();
        let mut arrays = loaded(&file);
        mlx_rs::transforms::eval(arrays.values()).unwrap();
        change(&mut arrays);
        Array::save_safetensors(&arrays, None, &file).unwrap();
        (file, kept)
    };
    let narrow = || Array::zeros::<f32>(&[3]).unwrap();
    let changes: [Change; 5] = [
        (
            "model.safetensors",
            "expected an array first.bias, got none",
            &|a| {
                a.remove("first.bias");
            },
        ),
        (
            "model.safetensors",
            "first.bias: expected [16], got [3]",
            &|a| {
                a.insert("first.bias".into(), narrow());
            },
        ),
        (
            "model.safetensors",
            "expected the arrays of the module, got third beside them",
            &|a| {
                a.insert("third".into(), narrow());
            },
        ),
        ("optimizer.safetensors", "expected `step`", &|a| {
            a.remove("step");
        }),
        (
            "optimizer.safetensors",
            "first.bias.m: expected [16], got [3]",
            &|a| {
                a.insert("first.bias.m".into(), narrow());
            },
        ),
    ];
    for (file, message, change) in changes {
        let (file, kept) = bad(file, change);
        let error = step.load(&path).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        fs::write(file, kept).unwrap();
        assert_eq!(values(&step.model()), wanted);
    }
    fs::write(path.join("model.safetensors"), b"no tensors").unwrap();
    let error = step.load(&path).unwrap_err();
    assert!(matches!(error, Error::Checkpoint { .. }), "{error}");
    let error = step.load(folder.0.join("nowhere")).unwrap_err();
    assert!(matches!(error, Error::Checkpoint { .. }), "{error}");
    assert_eq!(step.batches(), 1);
    losses(&mut step, 4..6);
    assert_eq!(step.stats().unwrap().updates, 2);
}

#[test]
fn what_was_changed_since_the_last_step_is_saved() {
    let folder = Folder::new("changed");
    let path = folder.0.join("run");
    let mut step = step(1);
    losses(&mut step, 0..1);
    step.model_mut().first.bias.value =
        Some(Array::full::<f32>(&[16], Array::from_f32(3.0)).unwrap());
    step.save(&path).unwrap();
    let bias = &loaded(&path.join("model.safetensors"))["first.bias"];
    assert_eq!(bias.to_vec_exact::<f32>().unwrap(), [3.0; 16]);
}
