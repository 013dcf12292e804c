//! The array slots of an mlx-rs module: their names, their roles in a step, and their values.
use std::{
    cmp::Ordering,
    collections::{BTreeMap, HashMap, HashSet},
    rc::Rc,
};

use mlx_rs::{module::ModuleParameters, Array};

use crate::{layout::Tensor, mlx::array, trace::Role};

/// The array slots of a module.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Slots {
    /// The names of the trainable parameters, in the order of their indices.
    pub(crate) parameters: Vec<Rc<str>>,
    /// The names of all other arrays.
    pub(crate) others: Vec<Rc<str>>,
    tensors: Vec<Tensor>, // of the parameters
    roles: HashMap<Rc<str>, Role>,
}

/// The slots of a module, and their values.
pub(crate) struct ModuleArrays {
    pub(crate) slots: Slots,
    pub(crate) parameters: Vec<Array>,
    pub(crate) others: Vec<Array>,
}

impl ModuleArrays {
    /// List the arrays of a module.
    pub(crate) fn of(model: &impl ModuleParameters) -> Self {
        let trainable: HashSet<Rc<str>> =
            model.trainable_parameters().flatten().into_keys().collect();
        let all = model.parameters().flatten();
        let mut all: Vec<(Rc<str>, &Array)> = all.into_iter().collect();
        all.sort_by(|(a, _), (b, _)| by_number(a, b));
        let mut slots = Slots::default();
        let (mut parameters, mut others) = (Vec::new(), Vec::new());
        for (name, array) in all {
            let (names, arrays, role): (_, _, fn(usize) -> Role) =
                if trainable.contains(&name) && !is_statistic(&name) {
                    slots.tensors.push(Tensor::of(array));
                    (&mut slots.parameters, &mut parameters, Role::Parameter)
                } else {
                    (&mut slots.others, &mut others, Role::Other)
                };
            slots.roles.insert(name.clone(), role(names.len()));
            names.push(name);
            arrays.push(array.clone());
        }
        Self {
            slots,
            parameters,
            others,
        }
    }

    /// Other values for all arrays, of the same shapes; an error says which name or shape is not as expected.
    pub(crate) fn replace(&mut self, mut values: BTreeMap<String, Array>) -> Result<(), String> {
        let names = self.slots.parameters.iter().chain(&self.slots.others);
        let arrays = self.parameters.iter_mut().chain(&mut self.others);
        for (name, array) in names.zip(arrays) {
            let value = values.remove(&**name);
            let value =
                value.ok_or_else(|| format!("model: expected an array {name}, got none"))?;
            if value.shape() != array.shape() {
                let (expected, got) = (array.shape(), value.shape());
                return Err(format!("model: {name}: expected {expected:?}, got {got:?}"));
            }
            *array = value;
        }
        self.slots.tensors = self.parameters.iter().map(Tensor::of).collect();
        match values.keys().next() {
            Some(name) => Err(format!(
                "model: expected the arrays of the module, got {name} beside them"
            )),
            None => Ok(()),
        }
    }
}

// running statistics of BatchNorm: frozen in MLX's Python, trainable in mlx-rs
fn is_statistic(name: &str) -> bool {
    let last = name.rsplit('.').next();
    matches!(last, Some("running_mean" | "running_var"))
}

// numeric order: layers.9 before layers.10, as in MLX's Python
fn by_number(a: &str, b: &str) -> Ordering {
    let parts = a.split('.').zip(b.split('.'));
    let order = parts.map(|(a, b)| match (a.parse::<usize>(), b.parse::<usize>()) {
        (Ok(a), Ok(b)) => a.cmp(&b),
        _ => a.cmp(b),
    });
    order
        .fold(Ordering::Equal, Ordering::then)
        .then_with(|| a.cmp(b))
}

impl Slots {
    /// Shapes and dtypes of the trainable parameters.
    pub(crate) fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The role of the array of that name.
    pub(crate) fn role(&self, name: &str) -> Option<Role> {
        self.roles.get(name).copied()
    }

    /// The number of all arrays.
    pub(crate) fn len(&self) -> usize {
        self.roles.len()
    }

    /// Put arrays into a module: `array` gives that of a role.
    pub(crate) fn fill(
        &self,
        model: &mut impl ModuleParameters,
        mut array: impl FnMut(Role) -> Option<Array>,
    ) {
        for (name, slot) in model.parameters_mut().flatten() {
            if let Some(value) = self.roles.get(&name).and_then(|role| array(*role)) {
                *slot = value;
            }
        }
    }

    /// Let a module go of its arrays.
    pub(crate) fn hide(&self, model: &mut impl ModuleParameters) {
        let hollow = array::hollow();
        self.fill(model, |_| Some(hollow.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::by_number;

    #[test]
    fn names_are_in_the_order_of_their_numbers() {
        let mut names = [
            "layers.10.bias",
            "head.bias",
            "layers.9.weight",
            "layers.9.bias",
            "layers",
        ];
        names.sort_by(|a, b| by_number(a, b));
        let sorted = [
            "head.bias",
            "layers",
            "layers.9.bias",
            "layers.9.weight",
            "layers.10.bias",
        ];
        assert_eq!(names, sorted);
    }
}
