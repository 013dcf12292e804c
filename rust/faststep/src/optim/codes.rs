//! Moments of Adam in 8 bits, and float32 rounded to bfloat16 by chance.
//!
//! A moment is a matrix of codes with one block of neighbouring elements in each row, and a column with a float32 scale for each
//! block: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022). The code of a first moment is its signed fourth root
//! over the scale, that of a second moment its eighth root: steps are nearly logarithmic, over 8 and 19 decades below the block's
//! largest, and neither logarithms nor tables are needed. A second moment that is not zero has a code that is not zero.
//!
//! Both round up or down by chance, so that a running average follows changes that are smaller than a step of its code. The
//! numbers behind that are drawn from the number of the update: whoever goes on from it draws the same.
use mlx_rs::{error::Result, ops, random::uniform, Array, Dtype};

use super::optimizer::{Given, Moment, Optimizer, Updated};
use crate::{
    layout::Tensor,
    mlx::{array, join::paced, ops::choose},
};

/// Tensors of fewer elements keep their moments as they are.
const FEWEST: usize = 4096;
/// The sizes of a block, of which the first that divides a tensor's size is its own.
const BLOCKS: [i32; 3] = [256, 128, 64];
/// The largest codes of a first and of a second moment.
const LARGEST: [f32; 2] = [127.0, 255.0];
/// The random stream of a step's draws, unlike that of any seed below 2^61.
const STREAM: u32 = 0xF57E_0000;

/// The size of the blocks of a tensor with so many elements; `None`: its moments are not coded.
#[must_use]
pub fn block(size: usize) -> Option<i32> {
    let divides =
        |block: &i32| usize::try_from(*block).is_ok_and(|block| size.is_multiple_of(block));
    BLOCKS.into_iter().find(divides).filter(|_| size >= FEWEST)
}

/// The arrays of Adam's coded moments for a tensor of so many elements, in blocks of this size.
pub(super) fn moments(size: usize, block: i32) -> Vec<Moment> {
    let rows = i32::try_from(size).unwrap_or(i32::MAX) / block;
    let moment = |(name, (columns, dtype))| Moment {
        name,
        shape: vec![rows, columns],
        dtype: Some(dtype),
    };
    let scales = (1, Dtype::Float32);
    let forms = [(block, Dtype::Int8), scales, (block, Dtype::Uint8), scales];
    CODED.into_iter().zip(forms).map(moment).collect()
}

/// The names of moments in `optimizer.state`.
pub const PLAIN: [&str; 2] = ["m", "v"];
/// The names of their codes and scales.
pub const CODED: [&str; 4] = ["m_codes", "m_scales", "v_codes", "v_scales"];

/// The codes of moments, or the moments of codes (lazily), with the shapes and dtypes that are expected; `None` where what is found is
/// neither, or has another size.
///
/// # Errors
/// When MLX refuses an operation.
pub fn recoded(found: &[Array], expected: &[Tensor]) -> Result<Option<Vec<Array>>> {
    let fits = found.first().map(Array::size) == expected.first().map(Tensor::size);
    let made = match (
        <&[Array; 2]>::try_from(found),
        <&[Array; 4]>::try_from(found),
    ) {
        _ if !fits => return Ok(None),
        (Ok(moments), _) if moments.iter().all(array::is_zero) => {
            let zeros = expected.iter();
            let zeros = zeros.map(|tensor| ops::zeros_dtype(&tensor.shape, tensor.dtype));
            return zeros.collect::<Result<_>>().map(Some);
        }
        (Ok(moments), _) if expected.len() == CODED.len() => {
            let wide = |at: usize| {
                let moment = moments[at].as_dtype(Dtype::Float32)?;
                moment.reshape(&expected[0].shape)
            };
            let nearest = Array::from_f32(0.5);
            encode([&wide(0)?, &wide(1)?], [&nearest, &nearest], None)?.to_vec()
        }
        (_, Ok(codes)) if expected.len() == PLAIN.len() => decode(codes)?.to_vec(),
        _ => return Ok(None),
    };
    let made = made.into_iter().zip(expected);
    let made = made.map(|(array, tensor)| array.reshape(&tensor.shape)?.as_dtype(tensor.dtype));
    made.collect::<Result<_>>().map(Some)
}

