//! A state as a file's description and vectors, and back: u, v and extra vectors are the tensors `u/NAME`, `v/NAME` and
//! `extra/NAME`, everything else is text.

use super::{Identity, LayerState, Saved};
use crate::file::{About, Content};
use redsync_core::{Memory, Momentum};
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
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Form {
    None,
    Plain,
    Nesterov,
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
        };
        LayerEntry {
            name: layer.name.clone(),
            size: layer.size,
            has_u: !layer.u.is_empty(),
            momentum: (form, layer.momentum.coefficient().to_bits()),
            memory: layer.memory.bits(),
            rate: layer.rate.map(f32::to_bits),
        }
    }

    fn momentum(&self) -> Momentum {
        let coefficient = f32::from_bits(self.momentum.1);
        match self.momentum.0 {
            Form::None => Momentum::None,
            Form::Plain => Momentum::Plain(coefficient),
            Form::Nesterov => Momentum::Nesterov(coefficient),
        }
    }

    fn memory(&self) -> Result<Memory, String> {
        let none = || format!("layer {:?}: the remembered threshold is none", self.name);
        Memory::from_bits(self.memory).ok_or_else(none)
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
    About::from(
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
    )
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
        let (momentum, memory) = (entry.momentum(), entry.memory()?);
        let rate = entry.rate.map(f32::from_bits);
        Ok(LayerState { name: entry.name, size: entry.size, momentum, u, v, memory, rate })
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

/// What a JSON list says; its errors are kept on one line whatever they quote.
fn list<T: for<'a> Deserialize<'a>>(about: &About, key: &str) -> Result<T, String> {
    let unreadable =
        |error: serde_json::Error| format!("its {key} cannot be read: {}", error.to_string().escape_debug());
    serde_json::from_str(string(about, key)?).map_err(unreadable)
}
