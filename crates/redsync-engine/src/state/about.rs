//! A state as a file's description and vectors, and back: u, v and extra vectors are the tensors `u/NAME`, `v/NAME` and
//! `extra/NAME`, second moments `second/NAME` and `given/NAME`, what an owner keeps `kept/NAME`; everything else is text.

use super::{Cut, Identity, Kept, LayerState, Saved, SecondMoment};
use crate::file::{About, Content};
use redsync_core::{Adam, Memory, Momentum};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Serialize, Deserialize)]
struct LayerEntry {
    name: String,
    size: usize,
    /// Whether there is a u.
    has_u: bool,
    /// The form of the momentum, and the bits of its coefficient: decimals might not come back as the same number.
    momentum: (Form, u32),
    /// For each phase the bits of threshold and least, and searched.
    memory: [[u32; 3]; 3],
    /// The bits of the learning rate; older files have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rate: Option<u32>,
    /// What only Adam has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    adam: Option<AdamEntry>,
    /// What only an owner has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kept: Option<KeptEntry>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
struct KeptEntry {
    size: usize,
    cut: Cut,
    memory: [[u32; 3]; 3],
    rate: Option<u32>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
struct AdamEntry {
    /// The bits of beta2 and eps; beta1 is the coefficient of the momentum.
    beta2: u32,
    eps: u32,
    steps: u64,
    /// Whether a second moment was given.
    has_given: bool,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Form {
    None,
    Plain,
    Nesterov,
    Adam,
}

#[derive(Serialize, Deserialize)]
struct ExtraEntry {
    name: String,
    size: usize,
}

impl LayerEntry {
    fn of(layer: &LayerState) -> Self {
        let form = match layer.momentum {
            Momentum::None => Form::None,
            Momentum::Plain(_) => Form::Plain,
            Momentum::Nesterov(_) => Form::Nesterov,
            Momentum::Adam(_) => Form::Adam,
        };
        let adam = match (layer.momentum, &layer.second) {
            (Momentum::Adam(Adam { beta2, eps, .. }), Some(second)) => Some(AdamEntry {
                beta2: beta2.to_bits(),
                eps: eps.to_bits(),
                steps: second.steps,
                has_given: !second.given.is_empty(),
            }),
            _ => None,
        };
        LayerEntry {
            name: layer.name.clone(),
            size: layer.size,
            has_u: !layer.u.is_empty(),
            momentum: (form, layer.momentum.coefficient().to_bits()),
            memory: layer.memory.bits(),
            rate: layer.rate.map(f32::to_bits),
            adam,
            kept: layer.kept.as_ref().map(|kept| KeptEntry {
                size: kept.v.len(),
                cut: kept.cut,
                memory: kept.memory.bits(),
                rate: kept.rate.map(f32::to_bits),
            }),
        }
    }

    fn momentum(&self) -> Result<Momentum, String> {
        let coefficient = f32::from_bits(self.momentum.1);
        Ok(match (self.momentum.0, self.adam) {
            (Form::None, None) => Momentum::None,
            (Form::Plain, None) => Momentum::Plain(coefficient),
            (Form::Nesterov, None) => Momentum::Nesterov(coefficient),
            (Form::Adam, Some(AdamEntry { beta2, eps, .. })) => Momentum::Adam(Adam {
                beta1: coefficient,
                beta2: f32::from_bits(beta2),
                eps: f32::from_bits(eps),
            }),
            _ => return Err(format!("layer {:?}: a second moment is Adam's, and Adam has one", self.name)),
        })
    }

