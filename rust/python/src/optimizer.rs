//! What a Python optimizer is: a rule that the engine has, or one to be traced; its schedules.
use faststep::optimizer::Optimizer as Rule;
use pyo3::{
    exceptions::PyTypeError,
    intern,
    prelude::*,
    types::{PyDict, PyFloat, PyFunction, PyInt, PyList, PyTuple},
};

use crate::bridge;

/// The engine's rule for an optimizer of exactly one of MLX's elementwise classes; `None` for every other.
pub fn native_rule(optimizer: &Bound<'_, PyAny>) -> Option<Rule> {
    let class = optimizer.get_type();
    if class.module().ok()?.to_str().ok()? != "mlx.optimizers.optimizers" {
        return None;
    }
    let number = |name: &str| {
        let value = optimizer.getattr(name).ok()?;
        let plain = value.is_instance_of::<PyFloat>() || value.is_instance_of::<PyInt>();
        plain.then(|| value.extract::<f64>().ok()).flatten()
    };
    let flag = |name: &str| optimizer.getattr(name).ok()?.extract::<bool>().ok();
    let betas = || -> Option<(f64, f64)> {
        let betas: [f64; 2] = optimizer.getattr("betas").ok()?.extract().ok()?;
        Some((betas[0], betas[1]))
    };
    let adam = |weight_decay| {
        Some(Rule::Adam {
            betas: betas()?,
            eps: number("eps")?,
            bias_correction: flag("bias_correction")?,
            weight_decay,
        })
    };
    let only_rate_scheduled = schedulers(optimizer)
        .ok()?
        .iter()
        .all(|(name, _)| name == "learning_rate");
    if !only_rate_scheduled {
        return None;
    }
    match class.name().ok()?.to_str().ok()? {
        "SGD" => Some(Rule::Sgd {
            momentum: number("momentum")?,
            weight_decay: number("weight_decay")?,
            dampening: number("dampening")?,
            nesterov: flag("nesterov")?,
        }),
        "Adam" => adam(None),
        "AdamW" => adam(Some(number("weight_decay")?)),
        "Adamax" => Some(Rule::Adamax {
            betas: betas()?,
            eps: number("eps")?,
        }),
        "Lion" => Some(Rule::Lion {
            betas: betas()?,
            weight_decay: number("weight_decay")?,
        }),
        "RMSprop" => Some(Rule::RmsProp {
            alpha: number("alpha")?,
            eps: number("eps")?,
        }),
        "Adagrad" => Some(Rule::Adagrad {
            eps: number("eps")?,
        }),
        "AdaDelta" => Some(Rule::AdaDelta {
            rho: number("rho")?,
            eps: number("eps")?,
        }),
        _ => None,
    }
}

/// The optimizer and, of a `MultiOptimizer`, those in it.
pub fn members<'py>(optimizer: &Bound<'py, PyAny>) -> Vec<Bound<'py, PyAny>> {
    let mut all = vec![optimizer.clone()];
    if let Ok(Some(children)) = optimizer.getattr_opt(intern!(optimizer.py(), "optimizers")) {
        if let Ok(children) = children.cast::<PyList>() {
            all.extend(children.iter().flat_map(|child| members(&child)));
        }
    }
    all
}

fn schedulers<'py>(optimizer: &Bound<'py, PyAny>) -> PyResult<Vec<(String, Bound<'py, PyAny>)>> {
    let schedulers = optimizer.getattr(intern!(optimizer.py(), "_schedulers"))?;
    let schedulers = schedulers.cast::<PyDict>()?;
    let pairs = schedulers
        .iter()
        .map(|(name, schedule)| Ok((name.extract()?, schedule)));
    pairs.collect()
}

// MLX's own schedules are functions of arrays, whatever they join has to be one too
fn is_traceable(schedule: &Bound<'_, PyAny>) -> bool {
    let module = schedule
        .getattr("__module__")
        .and_then(|m| m.extract::<String>());
    if !matches!(module.as_deref(), Ok("mlx.optimizers.schedulers")) {
        return false;
    }
    let Ok(closure) = schedule.getattr("__closure__") else {
        return false;
    };
    let Ok(closure) = closure.cast::<PyTuple>() else {
        return true;
    };
    closure.iter().all(|cell| {
        let Ok(content) = cell.getattr("cell_contents") else {
            return false;
        };
        let Ok(list) = content.cast::<PyList>() else {
            return !content.is_instance_of::<PyFunction>() && !content.is_callable();
        };
        list.iter()
            .all(|item| !item.is_callable() || is_traceable(&item))
    })
}

/// The learning rate's schedule, where it can be computed on the device.
pub fn traceable_rate<'py>(optimizer: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    let all = schedulers(optimizer).ok()?;
    let rate = all.into_iter().find(|(name, _)| name == "learning_rate");
    rate.map(|(_, schedule)| schedule).filter(is_traceable)
}

fn state<'py>(optimizer: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    let state = optimizer.getattr(intern!(optimizer.py(), "_state"))?;
    Ok(state.cast_into()?)
}

/// Schedules that are called on the host, and what they replaced in the optimizer's state.
pub struct HostSchedules<'py> {
    found: Vec<(Bound<'py, PyAny>, String, Bound<'py, PyAny>)>, // optimizer, name, schedule
    old: Vec<Option<Bound<'py, PyAny>>>, // the value of each, as far as they have been called
}

impl<'py> HostSchedules<'py> {
    /// Find them.
    pub fn of(optimizer: &Bound<'py, PyAny>) -> Self {
        let mut found = Vec::new();
        for member in members(optimizer) {
            for (name, schedule) in schedulers(&member).unwrap_or_default() {
                if !is_traceable(&schedule) {
                    found.push((member.clone(), name, schedule));
                }
            }
        }
        Self {
            found,
            old: Vec::new(),
        }
    }

    /// Call each with the number of updates so far, and put the value where the optimizer looks for it.
    pub fn call(&mut self) -> PyResult<()> {
        for (optimizer, name, schedule) in &self.found {
            let state = state(optimizer)?;
            let value = schedule.call1((state.get_item("step")?,))?;
            if !bridge::is_array(&value) {
                return Err(PyTypeError::new_err(format!(
                    "the schedule of {name}: expected mx.array, got {}: return mx.array(...)",
                    value.get_type().fully_qualified_name()?
                )));
            }
            self.old.push(state.get_item(name)?);
            state.set_item(name, value)?;
        }
        Ok(())
    }

    /// Put back what `call` replaced.
    pub fn undo(self) -> PyResult<()> {
        for ((optimizer, name, _), old) in self.found.into_iter().zip(self.old) {
            match old {
                Some(old) => state(&optimizer)?.set_item(name, old)?,
                None => state(&optimizer)?.del_item(name)?,
            }
        }
        Ok(())
    }

    /// While the optimizer is traced: each schedule gives the value that `call` put into the state.
    pub fn hold(&self) -> PyResult<()> {
        for (optimizer, name, _) in &self.found {
            let schedulers = optimizer.getattr(intern!(optimizer.py(), "_schedulers"))?;
            let value = state(optimizer)?.as_any().get_item(name)?.unbind();
            let held = pyo3::types::PyCFunction::new_closure(
                optimizer.py(),
                None,
                None,
                move |args: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| {
                    value.clone_ref(args.py())
                },
            )?;
            schedulers.set_item(name, held)?;
        }
        Ok(())
    }
}
