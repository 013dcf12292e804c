//! The element types of activations.
use half::{bf16, f16, slice::HalfFloatSliceExt};

/// The element type of activations.
pub trait Element: Copy + Send + Sync + 'static {
    fn to_f32(self) -> f32;
    fn widen(from: &[Self], to: &mut [f32]);
    fn narrow(from: &[f32], to: &mut [Self]);
}

impl Element for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn widen(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
}

macro_rules! half {
    ($type:ty) => {
        impl Element for $type {
            fn to_f32(self) -> f32 {
                self.to_f32()
            }
            fn widen(from: &[Self], to: &mut [f32]) {
                from.convert_to_f32_slice(to);
            }
            fn narrow(from: &[f32], to: &mut [Self]) {
                to.convert_from_f32_slice(from);
            }
        }
    };
}

half!(f16);
half!(bf16);