/// The moments `m` and `v` for these codes and scales, in float32 and of the codes' shape.
///
/// # Errors
/// When MLX refuses an operation.
pub fn decode([m_codes, m_scales, v_codes, v_scales]: &[Array; 4]) -> Result<[Array; 2]> {
    let root = m_codes.as_dtype(Dtype::Float32)?.multiply(m_scales)?;
    let m = root.multiply(root.abs()?)?.multiply(root.square()?)?;
    let root = v_codes.as_dtype(Dtype::Float32)?.multiply(v_scales)?;
    Ok([m, root.square()?.square()?.square()?])
}

/// Codes that stay as they are where the update is not taken.
type Kept<'a> = Option<(&'a Array, &'a [Array; 4])>;

// The codes and scales of the moments, matrices of blocks in float32. `noise`: arrays from 0 to below 1 that broadcast to them; 0.5
// rounds to about the nearest.
fn encode([m, v]: [&Array; 2], noise: [&Array; 2], kept: Kept) -> Result<[Array; 4]> {
    // barriers: a kernel that reads the numbers of a block beside its elements has no vectors, and is kept short
    let roots = [m.abs()?.sqrt()?.sqrt()?, v.sqrt()?.sqrt()?.sqrt()?];
    let [first, second] = [stored(&roots[0])?, stored(&roots[1])?];
    let (m_scales, v_scales) = (scales(&first, LARGEST[0])?, scales(&second, LARGEST[1])?);
    let first = first.multiply(inverse(&m_scales)?)?;
    let first = ops::minimum(first, Array::from_f32(LARGEST[0]))?.multiply(ops::sign(m)?)?;
    let second = ops::maximum(second.multiply(inverse(&v_scales)?)?, ops::sign(&second)?)?;
    let second = ops::minimum(second, Array::from_f32(LARGEST[1]))?;
    // kept codes go through the rounding, which leaves whole numbers alone: a choice among bytes would cost the next kernel its vectors
    let keep = |new: &Array, at: usize| match kept {
        Some((take, old)) => ops::select(take, new, old[at].as_dtype(Dtype::Float32)?),
        None => Ok(new.clone()),
    };
    let (first, second) = (stored(&keep(&first, 0)?)?, stored(&keep(&second, 2)?)?);
    let codes = rounded(&first.abs()?, noise[0], &|x| x.square()?.square())?;
    let m_codes = codes.multiply(ops::sign(&first)?)?.as_dtype(Dtype::Int8)?;
    let codes = rounded(&second, noise[1], &|x| x.square()?.square()?.square())?;
    let v_codes = codes.as_dtype(Dtype::Uint8)?;
    Ok([m_codes, keep(&m_scales, 1)?, v_codes, keep(&v_scales, 3)?])
}

// an array that no kernel computes together with those that read it
fn stored(array: &Array) -> Result<Array> {
    paced(&array.contiguous()?)
}

// the largest root of each block over the largest code; first over lanes of sixteen, which takes a third of the time
fn scales(roots: &Array, largest: f32) -> Result<Array> {
    let lanes = roots.reshape(&[roots.shape()[0], -1, 16])?;
    let bound = lanes.max_axis(1, false)?.max_axis(-1, true)?;
    bound.divide(Array::from_f32(largest))?.contiguous()
}

fn inverse(scales: &Array) -> Result<Array> {
    let zero = Array::from_f32(0.0);
    ops::select(scales.gt(&zero)?, scales.reciprocal()?, &zero)?.contiguous()
}

// Whole numbers beside the roots: the larger one by chance, so that the mean of its power is that of the root.
fn rounded(roots: &Array, noise: &Array, power: &dyn Fn(&Array) -> Result<Array>) -> Result<Array> {
    let below = roots.floor()?;
    let above = below.add(Array::from_f32(1.0))?;
    let base = power(&below)?;
    let gap = power(&above)?.subtract(&base)?;
    let is_above = noise.multiply(gap)?.lt(power(roots)?.subtract(base)?)?;
    ops::select(is_above, above, below)
}

