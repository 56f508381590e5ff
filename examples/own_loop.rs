//! A training loop of one's own, without any framework: softmax regression by hand learns handwritten digits on several ranks. Its
//! gradients go to a `Synchronizer`, which exchanges the largest few of them, its weights to the `Optimizer` behind that.
//!
//! ```text
//! cargo run --release --example own_loop                          four threads of one process
//! cargo build --release --features mpi --example own_loop         four processes under mpirun
//! mpirun -n 4 target/release/examples/own_loop mpi
//! ```

use redsync_comm::{Communicator, local, mpi};
use redsync_data::{DataSet, Places, open, order::Epochs};
use redsync_engine::{Config, Kind, Layer, Momentum, Optimizer, Synchronizer, WarmUp};
use std::error::Error;
use std::sync::Arc;

type Outcome = Result<(), Box<dyn Error + Send + Sync>>;
const PIXELS: usize = 64;
const CLASSES: usize = 10;

fn main() -> Outcome {
    if std::env::args().nth(1).as_deref() == Some("mpi") {
        return train(Arc::new(mpi::world()?));
    }
    let rank = |comm: local::Local| std::thread::spawn(move || train(Arc::new(comm)));
    let ranks: Vec<_> = local::group(4).into_iter().map(rank).collect();
    ranks.into_iter().try_for_each(|rank| rank.join().expect("a rank that does not panic"))
}

fn train(comm: Arc<dyn Communicator>) -> Outcome {
    let DataSet::Images(digits) = open("digits", &Places::default())? else {
        unreachable!("digits are images")
    };
    let mut order = Epochs::new(digits.train_len(), comm.size(), 16, 1)?;
    let (rank, per_epoch) = (comm.rank(), order.steps_per_epoch());
    let mut weights = [vec![0.0; PIXELS * CLASSES], vec![0.0; CLASSES]]; // the same on every rank
    let kinds = [("weight", Kind::Weight), ("bias", Kind::BiasOrNorm)];
    let layers =
        kinds.iter().zip(&weights).map(|((name, kind), w)| Layer::new(*name, w.len(), *kind)).collect();
    let (momentum, warm_up) = (Momentum::Nesterov(0.9), WarmUp::Ramp(2 * per_epoch as u64));
    // So small a layer would otherwise be sent whole.
    let config = Config { momentum, warm_up, dense_below: Some(0), ..Config::default() };
    let mut sync = Synchronizer::new(layers, config, comm)?;
    let mut optimizer = Optimizer::new(&sync, 1e-4);
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for step in 0..10 * per_epoch {
        let (epoch, rate) = ((step / per_epoch) as u64, 0.02 * (1.0 - step as f32 / (10 * per_epoch) as f32));
        let seed = order.epoch_seed(epoch);
        digits.train_batch(order.indices(epoch, step % per_epoch, rank), seed, &mut pixels, &mut labels);
        optimizer.begin(&sync, rate)?;
        let [weight, bias] = gradients(&weights, &pixels, &labels);
        sync.submit(1, bias)?; // as soon as a gradient is there, in any order, from any thread
        sync.submit(0, weight)?;
        sync.finish()?;
        optimizer.step(&mut sync, &mut weights, rate)?;
    }
    sync.check_replicas(&[&weights[0], &weights[1]])?;
    digits.test_batch(0..digits.test_len(), &mut pixels, &mut labels);
    let best = |p: Vec<f32>| (0..CLASSES).max_by(|a, b| p[*a].total_cmp(&p[*b]));
    let guesses = pixels.chunks(PIXELS).map(|image| best(probabilities(&weights, image)));
    let right = guesses.zip(&labels).filter(|(guess, label)| *guess == Some(**label as usize)).count();
    if rank == 0 {
        let (percent, traffic) = (100.0 * right as f64 / labels.len() as f64, sync.traffic());
        println!("accuracy {percent:.1}%, {} bytes sent instead of {}", traffic.sent(), traffic.dense);
    }
    Ok(())
}

/// How probable each class is for an image.
fn probabilities([weight, bias]: &[Vec<f32>; 2], image: &[f32]) -> Vec<f32> {
    let product = |class| (0..PIXELS).map(|i| image[i] * weight[i * CLASSES + class]).sum::<f32>();
    let scores: Vec<f32> = (0..CLASSES).map(|class| (bias[class] + product(class)).exp()).collect();
    scores.iter().map(|score| score / scores.iter().sum::<f32>()).collect()
}

/// The gradients of the mean cross entropy of a batch.
fn gradients(weights: &[Vec<f32>; 2], pixels: &[f32], labels: &[u32]) -> [Vec<f32>; 2] {
    let [mut weight, mut bias] = [vec![0.0; PIXELS * CLASSES], vec![0.0; CLASSES]];
    for (image, label) in pixels.chunks(PIXELS).zip(labels) {
        for (class, p) in probabilities(weights, image).iter().enumerate() {
            let off = (p - f32::from(u8::from(*label as usize == class))) / labels.len() as f32;
            bias[class] += off;
            image.iter().enumerate().for_each(|(i, x)| weight[i * CLASSES + class] += off * x);
        }
    }
    [weight, bias]
}
