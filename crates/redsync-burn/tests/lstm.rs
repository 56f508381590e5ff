//! The operations of `redsync_burn::ops` against the same made of Burn's operations, against finite differences of plain f64 code,
//! and against themselves with another number of threads.

use burn::tensor::{Device, Int, Tensor, TensorData};
use proptest::prelude::*;
use redsync_burn::bench_lstm::{LstmFunction, composed};
use redsync_burn::flex::{self, device};
use redsync_burn::ops::decode::{decode, embed};
use redsync_burn::ops::loss::cross_entropy;
use redsync_burn::ops::lstm::{Parameters, State, lstm};

/// Made-up values in `-scale..scale`, the same for the same seed.
fn some(size: usize, scale: f32, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..size).map(|_| (2.0 * next() - 1.0) * scale).collect()
}

fn on_tape<const D: usize>(values: &[f32], shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &device()).require_grad()
}

fn fixed<const D: usize>(values: &[f32], shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &device())
}

fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// The largest difference, measured in the largest expected value.
fn distance(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(f32::MIN_POSITIVE, |largest, value| largest.max(value.abs()));
    let apart = got.iter().zip(expected).map(|(got, expected)| (got - expected).abs());
    apart.fold(0.0, |most, apart| if apart > most || apart.is_nan() { apart } else { most }) / largest
}

/// A few roundings of f32.
const ROUNDING: f32 = 5e-6;

fn close(what: &str, got: &[f32], expected: &[f32]) {
    let apart = distance(got, expected);
    assert!(apart < ROUNDING, "{what}: {apart} apart");
}

fn of(weight_ih: Tensor<2>, weight_hh: Tensor<2>, [bias_ih, bias_hh]: [Tensor<1>; 2]) -> Parameters {
    Parameters { weight_ih, weight_hh, bias_ih, bias_hh }
}

/// Parameters, input and state of a layer, and the weight of each output in a loss.
#[derive(Clone)]
struct Case {
    steps: usize,
    batch: usize,
    input: usize,
    hidden: usize,
    x: Vec<f32>,
    ih: Vec<f32>,
    hh: Vec<f32>,
    biases: [Vec<f32>; 2],
    state: State,
    loss: Vec<f32>,
}

impl Case {
    fn new([steps, batch, input, hidden]: [usize; 4], seed: u64) -> Case {
        let scale = 1.0 / (hidden as f32).sqrt();
        Case {
            steps,
            batch,
            input,
            hidden,
            x: some(steps * batch * input, 1.0, seed),
            ih: some(4 * hidden * input, scale, seed + 1),
            hh: some(4 * hidden * hidden, scale, seed + 2),
            biases: [some(4 * hidden, scale, seed + 3), some(4 * hidden, scale, seed + 4)],
            state: (some(batch * hidden, 0.9, seed + 5), some(batch * hidden, 1.5, seed + 6)),
            loss: some(steps * batch * hidden, 1.0, seed + 7),
        }
    }

    /// Output, state after it, and the gradients of x, both weights and both biases.
    fn run(&self, layer: LstmFunction) -> (Vec<f32>, State, [Vec<f32>; 5]) {
        let Case { steps, batch, input, hidden, .. } = *self;
        let x = on_tape(&self.x, [steps, batch, input]);
        let (ih, hh) = (on_tape(&self.ih, [4 * hidden, input]), on_tape(&self.hh, [4 * hidden, hidden]));
        let [b, d] = self.biases.each_ref().map(|bias| on_tape(bias, [4 * hidden]));
        let parameters = of(ih.clone(), hh.clone(), [b.clone(), d.clone()]);
        let (out, state) = layer(x.clone(), parameters, self.state.clone());
        let gradients = (out.clone() * fixed(&self.loss, [steps, batch, hidden])).sum().backward();
        let all = [
            numbers(x.grad(&gradients).expect("a gradient of x")),
            numbers(ih.grad(&gradients).expect("a gradient of the input weights")),
            numbers(hh.grad(&gradients).expect("a gradient of the recurrent weights")),
            numbers(b.grad(&gradients).expect("a gradient of the first bias")),
            numbers(d.grad(&gradients).expect("a gradient of the second bias")),
        ];
        (numbers(out), state, all)
    }

