//! The layers of a model that is not built in: one line per parameter tensor, its name and its shape.
//!
//! In PyTorch: `for name, p in model.named_parameters(): print(name, *(p.shape or (1,)))`.

use anyhow::{Context, Result, bail};
use redsync_engine::{Kind, Layer};
use std::collections::BTreeSet;
use std::path::Path;

/// Reads a layer file.
pub fn read(path: &Path) -> Result<Vec<Layer>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&text).with_context(|| path.display().to_string())
}

/// One-dimensional tensors are biases or norms; the last of the others is the output.
fn parse(text: &str) -> Result<Vec<Layer>> {
    let mut layers = Vec::new();
    let mut names = BTreeSet::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or("").trim();
        let mut words = line.split_whitespace();
        let Some(name) = words.next() else { continue };
        let shape: Vec<&str> = words.collect();
        if shape.is_empty() {
            bail!(
                "line {number}: {name} has no shape: expected its name and its dimensions, as in 'conv1.weight 64 3 3 3'; a single number has \
                 the dimension 1"
            );
        }
        let mut size = 1usize;
        for dimension in &shape {
            let elements = dimension.parse::<u32>().ok().filter(|d| *d > 0);
            let Some(elements) = elements else {
                bail!("line {number}: {name} has the dimension '{dimension}': expected a number from 1 on");
            };
            size = size.saturating_mul(elements as usize);
        }
        if size > u32::MAX as usize {
            bail!("line {number}: {name} has {size} elements: at most {} are possible", u32::MAX);
        }
        if !names.insert(name) {
            bail!("line {number}: {name} was there before");
        }
        layers.push(Layer::new(name, size, if shape.len() > 1 { Kind::Weight } else { Kind::BiasOrNorm }));
    }
    if layers.is_empty() {
        bail!("no layers: expected one per line, its name and its dimensions, as in 'conv1.weight 64 3 3 3'");
    }
    if let Some(last) = layers.iter_mut().rev().find(|layer| layer.kind == Kind::Weight) {
        last.kind = Kind::Output;
    }
    Ok(layers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_shapes_become_layers() {
        let layers =
            parse("# a model\nconv.weight 64 3 3 3\nconv.bias 64\n\nfc.weight 10 64 # last\nfc.bias 10\n")
                .unwrap();
        let expected = [
            Layer::new("conv.weight", 1728, Kind::Weight),
            Layer::new("conv.bias", 64, Kind::BiasOrNorm),
            Layer::new("fc.weight", 640, Kind::Output),
            Layer::new("fc.bias", 10, Kind::BiasOrNorm),
        ];
        assert_eq!(layers, expected);
    }

    #[test]
    fn what_is_no_layer_file_is_refused_with_its_line() {
        let message = |text| parse(text).unwrap_err().to_string();
        assert!(message("").starts_with("no layers"));
        assert!(message("# nothing\n\n").starts_with("no layers"));
        assert!(message("a 1 2\nb").starts_with("line 2: b has no shape"));
        assert!(message("a 1 -2").contains("'-2'"));
        assert!(message("a 4000000000 2").contains("at most"));
        assert!(message("a 1 2\na 3").starts_with("line 2: a was there before"));
    }
}
