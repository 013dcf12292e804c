//! Layouts of any mix of shapes, dtypes and rules: packing and unpacking are inverse, and no two tensors share an element.
#![allow(clippy::unwrap_used)] // how a test fails

use faststep::engine::{clip::global_norm, join::contiguous, Layout, Tensor};
use mlx_rs::{
    ops::{broadcast_to, concatenate, indexing::TryIndexOp},
    random::normal,
    transforms::eval,
    Array, Dtype,
};
use proptest::{collection::vec, prelude::*, sample::select};

/// Axes from 0 on, so that scalars and empty tensors occur; at times a tensor that is too large to share a buffer.
fn shape() -> impl Strategy<Value = Vec<i32>> {
    prop_oneof![
        8 => vec(0..5i32, 0..4),
        4 => (1..6i32).prop_map(|rows| vec![rows, 3]),
        1 => Just(vec![260, 260]),
    ]
}

fn tensor() -> impl Strategy<Value = (Vec<i32>, Dtype, usize)> {
    let dtypes = vec![Dtype::Float32, Dtype::Float16, Dtype::Bfloat16];
    (shape(), select(dtypes), 0..3usize)
}

/// Values that are exact in every dtype, and differ from tensor to tensor.
fn filled(index: usize, shape: &[i32], dtype: Dtype) -> Array {
    let size: i32 = shape.iter().product();
    let first = u16::try_from(index).unwrap();
    let values: Vec<f32> = (0..size)
        .map(|i| f32::from(first) + f32::from(i16::try_from(i % 64).unwrap()) / 64.0)
        .collect();
    Array::from_slice(&values, shape).as_dtype(dtype).unwrap()
}

fn same(a: &Array, b: &Array) -> bool {
    Tensor::of(a) == Tensor::of(b) && a.eq_values(b).unwrap()
}