    /// The loss in f64, step by step as the formula says.
    fn loss_in_f64(&self, x: &[f64], ih: &[f64], hh: &[f64], bias: &[f64]) -> f64 {
        let Case { steps, batch, input, hidden, .. } = *self;
        let wide = |values: &[f32]| values.iter().map(|&v| v as f64).collect::<Vec<f64>>();
        let (mut h, mut c) = (wide(&self.state.0), wide(&self.state.1));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let mut loss = 0.0;
        for step in 0..steps {
            for b in 0..batch {
                let x = &x[(step * batch + b) * input..][..input];
                let before = h[b * hidden..][..hidden].to_vec();
                let gate = |row: usize| {
                    dot(&ih[row * input..][..input], x)
                        + dot(&hh[row * hidden..][..hidden], &before)
                        + bias[row]
                };
                for u in 0..hidden {
                    let [i, f, g, o] = [0, 1, 2, 3].map(|k| gate(k * hidden + u));
                    let place = b * hidden + u;
                    c[place] = sigmoid(f) * c[place] + sigmoid(i) * g.tanh();
                    h[place] = sigmoid(o) * c[place].tanh();
                    loss += self.loss[step * batch * hidden + place] as f64 * h[place];
                }
            }
        }
        loss
    }
}

fn same_as_composed(sizes: [usize; 4]) {
    let case = Case::new(sizes, 11);
    let (ours, stock) = (case.run(lstm), case.run(composed));
    close("output", &ours.0, &stock.0);
    close("hidden state", &ours.1.0, &stock.1.0);
    close("cells", &ours.1.1, &stock.1.1);
    for (what, (ours, stock)) in ["x", "ih", "hh", "b", "d"].iter().zip(ours.2.iter().zip(&stock.2)) {
        close(what, ours, stock);
    }
}

#[test]
fn lstm_is_what_its_operations_are_for_odd_sizes() {
    same_as_composed([5, 3, 7, 13]);
    same_as_composed([3, 2, 9, 101]);
}

#[test]
fn lstm_is_what_its_operations_are_for_one_step_one_sequence_one_unit() {
    same_as_composed([1, 1, 1, 1]);
    same_as_composed([1, 4, 5, 6]);
    same_as_composed([6, 1, 50, 49]);
    same_as_composed([2, 3, 1, 48]);
}

#[test]
fn lstm_is_what_its_operations_are_where_threads_are_used() {
    same_as_composed([4, 9, 150, 203]);
}

#[test]
fn gradients_of_lstm_are_finite_differences() {
    let case = Case::new([3, 2, 4, 5], 5);
    let (_, _, gradients) = case.run(lstm);
    let wide = |values: &[f32]| values.iter().map(|&v| v as f64).collect::<Vec<f64>>();
    let bias: Vec<f64> =
        case.biases[0].iter().zip(&case.biases[1]).map(|(b, d)| *b as f64 + *d as f64).collect();
    let of = [wide(&case.x), wide(&case.ih), wide(&case.hh), bias];
    for (which, gradient) in gradients[..4].iter().enumerate() {
        let slope = |place: usize| {
            let at = |delta: f64| {
                let mut moved = of.clone();
                moved[which][place] += delta;
                case.loss_in_f64(&moved[0], &moved[1], &moved[2], &moved[3])
            };
            ((at(1e-5) - at(-1e-5)) / 2e-5) as f32
        };
        let slopes: Vec<f32> = (0..gradient.len()).map(slope).collect();
        close("finite differences", gradient, &slopes);
    }
    assert_eq!(gradients[3], gradients[4], "both biases enter alike");
}

#[test]
fn two_windows_are_one_of_twice_the_length() {
    let case = Case::new([8, 3, 6, 53], 21);
    let (whole, after, _) = case.run(lstm);
    let (x, loss) = (case.x.split_at(4 * 3 * 6), case.loss.split_at(4 * 3 * 53));
    let first = Case { steps: 4, x: x.0.to_vec(), loss: loss.0.to_vec(), ..case.clone() };
    let (begin, between, _) = first.run(lstm);
    let second = Case { steps: 4, x: x.1.to_vec(), loss: loss.1.to_vec(), state: between, ..case };
    let (end, last, _) = second.run(lstm);
    assert_eq!(whole, [begin, end].concat());
    assert_eq!(after, last);
}

#[test]
fn gradients_of_lstm_are_contiguous() {
    let case = Case::new([3, 2, 4, 5], 5);
    let hh = on_tape(&case.hh, [20, 5]);
    let biases = case.biases.each_ref().map(|bias| fixed(bias, [20]));
    let parameters = of(fixed(&case.ih, [20, 4]), hh.clone(), biases);
    let (out, _) = lstm(fixed(&case.x, [3, 2, 4]), parameters, case.state);
    let gradient = hh.grad(&out.sum().backward()).expect("a gradient");
    let gradient = gradient.try_into_primitive::<flex::Inner>().expect("a tensor of flex");
    assert!(gradient.is_contiguous());
    assert_eq!(flex::shape(&gradient), [20, 5]);
}

