//! Now and then, before a trace stands for a call: whether the loss, called once more, gives what the trace repeats.
//!
//! What a loss depends on is found, watched and tried out. Where that misses something, this tells, if late.
use std::fmt::Write as _;

use faststep::engine::Graph;
use mlx_rs::{error::Result as MlxResult, Array};
use pyo3::prelude::*;

use super::{
    arguments::Arguments,
    find::{taken, Sketched},
    run::Given,
    suspected::{has_same_values, Writes},
    trace_cache::Key,
    undisturbed::undisturbed,
    Inner,
};
use crate::{
    mlx::errors::mlx,
    reach::{
        advance::{are_made, Advance},
        stop::Stop,
        suspect::Drawable,
    },
    store::Store,
};

/// The number of calls from which on the loss is called once more at each one out of so many.
const OFTEN: usize = 1000;

/// Return whether the loss is called once more before a trace stands for a call so often: 2, 5, 9, 10, 20, 50, 99, 100, 200 ... times.
/// Whoever counts from 0 does something at every hundredth call one earlier than whoever counts from 1.
pub(super) fn is_due(uses: usize) -> bool {
    if uses >= OFTEN {
        return uses.is_multiple_of(OFTEN);
    }
    let mut power = 1;
    while power * 10 <= uses {
        power *= 10;
    }
    uses > 1 && ([power, 2 * power, 5 * power].contains(&uses) || uses + 1 == 10 * power)
}

impl Inner {
    /// Call the loss for its graph and compare that with the trace found last; what it does is taken back. False where it raises, or
    /// does what no trace repeats.
    ///
    /// # Errors
    /// Untraceable where it gives something else, though nothing has changed that is watched.
    pub(super) fn holds_still(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        key: &mut Key,
    ) -> Result<bool, Stop> {
        let py = user.py();
        let Some(last) = self.traces.last() else {
            return Ok(true);
        };
        let kept = &last.kept;
        let shared = given.looked.shared(py)?;
        let same_form = kept.shared == shared && kept.suspect.borrow().is_none();
        let is_comparable = match kept.graph.as_ref().filter(|_| same_form) {
            Some(graph) => graph.differences(graph).map_err(mlx)?.is_some(),
            None => false,
        };
        if !is_comparable {
            return Ok(true); // it cannot be told
        }
        undisturbed(py, || self.compared(store, user, given, key))
    }

    fn compared(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        key: &mut Key,
    ) -> Result<bool, Stop> {
        let py = user.py();
        if Drawable::before(&user.model, &given.looked)?.stay(py)? {
            return Ok(true); // what the loss takes could not be put back
        }
        self.writes = Writes::Unknown;
        let sketch = self.sketch_apart(store, user, given, key, true);
        if let Writes::Outside(_) = self.writes {
            return Ok(true); // it cannot be called on trial
        }
        if let Some(names) = self.takes.take() {
            return Err(Stop::Untraceable(taken(&names)));
        }
        let Ok(sketch) = sketch else {
            return Ok(false);
        };
        if let Some(why) = self.takes_numpy(store, user, given)? {
            return Err(Stop::Untraceable(why));
        }
        match self.other(&sketch, given, py)? {
            Some(what) => Err(Stop::Untraceable(format!(
                "called again, it gives something else ({what}), and nothing has changed that is watched: steps before this one may \
                 have been computed without that. Pass as an argument what it depends on, or keep that in an mx.array"
            ))),
            None => Ok(true),
        }
    }

    // what a call of the loss gives that is not what the trace found last repeats
    fn other(
        &self,
        sketch: &Sketched,
        given: &Given,
        py: Python<'_>,
    ) -> Result<Option<String>, Stop> {
        let Some(last) = self.traces.last() else {
            return Ok(None);
        };
        let kept = &last.kept;
        let Some(graph) = &kept.graph else {
            return Ok(None);
        };
        let Some(differences) = graph.differences(&sketch.graph).map_err(mlx)? else {
            return Ok(Some("other operations".into()));
        };
        if kept.written != sketch.written {
            return Ok(Some("other objects in which it stores arrays".into()));
        }
        let mut pairs = Vec::new(); // a constant of the trace, and in its place
        for at in differences.iter().filter(|at| !kept.varying.contains(at)) {
            let before = graph.graph().constant(*at).map_err(mlx)?;
            pairs.push((before, sketch.graph.graph().constant(*at).map_err(mlx)?));
        }
        for (at, before) in kept.varying.iter().zip(&given.constants) {
            let now = sketch.graph.graph().constant(*at).map_err(mlx)?;
            pairs.push((before.clone(), now));
        }
        for (before, now) in &pairs {
            if !is_same(before, now).map_err(mlx)? {
                let (before, now) = (shown(before), shown(now));
                return Ok(Some(format!("{now} in the place of {before}")));
            }
        }
        let templates = self.template.as_ref().zip(sketch.template.as_ref());
        if templates.is_some_and(|(one, other)| !has_same_values(one.bind(py), other.bind(py))) {
            return Ok(Some("numbers that it returns".into()));
        }
        if matches!(&self.writes, Writes::Known(known) if !known.is_empty()) {
            return Ok(None); // what counts that has not been called, a filter of a logger say
        }
        let mut adds: Vec<&Advance> = Vec::new();
        for own in sketch.model.iter().chain(&sketch.reached) {
            match own.adds() {
                Some(more) => adds.extend(more),
                None => return Ok(Some(own.shown(py))),
            }
        }
        let same = are_made(&given.adds, &adds, py)?;
        Ok((!same).then(|| "what it adds to numbers of its own".into()))
    }
}

// true if two constants have the same bits
fn is_same(one: &Array, other: &Array) -> MlxResult<bool> {
    let graph = |array: &Array| Graph::new(&[], std::slice::from_ref(array));
    let differences = graph(one)?.differences(&graph(other)?)?;
    Ok(differences.is_some_and(|differences| differences.is_empty()))
}

// a constant, for a message
fn shown(constant: &Array) -> String {
    let mut text = String::new();
    if constant.size() == 1 && write!(text, "{constant}").is_ok() {
        return text;
    }
    format!("an array of shape {:?}", constant.shape()) // or one that cannot be evaluated
}
