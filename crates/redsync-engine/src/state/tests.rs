//! What a state keeps, and what is refused as one.
#![allow(clippy::unwrap_used)]

use super::*;
use redsync_core::{Adam, Remembered};
use std::fs;

const MIN_SUBNORMAL: f32 = f32::from_bits(1);

fn memory(seed: u32) -> Memory {
    let phase = |i| Remembered {
        threshold: 0.1 * (seed + i) as f32,
        least: f32::from_bits(seed + i),
        searched: u32::MAX - seed - i,
    };
    Memory::from_phases([phase(0), phase(1), phase(2)]).unwrap()
}

/// Two layers, with and without momentum; values are small integers, so that sums are exact in any order.
fn state(rank: usize, ranks: usize) -> Saved {
    let r = rank as f32;
    let layers = vec![
        LayerState {
            name: "zz.weight".into(),
            size: 4,
            momentum: Momentum::Nesterov(0.9),
            u: vec![1.0 + r, -2.0, 0.0, 8.0 * r],
            v: vec![r * r, -r, 3.0, 0.0],
            memory: memory(7 * rank as u32),
            rate: Some(0.5 / (1 << rank) as f32),
            second: None,
            kept: None,
        },
        LayerState {
            name: "a".into(),
            size: 3,
            momentum: Momentum::None,
            u: vec![],
            v: vec![r - 5.0, 2.0 * r, 1.0],
            memory: Memory::default(),
            rate: None,
            second: None,
            kept: None,
        },
    ];
    let extra = vec![("w".into(), vec![0.5, -0.25]), ("b".into(), vec![])];
    let identity = vec![("density".into(), "0.001".into()), ("\"\u{e9}".into(), "1".into())];
    Saved { step: 12, rank, ranks, identity, replica_hash: 0xfeed_0000_dead_beef, seat: None, layers, extra }
}

/// A state as bits, in which -0.0 is not 0.0.
fn bits(saved: &Saved) -> String {
    let vector = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let layer = |l: &LayerState| {
        let memory = l.memory.phases().map(|r| (r.threshold.to_bits(), r.least.to_bits(), r.searched));
        (l.name.clone(), l.size, l.momentum, vector(&l.u), vector(&l.v), memory)
    };
    let layers: Vec<_> = saved.layers.iter().map(layer).collect();
    let extra: Vec<_> = saved.extra.iter().map(|(name, x)| (name.clone(), vector(x))).collect();
    let Saved { step, rank, ranks, identity, replica_hash, .. } = saved;
    format!("{:?}", (step, rank, ranks, identity, replica_hash, layers, extra))
}

/// Why a file is refused whose description or vectors were changed before it was written.
fn refusal(change: impl Fn(&mut crate::file::Content)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    state(0, 2).write(&path).unwrap();
    let mut content = file::read(&path, FORMAT).unwrap();
    change(&mut content);
    let tensors = content.tensors.iter().map(|(name, values)| (&name[..], &values[..]));
    file::write(&path, FORMAT, &content.about, tensors).unwrap();
    let refused = Saved::read(&path).unwrap_err().to_string();
    assert!(refused.contains("the file is damaged: ") && refused.lines().count() == 1, "{refused}");
    refused
}

#[test]
fn round_trip_is_exact_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(Saved::file_name(3));
    let mut saved = state(3, 5);
    saved.step = u64::MAX;
    saved.layers[0].u = vec![-0.0, MIN_SUBNORMAL, -MIN_SUBNORMAL, f32::MIN_POSITIVE / 2.0];
    saved.layers[0].v = vec![f32::MAX, f32::MIN, 0.1, -f32::EPSILON];
    saved.extra[0].1 = vec![-0.0, 0.0];
    saved.write(&path).unwrap();
    assert_eq!(bits(&Saved::read(&path).unwrap()), bits(&saved));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn empty_layers_and_no_layers_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let mut saved = state(0, 1);
    (saved.layers[1].size, saved.layers[1].v) = (0, vec![]);
    saved.write(&path).unwrap();
    assert_eq!(bits(&Saved::read(&path).unwrap()), bits(&saved));
    let nothing = Saved { layers: vec![], extra: vec![], identity: vec![], ..saved };
    nothing.write(&path).unwrap();
    assert_eq!(bits(&Saved::read(&path).unwrap()), bits(&nothing));
}