#[test]
fn lstm_takes_views_that_are_not_contiguous() {
    let case = Case::new([3, 2, 4, 5], 9);
    let (expected, _, _) = case.run(lstm);
    let turned: Vec<f32> =
        (0..4).flat_map(|column| case.ih.iter().skip(column).step_by(4)).copied().collect();
    let ih = fixed(&turned, [4, 20]).transpose();
    let biases = case.biases.each_ref().map(|bias| fixed(bias, [20]));
    let parameters = of(ih, fixed(&case.hh, [20, 5]), biases);
    let (out, _) = lstm(fixed(&case.x, [3, 2, 4]), parameters, case.state);
    assert_eq!(numbers(out), expected);
}

/// Everything that the operations give, as bits.
fn bits_with(threads: usize) -> Vec<u32> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
    pool.install(|| {
        let (out, state, gradients) = Case::new([4, 9, 150, 203], 3).run(lstm);
        let mut all = [out, state.0, state.1].concat();
        all.extend(gradients.concat());
        let tied = Tied::new([90, 64, 3001], 8);
        let (loss, correct, gradients) = tied.run(ours);
        all.extend(gradients.concat());
        all.extend([loss, correct as f32]);
        all.into_iter().map(f32::to_bits).collect()
    })
}

#[test]
fn one_and_two_threads_give_the_same_bits() {
    assert_eq!(bits_with(1), bits_with(2));
}

/// Words in, an embedding that serves at both ends, the loss of the next words.
struct Tied {
    count: usize,
    hidden: usize,
    words: usize,
    tokens: Vec<u32>,
    targets: Vec<u32>,
    table: Vec<f32>,
    bias: Vec<f32>,
    factor: f32,
}

type Ends = fn(&Tied, Tensor<2>, Tensor<1>) -> (Tensor<1>, usize);

impl Tied {
    fn new([count, hidden, words]: [usize; 3], seed: u64) -> Tied {
        let pick = |seed| {
            some(count, 1.0, seed)
                .iter()
                .map(|v| ((v + 1.0) / 2.0 * words as f32) as u32 % words as u32)
                .collect()
        };
        let (table, bias) = (some(words * hidden, 1.0, seed + 2), some(words, 1.0, seed + 3));
        Tied { count, hidden, words, tokens: pick(seed), targets: pick(seed + 1), table, bias, factor: -0.75 }
    }

    /// Loss, right guesses, and the gradients of table and bias, when the loss is multiplied by a factor.
    fn run(&self, ends: Ends) -> (f32, usize, [Vec<f32>; 2]) {
        let (table, bias) =
            (on_tape(&self.table, [self.words, self.hidden]), on_tape(&self.bias, [self.words]));
        let (loss, correct) = ends(self, table.clone(), bias.clone());
        let gradients = (loss.clone() * self.factor).backward();
        let of_table = numbers(table.grad(&gradients).expect("a gradient of the table"));
        let of_bias = numbers(bias.grad(&gradients).expect("a gradient of the bias"));
        (numbers(loss)[0], correct, [of_table, of_bias])
    }
}

fn ours(tied: &Tied, table: Tensor<2>, bias: Tensor<1>) -> (Tensor<1>, usize) {
    let h = embed(&tied.tokens, table.clone()).tanh();
    cross_entropy(decode(h, table, bias), &tied.targets)
}

fn stock(tied: &Tied, table: Tensor<2>, bias: Tensor<1>) -> (Tensor<1>, usize) {
    let device: Device = device();
    let tensor = |tokens: &[u32]| {
        let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        Tensor::<1, Int>::from_data(TensorData::new(tokens, [tied.count]), &device)
    };
    let h = table.clone().select(0, tensor(&tied.tokens)).tanh();
    let logits = h.matmul(table.transpose()) + bias.reshape([1, tied.words]);
    let guesses: Vec<i64> = logits.clone().argmax(1).into_data().iter::<i64>().collect();
    let correct =
        guesses.iter().zip(&tied.targets).filter(|(guess, target)| **guess == **target as i64).count();
    let right = tensor(&tied.targets).reshape([tied.count, 1]);
    (burn::tensor::activation::log_softmax(logits, 1).gather(1, right).mean().neg(), correct)
}

fn tied_same_as_stock(sizes: [usize; 3]) {
    let tied = Tied::new(sizes, 31);
    let (ours, stock) = (tied.run(ours), tied.run(stock));
    close("loss", &[ours.0], &[stock.0]);
    assert_eq!(ours.1, stock.1);
    close("table", &ours.2[0], &stock.2[0]);
    close("bias", &ours.2[1], &stock.2[1]);
}

#[test]
fn embed_decode_and_loss_are_what_their_operations_are() {
    tied_same_as_stock([7, 5, 11]);
    tied_same_as_stock([1, 3, 33]);
    tied_same_as_stock([5, 1, 64]);
    tied_same_as_stock([90, 64, 3001]);
}