    fn memory(&self, bits: [[u32; 3]; 3]) -> Result<Memory, String> {
        let none = || format!("layer {:?}: the remembered threshold is damaged", self.name);
        Memory::from_bits(bits).ok_or_else(none)
    }
}

fn tensor_name(kind: &str, name: &str) -> String {
    format!("{kind}/{name}")
}

/// All vectors, by the names that they have in the file.
pub(super) fn tensors(saved: &Saved) -> BTreeMap<String, &[f32]> {
    let mut tensors = BTreeMap::new();
    for layer in &saved.layers {
        tensors.insert(tensor_name("v", &layer.name), &layer.v[..]);
        if !layer.u.is_empty() {
            tensors.insert(tensor_name("u", &layer.name), &layer.u[..]);
        }
        if let Some(kept) = &layer.kept {
            tensors.insert(tensor_name("kept", &layer.name), &kept.v[..]);
        }
        if let Some(SecondMoment { own, given, .. }) = &layer.second {
            tensors.insert(tensor_name("second", &layer.name), &own[..]);
            if !given.is_empty() {
                tensors.insert(tensor_name("given", &layer.name), &given[..]);
            }
        }
    }
    tensors.extend(saved.extra.iter().map(|(name, x)| (tensor_name("extra", name), &x[..])));
    tensors
}

/// Everything but the vectors.
pub(super) fn of(saved: &Saved) -> About {
    let extra = |(name, values): &(String, Vec<f32>)| ExtraEntry { name: name.clone(), size: values.len() };
    let layers: Vec<_> = saved.layers.iter().map(LayerEntry::of).collect();
    let extra: Vec<_> = saved.extra.iter().map(extra).collect();
    let json = |value: serde_json::Result<String>| value.unwrap_or_default();
    let mut about = About::from(
        [
            ("step", saved.step.to_string()),
            ("rank", saved.rank.to_string()),
            ("ranks", saved.ranks.to_string()),
            ("identity", json(serde_json::to_string(&saved.identity))),
            ("replica_hash", format!("{:016x}", saved.replica_hash)),
            ("layers", json(serde_json::to_string(&layers))),
            ("extra", json(serde_json::to_string(&extra))),
        ]
        .map(|(name, text)| (name.to_string(), text)),
    );
    // Without hosts a state is what it was before there were any.
    if let Some(seat) = saved.seat {
        about.insert("seat".into(), json(serde_json::to_string(&seat)));
    }
    about
}

/// Joins the description with the vectors; none may be missing, and none may be left.
pub(super) fn join(content: Content) -> Result<Saved, String> {
    let Content { about, mut tensors } = content;
    let layers: Vec<LayerEntry> = list(&about, "layers")?;
    let extra: Vec<ExtraEntry> = list(&about, "extra")?;
    let identity: Identity = list(&about, "identity")?;
    let mut take = |kind: &str, name: &str, size: usize| {
        let name = tensor_name(kind, name);
        match tensors.remove(&name) {
            None => Err(format!("tensor {name:?} is missing, or listed twice")),
            Some(values) if values.len() != size => {
                Err(format!("tensor {name:?} has {} elements, expected {size}", values.len()))
            }
            Some(values) => Ok(values),
        }
    };
    let mut layer = |entry: LayerEntry| {
        let u = if entry.has_u { take("u", &entry.name, entry.size)? } else { Vec::new() };
        let v = take("v", &entry.name, entry.size)?;
        let (momentum, memory) = (entry.momentum()?, entry.memory(entry.memory)?);
        let rate = entry.rate.map(f32::from_bits);
        let mut second = |AdamEntry { steps, has_given, .. }: AdamEntry| {
            let own = take("second", &entry.name, entry.size)?;
            let given = if has_given { take("given", &entry.name, entry.size)? } else { Vec::new() };
            Ok::<_, String>(SecondMoment { own, given, steps })
        };
        let second = entry.adam.map(&mut second).transpose()?;
        let kept = match entry.kept {
            None => None,
            Some(KeptEntry { size, cut, memory, rate }) => Some(Kept {
                cut,
                v: take("kept", &entry.name, size)?,
                memory: entry.memory(memory)?,
                rate: rate.map(f32::from_bits),
            }),
        };
        Ok(LayerState { name: entry.name, size: entry.size, momentum, u, v, memory, rate, second, kept })
    };
    let layers = layers.into_iter().map(&mut layer).collect::<Result<_, String>>()?;
    let mut vector = |entry: ExtraEntry| Ok((take("extra", &entry.name, entry.size)?, entry.name));
    let extra = extra.into_iter().map(&mut vector).collect::<Result<Vec<_>, String>>()?;
    if let Some(name) = tensors.keys().next() {
        return Err(format!("tensor {name:?} belongs to no layer"));
    }
    let replica_hash = u64::from_str_radix(string(&about, "replica_hash")?, 16);
    Ok(Saved {
        step: number(&about, "step")?,
        rank: number(&about, "rank")?,
        ranks: number(&about, "ranks")?,
        identity,
        seat: about.contains_key("seat").then(|| list(&about, "seat")).transpose()?,
        replica_hash: replica_hash.map_err(|_| "its replica_hash is not a number")?,
        layers,
        extra: extra.into_iter().map(|(values, name)| (name, values)).collect(),
    })
}

fn string<'a>(about: &'a About, key: &str) -> Result<&'a str, String> {
    about.get(key).map(String::as_str).ok_or_else(|| format!("its header has no {key}"))
}

fn number<T: std::str::FromStr>(about: &About, key: &str) -> Result<T, String> {
    string(about, key)?.parse().map_err(|_| format!("its {key} is not a number"))
}

/// What JSON says; its errors are kept on one line whatever they quote.
fn list<T: for<'a> Deserialize<'a>>(about: &About, key: &str) -> Result<T, String> {
    let unreadable =
        |error: serde_json::Error| format!("its {key} cannot be read: {}", error.to_string().escape_debug());
    serde_json::from_str(string(about, key)?).map_err(unreadable)
}
