//! Full selection: the reference that the others are tested against, and the paper's slow baseline.

use crate::kernel::Key;
use crate::phase::Phase;
use crate::workspace::Workspace;

pub(crate) fn choose(v: &[f32], phase: Phase, k: usize, workspace: &mut Workspace) {
    let lens = phase.lens();
    let keys = &mut workspace.keys;
    keys.clear();
    keys.extend(
        v.iter().enumerate().filter(|(_, x)| lens.see(**x) > 0.0).map(|(i, x)| Key::new(*x, i as u32)),
    );
    if keys.len() > k {
        keys.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        keys.truncate(k);
        keys.sort_unstable_by_key(|key| key.index());
    }
}
