"""The torch trainer: turns groups of trajectories into new weights."""
