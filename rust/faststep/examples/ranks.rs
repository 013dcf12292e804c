//! A module that several processes train, each with batches of its own; one process alone takes those of `RANKS` in turn.
//!
//! It prints the loss and the weights.
use faststep::{Error, Group, Optimizer, Optimizers, Options, Step};
use mlx_rs::{error::Exception, module::Module, nn::Linear, random, Array};

const STEPS: u64 = 6;
const WIDTH: i32 = 4;

fn loss(model: &mut Linear, batch: &[Array]) -> Result<Array, Exception> {
    model
        .forward(&batch[0])?
        .subtract(&batch[1])?
        .square()?
        .mean(None)
}

fn batch(step: u64, rank: u64) -> Result<[Array; 2], Exception> {
    let key = random::key(100 * step + rank)?;
    let x = random::normal::<f32>(&[8, WIDTH], None, None, &key)?;
    let y = x.sum_axis(1, true)?;
    Ok([x, y])
}

fn main() -> Result<(), Error> {
    let ranks: u64 = std::env::var("RANKS")
        .ok()
        .and_then(|ranks| ranks.parse().ok())
        .unwrap_or(1);
    let alone = std::env::var_os("MLX_RANK").is_none();
    random::seed(0)?;
    let model = Linear::new(WIDTH, 1)?;
    let calls = if alone { ranks } else { 1 };
    let options = Options::default()
        .max_grad_norm(1.0)
        .accumulate(usize::try_from(calls).unwrap_or(1));
    let mut step = Step::new(
        model,
        Optimizers::new(Optimizer::adamw(0.01), 1e-2),
        loss,
        options,
    )?;
    let mut rank = 0;
    if !alone {
        let group = Group::init()?;
        rank = group.rank() as u64;
        step = step.with_group(group);
    }
    for number in 0..STEPS {
        for each in rank..rank + calls {
            let output = step.step(&batch(number, each)?)?;
            if number + 1 == STEPS && !alone {
                println!("loss {}", output.loss.item_exact::<f32>());
            }
        }
    }
    let model = step.into_model()?;
    let weights = model.weight.reshape(&[-1])?;
    println!("{:?}", weights.to_vec_exact::<f32>().unwrap_or_default());
    Ok(())
}
