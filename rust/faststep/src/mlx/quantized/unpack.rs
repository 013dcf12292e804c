//! Packed weights as numbers of float32: the formats of `mlx.core.quantize`.
#![allow(unsafe_code)] // to call it
#![allow(clippy::inline_always)] // into the function that is compiled for more of the processor
use std::sync::LazyLock;

use half::f16;

use super::element::Element;

/// The scaling of groups of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Unsigned numbers, by a scale and a bias of the dtype of the activations.
    Affine,
    /// Small floating-point numbers, by a scale in one byte: `mxfp4`, `mxfp8`, `nvfp4`.
    Float,
}

/// A format that is known here.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    mode: Mode,
    bits: usize,
    group: usize,
}

impl Format {
    pub fn new(mode: Mode, bits: usize, group: usize) -> Option<Self> {
        let known = match mode {
            Mode::Affine => matches!(bits, 2..=6 | 8) && group.is_multiple_of(8),
            Mode::Float => matches!((bits, group), (4, 16 | 32) | (8, 32)),
        };
        known.then_some(Self { mode, bits, group })
    }

    pub fn mode(self) -> Mode {
        self.mode
    }
}

/// Scales of the groups.
pub enum Scales<'a, T> {
    /// Scales and biases.
    Affine(&'a [T], &'a [T]),
    /// Scales in a byte.
    Float(&'a [u8]),
}

/// Weights in packed form, row after row.
pub struct Packed<'a, T> {
    format: Format,
    bytes: &'a [u8],
    scales: Scales<'a, T>,
}

const FP4: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

// E4M3 as MLX reads it: its bits as those of a float16, with another bias
static FP8: LazyLock<[f32; 256]> = LazyLock::new(|| {
    std::array::from_fn(|at| {
        let at = u16::try_from(at).unwrap_or(0);
        let value = at & 127;
        let bits = (value << 7) | (((value + 1) >> 7) << 14) | ((at >> 7) << 15);
        f16::from_bits(bits).to_f32() * 256.0
    })
});

// 2^exponent
fn e8m0(exponent: u8) -> f32 {
    let bits = if exponent == 0 {
        0x40
    } else {
        u32::from(exponent) << 7
    };
    f32::from_bits(bits << 16)
}

impl<'a, T: Element> Packed<'a, T> {
    pub fn new(format: Format, bytes: &'a [u8], scales: Scales<'a, T>) -> Self {
        Self {
            format,
            bytes,
            scales,
        }
    }

    /// The numbers from `begin` on, which begins a group; as many as fit.
    pub fn unpack(&self, begin: usize, out: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has what the function is compiled for.
            return unsafe { self.unpack_by_avx2(begin, out) };
        }
        self.unpack_anywhere(begin, out);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn unpack_by_avx2(&self, begin: usize, out: &mut [f32]) {
        self.unpack_anywhere(begin, out);
    }

    #[inline(always)]
    fn unpack_anywhere(&self, begin: usize, out: &mut [f32]) {
        let Format { bits, group, .. } = self.format;
        let bytes = &self.bytes[begin * bits / 8..];
        let first = begin / group;
        match &self.scales {
            Scales::Affine(scales, biases) => {
                let groups = scales[first..].iter().zip(&biases[first..]);
                let packed = bytes.chunks_exact(group * bits / 8);
                for (out, (packed, (scale, bias))) in
                    out.chunks_exact_mut(group).zip(packed.zip(groups))
                {
                    affine(bits, packed, scale.to_f32(), bias.to_f32(), out);
                }
            }
            Scales::Float(scales) => {
                let packed = bytes.chunks_exact(group * bits / 8);
                let fp8: &[f32; 256] = &FP8;
                for (out, (packed, &scale)) in out
                    .chunks_exact_mut(group)
                    .zip(packed.zip(&scales[first..]))
                {
                    let scale = if group == 16 {
                        fp8[usize::from(scale)]
                    } else {
                        e8m0(scale)
                    };
                    float(if bits == 8 { Some(fp8) } else { None }, packed, scale, out);
                }
            }
        }
    }
}

#[inline(always)]
fn affine(width: usize, packed: &[u8], scale: f32, bias: f32, out: &mut [f32]) {
    match width {
        2 => by_eight::<2>(packed, scale, bias, out),
        3 => by_eight::<3>(packed, scale, bias, out),
        4 => by_eight::<4>(packed, scale, bias, out),
        5 => by_eight::<5>(packed, scale, bias, out),
        6 => by_eight::<6>(packed, scale, bias, out),
        _ => {
            for (out, &value) in out.iter_mut().zip(packed) {
                *out = scale * f32::from(value) + bias;
            }
        }
    }
}

// 8 numbers of n bits are packed into n bytes, lowest bits first
#[inline(always)]
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap
)] // numbers of 6 bits
fn by_eight<const BITS: usize>(packed: &[u8], scale: f32, bias: f32, out: &mut [f32]) {
    for (out, packed) in out.chunks_exact_mut(8).zip(packed.chunks_exact(BITS)) {
        let mut word = [0; 8];
        word[..BITS].copy_from_slice(packed);
        let word = u64::from_le_bytes(word);
        let halves = [word as u32, (word >> (4 * BITS)) as u32]; // vectors have shifts of 32 bits
        for (out, half) in out.chunks_exact_mut(4).zip(halves) {
            for (at, out) in out.iter_mut().enumerate() {
                let value = (half >> (at * BITS)) & ((1 << BITS) - 1);
                *out = scale * (value as i32 as f32) + bias;
            }
        }
    }
}

#[inline(always)]
fn float(fp8: Option<&[f32; 256]>, packed: &[u8], scale: f32, out: &mut [f32]) {
    if let Some(fp8) = fp8 {
        for (out, &value) in out.iter_mut().zip(packed) {
            *out = scale * fp8[usize::from(value)];
        }
        return;
    }
    for (out, &value) in out.chunks_exact_mut(2).zip(packed) {
        out[0] = scale * FP4[usize::from(value & 15)];
        out[1] = scale * FP4[usize::from(value >> 4)];
    }
}
