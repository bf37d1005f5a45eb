"""A fit in JAX; weights are saved by NumPy."""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

LR, STEPS, OUT = float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


@jax.jit
def update(weights, key):
    inputs = jax.random.normal(key, (8, 4))
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((inputs @ w - inputs.sum(1)) ** 2))(weights)
    return weights - LR * gradient, loss


weights = jnp.zeros(4)
for step in range(1, STEPS + 1):
    weights, loss = update(weights, jax.random.key(step))
    time.sleep(0.02)
    if step % 10 == 0:
        print(f"step {step}: loss {loss:.4f}", flush=True)
        np.savez(OUT / "weights.npz", step=step, weights=weights)