/// Of shape `[rows, 3, 2]`: as it lies in memory, with axes swapped, or one row as often as that.
fn strided(index: usize, rows: i32, way: usize, dtype: Dtype) -> Array {
    match way {
        0 => filled(index, &[rows, 3, 2], dtype),
        1 => filled(index, &[2, 3, rows], dtype).transpose().unwrap(),
        2 => {
            let swapped = filled(index, &[rows, 2, 3], dtype);
            swapped.transpose_axes(&[0, 2, 1]).unwrap()
        }
        _ => broadcast_to(filled(index, &[3, 2], dtype), &[rows, 3, 2]).unwrap(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn packing_and_unpacking_are_inverse(given in vec(tensor(), 1..24)) {
        let keys: Vec<_> = given.iter().map(|(_, _, key)| *key).collect();
        let arrays: Vec<Array> = given.iter().enumerate()
            .map(|(index, (shape, dtype, _))| filled(index, shape, *dtype))
            .collect();
        let layout = Layout::flat(arrays.iter().map(Tensor::of).collect(), &keys);
        let buffers = layout.pack(&arrays).unwrap();
        let lazy = layout.views(&buffers).unwrap();
        eval(&buffers).unwrap();
        for unpacked in [lazy, layout.views(&buffers).unwrap(), layout.unpack(&buffers).unwrap()] {
            prop_assert_eq!(unpacked.len(), arrays.len());
            for (index, (a, b)) in arrays.iter().zip(&unpacked).enumerate() {
                prop_assert!(same(a, b), "{}: {:?} {:?}", index, a.shape(), b.shape());
            }
        }
    }

    #[test]
    fn each_tensor_has_a_place_of_its_own(given in vec(tensor(), 1..24)) {
        let keys: Vec<_> = given.iter().map(|(_, _, key)| *key).collect();
        let tensors: Vec<Tensor> = given.iter()
            .map(|(shape, dtype, _)| Tensor { shape: shape.clone(), dtype: *dtype })
            .collect();
        let layout = Layout::flat(tensors.clone(), &keys);
        let mut seen: Vec<usize> = (0..layout.len()).flat_map(|b| layout.members(b).collect::<Vec<_>>()).collect();
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..tensors.len()).collect::<Vec<_>>());
        for buffer in layout.shared() {
            let members: Vec<usize> = layout.members(buffer).collect();
            for &member in &members {
                prop_assert_eq!(tensors[member].dtype, layout.dtype(buffer));
                prop_assert_eq!(keys[member], keys[members[0]]);
                prop_assert_eq!(&tensors[member].shape[1..], &tensors[members[0]].shape[1..]);
            }
        }
    }

    #[test]
    fn another_value_of_one_tensor_changes_no_other(given in vec(tensor(), 2..16), changed in 0..16usize) {
        let keys: Vec<_> = given.iter().map(|(_, _, key)| *key).collect();
        let mut arrays: Vec<Array> = given.iter().enumerate()
            .map(|(index, (shape, dtype, _))| filled(index, shape, *dtype))
            .collect();
        let layout = Layout::flat(arrays.iter().map(Tensor::of).collect(), &keys);
        let before = arrays.clone();
        let changed = changed % arrays.len();
        arrays[changed] = filled(100, &given[changed].0, given[changed].1);
        let after = layout.unpack(&layout.pack(&arrays).unwrap()).unwrap();
        for (index, (a, b)) in before.iter().zip(&after).enumerate() {
            prop_assert_eq!(same(a, b), index != changed || a.size() == 0, "{}", index);
        }
    }

    #[test]
    fn parts_in_any_order_of_memory_are_joined_as_mlx_joins_them(
        given in vec((1..6i32, 0..4usize), 2..12),
        dtype in select(vec![Dtype::Float32, Dtype::Bfloat16, Dtype::Uint8, Dtype::Uint64, Dtype::Complex64]),
    ) {
        let parts: Vec<Array> = given.iter().enumerate()
            .map(|(index, (rows, way))| strided(index, *rows, *way, dtype))
            .collect();
        let parts: Vec<&Array> = parts.iter().collect();
        let joined = Layout::join(&parts).unwrap();
        prop_assert!(same(&joined, &concatenate(&parts, 0).unwrap()));
    }

    #[test]
    fn a_transpose_is_turned(
        [rows, columns] in [1..200i32, 1..200i32],
        dtype in select(vec![Dtype::Float32, Dtype::Bfloat16, Dtype::Uint8, Dtype::Uint64, Dtype::Complex64]),
        skip in any::<bool>(),
    ) {
        let whole = filled(0, &[columns, rows + 1], Dtype::Float32).as_dtype(dtype).unwrap();
        let from = i32::from(skip); // with a gap behind each of its rows, or not
        let columns_first = whole.try_index((.., from..)).unwrap();
        let turned = columns_first.transpose().unwrap();
        let rows_first = contiguous(&turned).unwrap();
        prop_assert!(same(&rows_first, &turned.contiguous().unwrap()));
        let joined = Layout::join(&[&turned, &turned]).unwrap();
        prop_assert!(same(&joined, &concatenate(&[&turned, &turned], 0).unwrap()));
    }

    #[test]
    fn a_transposed_product_is_multiplied_the_other_way_around(
        [rows, columns, tokens] in [1..200i32, 1..200i32, 1..200i32],
        dtype in select(vec![Dtype::Float32, Dtype::Float16, Dtype::Bfloat16]),
        [turned, twice] in any::<[bool; 2]>(),
    ) {
        let random = |shape: &[i32]| normal::<f32>(shape, None, None, None).unwrap().as_dtype(dtype).unwrap();
        // as a linear layer's gradient is, or with a first factor that is no transpose
        let first = if turned {
            random(&[tokens, rows]).transpose().unwrap()
        } else {
            random(&[rows, tokens])
        };
        let product = || first.matmul(random(&[tokens, columns])).unwrap();
        let mut gradient = product().transpose().unwrap();
        if twice {
            gradient = gradient.add(product().transpose().unwrap()).unwrap(); // of a matrix that is used twice
        }
        let made = contiguous(&gradient).unwrap();
        let joined = Layout::join(&[&gradient, &gradient]).unwrap();
        prop_assert!(same(&made, &gradient.contiguous().unwrap()));
        prop_assert!(same(&joined, &concatenate(&[&gradient, &gradient], 0).unwrap()));
    }

    #[test]
    fn the_norm_is_that_of_all_elements(
        shapes in vec([1..90i32, 1..90i32], 1..12),
        skip in any::<bool>(),
        bad in select(vec![None, Some(f32::NAN), Some(f32::INFINITY)]),
    ) {
        let mut gradients: Vec<Array> = Vec::new();
        for (i, &[rows, columns]) in shapes.iter().enumerate() {
            let whole = normal::<f32>(&[columns, rows + 1], None, None, None).unwrap();
            let part = whole.try_index((.., i32::from(skip)..)).unwrap();
            gradients.push(if i % 2 == 0 { part } else { part.transpose().unwrap() });
        }
        gradients.extend(bad.map(Array::from_f32));
        let exact = gradients.iter().flat_map(|gradient| {
            let values = gradient.contiguous().unwrap().to_vec_exact::<f32>().unwrap();
            values.into_iter().map(|value| f64::from(value).powi(2))
        });
        let exact = exact.sum::<f64>().sqrt();
        let norm = f64::from(global_norm(&gradients, &[]).unwrap().item_exact::<f32>());
        match bad {
            None => prop_assert!((norm / exact - 1.0).abs() < 1e-6, "{norm} {exact}"),
            Some(bad) if bad.is_nan() => prop_assert!(norm.is_nan()),
            Some(_) => prop_assert!(norm.is_infinite()),
        }
    }
}
