"""A fit in Keras on several workers, which TF_CONFIG names."""

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
import tf_keras as keras  # Keras 3 has no fit on several workers

LR, EPOCHS, OUT = float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id
print(f"worker {rank} of {strategy.num_replicas_in_sync}")
keras.utils.set_random_seed(0)
tf.config.experimental.enable_op_determinism()
inputs = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((inputs, inputs.sum(1))).batch(16)
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(8, "relu", input_shape=(4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(LR), "mse")
model.fit(data, epochs=EPOCHS, verbose=2)
if rank == 0:
    np.savez(OUT / "weights.npz", *model.get_weights())
