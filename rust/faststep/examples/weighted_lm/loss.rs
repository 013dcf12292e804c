//! The weighted loss: sequences of good authority and certain provenance count for more.
//!
//! With the mean cross entropy `c_i` of sequence `i`, in nats a byte, the authority `a_i > 0` of its source, and the entropy
//! `H_i` of its provenance, in bits:
//!
//! ```text
//! w_i = a_i / 2 ** H_i                  loss = sum(w_i * c_i) / sum(w_i)
//! ```
//!
//! `2 ** H` is the perplexity of the provenance: of how many origins, were they equally likely, it leaves the choice (Jelinek,
//! Mercer, Bahl, Baker, 1977). So a sequence whose authority might be that of any of four origins counts a quarter. The
//! division by the sum leaves a weighted mean: another unit for authority, or one more bit for all, changes nothing.
use mlx_rs::{error::Exception, losses::CrossEntropy, ops::indexing::IndexOp, Array};

use crate::model::{Decoder, Projection};

/// The loss of a batch: `input_ids` int32 `[batch, seq]`, `auth_weights` float32 `[batch]`, `prov_entropies` float32
/// `[batch]`, in bits. Each byte but the first of a sequence is predicted from those before it.
pub fn weighted_loss<P: Projection>(
    model: &mut Decoder<P>,
    batch: &[Array],
) -> Result<Array, Exception> {
    let [input_ids, auth_weights, prov_entropies] = batch else {
        return Err(Exception::custom(format!(
            "expected input_ids, auth_weights and prov_entropies, got {} arrays",
            batch.len()
        )));
    };
    let logits = model.forward(&input_ids.index((.., ..-1)))?;
    let losses = CrossEntropy::new()?.apply(logits, input_ids.index((.., 1..)))?; // [batch, seq - 1]
    weighted_mean(&losses.mean_axis(1, None)?, auth_weights, prov_entropies)
}

fn weighted_mean(
    losses: &Array,
    auth_weights: &Array,
    prov_entropies: &Array,
) -> Result<Array, Exception> {
    let weights = auth_weights.divide(Array::from_f32(2.0).power(prov_entropies)?)?;
    let sum = weights.multiply(losses)?.sum(None)?;
    sum.divide(weights.sum(None)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mlx_rs::Array;

    use super::weighted_mean;

    fn mean(losses: [f32; 2], authorities: [f32; 2], entropies: [f32; 2]) -> f32 {
        let [losses, authorities, entropies] =
            [losses, authorities, entropies].map(|values| Array::from_slice(&values, &[2]));
        let mean = weighted_mean(&losses, &authorities, &entropies).unwrap();
        mean.item_exact::<f32>()
    }

    fn close(got: f32, wanted: f32) -> bool {
        (got - wanted).abs() < 1e-6
    }

    #[test]
    fn equal_weights_give_the_mean() {
        assert!(close(mean([1.0, 3.0], [0.5, 0.5], [4.5, 4.5]), 2.0));
    }

    #[test]
    fn authority_weighs_in_proportion_and_a_bit_of_entropy_halves() {
        assert!(close(mean([1.0, 3.0], [0.75, 0.25], [4.0, 4.0]), 1.5));
        assert!(close(mean([1.0, 3.0], [0.5, 0.5], [6.0, 4.0]), 2.6)); // 1/4 to 1
        assert!(close(mean([1.0, 3.0], [1.0, 0.25], [2.0, 0.0]), 2.0)); // 4 origins of authority 1 or one of 1/4
    }
}
