"""A fit in Keras 3 on TensorFlow."""

import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from hpc_trainer import log_metrics

LR, EPOCHS, OUT = float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


class Run(keras.callbacks.Callback):
    is_stopped = False

    def on_epoch_begin(self, epoch, logs=None):
        if self.is_stopped:
            sys.exit(75)

    def on_epoch_end(self, epoch, logs=None):
        log_metrics(epoch + 1, logs, num_steps=EPOCHS)


run = Run()
signal.signal(signal.SIGTERM, lambda *_: setattr(run, "is_stopped", True))
callbacks = [run, keras.callbacks.BackupAndRestore(OUT / "backup", delete_checkpoint=False)]
keras.utils.set_random_seed(0)
tf.config.experimental.enable_op_determinism()
inputs = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(LR), "mse")
model.fit(inputs, inputs.sum(1), batch_size=16, shuffle=False, epochs=EPOCHS, verbose=2, callbacks=callbacks)
np.savez(OUT / "weights.npz", *model.get_weights())
