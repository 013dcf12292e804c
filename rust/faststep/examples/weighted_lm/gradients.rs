//! `--gradients-only`: what the next step's gradients are, part by part.
use std::collections::BTreeMap;

use faststep::Step;
use mlx_rs::module::FlattenedModuleParam;

use crate::{
    batches::Batches,
    checkpoints::Checkpoints,
    failure::Failure,
    model::{Decoder, Projection},
    options::Options,
    train,
};

// name and, of a block, its number: blocks.3.up.weight -> blocks 3, bytes.weight -> bytes
type Group<'a> = (&'a str, Option<u32>);

fn group(name: &str) -> Group<'_> {
    let (first, rest) = name.split_once('.').unwrap_or((name, ""));
    let number = rest.split('.').next().unwrap_or_default();
    (first, number.parse().ok())
}

// tensors and sum of squares of each group
fn groups(gradients: &FlattenedModuleParam) -> Result<BTreeMap<Group<'_>, (usize, f32)>, Failure> {
    let mut groups = BTreeMap::new();
    for (name, gradient) in gradients {
        let squares = train::number(&gradient.square()?.sum(None)?)?;
        let (tensors, sum) = groups.entry(group(name)).or_insert((0, 0.0));
        *tensors += 1;
        *sum += squares;
    }
    Ok(groups)
}

fn line(name: &str, tensors: usize, squares: f32) {
    let norm = squares.sqrt();
    println!("{name:<12} {tensors:>3} tensors, gradient norm {norm:.6}");
}

/// Print the loss of the next batch and the norms of its gradients.
pub fn show<P: Projection>(
    options: &Options,
    batches: &Batches,
    mut step: Step<Decoder<P>>,
) -> Result<(), Failure> {
    let checkpoints = Checkpoints::open(options, batches)?;
    let done = checkpoints.map_or(Ok(0), |all| all.load(&mut step))?;
    let (loss, gradients) = step.gradients(&batches.batch(done))?;
    println!("after {done} steps: loss {:.6}", train::number(&loss)?);
    let groups = groups(&gradients)?;
    for ((name, number), (tensors, squares)) in &groups {
        let number = number.map(|number| format!(".{number}"));
        let name = format!("{name}{}", number.unwrap_or_default());
        line(&name, *tensors, *squares);
    }
    let squares = groups.values().map(|(_, squares)| squares).sum();
    line("all", gradients.len(), squares);
    Ok(())
}
