"""Shared training entrypoint: loop, step, state, checkpoints, data order, precision, parallelism, optimizer."""
