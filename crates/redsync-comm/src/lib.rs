//! Collectives among the ranks of a group.
