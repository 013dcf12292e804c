//! `mlx.optimizers.Muon`: matrices by a momentum of which only the directions stay.
use mlx_rs::{
    error::Result,
    linalg::{norm_l2, NormOptions},
    ops::addmm,
    Array, Axes,
};

use super::{
    rule::{averaged, fields, like, shares, Given, Moment, Rule, Updated},
    Optimizer,
};
use crate::mlx::join::paced;

/// The coefficients of one Newton-Schulz iteration: Jordan et al., Muon (2024), <https://kellerjordan.github.io/posts/muon/>.
const NEWTON_SCHULZ: (f64, f64, f32) = (3.4445, -4.7750, 2.0315);
/// Added to the norm that a matrix is divided by.
const EPS: f64 = 1e-7;

fields! {
    /// Orthogonalised momentum.
    Muon {
        /// The momentum strength.
        momentum: f64 = 0.95,
        /// The L2 penalty.
        weight_decay: f64 = 0.01,
        /// Nesterov momentum.
        nesterov: bool = true,
        /// The number of Newton-Schulz iterations.
        ns_steps: usize = 5,
    }
}

impl Optimizer {
    /// [`Muon`] with its defaults.
    #[must_use]
    pub fn muon() -> Self {
        Self::Muon(Muon::default())
    }
}

impl Rule for Muon {
    fn moments(&self, shape: &[i32]) -> Vec<Moment> {
        like(shape, &["v"])
    }

    fn is_elementwise(&self, shape: &[i32]) -> bool {
        shape.len() < 2
    }

    fn moves_by_rate(&self) -> bool {
        true
    }

    fn numbers(&self) -> Vec<f64> {
        [&shares(self.momentum)[..], &[self.weight_decay]].concat()
    }

    // v = momentum v + (1 - momentum) g;  u = v, or (1 - momentum) g + momentum v with Nesterov;  w = w - lr u
    // of a matrix u is brought near the closest orthogonal one, and lr multiplied by max(1, rows / columns)^0.5
    fn update(&self, given: &Given) -> Updated {
        let [old] = given.moments()?;
        let [momentum, rest, decay] = given.numbers(self)?;
        let mut gradient = given.gradient.clone();
        if self.weight_decay != 0.0 {
            gradient = gradient.add(decay.multiply(given.parameter)?)?;
        }
        let v = given.moment(averaged([&momentum, &rest], old, &gradient)?, old)?;
        let mut update = if self.nesterov {
            gradient.multiply(rest)?.add(v.multiply(momentum)?)?
        } else {
            v.clone()
        };
        let mut rate = given.rate()?.clone();
        let first = usize::from(given.stacked);
        if let [.., rows, columns] = update.shape()[first..] {
            update = self.orthogonal(given, &update, first)?;
            let ratio = f64::from(rows) / f64::from(columns);
            rate = rate.multiply(given.number(ratio.max(1.0).sqrt()))?;
        }
        let parameter = given.parameter.subtract(rate.multiply(update)?)?;
        given.updated(parameter, vec![v])
    }
}

impl Muon {
    // flatten all axes but the first into columns
    fn orthogonal(&self, given: &Given, update: &Array, first: usize) -> Result<Array> {
        let shape = update.shape();
        if update.size() == 0 {
            return Ok(update.clone()); // it has no norm, and MLX infers no shape of nothing
        }
        let flat = update.reshape(&[&shape[..=first], &[-1]].concat())?;
        self.newton_schulz(given, &flat)?.reshape(shape)
    }

    // X / |X|, then X = a X + (b A + c A^2) X with A = X X^T, of the wide one of matrix and transpose
    fn newton_schulz(&self, given: &Given, matrix: &Array) -> Result<Array> {
        let (a, b, c) = NEWTON_SCHULZ;
        let (a, b) = (given.number(a), given.number(b));
        let tall = matches!(matrix.shape(), [.., rows, columns] if rows > columns);
        let turn = |x: &Array| {
            if tall {
                x.swap_axes(-1, -2)
            } else {
                Ok(x.clone())
            }
        };
        let mut x = turn(matrix)?;
        x = paced(&x.divide(norm(&x)?.add(given.number(EPS))?)?)?;
        for _ in 0..self.ns_steps {
            let product = paced(&x.matmul(x.swap_axes(-1, -2)?)?)?;
            let both = paced(&addmm(b.multiply(&product)?, &product, &product, c, 1.0)?)?;
            x = paced(&addmm(a.multiply(&x)?, both, &x, 1.0, 1.0)?)?;
        }
        turn(&x)
    }
}

// the norm of each matrix over its flattened elements, summed in MLX's order
fn norm(matrices: &Array) -> Result<Array> {
    let [lead @ .., _, _] = matrices.shape() else {
        return norm_l2(matrices, NormOptions::default());
    };
    let options = NormOptions {
        axes: Axes::Axis(-1),
        keep_dims: true,
    };
    let norm = norm_l2(matrices.reshape(&[lead, &[-1]].concat())?, options)?;
    norm.expand_dims(-1)
}
