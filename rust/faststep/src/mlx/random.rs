//! The random state of a step: mlx-rs keeps one for each thread, and does not show it.
//!
//! It is found through what is drawn from it: a draw splits the state in two, and its graph, as long as it is lazy,
//! says what has been split. So a step continues the very sequence that plain mlx-rs and MLX's Python draw.
use mlx_rs::{
    error::{Exception, Result},
    random::{uniform, with_random_state, RandomState},
    Array,
};

use super::array;
use crate::error::unread;

/// The random state of this thread, which goes on from there.
pub(crate) fn current() -> Result<Array> {
    array::random_state(&probe()?)?.ok_or_else(|| Exception::custom("mlx-rs draws in another way"))
}

/// The result of `work`, which draws from `key`, and the key after its draws: `key` itself if there were none.
pub(crate) fn draw_from<T>(key: &Array, work: impl FnOnce() -> Result<T>) -> Result<(T, Array)> {
    with_random_state(RandomState::from_key(key.clone()), || {
        let value = work()?;
        Ok((value, current()?))
    })
}

/// The state that `mlx.random.seed` and `mlx_rs::random::seed` set.
pub(crate) fn seeded(seed: u64) -> Result<Array> {
    mlx_rs::random::key(seed)
}

/// The seed that gives this state; waits for it.
pub(crate) fn seed_of(state: &Array) -> Result<u64> {
    let words = state.to_vec_exact::<u32>();
    match words.map_err(unread)?[..] {
        [high, low] => Ok(u64::from(high) << 32 | u64::from(low)),
        ref other => Err(Exception::custom(format!(
            "a random state has 2 words, got {}",
            other.len()
        ))),
    }
}

fn probe() -> Result<Array> {
    uniform::<f32, f32>(0.0, 1.0, &[], None)
}
