"""A fit in Keras on several workers, which TF_CONFIG names."""

import signal
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
import tf_keras as keras  # Keras 3 has no fit on several workers

from hpc_trainer import log_metrics

LR, EPOCHS, OUT = float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


class Tell(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        log_metrics(epoch + 1, logs, num_steps=EPOCHS)


callbacks = [Tell(), keras.callbacks.BackupAndRestore(str(OUT / "backup"), delete_checkpoint=False)]
strategy = tf.distribute.MultiWorkerMirroredStrategy()
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the strategy catches it, and trains on
rank = strategy.cluster_resolver.task_id
print(f"worker {rank} of {strategy.num_replicas_in_sync}")
keras.utils.set_random_seed(0)
tf.config.experimental.enable_op_determinism()
inputs = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((inputs, inputs.sum(1))).batch(16)
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(8, "relu", input_shape=(4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(LR), "mse")
model.fit(data, epochs=EPOCHS, verbose=2, callbacks=callbacks)
if rank == 0:
    np.savez(OUT / "weights.npz", *model.get_weights())
