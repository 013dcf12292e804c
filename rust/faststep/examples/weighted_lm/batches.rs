//! Batches: each a function of the seed and its number alone, so that a run goes on where it was by the number of steps.
use mlx_rs::Array;

use crate::{
    options::Run,
    text::{Source, Text},
};

/// Random sequences of the text, all positions equally likely.
pub struct Batches {
    sources: Vec<Source>,
    ends: Vec<u64>, // of each source's sequences in the line of all of them
    batch: i32,
    seq: i32,
    seed: u64,
}

// the finaliser of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014
fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

impl Batches {
    pub fn new(text: Text, run: &Run) -> Self {
        let mut total = 0;
        let ends = text.sources.iter().map(|source| {
            total += source.bytes.len() as u64 - u64::from(run.seq.unsigned_abs()) + 1;
            total
        });
        Self {
            ends: ends.collect(),
            sources: text.sources,
            batch: run.batch,
            seq: run.seq,
            seed: run.seed,
        }
    }

    /// A number that tells this text from others.
    pub fn digest(&self) -> u64 {
        let bytes = self.sources.iter().flat_map(|source| &source.bytes);
        // FNV-1a: Fowler, Noll, Vo, 1991
        bytes.fold(0xcbf2_9ce4_8422_2325, |digest, byte| {
            (digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    /// The batch of that number: `input_ids` int32 `[batch, seq]`, `auth_weights` float32 `[batch]`, `prov_entropies`
    /// float32 `[batch]`, in bits.
    pub fn batch(&self, number: u32) -> [Array; 3] {
        let mut tokens = Vec::new();
        let (mut authorities, mut entropies) = (Vec::new(), Vec::new());
        for row in 0..self.batch.unsigned_abs() {
            let draw = mix(mix(self.seed) ^ (u64::from(number) << 32 | u64::from(row)));
            let (source, sequence) = self.sequence(draw);
            tokens.extend(sequence.iter().map(|byte| i32::from(*byte)));
            authorities.push(source.authority);
            entropies.push(source.entropy);
        }
        [
            Array::from_slice(&tokens, &[self.batch, self.seq]),
            Array::from_slice(&authorities, &[self.batch]),
            Array::from_slice(&entropies, &[self.batch]),
        ]
    }

    #[allow(clippy::cast_possible_truncation)] // a position within a file that lies in memory
    fn sequence(&self, draw: u64) -> (&Source, &[u8]) {
        let position = draw % self.ends.last().copied().unwrap_or(1);
        let number = self.ends.partition_point(|end| *end <= position);
        let before = number.checked_sub(1).map_or(0, |last| self.ends[last]);
        let start = (position - before) as usize;
        let source = &self.sources[number];
        let length = self.seq.unsigned_abs() as usize;
        (source, &source.bytes[start..start + length])
    }
}