#[test]
fn the_checksum_changes_with_everything() {
    let changes: [fn(&mut Saved); 7] = [
        |s| s.step = 13,
        |s| s.identity[0].1 = "0.01".into(),
        |s| s.replica_hash = 1,
        |s| s.layers[0].u[0] = 0.5,
        |s| s.layers[0].momentum = Momentum::Nesterov(0.8),
        |s| s.layers[1].memory = memory(1),
        |s| s.extra[0].1[0] = 0.0,
    ];
    for change in changes {
        let mut other = state(0, 2);
        change(&mut other);
        assert_ne!(other.checksum().unwrap(), state(0, 2).checksum().unwrap());
    }
}

#[test]
fn what_does_not_fit_together_is_refused_even_with_the_right_checksum() {
    let size = r#""size":"#;
    for (entry, from, to, why) in [
        ("layers", r#""has_u":true"#, r#""has_u":false"#, r#"tensor "u/zz.weight" belongs to no layer"#),
        ("layers", r#""has_u":false"#, r#""has_u":true"#, r#"tensor "u/a" is missing"#),
        ("extra", r#""name":"b""#, r#""name":"w""#, r#"tensor "extra/w" is missing, or listed twice"#),
        ("layers", &format!("{size}3"), &format!("{size}7"), "has 3 elements, expected 7"),
        ("layers", &format!("{size}3"), &format!("{size}-3"), "its layers cannot be read"),
        (
            "layers",
            r#"["none",0]"#,
            r#"["plain",1065353216]"#,
            "momentum must be at least 0 and below 1, got 1",
        ),
        ("layers", "[[0,0,", "[[2143289344,0,", r#"layer "zz.weight": the remembered threshold is damaged"#),
        ("rank", "0", "2", "no rank 2 among 2"),
        ("rank", "0", "x", "its rank is not a number"),
        ("replica_hash", "feed", "feeg", "its replica_hash is not a number"),
        ("identity", "[", "{", "its identity cannot be read"),
    ] {
        let refused = refusal(|content| {
            let text = content.about.get_mut(entry).unwrap();
            assert!(text.contains(from), "{text}");
            *text = text.replacen(from, to, 1);
        });
        assert!(refused.contains(why), "{entry}: {from} -> {to}: {refused}");
    }
    let refused = refusal(|content| drop(content.tensors.remove("v/a")));
    assert!(refused.contains(r#"tensor "v/a" is missing"#), "{refused}");
    assert!(refusal(|content| drop(content.about.remove("step"))).contains("no step"));
}

#[test]
fn only_what_both_runs_know_is_compared() {
    let identity = |pairs: &[(&str, &str)]| -> Identity {
        pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    };
    let was = identity(&[("method", "rgc"), ("density", "0.001"), ("forgotten", "1")]);
    assert_eq!(difference(&was, &identity(&[("method", "rgc"), ("later", "x")])), None);
    let is = identity(&[("later", "x"), ("density", "0.01"), ("method", "sgd")]);
    assert_eq!(difference(&was, &is).unwrap(), "density was 0.001, is 0.01");
}

#[test]
fn values_that_are_not_finite_are_refused_on_both_ways() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    state(0, 2).write(&path).unwrap();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let refused = refusal(|content| content.tensors.get_mut("v/a").unwrap()[2] = bad);
        assert!(refused.ends_with(&format!("layer \"a\": v is {bad} at element 2")), "{refused}");
        let mut saved = state(0, 2);
        saved.layers[1].v[2] = bad;
        let error = saved.write(&path).unwrap_err();
        assert!(matches!(error, StateError::File(FileError::Unsound { .. })), "{error}");
        assert_eq!(Saved::read(&path).unwrap(), state(0, 2));
    }
}

#[test]
fn a_state_that_could_not_be_read_back_is_not_written() {
    let breaks: [fn(&mut Saved); 6] = [
        |s| s.rank = 2,
        |s| s.layers[1].name = "zz.weight".into(),
        |s| s.layers[0].u.truncate(1),
        |s| s.layers[0].v.truncate(1),
        |s| s.layers[0].size = 1 << 32,
        |s| s.extra[1].0 = "w".into(),
    ];
    let dir = tempfile::tempdir().unwrap();
    for broken in breaks {
        let mut saved = state(0, 2);
        broken(&mut saved);
        let error = saved.write(&dir.path().join("file")).unwrap_err();
        assert!(matches!(error, StateError::File(FileError::Unsound { .. })), "{error}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn read_all_wants_every_rank_of_one_step() {
    let dir = tempfile::tempdir().unwrap();
    let path = |rank| dir.path().join(Saved::file_name(rank));
    let all = || Saved::read_all(dir.path());
    assert!(matches!(all(), Err(StateError::Incomplete { rank: 0, .. })));
    state(0, 3).write(&path(0)).unwrap();
    state(2, 3).write(&path(2)).unwrap();
    assert!(all().unwrap_err().to_string().ends_with("rank-0001.safetensors is missing"));
    Saved { step: 11, ..state(1, 3) }.write(&path(1)).unwrap();
    let error = all().unwrap_err().to_string();
    assert!(error.contains("rank-0001.safetensors differ in step: 12 and 11"), "{error}");
    state(1, 3).write(&path(1)).unwrap();
    state(3, 8).write(&path(3)).unwrap(); // left behind by another number of ranks
    assert_eq!(all().unwrap(), [state(0, 3), state(1, 3), state(2, 3)]);
    fs::copy(path(0), path(1)).unwrap();
    assert!(all().unwrap_err().to_string().contains("it holds the state of rank 0"));
}

/// The sums over ranks of every u, and of every v as far as it moves weights at its rate.
fn sums(states: &[Saved]) -> Vec<Vec<f32>> {
    let mut sum = vec![];
    for layer in 0..states[0].layers.len() {
        let (size, u) = (states[0].layers[layer].size, states[0].layers[layer].u.len());
        let (mut us, mut vs) = (vec![0.0; u], vec![0.0; size]);
        for state in states {
            us.iter_mut().zip(&state.layers[layer].u).for_each(|(sum, x)| *sum += x);
            let rate = state.layers[layer].rate.unwrap_or(1.0);
            vs.iter_mut().zip(&state.layers[layer].v).for_each(|(sum, x)| *sum += rate * x);
        }
        sum.extend([us, vs]);
    }
    sum
}

#[test]
fn another_number_of_ranks_keeps_the_sums() {
    for (old, new) in [1, 2, 3, 4, 7, 8].into_iter().flat_map(|n| [1, 2, 3, 4, 5, 16].map(|m| (n, m))) {
        let before: Vec<_> = (0..old).rev().map(|rank| state(rank, old)).collect();
        let after: Vec<_> = (0..new).map(|rank| Saved::reshare(before.clone(), rank, new).unwrap()).collect();
        assert_eq!(sums(&after), sums(&before), "{old} -> {new}");
        for (rank, state) in after.iter().enumerate() {
            assert_eq!((state.step, state.rank, state.ranks), (12, rank, new));
            assert_eq!((&state.extra, state.check()), (&before[0].extra, Ok(())));
            let expected = if rank < old { memory(7 * rank as u32) } else { Memory::default() };
            assert_eq!(state.layers[0].memory, expected);
        }
    }
}

#[test]
fn the_same_number_of_ranks_keeps_every_bit() {
    let mut all: Vec<_> = (0..3).map(|rank| state(rank, 3)).collect();
    all[1].layers[0].v = vec![-0.0, MIN_SUBNORMAL, -MIN_SUBNORMAL, f32::MAX];
    for (rank, old) in all.iter().enumerate() {
        assert_eq!(bits(&Saved::reshare(all.clone(), rank, 3).unwrap()), bits(old));
    }
}

#[test]
fn states_that_do_not_belong_together_are_not_added() {
    let refused = |states: Vec<Saved>| Saved::reshare(states, 0, 1).unwrap_err().to_string();
    assert_eq!(refused(vec![]), "the state of rank 0 of 1 is missing");
    assert_eq!(refused(vec![state(1, 2)]), "the state of rank 0 of 2 is missing");
    assert_eq!(refused(vec![state(2, 3), state(0, 3)]), "the state of rank 1 of 3 is missing");
    assert_eq!(refused(vec![state(0, 2)]), "the state of rank 1 of 2 is missing");
    assert_eq!(refused(vec![state(0, 2), state(0, 2)]), "there is more than one state of rank 0");
    assert_eq!(refused(vec![state(3, 2)]), "there is no rank 3 among 2");
    assert!(matches!(Saved::reshare(vec![state(0, 1)], 1, 1), Err(StateError::NoRank { .. })));
    assert!(matches!(Saved::reshare(vec![state(0, 1)], 0, 0), Err(StateError::NoRank { .. })));
    type Change = fn(&mut Saved);
    let changes: [(Change, &str); 8] = [
        (|s| s.step = 1, "rank 0 and rank 1 differ in step: 12 and 1"),
        (|s| s.ranks = 3, "number of ranks: 2 and 3"),
        (|s| s.identity[0].1 = "1".into(), "rank 0 and rank 1 differ in density: 0.001 and 1"),
        (|s| s.replica_hash = 1, "replica hash: feed0000deadbeef and 0000000000000001"),
        (|s| s.layers.truncate(1), "number of layers"),
        (|s| s.layers.swap(0, 1), "layer: \"zz.weight\""),
        (|s| s.layers[0].u.clear(), "u 4, v 4) and \"zz.weight\" (4 elements, u 0, v 4)"),
        (
            |s| s.layers[0].v[3] = f32::NAN,
            "do not add up for rank 0: layer \"zz.weight\": v is NaN at element 3",
        ),
    ];
    for (change, why) in changes {
        let mut states = vec![state(0, 2), state(1, 2)];
        change(&mut states[1]);
        let error = refused(states);
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_sum_that_overflows_is_refused() {
    let mut states = vec![state(0, 2), state(1, 2)];
    states.iter_mut().for_each(|state| state.layers[0].u[1] = f32::MAX);
    let error = Saved::reshare(states, 0, 1).unwrap_err();
    assert!(
        matches!(&error, StateError::Sum { rank: 0, why } if why.contains("u is inf at element 1")),
        "{error}"
    );
}

/// A layer of Adam.
fn adam(rank: usize, ranks: usize) -> Saved {
    let mut saved = state(rank, ranks);
    let r = rank as f32;
    saved.layers[0].momentum = Momentum::Adam(Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8 });
    let own = vec![1.0 + r, 0.0, 4.0, MIN_SUBNORMAL];
    saved.layers[0].second = Some(SecondMoment { own, given: vec![0.5; 4], steps: 7 + rank as u64 });
    saved
}

#[test]
fn second_moments_come_back_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let mut saved = adam(1, 2);
    saved.write(&path).unwrap();
    assert_eq!(Saved::read(&path).unwrap(), saved);
    if let Some(second) = &mut saved.layers[0].second {
        second.given.clear();
    }
    saved.write(&path).unwrap();
    assert_eq!(Saved::read(&path).unwrap(), saved);
    assert_ne!(saved.checksum(), adam(1, 2).checksum());
}

#[test]
fn second_moments_of_other_numbers_of_ranks_are_means() {
    let second = |saved: Saved| saved.layers[0].second.clone().unwrap();
    let all = || vec![adam(0, 2), adam(1, 2)];
    assert_eq!(second(Saved::reshare(all(), 1, 2).unwrap()), second(adam(1, 2)));
    let joined = Saved::reshare(all(), 0, 1).unwrap();
    assert_eq!(joined.layers[0].u, [3.0, -4.0, 0.0, 8.0], "momenta are added");
    assert_eq!(
        second(joined),
        SecondMoment { own: vec![1.5, 0.0, 4.0, MIN_SUBNORMAL], given: Vec::new(), steps: 8 }
    );
    let beyond = Saved::reshare(all(), 2, 3).unwrap();
    let first = SecondMoment { given: Vec::new(), ..second(adam(0, 2)) };
    assert_eq!((second(beyond.clone()), beyond.layers[0].u[0]), (first, 0.0));
}

#[test]
fn second_moments_that_make_no_sense_are_refused() {
    type Change = fn(&mut LayerState);
    let changes: [(Change, &str); 5] = [
        (|l| l.second = None, "a second moment is Adam's, and Adam has one"),
        (|l| l.momentum = Momentum::Plain(0.9), "a second moment is Adam's, and Adam has one"),
        (|l| l.second.as_mut().unwrap().own[1] = -1.0, "the second moment is -1 at element 1"),
        (|l| l.second.as_mut().unwrap().given.truncate(3), "its second moment 4 and 3"),
        (
            |l| l.momentum = Momentum::Adam(Adam { eps: 0.0, ..Adam::default() }),
            "eps must be a number large enough to divide by, got 0",
        ),
    ];
    for (change, says) in changes {
        let mut saved = adam(0, 1);
        change(&mut saved.layers[0]);
        let refused = saved.check().unwrap_err();
        assert!(refused.contains(says), "{refused}");
    }
}
