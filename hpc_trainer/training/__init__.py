"""The shared training entrypoint: loop, step, state, checkpoints, data order, precision, parallel, optimizer."""