#[test]
fn gradients_of_decode_are_finite_differences() {
    let (count, hidden, words) = (3, 4, 5);
    let (h, table, bias) = (some(12, 1.0, 1), some(20, 1.0, 2), some(5, 1.0, 3));
    let weights = some(15, 1.0, 4);
    let of_h = on_tape(&h, [count, hidden]);
    let of_table = on_tape(&table, [words, hidden]);
    let scores = decode(of_h.clone(), of_table.clone(), fixed(&bias, [words]));
    // Half the sum of weighted squares: its gradient is not the same for all.
    let weighted = scores.clone() * fixed(&weights, [count, words]);
    let gradients = (weighted * scores * 0.5).sum().backward();
    let loss = |h: &[f64], table: &[f64]| -> f64 {
        (0..count * words)
            .map(|at| {
                let (row, word) =
                    (&h[at / words * hidden..][..hidden], &table[at % words * hidden..][..hidden]);
                let score = row.iter().zip(word).map(|(a, b)| a * b).sum::<f64>() + bias[at % words] as f64;
                0.5 * weights[at] as f64 * score * score
            })
            .sum()
    };
    let wide = |values: &[f32]| values.iter().map(|&v| v as f64).collect::<Vec<f64>>();
    let (h, table) = (wide(&h), wide(&table));
    let difference = |values: &[f64], place: usize, loss: &dyn Fn(&[f64]) -> f64| {
        let at = |delta: f64| {
            let mut moved = values.to_vec();
            moved[place] += delta;
            loss(&moved)
        };
        ((at(1e-5) - at(-1e-5)) / 2e-5) as f32
    };
    let slopes_h: Vec<f32> = (0..12).map(|place| difference(&h, place, &|h| loss(h, &table))).collect();
    let slopes_table: Vec<f32> =
        (0..20).map(|place| difference(&table, place, &|table| loss(&h, table))).collect();
    close("h", &numbers(of_h.grad(&gradients).expect("a gradient")), &slopes_h);
    close("table", &numbers(of_table.grad(&gradients).expect("a gradient")), &slopes_table);
}

#[test]
fn the_gradient_of_cross_entropy_is_finite_differences() {
    let (count, classes) = (4, 37);
    let (scores, targets) = (some(count * classes, 3.0, 6), [0, 36, 5, 5]);
    let on = on_tape(&scores, [count, classes]);
    let gradients = (cross_entropy(on.clone(), &targets).0 * 2.5).backward();
    let loss = |scores: &[f64]| -> f64 {
        let rows = scores.chunks_exact(classes).zip(&targets);
        let each =
            rows.map(|(row, &target)| row.iter().map(|s| s.exp()).sum::<f64>().ln() - row[target as usize]);
        2.5 * each.sum::<f64>() / count as f64
    };
    let wide: Vec<f64> = scores.iter().map(|&s| s as f64).collect();
    let slope = |place: usize| {
        let at = |delta: f64| {
            let mut moved = wide.clone();
            moved[place] += delta;
            loss(&moved)
        };
        ((at(1e-5) - at(-1e-5)) / 2e-5) as f32
    };
    let slopes: Vec<f32> = (0..wide.len()).map(slope).collect();
    close("scores", &numbers(on.grad(&gradients).expect("a gradient")), &slopes);
}

#[test]
fn cross_entropy_bears_large_scores() {
    let on = on_tape(&[1e30, -1e30, 0.0, 3e4, 3e4, -3e4], [2, 3]);
    let (loss, correct) = cross_entropy(on.clone(), &[0, 1]);
    // The second row has two equal largest scores: the first counts as the guess.
    assert_eq!(correct, 1);
    let gradients = loss.clone().backward();
    close("loss", &numbers(loss), &[2f32.ln() / 2.0]);
    close("scores", &numbers(on.grad(&gradients).expect("a gradient")), &[0.0, 0.0, 0.0, 0.25, -0.25, 0.0]);
}

#[test]
fn cross_entropy_leaves_scores_alone_that_are_still_needed() {
    let scores = some(12, 2.0, 1);
    let on = on_tape(&scores, [3, 4]);
    let (loss, _) = cross_entropy(on.clone(), &[0, 1, 2]);
    let _ = loss.backward();
    assert_eq!(numbers(on), scores);
}

#[test]
fn a_score_that_is_nan_shows_in_the_loss() {
    let (loss, _) = cross_entropy(fixed(&[0.0, f32::NAN, 1.0], [1, 3]), &[0]);
    assert!(numbers(loss)[0].is_nan());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn lstm_is_what_its_operations_are(
        steps in 1usize..6, batch in 1usize..6, input in 1usize..20, hidden in 1usize..120,
    ) {
        same_as_composed([steps, batch, input, hidden]);
    }
}
