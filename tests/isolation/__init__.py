"""Tests of `tbench2_env.isolation` with the real kernel: `rig` for whole sandboxes, `child` for single system calls."""
