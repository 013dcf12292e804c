//! Numbers of optimizers' options in this process: where they have been others a few times for one form of an update, a new optimizer
//! has them as inputs of its trace, and compiles no kernels of its own.
use std::sync::{LazyLock, Mutex, PoisonError};

use faststep::engine::{Rules, Tensor};

/// So many changes of an optimizer's numbers, after which they are inputs of its trace.
pub(super) const MANY_VALUES: usize = 2;

/// The most forms that are kept; the one used least recently goes first.
const MAX_FORMS: usize = 32;

struct Form {
    rules: Rules,
    tensors: Vec<Tensor>,
    values: Vec<Vec<u64>>, // the bits of each set of numbers that are constants
}

static FORMS: LazyLock<Mutex<Vec<Form>>> = LazyLock::new(Mutex::default); // most recent last

/// Return whether the numbers of a new optimizer are new too, and there have been many others for tensors like these.
pub(super) fn have_varied(rules: &Rules, tensors: &[Tensor]) -> bool {
    let values: Vec<u64> = rules.numbers().iter().map(|it| it.to_bits()).collect();
    if values.is_empty() {
        return false;
    }
    let rules = rules.clone().with_numbers_taken();
    let mut forms = FORMS.lock().unwrap_or_else(PoisonError::into_inner);
    let at = forms
        .iter()
        .position(|form| form.rules == rules && form.tensors == tensors);
    let mut form = match at {
        Some(at) => forms.remove(at),
        None => Form {
            rules,
            tensors: tensors.to_vec(),
            values: Vec::new(),
        },
    };
    let is_known = form.values.contains(&values);
    let varied = !is_known && form.values.len() >= MANY_VALUES;
    if !is_known && !varied {
        form.values.push(values);
    }
    if forms.len() == MAX_FORMS {
        forms.remove(0);
    }
    forms.push(form);
    varied
}
