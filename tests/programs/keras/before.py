"""A fit in Keras 3 on TensorFlow."""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

LR, EPOCHS, OUT = float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

keras.utils.set_random_seed(0)
tf.config.experimental.enable_op_determinism()
inputs = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(LR), "mse")
model.fit(inputs, inputs.sum(1), batch_size=16, shuffle=False, epochs=EPOCHS, verbose=2)
np.savez(OUT / "weights.npz", *model.get_weights())