/// An update in float32 whose results are stored as codes, where there are codes, and in bfloat16 by chance, where the parameter is in
/// bfloat16 and `stochastic`. `buffer`: its number.
pub(super) fn update(rule: &Optimizer, given: &Given, stochastic: bool, buffer: usize) -> Updated {
    let coded = <&[Array; 4]>::try_from(given.moments).ok();
    let dtype = given.parameter.dtype();
    let shape = coded.map_or(given.parameter.shape(), |[codes, ..]| codes.shape());
    let wide = |array: &Array| array.reshape(shape)?.as_dtype(Dtype::Float32);
    let moments = match coded {
        Some(coded) => decode(coded)?.to_vec(),
        None => given.moments.iter().map(wide).collect::<Result<_>>()?,
    };
    let (parameter, moments) = rule.update(&Given {
        gradient: &wide(given.gradient)?,
        parameter: &wide(given.parameter)?,
        moments: &moments,
        rate: given.rate.clone(),
        take: None,
        ..*given
    })?;
    let [m, v] = &moments[..] else {
        return Err(given.refuse_moments(2));
    };
    let [m, v] = &[paced(m)?, paced(v)?];
    let noise = noise(given.step, buffer, shape)?;
    let other = noise[0].multiply(Array::from_f32(256.0))?; // its last 15 bits are independent of the first ones
    let other = other.subtract(other.floor()?)?;
    let moments: Vec<Array> = if let Some(old) = coded {
        let kept = given.take.map(|take| (take, old));
        encode([m, v], [&noise[0], &other], kept)?.to_vec()
    } else {
        let halves = [to_half(m, &noise[0])?, to_half(v, &other)?];
        let pairs = halves.into_iter().zip(given.moments);
        let chosen = pairs.map(|(new, old)| choose(given.take, new, old));
        chosen.collect::<Result<_>>()?
    };
    let moments = moments.iter().map(Array::contiguous);
    let moments: Vec<Array> = moments.collect::<Result<_>>()?;
    let mut parameter = if stochastic && dtype == Dtype::Bfloat16 {
        to_half(&parameter, &noise[1])?
    } else {
        parameter.as_dtype(dtype)?
    };
    for stored in moments.iter().filter(|moment| moment.shape() == shape) {
        // the parameter whatever it is: what both are made of is gone before the next buffer's turn
        let same = stored.eq(stored)?;
        parameter = ops::select(&same, &parameter, &parameter)?;
    }
    let parameter = parameter.reshape(given.parameter.shape())?;
    given.updated(parameter, moments)
}

/// Numbers from 0 to below 1 of a shape that each update draws anew, twice. Any two of an array are independent: each is the sum of a
/// number for its row and one for its column.
fn noise(update: &Array, buffer: usize, shape: &[i32]) -> Result<Vec<Array>> {
    let rows = shape.first().copied().unwrap_or(1);
    let columns: Vec<i32> = shape.get(1..).unwrap_or_default().to_vec();
    let buffer = u32::try_from(buffer).unwrap_or(u32::MAX);
    let stream = Array::from_slice(&[STREAM.wrapping_add(buffer)], &[1]);
    let update = update.as_dtype(Dtype::Uint32)?.reshape(&[1])?;
    let key = ops::concatenate(&[stream, update], 0)?;
    let drawn = 2 * rows + columns.iter().product::<i32>();
    let drawn = uniform::<f32, f32>(0.0, 1.0, &[drawn], &key)?;
    let mut parts = drawn.split_at_indices(&[rows, 2 * rows], 0)?;
    let ones = vec![1; columns.len()];
    let last = parts.pop().unwrap_or(drawn);
    let by_column = last.reshape(&[&[1], &columns[..]].concat())?;
    let by_row = parts.iter().map(|part| {
        let by_row = part.reshape(&[&[rows], &ones[..]].concat())?;
        let sum = by_row.add(&by_column)?;
        sum.subtract(sum.floor()?)?.reshape(shape)?.contiguous()
    });
    by_row.collect()
}

/// A float32 array in bfloat16, rounded up or down by chance, so that the mean is its value. `noise`: as in `encode`.
fn to_half(array: &Array, noise: &Array) -> Result<Array> {
    let half = |array: &Array| array.as_dtype(Dtype::Bfloat16)?.as_dtype(Dtype::Float32);
    let array = stored(array)?;
    let near = half(&array)?;
    let rest = array.subtract(&near)?.contiguous()?;
    // the next number away from zero, or towards it: less than 3/2 of the distance from the nearest one, and more than half of it
    let outwards = rest.multiply(ops::sign(&near)?)?.gt(Array::from_f32(0.0))?;
    let step = Array::from_f32(0.7 / 128.0);
    let factor = ops::select(
        outwards,
        Array::from_f32(1.0).add(&step)?,
        Array::from_f32(1.0).subtract(&step)?,
    )?;
    let next = half(&near.multiply(factor)?)?;
    let share = rest.divide(next.subtract(&near)?)?;
    ops::select(noise.lt(share)?, next, near)?.as_dtype(Dtype::Bfloat16)
}
